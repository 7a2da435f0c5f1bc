"""S5's matrices before and after its recurrence (arXiv 2208.04933, section 3).

For a few positions on the CPU, where nothing differentiates or traces them, they are read once as they are stored
(csrc/s5_cpu.cpp). In PyTorch a decoded token pays for a copy of B and of C in the layout of a product with real
numbers, and for a dozen operations that discretise the steps; for many positions that is little.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu
from .cells import discretize
from .reference import COMPLEX_STATE_DTYPES
from .unobserved import unobserved

FEW = 8  # positions of all rows

# rows, width, states, threads, bilinear; rescale; real, imaginary, log_step; matrix, in, a, out
_PROBLEM = cpu.Problem("13q")


# ---- in plain PyTorch ------------------------------------------------------------------------------------------------


def product(x: Tensor, b: Tensor) -> Tensor:
    """B u, (B, L, P') complex, of u = x (B, L, H) and b (P', H, 2), as one real product with the rows of Re B and Im B
    in turn."""
    rows = b.transpose(1, 2).reshape(-1, x.shape[-1]).to(x.dtype)  # (2 P', H)
    return torch.view_as_complex(F.linear(x, rows).unflatten(-1, (-1, 2)).to(b.dtype))


def _drive(
    x: Tensor, b: Tensor, real: Tensor, imaginary: Tensor, log_step: Tensor, rescale: float, bilinear: bool
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    poles = torch.complex(real.to(dtype), imaginary.to(dtype))
    a, gain = discretize(poles, rescale * log_step.to(dtype).exp(), bilinear)
    b = b.to(dtype)
    # Not view_as_complex: weights that were read from a file lie at any multiple of their own size.
    b = torch.view_as_real(gain[:, None] * torch.complex(b[..., 0], b[..., 1]))
    return a, product(x, b)


def _read(h: Tensor, c: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    # The columns are those of Re C and -Im C in turn. The signs are computed where c is: given numbers would be copied
    # from the host at every token, which no CUDA graph can hold.
    signs = torch.linspace(scale, -scale, 2, dtype=c.dtype, device=c.device)
    return F.linear(torch.view_as_real(h).flatten(-2).to(dtype), (c * signs).flatten(1).to(dtype))


# ---- by a kernel where there is one ----------------------------------------------------------------------------------


def drive(
    x: Tensor, b: Tensor, real: Tensor, imaginary: Tensor, log_step: Tensor, rescale: float, bilinear: bool
) -> tuple[Tensor, Tensor]:
    """
    Args:
        x: u, (B, L, H).
        b: B~, (P', H, 2), real and imaginary part last.
        real, imaginary: of Lambda, (P',).
        log_step: the logarithm of Delta / rescale, (P',).
        rescale: what all steps are multiplied by.
        bilinear: as for `discretize`.

    Returns:
        Lambda-bar, (P',) complex, and B-bar u, (B, L, P') complex.
    """
    dtype, rows, states = x.dtype, x.shape[0] * x.shape[1], len(b)
    vectors = (real, imaginary, log_step)
    kernel = None
    if (
        unobserved(x, b, *vectors)  # before sizes, of which an export would take note
        and 0 < rows <= FEW
        and dtype in cpu.REAL
        and all(t.dtype is dtype and t.is_contiguous() for t in (b, *vectors))
        and b.shape == (states, x.shape[2], 2)
        and all(t.shape == (states,) for t in vectors)
    ):
        kernel = cpu.kernel("s5_cpu", "hfr_s5_drive", dtype, _PROBLEM)
    if kernel is None:
        return _drive(x, b, *vectors, rescale, bilinear)
    x = x.contiguous()
    a = torch.empty(states, dtype=COMPLEX_STATE_DTYPES[dtype])
    out = torch.empty(*x.shape[:2], states, dtype=a.dtype)
    fields = (
        rows, x.shape[2], states, cpu.threads_for(b.numel()), bilinear, cpu.bits_of(rescale),
        *map(torch.Tensor.data_ptr, (*vectors, b, x, a, out)),
    )  # fmt: skip
    kernel(_PROBLEM.pack(*fields))
    return a, out


def read(h: Tensor, c: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """
    Args:
        h: (B, L, P') complex.
        c: C, (H, P', 2), real and imaginary part last.

    Returns:
        scale * Re(C h), (B, L, H) in `dtype`.
    """
    rows, states = h.shape[0] * h.shape[1], h.shape[2]
    kernel = None
    if (
        unobserved(h, c)
        and 0 < rows <= FEW
        and dtype in cpu.REAL
        and c.dtype is dtype
        and h.dtype is COMPLEX_STATE_DTYPES[dtype]
        and c.is_contiguous()
        and c.shape[1:] == (states, 2)
    ):
        kernel = cpu.kernel("s5_cpu", "hfr_s5_read", dtype, _PROBLEM)
    if kernel is None:
        return _read(h, c, scale, dtype)
    h = h.contiguous()
    out = torch.empty(*h.shape[:2], len(c), dtype=dtype)
    fields = (
        rows, len(c), states, cpu.threads_for(c.numel()), 0, cpu.bits_of(scale), 0, 0, 0, c.data_ptr(), h.data_ptr(),
        0, out.data_ptr(),
    )  # fmt: skip
    kernel(_PROBLEM.pack(*fields))
    return out
