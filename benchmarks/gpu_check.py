"""Every cell and dtype on a device against the float64 loop on the CPU, forward and all gradients, twice bit for bit.

python benchmarks/gpu_check.py                     # what `make bench-gpu` checks first
python benchmarks/gpu_check.py --small             # few and small shapes in one process, as for compute-sanitizer
python benchmarks/gpu_check.py --only heads s5     # the cases whose names have one of these in them
"""

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from unittest import mock

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests" / "scan"))

import test_convolution
import test_elementwise
import test_gateloop_heads
import test_longhorn_scan
import test_s5_scan
from oracle import CELLS, GATELOOP_CELLS, coefficients, compare, linear, mask_and_reset, random

from hf_recurrent.scan import (
    convolution_cuda,
    cuda,
    cuda_kernels,
    elementwise,
    elementwise_cuda,
    gateloop_heads_cuda,
    longhorn_cuda,
)
from hf_recurrent.scan.cells import BY_NAME, S5

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RUNS = 2  # of each kernel, which must agree bit for bit
LIMIT = 60.0  # seconds of a case; most take a tenth of a second, nearly all of it the loop's
START_LIMIT = 180.0  # of a process that starts: PyTorch is read from disk, by all of them at once
MOST_PROCESSES = {"cuda": 12, "cpu": 2}  # beside each other
# (batch, length, channels): odd and even widths, one position, one channel, and lengths that are split into segments.
SHAPES = [(1, 1, 1), (3, 1, 64), (3, 37, 33), (2, 300, 64), (5, 129, 520), (1, 4500, 16), (2, 2300, 7)]
SMALL_SHAPES = [(2, 1, 5), (2, 70, 33), (1, 1030, 8)]
# On a GPU of so few multiprocessors there are more blocks than run at once, and states pass from one to the other.
CHAIN_SHAPE, FEW_MULTIPROCESSORS = (3, 1100, 192), 7
# Rows too few to fill a GPU, where they are read once: on one of so few multiprocessors a block takes several tiles.
ONCE_SHAPES = [(1, 4500, 16), (2, 2300, 7)]
ONCE_GATELOOP = ("gateloop_polar_sigmoid", "gateloop_real_sigmoid")
# (batch, length, channels, m)
LONGHORN_SHAPES = [(3, 37, 33, 16), (2, 300, 70, 16), (1, 2100, 9, 5), (2, 65, 24, 64)]
SMALL_LONGHORN_SHAPES = [(2, 21, 33, 16), (1, 1030, 5, 2)]
# (batch, length, channels, taps)
CONVOLUTION_SHAPES = [(3, 37, 33, 4), (2, 700, 520, 4), (1, 2100, 8, 8), (2, 129, 64, 2), (300, 1, 16, 4)]
SMALL_CONVOLUTION_SHAPES = [(2, 140, 8, 4), (1, 70, 5, 3)]
ELEMENTWISE_SHAPES = [(3, 37, 33), (2, 700, 520), (300, 1, 16)]
SMALL_ELEMENTWISE_SHAPES = [(2, 70, 8), (1, 5, 5)]
# (batch, length, heads, d_k, d_v)
HEADS_SHAPES = [(3, 37, 5, 8, 8), (2, 300, 9, 4, 4), (1, 2100, 2, 8, 8), (2, 65, 2, 64, 64), (2, 129, 3, 5, 100)]
SMALL_HEADS_SHAPES = [(2, 21, 3, 4, 4), (1, 1030, 1, 3, 100)]


