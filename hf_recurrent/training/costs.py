"""What training costs while it goes on: arithmetic, memory, and waiting for input."""

import resource
import sys

import torch
from torch import nn


def flops_per_token(model: nn.Module) -> int:
    """6 for each weight of a matrix that a token passes: a multiplication and an addition forward, twice that backward
    (PaLM, arXiv 2204.02311, appendix B). Neither recurrences nor what checkpointing repeats are counted."""
    return 6 * sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has had in use: on the GPU, or on the CPU as the system counts them."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
