"""What comes after a recurrence, elementwise, with each tensor read and written once in each direction.

On CPUs and NVIDIA GPUs, where PyTorch would go through memory for every operation, by compiled kernels
(csrc/elementwise.h); elsewhere, and under torch.compile, which fuses such operations itself, by the plain PyTorch that
defines each function.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from . import cpu, elementwise_cuda
from .ops import choose_backend
from .reference import STATE_DTYPES
from .unobserved import unobserved

_MOST_INPUTS = 3
# batch, length, channels, threads; inputs; d, m, out; grad_out; grad_inputs, grad_d
_PROBLEM = cpu.Problem("27q")


# Of two or three inputs, d and m.


def _skip_gelu(x: Tensor, y: Tensor, d: Tensor, m: Tensor | None) -> Tensor:
    return _scaled(F.gelu(x + d * y, approximate="tanh"), m)


def _gate(x: Tensor, y: Tensor, d: None, m: Tensor | None) -> Tensor:
    return _scaled(x * torch.sigmoid(y), m)


def _silu_gate(x: Tensor, y: Tensor, d: None = None, m: Tensor | None = None) -> Tensor:
    return _scaled(x * F.silu(y), m)


def _skip_silu_gate(x: Tensor, y: Tensor, z: Tensor, d: Tensor, m: Tensor | None = None) -> Tensor:
    return _scaled((x + d * y) * F.silu(z), m)


def _scaled(o: Tensor, m: Tensor | None) -> Tensor:
    return o if m is None else m * o


# With their names in csrc/elementwise.h, in the order of csrc/elementwise_cpu.cpp.
FUNCTIONS = {_skip_gelu: "SkipGelu", _gate: "Gate", _silu_gate: "SiluGate", _skip_silu_gate: "SkipSiluGate"}
_Inputs = Sequence[Tensor]


def _vectors(inputs: _Inputs, d: Tensor | None, m: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """d and m as the kernels take them, (D,) and (B, D) in the state's dtype."""
    x = inputs[0]
    dtype = STATE_DTYPES[x.dtype]
    d = d if d is None else d.to(dtype).contiguous()
    return d, m if m is None else m.to(dtype).expand(x.shape[0], 1, x.shape[2]).contiguous()


def _forward(function: Callable, backend: str, d: Tensor | None, m: Tensor | None, *inputs: Tensor) -> Tensor:
    d, m = _vectors(inputs, d, m)
    if backend == "cuda":
        return elementwise_cuda.forward(FUNCTIONS[function], inputs, d, m)
    out = torch.empty(inputs[0].shape, dtype=inputs[0].dtype)
    _call(function, False, inputs, d, m, out.data_ptr(), *cpu.NOTHING, *[0] * _MOST_INPUTS, 0)
    return out


def _backward(
    function: Callable, backend: str, d: Tensor | None, m: Tensor | None, inputs: _Inputs, grad: Tensor
) -> tuple[Tensor | None, list[Tensor]]:
    """The gradient of d, in parts that are to be added up, and those of the inputs."""
    d, m = _vectors(inputs, d, m)
    if backend == "cuda":
        return elementwise_cuda.backward(FUNCTIONS[function], inputs, d, m, grad)
    x, grad = inputs[0], cpu.rows(grad)
    grads = [torch.empty(x.shape, dtype=x.dtype) for _ in inputs]
    parts = None
    if d is not None:
        parts = torch.zeros(cpu.threads_for(x.numel()), x.shape[2], dtype=d.dtype)
    addresses = [t.data_ptr() for t in grads] + [0] * (_MOST_INPUTS - len(grads))
    _call(function, True, inputs, d, m, 0, *cpu.describe(grad), *addresses, cpu.pointer(parts))
    return parts, grads


def _call(
    function: Callable, backwards: bool, inputs: _Inputs, d: Tensor | None, m: Tensor | None, *fields: int
) -> None:
    """`fields`: those of the problem from `out` on."""
    x, inputs = inputs[0], [cpu.rows(t) for t in inputs]
    if x.numel():
        first, second, third = (*inputs, None)[:_MOST_INPUTS]
        described = (*cpu.describe(first), *cpu.describe(second), *cpu.describe_if(third))
        shared = (*x.shape, cpu.threads_for(x.numel()), *described, cpu.pointer(d), cpu.pointer(m))
        number = list(FUNCTIONS).index(function)
        cpu.call("elementwise_cpu", "hfr_elementwise", x.dtype, _PROBLEM, (*shared, *fields), number, backwards)


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function: Callable, backend: str, d: Tensor | None, m: Tensor | None, *inputs: Tensor) -> Tensor:
        ctx.function, ctx.backend = function, backend
        ctx.save_for_backward(d, m, *inputs)
        return _forward(function, backend, d, m, *(x.resolve_neg() for x in inputs))

    @staticmethod
    def backward(ctx, grad: Tensor):
        d, m, *inputs = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated again
            wanted = [t for t in (d, *inputs) if t is not None and t.requires_grad]
            found = iter(torch.autograd.grad(ctx.function(*inputs, d, m), wanted, grad, create_graph=True))
            grad_d, *grads = (next(found) if t is not None and t.requires_grad else None for t in (d, *inputs))
        else:
            inputs = [x.resolve_neg() for x in inputs]
            parts, grads = _backward(ctx.function, ctx.backend, d, m, inputs, grad.resolve_neg())
            grad_d = None if d is None else parts.sum(0).to(d.dtype)
        return None, None, grad_d, None, *grads


def _check_shape(name: str, t: Tensor | None, shape: Sequence[int]) -> None:
    if t is not None and t.shape != shape:
        raise ValueError(f"{name} must have the shape {tuple(shape)}, got {tuple(t.shape)}")


def _apply(plain: Callable, inputs: dict[str, Tensor], d: Tensor | None, m: Tensor | None) -> Tensor:
    """`plain` of inputs, by name, that have the shape of the first."""
    x, *others = inputs.values()
    for name, t in inputs.items():
        _check_shape(name, t, x.shape)
    _check_shape("d", d, x.shape[-1:])
    _check_shape("scale", m, (x.shape[0], 1, x.shape[-1]))
    given = [t for t in (x, *others, d) if t is not None]
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in given))
    run = _forward if unobserved(*given, m) else _Compiled.apply
    if run is not _forward:  # else all are on the CPU, and nothing traces them
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or isinstance(x, FakeTensor)
        if traced or any(t.device != x.device for t in (*given, m) if t is not None):  # plain PyTorch refuses these
            return plain(x, *others, d, m)
    backend = choose_backend(None, x.device)
    if backend not in ("cpu", "cuda") or dtype not in cpu.REAL:
        return plain(x, *others, d, m)
    return run(plain, backend, d, m, *(t.to(dtype) for t in (x, *others)))


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
    return _apply(_skip_gelu, {"x": x, "skipped": skipped}, d, scale)


def gate(x: Tensor, gate: Tensor, scale: Tensor | None = None) -> Tensor:
    """scale * x * sigmoid(gate), with arguments as for `skip_gelu`."""
    return _apply(_gate, {"x": x, "gate": gate}, None, scale)


def silu_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * silu(gate), with arguments as for `skip_gelu`."""
    return _apply(_silu_gate, {"x": x, "gate": gate}, None, None)


def skip_silu_gate(x: Tensor, skipped: Tensor, gate: Tensor, d: Tensor) -> Tensor:
    """(x + d * skipped) * silu(gate), with arguments as for `skip_gelu`."""
    return _apply(_skip_silu_gate, {"x": x, "skipped": skipped, "gate": gate}, d, None)
