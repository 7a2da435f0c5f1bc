"""The short convolution's kernels against the float64 loop, forward and all gradients."""

import pytest
import torch
import torch.nn.functional as F
from oracle import REALS, TOLERANCE, mask_and_reset, random, repeated

from hf_recurrent.scan import convolution
from hf_recurrent.scan.convolution import _short_convolution, short_convolution
from hf_recurrent.scan.ops import step_flags


def loop(x, weight, bias, state, mask=None, reset=None, silu=False):
    """By its definition: the last k real inputs of the document, position by position."""
    window = F.pad(state, (0, 0, 1, 0))
    outputs = []
    for t in range(x.shape[1]):
        if reset is not None:
            begins = reset[:, t] if mask is None else reset[:, t] & mask[:, t]
            window = torch.where(begins[:, None, None], 0, window)
        moved = torch.cat([window[:, 1:], x[:, t, None]], dim=1)
        y = (moved * weight[:, 0].T).sum(1)
        y = y if bias is None else y + bias
        y = F.silu(y) if silu else y
        if mask is not None:
            moved, y = (torch.where(mask[:, t].view(-1, *[1] * n), *z) for n, z in ((2, (moved, window)), (1, (y, 0))))
        window = moved
        outputs.append(y)
    return torch.stack(outputs, dim=1), window[:, 1:]


def inputs_for(batch, length, channels, taps, dtype, with_state=True, with_bias=True):
    """x, weight, bias and state."""
    return [
        random(batch, length, channels, dtype=dtype),
        random(channels, 1, taps, dtype=dtype),
        random(channels, dtype=dtype) if with_bias else None,
        random(batch, taps - 1, channels, dtype=dtype) if with_state else None,
    ]


