"""AdamW and the learning rate's course."""

import math

import torch
from transformers import PreTrainedModel

FUSED = ("cpu", "cuda", "mps", "xpu")  # where PyTorch has the whole update as one kernel


def create_optimizer(model: PreTrainedModel, args, device: torch.device) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) as `TrainArguments` describe it, with the model's own parameter groups: fused where
    PyTorch can, elsewhere by operations on all parameters together (foreach)."""
    fused = device.type in FUSED
    return torch.optim.AdamW(
        model.parameter_groups(args.learning_rate, args.weight_decay, args.recurrence_learning_rate),
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=fused,
        foreach=not fused,
    )


def learning_rate_ratio(progress: float, warmup: float, minimum: float) -> float:
    """The learning rate in multiples of its highest value: linear warm-up times half a cosine.

    Args:
        progress: share of the run that is done, 0 ... 1.
        warmup: share of the warm-up that is done; above 1 it is over.
        minimum: what the cosine ends at.
    """
    return min(1.0, warmup) * (minimum + (1 - minimum) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
