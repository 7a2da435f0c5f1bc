"""What the compiled backends write into, on whichever device their inputs are."""

import torch
from torch import Tensor

from .reference import STATE_DTYPES


def new_grads(inputs: list[Tensor], h: Tensor) -> tuple[list[Tensor], bool]:
    """One gradient of h's shape for each input, and whether the first is instead the (B, 1, D) sum over time of a
    coefficient that is constant over it: the common broadcast, summed inside the kernel. Others are summed after."""
    grads = [torch.empty(h.shape, dtype=h.dtype, device=h.device) for _ in inputs]
    sum_first = inputs[0].shape[1] == 1 and h.shape[1] > 1
    if sum_first:
        grads[0] = torch.zeros(h.shape[0], 1, h.shape[2], dtype=STATE_DTYPES[h.dtype], device=h.device)
    return grads, sum_first


def summed_to_inputs(grads: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Each gradient in its input's own shape and dtype."""
    return [g.sum_to_size(x.shape).to(x.dtype) for g, x in zip(grads, inputs, strict=True)]
