"""The CUDA backend of Longhorn's cell: what csrc/longhorn_cuda.cu is called with."""

import torch
from torch import Tensor

from .cuda_kernels import TYPES, Module, Scan, aligned, describe, pointer
from .reference import STATE_DTYPES

THREADS = 128
WIDE = 16  # bytes of the states that a thread reads or writes at once
# What a thread's registers and a block's shared memory hold.
MAX_STATES = {torch.float32: 128, torch.bfloat16: 128, torch.float16: 128, torch.float64: 64}


def module_for(dtype: torch.dtype, states: int) -> Module:
    return Module("longhorn_cuda", (("HFR_TYPE", TYPES[dtype]), ("HFR_STATES", str(states))))


def _division(states: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """As in csrc/longhorn_cuda.cu: threads to a channel, states and channels to a thread, and positions from one
    checkpoint to the next."""
    lanes = 8 if states <= 64 else 16
    per = next(n for n in (1, 2, 4, 8) if n * lanes >= states)
    size = STATE_DTYPES[dtype].itemsize
    return lanes, per, 2 if per * size <= 16 else 1, 8 if per <= 4 and size == 4 else 4


def _along(x: Tensor, reverse: bool) -> list[int]:
    """A tensor's address and strides in the order in which the state passes its positions."""
    address, batch, length, channels = describe(x)
    if reverse:
        address, length = address + (x.shape[1] - 1) * length * x.element_size(), -length
    return [address, batch, length, channels]


def _scan(x: Tensor, dt: Tensor, k: Tensor, q: Tensor, flags: Tensor | None, reverse: bool) -> Scan:
    channels, states = x.shape[2], k.shape[2]
    lanes, _, columns, _ = _division(states, x.dtype)
    blocks = -(-channels * lanes // (THREADS * columns))
    inputs = [part for tensor in (x, dt, k, q) for part in _along(tensor, reverse)]
    module, state_dtype = module_for(x.dtype, states), STATE_DTYPES[x.dtype]
    return Scan(module, THREADS, blocks, x.shape, (channels, states), state_dtype, x.device, flags, reverse, inputs)


def _readable(state: Tensor | None) -> Tensor | None:
    return None if state is None else aligned(state.contiguous(), WIDE)


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
    state; one that starts at no multiple of WIDE bytes is left as it is."""
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if final is None or final.data_ptr() % WIDE:
        final = torch.empty(x.shape[0], x.shape[2], k.shape[2], dtype=STATE_DTYPES[x.dtype], device=x.device)
    if not (o.numel() and final.numel()):
        return o.zero_(), final.zero_() if initial_state is None else final.copy_(initial_state)
    initial = _readable(initial_state)
    x, dt, k, q = (aligned(t) for t in (x, dt, k, q))  # held until the kernels are launched
    scan = _scan(x, dt, k, q, flags, reverse)
    scan.run_forward("longhorn_forward", initial, final, pointer(o), pointer(None))
    return o, final


def backward(
    x, dt, k, q, initial_state: Tensor | None, flags: Tensor | None, grad_o: Tensor, grad_final: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, k, q and the initial state."""
    grad_x, grad_dt = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in "xd")
    if not (x.numel() and k.numel()):
        zeros = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (k, q)]
        return grad_x.zero_(), grad_dt.zero_(), *zeros, grad_final.clone(memory_format=torch.contiguous_format)
    initial, grad_final = _readable(initial_state), _readable(grad_final)
    x, dt, k, q, grad_o = (aligned(t) for t in (x, dt, k, q, grad_o))
    scan = _scan(x, dt, k, q, flags, reverse)
    (batch, length, _), states = x.shape, k.shape[2]
    _, per, columns, steps = _division(states, x.dtype)
    checkpoints = grad_final.new_empty(batch, -(-length // steps), scan.grid[0], THREADS, columns * per)
    scan.run_forward("longhorn_forward", initial, None, pointer(None), pointer(checkpoints))
    # Each block sums over its own channels; the blocks are summed below, in the same order at every run.
    grad_k, grad_q = grad_final.new_empty(2, batch, scan.grid[0], length, states)
    grad_initial = torch.empty_like(grad_final)
    if scan.in_two_passes:
        scan.run("longhorn_backward_segments", *_along(grad_o, reverse))
    scan.run(
        "longhorn_backward",
        *_along(grad_o, reverse),
        *(pointer(t) for t in (checkpoints, grad_final, grad_initial, grad_x, grad_dt, grad_k, grad_q)),
    )
    return grad_x, grad_dt, grad_k.sum(1).to(k.dtype), grad_q.sum(1).to(q.dtype), grad_initial
