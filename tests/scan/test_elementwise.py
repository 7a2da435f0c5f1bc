"""The fused elementwise functions against the plain PyTorch that defines them."""

import pytest
import torch

from hf_recurrent.scan import elementwise
from hf_recurrent.scan.elementwise import FUNCTIONS, gate, skip_gelu

TOLERANCES = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-7},
    torch.float16: {"rtol": 2**-9, "atol": 2**-9},
}


def plain(function, x, y, d, m):
    return dict(zip((skip_gelu, gate), FUNCTIONS, strict=True))[function](x, y, d, m)


def call(function, x, y, d, m):
    return skip_gelu(x, y, d, m) if function is skip_gelu else gate(x, y, m)


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
@pytest.mark.parametrize("function", [skip_gelu, gate])
@pytest.mark.parametrize("threads, shape", [(1, (3, 7, 37)), (3, (2, 401, 64))])
def test_values_and_gradients(compiled, threads, shape, function, scaled, dtype):
    torch.manual_seed(0)
    # 16-bit inputs, computed with in float64, are what the exact results are for.
    x, y, grad = (torch.randn(shape, dtype=torch.float64).mul(4).to(dtype) for _ in range(3))
    d = torch.randn(shape[2], dtype=torch.float64).to(dtype)
    m = torch.randint(0, 3, (shape[0], 1, shape[2])).to(dtype) / 2 if scaled else None
    tensors = [x, y, d] if function is skip_gelu else [x, y]
    exact = [t.double().requires_grad_() for t in tensors]
    expected = plain(function, *exact, *([None] * (3 - len(exact))), None if m is None else m.double())
    expected_grads = torch.autograd.grad(expected, exact, grad.double())
    tensors = [t.clone().requires_grad_() for t in tensors]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = call(function, *tensors, *([None] * (3 - len(tensors))), m)
        grads = torch.autograd.grad(got, tensors, grad)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(got, expected.to(dtype), **TOLERANCES[dtype])
    for x, want in zip(grads, expected_grads, strict=True):
        scale = want.abs().max()
        torch.testing.assert_close(x / scale, (want / scale).to(dtype), **TOLERANCES[dtype])


@pytest.mark.parametrize("function", [skip_gelu, gate])
def test_layouts_and_mixed_dtypes(compiled, function):
    """Slices, transposes and broadcast gradients are read as they are; what is promoted is what PyTorch promotes."""
    torch.manual_seed(0)
    x = torch.randn(6, 5, 3).double().transpose(0, 2).requires_grad_()
    y, d = torch.randn(3, 5, 20)[:, :, 4:10].requires_grad_(), torch.randn(6, requires_grad=True)
    inputs = [x, y, d][: 3 if function is skip_gelu else 2]
    results = []
    for f in (call, plain):
        out = f(function, x, y, d if function is skip_gelu else None, None)
        assert out.dtype == torch.float64
        results.append([out, *torch.autograd.grad(out.sum(), inputs)])
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


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


def test_nan_stays():
    x = torch.full((1, 2, 3), float("nan"))
    assert skip_gelu(x, x, torch.ones(3)).isnan().all() and gate(x, torch.zeros_like(x)).isnan().all()
    assert gate(torch.ones_like(x), x).isnan().all()


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
    inputs = [t.requires_grad_() for t in (x, y, d)]
    assert torch.autograd.gradgradcheck(skip_gelu, inputs)
    assert torch.autograd.gradgradcheck(gate, inputs[:2])


def test_forward_mode_says_no():
    x = torch.randn(1, 2, 3)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        gate(torch.autograd.forward_ad.make_dual(x, x), x)
