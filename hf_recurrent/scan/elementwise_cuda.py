"""The CUDA backend of the elementwise functions: what csrc/elementwise_cuda.cu is called with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import cuda_kernels
from .cpu import rows
from .cuda_kernels import MAX_GRID_Y, TYPES, WIDEST, Module, aligned, pointer, width_for

# As in csrc/elementwise_cuda.cu: threads to a block, the channels side by side of which each takes some, and positions.
THREADS, LANES, POSITIONS = 128, 32, 64


def module_for(function: str, dtype: torch.dtype, width: int) -> Module:
    return Module(
        "elementwise_cuda", (("HFR_TYPE", TYPES[dtype]), ("HFR_FUNCTION", function), ("HFR_WIDTH", str(width)))
    )


def widest(dtype: torch.dtype) -> int:
    """The most channels of a thread."""
    return WIDEST // dtype.itemsize


class _Call:
    """What forward and backward share. `more`: what the kernel reads besides."""

    def __init__(self, function: str, inputs: Sequence[Tensor], d: Tensor | None, m: Tensor | None, *more: Tensor):
        self.inputs = [aligned(rows(x)) for x in inputs]  # held until the kernels are launched
        self.d, self.m = (None if t is None else aligned(t) for t in (d, m))
        x = self.inputs[0]
        batch, length, channels = x.shape
        width = width_for(widest(x.dtype), [*self.inputs, *more])
        self.module, self.device = module_for(function, x.dtype, width), x.device
        self.blocks = -(-batch * length // POSITIONS)
        self.grid = -(-channels // (LANES * width)), min(self.blocks, MAX_GRID_Y)
        three = (*self.inputs, self.inputs[-1])[:3]  # the last means nothing to a function of two
        described = (number for t in three for number in (t.data_ptr(), *t.stride()[:2]))
        self.shared = [batch, length, channels, *described, pointer(self.d), pointer(self.m)]

    def run(self, entry: str, *arguments: int) -> None:
        if self.inputs[0].numel():
            cuda_kernels.launch(self.module, entry, self.device, self.grid, THREADS, [*self.shared, *arguments])


def forward(function: str, inputs: Sequence[Tensor], d: Tensor | None, m: Tensor | None) -> Tensor:
    """The output of `function`, a name in csrc/elementwise.h, (B, L, D).

    Args:
        inputs: (B, L, D) each.
        d, m: (D,), where the function skips, and (B, D) or None, in the state's dtype, contiguous.
    """
    x = inputs[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _Call(function, inputs, d, m).run("elementwise_forward", out.data_ptr())
    return out


def backward(
    function: str, inputs: Sequence[Tensor], d: Tensor | None, m: Tensor | None, grad: Tensor
) -> tuple[Tensor | None, list[Tensor]]:
    """The gradient of d in parts that are to be added up, (parts, D) in its dtype, and those of the inputs."""
    grad = aligned(rows(grad))
    grads = [torch.empty(grad.shape, dtype=grad.dtype, device=grad.device) for _ in inputs]
    call = _Call(function, inputs, d, m, grad)
    parts = None if d is None else torch.empty(call.blocks, len(d), dtype=d.dtype, device=d.device)
    addresses = [t.data_ptr() for t in grads] + [0] * (3 - len(grads))
    call.run("elementwise_backward", grad.data_ptr(), *grad.stride()[:2], *addresses, pointer(parts))
    return parts, grads
