"""GateLoop with heads of d_k x d_v states (arXiv 2311.01927, section 3.2), which exist only at the position being
computed: what is read and written grows with L (d_k + d_v), never with L d_k d_v.

The compiled kernels recompute the states of the backward pass from checkpoints. In plain PyTorch it is a linear
recurrence over d_k d_v channels for each head, whose states are materialised; so it is everywhere where d_v is 1, and
on a GPU where d_k is more than the kernels hold.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from . import cpu, gateloop_heads_cuda, recomputed, split
from .cells import unpadded
from .ops import (
    as_state,
    check_mask,
    check_reset_state,
    check_reverse,
    check_split,
    check_tensor,
    check_updatable,
    checked_state,
    choose_backend,
    linear_scan,
    refuse_forward_mode,
    step_flags,
)
from .reference import COMPLEX_STATE_DTYPES, STATE_DTYPES
from .unobserved import unobserved

# batch, length, heads, rows, columns, rows of a, reverse, threads, flags; q, k, v, a; y, state, start, initial; grad_y;
# grad_q, grad_k, grad_v, grad_a, grad_start
_PROBLEM = cpu.Problem("43q")
_NOTHING = (0,) * 5  # a tensor of four dimensions that is not there
_WORK = 4  # of a state, beside that of an element of a linear scan


def _dtype(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> torch.dtype:
    """Of y: 16 bits where q, k and v have them and a is not in double precision."""
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in (q, k, v)))
    return torch.float64 if a.dtype in (torch.float64, torch.complex128) else dtype


def _state_dtype(dtype: torch.dtype, a: Tensor) -> torch.dtype:
    return COMPLEX_STATE_DTYPES[dtype] if a.is_complex() else STATE_DTYPES[dtype]


# ---- in plain PyTorch ------------------------------------------------------------------------------------------------


def _by_linear_scan(
    scan: Callable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    initial_state: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reset_state: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor]:
    """`gateloop_heads_scan` by `scan`, which is `linear_scan` and takes `options` too."""
    batch, _, heads, rows = k.shape
    columns, dtype = v.shape[-1], _dtype(q, k, v, a)
    q, k, v = (x.to(STATE_DTYPES[dtype]) for x in (q, *unpadded(mask, k, v)))
    a = a.to(_state_dtype(dtype, a)).expand(-1, -1, heads, rows)
    if columns == 1:  # each channel has its own transition: they stay side by side, as the projections put them
        a, b = a.flatten(2), (k * v).flatten(2)
        state_shape = (batch, heads * rows)
    else:  # d_v columns share a transition: with the rows of all heads in the batch, it broadcasts over the columns
        a, k = (x.permute(0, 2, 3, 1).contiguous().unsqueeze(-1) for x in (a, k))
        a = a.expand(batch, -1, -1, -1, -1).flatten(0, 2)
        b = (k * v.transpose(1, 2).contiguous().unsqueeze(2)).flatten(0, 2)
        state_shape = (batch * heads * rows, columns)
        mask, reset = (x if x is None else x.repeat_interleave(heads * rows, dim=0) for x in (mask, reset))
    if initial_state is not None:
        initial_state = initial_state.reshape(state_shape)
    if reset_state is not None:
        reset_state = reset_state.expand(batch, -1, -1, -1).reshape(state_shape)
    h, final_state = scan(a, b, initial_state, mask=mask, reset=reset, reset_state=reset_state, **options)
    if h.is_complex():
        h = h.real
    if columns == 1:
        h = h.unflatten(2, (heads, rows, columns))
    else:
        h = h.unflatten(0, (batch, heads, rows)).permute(0, 3, 1, 2, 4)
    return (q.unsqueeze(-1) * h).sum(-2).to(dtype), final_state.view(batch, heads, rows, columns)


# ---- the compiled kernels --------------------------------------------------------------------------------------------


def _empty(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """y, and a state."""
    y = torch.empty_like(v, memory_format=torch.contiguous_format)
    return y, a.new_empty(q.shape[0], *q.shape[2:], v.shape[3])


def _run(backwards: bool, q, k, v, a, flags, reverse, y, state, start, initial, grad_y, *grads: int) -> None:
    """Tensors, but for the addresses of y and the gradients, and the description of grad_y."""
    threads = cpu.threads_for(_WORK * q.numel() * v.shape[3])
    described = (number for tensor in (q, k, v, a) for number in cpu.describe(tensor))
    fields = (
        *q.shape, v.shape[3], a.shape[3], reverse, threads, cpu.pointer(flags), *described, y,
        state.data_ptr(), cpu.pointer(start), cpu.pointer(initial), *grad_y, *grads,
    )  # fmt: skip
    transitions = "complex_transitions" if a.is_complex() else "real_transitions"
    cpu.call("gateloop_heads_cpu", "hfr_gateloop_heads", q.dtype, _PROBLEM, fields, backwards, cell=transitions)


def _forward(inputs, states, flags, reverse, backend, final: Tensor | None = None) -> tuple[Tensor, Tensor]:
    q, k, v, a = inputs
    if backend == "cuda":
        return gateloop_heads_cuda.forward(q, k, v, a.expand(q.shape), *states, flags, reverse, final)
    initial, start = (None if x is None else x.contiguous() for x in states)
    y, state = _empty(*inputs)
    if final is not None:
        state = final
    if initial is None:
        state.zero_()
    elif final is None:
        state.copy_(initial)
    if state.numel() and q.shape[1]:
        _run(False, q, k, v, a, flags, reverse, y.data_ptr(), state, start, None, _NOTHING, *_NOTHING)
    else:
        y.zero_()
    return y, state


def _backward(inputs, states, flags, grad_y, grad_final, reverse, backend) -> tuple[Tensor, ...]:
    q, k, v, a = inputs
    if backend == "cuda":
        *grads, grad_a, grad_state, grad_start = gateloop_heads_cuda.backward(
            q, k, v, a.expand(q.shape), *states, flags, grad_y, grad_final, reverse
        )
        return *grads, grad_a.sum_to_size(a.shape), grad_state, grad_start
    initial, start = (None if x is None else x.contiguous() for x in states)
    state = grad_final.clone(memory_format=torch.contiguous_format)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    grad_start = state.new_empty(0 if start is None else state.shape)
    if state.numel() and q.shape[1]:
        pointers = (x.data_ptr() for x in grads)
        _run(
            True, q, k, v, a, flags, reverse, 0, state, start, initial, cpu.describe(grad_y), *pointers,
            0 if start is None else grad_start.data_ptr(),
        )  # fmt: skip
    else:
        for grad in (*grads, grad_start):
            grad.zero_()
    return *grads, state, grad_start if start is None else grad_start.sum(0)


_NAMES = "gateloop_heads", ["q", "k", "v", "a"], ["initial_state", "start"]
recomputed.define(*_NAMES, _forward, _backward, _empty)
recomputed.define_update(*_NAMES, _forward, _empty)


def _has_kernel(backend: str, rows: int, columns: int) -> bool:
    """Of one column, whose states are no more than k is, the linear scan's kernels are faster."""
    return columns != 1 and (backend == "cpu" or (backend == "cuda" and rows <= gateloop_heads_cuda.MAX_ROWS))


