"""Whether a CPU kernel may be called at once, with no PyTorch operator around it.

For one token an operator costs more than the kernel inside it. But only an operator is seen by what differentiates,
compiles, traces, transforms or records the calls, so a kernel may be called past it only where nothing does.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from . import split

# PyTorch has no public name for these questions. Where a release lacks one of them, all calls go by an operator.
_transforms_are_active = getattr(torch._C, "_are_functorch_transforms_active", None)
_count_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)
_count_function_modes = getattr(torch._C, "_len_torch_function_stack", None)


def _has_modes() -> bool:
    """Whether a mode, a transform of torch.func or a level of forward-mode derivatives is active, as far as known."""
    if _transforms_are_active is None or _count_dispatch_modes is None or _count_function_modes is None:
        return True
    if _transforms_are_active() or _count_dispatch_modes() or _count_function_modes():
        return True
    return getattr(forward_ad, "_current_level", 0) >= 0  # -1 outside of all levels


def unobserved(*tensors: Tensor | None) -> bool:
    """
    Whether a kernel may read these tensors where they lie, in CPU memory and as they are (None is no tensor), with
    nothing that has to see it happen: no compiler, tracer, mode, transform, autocast or subclass, and gradients turned
    off, so that all models compute alike where they are on. Nor may it where a sequence is split over processes, whose
    states come from each other.
    """
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or split.current_group() is not None:
        return False
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or _has_modes():
        return False
    for x in tensors:
        if x is None:
            continue
        if type(x) is not Tensor and type(x) is not Parameter:
            return False
        if not x.is_cpu or x.is_neg() or x.is_conj():
            return False
    return True
