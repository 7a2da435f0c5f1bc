"""Which division of a scan's work is the fastest on a GPU: for `_tunings` of hf_recurrent.scan.cuda.

A block has so many threads, `row` of them side by side along the channels; a thread takes so many positions at once,
its `steps`; and so many blocks are to share a multiprocessor, which leaves a thread 65536 / (threads x blocks)
registers. Every combination whose numbers fit into them is compiled, and timed beside the one that is in use.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch
from tqdm import tqdm

import gpu
import gpu_check
from gpu_timing import seconds_of
from hf_recurrent.cli.parser import number
from hf_recurrent.files import write_whole
from hf_recurrent.measure import make_folder
from hf_recurrent.scan import BackendUnavailable, cuda, cuda_kernels, linear_scan
from hf_recurrent.scan.cells import BY_NAME, Cell
from report import table

THREADS, BLOCKS, STEPS = (128, 256, 512), (1, 2, 3, 4, 6), (1, 2, 3, 4, 6, 8, 12, 16)
RESIDENT = (256, 512, 768, 1024)  # threads of a multiprocessor
REGISTERS, MOST_REGISTERS = 65536, 255  # of a multiprocessor, of a thread
OTHERS = 44  # of a thread's registers are for addresses and the like, about
LEAST = 0.3  # of the others: where a thread's numbers fill less, nothing is gained by so much room
SECONDS = 0.03  # a division is timed for


@dataclass(frozen=True)
class Plan:
    """What one compilation serves: a division forward, one backward, or both."""

    threads: int
    row: int
    ahead: cuda.Tuning | None
    back: cuda.Tuning | None

    def __str__(self) -> str:
        parts = [("forward", self.ahead), ("backward", self.back)]
        tunings = [f"{name} {part.steps} steps, {part.blocks} blocks" for name, part in parts if part is not None]
        return "; ".join([f"{self.threads} threads, {self.row} side by side", *tunings])

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        cuda.module_for.cache_clear()
        least = cuda.Tuning(1, 1)  # of what nobody asks for
        with (
            mock.patch.object(cuda, "THREADS", self.threads),
            mock.patch.object(cuda, "row_for", lambda *_: self.row),
            mock.patch.object(cuda, "_tunings", lambda *_: (self.ahead or least, self.back or least)),
        ):
            yield
        cuda.module_for.cache_clear()


@dataclass(frozen=True)
class Case:
    """A cell of the benchmark, with so many inputs of all channels."""

    cell: Cell
    dtype: torch.dtype
    scan: Callable
    make: Callable
    inputs: int

    @property
    def name(self) -> str:
        return f"{self.cell.name} {str(self.dtype).removeprefix('torch.')}"

    @property
    def width(self) -> int:
        return cuda.WIDTHS[self.dtype.itemsize]

    def registers(self, steps: int, backward: bool) -> float:
        """Of a thread, for what it works on, what it reads meanwhile, and the coefficients that it keeps."""
        size, state = self.dtype.itemsize, self.cell.state_dtype(self.dtype).itemsize
        is_linear = self.cell.name == "linear"
        if backward:  # the inputs, the gradient, and h
            read = size * (1 if is_linear else self.inputs) + size + size * (2 if self.cell.has_complex_state else 1)
            kept = 0
        else:
            read, kept = size * self.inputs, 0 if is_linear else 2 * state
        return steps * self.width * (2 * read + kept) / 4

    def tunings(self, threads: int, backward: bool) -> list[cuda.Tuning]:
        found = []
        for blocks, steps in itertools.product(BLOCKS, STEPS):
            room = min(REGISTERS / (threads * blocks), MOST_REGISTERS) - OTHERS
            if threads * blocks in RESIDENT and LEAST <= self.registers(steps, backward) / room <= 1:
                found.append(cuda.Tuning(steps, blocks))
        return found

    def plans(self) -> list[Plan]:
        return [
            Plan(threads, row, *tunings)
            for threads, row in itertools.product(THREADS, cuda.ROWS)
            if row * self.width <= threads  # a thread for each channel of a block
            for tunings in itertools.zip_longest(self.tunings(threads, False), self.tunings(threads, True))
        ]

    def module(self, plan: Plan) -> cuda_kernels.Module:
        with plan.in_use():
            return cuda.module_for(self.cell.name, self.dtype, self.width, plan.row, cuda.READ_ONCE)


def cases(b: gpu.Bench, patterns: list[str]) -> list[Case]:
    pair = next(make for name, _, make, _ in gpu.cells_of(b) if name == "linear, complex")
    cells = [("linear", linear_scan, pair, (gpu.FLOAT, gpu.HALF)), *gpu.cells_of(b)]
    found = []
    for name, scan, make, dtypes in cells:
        if name.endswith("constant"):  # the kernels of the other complex scan
            continue
        cell = BY_NAME[name.split(",")[0]]
        for dtype in dtypes:
            found.append(Case(cell, dtype, scan, make, len(make((1, 1, 1), dtype)) - cell.timed))
    return [case for case in found if not patterns or any(pattern in case.name for pattern in patterns)]


def compile_all(chosen: list[Case], architecture: str) -> int:
    """How many could not be compiled; each is named."""
    names = {case.module(plan): f"{case.name}, {plan}" for case in chosen for plan in case.plans()}
    tasks = gpu_check.compile_tasks(set(names), architecture)
    missing, failed = list(tasks), 0
    with gpu_check.Pool(os.cpu_count() or 1) as pool:
        done = pool.run(list(tasks.values()))
        for index, error, _ in tqdm(done, "kernels", len(tasks), leave=False, disable=None):
            if error is not None:
                failed += 1
                tqdm.write(f"{names[missing[index]]}: {error}", file=sys.stderr)
    return failed


def measure(b: gpu.Bench, case: Case, shape: tuple[int, int, int]) -> list[dict]:
    """Forward and backward alone, microseconds: of what is in use first, then of each plan."""
    sets = gpu._sets(lambda: case.make(shape, case.dtype))
    rows = []

    def add(calls: list[Callable], direction: str, plan: Plan | None, tuning: cuda.Tuning | None) -> None:
        row = {"case": case.name, "direction": direction}
        if plan is not None:
            row |= {"threads": plan.threads, "row": plan.row, **asdict(tuning)}
        try:
            row["microseconds"] = round(seconds_of(calls, b.device, SECONDS, 3) * 1e6, 2)
        except Exception as error:  # as where a block asks for more than a multiprocessor has: others may do
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        rows.append(row)

    backend = b.device.type
    with torch.no_grad():
        backward = gpu._backward(case.cell.name, sets, {}, backend)
        forward = gpu._forward(case.scan, sets)
        add(forward, "forward", None, None)
        add(backward, "backward", None, None)
        for plan in tqdm(case.plans(), case.name, leave=False, disable=None):
            if b.left() < 0:
                break
            with plan.in_use():
                if plan.ahead is not None:
                    add(forward, "forward", plan, plan.ahead)
                if plan.back is not None:
                    add(backward, "backward", plan, plan.back)
    return rows


def markdown(document: dict) -> str:
    """The division in use and the three fastest, of each case."""
    lines = [f"{document['machine']['gpu']}, {tuple(document['shape'])}, `{document['command']}`.", ""]
    body = []
    for case, direction in dict.fromkeys((row["case"], row["direction"]) for row in document["results"]):
        found = [row for row in document["results"] if (row["case"], row["direction"]) == (case, direction)]
        found = [row for row in found if "microseconds" in row]  # not those that failed
        used = next((row["microseconds"] for row in found if "steps" not in row), math.nan)
        fastest = sorted((row for row in found if "steps" in row), key=lambda row: row["microseconds"])[:3]
        cells = [
            f"{row['microseconds']:.1f}: {row['threads']} threads, {row['row']} side by side, {row['steps']} steps, "
            f"{row['blocks']} blocks"
            for row in fastest
        ]
        body.append([case, direction, f"{used:.1f}", *cells, *[""] * (3 - len(cells))])
    return "\n".join(lines + table(["", "", "µs in use", "fastest", "second", "third"], body)) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="examples:\n  python benchmarks/gpu_tuning.py --only 'minlstm_positive bfloat16' s5\n"
        "  python benchmarks/gpu_tuning.py --compile sm_90       # needs no GPU: fills the cache for one that has\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PATTERN", help="cases with one of these in their names"
    )
    parser.add_argument("--compile", metavar="ARCHITECTURE", help="only compile, for an architecture like sm_90")
    parser.add_argument(
        "--shape", nargs=3, type=number(int, 1, 2**31), metavar=("B", "L", "D"), help="(default 8 4096 1536)"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="of the kernels that read rows too few to fill the GPU once (shape: default 1 262144 1024)",
    )
    parser.add_argument("--minutes", type=float, default=7.5, help="nothing is timed after (default 7.5)")
    parser.add_argument("--output", type=Path, default=gpu.ROOT / "benchmarks/results", help="folder of the results")
    arguments = parser.parse_args(argv)
    if not arguments.compile and not torch.cuda.is_available():
        parser.error("PyTorch sees no CUDA device; --compile needs none")
    b = gpu.Bench(torch.device("cpu" if arguments.compile else "cuda:0"), False, arguments.minutes)
    chosen = cases(b, arguments.only)
    if not chosen:
        parser.error(f"--only {' '.join(arguments.only)}: there are {', '.join(case.name for case in cases(b, []))}")
    with mock.patch.object(cuda, "READ_ONCE", arguments.once):
        if arguments.compile:
            case = chosen[0]
            try:  # one first: thousands would say the same of an architecture that the compiler does not know
                cuda_kernels.cubin(cuda.module_for(case.cell.name, case.dtype, case.width), arguments.compile)
            except BackendUnavailable as error:
                parser.error(f"--compile {arguments.compile}: {error}")
            return 1 if compile_all(chosen, arguments.compile) else 0
        if (reason := cuda.unavailable_reason()) is not None:
            parser.error(f"the CUDA kernels do not run here: {reason}")
        make_folder(parser, arguments.output)
        compile_all(chosen, "sm_{}{}".format(*torch.cuda.get_device_capability(b.device)))
        given = " ".join(sys.argv[1:] if argv is None else argv)
        shape = tuple(arguments.shape or ((1, 2**18, 1024) if arguments.once else (8, 4096, 1536)))
        document = run(b, chosen, shape, arguments.output, f"python benchmarks/gpu_tuning.py {given}".strip())
    print(markdown(document))
    return 0


def run(b: gpu.Bench, chosen: list[Case], shape: tuple[int, int, int], folder: Path, command: str) -> dict:
    """Writes `folder`/<gpu>-tuning.json and .md, or -tuning-once, after each case."""
    document = {"command": command, "machine": gpu.about(b.device), "shape": list(shape), "results": [], "seconds": 0.0}
    stem = gpu.stem_of(document["machine"]) + ("-tuning-once" if cuda.READ_ONCE else "-tuning")
    start = time.monotonic()
    for case in chosen:
        b.attempt(case.name, lambda case=case: document["results"].extend(measure(b, case, shape)))
        document["seconds"] = round(time.monotonic() - start, 1)
        write_whole(folder / f"{stem}.json", json.dumps(document, indent=1) + "\n")
        write_whole(folder / f"{stem}.md", markdown(document))
    return document


if __name__ == "__main__":
    sys.exit(main())