def random_shapes(count: int) -> list[tuple[int, int, int]]:
    """Log-uniform batches up to 8, lengths up to 700, widths up to 900."""
    most, generator = torch.tensor([8.0, 700.0, 900.0]), torch.Generator()  # the same shapes in all processes
    return [tuple(int(n) for n in (most ** torch.rand(3, generator=generator)).round()) for _ in range(count)]


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
    chained = [
        ("linear torch.float32", _scan_case(linear, 2, CHAIN_SHAPE, torch.float32, True)),
        ("mingru_positive torch.bfloat16", _scan_case(*CELLS["mingru_positive"], CHAIN_SHAPE, torch.bfloat16, False)),
        ("constant coefficients", _constant_case(CHAIN_SHAPE)),
        *((f"s5 {name}", _s5_case(name, CHAIN_SHAPE)) for name in S5),
    ]
    divided = [] if small else [(f"passed on, {name} {CHAIN_SHAPE}", check, False) for name, check in chained]
    for shape in [] if small else ONCE_SHAPES:
        once = [
            *((f"linear {dtype}", _scan_case(linear, 2, shape, dtype, True)) for dtype in (*DTYPES, torch.complex64)),
            *((name, _scan_case(scan, count, shape, DTYPES[1], False)) for name, (scan, count) in CELLS.items()),
            *((name, _scan_case(*GATELOOP_CELLS[name], shape, DTYPES[0], False, name)) for name in ONCE_GATELOOP),
            ("constant coefficients", _constant_case(shape)),
            *((f"s5 {name}", _s5_case(name, shape)) for name in S5),
        ]
        divided += [(f"read once, {name} {shape}", check, True) for name, check in once]
    cases += [(name, _few_multiprocessors_case(check, once)) for name, check, once in divided]
    for shape in SMALL_LONGHORN_SHAPES if small else LONGHORN_SHAPES:
        for dtype in DTYPES:
            cases.append((f"longhorn {dtype} {shape}", _longhorn_case(shape, dtype)))
    for shape in SMALL_CONVOLUTION_SHAPES if small else CONVOLUTION_SHAPES:
        for dtype, silu in itertools.product(DTYPES, (False, True)):
            what = f"convolution {dtype} {shape}{', SiLU' if silu else ''}"
            cases.append((what, _convolution_case(shape, dtype, silu)))
    for shape in SMALL_ELEMENTWISE_SHAPES if small else ELEMENTWISE_SHAPES:
        for dtype, function in itertools.product(DTYPES, test_elementwise.NAMES):
            what = f"elementwise, {function.__name__} {dtype} {shape}"
            cases.append((what, _elementwise_case(function, shape, dtype)))
    for shape in SMALL_HEADS_SHAPES if small else HEADS_SHAPES:
        cases += [(f"heads {dtype} {shape}", _heads_case(shape, dtype, True)) for dtype in DTYPES]
        cases.append((f"heads, real transitions {shape}", _heads_case(shape, torch.float32, False)))
    return cases


def _width(channels: int, widest: int) -> int:
    """Channels that a kernel takes at once of a contiguous tensor of so many."""
    return 1 if channels % widest else widest


def _modules_of(scans, shapes, device: torch.device) -> set[cuda_kernels.Module]:
    modules = set()
    for (name, dtype), shape, backward in itertools.product(scans, shapes, (False, True)):
        width = _width(shape[2], cuda.WIDTHS[dtype.itemsize])
        modules.add(cuda.division(name, shape, dtype, width, backward, device)[0])
    return modules


def _modules(small: bool, device: torch.device) -> set[cuda_kernels.Module]:
    """What the cases run of the CUDA kernels."""
    scans = [("linear", torch.complex64), *((cell.name, torch.complex64) for cell in S5.values())]
    scans += [(name, dtype) for name in ("linear", *CELLS, "gateloop_polar_sigmoid") for dtype in DTYPES]
    scans += [(name, DTYPES[0]) for name in GATELOOP_CELLS]
    modules = _modules_of(scans, SMALL_SHAPES if small else SHAPES + random_shapes(5), device)
    if not small:
        chained = [("linear", DTYPES[0]), ("mingru_positive", DTYPES[1]), *scans[: 1 + len(S5)]]
        with _few_multiprocessors(once=False):
            modules |= _modules_of(chained, [CHAIN_SHAPE], device)
        once = [("linear", dtype) for dtype in (*DTYPES, torch.complex64)] + [(name, DTYPES[1]) for name in CELLS]
        once += [(name, DTYPES[0]) for name in ONCE_GATELOOP] + scans[1 : 1 + len(S5)]
        with _few_multiprocessors(once=True):
            modules |= _modules_of(once, ONCE_SHAPES, device)
    for *_, m in SMALL_LONGHORN_SHAPES if small else LONGHORN_SHAPES:
        modules |= {longhorn_cuda.module_for(dtype, m) for dtype in DTYPES}
    for *_, channels, taps in SMALL_CONVOLUTION_SHAPES if small else CONVOLUTION_SHAPES:
        for dtype, silu in itertools.product(DTYPES, (False, True)):
            width = _width(channels, convolution_cuda.widest(dtype, taps))
            modules.add(convolution_cuda.module_for(dtype, taps, width, silu))
    for *_, channels in SMALL_ELEMENTWISE_SHAPES if small else ELEMENTWISE_SHAPES:
        for dtype, name in itertools.product(DTYPES, elementwise.FUNCTIONS.values()):
            width = _width(channels, elementwise_cuda.widest(dtype))
            modules.add(elementwise_cuda.module_for(name, dtype, width))
    for *_, d_k, d_v in SMALL_HEADS_SHAPES if small else HEADS_SHAPES:
        kinds = [(dtype, torch.complex64) for dtype in DTYPES] + [(DTYPES[0], torch.float32)]
        modules |= {gateloop_heads_cuda.module_for(*kind, d_k, d_v) for kind in kinds}
    return modules


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


