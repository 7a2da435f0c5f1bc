"""What training costs: arithmetic, and what the machine could do of it; memory."""

import functools
import sys
import time

import psutil
import torch
from torch import nn

from ..modeling.s5 import S5SSM

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}  # of Accelerate's mixed precision


def flops_per_token(model: nn.Module) -> int:
    """6 for each weight of a matrix that a token passes: a multiplication and an addition forward, twice that backward
    (PaLM, arXiv 2204.02311, appendix B). Neither recurrences nor what checkpointing repeats are counted."""
    weights = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weights += module.weight.numel()
        elif isinstance(module, S5SSM):  # B and C, or C1 and C2, whose real and imaginary parts are the third dimension
            weights += sum(parameter.numel() for parameter in module.parameters() if parameter.ndim == 3)
    return 6 * weights


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has had in use: on the GPU, or on the CPU as the system counts them."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # which Windows lacks

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@functools.cache
def matrix_rate(device: str | None = None, dtype: torch.dtype = torch.float32, seconds: float = 0.15) -> float:
    """FLOP/s of this machine: of the fastest of the square matrix products that fit into about so many seconds.

    Args:
        device: "cpu", "cuda" ...; CUDA where it is there when None.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    size = 768 if device == "cpu" else 4096
    own = torch.Generator(device).manual_seed(0)  # training's random numbers are not to depend on this
    a, b = torch.rand(2, size, size, device=device, generator=own).to(dtype)
    a @ b
    fastest, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < seconds or fastest == float("inf"):
        _wait(device)
        before = time.perf_counter()
        a @ b
        _wait(device)
        fastest = min(fastest, time.perf_counter() - before)
    return 2 * size**3 / fastest


def _wait(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()
