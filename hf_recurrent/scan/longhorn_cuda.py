"""The CUDA backend of Longhorn's cell: what csrc/longhorn_cuda.cu is called with."""

import torch
from torch import Tensor

from .cuda_kernels import MAX_GRID_Y, TYPES, Module, aligned, describe, launch, pointer, segments_of
from .reference import STATE_DTYPES

THREADS = 128
# What a thread's registers and a block's shared memory hold.
MAX_STATES = {torch.float32: 128, torch.bfloat16: 128, torch.float16: 128, torch.float64: 64}


def module_for(dtype: torch.dtype, states: int) -> Module:
    return Module("longhorn_cuda", (("HFR_TYPE", TYPES[dtype]), ("HFR_STATES", str(states))))


def lanes(states: int) -> int:
    """Threads to a channel, as in csrc/longhorn_cuda.cu."""
    return 4 if states <= 16 else 8 if states <= 64 else 16


def steps(states: int) -> int:
    """Positions to a tile, and from one checkpoint to the next, likewise."""
    return 8 if states <= 4 * lanes(states) else 4


class _Call:
    """One scan: its module, its division of the work, and the arguments that its kernels share."""

    def __init__(self, x, dt, k, q, flags, reverse):
        batch, length, channels = x.shape
        self.states = k.shape[2]
        self.device, self.module = x.device, module_for(x.dtype, self.states)
        self.blocks = -(-channels * lanes(self.states) // THREADS)
        self.segments, size = segments_of(length, self.blocks * batch, x.device)
        self.grid = self.blocks, min(batch * self.segments, MAX_GRID_Y)
        # What each segment makes of a state or, in backward, of its gradient.
        count = self.segments if self.segments > 1 else 0
        state = {"dtype": STATE_DTYPES[x.dtype], "device": x.device}
        self.summaries = torch.empty(2, count, batch, channels, self.states, **state)
        self.cuts = torch.empty(count, batch, dtype=torch.uint8, device=x.device)
        self.shared = [
            *x.shape,
            int(reverse),
            pointer(flags),
            self.segments,
            size,
            *(pointer(t) for t in (*self.summaries, self.cuts)),
            *(part for t in (x, dt, k, q) for part in describe(t)),
        ]

    def run(self, entry: str, *arguments: int) -> None:
        launch(self.module, entry, self.device, self.grid, THREADS, [*self.shared, *arguments])

    def forward(self, o: Tensor | None, initial: Tensor | None, final: Tensor | None, checkpoints: Tensor | None):
        if self.segments > 1:
            self.run("longhorn_forward_segments")
            if initial is not None and final is not None and initial.data_ptr() == final.data_ptr():
                initial = initial.clone()  # which blocks that are still to come must read
        self.run("longhorn_forward", *(pointer(t) for t in (o, initial, final, checkpoints)))


def forward(
    x,
    dt,
    k,
    q,
    initial_state: Tensor | None,
    flags: Tensor | None,
    reverse: bool,
    final: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o (B, L, D) and the final state (B, D, m). `final` may be given to be written into, and may be the initial
    state."""
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if final is None:
        final = torch.empty(x.shape[0], x.shape[2], k.shape[2], dtype=STATE_DTYPES[x.dtype], device=x.device)
    if not (o.numel() and final.numel()):
        return o.zero_(), final.zero_() if initial_state is None else final.copy_(initial_state)
    initial = None if initial_state is None else aligned(initial_state.contiguous())
    _Call(*(aligned(t) for t in (x, dt, k, q)), flags, reverse).forward(o, initial, final, None)
    return o, final


def backward(
    x, dt, k, q, initial_state: Tensor | None, flags: Tensor | None, grad_o: Tensor, grad_final: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, k, q and the initial state."""
    grad_x, grad_dt = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in "xd")
    if not (x.numel() and k.numel()):
        zeros = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (k, q)]
        return grad_x.zero_(), grad_dt.zero_(), *zeros, grad_final.clone(memory_format=torch.contiguous_format)
    initial, grad_final = (None if t is None else aligned(t.contiguous()) for t in (initial_state, grad_final))
    x, dt, k, q, grad_o = (aligned(t) for t in (x, dt, k, q, grad_o))
    call = _Call(x, dt, k, q, flags, reverse)
    batch, length, channels = x.shape
    checkpoints = grad_final.new_empty(batch, -(-length // steps(call.states)), channels, call.states)
    call.forward(None, initial, None, checkpoints)
    # Each block sums over its own channels; the blocks are summed below, in the same order at every run.
    grad_k, grad_q = grad_final.new_empty(2, batch, call.blocks, length, call.states)
    grad_initial = torch.empty_like(grad_final)
    if call.segments > 1:
        call.run("longhorn_backward_segments", *describe(grad_o))
    call.run(
        "longhorn_backward",
        *describe(grad_o),
        *(pointer(t) for t in (checkpoints, grad_final, grad_initial, grad_x, grad_dt, grad_k, grad_q)),
    )
    return grad_x, grad_dt, grad_k.sum(1).to(k.dtype), grad_q.sum(1).to(q.dtype), grad_initial
