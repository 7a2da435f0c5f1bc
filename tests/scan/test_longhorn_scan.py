"""Longhorn's cell against the float64 loop, and its promise never to hold the states of all positions."""

import os
import subprocess
import sys

import pytest
import torch
from oracle import REALS, TOLERANCE, mask_and_reset, random, repeated

from hf_recurrent.scan import longhorn_scan

BACKENDS = ["chunked", "cpu"]
# (batch, length, channels, m)
SHAPES = [(1, 1, 1, 1), (3, 2, 33, 16), (2, 7, 64, 5), (1, 33, 130, 16), (2, 300, 33, 3), (1, 40, 768, 4)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def inputs_for(batch, length, channels, m, dtype):
    wide = [random(batch, length, size, dtype=dtype) for size in (channels, channels, m, m)]
    state_dtype = torch.promote_types(dtype, torch.float32)
    return [*wide, random(batch, channels, m, dtype=state_dtype)]


def run(inputs, weights, backend, **options):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    o, final = longhorn_scan(*leaves, backend=backend, **options)
    loss = (o.double() * weights[0]).sum() + (final.double() * weights[1]).sum()
    return [o, final, *torch.autograd.grad(loss, leaves)]


def compare(inputs, backend, device="cpu", runs=1, **options):
    dtype = inputs[0].dtype
    weights = random(*inputs[0].shape, dtype=dtype).double(), random(*inputs[4].shape, dtype=torch.float64)
    at = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    moved = [x.to(device) for x in inputs], [w.to(device) for w in weights]
    got = repeated(runs, lambda: run(*moved, backend, **at))
    want = run([x.double() for x in inputs], weights, "reference", **options)
    for name, x, y in zip(["o", "final", "x", "dt", "k", "q", "state"], got, want, strict=True):
        assert x.shape == y.shape and not x.isnan().any(), name
        error, scale = (x.to(y) - y).abs().max().item(), y.abs().max().item()
        assert error <= 4 * TOLERANCE[dtype] * max(scale, 1), f"{name}: {error:.3g} of {scale:.3g}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_the_loop(backend, dtype, shape):
    compare(inputs_for(*shape, dtype), backend)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("with_mask", [False, True], ids=["all", "mask"])
@pytest.mark.parametrize("with_reset", [False, True], ids=["one", "reset"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_options(backend, with_reset, with_mask, reverse, monkeypatch):
    monkeypatch.setattr("hf_recurrent.scan.longhorn_plain.CHUNK_ELEMENTS", 1)  # the plain form in chunks of sqrt(L)
    mask, reset = mask_and_reset(4, 37)
    options = {"mask": mask if with_mask else None, "reset": reset if with_reset else None, "reverse": reverse}
    compare(inputs_for(4, 37, 33, 5, torch.float32), backend, **options)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("length", [1024, 1041])
def test_checkpoints_far_apart(length, reverse):
    """From 65 tiles on, backward keeps the states before parts of several tiles."""
    mask, reset = mask_and_reset(3, length)
    compare(inputs_for(3, length, 17, 5, torch.float32), "cpu", mask=mask, reset=reset, reverse=reverse)
    compare(inputs_for(1, length, 3, 9, torch.float64), "cpu", reverse=reverse)


@pytest.mark.parametrize("channels", [129, 257])
@pytest.mark.parametrize("threads", [2, 3])
def test_pieces_of_the_channels(threads, channels):
    """Of one row for several threads: blocks of which the last is not full."""
    torch.set_num_threads(threads)
    try:
        for dtype in (torch.float32, torch.float64):
            compare(inputs_for(1, 35, channels, 9, dtype), "cpu")
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_padding_holds_anything(backend, reverse):
    """What is not finite at padding, but for q, which reads the state there too, reaches nothing else."""
    mask, reset = mask_and_reset(3, 37)
    for bad in (float("nan"), float("inf")):
        inputs = inputs_for(3, 37, 21, 5, torch.float32)
        for x in inputs[:3]:
            x[~mask] = bad
        leaves = [x.requires_grad_() for x in inputs]
        o, final = longhorn_scan(*leaves, mask=mask, reset=reset, reverse=reverse, backend=backend)
        *grads, grad_state = torch.autograd.grad(o.sum() + final.sum(), leaves)
        assert all(x.isfinite().all() for x in (o, final, grad_state, *grads))
        assert not any(grad[~mask].any() for grad in grads[:3])


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("reverse", [False, True])
def test_reset_stops_what_is_not_finite(backend, reverse):
    """A document with a NaN among its keys spoils the gradients of no other in its row."""
    inputs = inputs_for(1, 20, 3, 2, torch.float64)
    reset = torch.zeros(1, 20, dtype=torch.bool)
    reset[0, [8, 14]] = True
    inputs[2][0, 10] = float("nan")
    weights = random(1, 20, 3, dtype=torch.float64), torch.zeros(1, 3, 2, dtype=torch.float64)
    _, _, *grads, _ = run(inputs, weights, backend, reset=reset, reverse=reverse)
    for grad in grads:
        assert grad[:, :8].isfinite().all() and grad[:, 14:].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(2, 5, 3, 0), (2, 5, 0, 4), (2, 0, 3, 4), (0, 5, 3, 4)], ids=str)
def test_empty(backend, shape):
    """No state reads as zero, and gives no gradient; no position hands the state on."""
    *inputs, state = inputs_for(*shape, torch.float32)
    inputs = [x.requires_grad_() for x in (*inputs, state)]
    o, final = longhorn_scan(*inputs, backend=backend)
    torch.testing.assert_close(o, torch.zeros_like(inputs[0]))
    *grads, grad_state = torch.autograd.grad(o.sum() + final.sum(), inputs)
    for grad, x in zip(grads, inputs[:4], strict=True):
        torch.testing.assert_close(grad, torch.zeros_like(x))
    if shape[1] == 0:
        torch.testing.assert_close(final, inputs[4])
        torch.testing.assert_close(grad_state, torch.ones_like(grad_state))


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_mode_says_no(backend):
    inputs = tuple(inputs_for(1, 4, 3, 2, torch.float32))
    x, dual = inputs[0], torch.autograd.forward_ad.make_dual
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        longhorn_scan(dual(x, x), *inputs[1:], backend=backend)
    with pytest.raises(NotImplementedError, match="work with backend='reference'"):
        torch.func.jvp(lambda *x: longhorn_scan(*x, backend=backend)[0], inputs, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend):
    mask, reset = mask_and_reset(2, 5)
    inputs = [x.requires_grad_() for x in inputs_for(2, 5, 3, 2, torch.float64)]
    for options in ({}, {"mask": mask, "reset": reset, "reverse": True}):
        assert torch.autograd.gradcheck(lambda *x, o=options: longhorn_scan(*x, backend=backend, **o), inputs)


def test_strided_inputs():
    packed = random(2, 30, 2 * 70 + 2 * 4, dtype=torch.float32)
    views = packed.split([70, 70, 4, 4], dim=2)
    got = longhorn_scan(*views, backend="cpu")
    want = longhorn_scan(*(x.contiguous() for x in views), backend="cpu")
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    x = views[0].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(longhorn_scan(x, *views[1:], backend="cpu")[0], want[0])


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_split_anywhere(backend):
    *inputs, state = inputs_for(2, 20, 7, 3, torch.float64)
    o, final = longhorn_scan(*inputs, state, backend=backend)
    first, carried = longhorn_scan(*(x[:, :13] for x in inputs), state, backend=backend)
    second, last = longhorn_scan(*(x[:, 13:] for x in inputs), carried, backend=backend)
    torch.testing.assert_close(torch.cat([first, second], 1), o, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(last, final, rtol=1e-13, atol=1e-13)


def test_threads_change_nothing_much_and_repeats_nothing():
    inputs = inputs_for(3, 50, 200, 8, torch.float32)
    weights = random(3, 50, 200, dtype=torch.float64), random(3, 200, 8, dtype=torch.float64)
    try:
        results = {}
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results[threads] = run(inputs, weights, "cpu")
            for x, y in zip(results[threads], run(inputs, weights, "cpu"), strict=True):
                assert torch.equal(x, y)
        for threads in (2, 4):
            for x, y in zip(results[1], results[threads], strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(1)


def test_compiled_without_a_break():
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    inputs = [x.requires_grad_() for x in inputs_for(2, 12, 9, 4, torch.float32)]
    results = []
    for function in (longhorn_scan, torch.compile(longhorn_scan, fullgraph=True)):
        o, final = function(*inputs)
        results.append([o, final, *torch.autograd.grad(o.square().sum() + final.sum(), inputs)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)
    torch.library.opcheck(torch.ops.hf_recurrent.longhorn, (*inputs, None, False, "cpu"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_does_not_grow_with_the_state(backend):
    """Peak memory of a training pass at m = 64 over that at m = 16: the states of all positions would add 200 MB."""
    code = f"""
import resource, sys, torch
from hf_recurrent.scan import longhorn_scan
m, backend = int(sys.argv[1]), {backend!r}
def run(length):
    x, dt = torch.randn(2, 1, length, 128, requires_grad=True)
    k, q = torch.randn(2, 1, length, m, requires_grad=True)
    o, _ = longhorn_scan(x, dt, k, q, backend=backend)
    o.sum().backward()
run(8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(8192)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    # Freed memory goes straight back to the system, so that the peak is of what is alive, not of the heap's holes.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    peaks = []
    for m in (16, 64):
        done = subprocess.run([sys.executable, "-c", code, str(m)], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout) * (1 if sys.platform == "darwin" else 1024))
    states = 8192 * 128 * 4 * (64 - 16)
    assert peaks[1] - peaks[0] < states / 4, f"{peaks[0] / 2**20:.0f} MiB at m = 16, {peaks[1] / 2**20:.0f} at m = 64"


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"dt": torch.rand(2, 5, 4)}, ValueError, "x and dt must have one shape"),
        ({"k": torch.rand(2, 5, 4)}, ValueError, r"k and q must have the shape .* got \(2, 5, 4\), \(2, 5, 2\)"),
        ({"q": torch.rand(5, 2)}, ValueError, "q must have three dimensions"),
        ({"initial_state": torch.rand(2, 3)}, ValueError, r"initial_state must be real, .* = \(2, 3, 2\)"),
        ({"x": torch.rand(2, 5, 3).to(torch.complex64)}, TypeError, "x must be real"),
        ({"mask": torch.ones(2, 4, dtype=torch.bool)}, ValueError, "mask must have the shape"),
        ({"backend": "cuda"}, ValueError, "backend 'cuda'"),
    ],
)
def test_bad_arguments(changes, error, message):
    arguments = {
        "x": torch.rand(2, 5, 3),
        "dt": torch.rand(2, 5, 3),
        "k": torch.rand(2, 5, 2),
        "q": torch.rand(2, 5, 2),
    }
    with pytest.raises(error, match=message):
        longhorn_scan(**{**arguments, **changes})
