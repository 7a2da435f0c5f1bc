"""GateLoop's fused scan: its CPU and CUDA kernels and its plain form against the float64 loop."""

import pytest
import torch
from oracle import GATELOOP_CELLS, alike, compare, mask_and_reset, random
from test_cuda_source import ARCHITECTURES, check_scan
from torch.library import opcheck

from hf_recurrent.scan import gateloop_scan, reading
from hf_recurrent.scan.cells import BY_NAME

POLAR, REAL, CARTESIAN = "gateloop_polar_sigmoid", "gateloop_real_sigmoid", "gateloop_cartesian_exponential"
SHAPES = [(1, 1, 1), (3, 2, 33), (2, 7, 64), (2, 33, 1), (1, 1000, 33)]


def state_for(name: str, batch: int, channels: int, dtype: torch.dtype) -> torch.Tensor:
    return random(batch, channels, dtype=BY_NAME[name].state_dtype(dtype))


def inputs_for(name: str, shape, dtype: torch.dtype) -> list[torch.Tensor]:
    return [random(*shape, dtype=dtype) for _ in range(GATELOOP_CELLS[name][1])]


def check(name: str, shape, dtype: torch.dtype, backend: str, **options) -> None:
    """Without a state or options, and with all of them."""
    scan, _ = GATELOOP_CELLS[name]
    compare(scan, inputs_for(name, shape, dtype), None, backend=backend, **options)
    mask, reset = mask_and_reset(*shape[:2])
    state = state_for(name, shape[0], shape[2], dtype)
    for reverse in (False, True):
        compare(scan, inputs_for(name, shape, dtype), state, backend=backend, mask=mask, reset=reset, reverse=reverse)


@pytest.mark.parametrize(
    "name, dtype",
    [(POLAR, torch.float32), (POLAR, torch.bfloat16), (REAL, torch.float32), (CARTESIAN, torch.float32)],
    ids=str,
)
def test_shapes(name, dtype):
    torch.manual_seed(0)
    for shape in SHAPES:
        check(name, shape, dtype, "cpu")


@pytest.mark.parametrize("name", GATELOOP_CELLS)
def test_every_transition(name):
    torch.manual_seed(1)
    check(name, (2, 19, 5), torch.float32, "cpu")
    check(name, (2, 19, 5), torch.float64, "chunked")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_other_dtypes(dtype):
    torch.manual_seed(2)
    check(POLAR, (2, 33, 64), dtype, "cpu")


