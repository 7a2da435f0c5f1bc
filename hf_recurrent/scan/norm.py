"""RMSNorm, on the CPU by one kernel (csrc/norm_cpu.cpp): in PyTorch it is a chain of operations, each of which takes
longer than the arithmetic of a token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu
from .reference import STATE_DTYPES
from .unobserved import unobserved

_PROBLEM = cpu.Problem("12q")  # batch, length, channels, threads, wide; x; weight, eps, out


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(weight.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """
    x / sqrt(mean(x^2) + eps) * weight, with the mean over the last dimension.

    Args:
        x: (B, L, D), in the weight's dtype or a wider one, which it is computed in.
        weight: (D,).

    Returns:
        (B, L, D) in the weight's dtype.
    """
    dtype, kernel = weight.dtype, None
    if (
        unobserved(x, weight)
        and dtype in cpu.REAL
        and (x.dtype is dtype or x.dtype is STATE_DTYPES[dtype])
        and x.dim() == 3
        and x.shape[2:] == weight.shape
        and x.numel()
    ):
        kernel = cpu.kernel("norm_cpu", "hfr_rms_norm", dtype, _PROBLEM)
    if kernel is None:
        return _rms_norm(x, weight, eps)
    x, weight = cpu.rows(x), weight.contiguous()
    out = torch.empty(x.shape, dtype=dtype)
    fields = (
        *x.shape, cpu.threads_for(x.numel()), x.dtype is not dtype, *cpu.describe(x), weight.data_ptr(),
        cpu.bits_of(eps), out.data_ptr(),
    )  # fmt: skip
    kernel(_PROBLEM.pack(*fields))
    return out