@contextlib.contextmanager
def _few_multiprocessors(once: bool) -> Iterator[None]:
    with (
        mock.patch.object(cuda, "READ_ONCE", once),
        mock.patch.object(cuda_kernels, "multiprocessors", lambda device: FEW_MULTIPROCESSORS),
    ):
        yield


def _few_multiprocessors_case(check, once):
    def check_there(backend, device):
        with _few_multiprocessors(once):
            check(backend, device)

    return check_there


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


def _convolution_case(shape, dtype, silu):
    def check(backend, device):
        for options in _options(*shape[:2]):
            options.pop("reverse", None)
            inputs = test_convolution.inputs_for(*shape, dtype, with_state=not options)
            test_convolution.compare(inputs, backend, device=device, runs=RUNS, silu=silu, **options)

    return check


def _elementwise_case(function, shape, dtype):
    def check(backend, device):
        for scaled in (False, True):
            test_elementwise.compare(function, shape, dtype, scaled, device=device, runs=RUNS)

    return check


def _heads_case(shape, dtype, complex_state):
    def check(backend, device):
        for options in [*_options(*shape[:2]), {"reset": mask_and_reset(*shape[:2])[1]}]:
            inputs = test_gateloop_heads.inputs_for(*shape, dtype, complex_state)
            start = None if options.get("reverse") else random(*shape[2:], dtype=inputs[4].dtype)
            test_gateloop_heads.compare(inputs, backend, device=device, start=start, runs=RUNS, **options)

    return check


# ---- side by side ----------------------------------------------------------------------------------------------------


def _described(error: Exception) -> str:
    line = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {line.filename}:{line.lineno}: {error}"[:500]


def _serve(connection: Connection) -> None:
    """What a process of the pool runs: the tasks that come, one after the other."""
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):  # whoever gave them is gone
        connection.send((None, 0.0, False))  # it is there
        while True:
            task = connection.recv()
            start, error, spoilt = time.perf_counter(), None, False
            try:
                task()
            except Exception as raised:  # told, so that the others are done too
                error = _described(raised)
                try:
                    if torch.cuda.is_initialized():
                        torch.cuda.synchronize()
                except Exception:  # as after an illegal access: this process cannot use the GPU any more
                    spoilt = True
            connection.send((error, time.perf_counter() - start, spoilt))


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection
    deadline: float  # of its task
    task: int | None


