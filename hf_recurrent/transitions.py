"""The functions f and g of GateLoop's transitions a = f(alpha) exp(i g(beta)), for its scans and its models."""

import torch

MAGNITUDE_ACTIVATIONS = {
    "sigmoid": torch.sigmoid,
    "exponential": lambda x: torch.exp(-torch.exp(x)),  # as in the LRU (arXiv 2303.06349)
}
PHASE_ACTIVATIONS = {
    "identity": lambda x: x,
    "tanh": lambda x: torch.pi * torch.tanh(x),
}
