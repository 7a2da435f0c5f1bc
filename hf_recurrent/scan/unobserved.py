"""Whether a CPU kernel may be called at once, with no PyTorch operator around it.

For one token an operator costs more than the kernel inside it. But only an operator is seen by what differentiates,
compiles, traces, transforms or records the calls, so a kernel may be called past it only where nothing does.
"""

import torch
from torch import Tensor, is_autocast_enabled, is_grad_enabled, strided
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.jit import is_tracing
from torch.nn import Parameter

from . import split

# PyTorch has no public name for these questions. Where a release lacks one of them, all calls go by an operator.
_transforms_are_active = getattr(torch._C, "_are_functorch_transforms_active", None)
_count_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)
_count_function_modes = getattr(torch._C, "_len_torch_function_stack", None)
CAN_ASK = None not in (_transforms_are_active, _count_dispatch_modes, _count_function_modes)


def unobserved(*tensors: Tensor | None) -> bool:
    """
    Whether a kernel may read these tensors where they lie, in CPU memory and as they are (None is no tensor), with
    nothing that has to see it happen: no compiler, tracer, mode, transform, autocast or subclass, and gradients turned
    off, so that all models compute alike where they are on. Nor may it where a sequence is split over processes, whose
    states come from each other.
    """
    if is_grad_enabled() or is_compiling() or is_tracing() or is_autocast_enabled("cpu") or split.current_group():
        return False
    if not CAN_ASK or _transforms_are_active() or _count_dispatch_modes() or _count_function_modes():
        return False
    if getattr(forward_ad, "_current_level", 0) >= 0:  # -1 outside of all levels
        return False
    for x in tensors:
        if x is not None:
            kind = type(x)
            if (kind is not Tensor and kind is not Parameter) or not x.is_cpu or x.layout is not strided:
                return False
            if x.is_neg() or x.is_conj():
                return False
    return True
