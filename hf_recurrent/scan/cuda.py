"""The CUDA backend of the scans: what csrc/scan_cuda.cu is called with."""

import contextlib
import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import cuda_kernels
from .buffers import new_grads, summed_to_inputs
from .cells import BY_NAME, Cell
from .cuda_kernels import TYPES, Module, Scan, aligned, describe, pointer
from .kernel_cache import BackendUnavailable, turned_off

# Channels to a thread where its accesses are wide, by the bytes of an element. csrc/scan_cuda.cu says why.
WIDTHS = {2: 4, 4: 4, 8: 2, 16: 1}
MAX_INPUTS = 5
THREADS = 256
ROWS = (32, 16, 8)  # threads of a block side by side where their accesses are wide, the first that is as good as any;
ROW_OF_SINGLES = 32  # and where they are single
_AS_GOOD = 0.95
WIDEST_STATES = 32  # bytes of the states that a thread reads or writes at once
# Whether rows too few to fill the GPU are read once, by blocks that take their tiles in turn, and not twice. That moves
# 3/5 of the bytes forward, 5/7 backward, but has not been measured yet: benchmarks/gpu.py times both.
READ_ONCE = False


@dataclass(frozen=True)
class Tuning:
    """Of a kernel of csrc/scan_cuda.cu: positions that a thread takes at once, and blocks of a multiprocessor, at
    least."""

    steps: int
    blocks: int


