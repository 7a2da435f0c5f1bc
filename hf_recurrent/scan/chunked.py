"""The recurrence in plain PyTorch operations, for any device and without a compiler: the fallback.

Time is cut into about sqrt(L) chunks of about sqrt(L) positions. All chunks are walked at once, first to get each one's
affine summary (the product of its coefficients, its last state from zero), then, from the states that the summaries
carry from chunk to chunk, to write the outputs: about 3 sqrt(L) steps of whole-tensor operations, no divisions and no
logarithms, so any coefficients (zero, negative, complex, above one) are as exact as in the loop, unless the product of
a chunk's coefficients overflows.
"""

import math

import torch
from torch import Tensor

from .reference import STATE_DTYPES

MASKED, DROP = 1, 2  # the bits of `flags`, as in csrc/scan_cpu.cpp


def forward(
    a: Tensor, b: Tensor, initial_state: Tensor | None, flags: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """h (B, L, D) in b's dtype and the final state (B, D) in the state's."""
    drop = None
    if flags is not None:
        masked = (flags & MASKED).bool()[..., None]
        drop = (flags & DROP).bool()[..., None]
        a, b = torch.where(masked, 1, a), torch.where(masked, 0, b)
    if reverse:
        a, b = a.flip(1) if a.shape[1] > 1 else a, b.flip(1)
        drop = None if drop is None else drop.flip(1)
    h, final = _scan(a, b, initial_state, drop)
    return (h.flip(1) if reverse else h), final


def _scan(a: Tensor, b: Tensor, initial_state: Tensor | None, drop: Tensor | None) -> tuple[Tensor, Tensor]:
    """`drop`, (B, L, 1) bool: zero takes the place of the state before the position, whatever that was. A coefficient
    of zero would let an inf or a NaN pass."""
    batch, length, channels = b.shape
    dtype = STATE_DTYPES[b.dtype]
    state = b.new_zeros(batch, channels, dtype=dtype) if initial_state is None else initial_state.clone()
    if b.numel() == 0:
        return torch.empty_like(b), state
    chunk = math.isqrt(length - 1) + 1
    chunks = -(-length // chunk)
    padding = chunks * chunk - length
    b = torch.nn.functional.pad(b, (0, 0, 0, padding)).view(batch, chunks, chunk, channels)
    over_time = a.shape[1] > 1
    if over_time:
        # The padding's coefficients are 1, so the state passes through it to the end.
        if padding:
            a = torch.cat([a, a.new_ones(a.shape[0], padding, a.shape[2])], dim=1)
        a = a.reshape(a.shape[0], chunks, chunk, a.shape[2])
    else:
        a = a[:, None]
    if drop is not None:
        drop = torch.nn.functional.pad(drop, (0, 0, 0, padding)).view(batch, chunks, chunk, 1)

    def entering(position: int, state: Tensor) -> Tensor:
        """What the position sees of the state (B, n, D) before it in the first n chunks."""
        return state if drop is None else torch.where(drop[:, : state.shape[1], position], 0, state)

    def coefficient(position: int) -> Tensor:
        return a[:, :, position if over_time else 0].to(dtype)

    # The summaries of all chunks but the last, whose end nobody needs.
    product = coefficient(0)[:, : chunks - 1].expand(-1, chunks - 1, -1)
    last = b[:, : chunks - 1, 0].to(dtype)
    for position in range(1, chunk):
        factor = coefficient(position)[:, : chunks - 1]
        product = factor * entering(position, product)
        last = factor * entering(position, last) + b[:, : chunks - 1, position]

    states = [state]
    fresh = None if drop is None else drop.any(2)
    for index in range(chunks - 1):
        carried = product[:, index] * states[-1]
        states.append(last[:, index] + (carried if fresh is None else torch.where(fresh[:, index], 0, carried)))
    carried = torch.stack(states, dim=1)

    h = torch.empty_like(b)
    for position in range(chunk):
        carried = coefficient(position) * entering(position, carried) + b[:, :, position]
        h[:, :, position] = carried
        if (chunks - 1) * chunk + position == length - 1:
            state = carried[:, -1].clone()
    return h.view(batch, chunks * chunk, channels)[:, :length].contiguous(), state


def backward(
    a: Tensor,
    h: Tensor,
    initial_state: Tensor | None,
    flags: Tensor | None,
    grad_h: Tensor,
    grad_final: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a (its own shape), b and the initial state: g_t = grad_h_t + conj(a_{t+1}) g_{t+1}, the same scan
    from the other end, with grad_final joining at the last position; grad_a_t = g_t conj(h_{t-1}), grad_b_t = g_t."""
    dtype = STATE_DTYPES[h.dtype]
    if h.numel() == 0:
        return torch.zeros_like(a), torch.zeros_like(h), grad_final.clone()
    if reverse:
        flip = [None if x is None else x.flip(1) if x.shape[1] > 1 else x for x in (a, h, flags, grad_h)]
        grad_a, grad_b, grad_initial = backward(*flip[:2], initial_state, flip[2], flip[3], grad_final, False)
        return (grad_a.flip(1) if a.shape[1] > 1 else grad_a), grad_b.flip(1), grad_initial
    start = torch.zeros_like(grad_final) if initial_state is None else initial_state
    previous = torch.cat([start[:, None], h[:, :-1].to(dtype)], dim=1)
    coefficients = a.to(dtype)
    masked = drop = None
    if flags is not None:
        masked = (flags & MASKED).bool()[..., None]
        drop = (flags & DROP).bool()[..., None]
        coefficients = torch.where(masked, 1, coefficients)
        previous = torch.where(drop | masked, 0, previous)
    shifted = coefficients
    if coefficients.shape[1] > 1:
        shifted = torch.cat([coefficients[:, 1:], torch.ones_like(coefficients[:, :1])], dim=1).flip(1)
    drop_after = None if drop is None else torch.cat([drop[:, 1:], torch.zeros_like(drop[:, :1])], dim=1).flip(1)
    grad = grad_h.to(dtype, copy=True)
    grad[:, -1] += grad_final
    g = _scan(shifted.conj().resolve_conj(), grad.flip(1), None, drop_after)[0].flip(1)
    grad_a = (g * previous.conj()).sum_to_size(a.shape).to(a.dtype)
    grad_initial = (coefficients[:, 0].conj() * g[:, 0]).expand_as(grad_final).contiguous()
    if drop is not None:
        grad_initial = torch.where(drop[:, 0], 0, grad_initial)
    grad_b = g if masked is None else torch.where(masked, 0, g)
    return grad_a, grad_b.to(h.dtype), grad_initial
