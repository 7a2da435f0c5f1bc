"""A recurrence over a sequence that is split over processes: rank r holds the r-th part, and only states travel.

Rank r's part, as a whole, is an affine map of the state that enters it,

    h_out = A_r h_in + b_r,   A_r = product of its a_t,   b_r = its final state from a state of zero,

and such maps compose: (A', b') after (A, b) is (A' A, A' b + b'). So what enters each part is a prefix of them, which
log2(ranks) exchanges between pairs find (Kogge and Stone, IEEE Trans. Computers C-22, 1973; for recurrences Blelloch,
CMU-CS-90-190, section 1.4). Each rank then scans its part once more from the right state. Gradients take the same way
back: with g_r the gradient that part r alone sends to its h_in,

    lambda_{r-1} = g_r + conj(A_r) lambda_r

is the gradient of part r - 1's h_out. Two scans forward in place of one; a third, and two ways back through it, in
the backward pass; and two states per exchange, whatever L is.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

_groups: list[dist.ProcessGroup | None] = []


def enter(group: dist.ProcessGroup | None) -> None:
    """From here to `leave`, scans and convolutions take their inputs for parts of longer ones; for whole ones where the
    group is None."""
    _groups.append(group)


def leave() -> None:
    _groups.pop()


def current_group() -> dist.ProcessGroup | None:
    return _groups[-1] if _groups else None


# ---- exchanges -------------------------------------------------------------------------------------------------------


def shift(x: Tensor, distance: int, group: dist.ProcessGroup) -> Tensor | None:
    """What the rank `distance` before this one passes, while this one's x goes as far ahead (back, where it is
    negative); None at the end where there is no such rank."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    x = x.contiguous()
    payload = torch.view_as_real(x) if x.is_complex() else x  # not every transport takes complex numbers
    received = torch.empty_like(payload) if 0 <= rank - distance < size else None
    operations = []
    if 0 <= rank + distance < size:
        peer = dist.get_global_rank(group, rank + distance)
        operations.append(dist.P2POp(dist.isend, payload, peer, group))
    if received is not None:
        peer = dist.get_global_rank(group, rank - distance)
        operations.append(dist.P2POp(dist.irecv, received, peer, group))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return torch.view_as_complex(received) if received is not None and x.is_complex() else received


def entering(factor: Tensor, addend: Tensor, group: dist.ProcessGroup, back: bool = False) -> Tensor:
    """The state that enters this rank's part.

    Args:
        factor, addend: A_r and b_r of the affine map that this rank's part is, of the state's shape.
        back: the parts are passed from the last rank to the first.

    Returns:
        The maps of all earlier ranks, one after the other, of zero. 1 + ceil(log2(ranks)) exchanges of two states.
    """
    sign = -1 if back else 1
    received = shift(torch.stack([factor, addend]), sign, group)
    if received is None:  # nothing comes before the first part: the identity
        received = torch.stack([torch.ones_like(factor), torch.zeros_like(addend)])
    factor, addend = received
    distance = 1
    while distance < dist.get_world_size(group):
        received = shift(torch.stack([factor, addend]), sign * distance, group)
        if received is not None:
            factor, addend = factor * received[0], factor * received[1] + addend
        distance *= 2
    return addend


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, run, kept, *inputs):
        own, factor = run(inputs, None)[1], kept(inputs)
        factor = factor.expand_as(own).to(own.dtype)
        before = entering(factor, own, group)
        ctx.group, ctx.run, device = group, run, own.device.type
        ctx.autocast = {"enabled": torch.is_autocast_enabled(device), "dtype": torch.get_autocast_dtype(device)}
        ctx.save_for_backward(factor, before, *inputs)
        outputs, final = run(inputs, before)
        ctx.mark_non_differentiable(final)
        return outputs, final

    @staticmethod
    def backward(ctx, grad_outputs, _):
        """Scans once more: what a graph would have kept since the forward pass is what checkpointing is to save, and
        each of the two ways through it would have repeated a checkpointed block."""
        factor, before, *inputs = ctx.saved_tensors
        with torch.enable_grad(), torch.autocast(before.device.type, **ctx.autocast):
            leaves = [
                x.detach().requires_grad_(wanted) for x, wanted in zip(inputs, ctx.needs_input_grad[3:], strict=True)
            ]
            before = before.detach().requires_grad_()
            outputs, final = ctx.run(leaves, before)
        (own,) = torch.autograd.grad(outputs, before, grad_outputs, retain_graph=True)
        after = entering(factor.conj().resolve_conj(), own, ctx.group, back=True)
        wanted = [x for x in leaves if x.requires_grad]
        grads = iter(torch.autograd.grad((outputs, final), wanted, (grad_outputs, after)))
        return None, None, None, *(next(grads) if x.requires_grad else None for x in leaves)