def gradients(function, inputs, weights):
    """Outputs, new state and the gradients of whatever is there, under fixed output weights."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    y, state = function(*leaves)
    loss = (y.to(weights[0].dtype) * weights[0]).sum() + (state.to(weights[0].dtype) * weights[1]).sum()
    wanted = [x for x in leaves if x is not None]
    return y, state, *torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)


def compare(inputs, backend, device="cpu", runs=1, silu=False, mask=None, reset=None):
    """A backend's operator and the float64 loop on the same values; asserts on every output and gradient. The scale of
    an error is the largest sum of absolute terms: that of the loop on absolute values."""
    x, weight, bias, state = inputs
    dtype, shape, taps = x.dtype, x.shape, weight.shape[2]
    left = (shape[0], taps - 1, shape[2])
    weights = [random(*size, dtype=dtype).double() for size in (shape, left)]

    def run(x, weight, bias, state):
        flags = step_flags(*(None if t is None else t.to(device) for t in (mask, reset)), reverse=False)
        chosen = convolution.choose_backend(backend, x.device)
        return torch.ops.hf_recurrent.short_convolution(x, weight, state, bias, flags, silu, chosen)

    moved = [None if t is None else t.to(device) for t in inputs]
    there = [w.to(device) for w in weights]
    got = repeated(runs, lambda: gradients(run, moved, there))

    def definition(silu):
        def run(x, weight, bias, state):
            state = torch.zeros(left, dtype=x.dtype) if state is None else state
            return loop(x, weight, bias, state, mask, reset, silu)

        return run

    exact = [None if t is None else t.double() for t in inputs]
    want = gradients(definition(silu), exact, weights)
    sizes = gradients(definition(False), [None if t is None else t.abs() for t in exact], [w.abs() for w in weights])
    given = [name for name, t in zip(("x", "weight", "bias", "state"), inputs, strict=True) if t is not None]
    names = ["y", "new_state", *(f"grad of {name}" for name in given)]
    for name, a, b, scale in zip(names, got, want, sizes, strict=True):
        assert a.shape == b.shape and a.dtype is dtype and not a.isnan().any(), name
        if a.numel():
            error, scale = (a.to(b) - b).abs().max().item(), scale.abs().max().item()
            assert error <= TOLERANCE[dtype] * scale, (
                f"{name}: error {error:.3g}, {error / max(scale, 1e-30):.3g} relative"
            )


# (batch, length, channels, taps)
SHAPES = [(1, 1, 1, 4), (3, 2, 33, 2), (2, 7, 64, 1), (5, 33, 1, 5), (2, 1000, 33, 4), (1, 4097, 7, 3), (2, 33, 768, 4)]


@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 40, 600, 9), (1, 70, 3, 32)], ids=str)
def test_cpu(shape, dtype):
    mask, reset = mask_and_reset(*shape[:2])
    for threads, silu, with_state, options in [
        (1, False, True, {}),
        (3, True, False, {"mask": mask, "reset": reset}),
        (2, True, True, {"mask": mask}),
        (3, False, True, {"reset": reset}),
    ]:
        torch.set_num_threads(threads)
        compare(inputs_for(*shape, dtype, with_state, with_bias=not silu), "cpu", runs=2, silu=silu, **options)
    torch.set_num_threads(1)


def test_the_operator():
    """Its schema, its fake kernels and its autograd, as PyTorch checks them."""
    mask, reset = mask_and_reset(2, 5)
    x, weight, bias, state = (t.requires_grad_() for t in inputs_for(2, 5, 3, 4, torch.float64))
    for given in (state, bias, step_flags(mask, reset, False), True), (None, None, None, False):
        torch.library.opcheck(torch.ops.hf_recurrent.short_convolution.default, (x, weight, *given, "cpu"))


def test_gradients_of_gradients():
    """Are refused by the kernels, and to be had in plain PyTorch."""
    x, weight, *_ = inputs_for(1, 5, 3, 4, torch.float64)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(short_convolution(x, weight, None, silu=True)[0].sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="short_convolution is differentiable once"):
        torch.autograd.grad(grad.sum(), x)
    (grad,) = torch.autograd.grad(_short_convolution(x, weight, None, silu=True)[0].sum(), x, create_graph=True)
    assert torch.autograd.grad(grad.sum(), x)[0].abs().sum() > 0


def test_forward_mode():
    """Which kernels do not have, is computed in plain PyTorch, inside torch.func and out of it."""
    x, weight, bias, state = inputs_for(2, 5, 3, 4, torch.float64)
    tangent = torch.randn_like(x)
    want = (
        _short_convolution(x + 1e-7 * tangent, weight, bias, state)[0] - _short_convolution(x, weight, bias, state)[0]
    ) / 1e-7
    _, slope = torch.func.jvp(lambda x: short_convolution(x, weight, bias, state)[0], (x,), (tangent,))
    torch.testing.assert_close(slope, want, rtol=1e-5, atol=1e-6)
    with torch.autograd.forward_ad.dual_level():
        y, _ = short_convolution(torch.autograd.forward_ad.make_dual(x, tangent), weight, bias, state)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(y).tangent, slope)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(weights):
    """As PyTorch's own convolutions: in the lower dtype, whose gradients come back in the inputs' own."""
    inputs = [t.requires_grad_() for t in inputs_for(2, 9, 5, 4, weights)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = short_convolution(*inputs, silu=True)
    assert y.dtype is torch.bfloat16 and state.dtype is weights
    want, _ = _short_convolution(*(t.detach().double() for t in inputs), silu=True)
    torch.testing.assert_close(y.double(), want, rtol=0.03, atol=0.05)
    grads = torch.autograd.grad(y.float().sum(), inputs)
    assert all(grad.dtype is weights and grad.isfinite().all() for grad in grads)


def test_what_no_kernel_takes():
    """More taps than they are made for; integers, another dtype's weights and other shapes are PyTorch's to refuse."""
    x, weight, bias, state = inputs_for(1, 50, 3, 40, torch.float32)
    x.requires_grad_()
    y, new_state = short_convolution(x, weight, bias, state)
    want = loop(*(t.double() for t in (x, weight, bias, state)))
    torch.testing.assert_close(y.double(), want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(new_state.double(), want[1])
    with pytest.raises(RuntimeError):
        short_convolution(x, weight.double(), bias, state)
    with pytest.raises(ValueError, match=r"mask must have the shape \(batch, length\) = \(1, 50\), got \(1, 3\)"):
        short_convolution(x, weight[..., :4], bias, None, mask=torch.ones(1, 3, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 4, 3), (2, 4, 0)], ids=str)
def test_empty(shape):
    x, weight, bias, state = inputs_for(*shape, 3, torch.float32)
    leaves = [t.requires_grad_() for t in (x, weight, bias, state)]
    y, new_state = short_convolution(*leaves)
    assert y.shape == shape
    torch.testing.assert_close(new_state, state if shape[1] == 0 else new_state)
    *others, grad_state = torch.autograd.grad(y.sum() + new_state.sum(), leaves)
    assert all(not grad.any() for grad in others)
    torch.testing.assert_close(grad_state, torch.ones_like(state) if shape[1] == 0 else grad_state)


def test_nothing_of_other_documents():
    """What is not finite, in padding or another document of the row, spoils no output, gradient or state."""
    check_apart(lambda *inputs, flags: torch.ops.hf_recurrent.short_convolution(*inputs, flags, True, "cpu"))


def check_apart(run):
    x, weight, bias, _ = inputs_for(2, 300, 8, 4, torch.float32)
    mask, reset = torch.ones(2, 300, dtype=torch.bool), torch.zeros(2, 300, dtype=torch.bool)
    reset[0, [140, 150]] = True
    mask[0, 200:203] = False
    x[0, 145], x[0, 201] = float("nan"), float("inf")
    slopes = torch.ones_like(x)
    slopes[0, 201] = float("nan")
    x.requires_grad_()
    y, state = run(x, weight, None, bias, flags=step_flags(mask, reset, False))
    (grad,) = torch.autograd.grad((y, state), x, (slopes, torch.ones_like(state)))
    apart = torch.ones(2, 300, dtype=torch.bool)
    apart[0, 140:150] = False
    assert y[apart].isfinite().all() and grad[apart].isfinite().all() and state.isfinite().all()
    assert y[0, 145].isnan().all() and not y[0, 200:203].any() and not grad[0, 200:203].any()


@pytest.mark.parametrize("which", ["weight", "bias", "state"])
def test_tensors_on_another_device(which):
    names = "x", "weight", "bias", "state"
    inputs = dict(zip(names, inputs_for(1, 5, 3, 4, torch.float32), strict=True))
    inputs["x"].requires_grad_()
    with pytest.raises(ValueError, match=f"{which} is on meta, expected cpu as the inputs"):
        short_convolution(**inputs | {which: inputs[which].to("meta")})