def _tunings(cell: Cell, dtype: torch.dtype, width: int) -> tuple[Tuning, Tuning]:
    """Forward and backward, as measured on an H200. What a thread loads of its next positions is in registers while it
    works on these, and has to keep memory busy meanwhile: one large block where there is little to compute, two where
    there is much, whose pauses the other fills."""
    size = cell.state_dtype(dtype).itemsize
    if width == 1 or dtype in (torch.float64, torch.complex128):
        blocks = 1 if dtype.itemsize >= 8 and cell.name != "linear" else 2
        ahead, back = (32, 16) if cell.name == "linear" else (24, 12)
        return Tuning(max(1, ahead // size), blocks), Tuning(max(1, back // size), blocks)
    halves = 2 if dtype.itemsize == 2 else 1  # as many bytes are twice the positions
    if cell.name == "linear":
        if dtype.is_complex:
            return Tuning(4, 2), Tuning(2, 2)
        return Tuning(8 * halves, 1), Tuning(4 * halves, 1)
    if cell.timed:
        return Tuning(4, 2), Tuning(3, 1)
    if cell.name == "mingru_vanilla":
        return Tuning(12 if halves == 2 else 8, 1), Tuning(4 * halves, 1)
    if cell.name == "mingru_positive":
        return Tuning(4, 2), Tuning(4, 1)
    if cell.has_complex_state:
        back = 2 * halves
        if cell.name == "gateloop_cartesian_exponential":  # registers end here,
            back = halves
        elif halves == 2 and ("tanh" in cell.name or "cartesian" in cell.name):  # and here
            back -= 1
        return Tuning(2 + halves, 1), Tuning(back, 1)
    if cell.name.startswith("gateloop"):
        return Tuning(4 * halves, 1), Tuning(2 * halves, 1)
    return Tuning(2 * halves, 2), Tuning(2 * halves, 1)


def _is_bound_by_memory(cell: Cell) -> bool:
    """So that seven tenths of the multiprocessors are as good as all of them."""
    return cell.name in ("linear", "mingru_vanilla")


@functools.cache
def module_for(cell: str, dtype: torch.dtype, width: int, row: int | None = None, once: bool = False) -> Module:
    """The kernels of one cell and dtype; `width` is 1 or WIDTHS' own, `row` the threads side by side in a block, `once`
    whether they are those for long rows that are read once."""
    storage, (ahead, back) = TYPES[dtype], _tunings(BY_NAME[cell], dtype, width)
    macros = {
        "CELL": BY_NAME[cell].kernel.replace("State", f"StateOf<{storage}>::type"), "TYPE": storage, "WIDTH": width,
        "THREADS": THREADS, "ROW": row or (ROWS[1] if width > 1 else ROW_OF_SINGLES), "STEPS": ahead.steps,
        "BLOCKS": ahead.blocks, "STEPS_BACK": back.steps, "BLOCKS_BACK": back.blocks, "ONCE": int(once),
    }  # fmt: skip
    return Module("scan_cuda", tuple((f"HFR_{name}", str(value)) for name, value in macros.items()))


def _first_run() -> None:
    """Raises AssertionError where a scan and its gradients are not what they should be, and whatever launches raise."""
    with _disable_current_modes():  # where the first call is traced: a tensor without memory would fail for good
        options = {"dtype": torch.float32, "device": "cuda"}  # whatever the default is: its state is compared too
        # Four channels: by the wide accesses that nearly all scans have.
        a, b = torch.linspace(0.1, 0.9, 16, **options).view(1, 4, 4), torch.ones(1, 4, 4, **options)
        h, final = forward("linear", [a, b], None, None, False)
        want = b[:, 0]
        for t in range(1, 4):
            want = a[:, t] * want + b[:, t]
        (grad_a, grad_b), _ = backward("linear", [a, b], h, None, None, b, torch.zeros_like(final), False)
        torch.testing.assert_close(final, want)
        torch.testing.assert_close(grad_a[:, 3], h[:, 2])
        torch.testing.assert_close(grad_b[:, 2], 1 + a[:, 3])


@functools.cache
def unavailable_reason() -> str | None:
    """None where the kernels run, else one line that says why not. The first call runs them once, forward and backward,
    and compares: a wrong driver or compiler must cost speed, never a wrong number.

    Raises:
        RuntimeError: the first call is made while a CUDA graph is captured, in which nothing can be compared.
        torch.OutOfMemoryError: there is no memory for it now, which says nothing of later.
    """
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    if reason := turned_off("cuda"):
        return reason
    if torch.cuda.is_current_stream_capturing():  # and would be told for good that the kernels do not run
        raise RuntimeError("the first scan on a GPU cannot be captured into a CUDA graph: call it once before")
    try:
        _first_run()
    except BackendUnavailable as error:
        return str(error)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the driver or cuda-core raise: the reason is passed on, not swallowed
        said = f"the CUDA kernels failed their first run: {type(error).__name__}: {error}".splitlines()[0]
        with contextlib.suppress(Exception):  # where CUDA's packages are what failed
            said += cuda_kernels.too_new_for_the_driver()
        return said
    return None


def width_for(shape: torch.Size, tensors: list[Tensor], rows: list[Tensor]) -> int:
    """WIDTHS' own where each tensor, as if expanded to `shape`, and each of `rows`, contiguous, allow accesses of that
    many channels; else 1."""
    width = WIDTHS[tensors[0].element_size()]
    if shape[2] % width or any(x.data_ptr() % WIDEST_STATES for x in rows):
        return 1
    for x in tensors:
        *strides, channel_stride = x.expand(shape).stride()
        apart = any(size > 1 and stride % width for size, stride in zip(shape, strides, strict=False))
        if channel_stride != 1 or apart or x.data_ptr() % (width * x.element_size()):
            return 1
    return width


@functools.lru_cache(maxsize=4096)
def row_for(cell: str, shape: torch.Size, width: int, at_once: int, multiprocessors: int) -> int:
    """Threads side by side in a block whose accesses are wide: the more, the fewer threads pass a state on one after
    the other; but the blocks are the fewer, and have to keep every multiprocessor busy."""
    batch, length, channels = shape
    if length == 1:  # a thread for each channel, and the same kernels for all
        return ROWS[1]
    enough = 0.7 if _is_bound_by_memory(BY_NAME[cell]) else 1

    def used(row: int) -> float:
        """Of the GPU's time and of the threads, and half of that where the inputs are read twice."""
        columns = -(-channels // (width * row))
        blocks = batch * columns
        segments = cuda_kernels.segments_wanted(length, blocks, multiprocessors)
        links = cuda_kernels.links_of(length, blocks, at_once)
        share = min(cuda_kernels.share(blocks * max(segments, links), at_once), enough)
        return share * channels / (columns * width * row) / (2 if segments > 1 else 1)

    best = max(map(used, ROWS))
    return next(row for row in ROWS if used(row) >= _AS_GOOD * best)


def division(
    cell: str, shape: torch.Size, dtype: torch.dtype, width: int, backward: bool, device: torch.device
) -> tuple[Module, int, int, int]:
    """The kernels, the blocks of channels, the blocks that run at once, and the positions of a tile of kernels that
    read long rows once, or 0."""
    batch, length, channels = shape
    multiprocessors = cuda_kernels.multiprocessors(device)
    tuning = _tunings(BY_NAME[cell], dtype, width)[backward]
    at_once = multiprocessors * tuning.blocks
    row = row_for(cell, shape, width, at_once, multiprocessors) if width > 1 else ROW_OF_SINGLES
    blocks = -(-channels // (width * row))
    once = READ_ONCE and cuda_kernels.segments_wanted(length, batch * blocks, multiprocessors) > 1
    return module_for(cell, dtype, width, row, once), blocks, at_once, THREADS // row * tuning.steps if once else 0


def _in_flow(x: Tensor, against: bool, shape: torch.Size | None = None) -> list[int]:
    """As `describe` gives them, the address and strides of a (B, L, ...) from the first position of the flow on, which
    goes against the order in memory or with it."""
    address, batch_stride, stride, *others = described = describe(x, shape)
    if not against:
        return described
    last = (shape or x.shape)[1] - 1
    return [address + last * stride * x.element_size(), batch_stride, -stride, *others]


def _first(x: Tensor | None, against: bool) -> int:
    """The address of the first position of the flow, of a contiguous (B, L, ...)."""
    return 0 if x is None else _in_flow(x, against)[0]


def _scan(
    cell: str,
    shape: torch.Size,
    inputs: list[Tensor],
    others: list[Tensor],
    rows: list[Tensor | None],
    flags: Tensor | None,
    reverse: bool,
    backward: bool,
) -> Scan:
    """`others`, of any strides, and `rows`, contiguous: what else the kernels read or write at each position."""
    inputs, times = BY_NAME[cell].parted(inputs)
    dtype, channels = inputs[0].dtype, shape[2]
    width = width_for(shape, [*inputs, *others], [x for x in rows if x is not None])
    module, blocks, at_once, tile = division(cell, shape, dtype, width, backward, inputs[0].device)
    against = reverse != backward
    described = [part for x in inputs for part in _in_flow(x, against, shape)] + [0] * 4 * (MAX_INPUTS - len(inputs))
    described += [0] * 3 if times is None else _in_flow(times, against)
    described += [-1, -(channels // width)] if against else [1, channels // width]
    state_dtype = BY_NAME[cell].state_dtype(dtype)
    divided = module, THREADS, blocks, shape, (channels,), state_dtype, inputs[0].device, flags, reverse, described
    return Scan(*divided, at_once, tile)


def forward(
    cell: str,
    inputs: list[Tensor],
    initial_state: Tensor | None,
    flags: Tensor | None,
    reverse: bool,
    final: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h (B, L, D) and the final state (B, D). `inputs` broadcast to the last one's shape, all of one dtype. `final`
    may be given to be written into, and may be the initial state."""
    h = torch.empty(inputs[-1].shape, dtype=inputs[-1].dtype, device=inputs[-1].device)
    return h, run_forward(cell, inputs, h, None, initial_state, final, flags, reverse)


def run_forward(
    cell: str,
    inputs: list[Tensor],
    h: Tensor | None,
    y: Tensor | None,
    initial_state: Tensor | None,
    final: Tensor | None,
    flags: Tensor | None,
    reverse: bool,
) -> Tensor:
    """Writes h, or of a cell that reads its state y and, unless it is None, h, (B, L, D, 2) where the state is complex;
    and the final state, which is returned."""
    given = h if y is None else y
    batch, length, channels = given.shape
    initial = None if initial_state is None else aligned(initial_state.contiguous())
    if final is None:
        final = torch.empty(batch, channels, dtype=BY_NAME[cell].state_dtype(given.dtype), device=given.device)
    if not given.numel():
        return final.zero_() if initial is None else final.copy_(initial)
    inputs = [aligned(x) for x in inputs]  # held until the kernels are launched
    scan = _scan(cell, given.shape, inputs, [], [h, y], flags, reverse, False)
    if length == 1:  # no tiles, each thread a channel
        scan.grid = -(-given.numel() // THREADS), 1
        scan.run("scan_step", pointer(h), pointer(y), pointer(initial), pointer(final))
    else:
        written = _first(h, reverse), _first(y, reverse)
        scan.run_forward("scan_forward", initial, final, pointer(scan.chain), scan.blocks, *written)
    return final


def backward(
    cell: str,
    inputs: list[Tensor],
    h: Tensor,
    initial_state: Tensor | None,
    flags: Tensor | None,
    grad_y: Tensor,
    grad_final: Tensor,
    reverse: bool,
) -> tuple[list[Tensor], Tensor]:
    """Gradients of the inputs (each of its own shape) and of the initial state, from the h that forward has written and
    the gradient of what the cell gives, (B, L, D)."""
    grads, sum_first, grad_times = new_grads(BY_NAME[cell], inputs, grad_y)
    if not grad_y.numel():
        grad_initial = grad_final.clone(memory_format=torch.contiguous_format)
        return summed_to_inputs(BY_NAME[cell], grads, grad_times, inputs), grad_initial
    inputs, grad_y = [aligned(x) for x in inputs], aligned(grad_y)
    initial, grad_final = (None if x is None else aligned(x.contiguous()) for x in (initial_state, grad_final))
    scan = _scan(cell, grad_y.shape, inputs, [grad_y], [h], flags, reverse, True)
    against = not reverse
    grad_described = _in_flow(grad_y, against)
    if scan.in_two_passes:
        scan.run("scan_backward_segments", *grad_described)
    if sum_first:
        grads[0] = grads[0].new_empty(grad_y.shape[0], scan.segments, grad_y.shape[2])
    time_sums = None if grad_times is None else grad_times.new_empty(scan.blocks, *grad_times.shape)
    grad_initial = torch.empty_like(grad_final)
    scan.run(
        "scan_backward",
        pointer(scan.chain),
        scan.blocks,
        *grad_described,
        _first(h, against),
        pointer(initial),
        pointer(grad_final),
        pointer(grad_initial),
        pointer(grads[0]) if sum_first else 0,
        0 if sum_first else _first(grads[0], against),
        *(_first(g, against) for g in grads[1:]),
        *[0] * (MAX_INPUTS - len(grads)),
        pointer(time_sums),
    )
    grad_times = grad_times if time_sums is None else time_sums.sum(0)
    return summed_to_inputs(BY_NAME[cell], grads, grad_times, inputs), grad_initial
