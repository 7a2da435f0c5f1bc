"""GateLoop's layer between its projections, with heads of one channel and polar transitions: what the paper defines
(arXiv 2311.01927, section 3.2).

For a few positions on the CPU one kernel (csrc/gateloop_cpu.cpp) takes the place of `gateloop_scan` and the gate, where
nothing differentiates or traces them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from . import cpu
from .elementwise import silu_gate
from .ops import check_mask, step_flags
from .reading import gateloop_scan
from .reference import COMPLEX_STATE_DTYPES
from .unobserved import unobserved

FEW = 8  # positions of all rows

# batch, length, channels, exponential, tanh, flags; qkv, transition, gate; state, out
_PROBLEM = cpu.Problem("20q")


def _channel_loop(
    scan: Callable,
    gated: Callable,
    qkv: Tensor,
    transition: Tensor,
    gate: Tensor | None,
    magnitude: str,
    phase: str,
    initial_state: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reset_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`channel_loop` by `scan`, which is `gateloop_scan`, and `gated`, which is `silu_gate`."""
    y, state = scan(
        *qkv.chunk(3, dim=-1), *transition.chunk(2, dim=-1), initial_state,
        magnitude=magnitude, phase=phase, mask=mask, reset=reset, reset_state=reset_state,
    )  # fmt: skip
    y = y.to(qkv.dtype)
    return (y if gate is None else gated(y, gate)), state


def channel_loop(
    qkv: Tensor,
    transition: Tensor,
    gate: Tensor | None,
    magnitude: str,
    phase: str,
    initial_state: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reset_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """
    a_t = f(alpha_t) exp(i g(beta_t)),  h_t = a_t h_{t-1} + k_t v_t,  y_t = q_t Re(h_t) silu(gate_t)

    Args:
        qkv: q, k and v side by side, (B, L, 3 D).
        transition: alpha and beta side by side, (B, L, 2 D).
        gate: (B, L, D), or None for y = q Re(h).
        magnitude, phase: f and g, as for `gateloop_scan`.
        initial_state: h_{-1}, (B, D) complex; zero when None.
        mask, reset: (B, L) bool, as for `linear_scan`.
        reset_state: what a document starts from, (D,) complex; zero when None.

    Returns:
        y, (B, L, D), and the final state, (B, D) complex.
    """
    dtype, (batch, length, channels) = qkv.dtype, qkv.shape
    channels //= 3
    inputs = (qkv, transition) if gate is None else (qkv, transition, gate)
    kernel = None
    if (
        unobserved(*inputs, initial_state, mask, reset)  # before sizes, of which an export would take note
        and 0 < batch * length <= FEW
        and (reset is None or reset_state is None)
        and dtype in cpu.REAL
        and all(x.dtype is dtype and x.shape[:2] == (batch, length) for x in inputs)
        and transition.shape[2] == 2 * channels
        and (gate is None or gate.shape[2] == channels)
        and (initial_state is None or initial_state.dtype is COMPLEX_STATE_DTYPES[dtype])
        and (initial_state is None or initial_state.shape == (batch, channels))
    ):
        kernel = cpu.kernel("gateloop_cpu", "hfr_gateloop", dtype, _PROBLEM)
    if kernel is None:
        return _channel_loop(
            gateloop_scan, silu_gate, qkv, transition, gate, magnitude, phase, initial_state,
            mask=mask, reset=reset, reset_state=reset_state,
        )  # fmt: skip
    check_mask("mask", mask, qkv)
    check_mask("reset", reset, qkv)
    if initial_state is None:
        state = torch.zeros(batch, channels, dtype=COMPLEX_STATE_DTYPES[dtype])
    else:
        state = initial_state.clone(memory_format=torch.contiguous_format)
    qkv, transition = cpu.rows(qkv), cpu.rows(transition)
    gate = gate if gate is None else cpu.rows(gate)
    flags = step_flags(mask, reset, reverse=False)
    y = torch.empty(batch, length, channels, dtype=dtype)
    fields = (
        batch, length, channels, magnitude == "exponential", phase == "tanh", cpu.pointer(flags), *cpu.describe(qkv),
        *cpu.describe(transition), *cpu.describe_if(gate), state.data_ptr(), y.data_ptr(),
    )  # fmt: skip
    kernel(_PROBLEM.pack(*fields))
    return y, state
