"""GateLoop's heads of d_k x d_v states against the float64 loop, and the promise never to hold all of them."""

import os
import subprocess
import sys

import pytest
import torch
from oracle import TOLERANCE, coefficients, mask_and_reset, random, repeated
from torch.utils._python_dispatch import TorchDispatchMode

from hf_recurrent.scan import gateloop_heads_scan

# (batch, length, heads, d_k, d_v): every size of a head, odd lengths, more and fewer heads than a vector has lanes;
# then heads that fill vectors, whose numbers the CPU's kernels turn where they lie, and some that need a few zeros
SHAPES = [
    (1, 1, 1, 1, 1), (2, 7, 3, 1, 1), (2, 33, 3, 2, 2), (3, 2, 1, 4, 4), (1, 1000, 3, 4, 4), (2, 33, 40, 8, 8),
    (2, 7, 3, 3, 5), (1, 33, 17, 5, 3), (1, 33, 3, 16, 16), (1, 7, 1, 16, 16), (1, 33, 1, 3, 37), (2, 1, 20, 8, 8),
    (2, 33, 16, 8, 8), (1, 7, 12, 64, 64), (1, 18, 32, 16, 32), (1, 5, 16, 12, 24), (1, 5, 16, 2, 4), (1, 3, 48, 1, 2),
]  # fmt: skip


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def loop(q, k, v, a, state, start, mask=None, reset=None, reverse=False):
    """The definition, in each row, with `start` where a document begins."""
    batch, length = q.shape[:2]
    a = a.expand(q.shape)
    outputs, finals = [], []
    for b in range(batch):
        h, ys = state[b], [None] * length
        for t in reversed(range(length)) if reverse else range(length):
            real = mask is None or mask[b, t]
            first = t + 1 if reverse else t  # of a document that is left, or entered
            begins = first < length and reset is not None and reset[b, first] and (mask is None or mask[b, first])
            if begins:
                h = torch.zeros_like(h) if start is None else start
            if real:
                h = a[b, t, :, :, None] * h + k[b, t, :, :, None] * v[b, t, :, None, :]
            ys[t] = (q[b, t, :, :, None] * (h.real if h.is_complex() else h)).sum(-2)
        outputs.append(torch.stack(ys))
        finals.append(h)
    return torch.stack(outputs), torch.stack(finals)


def inputs_for(batch, length, heads, rows, columns, dtype, complex_state=True, shared=()):
    """q, k, v, a and an initial state; a is of size 1 along the dimensions in `shared`."""
    state_dtype = torch.promote_types(dtype, torch.float32)
    state_dtype = state_dtype.to_complex() if complex_state else state_dtype
    q, k = (random(batch, length, heads, rows, dtype=dtype) for _ in "qk")
    sizes = [1 if i in shared else n for i, n in enumerate(q.shape)]
    # Below one, lest rounding add up over the sequence, as it does in the loop too.
    a = 0.99 * coefficients(*sizes, dtype=state_dtype)
    v = random(batch, length, heads, columns, dtype=dtype)
    return [q, k, v, a, random(batch, heads, rows, columns, dtype=state_dtype)]


def run(scan, inputs, weights, start=None):
    """Outputs, final state and the gradients of all inputs, under fixed weights of the outputs."""
    leaves = [x.detach().requires_grad_() for x in (*inputs, *([] if start is None else [start]))]
    y, final = scan(*leaves[:5], leaves[5] if start is not None else None)
    loss = (y.double() * weights[0]).sum() + (final * weights[1].to(final.dtype)).sum().real
    return [y, final, *torch.autograd.grad(loss, leaves, materialize_grads=True)]


def compare(inputs, backend, device="cpu", start=None, runs=1, **options):
    dtype, state = inputs[0].dtype, inputs[4]
    wide = torch.complex128 if state.is_complex() else torch.float64
    weights = random(*inputs[2].shape, dtype=dtype).double(), random(*state.shape, dtype=wide)
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    on_device = [None if x is None else x.to(device) for x in (*inputs, start, *weights)]

    def scan(*x):
        return gateloop_heads_scan(*x[:5], reset_state=x[5], backend=backend, **moved)

    got = repeated(runs, lambda: run(scan, on_device[:5], on_device[6:], on_device[5]))
    exact = [x.double() for x in inputs[:3]] + [x.to(wide) for x in inputs[3:]]
    exact_start = None if start is None else start.to(wide)
    want = run(lambda *x: loop(*x, **options), exact, weights, exact_start)
    names = ["y", "final", "q", "k", "v", "a", "state", "start"]
    for name, x, y in zip(names, got, want, strict=False):
        assert x.shape == y.shape and not x.isnan().any(), name
        error, scale = (x.to(y) - y).abs().max().item(), y.abs().max().item()
        assert error <= 4 * TOLERANCE[dtype] * max(scale, 1), f"{name}: {error:.3g} of {scale:.3g}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("complex_state", [True, False], ids=["complex", "real"])
