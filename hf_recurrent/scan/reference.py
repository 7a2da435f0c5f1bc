"""The recurrence as it is written, one position after the other: the oracle that every other backend is compared with.

Any dtype and device, differentiated by PyTorch itself, independent of the flags and formulas that the fast backends
share.
"""

import torch
from torch import Tensor

STATE_DTYPES = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
}
COMPLEX_STATE_DTYPES = {  # of complex states beside real inputs
    torch.bfloat16: torch.complex64,
    torch.float16: torch.complex64,
    torch.float32: torch.complex64,
    torch.float64: torch.complex128,
}


def linear_scan_loop(
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None,
    mask: Tensor | None,
    reset: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """h_t = a_t h_{t-1} + b_t; the arguments and results of `linear_scan`, already checked and of one dtype."""
    batch, length, channels = b.shape
    dtype = STATE_DTYPES[b.dtype]
    a = a.expand(b.shape)
    if mask is not None:  # a gradient of zero times a NaN at padding would be one
        a = torch.where(mask[..., None], a, 1)
    state = b.new_zeros(batch, channels, dtype=dtype) if initial_state is None else initial_state
    outputs: list[Tensor] = []
    for t in reversed(range(length)) if reverse else range(length):
        keep = None
        if reset is not None:
            # Walking backwards, a document is left after its first token, which is where the next position begins.
            first = t + 1 if reverse else t
            if first < length:
                starts = reset[:, first] if mask is None else reset[:, first] & mask[:, first]
                keep = (~starts)[:, None]
        if keep is not None:
            state = torch.where(keep, state, torch.zeros_like(state))
        updated = a[:, t].to(dtype) * state + b[:, t].to(dtype)
        state = updated if mask is None else torch.where(mask[:, t, None], updated, state)
        outputs.append(state.to(b.dtype))
    if reverse:
        outputs.reverse()
    h = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(b)
    return h, state
