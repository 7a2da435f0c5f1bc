"""Runs the CUDA kernels' source on the host: compiled by the system's C++ compiler, barriers by host_shim.h."""

import ctypes
import subprocess
from pathlib import Path

from hf_recurrent.scan import convolution, cpu, cuda, cuda_kernels, elementwise, gateloop_heads, kernel_cache, longhorn

SHIM = Path(__file__).parent
FLAGS = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{SHIM}"]
# What is left out takes half of the compiler's time; test_sanitizers.py sees it where such a pointer is used.
UNDEFINED = [
    "-fsanitize=undefined",
    "-fno-sanitize=null,object-size,pointer-overflow",
    "-fno-sanitize-recover=all",
    "-static-libubsan",
]
ENTRIES = {
    "convolution_cuda": ["convolution_forward", "convolution_backward"],
    "elementwise_cuda": ["elementwise_forward", "elementwise_backward"],
    "scan_cuda": ["scan_forward_segments", "scan_forward", "scan_backward_segments", "scan_backward", "scan_step"],
    "longhorn_cuda": [
        "longhorn_forward_segments",
        "longhorn_forward",
        "longhorn_backward_segments",
        "longhorn_backward",
    ],
    "gateloop_heads_cuda": [
        "gateloop_heads_forward_segments",
        "gateloop_heads_forward",
        "gateloop_heads_backward_segments",
        "gateloop_heads_backward",
    ],
}


def _entries(module: cuda_kernels.Module) -> list[str]:
    once = ("HFR_ONCE", "1") in module.macros
    return ["scan_forward", "scan_backward"] if once else ENTRIES[module.stem]


def build(module: cuda_kernels.Module, folder: Path, flags: list[str]) -> ctypes.CDLL:
    """One library for each module, made once."""
    library = folder / f"{abs(hash(module))}.so"
    if not library.exists():
        source = library.with_suffix(".cpp")
        cases = "".join(
            f'  if (!strcmp(entry, "{entry}"))\n'
            f"    return shim::launch({entry}, x, y, threads, reversed, resident, seed, v);\n"
            for entry in _entries(module)
        )
        source.write_text(
            f'#include "host_shim.h"\n#include "{module.stem}.cu"\ntypedef long long Int;\n'
            'extern "C" void run(const char* entry, Int x, Int y, Int threads, Int reversed, Int resident, Int seed,\n'
            f'                    const Int* v) {{\n{cases}  shim::fail("no such kernel");\n}}\n'
        )
        macros = [f"-D{name}={value}" for name, value in module.macros]
        command = [*cpu._compiler(), *FLAGS, *flags, f"-I{kernel_cache.SOURCES}", *macros, "-o", library, source]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


class Host:
    """In the place of `cuda_kernels.launch`. `multiprocessors` of 1 keeps time in one segment, more splits it. With a
    `seed`, `resident` blocks run side by side, in any order."""

    def __init__(self, folder: Path, flags: list[str] = UNDEFINED):
        self.folder, self.flags = folder, flags
        self.multiprocessors = 1
        self.reversed = False
        self.resident, self.seed = 1, 0
        self.launched: list[str] = []

    def launch(self, module, entry, device, grid, threads, arguments) -> None:
        self.launched.append(entry)
        # At most two rows of blocks, so that the blocks' loop over the batch is walked too.
        x, y = grid[0], grid[1] if self.seed else min(grid[1], 2)
        values = (ctypes.c_longlong * len(arguments))(*arguments)
        function = build(module, self.folder, self.flags).run
        numbers = x, y, threads, self.reversed, self.resident, self.seed
        function(entry.encode(), *map(ctypes.c_longlong, numbers), values)

    def install(self, patch) -> None:
        """Lets the CUDA backend serve CPU tensors: all runs but the launch itself. `patch(object, name, value)`."""
        patch(cuda_kernels, "launch", self.launch)
        patch(cuda_kernels, "multiprocessors", lambda device: self.multiprocessors)
        for name in ("forward", "run_forward", "backward"):
            patch(cpu, name, getattr(cuda, name))
        for module in (convolution, elementwise, longhorn, gateloop_heads):
            patch(module, "choose_backend", lambda backend, device: "cuda")
