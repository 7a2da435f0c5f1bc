"""Every cell and dtype on a device against the float64 loop on the CPU, forward and all gradients, twice bit for bit.

python benchmarks/gpu_check.py                 # what `make bench-gpu` checks first
python benchmarks/gpu_check.py --small         # few and small shapes, as for compute-sanitizer
"""

import argparse
import contextlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests" / "scan"))

import test_gateloop_heads
import test_longhorn_scan
import test_s5_scan
from oracle import CELLS, GATELOOP_CELLS, coefficients, compare, linear, mask_and_reset, random

from hf_recurrent.scan import cuda, cuda_kernels, gateloop_heads_cuda, longhorn_cuda
from hf_recurrent.scan.cells import BY_NAME, S5

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RUNS = 2  # of each kernel, which must agree bit for bit
# (batch, length, channels): odd and even widths, one position, one channel, and lengths that are split into segments.
SHAPES = [(1, 1, 1), (3, 1, 64), (3, 37, 33), (2, 300, 64), (5, 129, 520), (1, 4500, 16), (2, 2300, 7)]
SMALL_SHAPES = [(2, 1, 5), (2, 70, 33), (1, 1030, 8)]
NARROW_SHAPE = (1, 2100, 1024)  # one pass in narrow blocks, on 65 to 170 multiprocessors
# (batch, length, channels, m)
LONGHORN_SHAPES = [(3, 37, 33, 16), (2, 300, 70, 16), (1, 2100, 9, 5), (2, 65, 24, 64)]
SMALL_LONGHORN_SHAPES = [(2, 21, 33, 16), (1, 1030, 5, 2)]
# (batch, length, heads, d_k, d_v)
HEADS_SHAPES = [(3, 37, 5, 8, 8), (2, 300, 9, 4, 4), (1, 2100, 2, 8, 8), (2, 65, 2, 64, 64), (2, 129, 3, 5, 100)]
SMALL_HEADS_SHAPES = [(2, 21, 3, 4, 4), (1, 1030, 1, 3, 100)]


def random_shapes(count: int) -> list[tuple[int, int, int]]:
    """Log-uniform batches up to 8, lengths up to 700, widths up to 900."""
    most = torch.tensor([8.0, 700.0, 900.0])
    return [tuple(int(n) for n in (most ** torch.rand(3)).round()) for _ in range(count)]


def _cases(small: bool) -> list[tuple[str, Callable[[str, torch.device], None]]]:
    """(what is checked, a function of the backend and the device that checks it)."""
    cases = []
    for shape in SMALL_SHAPES if small else SHAPES + random_shapes(5):
        for name, (scan, count) in {"linear": (linear, 2), **CELLS}.items():
            for dtype in (*DTYPES, torch.complex64) if name == "linear" else DTYPES:
                cases.append((f"{name} {dtype} {shape}", _scan_case(scan, count, shape, dtype, name == "linear")))
        cases.append((f"constant coefficients {shape}", _constant_case(shape)))
        cases += [(f"s5 {name} {shape}", _s5_case(name, shape)) for name in S5]
        for name, (scan, count) in GATELOOP_CELLS.items():
            for dtype in DTYPES if name == "gateloop_polar_sigmoid" else DTYPES[:1]:
                cases.append((f"{name} {dtype} {shape}", _scan_case(scan, count, shape, dtype, False, name)))
    if not small:
        cases.append((f"narrow blocks {NARROW_SHAPE}", _scan_case(linear, 2, NARROW_SHAPE, torch.float32, True)))
    for shape in SMALL_LONGHORN_SHAPES if small else LONGHORN_SHAPES:
        for dtype in DTYPES:
            cases.append((f"longhorn {dtype} {shape}", _longhorn_case(shape, dtype)))
    for shape in SMALL_HEADS_SHAPES if small else HEADS_SHAPES:
        cases += [(f"heads {dtype} {shape}", _heads_case(shape, dtype, True)) for dtype in DTYPES]
        cases.append((f"heads, real transitions {shape}", _heads_case(shape, torch.float32, False)))
    return cases


