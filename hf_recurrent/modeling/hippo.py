"""Initial values for state space models: the HiPPO matrix, and the authors' normal distribution."""

import functools
import math

import torch
from torch import Tensor, nn


@functools.cache
def hippo_normal(size: int) -> tuple[Tensor, Tensor]:
    """
    HiPPO-N, the normal part of the HiPPO-LegS matrix (section 3.2 and appendix B.1.1 of the paper).

    Returns:
        eigenvalues, (size,), by rising imaginary part, and eigenvectors, (size, size), one per column; complex128.
    """
    n = torch.arange(size, dtype=torch.float64, device="cpu")
    root = (2 * n + 1).sqrt()
    legs = torch.diag(n) - torch.tril(torch.outer(root, root))
    normal = legs + torch.outer(root, root) / 2
    # -1/2 on the diagonal, the rest is skew-symmetric.
    imaginary, vectors = torch.linalg.eigh(-1j * (normal + torch.eye(size, dtype=n.dtype, device="cpu") / 2))
    return torch.complex(torch.full_like(imaginary, -0.5), imaginary), vectors


def lecun_normal(*shape: int, fan_in: int) -> Tensor:
    """JAX's lecun_normal: a normal distribution cut off at two standard deviations, with the variance 1 / fan_in."""
    std = 1 / math.sqrt(fan_in) / 0.87962566103423978
    values = torch.empty(shape, dtype=torch.float64, device="cpu")
    return nn.init.trunc_normal_(values, std=std, a=-2 * std, b=2 * std)
