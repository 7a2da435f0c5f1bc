"""Longhorn's cell in plain PyTorch (arXiv 2407.14207): the definition, the form that materialises a chunk of positions
at a time and recomputes it for backward, and documents that start from a state."""

import math

import torch
from torch import Tensor

from . import chunked
from .reference import STATE_DTYPES, linear_scan_loop

CHUNK_ELEMENTS = 1 << 20  # states that are materialised at once: 4 MiB in float32


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


def _chunk(part: slice, x, dt, k, state, flags, reverse) -> tuple[Tensor, Tensor, Tensor]:
    """a and the states h of one chunk, (B, C, D, m), and the state after it."""
    a, b = coefficients(x[:, part], dt[:, part], k[:, part])
    flags = None if flags is None else flags[:, part]
    h, state = chunked.forward(a.flatten(2), b.flatten(2), state, flags, reverse)
    return a, h.view_as(a), state


def forward(x, dt, k, q, initial_state, flags, reverse):
    (batch, _, channels), m = x.shape, k.shape[2]
    dtype, storage = STATE_DTYPES[x.dtype], x.dtype
    x, dt, k, q = (t.to(dtype) for t in (x, dt, k, q))
    o = torch.empty_like(x, memory_format=torch.contiguous_format)
    state = x.new_zeros(batch, channels * m) if initial_state is None else initial_state.flatten(1).clone()
    for part in _chunks(x, k, reverse):
        _, h, state = _chunk(part, x, dt, k, state, flags, reverse)
        o[:, part] = readout(h, q[:, part])
    return o.to(storage), state.view(batch, channels, m)


def backward(x, dt, k, q, initial_state, flags, grad_o, grad_final, reverse):
    (batch, _, channels), m = x.shape, k.shape[2]
    inputs = x, dt, k, q
    x, dt, k, q, grad_o = (t.to(grad_final.dtype) for t in (*inputs, grad_o))
    state = x.new_zeros(batch, channels * m) if initial_state is None else initial_state.flatten(1)
    parts, states = _chunks(x, k, reverse), []
    for part in parts:
        states.append(state)
        state = _chunk(part, x, dt, k, state, flags, reverse)[2]
    carry = grad_final.flatten(1).clone()
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, dt, k, q)]
    grad_x, grad_dt, grad_k, grad_q = grads
    for part, state in zip(parts[::-1], states[::-1], strict=True):
        a, h, _ = _chunk(part, x, dt, k, state, flags, reverse)
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


def loop(x, dt, k, q, initial_state, mask, reset, reverse):
    """The definition, one position after the other, with the states of all of them in memory: the oracle."""
    x, dt, k, q = (t.to(STATE_DTYPES[x.dtype]) for t in (x, dt, k, q))
    a, b = coefficients(x, dt, k)
    state = None if initial_state is None else initial_state.flatten(1)
    h, state = linear_scan_loop(a.flatten(2), b.flatten(2), state, mask, reset, reverse)
    return readout(h.view_as(a), q), state.view(*a.shape[:1], *a.shape[2:])


def with_starts(x, dt, k, q, mask, reset, start) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
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
