"""The CPU backend: csrc/ compiled with the system's C++ compiler at first use, cached, called by ctypes."""

import contextlib
import ctypes
import functools
import os
import platform
import shlex
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from . import kernel_cache
from .buffers import new_grads, summed_to_inputs
from .cells import BY_NAME
from .kernel_cache import BackendUnavailable, cached_file, source_identity, turned_off

TORCH = Path(torch.__file__).parent
CELLS = {"linear": 0, "mingru_vanilla": 1, "mingru_positive": 2, "minlstm_vanilla": 3, "minlstm_positive": 4}
MAX_INPUTS = 5
# What the C++ sources call each dtype. A library holds the kernels of one: compiling them all would take most of ten
# seconds at first use, one takes two or less.
STORAGES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "BFloat16",
    torch.float16: "Float16",
    torch.complex64: "Complex<float>",
    torch.complex128: "Complex<double>",
}
REAL = frozenset(dtype for dtype in STORAGES if not dtype.is_complex)
COMPILE_SECONDS = 300
ELEMENTS_PER_THREAD = 16384  # below this a second thread costs more than it brings


# A kernel's arguments are one struct of 64-bit integers, addresses among them, that Python packs in one go: a decoded
# token calls several kernels per layer, each of them shorter than ctypes takes to fill a Structure field by field.
Problem = struct.Struct

# batch, length, channels, reverse, threads, sum_first, flags; inputs, h, y; initial, state; grad_inputs; times, their
# strides, grad_times
_PROBLEM = Problem(f"{7 + 4 * (MAX_INPUTS + 2) + 2 + MAX_INPUTS + 4}q")
NOTHING = (0, 0, 0, 0)  # a tensor that is not there, as `describe` would have it
NO_GRADS = (0,) * MAX_INPUTS


# ---- building -------------------------------------------------------------------------------------------------------


def _compiler() -> list[str]:
    """The command in $CXX, or the first C++ compiler on the path."""
    if command := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(command[0]) is None:
            raise BackendUnavailable(f"the C++ compiler of $CXX, {command[0]!r}, is not on the path")
        return command
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BackendUnavailable("no C++ compiler on the path (c++, g++ or clang++; or set $CXX)")


def _flag_sets() -> list[list[str]]:
    """Flags to try in turn: everything, then without OpenMP threads, then without this CPU's own instructions."""
    base = ["-std=c++17", "-O3", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]
    native = ["-march=native"]
    if platform.machine().lower() in ("x86_64", "amd64"):
        native += ["-mprefer-vector-width=512"]  # compilers hold AVX-512 back to 256 bits, for older cores' clocks
    # PyTorch brings its own OpenMP runtime. Linking to that one keeps a single pool of threads in the process: two of
    # them would wait for each other's cores. Named before the compiler's own, it is the only one needed.
    runtimes = [str(path) for folder in ("lib", "../torch.libs") for path in TORCH.glob(f"{folder}/libgomp*.so*")]
    openmp = ["-fopenmp", "-Wl,--as-needed", *runtimes[:1]]
    return [base + native + openmp, base + native + ["-fopenmp-simd"], base + ["-fopenmp-simd"]]


def _cpu_features() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                return line
    return platform.processor()


def _build(stem: str = "scan_cpu", dtype: torch.dtype = torch.float32, cell: str | None = None) -> Path:
    """The path of the library compiled from csrc/`stem`.cpp for `dtype`, and for a cell of csrc/cells.h where it is for
    one alone; compiles it where the cache lacks it."""
    if reason := turned_off("cpu"):
        raise BackendUnavailable(reason)
    compiler = _compiler()
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=COMPILE_SECONDS)
    macros = [f"-DHFR_STORAGE={STORAGES[dtype]}", *([] if cell is None else [f"-DHFR_CELL={cell}"])]
    source = kernel_cache.SOURCES / f"{stem}.cpp"
    identity = [platform.machine(), _cpu_features(), *compiler, version.stdout, *source_identity(".h", ".cpp"), stem]
    message = ""
    for flags in _flag_sets():

        def compile_to(path: Path, flags: list[str] = flags) -> None:
            command = [*compiler, *macros, "-o", str(path), str(source), *flags]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)

        try:
            return cached_file(stem, ".so", [*identity, *macros, *flags], compile_to)
        except subprocess.CalledProcessError as error:
            message = next((s for s in error.stderr.splitlines() if "error" in s), error.stderr.strip())
        except (OSError, subprocess.TimeoutExpired) as error:
            message = str(error)
    raise BackendUnavailable(f"{shlex.join(compiler)} could not compile the kernels: {message}")


