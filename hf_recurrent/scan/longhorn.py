"""Longhorn's cell (arXiv 2407.14207): a state of D x m per row that exists only at the position being computed.

It is a linear recurrence over D m channels whose coefficients all follow from D + m numbers, so what is read and
written grows with L (D + m), never with L D m. The compiled kernel recomputes the states of the backward pass from
checkpoints; the plain PyTorch form (longhorn_plain.py) materialises a chunk of positions at a time and recomputes it
likewise.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from . import cpu, longhorn_cuda, longhorn_plain, recomputed, split
from .cells import unpadded
from .elementwise import skip_silu_gate
from .ops import (
    COMPILED,
    check_mask,
    check_reset_state,
    check_reverse,
    check_split,
    check_tensor,
    check_updatable,
    choose_backend,
    refuse_forward_mode,
    step_flags,
)
from .reference import STATE_DTYPES
from .unobserved import unobserved

# batch, length, channels, states, reverse, threads, pieces, flags; x, dt, k, q; o, state, initial; grad_o; grad_x,
# grad_dt, grad_k, grad_q; skip, gate
_PROBLEM = cpu.Problem("40q")
_NO_GRADS = (0, *cpu.NOTHING, 0, 0, 0, 0)  # the problem from `initial` to `grad_q`
_NO_GATE = (0, *cpu.NOTHING)


# ---- the operator ---------------------------------------------------------------------------------------------------


def _run(backwards: bool, x, dt, k, q, state, flags, reverse, pieces, out: int, *fields: int) -> None:
    """`out` is the address of o, `fields` are those of the problem from `initial` on."""
    threads = cpu.threads_for(2 * x.numel() * k.shape[2])  # an element here is work for two
    described = (number for tensor in (x, dt, k, q) for number in cpu.describe(tensor))
    fields = (
        *x.shape, k.shape[2], reverse, threads, pieces, cpu.pointer(flags), *described, out,
        state.data_ptr(), *fields,
    )  # fmt: skip
    cpu.call("longhorn_cpu", "hfr_longhorn", x.dtype, _PROBLEM, fields, backwards)


def _pieces(x: Tensor) -> int:
    """Parts of the channels for as many threads as the batch does not keep busy."""
    threads = torch.get_num_threads()
    return 1 if len(x) % threads == 0 else max(1, min(threads, x.shape[2] // 64))


def _empty(x: Tensor, dt: Tensor, k: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """o, and a state."""
    o = torch.empty_like(x, memory_format=torch.contiguous_format)
    return o, x.new_empty(x.shape[0], x.shape[2], k.shape[2], dtype=STATE_DTYPES[x.dtype])


def _forward(inputs, states, flags, reverse, backend, final: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if backend == "chunked":
        return longhorn_plain.forward(*inputs, *states, flags, reverse)
    if backend == "cuda":
        return longhorn_cuda.forward(*inputs, *states, flags, reverse, final)
    return _cpu_forward(*inputs, *states, flags, reverse, final)


def _cpu_forward(
    x, dt, k, q, initial_state, flags, reverse, final: Tensor | None = None, D=None, gate=None
) -> tuple[Tensor, Tensor]:
    """o, with D and the gate (o + D x) silu(gate), and the final state: in `final` where that is given, which then
    is the initial state too."""
    o, state = _empty(x, dt, k, q)
    if final is not None:
        state = final
    elif initial_state is None:
        state.zero_()
    else:
        state.copy_(initial_state)
    if o.numel():
        gated = _NO_GATE if D is None else (D.data_ptr(), *cpu.describe(gate))
        _run(False, x, dt, k, q, state, flags, reverse, _pieces(x), o.data_ptr(), *_NO_GRADS, *gated)
    return o, state


def _backward(inputs, states, flags, grad_o, grad_final, reverse, backend) -> tuple[Tensor, ...]:
    if backend == "chunked":
        return longhorn_plain.backward(*inputs, *states, flags, grad_o, grad_final, reverse)
    if backend == "cuda":
        return longhorn_cuda.backward(*inputs, *states, flags, grad_o, grad_final, reverse)
    (x, dt, k, q), (initial_state,) = inputs, states
    state = grad_final.clone(memory_format=torch.contiguous_format)
    grad_x, grad_dt = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    pieces = _pieces(x)
    # Each piece sums over its own channels, in a fixed order, and the pieces are summed here: the same at every run.
    grad_k, grad_q = torch.zeros(2, x.shape[0], pieces, *k.shape[1:], dtype=state.dtype)
    if x.numel():
        initial = None if initial_state is None else initial_state.contiguous()
        grads = (grad.data_ptr() for grad in (grad_x, grad_dt, grad_k, grad_q))
        _run(
            True, x, dt, k, q, state, flags, reverse, pieces, 0,
            cpu.pointer(initial), *cpu.describe(grad_o), *grads, *_NO_GATE,
        )  # fmt: skip
    return grad_x, grad_dt, grad_k.sum(1).to(k.dtype), grad_q.sum(1).to(q.dtype), state


_NAMES = "longhorn", ["x", "dt", "k", "q"], ["initial_state"]
recomputed.define(*_NAMES, _forward, _backward, _empty)
recomputed.define_update(*_NAMES, _forward, _empty)


# ---- the functions --------------------------------------------------------------------------------------------------


def longhorn_scan(
    x: Tensor,
    dt: Tensor,
    k: Tensor,
    q: Tensor,
    initial_state: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reverse: bool = False,
    backend: str | None = None,
    reset_state: Tensor | None = None,
    update_state: bool = False,
) -> tuple[Tensor, Tensor]:
    """Longhorn's recurrence and readout (arXiv 2407.14207, section 3.2):

        beta = sigmoid(dt),  eps = beta / (1 + beta k.k)
        S_t = (1 - eps_t k_t^2) * S_{t-1} + (eps_t x_t) k_t^T,   o_t = S_t q_t

    Args:
        x: inputs, (B, L, D).
        dt: pre-activations of the step sizes, (B, L, D).
        k, q: keys and queries, (B, L, m), shared by all channels.
        initial_state: S_{-1}, (B, D, m); zero when absent.
        mask, reset, reverse, update_state: as for `linear_scan`; at padding, o reads the unchanged state.
        reset_state: the state that documents start from, (D, m); zero when absent. Not with `reverse`. Each start costs
            as much as m tokens.
        backend: "reference", "chunked", "cpu" or "cuda"; None picks the fastest that can run. The CUDA kernels take m
            up to 128 (64 in float64); beyond, None picks "chunked".

    Returns:
        o, (B, L, D) in the inputs' promoted dtype, and final_state, (B, D, m), float32 (float64 in, float64 out).

    Raises:
        TypeError, ValueError, BackendUnavailable: as `linear_scan`.
    """
    check_reverse(reverse)
    inputs = {"x": x, "dt": dt, "k": k, "q": q}
    for name, tensor in inputs.items():
        check_tensor(name, tensor, x)
        if tensor.is_complex():
            raise TypeError(f"{name} must be real, got {tensor.dtype}")
        if tensor.dim() != 3:
            raise ValueError(f"{name} must have three dimensions, (batch, length, ...), got {tuple(tensor.shape)}")
    if dt.shape != x.shape:
        raise ValueError(f"x and dt must have one shape, got {tuple(x.shape)}, {tuple(dt.shape)}")
    if k.shape != q.shape or k.shape[:2] != x.shape[:2]:
        raise ValueError(
            f"k and q must have the shape (batch, length, m) = {tuple(x.shape[:2])} + (m,), "
            f"got {tuple(k.shape)}, {tuple(q.shape)}"
        )
    check_mask("mask", mask, x)
    check_mask("reset", reset, x)
    dtype = x.dtype
    for tensor in (dt, k, q):
        dtype = torch.promote_types(dtype, tensor.dtype)
    if initial_state is not None:
        check_tensor("initial_state", initial_state, x)
        want = (x.shape[0], x.shape[2], k.shape[2])
        if initial_state.shape != want or initial_state.is_complex():
            raise ValueError(
                f"initial_state must be real, with the shape (batch, channels, m) = {want}, "
                f"got {initial_state.dtype} {tuple(initial_state.shape)}"
            )
    if update_state:
        check_updatable(initial_state, STATE_DTYPES[dtype], list(inputs.values()))
    given_state = initial_state
    if initial_state is not None:
        initial_state = initial_state.to(STATE_DTYPES[dtype])
    x, dt, k, q = (tensor.to(dtype) for tensor in (x, dt, k, q))
    if reset_state is not None:
        check_reset_state(reset_state, ((x.shape[2], k.shape[2]),), x, reverse, may_be_complex=False)
        if reset is not None and reset_state.numel():
            inputs, mask, reset, places = longhorn_plain.with_starts(x, dt, k, q, mask, reset, reset_state)
            o, state = longhorn_scan(
                *inputs, given_state, mask=mask, reset=reset, backend=backend, update_state=update_state
            )
            return o.gather(1, places[..., None].expand_as(x)).to(dtype), state
    given, backend = backend, choose_backend(backend, x.device)
    if backend == "cuda" and k.shape[2] > longhorn_cuda.MAX_STATES[dtype]:
        if given is not None:
            raise ValueError(
                f"backend 'cuda' takes m up to {longhorn_cuda.MAX_STATES[dtype]} in {dtype}, got {k.shape[2]}; "
                "'chunked' takes any"
            )
        backend = "chunked"
    if backend not in COMPILED:
        x, dt, k = unpadded(mask, x, dt, k)
    refuse_forward_mode(*(() if backend == "reference" else (x, dt, k, q, initial_state)))
    flags = None if backend == "reference" else step_flags(mask, reset, reverse)

    def run(inputs, initial_state):
        if backend == "reference":
            o, state = longhorn_plain.loop(*inputs, initial_state, mask, reset, reverse)
            return o.to(dtype), state
        return torch.ops.hf_recurrent.longhorn(*inputs, initial_state, flags, reverse, backend)

    if group := split.current_group():
        check_split(initial_state, reverse)

        def kept(inputs):
            """The state that is left of ones, when nothing is added to it."""
            x, dt, k, q = inputs
            ones = torch.ones(x.shape[0], x.shape[2], k.shape[2], dtype=STATE_DTYPES[dtype], device=x.device)
            return run((torch.zeros_like(x), dt, k, q), ones)[1]

        return split.scan(group, run, kept, [x, dt, k, q])
    if update_state:
        if backend == "reference":
            o, state = run((x, dt, k, q), initial_state)
            return o, given_state.copy_(state)
        return torch.ops.hf_recurrent.longhorn_(x, dt, k, q, given_state, flags, reverse, backend), given_state
    return run((x, dt, k, q), initial_state)


def _gated_scan(
    scan: Callable,
    gated: Callable,
    x: Tensor,
    dt: Tensor,
    k: Tensor,
    q: Tensor,
    D: Tensor,
    gate: Tensor,
    initial_state: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reset_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`gated_scan` by `scan`, which is `longhorn_scan`, and `gated`, which is `skip_silu_gate`."""
    o, state = scan(x, dt, k, q, initial_state, mask=mask, reset=reset, reset_state=reset_state)
    dtype = gate.dtype
    return gated(o.to(dtype), x.to(dtype), gate, D.to(dtype)), state


