"""Scans that give a number read from the state in place of the state: GateLoop's, from its projections to its output.

The operators `hf_recurrent::read_scan`, `read_scan_` and `read_scan_backward` are for the compiled backends; elsewhere
the recurrence is `linear_scan`'s, and PyTorch does the rest.
"""

import functools

import torch
from torch import Tensor

from . import split
from .cells import BY_NAME, GATELOOP, unpadded
from .ops import (
    COMPILED,
    check_mask,
    check_reverse,
    check_tensor,
    check_updatable,
    checked_state,
    choose_backend,
    linear_scan,
    refuse_forward_mode,
    step_flags,
)

torch.library.define(
    "hf_recurrent::read_scan",
    "(str cell, Tensor[] inputs, Tensor? initial_state, Tensor? flags, bool reverse, bool keeps_states, str backend) "
    "-> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "hf_recurrent::read_scan_",
    "(str cell, Tensor[] inputs, Tensor(a!) state, Tensor? flags, bool reverse, str backend) -> Tensor",
)
torch.library.define(
    "hf_recurrent::read_scan_backward",
    "(str cell, Tensor[] inputs, Tensor h, Tensor? initial_state, Tensor? flags, Tensor grad_y, Tensor grad_final, "
    "bool reverse, str backend) -> (Tensor[], Tensor)",
)


def _states_for(cell: str, y: Tensor, kept: bool) -> Tensor:
    """What forward keeps for backward, in y's dtype: (B, L, D), with a last dimension for two parts of complex numbers;
    empty where nothing is kept."""
    shape = (*y.shape, 2) if BY_NAME[cell].has_complex_state else y.shape
    return torch.empty(shape if kept else (0,), dtype=y.dtype, device=y.device)


@torch.library.impl("hf_recurrent::read_scan", "default")
def _read_scan(cell, inputs, initial_state, flags, reverse, keeps_states, backend):
    """y, h and the final state. The first input has the full shape."""
    y = torch.empty(inputs[0].shape, dtype=inputs[0].dtype, device=inputs[0].device)
    h = _states_for(cell, y, keeps_states)
    kept = h if keeps_states else None
    return y, h, COMPILED[backend].run_forward(cell, inputs, kept, y, initial_state, None, flags, reverse)


@torch.library.impl("hf_recurrent::read_scan_", "default")
def _read_scan_in_place(cell, inputs, state, flags, reverse, backend):
    """y alone; the final state takes the place of the one that was given."""
    y = torch.empty(inputs[0].shape, dtype=inputs[0].dtype, device=inputs[0].device)
    COMPILED[backend].run_forward(cell, inputs, None, y, state, state, flags, reverse)
    return y


@torch.library.impl("hf_recurrent::read_scan_backward", "default")
def _read_scan_backward(cell, inputs, h, initial_state, flags, grad_y, grad_final, reverse, backend):
    return COMPILED[backend].backward(cell, inputs, h, initial_state, flags, grad_y, grad_final, reverse)


@torch.library.register_fake("hf_recurrent::read_scan")
def _(cell, inputs, initial_state, flags, reverse, keeps_states, backend):
    y = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
    final = y.new_empty(y.shape[0], y.shape[2], dtype=BY_NAME[cell].state_dtype(y.dtype))
    return y, _states_for(cell, y, keeps_states), final


@torch.library.register_fake("hf_recurrent::read_scan_")
def _(cell, inputs, state, flags, reverse, backend):
    return torch.empty_like(inputs[0], memory_format=torch.contiguous_format)


@torch.library.register_fake("hf_recurrent::read_scan_backward")
def _(cell, inputs, h, initial_state, flags, grad_y, grad_final, reverse, backend):
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    return grads, torch.empty_like(grad_final, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output):
    ctx.cell, tensors, initial_state, flags, ctx.reverse, _, ctx.backend = inputs
    ctx.has_initial, ctx.count = initial_state is not None, len(tensors)
    ctx.save_for_backward(*tensors, output[1], initial_state, flags)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(True)


def _backward(ctx, grad_y, _, grad_final):
    saved = ctx.saved_tensors  # once: where activations are checkpointed, a second look is an error
    tensors, (h, *optional) = saved[: ctx.count], saved[ctx.count :]
    grad_final = grad_final.resolve_conj().resolve_neg()
    grads, grad_initial = torch.ops.hf_recurrent.read_scan_backward(
        ctx.cell, tensors, h, *optional, grad_y.resolve_neg(), grad_final, ctx.reverse, ctx.backend
    )
    return None, grads, grad_initial if ctx.has_initial else None, None, None, None, None