# ---- the function ----------------------------------------------------------------------------------------------------


def _check(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> None:
    for name, x in {"q": q, "k": k, "v": v, "a": a}.items():
        check_tensor(name, x, q)
        if name != "a" and x.is_complex():
            raise TypeError(f"{name} must be real, got {x.dtype}")
        if x.dim() != 4:
            raise ValueError(f"{name} must have four dimensions, (batch, length, heads, ...), got {tuple(x.shape)}")
    if k.shape != q.shape:
        raise ValueError(f"q and k must have one shape, got {tuple(q.shape)}, {tuple(k.shape)}")
    if v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"v must have the shape (batch, length, heads, d_v) = {tuple(q.shape[:3])} + (d_v,), got {tuple(v.shape)}"
        )
    if any(have not in (1, want) for have, want in zip(a.shape, q.shape, strict=True)):
        raise ValueError(f"a has the shape {tuple(a.shape)}, which does not broadcast to {tuple(q.shape)}")


def gateloop_heads_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    initial_state: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reverse: bool = False,
    backend: str | None = None,
    reset_state: Tensor | None = None,
    update_state: bool = False,
) -> tuple[Tensor, Tensor]:
    """GateLoop with heads of d_k x d_v states (arXiv 2311.01927, section 3.2), in each head

        H_t = diag(a_t) H_{t-1} + k_t^T v_t,   y_t = Re(q_t H_t)

    Args:
        q, k: (B, L, heads, d_k), real.
        v: (B, L, heads, d_v), real.
        a: the transitions, one for each row of the state, complex or real, of q's shape; any of its sizes may be 1.
        initial_state: H_{-1}, (B, heads, d_k, d_v), complex only where a is; zero when absent.
        mask, reset, reverse, update_state: as for `linear_scan`; at padding, y reads the unchanged state.
        reset_state: the state that documents start from, (heads, d_k, d_v); zero when absent. Not with `reverse`.
        backend: "reference", "chunked", "cpu" or "cuda"; None picks the fastest that can run. The first two
            materialise the states of all positions; so does "cuda" where d_k is above 128.

    Returns:
        y, (B, L, heads, d_v) in the promoted dtype of q, k and v, and final_state, (B, heads, d_k, d_v), float32, or
        complex64 where a is complex (float64 or complex128 where an input is as wide).

    Raises:
        TypeError, ValueError, BackendUnavailable: as `linear_scan`.
    """
    check_reverse(reverse)
    _check(q, k, v, a)
    check_mask("mask", mask, q)
    check_mask("reset", reset, q)
    sizes = {"batch": q.shape[0], "heads": q.shape[2], "d_k": q.shape[3], "d_v": v.shape[3]}
    shape = tuple(sizes.values())
    dtype = _dtype(q, k, v, a)
    state_dtype = _state_dtype(dtype, a)
    state = checked_state(initial_state, sizes, q, state_dtype, "the transitions are real")
    if reset_state is not None:
        check_reset_state(reset_state, (shape[1:],), q, reverse, a.is_complex())
    if update_state:
        check_updatable(initial_state, state_dtype, [x for x in (q, k, v, a, reset_state) if x is not None])
    backend = choose_backend(backend, q.device)
    q, k, v = (x.to(dtype).resolve_neg() for x in (q, k, v))
    a = a.to(state_dtype).resolve_conj().resolve_neg()
    if not _has_kernel(backend, q.shape[3], v.shape[3]):
        y, final = _by_linear_scan(
            linear_scan, q, k, v, a, initial_state,
            mask=mask, reset=reset, reset_state=reset_state,
            reverse=reverse, backend=backend, update_state=update_state,
        )  # fmt: skip
        return y, initial_state if update_state else final
    # All rows of a head share it. Not where it has gradients: they may be asked for at this `a`, of each of its rows.
    if a.shape[3] != 1 and a.stride(3) == 0 and not a.requires_grad:
        a = a[..., :1]
    a = a.expand(*q.shape[:3], -1)
    flags, start = step_flags(mask, reset, reverse), as_state(reset_state, state_dtype)
    if update_state:
        y = torch.ops.hf_recurrent.gateloop_heads_(q, k, v, a, initial_state, start, flags, reverse, backend)
        return y, initial_state
    if unobserved(q, k, v, a, state, start):
        return _forward([q, k, v, a], [state, start], flags, reverse, backend)
    refuse_forward_mode(q, k, v, a, state, start)

    def run(inputs, state):
        q, k, v, a, *start = inputs
        start = start[0] if start else None
        return torch.ops.hf_recurrent.gateloop_heads(q, k, v, a, state, start, flags, reverse, backend)

    inputs = [q, k, v, a] if start is None else [q, k, v, a, start]
    if group := split.current_group():
        check_split(state, reverse)

        def kept(inputs):
            return split.kept_state(inputs[3].expand(q.shape).flatten(2), q.shape[1], mask, reset).view(*shape[:3], 1)

        return split.scan(group, run, kept, inputs)
    return run(inputs, state)
