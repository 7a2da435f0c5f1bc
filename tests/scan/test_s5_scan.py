"""S5's scan at irregular times: its CPU and CUDA kernels and its plain form against the equations in float64."""

import math

import pytest
import torch
from oracle import TOLERANCE, alike, mask_and_reset, random, repeated, run
from test_cuda_source import ARCHITECTURES, check_scan
from torch.library import opcheck

from hf_recurrent.scan import linear_scan, s5_scan

SINGLE, DOUBLE = torch.complex64, torch.complex128
SHAPES = [(1, 1, 1), (3, 2, 33), (2, 7, 64), (2, 33, 1)]


def problem(batch: int, length: int, channels: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """driven, rate and times: steps from a hundredth of a turn to a few turns, some of them of no time."""
    rate = torch.complex(-torch.rand(channels).double() - 0.01, 3 * torch.randn(channels).double()).to(dtype)
    times = (3 * torch.rand(batch, length, dtype=torch.float64)) ** 2
    times[torch.rand(batch, length) < 0.05] = 0
    return [random(batch, length, channels, dtype=dtype), rate, times.to(rate.real.dtype)]


def definition(discretization: str, driven, rate, times, state=None, **options):
    """The equations with a rate and a time for every number, none of whose gradients are summed then."""
    z = rate * times
    if discretization == "bilinear":
        a, phi = (1 + z / 2) / (1 - z / 2), 1 / (1 - z / 2)
    else:
        near = z.abs() < 1
        small, large = torch.where(near, z, 0), torch.where(near, 1, z)
        series = sum(small**k / float(math.factorial(k + 1)) for k in range(20))
        a, phi = torch.exp(z), torch.where(near, series, torch.expm1(large) / large)
    return linear_scan(a, times * phi * driven, state, backend="reference", **options)


def compare(discretization: str, inputs, state=None, *, backend="cpu", device="cpu", runs=1, **options):
    """Outputs, final state and all gradients. An error is measured by what is added up to the number that has it: also
    to the real part of a product, so that here times are complex numbers, as whose gradients the products appear."""
    dtype, shape = inputs[0].dtype, inputs[0].shape
    weights = random(*shape, dtype=dtype).to(DOUBLE), random(shape[0], shape[2], dtype=DOUBLE)
    options["discretization"] = discretization
    at = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    moved = [None if x is None else x.to(device) for x in (*inputs, state, *weights)]
    got = repeated(runs, lambda: run(s5_scan, moved[:3], moved[3], moved[4:], backend=backend, **at))
    driven, rate, times = inputs
    wide = driven.to(DOUBLE), rate.to(DOUBLE).expand(shape), times[..., None].to(DOUBLE).expand(shape)
    del options["discretization"]
    state = state if state is None else state.to(DOUBLE)
    want = list(
        run(
            lambda *x, **o: definition(discretization, *x, **o),
            [x.contiguous() for x in wide],
            state,
            weights,
            **options,
        )
    )
    scales = [x.abs() for x in want]
    for i, dims in ((3, (0, 1)), (4, 2)):
        want[i], scales[i] = want[i].sum(dims), scales[i].sum(dims)
    want[4] = want[4].real
    names = ["h", "final state", "grad of driven", "grad of rate", "grad of times", "grad of initial state"]
    for name, x, y, scale in zip(names, got, want, scales, strict=False):
        assert x.shape == y.shape and x.dtype == (dtype if y.is_complex() else inputs[2].dtype), name
        error, scale = (x.to(y) - y).abs().max().item(), scale.max().item()
        assert error <= TOLERANCE[dtype] * scale, f"{name}: error {error:.3g}, {error / scale:.3g} relative"


@pytest.mark.parametrize("backend", ["reference", "chunked", "cpu"])
def test_gradients_of_steps_that_forget(backend):
    """The slope e^z of a long step keeps its digits, however small it is beside what it is the slope of."""
    rate = torch.complex(torch.full((20,), -1.0), torch.linspace(-3, 3, 20))
    times = torch.linspace(0.5, 14, 20)[None].requires_grad_()
    driven = torch.ones(1, 20, 20, dtype=SINGLE)
    weights = torch.eye(20, dtype=SINGLE)[None] * torch.exp(-1j * rate.imag * times.detach()[0])  # what turns it back
    reset = torch.ones(1, 20, dtype=torch.bool)
    h, _ = s5_scan(driven, rate, times, reset=reset, backend=backend)
    (grad,) = torch.autograd.grad((h * weights).sum().real, times)
    torch.testing.assert_close(grad, torch.exp(-times), rtol=5e-6, atol=0)


def check(discretization: str, shape, dtype: torch.dtype, **options) -> None:
    """Without a state or options, and with all of them."""
    compare(discretization, problem(*shape, dtype), **options)
    mask, reset = mask_and_reset(*shape[:2])
    state = random(shape[0], shape[2], dtype=dtype)
    for reverse in (False, True):
        compare(discretization, problem(*shape, dtype), state, mask=mask, reset=reset, reverse=reverse, **options)


@pytest.mark.parametrize("discretization, dtype", [("zoh", SINGLE), ("bilinear", SINGLE), ("zoh", DOUBLE)], ids=str)
def test_shapes(discretization, dtype):
    torch.manual_seed(0)
    for shape in SHAPES:
        check(discretization, shape, dtype)
    mask, reset = mask_and_reset(1, 1000)
    compare(discretization, problem(1, 1000, 33, dtype), random(1, 33, dtype=dtype), mask=mask, reset=reset)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
def test_without_kernels(discretization, backend):
    torch.manual_seed(1)
    check(discretization, (2, 19, 5), DOUBLE, backend=backend)


@pytest.mark.parametrize("backend", ["cpu", "chunked", "reference"])
@pytest.mark.parametrize("turns", [10, 1000])
def test_large_angles(turns, backend):
    """Of a rate and a time in single precision: their product, rounded, would be off by 3e-8 of the angle."""
    torch.manual_seed(4)
    driven, rate, times = problem(2, 33, 64, SINGLE)
    compare("zoh", [driven, torch.complex(rate.real, turns * rate.imag), times], backend=backend)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads(threads):
    """Segments of time, pieces of rows, and rows that are written past the caches; twice, to the bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(2)
        check("zoh", (1, 1700, 8), SINGLE)
        check("zoh", (1, 6, 2500), SINGLE)
        inputs = [x.requires_grad_() for x in problem(1, 520, 2048, SINGLE)]
        results = []
        for _ in range(2):
            h, final = s5_scan(*inputs)
            results.append([h, final, *torch.autograd.grad(h.real.sum() + final.imag.sum(), inputs)])
        for x, y in zip(*results, strict=True):
            assert torch.equal(x, y)
        narrow = [inputs[0][..., :64], inputs[1][:64], inputs[2]]
        torch.testing.assert_close(h[..., :64], s5_scan(*narrow, backend="chunked")[0], rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(before)


def test_strides():
    """Slices, other orders of memory, times that all rows or positions share, and a conjugated view."""
    torch.manual_seed(3)
    driven, rate, times = problem(3, 9, 40, SINGLE)
    packed = torch.cat([driven, driven], dim=2)
    for layout in (
        packed[..., 20:60],
        driven.repeat_interleave(2, dim=2)[..., ::2],
        driven.transpose(0, 1).contiguous().transpose(0, 1),
        driven.mT.contiguous().mT,
        driven.conj(),
    ):
        compare("zoh", [layout, rate, times])
    for layout in (times.T.contiguous().T, times[:1].expand(3, 9), times[:, :1].expand(3, 9)):
        compare("zoh", [driven, rate, layout])
    compare("zoh", [driven, rate.repeat_interleave(3)[::3], times])


@pytest.mark.parametrize("device", ["cpu", "host"])
def test_extremes(device, request):
    """Times and rates of zero, steps too small and too large for their squares, on both sides of the series' end, and
    of so many turns that all has decayed."""
    if device == "host":
        request.getfixturevalue("host")
    torch.manual_seed(4)
    sizes = torch.tensor([0.0, 1e-25, 1e-12, 1e-5, 0.1, 0.7, 0.72, 1.5, 6.3, 100.0])
    angles = torch.linspace(math.pi / 2 + 0.05, 3 * math.pi / 2 - 0.05, 7)
    rate = torch.cat([torch.polar(torch.ones(7), angles), torch.zeros(1)])
    times = sizes[:, None].expand(10, 4).contiguous()
    for discretization in ("zoh", "bilinear"):
        compare(discretization, [random(10, 4, 8, dtype=SINGLE), rate, times])
    driven, rate = torch.ones(1, 2, 2, dtype=SINGLE), torch.tensor([-1 + 100j, -1e-3])
    h, _ = s5_scan(driven, rate, torch.tensor([[1.0, 3e9]]), backend="cpu")
    torch.testing.assert_close(h[0, 1], -1 / rate)  # the value that u alone leads to


@pytest.mark.parametrize("device", ["cpu", "host"])
@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
def test_where_the_ways_to_compute_part(discretization, device, request):
    """On both sides of what is computed without clamps, and of the rates that are as good as zero."""
    if device == "host":
        request.getfixturevalue("host")
    torch.manual_seed(4)
    edges = [
        ([-1, -1 + 1j], [79.9, 80.1, 86.9, 87.1, 200.0]),  # of the decay
        ([-1e-3 + 1j, -1e-3 - 1j], [3e4, 32767.5, 32768.5, 1e5, 1e6]),  # of the turns
        ([0, 1e-20, 1e-16j, 2e-15, -1e-14j, 1e-9j - 1e-9], [0.0, 1e-3, 1.0, 1e3, 1e6]),
    ]
    for rates, times in edges:
        rate = torch.tensor(rates, dtype=SINGLE).repeat(4)
        for time in times:
            driven, steps = random(2, 4, len(rate), dtype=SINGLE), torch.full((2, 4), time)
            steps[:, -1] = 1  # of which something is left
            compare(discretization, [driven, rate, steps])


@pytest.mark.parametrize("device", ["cpu", "host"])
@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
@pytest.mark.parametrize(("dtype", "times"), [(SINGLE, [1e-28, 1e-3, 1.0, 1e12]), (DOUBLE, [1e-28, 1.0, 1e2, 1e6])])
def test_without_decay(dtype, times, discretization, device, request):
    """A rate of zero integrates: h = h' + t u, and no time takes anything from h'."""
    if device == "host":
        request.getfixturevalue("host")
    torch.manual_seed(4)
    for time in times:
        steps = torch.full((2, 4), time, dtype=dtype.to_real())
        for size in (1.0, 1e10):
            state = size * random(2, 6, dtype=dtype)
            compare(discretization, [random(2, 4, 6, dtype=dtype), torch.zeros(6, dtype=dtype), steps], state)


def test_small_steps_are_exact():
    """One step, whose gradient of the rate is t^2 / 2 u alone."""
    driven, rate = torch.ones(1, 1, 1, dtype=SINGLE), torch.tensor([-0.5 + 3j], requires_grad=True)
    for t in (1e-6, 1e-4, 1e-2):
        h, _ = s5_scan(driven, rate, torch.tensor([[t]]), backend="cpu")
        (grad,) = torch.autograd.grad(h.real.sum(), rate)
        z = rate.detach().to(DOUBLE) * torch.tensor(t).double()
        want = torch.tensor(t).double() ** 2 * sum(z**k * (k + 1) / math.factorial(k + 2) for k in range(9))
        assert (grad.conj() - want).abs() < 3e-7 * want.abs()


@pytest.mark.parametrize(("dtype", "exact"), [(DOUBLE, 3e-15), (SINGLE, 1.5e-6)], ids=str)
def test_small_steps_without_kernels(dtype, exact):
    """Where (e^z - 1) / z, as PyTorch would differentiate it, leaves nothing of the gradient but rounding."""
    driven, rate = torch.ones(1, 1, 1, dtype=dtype), torch.tensor([-0.5 + 3j], dtype=dtype)
    for t in (0.0, 1e-30, 1e-12, 1e-6, 3e-3, 3.4e-3, 0.01, 0.03, 0.08, 0.083, 0.1, 0.3):
        z = (rate * t).requires_grad_()
        h, _ = s5_scan(driven, z, torch.ones(1, 1, dtype=driven.real.dtype), backend="chunked")
        (grad,) = torch.autograd.grad(h.real.sum(), z)
        want = sum(z.detach().to(DOUBLE) ** k * (k + 1) / math.factorial(k + 2) for k in range(18))
        assert (grad.conj() - want).abs() < exact * want.abs(), t


@pytest.mark.parametrize("backend", ["cpu", "chunked", "reference"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_padding_holds_anything(backend, value):
    """What is not finite at padding reaches neither a state nor a gradient."""
    torch.manual_seed(9)
    driven, rate, times = problem(3, 9, 4, SINGLE)
    mask, reset = mask_and_reset(3, 9)
    driven[~mask], times[~mask] = value, value
    inputs = [x.requires_grad_() for x in (driven, rate, times)]
    for options in ({}, {"reverse": True}, {"reset": reset, "reset_state": random(4, dtype=SINGLE)}):
        for discretization in ("zoh", "bilinear"):
            h, final = s5_scan(*inputs, mask=mask, backend=backend, discretization=discretization, **options)
            for x in (h, final, *torch.autograd.grad(h.real.sum() + final.imag.sum(), inputs)):
                assert x.isfinite().all(), (options, discretization)


def test_what_is_not_finite():
    for name, value in (("driven", 0), ("times", 2)):
        inputs = problem(1, 6, 3, SINGLE)
        inputs[value].flatten()[3] = float("nan")
        h, final = s5_scan(*inputs, backend="cpu")
        assert h[0, 3:].isnan().any() and final.isnan().any(), name
    growing = s5_scan(torch.ones(1, 1, 1, dtype=SINGLE), torch.tensor([1.0 + 0j]), torch.tensor([[100.0]]))[0]
    assert not growing.isfinite()


def test_documents_that_start_from_a_state():
    torch.manual_seed(5)
    mask, reset = mask_and_reset(2, 19)
    options = {"mask": mask, "reset": reset, "reset_state": random(5, dtype=DOUBLE)}
    inputs = problem(2, 19, 5, DOUBLE)
    got, want = (s5_scan(*inputs, **options, backend=backend) for backend in ("cpu", "reference"))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_precision_of_the_state():
    driven, rate, times = problem(2, 5, 3, SINGLE)
    for inputs in ((driven, rate, times.double()), (driven, rate.to(DOUBLE), times)):
        h, final = s5_scan(*inputs, driven[:, 0])
        assert h.dtype == final.dtype == DOUBLE
    h, final = s5_scan(driven, rate, times.bfloat16(), torch.zeros(2, 3))
    assert h.dtype == final.dtype == SINGLE


@pytest.mark.parametrize("backend", ["cpu", "chunked", "reference"])
def test_decoding_in_place(backend):
    torch.manual_seed(6)
    state = random(2, 6, dtype=SINGLE)
    want, address = state.clone(), state.data_ptr()
    for _ in range(3):
        inputs = problem(2, 1, 6, SINGLE)
        h, updated = s5_scan(*inputs, state, backend=backend, update_state=True)
        expected, want = s5_scan(*inputs, want, backend=backend)
        assert updated is state and state.data_ptr() == address
        assert torch.equal(h, expected) and torch.equal(state, want)


def test_empty():
    for shape in [(2, 0, 3), (0, 4, 3), (2, 4, 0)]:
        inputs = [x.requires_grad_() for x in problem(*shape, SINGLE)]
        state = torch.randn(shape[0], shape[2], dtype=SINGLE, requires_grad=True)
        h, final = s5_scan(*inputs, state, backend="cpu")
        grads = torch.autograd.grad(h.real.sum() + final.real.sum(), (*inputs, state))
        assert h.shape == shape and all(not grad.any() for grad in grads[:3])
        if shape[1] == 0:
            assert torch.equal(final, state) and torch.equal(grads[3], torch.ones_like(state))


def test_bad_arguments():
    driven, rate, times = problem(2, 3, 4, SINGLE)
    flat = {"driven": driven[0]}
    for error, message, inputs, options in [
        (ValueError, "discretization must be one of 'zoh', 'bilinear', got 'euler'", {}, {"discretization": "euler"}),
        (TypeError, "driven must be complex, got torch.float32", {"driven": driven.real}, {}),
        (TypeError, "rate must be complex, got torch.float32", {"rate": rate.real}, {}),
        (TypeError, "times must be real, got torch.complex64", {"times": times + 0j}, {}),
        (TypeError, "times must be one of .*, got torch.int64", {"times": times.long()}, {}),
        (TypeError, "times must be a tensor, got NoneType", {"times": None}, {}),
        (TypeError, "reverse must be True or False, got 'no'", {}, {"reverse": "no"}),
        (ValueError, r"driven must have the shape \(batch, length, channels\), got \(3, 4\)", flat, {}),
        (ValueError, r"rate must have the shape \(4,\), got \(3,\)", {"rate": rate[:3]}, {}),
        (ValueError, r"times must have the shape \(2, 3\), got \(3,\)", {"times": times[0]}, {}),
        (ValueError, r"initial_state must have the shape .* = \(2, 4\)", {}, {"initial_state": driven[:, 0, :3]}),
        (ValueError, r"reset_state must have the shape \(4,\) or \(2, 4\), got \(3,\)", {}, {"reset_state": rate[:3]}),
        (TypeError, "mask must be a bool tensor", {}, {"mask": torch.ones(2, 3)}),
        (ValueError, "update_state needs an initial_state", {}, {"update_state": True}),
        (ValueError, "backend must be one of", {}, {"backend": "gpu"}),
    ]:
        for backend in ("cpu", "chunked"):
            given = {"driven": driven, "rate": rate, "times": times, "backend": backend} | inputs | options
            with pytest.raises(error, match=message):
                s5_scan(**given)


def test_operators():
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(7)
    driven, rate, times = (x.requires_grad_() for x in problem(2, 5, 3, SINGLE))
    state, flags = torch.randn(2, 3, dtype=SINGLE, requires_grad=True), torch.zeros(2, 5, dtype=torch.uint8)
    inputs = [rate.detach()[None, None].requires_grad_(), times, driven]
    arguments = ("s5_zoh", inputs, state, flags, False, "cpu")
    opcheck(torch.ops.hf_recurrent.scan.default, arguments)
    h, final = (x.detach() for x in torch.ops.hf_recurrent.scan(*arguments))
    bare = [x.detach() for x in inputs]
    gradients = ("s5_zoh", bare, h, state.detach(), flags, h, final, False, "cpu")
    opcheck(torch.ops.hf_recurrent.scan_backward.default, gradients)
    opcheck(torch.ops.hf_recurrent.scan_.default, ("s5_zoh", bare, state.detach(), flags, False, "cpu"))


def test_compiled():
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    torch.manual_seed(8)
    inputs = [x.requires_grad_() for x in problem(2, 5, 3, SINGLE)]
    reset = torch.rand(2, 5) < 0.3

    def loss(*inputs):
        h, final = s5_scan(*inputs, reset=reset)
        return (h * inputs[0]).abs().sum() + final.abs().sum()

    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    for x, y in zip(got, torch.autograd.grad(loss(*inputs), inputs), strict=True):
        torch.testing.assert_close(x, y)


def test_other_derivatives_are_refused():
    inputs = [x.requires_grad_() for x in problem(1, 3, 2, SINGLE)]
    h, _ = s5_scan(*inputs, backend="cpu")
    (grad,) = torch.autograd.grad(h.abs().square().sum(), inputs[2], create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.autograd.grad(grad.sum(), inputs[1])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs[2].detach(), torch.ones(1, 3))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            s5_scan(inputs[0], inputs[1], dual, backend="cpu")


# ---- the CUDA kernels, without a GPU ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, dtype, narrow, architecture",
    [("s5_zoh", SINGLE, False, architecture) for architecture in ARCHITECTURES]
    + [("s5_zoh", SINGLE, True, "sm_90"), ("s5_bilinear", SINGLE, False, "sm_90")],
    ids=str,
)
def test_compiles_without_spills(name, dtype, narrow, architecture):
    check_scan(name, dtype, narrow, architecture)


def test_bodies_against_the_equations(host):
    for shape, multiprocessors in [((1, 1, 1), 1), ((3, 2, 33), 1), ((3, 70, 40), 1), ((1, 1025, 8), 4)]:
        host.multiprocessors = multiprocessors
        host.launched.clear()
        check("zoh", shape, SINGLE)
        assert ("scan_backward_segments" in host.launched) == (multiprocessors > 1)


def test_bodies_that_read_once(once):
    check("zoh", (1, 1100, 12), SINGLE)
    assert set(once.launched) == {"scan_forward", "scan_backward"}


def test_no_race(host):
    """The order in which the threads of a block come to run between two barriers changes no bit."""
    for shape, multiprocessors in [((2, 70, 40), 1), ((1, 1100, 12), 5)]:
        host.multiprocessors = multiprocessors
        inputs = [x.requires_grad_() for x in problem(*shape, SINGLE)]
        results = []
        for host.reversed in (False, True):
            h, final = s5_scan(*inputs, backend="cpu")
            results.append([h, final, *torch.autograd.grad(h.real.sum() + final.real.sum(), inputs)])
        alike(results)


def test_a_step_on_a_gpu_is_one_kernel(host):
    inputs, state = problem(3, 1, 6, SINGLE), random(3, 6, dtype=SINGLE)
    want, final = s5_scan(*inputs, state, backend="reference")
    h, _ = s5_scan(*inputs, state, backend="cpu", update_state=True)
    torch.testing.assert_close((h, state), (want, final))
    assert host.launched == ["scan_step"]