def test_against_the_loop(shape, complex_state):
    compare(inputs_for(*shape, torch.float32, complex_state), "cpu")


@pytest.mark.parametrize(
    "dtype, complex_state",
    [(torch.float64, True), (torch.float64, False), (torch.bfloat16, True), (torch.float16, True)],
    ids=str,
)
def test_dtypes(dtype, complex_state):
    compare(inputs_for(2, 33, 3, 5, 6, dtype, complex_state), "cpu")
    compare(inputs_for(1, 33, 16, 8, 8, dtype, complex_state), "cpu")
    compare(inputs_for(1, 17, 12, 16, 32, dtype, complex_state, shared=(3,)), "cpu")


def test_mixed_dtypes():
    """Keys of 16 bits beside wide transitions, as a model has them; a double makes all double."""
    q, k, v, a, state = inputs_for(2, 9, 3, 4, 2, torch.bfloat16)
    y, final = gateloop_heads_scan(q, k, v, a, state)
    assert y.dtype is torch.bfloat16 and final.dtype is torch.complex64
    y, final = gateloop_heads_scan(q, k, v, a.real.bfloat16(), state.real)
    assert y.dtype is torch.bfloat16 and final.dtype is torch.float32
    for inputs in [(q, k, v.double(), a, state), (q, k, v, a.to(torch.complex128), state)]:
        for backend in ("chunked", "cpu"):
            y, final = gateloop_heads_scan(*inputs, backend=backend)
            assert y.dtype is torch.float64 and final.dtype is torch.complex128


@pytest.mark.parametrize("backend", ["reference", "chunked", "cpu"])
@pytest.mark.parametrize("with_mask", [False, True], ids=["all", "mask"])
@pytest.mark.parametrize("complex_state", [True, False], ids=["complex", "real"])
def test_options(backend, with_mask, complex_state):
    mask, reset = mask_and_reset(4, 37)
    options = {"mask": mask if with_mask else None, "reset": reset}
    for columns in (5, 1):
        inputs = inputs_for(4, 37, 3, 4, columns, torch.float32, complex_state)
        start = random(3, 4, columns, dtype=inputs[4].dtype)
        compare(inputs, backend, **options)
        compare(inputs, backend, start=start, **options)
        compare(inputs, backend, **options, reverse=True)


@pytest.mark.parametrize("backend", ["chunked", "cpu"])
def test_shared_transitions(backend):
    for shared in [(0,), (1,), (0, 1), (3,), (0, 1, 2, 3)]:
        compare(inputs_for(2, 9, 3, 4, 2, torch.float32, shared=shared), backend)


@pytest.mark.parametrize("reverse", [False, True])
def test_reset_stops_what_is_not_finite(reverse):
    inputs = inputs_for(1, 40, 3, 2, 3, torch.float32)
    reset = torch.zeros(1, 40, dtype=torch.bool)
    reset[0, [8, 24]] = True
    inputs[2][0, 10] = float("nan")
    weights = random(1, 40, 3, 3, dtype=torch.float64), torch.zeros(1, 3, 2, 3, dtype=torch.complex128)
    y, _, *grads, _ = run(lambda *x: gateloop_heads_scan(*x[:5], reset=reset, reverse=reverse), inputs, weights)
    for x in (y, *grads):
        assert x[:, :8].isfinite().all() and x[:, 24:].isfinite().all()


