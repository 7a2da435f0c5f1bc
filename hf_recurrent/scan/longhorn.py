"""Longhorn's cell (arXiv 2407.14207): a state of D x m per row that exists only at the position being computed.

It is a linear recurrence over D m channels whose coefficients all follow from D + m numbers, so what is read and
written grows with L (D + m), never with L D m. The compiled kernel recomputes the states of the backward pass from
checkpoints; the plain PyTorch form materialises a chunk of positions at a time and recomputes it likewise.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from . import chunked, cpu, longhorn_cuda, split
from .ops import (
    check_mask,
    check_reset_state,
    check_split,
    check_tensor,
    check_updatable,
    choose_backend,
    refuse_forward_mode,
    step_flags,
)
from .reference import STATE_DTYPES, linear_scan_loop
from .unobserved import unobserved

CHUNK_ELEMENTS = 1 << 20  # states that the plain form materialises at once: 4 MiB in float32


# batch, length, channels, states, reverse, threads, pieces, flags; x, dt, k, q; o, state, initial; grad_o; grad_x,
# grad_dt, grad_k, grad_q; skip, gate
_PROBLEM = cpu.Problem("40q")
_NO_GRADS = (0, *cpu.NOTHING, 0, 0, 0, 0)  # the problem from `initial` to `grad_q`
_NO_GATE = (0, *cpu.NOTHING)


# ---- in plain PyTorch -----------------------------------------------------------------------------------------------


def coefficients(x: Tensor, dt: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """a = 1 - eps k^2 and b = eps x k, (B, L, D, m), with eps = beta / (1 + beta k.k), beta = sigmoid(dt)
    (section 3.2, the diagonal approximation)."""
    beta = torch.sigmoid(dt)
    eps = (beta / (1 + beta * k.square().sum(-1, keepdim=True)))[..., None]
    k = k[:, :, None]
    return 1 - eps * k.square(), eps * x[..., None] * k


def readout(state: Tensor, q: Tensor) -> Tensor:
    """o = S q: (B, L, D, m), (B, L, m) -> (B, L, D)."""
    return torch.einsum("bldm,blm->bld", state, q)


def _chunk_size(x: Tensor, k: Tensor) -> int:
    """Positions at a time: at least sqrt(L), so that the states between chunks take no more than those in one."""
    batch, length, channels = x.shape
    return max(math.isqrt(length) + 1, CHUNK_ELEMENTS // max(1, batch * channels * k.shape[2]))


def _chunks(x: Tensor, k: Tensor, reverse: bool) -> list[slice]:
    size = _chunk_size(x, k)
    parts = [slice(start, start + size) for start in range(0, x.shape[1], size)]
    return parts[::-1] if reverse else parts


def _plain_chunk(part: slice, x, dt, k, state, flags, reverse) -> tuple[Tensor, Tensor, Tensor]:
    """a and the states h of one chunk, (B, C, D, m), and the state after it."""
    a, b = coefficients(x[:, part], dt[:, part], k[:, part])
    flags = None if flags is None else flags[:, part]
    h, state = chunked.forward(a.flatten(2), b.flatten(2), state, flags, reverse)
    return a, h.view_as(a), state


def _plain_forward(x, dt, k, q, initial_state, flags, reverse):
    (batch, _, channels), m = x.shape, k.shape[2]
    dtype, storage = STATE_DTYPES[x.dtype], x.dtype
    x, dt, k, q = (t.to(dtype) for t in (x, dt, k, q))
    o = torch.empty_like(x, memory_format=torch.contiguous_format)
    state = x.new_zeros(batch, channels * m) if initial_state is None else initial_state.flatten(1).clone()
    for part in _chunks(x, k, reverse):
        _, h, state = _plain_chunk(part, x, dt, k, state, flags, reverse)
        o[:, part] = readout(h, q[:, part])
    return o.to(storage), state.view(batch, channels, m)


def _plain_backward(x, dt, k, q, initial_state, flags, grad_o, grad_final, reverse):
    (batch, _, channels), m = x.shape, k.shape[2]
    inputs = x, dt, k, q
    x, dt, k, q, grad_o = (t.to(grad_final.dtype) for t in (*inputs, grad_o))
    state = x.new_zeros(batch, channels * m) if initial_state is None else initial_state.flatten(1)
    parts, states = _chunks(x, k, reverse), []
    for part in parts:
        states.append(state)
        state = _plain_chunk(part, x, dt, k, state, flags, reverse)[2]
    carry = grad_final.flatten(1).clone()
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, dt, k, q)]
    grad_x, grad_dt, grad_k, grad_q = grads
    for part, state in zip(parts[::-1], states[::-1], strict=True):
        a, h, _ = _plain_chunk(part, x, dt, k, state, flags, reverse)
        grad_h = grad_o[:, part, :, None] * q[:, part, None]
        grad_q[:, part] = torch.einsum("bld,bldm->blm", grad_o[:, part], h)
        chunk_flags = None if flags is None else flags[:, part]
        grad_a, grad_b, carry = chunked.backward(
            a.flatten(2), h.flatten(2), state, chunk_flags, grad_h.flatten(2), carry, reverse
        )
        grad_a, grad_b = grad_a.view_as(a), grad_b.view_as(a)
        # a = 1 - eps k^2, b = eps x k, eps = beta / (1 + beta k.k): as derived in csrc/cells.h
        beta, xp, kp = torch.sigmoid(dt[:, part]), x[:, part], k[:, part]
        damping = 1 / (1 + beta * kp.square().sum(-1, keepdim=True))
        eps = beta * damping
        push = torch.einsum("bldm,blm->bld", grad_b, kp)
        grad_eps = xp * push - torch.einsum("bldm,blm->bld", grad_a, kp.square())
        grad_kk = -(grad_eps * eps.square()).sum(-1, keepdim=True)
        grad_x[:, part] = eps * push
        grad_dt[:, part] = grad_eps * damping.square() * beta * torch.sigmoid(-dt[:, part])
        grad_k[:, part] = (
            torch.einsum("bldm,bld->blm", grad_b, eps * xp)
            - 2 * kp * torch.einsum("bldm,bld->blm", grad_a, eps)
            + 2 * kp * grad_kk
        )
    grads = [g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)]
    return *grads, carry.reshape(batch, channels, m)


def _loop(x, dt, k, q, initial_state, mask, reset, reverse):
    """The definition, one position after the other, with the states of all of them in memory: the oracle."""
    x, dt, k, q = (t.to(STATE_DTYPES[x.dtype]) for t in (x, dt, k, q))
    a, b = coefficients(x, dt, k)
    state = None if initial_state is None else initial_state.flatten(1)
    h, state = linear_scan_loop(a.flatten(2), b.flatten(2), state, mask, reset, reverse)
    return readout(h.view_as(a), q), state.view(*a.shape[:1], *a.shape[2:])


# ---- the operator ---------------------------------------------------------------------------------------------------

torch.library.define(
    "hf_recurrent::longhorn",
    "(Tensor x, Tensor dt, Tensor k, Tensor q, Tensor? initial_state, Tensor? flags, bool reverse, "
    "str backend) -> (Tensor, Tensor)",
)
torch.library.define(
    "hf_recurrent::longhorn_",
    "(Tensor x, Tensor dt, Tensor k, Tensor q, Tensor(a!) state, Tensor? flags, bool reverse, str backend) -> Tensor",
)
torch.library.define(
    "hf_recurrent::longhorn_backward",
    "(Tensor x, Tensor dt, Tensor k, Tensor q, Tensor? initial_state, Tensor? flags, Tensor grad_o, Tensor grad_final, "
    "bool reverse, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


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


@torch.library.impl("hf_recurrent::longhorn_", "default")
def _(x, dt, k, q, state, flags, reverse, backend):
    """o alone; the final state takes the place of the one that was given."""
    if backend == "cuda":
        return longhorn_cuda.forward(x, dt, k, q, state, flags, reverse, final=state)[0]
    o, final = torch.ops.hf_recurrent.longhorn(x, dt, k, q, state, flags, reverse, backend)
    state.copy_(final)
    return o


@torch.library.impl("hf_recurrent::longhorn", "default")
def _(x, dt, k, q, initial_state, flags, reverse, backend):
    if backend == "chunked":
        return _plain_forward(x, dt, k, q, initial_state, flags, reverse)
    if backend == "cuda":
        return longhorn_cuda.forward(x, dt, k, q, initial_state, flags, reverse)
    return _cpu_forward(x, dt, k, q, initial_state, flags, reverse)


def _cpu_forward(x, dt, k, q, initial_state, flags, reverse, D=None, gate=None) -> tuple[Tensor, Tensor]:
    """o, with D and the gate (o + D x) silu(gate), and the final state."""
    o = torch.empty(x.shape, dtype=x.dtype)
    if initial_state is None:
        state = torch.zeros(x.shape[0], x.shape[2], k.shape[2], dtype=STATE_DTYPES[x.dtype])
    else:
        state = initial_state.clone(memory_format=torch.contiguous_format)
    if o.numel():
        gated = _NO_GATE if D is None else (D.data_ptr(), *cpu.describe(gate))
        _run(False, x, dt, k, q, state, flags, reverse, _pieces(x), o.data_ptr(), *_NO_GRADS, *gated)
    return o, state


@torch.library.impl("hf_recurrent::longhorn_backward", "default")
def _(x, dt, k, q, initial_state, flags, grad_o, grad_final, reverse, backend):
    if backend == "chunked":
        return _plain_backward(x, dt, k, q, initial_state, flags, grad_o, grad_final, reverse)
    if backend == "cuda":
        return longhorn_cuda.backward(x, dt, k, q, initial_state, flags, grad_o, grad_final, reverse)
    state = grad_final.clone(memory_format=torch.contiguous_format)
    grad_x, grad_dt = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    pieces = _pieces(x)
    # Each piece sums over its own channels, in a fixed order, and the pieces are summed here: the same at every run.
    grad_k, grad_q = torch.zeros(2, x.shape[0], pieces, *k.shape[1:], dtype=state.dtype)
    if x.numel():
        initial = None if initial_state is None else initial_state.contiguous()
        _run(
            True,
            x,
            dt,
            k,
            q,
            state,
            flags,
            reverse,
            pieces,
            0,
            cpu.pointer(initial),
            *cpu.describe(grad_o),
            grad_x.data_ptr(),
            grad_dt.data_ptr(),
            grad_k.data_ptr(),
            grad_q.data_ptr(),
            *_NO_GATE,
        )
    return grad_x, grad_dt, grad_k.sum(1).to(k.dtype), grad_q.sum(1).to(q.dtype), state


@torch.library.register_fake("hf_recurrent::longhorn_")
def _(x, dt, k, q, state, flags, reverse, backend):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("hf_recurrent::longhorn")
def _(x, dt, k, q, initial_state, flags, reverse, backend):
    o = torch.empty_like(x, memory_format=torch.contiguous_format)
    return o, x.new_empty(x.shape[0], x.shape[2], k.shape[2], dtype=STATE_DTYPES[x.dtype])


@torch.library.register_fake("hf_recurrent::longhorn_backward")
def _(x, dt, k, q, initial_state, flags, grad_o, grad_final, reverse, backend):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, dt, k, q, grad_final))


def _setup_context(ctx, inputs, output):
    *tensors, initial_state, flags, ctx.reverse, ctx.backend = inputs
    ctx.has_initial = initial_state is not None
    ctx.save_for_backward(*tensors, initial_state, flags)


def _backward(ctx, grad_o, grad_final):
    *tensors, initial_state, flags = ctx.saved_tensors
    *grads, grad_initial = torch.ops.hf_recurrent.longhorn_backward(
        *tensors, initial_state, flags, grad_o, grad_final, ctx.reverse, ctx.backend
    )
    return *grads, grad_initial if ctx.has_initial else None, None, None, None


def _no_double_backward(ctx, *grads):
    raise NotImplementedError(
        "the Longhorn scan is differentiable once; backend='reference' can be differentiated any number of times"
    )


torch.library.register_autograd("hf_recurrent::longhorn", _backward, setup_context=_setup_context)
torch.library.register_autograd("hf_recurrent::longhorn_backward", _no_double_backward)


# ---- documents that start from a state ------------------------------------------------------------------------------


def _with_starts(x, dt, k, q, mask, reset, start) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """
    The inputs with m more tokens before each document's first, which write `start`, (D, m), column by column: token j
    has the key e_j, x = 2 start[:, j] and beta = 1, so that eps is 1/2 and the other columns stay.

    Returns:
        x, dt, k, q in the state's dtype, mask and reset with these tokens, and where the others are now, (B, L).
    """
    (batch, length, channels), m, dtype = x.shape, k.shape[2], STATE_DTYPES[x.dtype]
    real = torch.ones_like(reset) if mask is None else mask
    starts = (reset & real).cumsum(1)
    places = torch.arange(length, device=x.device) + m * starts
    longer = length + m * int(starts[:, -1:].max()) if x.numel() else length

    def spread(tokens: Tensor, fill: float = 0) -> Tensor:
        to = places.view(batch, length, *[1] * (tokens.dim() - 2)).expand_as(tokens)
        return tokens.new_full((batch, longer, *tokens.shape[2:]), fill).scatter(1, to, tokens)

    x, k, q = (spread(tokens.to(dtype)) for tokens in (x, k, q))
    dt = spread(dt.to(dtype), 50)  # of which the sigmoid is 1
    mask, dropped = spread(real), spread(torch.zeros_like(reset))
    rows, columns = (reset & real).nonzero(as_tuple=True)
    new = places[rows, columns, None] - m + torch.arange(m, device=x.device)  # (starts, m)
    at = rows[:, None].expand_as(new), new
    x = x.index_put(at, 2 * start.to(dtype).T.expand(len(new), m, channels))
    k = k.index_put(at, torch.eye(m, dtype=dtype, device=x.device).expand(len(new), m, m))
    mask = mask.index_put(at, torch.ones_like(new, dtype=torch.bool))
    dropped[rows, new[:, 0]] = True
    return [x, dt, k, q], mask, dropped, places


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
        if reset is not None:
            inputs, mask, reset, places = _with_starts(x, dt, k, q, mask, reset, reset_state)
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
    refuse_forward_mode(*(() if backend == "reference" else (x, dt, k, q, initial_state)))
    flags = None if backend == "reference" else step_flags(mask, reset, reverse)

    def run(inputs, initial_state):
        if backend == "reference":
            o, state = _loop(*inputs, initial_state, mask, reset, reverse)
            return o.to(dtype), state
        return torch.ops.hf_recurrent.longhorn(*inputs, initial_state, flags, reverse, backend)

    if group := split.current_group():
        check_split(initial_state, reverse)

        def kept(inputs):
            """The state that is left of ones, when nothing is added to it."""
            x, dt, k, q = inputs
            ones = torch.ones(len(x), x.shape[2], k.shape[2], dtype=STATE_DTYPES[dtype], device=x.device)
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
    """`gated_scan` by `scan`, which is `longhorn_scan`."""
    o, state = scan(x, dt, k, q, initial_state, mask=mask, reset=reset, reset_state=reset_state)
    o = torch.addcmul(o, x.to(o.dtype), D.to(o.dtype))
    return o.to(gate.dtype) * F.silu(gate), state


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
        return _cpu_forward(x, dt, k, q, initial_state, flags, False, D.contiguous(), gate)
    return _gated_scan(longhorn_scan, *tensors, initial_state, mask=mask, reset=reset, reset_state=reset_state)
