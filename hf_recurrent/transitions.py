"""The functions f and g of GateLoop's transitions a = f(alpha) exp(i g(beta)), for its scans and its models."""

import torch
from torch import Tensor

MAGNITUDE_ACTIVATIONS = {
    "sigmoid": torch.sigmoid,
    "exponential": lambda x: torch.exp(-torch.exp(x)),  # as in the LRU (arXiv 2303.06349)
}
PHASE_ACTIVATIONS = {
    "identity": lambda x: x,
    "tanh": lambda x: torch.pi * torch.tanh(x),
}


def polar(size: Tensor, angle: Tensor) -> Tensor:
    """size exp(i angle). The gradient of torch.polar is NaN where the size is below the least normal number."""
    return torch.complex(size * angle.cos(), size * angle.sin())