@pytest.mark.parametrize("name", [POLAR, REAL])
def test_segments_of_time(name):
    """One row of few channels, so that the threads share its positions; and rows that are written past the caches."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        torch.manual_seed(3)
        check(name, (1, 1700, 8), torch.float32, "cpu")
        scan, count = GATELOOP_CELLS[name]
        inputs = [random(1, 520, 2048, dtype=torch.float32).requires_grad_() for _ in range(count)]
        y, _ = scan(*inputs, backend="cpu")
        grads = torch.autograd.grad(y.sum(), inputs)
        narrow = [x[..., :64].detach().clone().requires_grad_() for x in inputs]
        want, _ = scan(*narrow, backend="cpu")
        torch.testing.assert_close(y[..., :64], want, rtol=1e-5, atol=1e-5)
        for got, expected in zip(grads, torch.autograd.grad(want.sum(), narrow), strict=True):
            torch.testing.assert_close(got[..., :64], expected, rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(threads)


def test_slices_and_broadcast_transitions():
    """Thirds and halves of projections, the two parts of complex numbers, transitions that the data do not control."""
    torch.manual_seed(4)
    packed, given = random(2, 9, 120, dtype=torch.float32), random(2, 9, 80, dtype=torch.float32)
    q, k, v = packed.chunk(3, dim=-1)
    compare(GATELOOP_CELLS[POLAR][0], (q, k, v, *given.chunk(2, dim=-1)), None, backend="cpu")
    compare(GATELOOP_CELLS[CARTESIAN][0], (q, k, v, given[..., ::2], given[..., 1::2]), None, backend="cpu")
    inputs = [x.contiguous() for x in (q, k, v)]
    got, want = [], []
    for results, backend in ((got, "cpu"), (want, "reference")):
        alpha, beta = (random(40, dtype=torch.float32).requires_grad_() for _ in "ab")
        with torch.no_grad():
            alpha.copy_(torch.linspace(-2, 2, 40)), beta.copy_(torch.linspace(-9, 9, 40))
        y, final = gateloop_scan(*inputs, alpha, beta, backend=backend)
        results += [y, final, *torch.autograd.grad((y * v).sum(), (alpha, beta))]
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)


def test_extremes():
    """Shut and open magnitudes, phases of many turns, transitions of zero: the plain form's values and gradients."""
    torch.manual_seed(5)
    extremes = torch.tensor([-300.0, -88.0, -20.0, 0.0, 4.0, 20.0, 88.0, 300.0])
    phases = torch.tensor([0.0, -0.0, 1e-30, 3.14159265, -1e3, 12345.678, 1e6, -987654321.0])
    for name, (scan, count) in GATELOOP_CELLS.items():
        q, k, v = (random(8, 5, 8, dtype=torch.float32) for _ in "qkv")
        alpha, beta = extremes[:, None, None].expand(8, 5, 8).contiguous(), phases.expand(8, 5, 8).contiguous()
        if "cartesian" in name:  # beta is no phase then, and the oracle's exponential of it overflows
            beta = beta.clamp(-300, 300)
        compare(scan, [q, k, v, alpha, beta][:count], None, backend="cpu")


def test_a_phase_beyond_all_precision_is_nan():
    one = torch.ones(1, 2, 1)
    y, _ = gateloop_scan(one, one, one, one, 1e10 * one, backend="cpu")
    assert y[0, 0].isnan().all() or y[0, 1].isnan().all()


@pytest.mark.parametrize("backend", ["cpu", "chunked", "reference"])
@pytest.mark.parametrize("name", GATELOOP_CELLS)
def test_padding_holds_anything(name, backend):
    """What is not finite at padding, but for q, which reads the state there too, reaches nothing else."""
    torch.manual_seed(8)
    scan, _ = GATELOOP_CELLS[name]
    mask, reset = mask_and_reset(3, 19)
    state = state_for(name, 3, 5, torch.float32).requires_grad_()
    for bad in (float("nan"), float("inf")):
        inputs = inputs_for(name, (3, 19, 5), torch.float32)
        for x in inputs[1:]:
            x[~mask] = bad
        leaves = [x.requires_grad_() for x in inputs]
        for options in ({}, {"reverse": True}, {"reset": reset, "reset_state": state[0]}):
            y, final = scan(*leaves, state, mask=mask, backend=backend, **options)
            grads = torch.autograd.grad(y.sum() + final.real.sum(), [*leaves, state])
            assert all(x.isfinite().all() for x in (y, final, *grads)), options
            assert not any(grad[~mask].any() for grad in grads[1:-1]), options


def test_a_transition_of_all_positions_is_not_spread_by_a_mask():
    torch.manual_seed(9)
    q, k, v = random(3, 2, 19, 5, dtype=torch.float64)
    alpha, beta = random(2, 5, dtype=torch.float64)
    mask, _ = mask_and_reset(2, 19)
    got, want = (gateloop_scan(q, k, v, alpha, beta, mask=mask, backend=backend)[0] for backend in ("cpu", "chunked"))
    torch.testing.assert_close(got, want)


def test_documents_that_start_from_a_state():
    torch.manual_seed(6)
    mask, reset = mask_and_reset(2, 19)
    start = state_for(POLAR, 1, 5, torch.float64)[0]
    inputs = inputs_for(POLAR, (2, 19, 5), torch.float64)
    options = {"mask": mask, "reset": reset, "reset_state": start}
    got, want = (gateloop_scan(*inputs, **options, backend=backend) for backend in ("cpu", "reference"))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["cpu", "chunked", "reference"])
