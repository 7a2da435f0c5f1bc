"""The CUDA backend of the scans: what csrc/scan_cuda.cu is called with."""

import functools

import torch
from torch import Tensor

from .buffers import new_grads, summed_to_inputs
from .cuda_kernels import MAX_GRID_Y, TYPES, Module, aligned, describe, launch, pointer, segments_of
from .kernel_cache import BackendUnavailable
from .reference import STATE_DTYPES

CELLS = {
    "linear": "LinearCell<State>",
    "mingru_vanilla": "MinGRUCell<State, false>",
    "mingru_positive": "MinGRUCell<State, true>",
    "minlstm_vanilla": "MinLSTMCell<State, false>",
    "minlstm_positive": "MinLSTMCell<State, true>",
}
# Channels to a thread where its accesses are wide, by the bytes of an element. csrc/scan_cuda.cu says why.
WIDTHS = {2: 4, 4: 4, 8: 2, 16: 1}
MAX_INPUTS = 3
THREADS = 256


def module_for(cell: str, dtype: torch.dtype, width: int) -> Module:
    """The kernels of one cell and dtype; `width` is 1 or WIDTHS' own."""
    storage = TYPES[dtype]
    name = CELLS[cell].replace("State", f"StateOf<{storage}>::type")
    return Module("scan_cuda", (("HFR_CELL", name), ("HFR_TYPE", storage), ("HFR_WIDTH", str(width))))


@functools.cache
def unavailable_reason() -> str | None:
    """None where the kernels run, else one line that says why not. The first call runs them once, forward and backward,
    and compares: a wrong driver or compiler must cost speed, never a wrong number."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    try:
        a, b = torch.linspace(0.1, 0.9, 12, device="cuda").view(1, 4, 3), torch.ones(1, 4, 3, device="cuda")
        h, final = forward("linear", [a, b], None, None, False)
        want = b[:, 0]
        for t in range(1, 4):
            want = a[:, t] * want + b[:, t]
        (_, grad_b), _ = backward("linear", [a, b], h, None, None, b, torch.zeros_like(final), False)
        torch.testing.assert_close(final, want)
        torch.testing.assert_close(grad_b[:, 2], 1 + a[:, 3])
    except BackendUnavailable as error:
        return str(error)
    except Exception as error:  # whatever the driver or cuda-core raise: the reason is passed on, not swallowed
        return f"the CUDA kernels failed their first run: {type(error).__name__}: {error}".splitlines()[0]
    return None


def width_for(shape: torch.Size, tensors: list[Tensor]) -> int:
    """WIDTHS' own where each tensor, as if expanded to `shape`, allows accesses of that many channels; else 1."""
    width = WIDTHS[tensors[0].element_size()]
    if shape[2] % width:
        return 1
    for x in tensors:
        *strides, channel_stride = x.expand(shape).stride()
        apart = any(size > 1 and stride % width for size, stride in zip(shape, strides, strict=False))
        if channel_stride != 1 or apart or x.data_ptr() % (width * x.element_size()):
            return 1
    return width


class _Call:
    """One scan: its module, its division of the work, and the arguments that its kernels share."""

    def __init__(self, cell, inputs, tensors, flags, reverse):
        self.shape, self.dtype, self.device = inputs[-1].shape, inputs[-1].dtype, inputs[-1].device
        batch, length, channels = self.shape
        width = width_for(self.shape, [*inputs, *tensors])
        self.module = module_for(cell, self.dtype, width)
        across = -(-channels // (width * (8 if width > 1 else 32)))
        self.segments, size = segments_of(length, across * batch, self.device)
        self.grid = across, min(batch * self.segments, MAX_GRID_Y)
        self.reverse = reverse
        state = {"dtype": STATE_DTYPES[self.dtype], "device": self.device}
        # Held until the kernels are launched; their memory is then reused in the order of the stream.
        self.summaries = torch.empty(2, self.segments - 1, batch, channels, **state)
        self.cuts = torch.empty(self.segments - 1, batch, dtype=torch.uint8, device=self.device)
        self.shared = [
            *self.shape,
            int(reverse),
            pointer(flags),
            self.segments,
            size,
            *(pointer(x) for x in (*self.summaries, self.cuts)),
            *(part for x in inputs for part in describe(x, self.shape)),
            *[0] * 4 * (MAX_INPUTS - len(inputs)),
        ]

    def run(self, entry: str, *arguments: int) -> None:
        launch(self.module, entry, self.device, self.grid, THREADS, [*self.shared, *arguments])


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
    batch, _, channels = inputs[-1].shape
    if final is None:
        final = torch.empty(batch, channels, dtype=STATE_DTYPES[inputs[-1].dtype], device=inputs[-1].device)
    initial = None if initial_state is None else aligned(initial_state.contiguous())
    h = torch.empty(inputs[-1].shape, dtype=inputs[-1].dtype, device=inputs[-1].device)
    if h.numel():
        _forward(cell, [aligned(x) for x in inputs], initial, final, flags, reverse, h)
    elif initial is None:
        final.zero_()
    else:
        final.copy_(initial)
    return h, final


def _forward(cell, inputs, initial, final, flags, reverse, h) -> None:
    call = _Call(cell, inputs, [h], flags, reverse)
    if h.shape[1] == 1:  # a single position: no tiles, each thread a channel
        call.grid = -(-h.numel() // THREADS), 1
        call.run("scan_step", pointer(h), pointer(initial), pointer(final))
        return
    if call.segments > 1:
        call.run("scan_forward_segments")
        if initial is not None and initial.data_ptr() == final.data_ptr():
            initial = initial.clone()  # which blocks that are still to come must read
    call.run("scan_forward", pointer(h), pointer(initial), pointer(final))


def backward(
    cell: str,
    inputs: list[Tensor],
    h: Tensor,
    initial_state: Tensor | None,
    flags: Tensor | None,
    grad_h: Tensor,
    grad_final: Tensor,
    reverse: bool,
) -> tuple[list[Tensor], Tensor]:
    """Gradients of the inputs (each of its own shape) and of the initial state."""
    grads, sum_first = new_grads(inputs, h)
    if not h.numel():
        return summed_to_inputs(grads, inputs), grad_final.clone(memory_format=torch.contiguous_format)
    inputs, grad_h = [aligned(x) for x in inputs], aligned(grad_h)
    initial, grad_final = (None if x is None else aligned(x.contiguous()) for x in (initial_state, grad_final))
    call = _Call(cell, inputs, [h, grad_h], flags, reverse)
    if call.segments > 1:
        call.run("scan_backward_segments", *describe(grad_h))
    if sum_first:
        grads[0] = grads[0].new_empty(h.shape[0], call.segments, h.shape[2])
    grad_initial = torch.empty_like(grad_final)
    call.run(
        "scan_backward",
        *describe(grad_h),
        pointer(h),
        pointer(initial),
        pointer(grad_final),
        pointer(grad_initial),
        pointer(grads[0]) if sum_first else 0,
        0 if sum_first else pointer(grads[0]),
        *(pointer(g) for g in grads[1:]),
        *[0] * (MAX_INPUTS - len(grads)),
    )
    return summed_to_inputs(grads, inputs), grad_initial
