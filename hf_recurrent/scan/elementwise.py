"""What comes after a recurrence, elementwise, with each tensor read and written once in each direction.

On the CPU, where PyTorch would go through memory for every operation, by compiled kernels (csrc/elementwise.h);
elsewhere, and under torch.compile, which fuses such operations itself, by the plain PyTorch that defines each function.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from . import cpu
from .ops import choose_backend
from .reference import STATE_DTYPES
from .unobserved import unobserved

# batch, length, channels, threads; inputs; d, m, out; grad_out; grad_inputs, grad_d
_PROBLEM = cpu.Problem("22q")


def _skip_gelu(x: Tensor, y: Tensor, d: Tensor, m: Tensor | None) -> Tensor:
    o = F.gelu(x + d * y, approximate="tanh")
    return o if m is None else m * o


def _gate(x: Tensor, y: Tensor, d: Tensor | None, m: Tensor | None) -> Tensor:
    o = x * torch.sigmoid(y)
    return o if m is None else m * o


FUNCTIONS = (_skip_gelu, _gate)  # in the order of csrc/elementwise_cpu.cpp


def _forward(function: int, x: Tensor, y: Tensor, d: Tensor | None, m: Tensor | None) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    _call(function, False, x, y, d, m, out.data_ptr(), *cpu.NOTHING, 0, 0, 0)
    return out


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function: int, x: Tensor, y: Tensor, d: Tensor | None, m: Tensor | None) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x, y, d, m)
        return _forward(function, x, y, d, m)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, y, d, m = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated again
            wanted = [t for t in (x, y, d) if t is not None and t.requires_grad]
            grads = torch.autograd.grad(FUNCTIONS[ctx.function](x, y, d, m), wanted, grad, create_graph=True)
            found = iter(grads)
            return None, *(next(found) if t is not None and t.requires_grad else None for t in (x, y, d)), None
        grad_x, grad_y = (torch.empty(x.shape, dtype=x.dtype) for _ in "xy")
        threads = cpu.threads_for(x.numel())
        grad_d = torch.zeros(threads, x.shape[2], dtype=STATE_DTYPES[x.dtype])
        grad = cpu.rows(grad)
        _call(
            ctx.function,
            True,
            x,
            y,
            d,
            m,
            0,
            *cpu.describe(grad),
            grad_x.data_ptr(),
            grad_y.data_ptr(),
            grad_d.data_ptr(),
        )
        return None, grad_x, grad_y, None if d is None else grad_d.sum(0).to(d.dtype), None


def _call(
    function: int, backwards: bool, x: Tensor, y: Tensor, d: Tensor | None, m: Tensor | None, *fields: int
) -> None:
    """`fields`: those of the problem from `out` on."""
    state = STATE_DTYPES[x.dtype]
    x, y = cpu.rows(x), cpu.rows(y)
    d = d if d is None else d.to(state).contiguous()
    m = m if m is None else m.to(state).expand(x.shape[0], 1, -1).contiguous()
    if x.numel():
        threads = cpu.threads_for(x.numel())
        fields = (*x.shape, threads, *cpu.describe(x), *cpu.describe(y), cpu.pointer(d), cpu.pointer(m), *fields)
        cpu.call("elementwise_cpu", "hfr_elementwise", x.dtype, _PROBLEM, fields, function, backwards)


def _apply(plain: Callable, x: Tensor, y: Tensor, d: Tensor | None, m: Tensor | None) -> Tensor:
    channels, other = x.shape[-1:], "skipped" if plain is _skip_gelu else "gate"
    for name, t, shape in ((other, y, x.shape), ("d", d, channels), ("scale", m, (x.shape[0], 1, *channels))):
        if t is not None and t.shape != shape:
            raise ValueError(f"{name} must have the shape {tuple(shape)}, got {tuple(t.shape)}")
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or isinstance(x, FakeTensor)
    if traced or choose_backend(None, x.device) != "cpu":
        return plain(x, y, d, m)
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in (x, y, d) if t is not None))
    run = _forward if unobserved(x, y, d, m) else _Compiled.apply
    return run(FUNCTIONS.index(plain), x.to(dtype), y.to(dtype), d, m)


def skip_gelu(x: Tensor, skipped: Tensor, d: Tensor, scale: Tensor | None = None) -> Tensor:
    """scale * gelu(x + d * skipped), with the tanh approximation of GELU.

    Args:
        x, skipped: (B, L, D), real.
        d: (D,).
        scale: (B, 1, D) or absent; has no gradient.

    Returns:
        (B, L, D).

    Raises:
        ValueError: a shape other than these; nothing broadcasts.
    """
    return _apply(_skip_gelu, x, skipped, d, scale)


def gate(x: Tensor, gate: Tensor, scale: Tensor | None = None) -> Tensor:
    """scale * x * sigmoid(gate), with arguments as for `skip_gelu`."""
    return _apply(_gate, x, gate, None, scale)
