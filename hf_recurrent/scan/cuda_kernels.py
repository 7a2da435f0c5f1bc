"""CUDA kernels: csrc/*.cu compiled by NVRTC at first use (no nvcc, no toolkit), cached, launched through cuda-core."""

import contextlib
import functools
import io
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import kernel_cache
from .kernel_cache import BackendUnavailable, cached_file, source_identity

TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "BFloat16",
    torch.float16: "Float16",
    torch.complex64: "Complex<float>",
    torch.complex128: "Complex<double>",
}
MAX_GRID_Y = 65535
WIDEST = 16  # bytes that a thread can read or write at once
OPTIONS = {
    "std": "c++17",
    "prec_div": False,  # a division within 2 ulp, in a sixth of the instructions
    "ptxas_options": ["-v"],
}
WITHOUT = "HF_RECURRENT_KERNELS=cpu in the environment does without the CUDA kernels"
TILE = 128  # segments are multiples of so many positions
# Segments that are passed from block to block: each costs a block the time of a tile or two.
_LEAST_LINK, _MOST_LINKS, _ENOUGH = 512, 16, 0.93


@dataclass(frozen=True)
class Module:
    """One source file compiled for one set of macros: `stem`.cu with (name, value) pairs."""

    stem: str
    macros: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        macros = ", ".join(f"{name.removeprefix('HFR_')}={value}" for name, value in self.macros)
        return f"{self.stem} ({macros})"


# ---- building -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    cubin: bytes
    report: str  # what the assembler says of registers, spills and local memory
    seconds: float


def compile_module(module: Module, architecture: str) -> Compiled:
    """Compiles for an architecture like "sm_90"; needs NVRTC, but no GPU.

    Raises:
        BackendUnavailable: the packages of the `cuda` extra are missing, or NVRTC refuses.
    """
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise BackendUnavailable(f"{error}; pip install 'hf-recurrent[cuda]' brings NVRTC") from error
    code = (kernel_cache.SOURCES / f"{module.stem}.cu").read_text()
    report, start = io.StringIO(), time.perf_counter()
    try:
        options = {**OPTIONS, "arch": architecture, "define_macro": list(module.macros)}
        program = Program(code, "c++", ProgramOptions(include_path=str(kernel_cache.SOURCES), **options))
        cubin = bytes(program.compile("cubin", logs=report).code)
    except Exception as error:  # cuda-core's own classes: what the compiler said, a library that is missing
        raise BackendUnavailable(
            f"NVRTC could not compile the kernels {module} for {architecture}: {_one_line(error)}; {WITHOUT}"
        ) from error
    return Compiled(cubin, report.getvalue(), time.perf_counter() - start)


def too_new_for_the_driver() -> str:
    """What to install where NVRTC is of a later CUDA than the driver knows, which may not load its kernels; else ''."""
    from cuda.bindings import driver, nvrtc

    _, *compiler = nvrtc.nvrtcVersion()
    _, known = driver.cuDriverGetVersion()  # 12080
    major = known // 1000
    if compiler[0] <= major:
        return ""
    if major < 12:
        return f" (the driver knows CUDA {major}.{known % 1000 // 10}: one of CUDA 12 or later is needed)"
    package = f"nvidia-cuda-nvrtc-cu{major}" if major < 13 else f"'nvidia-cuda-nvrtc<{major + 1}'"
    return (
        f" (NVRTC is of CUDA {compiler[0]}.{compiler[1]}, the driver knows {major}.{known % 1000 // 10}: "
        f"pip install 'cuda-bindings<{major + 1}' {package})"
    )