def _no_double_backward(ctx, *grads):
    raise NotImplementedError(
        "the GateLoop scan is differentiable once; backend='reference' can be differentiated any number of times"
    )


torch.library.register_autograd("hf_recurrent::read_scan", _backward, setup_context=_setup_context)
torch.library.register_autograd("hf_recurrent::read_scan_backward", _no_double_backward)


def gateloop_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    transition: str = "polar",
    magnitude: str = "sigmoid",
    phase: str = "identity",
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reverse: bool = False,
    backend: str | None = None,
    reset_state: Tensor | None = None,
    update_state: bool = False,
) -> tuple[Tensor, Tensor]:
    """GateLoop with a state of one number for each channel (arXiv 2311.01927, section 3.2, d_h = 1), from its
    projections to its output:

        a = f(alpha) exp(i g(beta)),  h_t = a_t h_{t-1} + k_t v_t,  y_t = q_t Re h_t

    Args:
        q, k, v: (B, L, D), real.
        alpha, beta: pre-activations of the transitions, real, (B, L, D) or any shape that broadcasts to it. Without
            beta a = f(alpha), and the state is real.
        initial_state: h_{-1}, (B, D), complex but where the transitions are real; zero when absent.
        transition: "polar", as above; or "cartesian", with the real part alpha and the imaginary part beta of one
            number c, and a = f(|c|) c / |c|.
        magnitude: f, "sigmoid" or "exponential", exp(-exp(x)).
        phase: g, "identity" or "tanh", pi tanh(x); "identity" with a cartesian transition or without beta.
        mask, reset, reset_state, reverse, backend, update_state: as for `linear_scan`; at padding, y reads the
            unchanged state.

    Returns:
        y, (B, L, D) in the inputs' promoted dtype, and final_state, (B, D), in float32 or complex64 (float64 or
        complex128 for float64 inputs).

    Raises:
        What `linear_scan` raises; TypeError for complex inputs, ValueError for a transition that is not one of these.
    """
    check_reverse(reverse)
    kind = "real" if beta is None and transition == "polar" else transition
    if (kind, magnitude, phase) not in GATELOOP or (beta is None) != (kind == "real"):
        known = ", ".join(map(str, GATELOOP))
        raise ValueError(
            f"transition, magnitude and phase must be one of {known} ('real' is 'polar' without beta), "
            f"got {(transition, magnitude, phase)} {'without' if beta is None else 'with'} beta"
        )
    cell = GATELOOP[kind, magnitude, phase]
    named = {"q": q, "k": k, "v": v, "alpha": alpha} | ({} if beta is None else {"beta": beta})
    for name, x in named.items():
        check_tensor(name, x, q)
        if x.is_complex():
            raise TypeError(f"{name} must be real, got {x.dtype}")
    if q.dim() != 3 or k.shape != q.shape or v.shape != q.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k and v must have one shape, (batch, length, channels), got {shapes}")
    for name, x in list(named.items())[3:]:
        trailing = q.shape[3 - x.dim() :] if x.dim() <= 3 else ()
        if x.dim() > 3 or any(have not in (1, want) for have, want in zip(x.shape, trailing, strict=True)):
            raise ValueError(f"{name} has the shape {tuple(x.shape)}, which does not broadcast to {tuple(q.shape)}")
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in named.values()))
    inputs = [x.to(dtype)[(None,) * (3 - x.dim())].resolve_neg() for x in named.values()]
    backend = choose_backend(backend, q.device)
    check_mask("mask", mask, q)
    check_mask("reset", reset, q)
    if backend not in COMPILED or split.current_group() or (reset is not None and reset_state is not None):
        a, b = cell.coefficients(inputs[0], *unpadded(mask, *inputs[1:]))
        h, final = linear_scan(
            a,
            b,
            initial_state,
            mask=mask,
            reset=reset,
            reverse=reverse,
            backend=backend,
            reset_state=reset_state,
            update_state=update_state,
        )
        return cell.read(*inputs, h).to(dtype), final
    sizes = {"batch": q.shape[0], "channels": q.shape[2]}
    state = checked_state(initial_state, sizes, q, cell.state_dtype(dtype), "the transitions are real")
    flags = step_flags(mask, reset, reverse)
    if update_state:
        check_updatable(initial_state, cell.state_dtype(dtype), inputs)
        return torch.ops.hf_recurrent.read_scan_(
            cell.name, inputs, initial_state, flags, reverse, backend
        ), initial_state
    refuse_forward_mode(*inputs, state)
    keeps = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, state))
    y, _, final = torch.ops.hf_recurrent.read_scan(cell.name, inputs, state, flags, reverse, keeps, backend)
    return y, final
