"""Context parallelism: sequences that are too long for one device."""

from .context import ContextParallel, context_parallel, part, sum_gradients

__all__ = ["ContextParallel", "context_parallel", "part", "sum_gradients"]
