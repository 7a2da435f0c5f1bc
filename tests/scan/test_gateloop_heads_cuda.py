"""The CUDA kernels of GateLoop's heads without a GPU, as test_cuda_source.py has it for the others."""

import numpy as np
import pytest
import torch
from cuda_host import Host
from oracle import mask_and_reset, random
from test_cuda_source import ARCHITECTURES, check_report
from test_gateloop_heads import compare, inputs_for, run
from torch.utils._python_dispatch import TorchDispatchMode

from hf_recurrent.scan import gateloop_heads_cuda, gateloop_heads_scan

FLOAT, DOUBLE, HALF = torch.float32, torch.float64, torch.bfloat16
COMPLEX = torch.complex64


@pytest.fixture
def host(monkeypatch, folder):
    """As conftest.py has it, but quick to compile: there are many sizes, and test_sanitizers.py has two of them."""
    torch.manual_seed(0)
    host = Host(folder, ["-O0"])
    host.install(monkeypatch.setattr)
    return host


@pytest.mark.parametrize(
    "kind, architecture",
    [((HALF, COMPLEX, 8, 8), architecture) for architecture in ARCHITECTURES]
    + [
        (kind, "sm_90")
        for kind in [
            (FLOAT, COMPLEX, 4, 4),
            (FLOAT, COMPLEX, 64, 64),
            (DOUBLE, torch.complex128, 128, 24),
        ]
    ],
    ids=str,
)
def test_compiles_without_spills(kind, architecture):
    registers, _ = check_report(gateloop_heads_cuda.module_for(*kind), architecture)
    assert len(registers) == 4
    if kind[0] is not DOUBLE and gateloop_heads_cuda.division(kind[0], *kind[2:]).threads == 128:
        # Blocks of 128 threads to a multiprocessor: four forward, two backward.
        assert registers["gateloop_heads_forward"] <= 128 and registers["gateloop_heads_backward"] <= 255


def test_widths_share_kernels():
    """A map of attention is a scan whose d_v is the length of the text: no compilation for each."""
    modules = {gateloop_heads_cuda.module_for(FLOAT, COMPLEX, 8, columns) for columns in range(65, 2000)}
    assert len(modules) == 2


# (batch, length, heads, d_k, d_v): many and one head to a block, padded sizes, heads of several warps and in slices
SHAPES = [
    (1, 1, 1, 2, 2), (2, 33, 3, 2, 2), (1, 1000, 1, 4, 4), (2, 7, 33, 4, 4), (2, 33, 3, 8, 8), (2, 17, 3, 16, 16),
    (1, 9, 1, 64, 64), (1, 150, 2, 3, 100),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bodies_against_the_loop(host, shape):
    mask, reset = mask_and_reset(*shape[:2])
    start = random(*shape[2:], dtype=COMPLEX)
    compare(inputs_for(*shape, FLOAT), "cuda", mask=mask, reset=reset, start=start)
    assert host.launched == ["gateloop_heads_forward"] * 2 + ["gateloop_heads_backward"]
    if shape[1] < 1000:
        compare(inputs_for(*shape, FLOAT), "cuda")
        compare(inputs_for(*shape, FLOAT), "cuda", mask=mask, reset=reset, reverse=True)


@pytest.mark.parametrize(
    "dtype, complex_state, sizes",
    [(FLOAT, False, (4, 4)), (HALF, True, (4, 4)), (torch.float16, False, (3, 100)), (DOUBLE, True, (3, 5))],
    ids=str,
)
def test_dtypes(host, dtype, complex_state, sizes):
    mask, reset = mask_and_reset(3, 19)
    inputs = inputs_for(3, 19, 2, *sizes, dtype, complex_state)
    compare(inputs, "cuda", mask=mask, reset=reset, start=random(2, *sizes, dtype=inputs[4].dtype))
    compare(inputs, "cuda", reverse=True)


def test_segments_of_time(host):
    host.multiprocessors = 8
    mask, reset = mask_and_reset(1, 1030)
    start = random(3, 4, 4, dtype=COMPLEX)
    few = torch.zeros(1, 1030, dtype=torch.bool)
    few[:, 700] = True
    for options in ({"reset": few, "start": start}, {"mask": mask, "reset": reset, "reverse": True}):
        host.launched.clear()
        compare(inputs_for(1, 1030, 3, 4, 4, FLOAT), "cuda", **options)
        assert host.launched.count("gateloop_heads_forward_segments") == 2
        assert "gateloop_heads_backward_segments" in host.launched
    compare(inputs_for(1, 1030, 1, 3, 100, FLOAT), "cuda")


# Heads that fill their blocks, of which whole tiles without flags are read and walked with nothing asked of a position.
WHOLE = [(2, 37, 16, 4, 4), (1, 45, 16, 8, 8), (1, 22, 4, 16, 16), (1, 17, 1, 64, 64)]


@pytest.mark.parametrize("shape", WHOLE, ids=str)
@pytest.mark.parametrize("dtype, complex_state", [(FLOAT, True), (HALF, True), (HALF, False)], ids=str)
def test_whole_tiles(host, shape, dtype, complex_state):
    few = torch.zeros(shape[:2], dtype=torch.bool)
    few[:, 13] = True
    compare(inputs_for(*shape, dtype, complex_state), "cuda")
    compare(inputs_for(*shape, dtype, complex_state), "cuda", reverse=True)
    if shape[3] < 64:
        compare(inputs_for(*shape, dtype, complex_state), "cuda", mask=~few.roll(7, 1), reset=few)


@pytest.mark.parametrize("reverse", [False, True])
def test_whole_tiles_in_segments_and_strided(host, reverse):
    host.multiprocessors = 8
    *inputs, state = inputs_for(1, 1030, 16, 4, 4, FLOAT)
    few = torch.zeros(1, 1030, dtype=torch.bool)
    few[:, 700] = True
    for options in ({}, {"reset": few}):
        compare([*inputs, state], "cuda", reverse=reverse, **options)
    assert {"gateloop_heads_forward_segments", "gateloop_heads_backward_segments"} <= set(host.launched)
    want = gateloop_heads_scan(*inputs, state, reverse=reverse)
    moved = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in inputs]
    got = gateloop_heads_scan(*moved, state, reverse=reverse)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("shared", [(0,), (1,), (2,), (0, 1, 3), (0, 1, 2, 3)], ids=str)
