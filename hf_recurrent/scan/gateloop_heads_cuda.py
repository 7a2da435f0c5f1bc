"""The CUDA backend of GateLoop's heads: what csrc/gateloop_heads_cuda.cu is called with."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from . import cuda_kernels
from .cuda_kernels import TYPES, Module, Scan, aligned, describe, pointer
from .reference import STATE_DTYPES

MAX_ROWS = 128  # a head's rows are in one block
_FEWEST, _MOST = 128, 256  # threads of a block
# Columns of a thread and positions of a tile, so that a tile's states fit into its registers beside all else.
_MOST_COLUMNS = {torch.float32: 4, torch.bfloat16: 4, torch.float16: 4, torch.float64: 2}
_STEPS = {torch.float32: 8, torch.bfloat16: 8, torch.float16: 8, torch.float64: 4}
_FEW_STATES = 256  # of a head that leaves a checkpoint at each tile: bound by memory, it gains nothing by walking again
_BLOCKS = 8  # for each multiprocessor, of those that walk again and so need memory of their own
_MOST_LANES = 16  # side by side for the columns: two rows to a warp


@dataclass(frozen=True)
class Division:
    """How the states of a head are dealt out to threads. csrc/gateloop_heads_cuda.cu says why."""

    row_lanes: int
    column_lanes: int  # to a row
    per: int  # columns of a thread
    steps: int  # positions of a tile
    tiles: int  # from one checkpoint to the next
    slices: int  # of a head's columns, each in a block of its own
    threads: int  # of a block
    full: bool  # every thread of a head has states

    @property
    def of_head(self) -> int:
        """Threads of a head, or of a slice of one."""
        return self.row_lanes * self.column_lanes


def _power_of_two(n: int) -> int:
    """The least that is not below n."""
    return 1 << (n - 1).bit_length()


@functools.cache
def division(dtype: torch.dtype, rows: int, columns: int) -> Division:
    row_lanes, wide = _power_of_two(rows), _power_of_two(columns)
    # At most half of the columns, or as many as half of the rows: what a block loads of a tile is in registers too.
    per = min(_MOST_COLUMNS[dtype], max(1, wide // 2), max(1, row_lanes // 2))
    column_lanes = min(wide // per, _MOST_LANES, _MOST // row_lanes)
    tiles = 1 if rows * columns <= _FEW_STATES else 8
    slices = -(-columns // (column_lanes * per))
    threads = max(_FEWEST, row_lanes * column_lanes)
    full = rows == row_lanes and columns == slices * column_lanes * per
    return Division(row_lanes, column_lanes, per, _STEPS[dtype], tiles, slices, threads, full)


def module_for(dtype: torch.dtype, state_dtype: torch.dtype, rows: int, columns: int, wide: bool = True) -> Module:
    """`wide`: states start at multiples of 16 bytes."""
    d = division(dtype, rows, columns)
    macros = {
        "TYPE": TYPES[dtype], "STATE": TYPES[state_dtype], "ROWS": rows, "ROW_LANES": d.row_lanes,
        "COLUMN_LANES": d.column_lanes, "PER": d.per, "STEPS": d.steps, "TILES": d.tiles, "THREADS": d.threads,
        "SLICED": int(d.slices > 1), "FULL": int(d.full), "WIDE": int(wide),
    }  # fmt: skip
    return Module("gateloop_heads_cuda", tuple((f"HFR_{name}", str(value)) for name, value in macros.items()))


def _scan(inputs, start: Tensor | None, states: list[Tensor | None], flags, reverse: bool) -> tuple[Scan, Division]:
    """`states`: those that the kernels read or write, besides `start`."""
    q, _, v, a = inputs
    (batch, length, heads, rows), columns = q.shape, v.shape[3]
    d = division(q.dtype, rows, columns)
    wide = all(x is None or x.data_ptr() % 16 == 0 for x in (start, *states))
    scan = Scan(
        module_for(q.dtype, a.dtype, rows, columns, wide),
        d.threads,
        -(-heads * d.of_head // d.threads) * d.slices,
        (batch, length, heads),
        (heads, rows, columns),
        a.dtype,
        q.device,
        flags,
        reverse,
        [columns, pointer(start), *(part for x in inputs for part in describe(x))],
    )
    return scan, d


def _readable(*states: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else aligned(x.contiguous()) for x in states]


def forward(
    q, k, v, a, initial_state: Tensor | None, start: Tensor | None, flags, reverse: bool, final: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y (B, L, heads, d_v) and the final state (B, heads, d_k, d_v). `final` may be given to be written into, and may
    be the initial state."""
    y = torch.empty_like(v, memory_format=torch.contiguous_format)
    if final is None:
        final = a.new_empty(q.shape[0], *q.shape[2:], v.shape[3])
    if not (y.numel() and final.numel()):
        return y.zero_(), final.zero_() if initial_state is None else final.copy_(initial_state)
    initial, start = _readable(initial_state, start)
    inputs = [aligned(x) for x in (q, k, v, a)]  # held until the kernels are launched
    scan, _ = _scan(inputs, start, [initial, final], flags, reverse)
    scan.run_forward("gateloop_heads_forward", initial, final, pointer(y), pointer(None))
    return y, final