def gated_scan(
    x: Tensor,
    dt: Tensor,
    k: Tensor,
    q: Tensor,
    D: Tensor,
    gate: Tensor,
    initial_state: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reset_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """
    (o + D x) silu(gate) of `longhorn_scan`'s o, and its final state; on the CPU in one pass, where nothing
    differentiates it.

    Args:
        x, dt, k, q, initial_state, mask, reset, reset_state: as for `longhorn_scan`.
        D: (D,), the share of x that passes by the state.
        gate: (B, L, D).

    Returns:
        (B, L, D) in the gate's dtype, and the final state, (B, D, m).
    """
    tensors, dtype = (x, dt, k, q, D, gate), x.dtype
    if (
        (reset is None or reset_state is None)
        and unobserved(*tensors, initial_state, mask, reset)
        and dtype in cpu.REAL
        and dtype is dt.dtype is k.dtype is q.dtype is D.dtype is gate.dtype
        and x.shape == dt.shape == gate.shape
        and k.shape == q.shape
        and k.shape[:2] == x.shape[:2]
        and D.shape == x.shape[2:]
        and (initial_state is None or initial_state.dtype is STATE_DTYPES[dtype])
        and (initial_state is None or initial_state.shape == (x.shape[0], x.shape[2], k.shape[2]))
        and cpu.unavailable_reason() is None
    ):
        check_mask("mask", mask, x)
        check_mask("reset", reset, x)
        flags = step_flags(mask, reset, reverse=False)
        return _cpu_forward(x, dt, k, q, initial_state, flags, False, D=D.contiguous(), gate=gate)
    options = {"mask": mask, "reset": reset, "reset_state": reset_state}
    return _gated_scan(longhorn_scan, skip_silu_gate, *tensors, initial_state, **options)
