"""The CUDA backend of the short convolution: what csrc/convolution_cuda.cu is called with."""

import torch
from torch import Tensor

from . import cuda_kernels
from .cpu import rows
from .cuda_kernels import MAX_GRID_Y, TYPES, Module, aligned, pointer, width_for
from .reference import STATE_DTYPES

# As in csrc/convolution_cuda.cu: threads to a block, the channels side by side of which each takes some, and positions.
THREADS, LANES, POSITIONS = 128, 32, 128
MOST_TAPS = 8  # that registers hold
MOST_POSITIONS = 2**31 - 2 * POSITIONS  # the kernels count them in 32 bits


def module_for(dtype: torch.dtype, taps: int, width: int, silu: bool) -> Module:
    macros = {"TYPE": TYPES[dtype], "TAPS": taps, "WIDTH": width, "SILU": int(silu)}
    return Module("convolution_cuda", tuple((f"HFR_{name}", str(value)) for name, value in macros.items()))


def widest(dtype: torch.dtype, taps: int) -> int:
    """The most channels of a thread, whose inputs and gradients under all taps are in registers."""
    most = 4 if taps <= 4 else 2 if taps <= 6 else 1
    return max(1, most // 2) if STATE_DTYPES[dtype].itemsize == 8 else most


class _Call:
    """What forward and backward share. `more`: what the kernel reads besides, each (B, ..., D)."""

    def __init__(self, x, weight, state, bias, flags, silu: bool, *more: Tensor):
        batch, length, channels = x.shape
        taps = weight.shape[2]
        if length > MOST_POSITIONS:
            raise ValueError(
                f"x must have at most {MOST_POSITIONS} positions on a GPU, got {length}: read it in pieces"
            )
        self.x, self.weight = aligned(rows(x)), aligned(weight.contiguous())  # held until the kernels are launched
        self.state = None if state is None else aligned(state.contiguous())
        self.bias, self.device = None if bias is None else aligned(bias.contiguous()), x.device
        width = width_for(widest(x.dtype, taps), [t for t in (self.x, self.state, *more) if t is not None])
        self.module = module_for(x.dtype, taps, width, silu)
        self.blocks = -(-length // POSITIONS)
        self.grid = -(-channels // (LANES * width)), min(batch * self.blocks, MAX_GRID_Y)
        self.shared = [
            *(batch, length, channels, self.blocks, self.x.data_ptr(), *self.x.stride()[:2]),
            *(pointer(t) for t in (self.state, flags, self.weight, self.bias)),
        ]

    def run(self, entry: str, *arguments: int) -> None:
        cuda_kernels.launch(self.module, entry, self.device, self.grid, THREADS, [*self.shared, *arguments])


def forward(x, weight, state: Tensor | None, bias: Tensor | None, flags, silu: bool) -> tuple[Tensor, Tensor]:
    """y, (B, L, D), and the new state, (B, k - 1, D)."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_state = y.new_empty(len(x), weight.shape[2] - 1, x.shape[2])
    call = _Call(x, weight, state, bias, flags, silu)
    call.run("convolution_forward", y.data_ptr(), new_state.data_ptr())
    return y, new_state


def backward(
    x, weight, state: Tensor | None, bias: Tensor | None, flags, silu: bool, grad_y: Tensor, grad_new_state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x and the state (which means nothing where there is none), and those of the weight and the bias
    in parts that are to be added up, (parts, k + 1, D) in the state's dtype."""
    grad_y, grad_new_state = aligned(rows(grad_y)), aligned(grad_new_state.contiguous())
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_state = torch.empty_like(grad_new_state)
    call = _Call(x, weight, state, bias, flags, silu, grad_y, grad_new_state)
    parts = len(x) * call.blocks, weight.shape[2] + 1, x.shape[2]
    grad_weight = torch.empty(parts, dtype=STATE_DTYPES[x.dtype], device=x.device)
    call.run(
        "convolution_backward",
        *(grad_y.data_ptr(), *grad_y.stride()[:2]),
        *(t.data_ptr() for t in (grad_new_state, grad_x, grad_state, grad_weight)),
    )
    return grad_x, grad_state, grad_weight
