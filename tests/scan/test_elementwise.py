"""The fused elementwise functions against the plain PyTorch that defines them."""

import pytest
import torch
from oracle import repeated

from hf_recurrent.scan import elementwise
from hf_recurrent.scan.elementwise import FUNCTIONS, gate, silu_gate, skip_gelu, skip_silu_gate

NAMES = dict(zip((skip_gelu, gate, silu_gate, skip_silu_gate), FUNCTIONS, strict=True))
SKIPPING = (skip_gelu, skip_silu_gate)
SCALED = (skip_gelu, gate)
every_function = pytest.mark.parametrize("function", NAMES, ids=lambda function: function.__name__)

TOLERANCES = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-7},
    torch.float16: {"rtol": 2**-9, "atol": 2**-9},
}


def inputs_for(function, *tensors):
    """Of x, y, z and d, those that it takes."""
    x, y, z, d = tensors
    return [x, y, *([z] if function is skip_silu_gate else []), *([d] if function in SKIPPING else [])]


def plain(function, *inputs, m=None):
    inputs, d = (inputs[:-1], inputs[-1]) if function in SKIPPING else (inputs, None)
    return NAMES[function](*inputs, d, m)


def call(function, *inputs, m=None):
    return function(*inputs, m) if function in SCALED else function(*inputs)


def compare(function, shape, dtype, scaled=False, device="cpu", runs=1):
    """The function's values and gradients, and those of what defines it in float64; asserts on each."""
    # 16-bit inputs, computed with in float64, are what the exact results are for.
    *tensors, grad = (torch.randn(shape, dtype=torch.float64).mul(4).to(dtype) for _ in range(4))
    d = torch.randn(shape[2], dtype=torch.float64).to(dtype)
    m = torch.randint(0, 3, (shape[0], 1, shape[2])).to(dtype) / 2 if scaled and function in SCALED else None
    tensors = inputs_for(function, *tensors, d)
    exact = [t.double().requires_grad_() for t in tensors]
    expected = plain(function, *exact, m=None if m is None else m.double())
    expected = [expected, *torch.autograd.grad(expected, exact, grad.double())]

    def run():
        leaves = [t.to(device).requires_grad_() for t in tensors]
        got = call(function, *leaves, m=None if m is None else m.to(device))
        return [got, *torch.autograd.grad(got, leaves, grad.to(device))]

    for x, want in zip(repeated(runs, run), expected, strict=True):
        assert x.dtype is dtype and x.shape == want.shape
        scale = (want.abs().max() if x.numel() else 0) or 1
        torch.testing.assert_close(x.cpu() / scale, (want / scale).to(dtype), **TOLERANCES[dtype])


@pytest.fixture
def compiled(monkeypatch):
    """Fails a test whose function is not computed by the kernel."""
    calls = []
    original = elementwise._call
    monkeypatch.setattr(elementwise, "_call", lambda *a, **k: (calls.append(a), original(*a, **k)))
    yield
    assert calls


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@every_function
@pytest.mark.parametrize("threads, shape", [(1, (3, 7, 37)), (3, (2, 401, 64))])
def test_values_and_gradients(compiled, threads, shape, function, scaled, dtype):
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compare(function, shape, dtype, scaled)
    finally:
        torch.set_num_threads(before)


@every_function
def test_layouts_and_mixed_dtypes(compiled, function):
    """Slices, transposes and broadcast gradients are read as they are; what is promoted is what PyTorch promotes."""
    torch.manual_seed(0)
    x = torch.randn(6, 5, 3).double().transpose(0, 2).requires_grad_()
    y, d = torch.randn(3, 5, 20)[:, :, 4:10].requires_grad_(), torch.randn(6, requires_grad=True)
    z = torch.randn(3, 1, 6, dtype=torch.complex64).expand(-1, 5, -1).conj().imag.requires_grad_()
    inputs = inputs_for(function, x, y, z, d)
    results = []
    for f in (call, plain):
        out = f(function, *inputs)
        assert out.dtype == torch.float64
        results.append([out, *torch.autograd.grad(out.sum(), inputs)])
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@every_function
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_nothing_of_something(function, shape):
    compare(function, shape, torch.float32)


def test_extreme_values(compiled):
    """Saturated, and nothing overflows on the way (in PyTorch's own gelu, the cube of 1e30 does)."""
    big = torch.tensor([-1e30, -1e4, -90.0, -13.0, 0.0, 13.0, 90.0, 1e4, 1e30]).repeat(1, 2, 1).requires_grad_()
    gelu = skip_gelu(big, torch.zeros(1, 2, 9), torch.zeros(9))
    torch.testing.assert_close(gelu, big.clamp(min=0), rtol=1e-6, atol=1e-6)
    slope = torch.where(big == 0, 0.5, (big > 0).float())
    torch.testing.assert_close(torch.autograd.grad(gelu.sum(), big)[0], slope, rtol=0, atol=1e-6)
    gated = gate(torch.ones(1, 2, 9), big)
    torch.testing.assert_close(gated, torch.sigmoid(big), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(gated.sum(), big)[0], torch.where(big == 0, 0.25, 0.0), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((torch.ones(2, 1, 3), torch.ones(3)), r"skipped must have the shape \(2, 5, 3\), got \(2, 1, 3\)"),
        ((torch.ones(2, 5, 3), torch.ones(1)), r"d must have the shape \(3,\), got \(1,\)"),
        ((torch.ones(2, 5, 3), torch.ones(3), torch.ones(3)), r"scale must have the shape \(2, 1, 3\), got \(3,\)"),
    ],
)
def test_shapes_that_the_kernel_would_read_past(arguments, message):
    with pytest.raises(ValueError, match=message):
        skip_gelu(torch.ones(2, 5, 3), *arguments)


@every_function
def test_nan_stays(function):
    nan, ones = torch.full((1, 2, 3), float("nan")), torch.ones(1, 2, 3)
    for place in range(3 if function is skip_silu_gate else 2):
        tensors = [nan if i == place else ones for i in range(3)]
        assert call(function, *inputs_for(function, *tensors, torch.ones(3))).isnan().all()


def test_tensors_on_different_devices():
    x = torch.ones(1, 2, 3)
    with pytest.raises(RuntimeError, match="device"):
        gate(x, x.to("meta"))


def test_without_a_kernel(monkeypatch):
    """Where there is none, and under torch.compile: plain PyTorch, with the same results."""
    torch.manual_seed(0)
    x, y, d = torch.randn(2, 5, 4), torch.randn(2, 5, 4), torch.randn(4)
    expected = skip_gelu(x, y, d)
    torch.testing.assert_close(torch.compile(skip_gelu, fullgraph=True, backend="eager")(x, y, d), expected)
    monkeypatch.setattr(elementwise, "_call", None)
    assert skip_gelu(x.to("meta"), y.to("meta"), d.to("meta")).shape == x.shape
    monkeypatch.setattr(elementwise, "choose_backend", lambda *_: "chunked")
    torch.testing.assert_close(skip_gelu(x, y, d), expected)
    torch._dynamo.reset()


def test_second_derivatives():
    torch.manual_seed(0)
    x, y, d = torch.randn(2, 3, 4).double(), torch.randn(2, 3, 4).double(), torch.randn(4).double()
    inputs = [t.requires_grad_() for t in (x, y, (x * y).detach(), d)]
    for function in NAMES:
        assert torch.autograd.gradgradcheck(function, inputs_for(function, *inputs))


def test_forward_mode_says_no():
    x = torch.randn(1, 2, 3)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        gate(torch.autograd.forward_ad.make_dual(x, x), x)
