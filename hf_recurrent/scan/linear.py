"""A matrix times a few vectors, which is nearly all of a decoded token's time.

On the CPU by a kernel (csrc/linear_cpu.cpp) that reads the weights once, as fast as memory gives them. PyTorch's
product is made for many vectors, and takes about twice as long for one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu
from .unobserved import unobserved

FEW = 4  # positions of all rows; for more, PyTorch's product is as fast

# rows, inputs, outputs, threads; x, its stride; weight, bias, out
_PROBLEM = cpu.Problem("9q")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """
    x weight^T + bias, as `torch.nn.functional.linear`.

    Args:
        x: (B, L, inputs).
        weight, bias: (outputs, inputs) and (outputs,), or no bias.
    """
    dtype, kernel = x.dtype, None
    if (
        x.dim() == 3
        and unobserved(x, weight, bias)  # before sizes, of which an export would take note
        and 0 < x.shape[0] * x.shape[1] <= FEW
        and dtype in cpu.REAL
        and weight.dtype is dtype
        and weight.dim() == 2
        and weight.shape[1] == x.shape[2]
        and weight.is_contiguous()
        and (bias is None or (bias.dtype is dtype and bias.shape == weight.shape[:1] and bias.is_contiguous()))
        and weight.numel()
    ):
        kernel = cpu.kernel("linear_cpu", "hfr_linear", dtype, _PROBLEM)
    if kernel is None:
        return F.linear(x, weight, bias)
    (batch, length, inputs), outputs = x.shape, weight.shape[0]
    rows = x.reshape(batch * length, inputs)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(batch, length, outputs, dtype=dtype)
    fields = (
        batch * length, inputs, outputs, cpu.threads_for(weight.numel()), rows.data_ptr(), rows.stride(0),
        weight.data_ptr(), cpu.pointer(bias), out.data_ptr(),
    )  # fmt: skip
    kernel(_PROBLEM.pack(*fields))
    return out