@functools.cache
def _load(
    stem: str, entry: str, dtype: torch.dtype, problem: Problem, cell: str | None = None
) -> Callable[..., int] | BackendUnavailable:
    """The C function `entry` of csrc/`stem`.cpp for `dtype`, its last argument a pointer to a struct laid out as
    `problem`; or why there is none."""
    try:
        path = _build(stem, dtype, cell)
    except BackendUnavailable as error:
        return error
    except (OSError, subprocess.SubprocessError) as error:
        return BackendUnavailable(f"the kernels could not be compiled: {error}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        path.unlink(missing_ok=True)  # so that a repaired compiler gets another chance
        return BackendUnavailable(f"the compiled kernels could not be loaded: {error}")
    library.hfr_problem_size.restype = ctypes.c_int64
    if library.hfr_problem_size() != problem.size:
        return BackendUnavailable("the compiled kernels have another layout than this Python code")
    return getattr(library, entry)


def unavailable_reason() -> str | None:
    """None where the kernels are ready (compiling them if need be), else one line that says why they are not."""
    loaded = _load("scan_cpu", "hfr_scan", torch.float32, _PROBLEM)
    return str(loaded) if isinstance(loaded, BackendUnavailable) else None


def kernel(stem: str, entry: str, dtype: torch.dtype, problem: Problem) -> Callable[..., int] | None:
    """The C function `entry` for `dtype`; None where the library cannot be built or loaded."""
    function = _load(stem, entry, dtype, problem)
    return None if isinstance(function, BackendUnavailable) else function


def call(
    stem: str,
    entry: str,
    dtype: torch.dtype,
    problem: Problem,
    fields: tuple[int, ...],
    *arguments: int,
    cell: str | None = None,
) -> None:
    """Calls `entry` for `dtype` with integers and the `fields` of the problem; of a library that is for one cell alone,
    that one's.

    Raises:
        BackendUnavailable: the library cannot be built or loaded.
        NotImplementedError: it has no kernel for these arguments.
    """
    function = _load(stem, entry, dtype, problem, cell)
    if isinstance(function, BackendUnavailable):
        raise function
    if function(*arguments, problem.pack(*fields)):
        raise NotImplementedError(f"{entry} has no kernel for {arguments} and {dtype}")


# ---- calling ---------------------------------------------------------------------------------------------------------


def describe(x: Tensor, shape: torch.Size | None = None) -> tuple[int, int, int, int]:
    """The kernels' view of a (batch, length, channels) tensor, as if expanded to `shape`: an address, and strides in
    elements."""
    if shape is not None and x.shape != shape:
        x = x.expand(shape)
    return x.data_ptr(), *x.stride()


def describe_if(x: Tensor | None) -> tuple[int, int, int, int]:
    return NOTHING if x is None else describe(x)


def rows(x: Tensor) -> Tensor:
    """x with its channels side by side, as csrc/rows.h has them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


@functools.lru_cache
def bits_of(number: float) -> int:
    """A double as the integer in its place in a problem."""
    return struct.unpack("q", struct.pack("d", number))[0]


def threads_for(elements: int) -> int:
    if elements < 2 * ELEMENTS_PER_THREAD:
        return 1
    return min(torch.get_num_threads(), elements // ELEMENTS_PER_THREAD)


def _run(
    cell: str,
    backwards: bool,
    inputs: list[Tensor],
    shape: torch.Size,
    h: Tensor | None,
    state: Tensor,
    flags: Tensor | None,
    reverse: bool,
    sum_first: bool = False,
    y: tuple[int, ...] = NOTHING,
    initial: Tensor | None = None,
    grads: tuple[int, ...] = NO_GRADS,
    grad_times: Tensor | None = None,
) -> None:
    inputs, times = BY_NAME[cell].parted(inputs)
    described = [number for x in inputs for number in describe(x, shape)]
    described += NOTHING * (MAX_INPUTS - len(inputs))
    # Contiguous, and counted in pairs where the two parts of complex numbers are a last dimension.
    states = NOTHING if h is None else (h.data_ptr(), shape[1] * shape[2], shape[2], 1)
    fields = (
        *shape, reverse, threads_for(shape.numel()), sum_first, pointer(flags), *described, *states, *y,
        pointer(initial), state.data_ptr(), *grads,
        *((0, 0, 0) if times is None else (times.data_ptr(), *times.stride())), pointer(grad_times),
    )  # fmt: skip
    dtype = inputs[0].dtype
    if cell in CELLS:
        call("scan_cpu", "hfr_scan", dtype, _PROBLEM, fields, CELLS[cell], backwards)
    else:
        call("cell_scan_cpu", "hfr_cell_scan", dtype, _PROBLEM, fields, backwards, cell=BY_NAME[cell].kernel)


def forward(
    cell: str, inputs: list[Tensor], initial_state: Tensor | None, flags: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """h (B, L, D) and the final state (B, D). `inputs` broadcast to the last one's shape, all of one dtype."""
    h = torch.empty(inputs[-1].shape, dtype=inputs[-1].dtype)
    return h, run_forward(cell, inputs, h, None, initial_state, None, flags, reverse)


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
    if final is None:
        final = torch.empty(given.shape[0], given.shape[2], dtype=BY_NAME[cell].state_dtype(given.dtype))
    if initial_state is None:
        final.zero_()
    elif final.data_ptr() != initial_state.data_ptr():
        final.copy_(initial_state)
    if given.numel():
        _run(cell, False, inputs, given.shape, h, final, flags, reverse, y=describe_if(y))
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
    state = grad_final.clone(memory_format=torch.contiguous_format)
    grads, sum_first, grad_times = new_grads(BY_NAME[cell], inputs, grad_y)
    if grad_y.numel():
        initial = None if initial_state is None else initial_state.contiguous()
        _run(
            cell,
            True,
            inputs,
            grad_y.shape,
            h,
            state,
            flags,
            reverse,
            sum_first,
            describe(grad_y),
            initial,
            (*(grad.data_ptr() for grad in grads), *NO_GRADS)[:MAX_INPUTS],
            grad_times,
        )
    return summed_to_inputs(BY_NAME[cell], grads, grad_times, inputs), state