@pytest.mark.parametrize("name", [POLAR, REAL])
def test_decoding_in_place(name, backend):
    torch.manual_seed(7)
    scan, _ = GATELOOP_CELLS[name]
    state = state_for(name, 2, 6, torch.float32)
    want, address = state.clone(), state.data_ptr()
    for _ in range(3):
        inputs = inputs_for(name, (2, 1, 6), torch.float32)
        y, updated = scan(*inputs, state, backend=backend, update_state=True)
        expected, want = scan(*inputs, want, backend=backend)
        assert updated is state and state.data_ptr() == address
        assert torch.equal(y, expected) and torch.equal(state, want)


def test_empty():
    for shape in [(2, 0, 3), (0, 4, 3), (2, 4, 0)]:
        inputs = [torch.randn(shape, requires_grad=True) for _ in range(5)]
        state = torch.randn(shape[0], shape[2], dtype=torch.complex64, requires_grad=True)
        y, final = gateloop_scan(*inputs, state, backend="cpu")
        grads = torch.autograd.grad(y.sum() + final.real.sum(), (*inputs, state))
        assert y.shape == shape and all(not grad.any() for grad in grads[:5])
        if shape[1] == 0:
            assert torch.equal(final, state) and torch.equal(grads[5], torch.ones_like(state))


def test_bad_arguments():
    x = torch.rand(2, 3, 4)
    for kind in ({"transition": "spherical"}, {"magnitude": "tanh"}, {"transition": "cartesian", "phase": "tanh"}):
        with pytest.raises(ValueError, match="transition, magnitude and phase must be one of .*with beta"):
            gateloop_scan(x, x, x, x, x, **kind)
    with pytest.raises(ValueError, match=r"got \('cartesian', 'sigmoid', 'identity'\) without beta"):
        gateloop_scan(x, x, x, x, transition="cartesian")
    with pytest.raises(ValueError, match="q, k and v must have one shape"):
        gateloop_scan(x, x[:, :2], x, x, x)
    with pytest.raises(ValueError, match=r"beta has the shape \(2, 3, 3\), which does not broadcast to \(2, 3, 4\)"):
        gateloop_scan(x, x, x, x, x[..., :3])
    with pytest.raises(TypeError, match="alpha must be real, got torch.complex64"):
        gateloop_scan(x, x, x, x + 0j, x)
    for backend in ("cpu", "chunked"):
        with pytest.raises(TypeError, match="initial_state is torch.complex64, but the"):
            gateloop_scan(x, x, x, x, None, torch.rand(2, 4) + 0j, backend=backend)
        with pytest.raises(ValueError, match=r"initial_state must have the shape \(batch, channels\) = \(2, 4\)"):
            gateloop_scan(x, x, x, x, x, torch.rand(2, 5), backend=backend)
        with pytest.raises(TypeError, match="mask must be a bool tensor"):
            gateloop_scan(x, x, x, x, x, mask=torch.ones(2, 3), backend=backend)
        with pytest.raises(ValueError, match="update_state needs an initial_state"):
            gateloop_scan(x, x, x, x, x, update_state=True, backend=backend)


def test_operators():
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(8)
    inputs = [torch.randn(2, 5, 3, requires_grad=True) for _ in range(5)]
    state = torch.randn(2, 3, dtype=torch.complex64, requires_grad=True)
    flags = torch.zeros(2, 5, dtype=torch.uint8)
    arguments = (POLAR, inputs, state, flags, False, True, "cpu")
    opcheck(torch.ops.hf_recurrent.read_scan.default, arguments)
    y, h, final = (x.detach() for x in torch.ops.hf_recurrent.read_scan(*arguments))
    bare = [x.detach() for x in inputs]
    gradients = (POLAR, bare, h, state.detach(), flags, y, final, False, "cpu")
    opcheck(torch.ops.hf_recurrent.read_scan_backward.default, gradients)
    opcheck(torch.ops.hf_recurrent.read_scan_.default, (POLAR, bare, state.detach(), flags, False, "cpu"))
    empty = torch.ops.hf_recurrent.read_scan(POLAR, bare, None, None, False, False, "cpu")[1]
    assert empty.numel() == 0  # no states are kept where nobody asks for gradients


