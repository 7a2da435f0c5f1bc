"""The CUDA kernels without a GPU: compiled through the run-time path, and their bodies run on the host by a shim."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from oracle import CELLS, coefficients, compare, linear, mask_and_reset, mingru_positive, random

from hf_recurrent.scan import BackendUnavailable, backend_report, cpu, cuda, kernel_cache, linear_scan

SHIM = Path(__file__).parent
PAIRS = [
    (cell, dtype)
    for cell in cuda.CELLS
    for dtype in (torch.float32, torch.bfloat16, torch.complex64)
    if cell == "linear" or not dtype.is_complex
]


def test_every_cell_has_a_kernel_on_both_devices():
    assert cpu.CELLS.keys() == cuda.CELLS.keys()
    assert cpu.STORAGES.keys() == cuda.TYPES.keys()


@pytest.mark.parametrize("cell, dtype", PAIRS, ids=str)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_compiles_with_nvrtc(architecture, cell, dtype):
    pytest.importorskip("cuda.core", reason="needs the packages of the extra 'cuda'")
    cubin = cuda.compile_kernels(cell, dtype, architecture)
    assert cubin[:4] == b"\x7fELF"
    assert b"scan_forward" in cubin and b"scan_backward" in cubin


def test_unknown_architecture_is_said():
    pytest.importorskip("cuda.core", reason="needs the packages of the extra 'cuda'")
    with pytest.raises(BackendUnavailable, match="NVRTC could not compile the kernels for sm_12345"):
        cuda.compile_kernels("linear", torch.float32, "sm_12345")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu():
    assert backend_report()["cuda"] == "PyTorch sees no CUDA device"


@pytest.fixture(scope="module")
def host_library(tmp_path_factory):
    """Compiles scan_cuda.cu with the system's compiler, address and undefined-behaviour checks made errors."""
    folder = tmp_path_factory.mktemp("shim")

    def build(cell: str, dtype: torch.dtype) -> ctypes.CDLL:
        storage = cuda.TYPES[dtype]
        name = cuda.CELLS[cell].replace("State", f"StateOf<{storage}>::type")
        library = folder / f"{cell}-{dtype}.so"
        if not library.exists():
            (folder / "shim.cpp").write_text(
                '#include "host_shim.h"\n#include "scan_cuda.cu"\n'
                "typedef long long Int;\n"
                'extern "C" void run(int backwards, Int x, Int y, Int threads, const Int* v) {\n'
                "  gridDim.x = x; gridDim.y = y; blockDim.x = threads;\n"
                "  if (backwards) launch(scan_backward, v); else launch(scan_forward, v);\n}\n"
            )
            flags = ["-std=c++17", "-O1", "-w", "-fsanitize=undefined", "-fno-sanitize-recover=all"]
            flags += ["-static-libubsan", "-shared", "-fPIC", f"-I{SHIM}", f"-I{kernel_cache.SOURCES}"]
            macros = [f"-DHFR_CELL={name}", f"-DHFR_TYPE={storage}"]
            command = [*cpu._compiler(), *flags, *macros, "-o", str(library), str(folder / "shim.cpp")]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(library))

    return build


@pytest.fixture
def on_the_host(monkeypatch, host_library):
    """Lets the CUDA backend serve CPU tensors: all of cuda.py runs but the launch itself, which the shim does."""

    def launch(kernel, h, *arguments):
        library, backwards = kernel
        values = [*h.shape, *arguments]
        # A grid smaller than the batch, so that the blocks' loop over it is walked too.
        grid = -(-h.shape[2] // 32), min(h.shape[0], 2)
        library.run(backwards, *map(ctypes.c_longlong, (*grid, 32)), (ctypes.c_longlong * len(values))(*values))

    class Device:
        def __init__(self, device):
            pass

        __enter__ = __exit__ = lambda *args: None

    monkeypatch.setattr(cuda, "_launch", launch)
    monkeypatch.setattr(
        cuda, "_kernels", lambda cell, dtype, index: tuple((host_library(cell, dtype), i) for i in (0, 1))
    )
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(cpu, "forward", cuda.forward)
    monkeypatch.setattr(cpu, "backward", cuda.backward)


@pytest.mark.parametrize("cell, dtype", PAIRS, ids=str)
def test_bodies_against_the_oracle(on_the_host, cell, dtype):
    torch.manual_seed(0)
    scan, count = {"linear": (linear, 2), **CELLS}[cell]
    state_dtype = torch.promote_types(dtype, torch.float32)
    for shape in [(1, 1, 1), (3, 2, 33), (4, 37, 70), (1, 200, 33)]:
        first = coefficients if cell == "linear" else random
        inputs = first(*shape, dtype=dtype), *(random(*shape, dtype=dtype) for _ in range(count - 1))
        compare(scan, inputs, None, backend="cpu")
        mask, reset = mask_and_reset(*shape[:2])
        for reverse in (False, True):
            state = random(shape[0], shape[2], dtype=state_dtype)
            compare(scan, inputs, state, backend="cpu", mask=mask, reset=reset, reverse=reverse)


def test_broadcast_and_strided_bodies(on_the_host):
    torch.manual_seed(0)
    for shape in [(70,), (9, 1), (3, 1, 70), (9, 70)]:
        compare(
            linear,
            (coefficients(*shape, dtype=torch.float32), random(3, 9, 70, dtype=torch.float32)),
            None,
            backend="cpu",
        )
    packed = random(3, 9, 140, dtype=torch.float32)
    compare(mingru_positive, (packed[..., :70], packed[..., 70:]), None, backend="cpu")
    a, b = coefficients(2, 9, 5, dtype=torch.float32), random(2, 9, 5, dtype=torch.float32).requires_grad_()
    linear_scan(a, b, backend="cpu")[0].sum().backward()  # an expanded gradient: all strides zero
    assert torch.isfinite(b.grad).all()