class Pool:
    """Up to so many processes that do one task at a time. One that dies, or takes longer than a task may, costs that
    task alone: another takes its place."""

    _STARTING = -1  # a task of its own

    def __init__(self, count: int):
        self.count, self.workers = count, []

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_) -> None:
        for worker in self.workers:
            worker.process.kill()  # nothing of theirs is needed, and what they do may hang
        for worker in self.workers:
            worker.process.join(10)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a forked one has no CUDA
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()  # so that ours ends with the process
        self.workers.append(_Worker(process, ours, time.monotonic() + START_LIMIT, self._STARTING))

    def _end(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        worker.process.kill()
        worker.process.join(10)
        worker.connection.close()
        if worker.task == self._STARTING:
            self.count -= 1  # the next could not start either

    def _outcome(self, worker: _Worker) -> tuple[str | None, float]:
        try:
            error, seconds, spoilt = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(10)
            self._end(worker)
            return f"its process died, with exit code {worker.process.exitcode}", 0.0
        if spoilt:
            self._end(worker)
        return error, seconds

    def run(self, tasks: Sequence[Callable[[], object]]) -> Iterator[tuple[int, str | None, float]]:
        """(number of the task, what has gone wrong or None, seconds) of each, as it is done."""
        waiting = list(range(len(tasks)))[::-1]
        while True:
            for worker in self.workers:
                if worker.task is None and waiting:
                    worker.task, worker.deadline = waiting.pop(), time.monotonic() + LIMIT
                    with contextlib.suppress(OSError):  # it has died since: seen below
                        worker.connection.send(tasks[worker.task])
            starting = sum(worker.task == self._STARTING for worker in self.workers)
            for _ in range(min(self.count - len(self.workers), len(waiting) - starting)):
                self._start()
            busy = [worker for worker in self.workers if worker.task is not None]
            if not busy or (not waiting and all(worker.task == self._STARTING for worker in busy)):
                break
            soonest = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
            answered = wait([worker.connection for worker in busy], soonest)
            for worker in busy:
                task = worker.task
                if worker.connection in answered:
                    outcome = self._outcome(worker)
                elif time.monotonic() >= worker.deadline:
                    self._end(worker)
                    outcome = f"not done in {LIMIT:.0f} s", LIMIT
                else:
                    continue
                worker.task = None
                if task != self._STARTING:
                    yield task, *outcome
        for task in waiting:
            yield task, "not run: no process could be started", 0.0


def _compile(modules: set[cuda_kernels.Module], device: torch.device, pool: Pool) -> int:
    """Into the cache, in all processes: one after the other they take a minute or more, and threads take as long, since
    NVRTC compiles one program at a time in each process. What cannot be compiled fails its cases.

    Returns:
        How many were not there.
    """
    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return len(list(pool.run(list(compile_tasks(modules, architecture).values()))))


def compile_tasks(modules: set[cuda_kernels.Module], architecture: str) -> dict[cuda_kernels.Module, Callable]:
    """For a pool's processes: what compiles each of those that are not in the cache."""
    missing = [module for module in modules if not cuda_kernels.is_compiled(module, architecture)]
    return {module: functools.partial(_compile_one, module, architecture) for module in missing}


def _compile_one(module: cuda_kernels.Module, architecture: str) -> None:
    cuda_kernels.cubin(module, architecture)


@functools.cache
def _all_cases() -> list[tuple[str, Callable[[str, torch.device], None]]]:
    return _cases(False)


def _check(cases: list, number: int, device: torch.device) -> None:
    torch.manual_seed(number)
    cases[number][1](device.type, device)


def _check_one_of_all(number: int, device: torch.device) -> None:
    """For another process, which a case itself cannot be sent to."""
    _check(_all_cases(), number, device)


def _in_turn(tasks: Sequence[Callable[[], object]]) -> Iterator[tuple[int, str | None, float]]:
    """`Pool.run`, in this process."""
    for number, task in enumerate(tasks):
        start, error = time.perf_counter(), None
        try:
            task()
        except Exception as raised:
            error = _described(raised)
        yield number, error, time.perf_counter() - start


def check_all(
    device: torch.device,
    small: bool = False,
    progress: Callable = iter,
    only: Sequence[str] = (),
    tell: Callable[[str], object] | None = None,
) -> dict:
    """Runs every case, each kernel twice on the same inputs; `small` ones in this process, the others side by side in
    several, since nearly all of the time is the loop's on the CPU.

    Args:
        progress: what the cases are walked by, one step as each is done.
        only: parts of names; where there are any, cases with none of them are left out.
        tell: is called with a line for what has been done and what has failed, as it happens.

    Returns:
        {"cases": how many, "failures": [{"case", "error"}], "seconds": {"kernels", "cases"}, "slowest": [{"case",
        "seconds"}]}.
    """
    tell = tell or (lambda line: None)
    cases = _cases(True) if small else _all_cases()
    names = {n: name for n, (name, _) in enumerate(cases) if not only or any(part in name for part in only)}
    failures, seconds, times = {}, {}, {}
    processes = min(os.cpu_count() or 1, MOST_PROCESSES[device.type])
    numbers = list(names) if small else list(names)[::-1]  # those that take longest are near the end
    with Pool(processes) as pool:
        start = time.monotonic()
        if device.type == "cuda" and not only:  # few cases compile what they need
            count = _compile(_modules(small, device), device, pool)
            tell(f"{count} kernels compiled in {time.monotonic() - start:.1f} s")
        seconds["kernels"], start = round(time.monotonic() - start, 1), time.monotonic()
        if small:
            done = _in_turn([functools.partial(_check, cases, n, device) for n in numbers])
        else:
            done = pool.run([functools.partial(_check_one_of_all, n, device) for n in numbers])
        for _ in progress([cases[n] for n in numbers]):
            place, error, times[numbers[place]] = next(done)
            if error is not None:
                failures[numbers[place]] = error
                tell(f"{names[numbers[place]]}: {error}")
        seconds["cases"] = round(time.monotonic() - start, 1)
    tell(f"{len(names)} cases checked in {seconds['cases']} s")
    slowest = sorted(times, key=times.get, reverse=True)[:5]
    return {
        "cases": len(names),
        "failures": [{"case": names[n], "error": failures[n]} for n in sorted(failures)],
        "seconds": seconds,
        "slowest": [{"case": names[n], "seconds": round(times[n], 2)} for n in slowest],
    }


def _lines(cases: list) -> Iterator:
    """`cases`, with a line every ten seconds of how far it is."""
    start = said = time.monotonic()
    for number, case in enumerate(cases):
        if time.monotonic() > said + 10:
            said = time.monotonic()
            print(f"{number} of {len(cases)} cases in {said - start:.0f} s", flush=True)
        yield case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cuda (default) or cpu")
    parser.add_argument("--small", action="store_true", help="few and small shapes, in one process")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PATTERN", help="cases that have one of these in their names"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    found = check_all(device, arguments.small, _lines, arguments.only, functools.partial(print, flush=True))
    print("slowest:", ", ".join(f"{case['case']} {case['seconds']} s" for case in found["slowest"]))
    print(f"{found['cases'] - len(found['failures'])} of {found['cases']} cases are right")
    return 1 if found["failures"] or not found["cases"] else 0


if __name__ == "__main__":
    sys.exit(main())