@pytest.mark.parametrize("backend", ["chunked", "cpu"])
@pytest.mark.parametrize("shape", [(2, 5, 3, 0, 4), (2, 5, 3, 4, 0), (2, 0, 3, 4, 2), (0, 5, 3, 4, 2), (2, 5, 0, 4, 2)])
def test_empty(backend, shape):
    """No state reads as zero, and gives no gradient; no position hands the state on."""
    inputs = [x.requires_grad_() for x in inputs_for(*shape, torch.float32)]
    start = torch.randn(*shape[2:], dtype=torch.complex64).requires_grad_()
    reset = torch.ones(shape[:2], dtype=torch.bool)
    y, final = gateloop_heads_scan(*inputs, backend=backend, reset=reset, reset_state=start)
    torch.testing.assert_close(y, torch.zeros_like(inputs[2]))
    loss = y.sum() + final.sum().real
    *grads, grad_state, grad_start = torch.autograd.grad(loss, [*inputs, start], allow_unused=True)
    assert not any(grad is not None and grad.any() for grad in (*grads, grad_start))
    if shape[1] == 0:
        torch.testing.assert_close(final, inputs[4])
        torch.testing.assert_close(grad_state, torch.ones_like(grad_state))


def test_gradcheck():
    mask, reset = mask_and_reset(2, 5)
    for complex_state in (True, False):
        inputs = [x.requires_grad_() for x in inputs_for(2, 5, 2, 3, 2, torch.float64, complex_state)]
        start = random(2, 3, 2, dtype=inputs[4].dtype).requires_grad_()

        def scan(*x, start=None, **options):
            return gateloop_heads_scan(*x[:5], reset_state=x[5] if len(x) > 5 else None, **options, backend="cpu")

        assert torch.autograd.gradcheck(scan, inputs)
        assert torch.autograd.gradcheck(lambda *x: scan(*x, mask=mask, reset=reset), [*inputs, start])


def test_strided_inputs():
    """As slices of a projection, with channels that do not lie side by side, and as conjugates."""
    q, k, v, a, state = inputs_for(2, 30, 3, 4, 4, torch.float32)
    want = gateloop_heads_scan(q, k, v, a, state)
    packed = torch.stack([q, k, v], dim=2)
    views = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v, a, state)]
    for got in (
        gateloop_heads_scan(*packed.unbind(2), a, state),
        gateloop_heads_scan(*views),
        gateloop_heads_scan(q, k, v, a.conj().resolve_conj().conj(), state.conj().resolve_conj().conj()),
    ):
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_one_transition_for_all_rows():
    """Of size 1, or expanded by the caller, with gradients in the shape given; also for the operator itself."""
    q, k, v, a, state = inputs_for(2, 18, 16, 8, 4, torch.float32, shared=(3,))
    a.requires_grad_()
    expanded = a.expand(q.shape)
    full = expanded.detach().clone().requires_grad_()
    grads = []
    for given, leaf in ((a, a), (expanded, a), (expanded.detach().requires_grad_(), None), (full, full)):
        y, final = gateloop_heads_scan(q, k, v, given, state, backend="cpu")
        grads.append(torch.autograd.grad(y.sum() + final.abs().sum(), given if leaf is None else leaf)[0])
    for summed in (grads[1], *(of_rows.sum(-1, keepdim=True) for of_rows in grads[2:])):
        torch.testing.assert_close(summed, grads[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grads[2], grads[3], rtol=1e-4, atol=1e-4)
    operator = torch.ops.hf_recurrent.gateloop_heads
    by_operator = expanded.detach().requires_grad_()
    y, final = operator(q, k, v, by_operator, state, None, None, False, "cpu")
    grad = torch.autograd.grad(y.sum() + final.abs().sum(), by_operator)[0]
    torch.testing.assert_close(grad, grads[3], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("expanded", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)])