def scan(
    group: dist.ProcessGroup,
    run: Callable[[list[Tensor], Tensor | None], tuple[Tensor, Tensor]],
    kept: Callable[[list[Tensor]], Tensor],
    inputs: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """A scan over all ranks' parts. Every rank must call it, and its backward pass, in the same order.

    Args:
        run: inputs and initial state to outputs and final state, for a part alone; differentiable.
        kept: inputs to the product of the part's coefficients, 0 where a document begins in it; needs no gradient.

    Returns:
        This rank's outputs, and the state after its part, which carries no gradient.
    """
    return _Scan.apply(group, run, kept, *inputs)


def kept_state(a: Tensor, length: int, mask: Tensor | None, reset: Tensor | None) -> Tensor:
    """The product over time of a, which broadcasts to (B, L, D): (B or 1, D or 1). Padding counts as 1, and a document
    that begins at a real token as 0."""
    a = a.expand(-1, length, -1)
    if mask is not None:
        a = torch.where(mask[..., None], a, 1)
    product = a.prod(dim=1)
    if reset is not None:
        begins = (reset if mask is None else reset & mask).any(dim=1)
        product = torch.where(begins[:, None], 0, product)
    return product


# ---- what surrounds a scan: the inputs of a convolution, the borders of documents ------------------------------------


def of_first(x: Tensor) -> Tensor:
    """x of the first rank that shares the sequence, in x, which is nobody's gradient; x itself in a whole one."""
    if (group := current_group()) is not None:
        dist.broadcast(x, group=group, group_src=0)
    return x


class _Shift(torch.autograd.Function):
    """x of the rank before, zeros at the first one."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        received = shift(x, 1, group)
        return torch.zeros_like(x) if received is None else received

    @staticmethod
    def backward(ctx, grad):
        received = shift(grad, -1, ctx.group)
        return (torch.zeros_like(grad) if received is None else received), None


class _Gather(torch.autograd.Function):
    """x of all ranks, (ranks, ...)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group)
    return torch.stack(parts)


def carried_inputs(
    state: Tensor | None, own: Callable[[], Tensor], mask: Tensor | None, reset: Tensor | None
) -> Tensor | None:
    """What a convolution reads before these inputs: `state`, or in a split sequence `last_inputs` of `own()`."""
    group = current_group()
    return state if group is None else last_inputs(group, own(), mask, reset)


def last_inputs(group: dist.ProcessGroup, own: Tensor, mask: Tensor | None, reset: Tensor | None) -> Tensor:
    """The inputs before this rank's part that a convolution reaches.

    Args:
        own: (B, k - 1, D), the last real inputs of this rank's part and of the document that it ends in, zeros before.
        mask, reset: (B, L) bool, of this rank's part. Without a mask (`document_borders` sees to one where a part is
            shorter), each part fills `own`, and one exchange between neighbours will do.

    Returns:
        (B, k - 1, D).
    """
    if mask is None:
        return _Shift.apply(own, group)
    size = own.shape[1]
    count = mask.sum(1)
    if reset is not None:
        count = torch.where((reset & mask).any(1), size, count)
    counts = gather(count.clamp(max=size), group)
    parts = _Gather.apply(own, group)
    slots = torch.arange(size, device=own.device)
    state = torch.zeros_like(own)
    # Later parts too, with nothing taken from them: every rank's graph has the gather in it, as its backward needs.
    for rank, (part, count) in enumerate(zip(parts, counts, strict=True)):
        count = count * (rank < dist.get_rank(group))
        source = (slots + count[:, None]).clamp(max=size - 1)
        moved = state.gather(1, source[..., None].expand_as(state))
        state = torch.where((slots >= size - count[:, None])[..., None], part, moved)
    return state


def document_borders(
    group: dist.ProcessGroup | None,
    position_ids: Tensor | None,
    seq_idx: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None,
    like: Tensor,
    shortest: int,
) -> tuple[Tensor | None, Tensor | None]:
    """mask and reset of this rank's part, told of what lies before it.

    Args:
        group: None where the sequence is not split; nothing changes then.
        starts: (B, L) bool, where documents begin by this part alone.
        like: (B, L, ...), on the device of the inputs.
        shortest: a part of fewer tokens on any rank gives all of them a mask.

    Returns:
        mask, None on all ranks or on none, and reset, which marks the first real token too where it begins a document
        and there is a real token on an earlier rank.
    """
    if group is None:
        return mask, starts
    batch, length = like.shape[:2]
    real = torch.ones(batch, length, dtype=torch.bool, device=like.device) if mask is None else mask
    columns = torch.arange(length, device=like.device)
    first, last = torch.where(real, columns, length - 1).amin(1), torch.where(real, columns, 0).amax(1)

    def at(ids: Tensor | None, place: Tensor) -> Tensor:
        if ids is None:
            return torch.zeros_like(place)
        return ids.expand(batch, -1).gather(1, place[:, None])[:, 0].long()

    needs_mask = torch.full_like(first, mask is not None or length < shortest)
    summary = torch.stack([real.any(1).long(), needs_mask, at(position_ids, last), at(seq_idx, last)])
    seen = torch.zeros_like(first, dtype=torch.bool)
    position = sequence = torch.zeros_like(first)
    everyone = gather(summary, group)
    for any_real, _, its_position, its_sequence in everyone[: dist.get_rank(group)]:
        any_real = any_real.bool()
        seen = seen | any_real
        position = torch.where(any_real, its_position, position)
        sequence = torch.where(any_real, its_sequence, sequence)
    begins = torch.zeros_like(seen)
    if position_ids is not None:
        begins = begins | (at(position_ids, first) == 0) | (at(position_ids, first) <= position)
    if seq_idx is not None:
        begins = begins | (at(seq_idx, first) != sequence)
    at_border = (columns == first[:, None]) & (begins & seen)[:, None] & real
    starts = at_border if starts is None else starts | at_border
    return real if everyone[:, 1].any() else None, starts if starts.any() else None
