"""S5's recurrence at irregular times, fused with the discretisation of every step (arXiv 2208.04933, section 3.2)."""

import functools

import torch
from torch import Tensor

from . import split
from .cells import S5, unpadded
from .ops import (
    COMPILED,
    check_mask,
    check_reset_state,
    check_reverse,
    check_tensor,
    check_updatable,
    checked_state,
    choose_backend,
    linear_scan,
    refuse_forward_mode,
    step_flags,
)


def s5_scan(
    driven: Tensor,
    rate: Tensor,
    times: Tensor,
    initial_state: Tensor | None = None,
    *,
    discretization: str = "zoh",
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reverse: bool = False,
    backend: str | None = None,
    reset_state: Tensor | None = None,
    update_state: bool = False,
) -> tuple[Tensor, Tensor]:
    """The states of dh/dt = r h + u at irregular times: by zero-order hold, u_k held over the t_k before position k,

        h_k = exp(r t_k) h_{k-1} + (exp(r t_k) - 1) / r u_k

    or by the bilinear transform

        h_k = ((1 + r t_k / 2) h_{k-1} + t_k u_k) / (1 - r t_k / 2)

    The coefficients of the steps, which alone would be as large as two of the results, are nowhere in memory. Where the
    times are all alike they are one number for each channel, and `linear_scan` with them moves the same bytes: the
    inputs, read, and the states, written.

    Args:
        driven: u, complex, (B, L, D). An S5 with the poles Lambda and the steps Delta has Delta B~ x.
        rate: r, complex, (D,). An S5 has Lambda Delta, for times in units of Delta.
        times: t, real, (B, L).
        initial_state: h_{-1}, (B, D); zero when absent.
        discretization: "zoh" or "bilinear".
        mask, reset, reset_state, reverse, backend, update_state: as for `linear_scan`.

    Returns:
        h, (B, L, D), and final_state, (B, D), complex64 (complex128 where an input has double precision). Both are
        differentiable, with respect to driven, rate, times and initial_state.

    Raises:
        What `linear_scan` raises; TypeError for a real `driven` or complex `times`, ValueError for another
        discretisation.
    """
    check_reverse(reverse)
    if discretization not in S5:
        raise ValueError(f"discretization must be one of {', '.join(map(repr, S5))}, got {discretization!r}")
    cell = S5[discretization]
    for name, x in (("driven", driven), ("rate", rate), ("times", times)):
        check_tensor(name, x, driven)
        if x.is_complex() != (name != "times"):
            raise TypeError(f"{name} must be {'real' if name == 'times' else 'complex'}, got {x.dtype}")
    if driven.dim() != 3:
        raise ValueError(f"driven must have the shape (batch, length, channels), got {tuple(driven.shape)}")
    for name, x, shape in (("rate", rate, driven.shape[2:]), ("times", times, driven.shape[:2])):
        if x.shape != shape:
            raise ValueError(f"{name} must have the shape {tuple(shape)}, got {tuple(x.shape)}")
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in (driven, rate, times)))
    driven, rate = (x.to(dtype).resolve_conj().resolve_neg() for x in (driven, rate[None, None]))
    times = times.to(torch.float64 if dtype == torch.complex128 else torch.float32).resolve_neg()
    backend = choose_backend(backend, driven.device)
    check_mask("mask", mask, driven)
    check_mask("reset", reset, driven)
    if backend not in COMPILED or split.current_group() or (reset is not None and reset_state is not None):
        driven, times = unpadded(mask, driven, times)
        return linear_scan(
            *cell.coefficients(rate, times, driven),
            initial_state,
            mask=mask,
            reset=reset,
            reverse=reverse,
            backend=backend,
            reset_state=reset_state,
            update_state=update_state,
        )
    batch, _, channels = driven.shape
    if reset_state is not None:
        check_reset_state(reset_state, ((channels,), (batch, channels)), driven, reverse, may_be_complex=True)
    inputs = [rate, times, driven]
    state = checked_state(initial_state, {"batch": batch, "channels": channels}, driven, dtype)
    flags = step_flags(mask, reset, reverse)
    if update_state:
        check_updatable(initial_state, dtype, inputs)
        h = torch.ops.hf_recurrent.scan_(cell.name, inputs, initial_state, flags, reverse, backend)
        return h, initial_state
    refuse_forward_mode(*inputs, state)
    return torch.ops.hf_recurrent.scan(cell.name, inputs, state, flags, reverse, backend)
