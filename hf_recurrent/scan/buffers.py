"""What the compiled backends write into, on whichever device their inputs are."""

import torch
from torch import Tensor

from .cells import Cell
from .reference import STATE_DTYPES


def new_grads(cell: Cell, inputs: list[Tensor], h: Tensor) -> tuple[list[Tensor], bool, Tensor | None]:
    """One gradient of h's shape for each input, and whether the first is instead the (B, 1, D) sum over time of a
    coefficient that is constant over it: the common broadcast, summed inside the kernel. Others are summed after. Last
    that of the times of a timed cell, (B, L)."""
    inputs, times = cell.parted(inputs)
    grads = [torch.empty(h.shape, dtype=h.dtype, device=h.device) for _ in inputs]
    sum_first = inputs[0].shape[1] == 1 and h.shape[1] > 1
    if sum_first:
        grads[0] = torch.zeros(h.shape[0], 1, h.shape[2], dtype=STATE_DTYPES[h.dtype], device=h.device)
    # Zero, for no kernel runs where there are no channels.
    grad_times = None if times is None else torch.zeros(times.shape, dtype=times.dtype, device=h.device)
    return grads, sum_first, grad_times


def summed_to_inputs(cell: Cell, grads: list[Tensor], grad_times: Tensor | None, inputs: list[Tensor]) -> list[Tensor]:
    """Each gradient in its input's own shape and dtype, in the order of the inputs."""
    if grad_times is not None:
        grads = [grads[0], grad_times, *grads[1:]]
    return [g.sum_to_size(x.shape).to(x.dtype) for g, x in zip(grads, inputs, strict=True)]