def test_compiled():
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    torch.manual_seed(9)
    inputs = [torch.randn(2, 5, 3, requires_grad=True) for _ in range(5)]
    reset = torch.rand(2, 5) < 0.3

    def loss(*inputs):
        y, final = gateloop_scan(*inputs, reset=reset)
        return (y * inputs[0]).sum() + final.abs().sum()

    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    for x, y in zip(got, torch.autograd.grad(loss(*inputs), inputs), strict=True):
        torch.testing.assert_close(x, y)


def test_second_derivatives_are_refused():
    inputs = [torch.randn(1, 3, 2, requires_grad=True) for _ in range(5)]
    y, _ = gateloop_scan(*inputs, backend="cpu")
    (grad,) = torch.autograd.grad(y.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.autograd.grad(grad.sum(), inputs[1])


# ---- the CUDA kernels, without a GPU ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, dtype, narrow, architecture",
    [(POLAR, torch.bfloat16, False, architecture) for architecture in ARCHITECTURES]
    + [(name, torch.float32, False, "sm_90") for name in GATELOOP_CELLS]
    + [(POLAR, dtype, True, "sm_90") for dtype in (torch.float32, torch.bfloat16)]
    + [(POLAR, torch.float64, False, "sm_90")],
    ids=str,
)
def test_compiles_without_spills(name, dtype, narrow, architecture):
    check_scan(name, dtype, narrow, architecture)


@pytest.mark.parametrize(
    "name, dtype", [(POLAR, torch.float32), (POLAR, torch.bfloat16), (REAL, torch.float32)], ids=str
)
def test_bodies_against_the_oracle(host, name, dtype):
    for shape, multiprocessors in [((1, 1, 1), 1), ((3, 2, 33), 1), ((3, 70, 40), 1), ((1, 1025, 8), 4)]:
        host.multiprocessors = multiprocessors
        host.launched.clear()
        check(name, shape, dtype, "cpu")
        assert ("scan_backward_segments" in host.launched) == (multiprocessors > 1)


@pytest.mark.parametrize("name, dtype", [(POLAR, torch.bfloat16), (REAL, torch.float32)], ids=str)
def test_bodies_that_read_once(once, name, dtype):
    check(name, (1, 1100, 12), dtype, "cpu")
    assert set(once.launched) == {"scan_forward", "scan_backward"}


def test_no_race(host):
    """The order in which the threads of a block come to run between two barriers changes no bit."""
    for shape, multiprocessors in [((2, 70, 40), 1), ((1, 1100, 12), 5)]:
        host.multiprocessors = multiprocessors
        inputs = [x.requires_grad_() for x in inputs_for(POLAR, shape, torch.float32)]
        results = []
        for host.reversed in (False, True):
            y, final = gateloop_scan(*inputs, backend="cpu")
            results.append([y, final, *torch.autograd.grad(y.sum() + final.real.sum(), inputs)])
        alike(results)


def test_decoding_on_a_gpu_is_one_kernel(host):
    state = state_for(POLAR, 3, 6, torch.float32)
    inputs = inputs_for(POLAR, (3, 1, 6), torch.float32)
    want, final = gateloop_scan(*inputs, state, backend="reference")
    y, _ = gateloop_scan(*inputs, state, backend="cpu", update_state=True)
    torch.testing.assert_close((y, state), (want, final))
    assert host.launched == ["scan_step"]


def test_operators_are_those_of_the_module():
    assert reading.COMPILED.keys() == {"cpu", "cuda"}
