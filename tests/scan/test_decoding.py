"""The kernels that are called where nothing observes it, against the plain PyTorch that defines them."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

from hf_recurrent.scan import cpu, gateloop_scan, linear_scan, longhorn_scan
from hf_recurrent.scan.convolution import _short_convolution, short_convolution
from hf_recurrent.scan.elementwise import _silu_gate, gate, skip_gelu
from hf_recurrent.scan.gateloop import _channel_loop, channel_loop
from hf_recurrent.scan.linear import linear
from hf_recurrent.scan.longhorn import gated_scan
from hf_recurrent.scan.norm import rms_norm
from hf_recurrent.scan.s5 import _drive, _read, drive, read

TOLERANCES = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-7},
    torch.float16: {"rtol": 2**-9, "atol": 2**-9},
}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


@pytest.fixture(params=[1, 3])
def threads(request):
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def kernels(monkeypatch):
    """The names of the kernels that are called."""
    called, load = [], cpu._load
    monkeypatch.setattr(cpu, "_load", lambda stem, *rest: called.append(stem) or load(stem, *rest))
    return called


def strided(*shape, dtype):
    """A slice, as of a projection."""
    return torch.randn(*shape[:-1], 2 * shape[-1], dtype=torch.float64).to(dtype)[..., 3 : 3 + shape[-1]]


def wide(dtype):
    return torch.promote_types(dtype, torch.float32)


def assert_close(got, exact):
    """To the tolerance of its dtype, beside the largest number."""
    scale = exact.abs().max().clamp(min=1e-30)
    torch.testing.assert_close(got / scale, (exact / scale).to(got.dtype), **TOLERANCES[got.dtype.to_real()])


def transposed(x):
    """The same numbers, whose channels do not lie side by side."""
    return x.transpose(0, 2).contiguous().transpose(0, 2)


# ---- norm and convolution --------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("rows", [(1, 1), (2, 1), (1, 4)])
@pytest.mark.parametrize("outputs, inputs", [(1, 1), (7, 33), (300, 770), (5, 4097)])
def test_linear(threads, kernels, dtype, rows, outputs, inputs):
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((*rows, inputs), (outputs, inputs), outputs))
    for given in (None, bias):
        exact = F.linear(x.double(), weight.double(), None if given is None else given.double())
        y = linear(x, weight, given)
        assert kernels.pop() == "linear_cpu" and y.dtype is dtype
        torch.testing.assert_close(y.double(), exact, rtol=TOLERANCES[dtype]["rtol"], atol=1e-6 * inputs**0.5)
        assert torch.equal(linear(transposed(x), weight, given), y)
        kernels.clear()
    assert linear(torch.cat([x] * 5), weight).shape == (5 * rows[0], rows[1], outputs) and not kernels  # too many rows
    assert linear(x, weight.T.contiguous().T).shape == (*rows, outputs)


@each_dtype
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 3), (2, 31, 700)])
def test_rms_norm(threads, kernels, dtype, is_wide, shape):
    x, weight = strided(*shape, dtype=wide(dtype) if is_wide else dtype), torch.randn(2 * shape[2]).to(dtype)[::2]
    y = rms_norm(x, weight, 1e-3)
    assert kernels == ["norm_cpu"] and y.dtype is dtype
    torch.testing.assert_close(
        y, F.rms_norm(x.double(), x.shape[2:], weight.double(), 1e-3).to(dtype), **TOLERANCES[dtype]
    )
    assert torch.equal(rms_norm(transposed(x), weight, 1e-3), y)


@each_dtype
@pytest.mark.parametrize("masked, packed, carried", [*itertools.product([False, True], repeat=3)])
def test_short_convolution(threads, kernels, dtype, masked, packed, carried):
    for taps, length, silu in ((2, 1, True), (4, 1, False), (4, 3, True), (9, 300, carried)):
        weight, bias = torch.randn(37, 1, taps).to(dtype), torch.randn(37).to(dtype) if taps != 2 else None
        x = strided(3, length, 37, dtype=dtype)
        state = strided(3, taps - 1, 37, dtype=dtype) if carried else None
        mask = torch.rand(3, length) < 0.6 if masked else None
        reset = torch.rand(3, length) < 0.1 if packed else None
        y, new_state = short_convolution(x, weight, bias, state, mask=mask, reset=reset, silu=silu)
        assert kernels.pop() == "convolution_cpu"
        exact = [None if t is None else t.double() for t in (x, weight, bias, state)]
        expected, expected_state = _short_convolution(*exact, mask=mask, reset=reset, silu=silu)
        assert_close(y, expected)
        assert torch.equal(new_state, expected_state.to(dtype))
        again = short_convolution(transposed(x), weight, bias, state, mask=mask, reset=reset, silu=silu)
        assert torch.equal(again[0], y) and torch.equal(again[1], new_state)


def test_short_convolution_does_not_depend_on_the_chunks():
    x, weight, mask = torch.randn(2, 200, 19), torch.randn(19, 1, 4), torch.rand(2, 200) < 0.8
    whole, last = short_convolution(x, weight, None, mask=mask)
    parts, state = [], None
    for start, end in itertools.pairwise((0, 1, 2, 100, 200)):
        y, state = short_convolution(x[:, start:end], weight, None, state, mask=mask[:, start:end])
        parts.append(y)
    assert torch.equal(torch.cat(parts, dim=1), whole) and torch.equal(state, last)


# ---- the families' own -----------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("started", [False, True])
def test_gated_scan(threads, kernels, dtype, length, started):
    x, dt, z = (strided(2, length, 130, dtype=dtype) for _ in range(3))
    k, q = strided(2, length, 5, dtype=dtype), strided(2, length, 5, dtype=dtype)
    state = torch.randn(2, 130, 5, dtype=wide(dtype))
    D, start = torch.randn(260).to(dtype)[::2], torch.randn(130, 5, dtype=wide(dtype)) if started else None
    options = {"mask": torch.rand(2, length) < 0.8, "reset": torch.rand(2, length) < 0.1}
    y, final = gated_scan(x, dt, k, q, D, z, state, **options, reset_state=start)
    assert "longhorn_cpu" in kernels
    exact = [t.double() for t in (x, dt, k, q, state)]
    o, expected = longhorn_scan(*exact, **options, reset_state=start, backend="reference")
    exact = (o + D.double() * x.double()) * F.silu(z.double())
    real = options["mask"][..., None]
    assert_close(torch.where(real, y, 0), torch.where(real, exact, 0))
    assert y.isfinite().all()
    torch.testing.assert_close(final, expected.to(final.dtype), rtol=1e-5, atol=1e-5)


@each_dtype
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("magnitude, phase", [("sigmoid", "identity"), ("exponential", "tanh")])
def test_channel_loop(kernels, dtype, magnitude, phase, is_gated):
    state = torch.randn(2, 70, dtype=wide(dtype).to_complex())
    for length, mask, reset in ((1, None, None), (4, torch.rand(2, 4) < 0.7, torch.rand(2, 4) < 0.4)):
        qkv, given = strided(2, length, 210, dtype=dtype), strided(2, length, 140, dtype=dtype)
        z = strided(2, length, 70, dtype=dtype) if is_gated else None
        for initial in (state, state.conj().resolve_conj().mT.contiguous().mT, None):
            options = {"mask": mask, "reset": reset}
            y, final = channel_loop(qkv, given, z, magnitude, phase, initial, **options)
            assert kernels.pop() == "gateloop_cpu"
            exact = [None if t is None else t.double() for t in (qkv, given, z)]
            initial = initial if initial is None else initial.to(torch.complex128)
            by_loop = functools.partial(gateloop_scan, backend="reference")
            expected, expected_final = _channel_loop(by_loop, _silu_gate, *exact, magnitude, phase, initial, **options)
            real = torch.ones(2, length, dtype=torch.bool) if mask is None else mask
            assert_close(torch.where(real[..., None], y, 0), torch.where(real[..., None], expected, 0))
            assert y.isfinite().all()
            torch.testing.assert_close(final, expected_final.to(final.dtype), rtol=1e-5, atol=1e-5)
            kernels.clear()


@each_dtype
@pytest.mark.parametrize("bilinear", [False, True])
@pytest.mark.parametrize("rows", [(1, 1), (2, 3)])
def test_s5(threads, kernels, dtype, bilinear, rows):
    real, imaginary, log_step = torch.randn(3, 60).to(dtype)
    real = -real.exp()
    real[:5] = torch.tensor([0.3, -1e-5, -1e3, -1.0, -0.5])
    imaginary[:5] = torch.tensor([1.0, 1e-3, 50.0, 0.0, 1e3])
    b, c, x = torch.randn(60, 300, 2).to(dtype), torch.randn(300, 60, 2).to(dtype), strided(*rows, 300, dtype=dtype)
    log_step = (log_step - 3).contiguous()
    a, driven = drive(x, b, real, imaginary, log_step, 1.5, bilinear)
    assert kernels == ["s5_cpu"]
    expected = _drive(*(t.double() for t in (x, b, real, imaginary, log_step)), 1.5, bilinear)
    torch.testing.assert_close(a, expected[0].to(a.dtype), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(driven, expected[1].to(a.dtype), rtol=1e-5, atol=1e-5 * expected[1].abs().max().item())
    y = read(transposed(driven), c, 2.0, dtype)
    assert kernels[-1] == "s5_cpu" and y.dtype is dtype
    assert_close(y, _read(driven.to(torch.complex128), c.double(), 2.0, torch.float64))


def test_a_single_position_of_what_comes_after(kernels):
    x, y, d = torch.randn(3, 2, 1, 9).unbind()[:2] + (torch.randn(9),)
    assert_close(skip_gelu(x, y, d), F.gelu(x.double() + d.double() * y.double(), approximate="tanh"))
    assert_close(gate(x, y), x.double() * y.double().sigmoid())
    assert kernels.count("elementwise_cpu") == 2


# ---- where they are not called ---------------------------------------------------------------------------------------


def test_without_a_compiler(monkeypatch):
    """The same in PyTorch."""
    x, c = torch.randn(2, 3, 5), torch.randn(7, 4, 2)

    def run():
        d = drive(x, torch.ones(4, 5, 2), -torch.ones(4), torch.ones(4), -torch.ones(4), 1.0, False)[1]
        return (
            linear(x[:1], torch.eye(5)),
            rms_norm(x, torch.ones(5), 1e-5),
            *short_convolution(x, torch.ones(5, 1, 4), torch.ones(5), silu=True),
            *gated_scan(x, x, x, x, torch.ones(5), x),
            *channel_loop(torch.cat([x, x, x], -1), torch.cat([x, x], -1), x, "sigmoid", "identity"),
            d,
            read(d, c, 2.0, torch.float32),
        )

    expected = run()
    monkeypatch.setattr(cpu, "_load", lambda *_: cpu.BackendUnavailable("none"))
    with pytest.warns(UserWarning, match="none"):
        got = run()
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_other_dtypes_and_shapes_are_left_to_pytorch(kernels):
    x = torch.randn(2, 3, 5)
    assert rms_norm(x.double(), torch.ones(5), 1e-5).dtype is torch.float32
    assert rms_norm(x[0], torch.ones(5), 1e-5).shape == (3, 5)
    assert rms_norm(x.to("meta"), torch.ones(5, device="meta"), 1e-5).is_meta
    assert rms_norm(x[:0], torch.ones(5), 1e-5).shape == (0, 3, 5)
    assert not kernels
    with pytest.raises(RuntimeError):
        rms_norm(x, torch.ones(1), 1e-5)
    with pytest.raises(ValueError, match="mask must have the shape"):
        short_convolution(x, torch.ones(5, 1, 4), None, mask=torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask must have the shape"):
        gated_scan(x, x, x, x, torch.ones(5), x, mask=torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask must have the shape"):
        channel_loop(torch.cat([x, x, x], -1), x[..., :2], None, "sigmoid", "identity", mask=torch.ones(2, 2) > 0)


def test_a_decoded_token_takes_the_checked_way_where_it_must():
    x, state = torch.rand(1, 1, 4), torch.rand(1, 4)
    h, final = linear_scan(x, x, state)
    for a, b, initial in (
        (x.double(), x, state),
        (x[0, 0], x, state),
        (x, x, state.double()),
        (x, x.to(torch.complex64).conj().real, state),
        (x, torch._neg_view(-x), state),
    ):
        got = linear_scan(a, b, initial)
        torch.testing.assert_close(got[0].float(), h)
        torch.testing.assert_close(got[1].float(), final)
    with pytest.raises(ValueError, match="initial_state must have the shape"):
        linear_scan(x, x, state[:, :2])
    with pytest.raises(ValueError, match="does not broadcast"):
        linear_scan(torch.rand(1, 1, 3), x)
    with pytest.raises(TypeError, match="a must be a tensor, got NoneType"):
        linear_scan(None, x)