def backward(
    q, k, v, a, initial_state: Tensor | None, start: Tensor | None, flags, grad_y: Tensor, grad_final: Tensor, reverse
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, a, the initial state and what documents start from (of no element where that is None)."""
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, a)]
    initial, start, grad_final = _readable(initial_state, start, grad_final)
    grad_initial = torch.empty_like(grad_final)
    if not (grad_final.numel() and q.shape[1]):
        grad_start = grad_final.new_zeros(0 if start is None else start.shape)
        return *(x.zero_() for x in grads), grad_initial.copy_(grad_final), grad_start
    inputs, grad_y = [aligned(x) for x in (q, k, v, a)], aligned(grad_y)
    scan, d = _scan(inputs, start, [initial, grad_final], flags, reverse)
    one_row = q.shape[2], d.slices, d.per, d.of_head  # of checkpoints
    checkpoints = a.new_empty(q.shape[0], -(-q.shape[1] // (d.steps * d.tiles)), *one_row)
    scan.run_forward("gateloop_heads_forward", initial, None, pointer(None), pointer(checkpoints))
    if scan.in_two_passes:
        scan.run("gateloop_heads_backward_segments", *describe(grad_y))
    # Each block sums over its own columns; the slices are summed below, in the same order at every run.
    grad_q, grad_k, grad_v, grad_a = grads
    if d.slices > 1:
        grad_q, grad_k = (x.new_empty(d.slices, *x.shape, dtype=STATE_DTYPES[x.dtype]) for x in (q, k))
        grad_a = a.new_empty(d.slices, *a.shape)
    # Each segment adds up the gradients at its own resets.
    grad_start = None if start is None else a.new_zeros(q.shape[0], scan.segments, *start.shape)
    scratch = None
    if d.tiles > 1:
        scan.grid = (
            scan.grid[0],
            min(scan.grid[1], -(-_BLOCKS * cuda_kernels.multiprocessors(q.device) // scan.grid[0])),
        )
        scratch = a.new_empty(scan.grid[1], d.tiles, *one_row)
    written = checkpoints, scratch, grad_final, grad_initial, grad_q, grad_k, grad_v, grad_a, grad_start
    scan.run("gateloop_heads_backward", *describe(grad_y), *(pointer(x) for x in written))
    if d.slices > 1:
        grad_q, grad_k, grad_a = grad_q.sum(0).to(q.dtype), grad_k.sum(0).to(k.dtype), grad_a.sum(0)
    grad_start = a.new_empty(0) if grad_start is None else grad_start.sum((0, 1))
    return grad_q, grad_k, grad_v, grad_a, grad_initial, grad_start
