"""The CUDA backend: csrc/ compiled by NVRTC at first use (no nvcc, no toolkit), cached, launched through cuda-core.

Each pair of a cell and a dtype is a module of two kernels, compiled for the device's own architecture.
"""

import functools

import torch
from torch import Tensor

from . import kernel_cache
from .buffers import new_grads, new_outputs, summed_to_inputs
from .kernel_cache import BackendUnavailable, cached_file, source_identity

CELLS = {
    "linear": "LinearCell<State>",
    "mingru_vanilla": "MinGRUCell<State, false>",
    "mingru_positive": "MinGRUCell<State, true>",
    "minlstm_vanilla": "MinLSTMCell<State, false>",
    "minlstm_positive": "MinLSTMCell<State, true>",
}
TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "BFloat16",
    torch.float16: "Float16",
    torch.complex64: "Complex<float>",
    torch.complex128: "Complex<double>",
}
MAX_INPUTS = 3
THREADS = 128
MAX_GRID_Y = 65535


# ---- building -------------------------------------------------------------------------------------------------------


def compile_kernels(cell: str, dtype: torch.dtype, architecture: str) -> bytes:
    """The cubin of one cell and dtype for an architecture like "sm_90"; needs NVRTC, but no GPU.

    Raises:
        BackendUnavailable: the packages of the `cuda` extra are missing, or NVRTC refuses.
    """
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise BackendUnavailable(f"{error}; pip install 'hf-recurrent[cuda]' brings NVRTC") from error
    storage = TYPES[dtype]
    name = CELLS[cell].replace("State", f"StateOf<{storage}>::type")
    code = (kernel_cache.SOURCES / "scan_cuda.cu").read_text()
    options = {"arch": architecture, "std": "c++17", "define_macro": [("HFR_CELL", name), ("HFR_TYPE", storage)]}

    def compile_to(path) -> None:
        try:
            program = Program(code, "c++", ProgramOptions(include_path=str(kernel_cache.SOURCES), **options))
            path.write_bytes(bytes(program.compile("cubin").code))
        except Exception as error:  # cuda-core's own classes, which say what the compiler said
            raise BackendUnavailable(f"NVRTC could not compile the kernels for {architecture}: {error}") from error

    identity = [_nvrtc_version(), repr(options), *source_identity(".h", ".cu")]
    return cached_file(f"scan_cuda-{architecture}", ".cubin", identity, compile_to).read_bytes()


def _nvrtc_version() -> str:
    from importlib.metadata import version

    return version("cuda-core") + " " + version("cuda-bindings")


@functools.cache
def _kernels(cell: str, dtype: torch.dtype, device_index: int):
    from cuda.core import Device, ObjectCode

    device = Device(device_index)
    device.set_current()
    module = ObjectCode.from_cubin(compile_kernels(cell, dtype, f"sm_{device.arch}"))
    return module.get_kernel("scan_forward"), module.get_kernel("scan_backward")


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


# ---- calling --------------------------------------------------------------------------------------------------------


class _CurrentStream:
    """PyTorch's current stream, by the protocol that cuda-core asks for."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream().cuda_stream


def _launch(kernel, h: Tensor, *arguments: int) -> None:
    from cuda.core import Device, LaunchConfig, launch

    batch, _, channels = h.shape
    Device(h.device.index).set_current()
    config = LaunchConfig(grid=(-(-channels // THREADS), min(batch, MAX_GRID_Y)), block=THREADS)
    launch(_CurrentStream(), config, kernel, *h.shape, *arguments)


def _shared_arguments(inputs: list[Tensor], shape: torch.Size, flags: Tensor | None, reverse: bool) -> list[int]:
    """The arguments that both kernels share, after the shape: integers of 64 bits, pointers among them."""
    described = [part for x in inputs for part in (x.data_ptr(), *x.expand(shape).stride())]
    absent = [0] * 4 * (MAX_INPUTS - len(inputs))
    return [int(reverse), 0 if flags is None else flags.data_ptr(), *described, *absent]


def forward(
    cell: str, inputs: list[Tensor], initial_state: Tensor | None, flags: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """h (B, L, D) and the final state (B, D). `inputs` broadcast to the last one's shape, all of one dtype."""
    h, state = new_outputs(inputs[-1], initial_state)
    if h.numel():
        with torch.cuda.device(h.device):
            kernel, _ = _kernels(cell, h.dtype, h.device.index)
            arguments = _shared_arguments(inputs, h.shape, flags, reverse)
            _launch(kernel, h, *arguments, h.data_ptr(), state.data_ptr())
    return h, state


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
    state = grad_final.clone(memory_format=torch.contiguous_format)
    grads, sum_first = new_grads(inputs, h)
    if h.numel():
        initial = None if initial_state is None else initial_state.contiguous()
        with torch.cuda.device(h.device):
            _, kernel = _kernels(cell, h.dtype, h.device.index)
            _launch(
                kernel,
                h,
                *_shared_arguments(inputs, h.shape, flags, reverse),
                h.data_ptr(),
                grad_h.data_ptr(),
                *grad_h.stride(),
                0 if initial is None else initial.data_ptr(),
                state.data_ptr(),
                grads[0].data_ptr() if sum_first else 0,
                0 if sum_first else grads[0].data_ptr(),
                *(g.data_ptr() for g in grads[1:]),
                *[0] * (MAX_INPUTS - len(grads)),
            )
    return summed_to_inputs(grads, inputs), state