def _modules(small: bool) -> set[cuda_kernels.Module]:
    """What the cases run of the CUDA kernels."""
    scans = [("linear", torch.complex64), *((cell.name, torch.complex64) for cell in S5.values())]
    scans += [(name, dtype) for name in ("linear", *CELLS, "gateloop_polar_sigmoid") for dtype in DTYPES]
    scans += [(name, DTYPES[0]) for name in GATELOOP_CELLS]
    modules = {cuda.module_for(*scan, width) for scan in scans for width in (1, cuda.WIDTHS[scan[1].itemsize])}
    if not small:
        modules.add(cuda.module_for("linear", torch.float32, cuda.WIDTHS[4], cuda.NARROW_ROW))
    for *_, m in SMALL_LONGHORN_SHAPES if small else LONGHORN_SHAPES:
        modules |= {longhorn_cuda.module_for(dtype, m) for dtype in DTYPES}
    for *_, d_k, d_v in SMALL_HEADS_SHAPES if small else HEADS_SHAPES:
        kinds = [(dtype, torch.complex64) for dtype in DTYPES] + [(DTYPES[0], torch.float32)]
        modules |= {gateloop_heads_cuda.module_for(*kind, d_k, d_v) for kind in kinds}
    return modules


def _compile(modules: set[cuda_kernels.Module], device: torch.device) -> None:
    """Into the cache, on every core: one after the other they take a minute or more, and threads take as long, since
    NVRTC compiles one program at a time in each process. What cannot be compiled fails its cases."""
    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    missing = [module for module in modules if not cuda_kernels.is_compiled(module, architecture)]
    if not missing:
        return
    workers = min(len(missing), os.cpu_count() or 1, 16)
    with (
        contextlib.suppress(BrokenProcessPool),
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool,  # a forked one has no CUDA
    ):
        wait([pool.submit(cuda_kernels.cubin, module, architecture) for module in missing])


def _options(batch: int, length: int) -> list[dict]:
    mask, reset = mask_and_reset(batch, length)
    return [{}, {"mask": mask, "reset": reset, "reverse": True}]


def _scan_case(scan, count, shape, dtype, is_linear, name="linear"):
    def check(backend, device):
        for options in _options(*shape[:2]):
            first = coefficients(*shape, dtype=dtype) if is_linear else random(*shape, dtype=dtype)
            # Below one in magnitude, lest rounding add up over thousands of positions, as it does in the loop too.
            inputs = [0.99 * first if is_linear else first, *(random(*shape, dtype=dtype) for _ in range(count - 1))]
            state = random(shape[0], shape[2], dtype=BY_NAME[name].state_dtype(dtype))
            compare(scan, inputs, state, backend=backend, device=device, runs=RUNS, **options)

    return check


def _constant_case(shape):
    """As S5 has them: one complex coefficient for each channel."""

    def check(backend, device):
        dtype = torch.complex64
        inputs = 0.99 * coefficients(shape[2], dtype=dtype), random(*shape, dtype=dtype)
        compare(linear, inputs, None, backend=backend, device=device, runs=RUNS)

    return check


def _s5_case(discretization, shape):
    def check(backend, device):
        for options in _options(*shape[:2]):
            inputs = test_s5_scan.problem(*shape, torch.complex64)
            state = random(shape[0], shape[2], dtype=torch.complex64)
            at = {"backend": backend, "device": device, "runs": RUNS}
            test_s5_scan.compare(discretization, inputs, state, **at, **options)

    return check


def _longhorn_case(shape, dtype):
    def check(backend, device):
        for options in _options(*shape[:2]):
            inputs = test_longhorn_scan.inputs_for(*shape, dtype)
            test_longhorn_scan.compare(inputs, backend, device=device, runs=RUNS, **options)

    return check


def _heads_case(shape, dtype, complex_state):
    def check(backend, device):
        for options in [*_options(*shape[:2]), {"reset": mask_and_reset(*shape[:2])[1]}]:
            inputs = test_gateloop_heads.inputs_for(*shape, dtype, complex_state)
            start = None if options.get("reverse") else random(*shape[2:], dtype=inputs[4].dtype)
            test_gateloop_heads.compare(inputs, backend, device=device, start=start, runs=RUNS, **options)

    return check


def check_all(device: torch.device, small: bool = False, progress: Callable = iter) -> dict:
    """Runs every case, each kernel twice on the same inputs.

    Returns:
        {"cases": how many, "failures": [{"case", "error"}]}.
    """
    if device.type == "cuda":
        _compile(_modules(small), device)
    failures, cases = [], _cases(small)
    for number, (name, check) in enumerate(progress(cases)):
        try:
            torch.manual_seed(number)
            check(device.type, device)
        except Exception as error:  # recorded, so that the others are checked too
            line = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__} at {line.filename}:{line.lineno}"
            failures.append({"case": name, "error": f"{where}: {error}"[:500]})
    return {"cases": len(cases), "failures": failures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    parser.add_argument("--small", action="store_true", help="few and small shapes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    found = check_all(device, arguments.small)
    for failure in found["failures"]:
        print(f"{failure['case']}: {failure['error']}")
    print(f"{found['cases'] - len(found['failures'])} of {found['cases']} cases are right")
    return bool(found["failures"])


if __name__ == "__main__":
    sys.exit(main())