def _one_line(error: Exception) -> str:
    """The first line that says what is wrong: NVRTC's log follows a line that only says that there is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wrong = [line for line in lines if "error" in line and not line.endswith("log:")]
    return (wrong or lines or [type(error).__name__])[0]


def _in_cache(module: Module, architecture: str) -> tuple[str, str, list[str]]:
    """What the cache knows a cubin by."""
    identity = [_versions(), repr(OPTIONS), architecture, repr(module), *source_identity(".h", ".cu")]
    return f"{module.stem}-{architecture}", ".cubin", identity


def is_compiled(module: Module, architecture: str) -> bool:
    return kernel_cache.is_cached(*_in_cache(module, architecture))


def cubin(module: Module, architecture: str) -> bytes:
    """As `compile_module` gives it, from the cache where it is there."""

    def make(path) -> None:
        path.write_bytes(compile_module(module, architecture).cubin)

    return cached_file(*_in_cache(module, architecture), make).read_bytes()


def _versions() -> str:
    from ..versions import version_of

    packages = ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
    return ", ".join(f"{package} {version_of(package)}" for package in packages)  # None: NVRTC may come with a toolkit


@functools.cache
def _load(module: Module, device_index: int):
    from cuda.core import Device, ObjectCode

    return ObjectCode.from_cubin(cubin(module, f"sm_{Device(device_index).arch}"))


@functools.cache
def _kernel(module: Module, entry: str, device_index: int):
    with _loading_allowed():
        return _load(module, device_index).get_kernel(entry)


@contextlib.contextmanager
def _loading_allowed():
    """A CUDA graph that is being captured refuses whatever may allocate memory on this thread, loading a kernel among
    it, unless it is told that this is not part of the graph; PyTorch's allocator does the same."""
    if not torch.cuda.is_current_stream_capturing():
        yield
        return
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


# ---- calling --------------------------------------------------------------------------------------------------------


_thread = threading.local()


def _enter_context(device_index: int) -> None:
    """Gives this thread the device's context, once. PyTorch leaves that to its own first kernel on a thread, which may
    come after ours (as on the thread that runs backward), and without a context the driver launches nothing."""
    if not getattr(_thread, "has_context", False):
        from cuda.core import Device

        Device(device_index).set_current()
        _thread.has_context = True


@functools.lru_cache(maxsize=128)
def _stream(handle: int):
    """The stream with this handle, as cuda-core takes it: PyTorch's own it would take too, with a warning at each
    launch. Kept, since it takes as long to make as a launch; it refers to nothing but the handle."""
    from cuda.core import Stream

    return Stream.from_handle(handle)