def test_gradients_at_an_expanded_tensor(expanded):
    """Each of its elements has its own, where it is the expanded tensor that is asked about."""
    q, k, v, a, state = inputs_for(2, 5, 3, 4, 2, torch.float64, shared=expanded)
    want, got = (
        torch.autograd.grad(gateloop_heads_scan(q, k, v, at, state, backend=backend)[0].sum(), at)[0]
        for backend in ("reference", "cpu")
        for at in [a.expand(q.shape).detach().requires_grad_()]
    )
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", ["chunked", "cpu"])
def test_split_anywhere(backend):
    *inputs, state = inputs_for(2, 40, 3, 4, 2, torch.float64)
    y, final = gateloop_heads_scan(*inputs, state, backend=backend)
    first, carried = gateloop_heads_scan(*(x[:, :23] for x in inputs), state, backend=backend)
    second, last = gateloop_heads_scan(*(x[:, 23:] for x in inputs), carried, backend=backend)
    torch.testing.assert_close(torch.cat([first, second], 1), y, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(last, final, rtol=1e-13, atol=1e-13)


def test_threads_change_nothing_much_and_repeats_nothing():
    def scan(*inputs_and_start):
        return gateloop_heads_scan(*inputs_and_start[:5])

    for shape in [(3, 50, 33, 8, 8), (1, 50, 5, 16, 16)]:
        inputs = inputs_for(*shape, torch.float32)
        weights = random(*inputs[2].shape, dtype=torch.float64), random(*inputs[4].shape, dtype=torch.complex128)
        try:
            results = {}
            for threads in (1, 2):
                torch.set_num_threads(threads)
                results[threads], again = (run(scan, inputs, weights) for _ in range(2))
                for x, y in zip(results[threads], again, strict=True):
                    assert torch.equal(x, y)
            for x, y in zip(results[1], results[2], strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        finally:
            torch.set_num_threads(1)


@pytest.mark.parametrize("size, heads", [(8, 128), (16, 64)])
@pytest.mark.parametrize("complex_state", [True, False], ids=["complex", "real"])
def test_outputs_that_no_cache_holds(size, heads, complex_state):
    """Megabytes, written past the caches: each head's are those of the head alone."""
    inputs = [x.requires_grad_() for x in inputs_for(1, 1041, heads, size, size, torch.float32, complex_state)]
    weight, last = random(1, 1041, heads, size, dtype=torch.float32), random(*inputs[-1].shape, dtype=inputs[-1].dtype)

    def results(chosen):
        y, final = gateloop_heads_scan(*(x[:, chosen] if x.shape[1] == heads else x[:, :, chosen] for x in inputs))
        loss = (y * weight[:, :, chosen]).sum() + (final * last[:, chosen]).real.sum()
        return y, final, *torch.autograd.grad(loss, inputs)

    whole = results(slice(None))
    assert whole[0].nbytes > 2**22
    for first in (0, heads - 16):
        chosen = slice(first, first + 16)
        for x, y in zip(whole, results(chosen), strict=True):
            part = x[:, chosen] if x.shape[1] == heads else x[:, :, chosen]
            alone = y if y.shape == part.shape else y[:, chosen] if y.shape[1] == heads else y[:, :, chosen]
            torch.testing.assert_close(part, alone, rtol=2e-6, atol=2e-6 * part.abs().max().item())


@pytest.mark.parametrize("start", [False, True])
def test_in_place(start):
    """`update_state` writes the final state over the initial one, at its address."""
    *inputs, state = inputs_for(2, 3, 3, 4, 2, torch.float32)
    options = {"reset": torch.ones(2, 3, dtype=torch.bool)} if start else {}
    options |= {"reset_state": random(3, 4, 2, dtype=torch.complex64)} if start else {}
    for backend in ("chunked", "cpu"):
        y, final = gateloop_heads_scan(*inputs, state, backend=backend, **options)
        kept = state.clone()
        got, updated = gateloop_heads_scan(*inputs, kept, backend=backend, update_state=True, **options)
        assert updated is kept and torch.equal(kept, final) and torch.equal(got, y)
    with pytest.raises(ValueError, match="update_state needs an initial_state"):
        gateloop_heads_scan(*inputs, update_state=True)
    with pytest.raises(ValueError, match="shares memory with an input"):  # rows of the batch would start from another's
        gateloop_heads_scan(*inputs, state, reset_state=state[0], update_state=True)


@pytest.mark.parametrize("backend", ["reference", "chunked", "cpu"])
def test_padding_holds_anything(backend):
    """What is not finite at padding, but for q, which reads the state there too, reaches nothing else."""
    mask, reset = mask_and_reset(3, 9)
    inputs = inputs_for(3, 9, 2, 3, 2, torch.float32)
    for x in inputs[1:4]:
        x[~mask] = float("nan")
    leaves = [x.requires_grad_() for x in inputs]
    y, final = gateloop_heads_scan(*leaves, mask=mask, reset=reset, backend=backend)
    *grads, grad_state = torch.autograd.grad(y.sum() + final.real.sum(), leaves)
    assert all(x.isfinite().all() for x in (y, final, grad_state, *grads))
    assert not any(grad[~mask].any() for grad in grads[1:])


@pytest.mark.parametrize("rows, columns, operator", [(1, 1, "scan"), (4, 1, "scan"), (1, 2, "gateloop_heads")])
def test_one_column_is_a_linear_scan(rows, columns, operator):
    """Whose kernels are several times faster where a head is a single number."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Watch():
        gateloop_heads_scan(*inputs_for(2, 5, 3, rows, columns, torch.float32))
    assert [x for x in seen if x.namespace == "hf_recurrent"] == [getattr(torch.ops.hf_recurrent, operator).default]


def test_forward_mode_says_no():
    inputs = tuple(inputs_for(1, 4, 1, 3, 2, torch.float32, False))
    q, dual = inputs[0], torch.autograd.forward_ad.make_dual
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        gateloop_heads_scan(dual(q, q), *inputs[1:])


def test_transforms_of_torch_func():
    """They go through the loop."""
    inputs = tuple(inputs_for(1, 4, 1, 3, 2, torch.float32, False))
    y, tangent = torch.func.jvp(lambda *x: gateloop_heads_scan(*x)[0], inputs, inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    gradients = torch.autograd.grad(gateloop_heads_scan(*leaves)[0].sum(), leaves)
    expected = sum((x * gradient).sum() for x, gradient in zip(inputs, gradients, strict=True))
    torch.testing.assert_close(y, gateloop_heads_scan(*inputs)[0])
    torch.testing.assert_close(tangent.sum(), expected)


def test_compiled_without_a_break():
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    inputs = [x.requires_grad_() for x in inputs_for(2, 12, 3, 4, 2, torch.float32, False)]
    results = []
    for function in (gateloop_heads_scan, torch.compile(gateloop_heads_scan, fullgraph=True, backend="aot_eager")):
        y, final = function(*inputs)
        results.append([y, final, *torch.autograd.grad(y.square().sum() + final.sum(), inputs)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)
    *inputs, state = inputs_for(2, 5, 3, 4, 2, torch.float32)
    inputs = [x.requires_grad_() for x in inputs]
    flags = torch.full((2, 5), 2, dtype=torch.uint8)
    arguments = (*inputs, state, state[0].clone(), flags, False, "cpu")
    torch.library.opcheck(torch.ops.hf_recurrent.gateloop_heads, arguments)


def test_memory_does_not_grow_with_the_states():
    """Peak memory of a training pass: the states of all positions of heads of 32 x 32 would take 256 MiB."""
    code = """
import resource, sys, torch
from hf_recurrent.scan import gateloop_heads_scan
def run(length):
    q, k, v = torch.randn(3, 1, length, 4, 32, requires_grad=True)
    a = torch.rand(1, length, 4, 32, dtype=torch.complex64, requires_grad=True)
    y, _ = gateloop_heads_scan(q, k, v, a / 2)
    y.sum().backward()
run(8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(8192)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout) * (1 if sys.platform == "darwin" else 1024)
    states = 8192 * 4 * 32 * 32 * 8
    assert grown < states / 2, f"{grown / 2**20:.0f} MiB"


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"k": torch.rand(2, 5, 3, 2)}, ValueError, "q and k must have one shape, got"),
        ({"v": torch.rand(2, 5, 4, 2)}, ValueError, r"v must have the shape .* = \(2, 5, 3\) \+ \(d_v,\), got"),
        ({"q": torch.rand(5, 3, 4)}, ValueError, "q must have four dimensions"),
        ({"a": torch.rand(2, 5, 3, 2)}, ValueError, "a has the shape .* does not broadcast to"),
        ({"v": torch.rand(2, 5, 3, 2).to(torch.complex64)}, TypeError, "v must be real"),
        ({"initial_state": torch.rand(2, 3)}, ValueError, r"initial_state must have the shape .* = \(2, 3, 4, 2\)"),
        ({"initial_state": torch.rand(2, 3, 4, 2) + 0j}, TypeError, "but the transitions are real"),
        ({"reset_state": torch.rand(2, 3, 4, 2)}, ValueError, r"reset_state must have the shape \(3, 4, 2\)"),
        ({"reset_state": torch.rand(3, 4, 2), "reverse": True}, ValueError, "reset_state goes with reverse=False"),
        ({"mask": torch.ones(2, 4, dtype=torch.bool)}, ValueError, "mask must have the shape"),
        ({"backend": "cuda"}, ValueError, "backend 'cuda'"),
        ({"backend": "best"}, ValueError, "backend must be one of"),
    ],
)
def test_bad_arguments(changes, error, message):
    arguments = {name: torch.rand(2, 5, 3, 4) for name in "qka"} | {"v": torch.rand(2, 5, 3, 2)}
    with pytest.raises(error, match=message):
        gateloop_heads_scan(**{**arguments, **changes})