def test_shared_transitions(host, shared):
    compare(inputs_for(2, 9, 3, 4, 4, FLOAT, shared=shared), "cuda")


def test_repeats_and_no_race(host):
    """Two runs are alike bit for bit, whatever the order of a block's threads between two barriers."""
    cases = [((2, 21, 5, 4, 4), 1), ((1, 1030, 2, 4, 4), 4), ((1, 80, 1, 3, 100), 1), ((2, 9, 1, 16, 16), 1)]
    cases += [((1, 1030, 16, 4, 4), 4), ((1, 29, 16, 8, 8), 1), ((1, 80, 1, 64, 64), 1)]
    for shape, host.multiprocessors in cases:
        mask, reset = mask_and_reset(*shape[:2])
        mask[:, shape[1] // 3 : shape[1] // 3 * 2], reset[:, shape[1] // 3 : shape[1] // 3 * 2] = True, False
        inputs, start = inputs_for(*shape, FLOAT), random(*shape[2:], dtype=COMPLEX)
        weights = random(*inputs[2].shape, dtype=DOUBLE), random(*inputs[4].shape, dtype=torch.complex128)

        def scan(*x, mask=mask, reset=reset):
            return gateloop_heads_scan(*x[:5], mask=mask, reset=reset, reset_state=x[5])

        results = []
        for host.reversed in (False, True):
            results.append(run(scan, inputs, weights, start))
        for x, y in zip(*results, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("reverse", [False, True])
def test_reset_stops_what_is_not_finite(host, reverse):
    """A NaN spoils no other document of its row, in one segment of time or in several; an infinity does not fade."""
    host.multiprocessors = 4
    inputs = inputs_for(1, 1050, 3, 4, 4, FLOAT)
    reset = torch.zeros(1, 1050, dtype=torch.bool)
    reset[0, [480, 640]] = True
    inputs[2][0, 500, 1] = float("nan")
    weights = random(1, 1050, 3, 4, dtype=DOUBLE), torch.zeros(1, 3, 4, 4, dtype=torch.complex128)
    y, _, *grads, _ = run(
        lambda *x: gateloop_heads_scan(*x[:5], reset=reset, reverse=reverse, backend="cuda"), inputs, weights
    )
    for x in (y, *grads):
        assert x[:, :480].isfinite().all() and x[:, 640:].isfinite().all() and x[:, :, [0, 2]].isfinite().all()
    assert y[:, 500, 1].isnan().all()
    inputs[2][0, 500, 1] = float("inf")
    inputs[3] = inputs[3].abs() / 2 + 0j  # whose products fade
    y, final = gateloop_heads_scan(*inputs, reverse=reverse, backend="cuda")
    after = y[:, :500] if reverse else y[:, 501:]
    assert not after[:, :, 1].isfinite().any() and not final[:, 1].isfinite().any() and final[:, 0].isfinite().all()


def test_padded_sizes_add_nothing(host):
    """What lies beside the last row and column of a head takes no part, whatever the inputs hold."""
    inputs = inputs_for(1, 9, 2, 3, 100, torch.float16, False)
    inputs[2][0, 3] = float("inf")
    inputs[3].fill_(0.5)
    inputs[1].fill_(1.0), inputs[0].fill_(1.0)
    y, _ = gateloop_heads_scan(*inputs, backend="cuda")
    assert (y[:, 3:] == float("inf")).all() and y[:, :3].isfinite().all()


def test_padding_holds_anything(host):
    """What is not finite at padding, but for q, which reads the state there too, reaches nothing else."""
    mask, reset = mask_and_reset(3, 9)
    inputs = inputs_for(3, 9, 2, 4, 4, FLOAT)
    for x in inputs[1:4]:
        x[~mask] = float("nan")
    leaves = [x.requires_grad_() for x in inputs]
    y, final = gateloop_heads_scan(*leaves, mask=mask, reset=reset)
    *grads, grad_state = torch.autograd.grad(y.sum() + final.real.sum(), leaves)
    assert all(x.isfinite().all() for x in (y, final, grad_state, *grads))
    assert not any(grad[~mask].any() for grad in grads[1:])


def test_strided_inputs(host):
    q, k, v, a, state = inputs_for(2, 12, 3, 4, 4, FLOAT)
    want = gateloop_heads_scan(q, k, v, a, state)
    packed = torch.stack([q, k, v], dim=2)
    for got in (
        gateloop_heads_scan(*packed.unbind(2), a, state),
        gateloop_heads_scan(*(x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v, a, state))),
        gateloop_heads_scan(q, k, v, a.conj().resolve_conj().conj(), state.conj().resolve_conj().conj()),
    ):
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def shifted(x: torch.Tensor, offset: int) -> torch.Tensor:
    """x's numbers, so many bytes past a multiple of 64."""
    buffer = torch.empty(x.nbytes + 64 + offset, dtype=torch.uint8)
    at = -buffer.data_ptr() % 64 + offset
    kind = {COMPLEX: np.complex64, FLOAT: np.float32}[x.dtype]
    return torch.from_numpy(np.ndarray(x.shape, dtype=kind, buffer=buffer.numpy(), offset=at)).copy_(x)


def test_alignment(host):
    """States at no multiple of 16 bytes are read and written one by one; what not even an element allows is copied."""
    *inputs, state = inputs_for(2, 3, 3, 4, 4, FLOAT)
    want, final = gateloop_heads_scan(*inputs, state)
    for offset, moved in [(8, inputs), (3, [shifted(x, 3) for x in inputs])]:
        got = gateloop_heads_scan(*moved, shifted(state, offset))
        assert torch.equal(got[0], want) and torch.equal(got[1], final)
    place = shifted(state, 8)
    y, updated = gateloop_heads_scan(*inputs, place, update_state=True)
    assert updated is place and torch.equal(y, want) and torch.equal(place, final)


@pytest.mark.parametrize("batch, length", [(2, 1), (1, 1030)])
def test_in_place(host, batch, length):
    """The final state takes the initial one's place; a decoded token is one launch."""
    host.multiprocessors = 4
    *inputs, state = inputs_for(batch, length, 3, 4, 4, FLOAT)
    options = {"reset": torch.rand(batch, length) < 0.5, "reset_state": random(3, 4, 4, dtype=COMPLEX)}
    y, final = gateloop_heads_scan(*inputs, state, **options)
    kept = state.clone()
    host.launched.clear()
    got, updated = gateloop_heads_scan(*inputs, kept, update_state=True, **options)
    assert updated is kept and torch.equal(kept, final) and torch.equal(got, y)
    assert len(host.launched) == (1 if length == 1 else 2)


@pytest.mark.parametrize("shape", [(2, 5, 3, 0, 4), (2, 5, 3, 4, 0), (2, 0, 3, 4, 4), (0, 5, 3, 4, 4), (2, 5, 0, 4, 4)])
def test_empty(host, shape):
    inputs = [x.requires_grad_() for x in inputs_for(*shape, FLOAT)]
    start = torch.randn(*shape[2:], dtype=COMPLEX).requires_grad_()
    y, final = gateloop_heads_scan(*inputs, reset=torch.ones(shape[:2], dtype=torch.bool), reset_state=start)
    torch.testing.assert_close(y, torch.zeros_like(inputs[2]))
    *grads, grad_state, grad_start = torch.autograd.grad(y.sum() + final.sum().real, [*inputs, start])
    assert not any(grad.any() for grad in (*grads, grad_start)) and not host.launched
    if shape[1] == 0:
        torch.testing.assert_close(final, inputs[4])
        torch.testing.assert_close(grad_state, torch.ones_like(grad_state))


def test_more_rows_than_the_kernels_hold(host, monkeypatch):
    """Go by the linear scan, whose states are all in memory."""
    monkeypatch.setattr("hf_recurrent.scan.ops.choose_backend", lambda backend, device: "chunked")
    compare(inputs_for(1, 3, 1, 129, 2, FLOAT), None)
    assert not host.launched


def test_no_tensor_of_all_states(host):
    """Of 150 positions of 3 x 100 states, checkpoints and all, none has a quarter."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                largest = max(largest, x.numel() if isinstance(x, torch.Tensor) else 0)
            return out

    inputs = [x.requires_grad_() for x in inputs_for(1, 150, 2, 3, 100, FLOAT)]
    with Watch():
        gateloop_heads_scan(*inputs)[0].sum().backward()
    assert host.launched[-1] == "gateloop_heads_backward" and 0 < largest < 150 * 2 * 3 * 100 / 2