def launch(
    module: Module, entry: str, device: torch.device, grid: tuple[int, int], threads: int, arguments: Sequence[int]
) -> None:
    """Runs a kernel on PyTorch's current stream of the device. Arguments are 64-bit integers, pointers among them."""
    from cuda.core import LaunchConfig
    from cuda.core import launch as launch_kernel

    with torch.cuda.device(device):
        _enter_context(device.index)
        kernel = _kernel(module, entry, device.index)
        stream = _stream(torch.cuda.current_stream().cuda_stream)
        launch_kernel(stream, LaunchConfig(grid=grid, block=threads), kernel, *arguments)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def segments_of(length: int, blocks: int, device: torch.device) -> tuple[int, int]:
    """The segments of time, and positions in each: more than one where `blocks` would leave more than half of the
    multiprocessors without work (csrc/device.h says why half), and then two blocks for each."""
    size = _size(length, segments_wanted(length, blocks, multiprocessors(device)))
    return -(-length // size), size


def segments_wanted(length: int, blocks: int, multiprocessors: int) -> int:
    """About as many as there are."""
    return max(1, min(2 * multiprocessors // blocks, length // (4 * TILE))) if 2 * blocks < multiprocessors else 1


def _size(length: int, segments: int) -> int:
    """Positions of each of so many segments, whole tiles."""
    return -(-length // (segments * TILE)) * TILE


def share(blocks: int, at_once: int) -> float:
    """Of the time in which the GPU could do `at_once` equal blocks' work side by side, what `blocks` of them use."""
    return blocks / (-(-blocks // at_once) * at_once)


def links_of(length: int, blocks: int, at_once: int) -> int:
    """Segments of time that are taken one after the other by whichever block has time, so that none of `at_once` blocks
    is without work for long: 1 where none is anyway, or where there are too few for all to begin at once."""
    best = 1
    if blocks < at_once:
        return best
    for links in range(2, min(_MOST_LINKS, length // _LEAST_LINK) + 1):
        if share(blocks * best, at_once) > _ENOUGH:
            break
        if share(blocks * links, at_once) > share(blocks * best, at_once):
            best = links
    return -(-length // _size(length, best))


def aligned(x: Tensor, size: int = 1) -> Tensor:
    """x, or a copy where it does not start at a multiple of `size` bytes and of its elements' size (memory that came
    from elsewhere)."""
    return x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % max(size, x.element_size()) else x


def width_for(widest: int, tensors: Sequence[Tensor]) -> int:
    """`widest` where all of these (B, L, D), whose channels lie side by side, allow accesses of that many, else 1."""
    if tensors[0].shape[2] % widest or any(s % widest for x in tensors for s in x.stride()[:2]):
        return 1
    return 1 if any(x.data_ptr() % WIDEST for x in tensors) else widest


def pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def describe(x: Tensor, shape: torch.Size | None = None) -> list[int]:
    """A tensor's address and strides in elements, as if expanded to `shape`."""
    return [x.data_ptr(), *(x.stride() if shape is None else x.expand(shape).stride())]


class Scan:
    """
    One scan on a GPU: its division of the work, and the arguments that all of its kernels begin with.

    Args:
        threads: of a block.
        blocks: side by side, for all channels of a row of the batch.
        shape: batch, length, channels.
        state, state_dtype: the shape of one row's state, and what it is carried in.
        inputs: as `describe` gives them, one after the other.
        at_once: the blocks that the GPU runs at once, where the kernels can pass a state from block to block; else 0.
        tile: positions of a tile, where the kernels are those that read rows too few to fill the GPU once; else 0.
    """

    def __init__(
        self,
        module: Module,
        threads: int,
        blocks: int,
        shape: Sequence[int],
        state: Sequence[int],
        state_dtype: torch.dtype,
        device: torch.device,
        flags: Tensor | None,
        reverse: bool,
        inputs: Sequence[int],
        at_once: int = 0,
        tile: int = 0,
    ):
        batch, length, _ = shape
        self.module, self.threads, self.blocks, self.device = module, threads, blocks, device
        self.segments, size = segments_of(length, blocks * batch, device)
        self.grid = blocks, min(batch * self.segments, MAX_GRID_Y)
        self.chain, self.once = None, tile > 0
        if self.once:
            self.segments, size = -(-length // tile), tile
            self.grid = blocks, batch * min(at_once // (batch * blocks), self.segments)
            self.chain = torch.zeros(batch * blocks * (1 + self.segments), dtype=torch.int32, device=device)
        elif at_once and (links := links_of(length, blocks * batch, at_once)) > 1:
            self.segments, size = links, _size(length, links)
            self.grid = at_once, 1
            self.chain = torch.zeros(1 + blocks * batch, dtype=torch.int32, device=device)
        self.in_two_passes = self.segments > 1 and self.chain is None
        # What each segment makes of a state or, in backward, of its gradient. Held until the kernels are launched; the
        # memory is then reused in the order of the stream.
        if self.once:  # 16 bytes for 8 of a product and a sum, the others say whether they are there; and what leaves
            rows = self.segments, batch, *state
            packets = torch.zeros(*rows, 2 * state_dtype.itemsize // 8, 2, dtype=torch.int64, device=device)
            self.summaries = packets, torch.empty(rows, dtype=state_dtype, device=device), None
        else:
            rows = self.segments if self.in_two_passes else 0, batch
            products, sums = torch.empty(2, *rows, *state, dtype=state_dtype, device=device)
            self.summaries = products, sums, torch.empty(rows, dtype=torch.uint8, device=device)
        summaries = map(pointer, self.summaries)
        self.shared = [*shape, int(reverse), pointer(flags), self.segments, size, *summaries, *inputs]

    def run(self, entry: str, *arguments: int) -> None:
        launch(self.module, entry, self.device, self.grid, self.threads, [*self.shared, *arguments])

    def run_forward(self, entry: str, initial: Tensor | None, final: Tensor | None, *arguments: int) -> None:
        """`entry`, which takes `arguments`, the initial and the final state; before it, its summaries of segments."""
        if self.in_two_passes:
            self.run(f"{entry}_segments")
        if self.in_two_passes or self.once:
            if initial is not None and final is not None and initial.data_ptr() == final.data_ptr():
                initial = initial.clone()  # which blocks that are still to come must read
        self.run(entry, *arguments, pointer(initial), pointer(final))
