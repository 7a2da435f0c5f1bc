"""How close the scans come to a GPU's memory, and how they compare with other people's: `make bench-gpu`.

Every section is guarded: what fails is recorded and the rest goes on, and the results are written after each. Times are
of captured CUDA graphs, but for models' training steps, the copy, and what says otherwise ("timed"); every ratio to the
copy is to the device-to-device copy of the same run, bytes counted once.
"""

import argparse
import contextlib
import functools
import gc
import inspect
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO
from unittest import mock

import torch
from torch import Tensor, nn
from tqdm import tqdm

import gpu_check
import gpu_peers
import gpu_report
import hf_recurrent
import training_steps
from gpu_timing import eager_seconds_of, seconds_of
from hf_recurrent.files import replacing, write_whole
from hf_recurrent.measure import machine, make_folder
from hf_recurrent.modeling import head
from hf_recurrent.modeling.mingru import MinGRUMixer
from hf_recurrent.modeling.minlstm import MinLSTMMixer
from hf_recurrent.scan import (
    cuda,
    elementwise,
    gateloop_heads_scan,
    gateloop_scan,
    linear_scan,
    longhorn_scan,
    mingru_scan,
    minlstm_scan,
    s5_scan,
)
from hf_recurrent.scan.cells import BY_NAME
from hf_recurrent.scan.convolution import _short_convolution, short_convolution
from hf_recurrent.scan.ops import step_flags

ROOT = Path(__file__).parents[1]
SETS = 3  # of tensors, which consecutive calls use in turn, so that no cache has what a call reads
PAST_CACHES = 2**30  # bytes of a set that is as good as several: twenty times what caches hold, and memory has an end
SANITIZER_LIMIT = 140.0  # seconds, of both tools side by side
FLOAT, HALF = torch.float32, torch.bfloat16


class Bench:
    """The settings of one run, and what it has found so far."""

    def __init__(self, device: torch.device, tiny: bool, minutes: float):
        self.device, self.tiny = device, tiny
        self.end = time.monotonic() + 60 * minutes
        self.section = ""  # the one that is being measured
        self.results: list[dict] = []
        self.not_measured: dict[str, dict[str, str]] = {}  # by section: what, and why
        self.copy_speed = 0.0  # bytes per second

    def miss(self, what: str, reason: str) -> None:
        """The first reason is the one that counts."""
        self.not_measured.setdefault(self.section, {}).setdefault(what, reason)

    def add(self, section: str, name: str, seconds: float, moved: int = 0, **fields) -> dict:
        """`moved`: the bytes that must move, by which the fraction of the copy's speed is known."""
        row = {"section": section, "name": name, "microseconds": round(seconds * 1e6, 2), **fields}
        if moved:
            row |= {"gigabytes_per_second": round(moved / seconds / 1e9, 1)}
            if self.copy_speed:
                row |= {"of_copy": round(moved / seconds / self.copy_speed, 4)}
        self.results.append(row)
        return row

    def attempt(self, what: str, run: Callable[[], object]) -> None:
        """What fails is recorded under `what`, and does not stop the rest; so is what there is no time for."""
        if self.left() < 0:
            self.miss(what, "out of time")
            return
        for step in (run, self._release):
            try:
                step()
            except Exception as error:
                self.miss(what, f"{type(error).__name__}: {error}".splitlines()[0][:300])

    def _release(self) -> None:
        """Fails where a kernel has spoilt the context, or a graph was left half captured."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=self.device)

    def coefficients(self, *shape: int, dtype: torch.dtype) -> Tensor:
        if not dtype.is_complex:
            return torch.rand(*shape, device=self.device).mul_(0.98).add_(0.01).to(dtype)
        phases = torch.rand(*shape, device=self.device) * 6
        return torch.polar(torch.rand(*shape, device=self.device) * 0.98, phases).to(dtype)


def _way_of(device: torch.device) -> str:
    """How `seconds_of` times. Rows whose times are divided by each other say it: launches are in a time of what runs
    "eager", and not in that of a "graph"."""
    return "graph" if device.type == "cuda" else "eager"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- sections --------------------------------------------------------------------------------------------------------


def measure_copy(b: Bench) -> None:
    """The ceiling: a device-to-device copy, and torch.add beside it. The copy is timed as it runs: a captured one is
    left to the copy engine of an H200, which reaches two thirds of its memory's speed."""
    count = 2**14 if b.tiny else 2**28
    source, target = (torch.rand(count, device=b.device) for _ in "st")
    seconds = eager_seconds_of(lambda: target.copy_(source), b.device, 0.5)
    b.copy_speed = 2 * source.nbytes / seconds
    b.add("copy", "copy", seconds, 2 * source.nbytes)
    other = torch.rand(count, device=b.device)
    b.add("copy", "torch.add", seconds_of([lambda: torch.add(source, other, out=target)], b.device), 3 * source.nbytes)


def measure_check(b: Bench) -> None:
    """Is it right, and the same at every run?"""
    found = gpu_check.check_all(
        b.device, b.tiny, lambda cases: tqdm(cases, desc="check", leave=False, disable=None, unit="case")
    )
    b.results.append({"section": "check", "name": "against the float64 loop, twice", **found})


def measure_sanitizer(b: Bench) -> None:
    """compute-sanitizer's memcheck and racecheck on small shapes, in processes of their own, side by side."""
    if b.device.type != "cuda" or shutil.which("compute-sanitizer") is None:
        b.miss("compute-sanitizer", "not installed" if b.device.type == "cuda" else "is for GPUs")
        return
    limit = min(SANITIZER_LIMIT, max(b.left(), 1))
    end, started = time.monotonic() + limit, []
    for tool in ("memcheck", "racecheck"):
        # Memory of its own for each tensor: within PyTorch's large pieces no access is out of bounds.
        environment = os.environ | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {})
        script = str(ROOT / "benchmarks/gpu_check.py")
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, script, "--small"]
        output = tempfile.TemporaryFile("w+")
        options = {"stdout": output, "stderr": subprocess.STDOUT, "text": True, "env": environment}
        started.append((tool, output, subprocess.Popen(command, cwd=ROOT, start_new_session=True, **options)))

    def finish(tool: str, output: TextIO, process: subprocess.Popen) -> None:
        with output, process:
            try:
                process.wait(timeout=max(end - time.monotonic(), 0))
            except subprocess.TimeoutExpired as error:
                os.killpg(process.pid, signal.SIGKILL)  # what it runs too, which would go on using the GPU
                raise RuntimeError(f"not done in {limit:.0f} s") from error
            output.seek(0)
            said = output.read()
        summary = [line for line in said.splitlines() if "SUMMARY" in line or "cases are right" in line]
        row = {"section": "sanitizer", "name": tool, "status": process.returncode, "summary": summary}
        b.results.append(row | ({} if summary else {"output": said[-600:]}))

    for one in started:
        try:
            finish(*one)
        except Exception as error:  # recorded as by `attempt`, which runs nothing when time is up
            b.miss(f"compute-sanitizer {one[0]}", f"{type(error).__name__}: {error}")


def _sets(make: Callable[[], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    sets = [make()]
    while len(sets) < SETS and sum(x.nbytes for x in sets[0]) < PAST_CACHES:
        sets.append(make())
    return sets


def _forward(scan: Callable, sets: list[tuple[Tensor, ...]]) -> list[Callable]:
    return [lambda x=x: scan(*x)[0] for x in sets]


def _backward(cell: str, sets: list[tuple[Tensor, ...]], options: dict[str, Tensor], backend: str) -> list[Callable]:
    """The operator's backward alone, as autograd calls it."""
    ops, calls = torch.ops.hf_recurrent, []
    flags = step_flags(options.get("mask"), options.get("reset"), False)
    for x in sets:
        timed = BY_NAME[cell].timed  # whose second input has no channels
        inputs = [t if timed and i == 1 else t[(None,) * (3 - t.dim())] for i, t in enumerate(x)]
        if BY_NAME[cell].read is None:
            (h, final), backward = ops.scan(cell, inputs, None, flags, False, backend), ops.scan_backward
        else:
            _, h, final = ops.read_scan(cell, inputs, None, flags, False, True, backend)
            backward = ops.read_scan_backward
        arguments = (cell, inputs, h, None, flags, torch.randn_like(x[-1]), torch.randn_like(final), False, backend)
        calls.append(lambda backward=backward, arguments=arguments: backward(*arguments))
    return calls


def _flags(b: Bench, kind: str, shape) -> dict[str, Tensor]:
    """The options of a scan that is "masked", every tenth position at random, or "packed": documents of 512 positions
    on average."""
    chosen = torch.rand(shape[:2], device=b.device)
    return {"mask": chosen < 0.9} if kind == "masked" else {"reset": chosen < 1 / 512}


def _measure_scan(
    b: Bench, section: str, cell: str, scan: Callable, shape, dtype, make: Callable, flagged: str | None = None
) -> None:
    """Forward, and backward alone; `make(shape, dtype)` gives one set of inputs. Beside forward: torch.add."""
    options = {}
    if flagged:
        options = _flags(b, flagged, shape)
        cell, scan = f"{cell}, {flagged}", functools.partial(scan, **options)
    fields = {"shape": list(shape), "dtype": _name(dtype)}
    sets = _sets(lambda: make(shape, dtype))
    read = sum(x.nbytes for x in sets[0])
    written = sets[0][-1].nbytes
    with torch.no_grad():
        row = b.add(
            section, cell, seconds_of(_forward(scan, sets), b.device), read + written, direction="forward", **fields
        )
        if section in ("scan", "long") and sets[0][0].shape == sets[0][1].shape:
            add = seconds_of([lambda x=x: torch.add(*x) for x in sets], b.device)
            row["of_add"] = round(row["microseconds"] / (add * 1e6), 4)
        # Reads the inputs, h and the gradient of what the cell gives; writes a gradient of each input. Of the linear
        # cell no gradient depends on the second input, which is not read.
        name = cell.split(",")[0]
        unread = written if name == "linear" else 0
        kept = 2 if BY_NAME[name].has_complex_state else 1  # numbers of h for each one given
        seconds = seconds_of(_backward(name, sets, options, b.device.type), b.device)
        b.add(section, cell, seconds, 2 * read - unread + (1 + kept) * written, direction="backward", **fields)


def _pair(b: Bench) -> Callable:
    return lambda shape, dtype: (b.coefficients(*shape, dtype=dtype), b.random(*shape, dtype=dtype))


def measure_scan(b: Bench) -> None:
    """linear_scan over widths and lengths."""
    shapes = [(8, 2048, 1024), (16, 2048, 2048), (8, 8192, 1024), (8, 65536, 1024), (32, 2048, 768), (2, 4096, 512)]
    for shape in [(2, 64, 16)] if b.tiny else shapes:
        for dtype in (FLOAT, HALF):
            what = f"linear_scan {shape} {_name(dtype)}"
            b.attempt(what, lambda s=shape, d=dtype: _measure_scan(b, "scan", "linear", linear_scan, s, d, _pair(b)))


def measure_long(b: Bench) -> None:
    """One row, or few, so that only time is left to fill the GPU with: as it is done, and the other way."""
    shapes = [(1, 2048, 8)] if b.tiny else [(1, 2**20, 1024), (1, 2**20, 64), (1, 2**18, 256), (2, 4096, 512)]
    other = "linear, read twice" if cuda.READ_ONCE else "linear, read once"
    for shape, dtype, name in itertools.product(shapes, (FLOAT, HALF), ("linear", other)):
        with mock.patch.object(cuda, "READ_ONCE", cuda.READ_ONCE ^ (name == other)):
            what = f"{name} {shape} {_name(dtype)}"
            b.attempt(what, lambda s=shape, d=dtype, n=name: _measure_scan(b, "long", n, linear_scan, s, d, _pair(b)))


def cells_of(b: Bench) -> list[tuple[str, Callable, Callable, tuple[torch.dtype, ...]]]:
    """(name, scan, what makes a set of its inputs, dtypes) of what is fused with the recurrence, and of the complex
    recurrences, with the constant coefficients of S5 too."""

    def real(count: int) -> Callable:
        return lambda shape, dtype: tuple(b.random(*shape, dtype=dtype) for _ in range(count))

    def constant(shape, dtype):
        return b.coefficients(shape[-1], dtype=dtype), b.random(*shape, dtype=dtype)

    def irregular(shape, dtype):
        rate = torch.complex(-torch.rand(shape[-1]), torch.randn(shape[-1])).to(b.device, dtype)
        return rate, torch.rand(shape[:2], device=b.device), b.random(*shape, dtype=dtype)

    def s5(**options):
        return lambda rate, times, driven: s5_scan(driven, rate, times, **options)

    def positive(scan):
        return lambda *x: scan(*x, positive=True)

    def gateloop(**options):
        return lambda *x: gateloop_scan(*x, **options)

    return [
        ("mingru_vanilla", mingru_scan, real(2), (FLOAT, HALF)),
        ("mingru_positive", positive(mingru_scan), real(2), (FLOAT, HALF)),
        ("minlstm_vanilla", minlstm_scan, real(3), (FLOAT, HALF)),
        ("minlstm_positive", positive(minlstm_scan), real(3), (FLOAT, HALF)),
        ("gateloop_polar_sigmoid", gateloop(), real(5), (FLOAT, HALF)),
        ("gateloop_real_sigmoid", gateloop(), real(4), (FLOAT, HALF)),
        ("gateloop_cartesian_sigmoid", gateloop(transition="cartesian"), real(5), (FLOAT, HALF)),
        ("linear, complex", linear_scan, _pair(b), (torch.complex64,)),
        ("linear, complex and constant", linear_scan, constant, (torch.complex64,)),
        ("s5_zoh", s5(), irregular, (torch.complex64,)),
        ("s5_bilinear", s5(discretization="bilinear"), irregular, (torch.complex64,)),
    ]


def measure_cells(b: Bench) -> None:
    """The cells, and what a mask and documents packed into rows cost."""
    shape = (2, 64, 16) if b.tiny else (8, 4096, 1536)
    for cell, scan, make, dtypes in cells_of(b):
        for dtype in dtypes:
            what = f"{cell} {_name(dtype)}"
            b.attempt(what, lambda c=(cell, scan), d=dtype, m=make: _measure_scan(b, "cells", *c, shape, d, m))
    for flagged in ("masked", "packed"):
        for dtype in (FLOAT, HALF):
            case = ("cells", "linear", linear_scan, shape, dtype, _pair(b), flagged)
            b.attempt(f"linear, {flagged} {_name(dtype)}", lambda case=case: _measure_scan(b, *case))


def measure_longhorn(b: Bench) -> None:
    """Against its own bytes, and mamba_ssm's selective scan of the same sizes."""
    shapes = [(2, 32, 8)] if b.tiny else [(8, 2048, 1536), (1, 2**17, 1536)]
    m = 4 if b.tiny else 16
    for shape in shapes:
        for dtype in (FLOAT, HALF):
            what = f"longhorn_scan {shape} {_name(dtype)}"
            b.attempt(what, lambda s=shape, d=dtype: _measure_longhorn(b, s, m, d))


def _measure_longhorn(b: Bench, shape, m: int, dtype: torch.dtype) -> None:
    fields = {"shape": [*shape, m], "dtype": _name(dtype)}
    widths = shape[2], shape[2], m, m
    sets = _sets(lambda: tuple(b.random(*shape[:2], width, dtype=dtype) for width in widths))
    wide, narrow = sets[0][0].nbytes, sets[0][2].nbytes
    forward = seconds_of(_forward(longhorn_scan, sets), b.device)
    b.add("longhorn", "longhorn", forward, 3 * wide + 2 * narrow, direction="forward", **fields)
    calls = []
    for x in sets:
        grad, final = torch.randn_like(x[0]), b.random(shape[0], shape[2], m, dtype=FLOAT)
        calls.append(
            lambda a=(*x, None, None, grad, final, False, b.device.type): torch.ops.hf_recurrent.longhorn_backward(*a)
        )
    seconds = forward + seconds_of(calls, b.device)
    moved = 3 * wide + 2 * narrow + 5 * wide + 4 * narrow
    row = b.add("longhorn", "longhorn", seconds, moved, direction="forward + backward", **fields)
    if b.copy_speed:
        row["times_floor"] = round(b.copy_speed * seconds / moved, 3)
    scan = gpu_peers.selective_scan()
    if scan is None:
        b.miss("mamba-ssm", "not installed")
        return
    batch, length, width = shape
    u, delta = (b.random(batch, width, length, dtype=dtype).requires_grad_() for _ in "ud")
    A = (-torch.rand(width, m, device=b.device)).requires_grad_()
    B, C = (b.random(batch, m, length, dtype=dtype).requires_grad_() for _ in "BC")
    grad = torch.randn_like(u)
    inputs = (u, delta, A, B, C)
    peer = eager_seconds_of(lambda: torch.autograd.grad(scan(*inputs), inputs, grad), b.device)
    b.add("longhorn", "mamba_ssm selective scan", peer, direction="forward + backward", **fields, timed="eager")
    row |= {"of_mamba_ssm": round(seconds / peer, 4), "timed": _way_of(b.device)}


def measure_convolution(b: Bench) -> None:
    """The short convolution of 4 taps with a SiLU against its own bytes, and PyTorch's of the same documents."""
    shape = (2, 64, 16) if b.tiny else (8, 4096, 1536)
    for dtype, flagged in itertools.product((FLOAT, HALF), (None, "packed")):
        what = f"short_convolution {flagged or ''} {_name(dtype)}"
        b.attempt(what, lambda d=dtype, f=flagged: _measure_convolution(b, shape, d, f))


def _measure_convolution(b: Bench, shape, dtype: torch.dtype, flagged: str | None) -> None:
    (batch, _, channels), taps = shape, 4
    name = "short convolution" + (f", {flagged}" if flagged else "")
    fields = {"shape": [*shape, taps], "dtype": _name(dtype)}
    options = _flags(b, flagged, shape) if flagged else {}
    common = step_flags(options.get("mask"), options.get("reset"), reverse=False)
    weight, bias = b.random(channels, 1, taps, dtype=dtype), b.random(channels, dtype=dtype)
    left, ops = b.random(batch, taps - 1, channels, dtype=dtype), torch.ops.hf_recurrent
    sets = _sets(lambda: (b.random(*shape, dtype=dtype), b.random(*shape, dtype=dtype)))
    moved = sets[0][0].nbytes
    calls = {"forward": [], "backward": []}
    for x, grad in sets:
        given = x, weight, None, bias, common
        calls["forward"].append(lambda a=given: ops.short_convolution(*a, True, b.device.type))
        calls["backward"].append(lambda a=(*given, grad, left): ops.short_convolution_backward(*a, True, b.device.type))
    with torch.no_grad():
        for (direction, those), times in zip(calls.items(), (2, 3), strict=True):
            seconds = seconds_of(those, b.device)
            b.add("convolution", name, seconds, times * moved, direction=direction, **fields)
    # PyTorch's looks at what is to be done over, which no graph can hold: both as a training step runs them.
    leaves = [x.detach().requires_grad_() for x in (sets[0][0], weight, bias)]

    def both(run: Callable) -> Callable:
        return lambda: torch.autograd.grad(run(*leaves, **options, silu=True)[0], leaves, sets[0][1])

    ours, theirs = (eager_seconds_of(both(run), b.device) for run in (short_convolution, _short_convolution))
    fields |= {"direction": "forward + backward", "timed": "eager"}
    row = b.add("convolution", name, ours, 5 * moved, **fields)
    row["times_pytorch"] = round(ours / theirs, 4)
    b.add("convolution", "PyTorch's", theirs, **fields)


def measure_elementwise(b: Bench) -> None:
    """What comes after a recurrence against its own bytes, and in PyTorch's operations."""
    shape = (2, 64, 16) if b.tiny else (8, 4096, 1536)
    for dtype, function in itertools.product((FLOAT, HALF), elementwise.FUNCTIONS):
        b.attempt(f"{function.__name__} {_name(dtype)}", lambda d=dtype, f=function: _measure_function(b, f, shape, d))


def _measure_function(b: Bench, function: Callable, shape, dtype: torch.dtype) -> None:
    name = function.__name__.strip("_")
    count = len(inspect.signature(function).parameters) - 2  # besides d and m
    fields = {"shape": list(shape), "dtype": _name(dtype), "direction": "forward + backward"}
    sets = _sets(lambda: tuple(b.random(*shape, dtype=dtype) for _ in range(count + 1)))
    skipping = [b.random(shape[2], dtype=dtype)] if name.startswith("skip") else []

    def step(call: Callable, tensors: tuple[Tensor, ...]) -> Callable:
        *inputs, grad = tensors
        leaves = [x.detach().requires_grad_() for x in (*inputs, *skipping)]
        return lambda: torch.autograd.grad(call(*leaves), leaves, grad)

    def plain(*inputs: Tensor) -> Tensor:
        return function(*inputs[:count], inputs[count] if skipping else None, None)

    calls = getattr(elementwise, name), plain
    (ours, how), (theirs, their_way) = (_captured_or_eager([step(call, x) for x in sets], b.device) for call in calls)
    row = b.add("elementwise", name, ours, (3 * count + 2) * sets[0][0].nbytes, **fields, timed=how)
    row["times_pytorch"] = round(ours / theirs, 4)
    b.add("elementwise", f"{name}, PyTorch's", theirs, **fields, timed=their_way)


def measure_vocabulary(b: Bench) -> None:
    """Logits, their loss and all gradients, for GPT-2's odd vocabulary and for the next multiple of 64: by the head,
    and by the same head where it does not pad its weights."""
    rows, width, sizes = (32, 16, (33, 40)) if b.tiny else (16384, 768, (50257, 50304))
    x = b.random(1, rows, width, dtype=HALF).requires_grad_()
    for size in sizes:
        projection = head.LanguageModelHead(width, size, bias=False).to(b.device, HALF)
        labels = torch.randint(size, (rows,), device=b.device)

        def step(projection=projection, labels=labels) -> None:
            logits = projection(x).flatten(0, 1).float()
            torch.autograd.grad(nn.functional.cross_entropy(logits, labels), [x, projection.weight])

        def run(step=step, size=size) -> None:
            fields = {"shape": [rows, width, size], "dtype": "bfloat16", "direction": "training step"}
            ours = eager_seconds_of(step, b.device)
            with mock.patch.object(head, "ALIGNED", 1):
                theirs = eager_seconds_of(step, b.device)
            b.add("vocabulary", "head", ours, **fields, times_pytorch=round(ours / theirs, 4))
            b.add("vocabulary", "head, unpadded", theirs, **fields)

        b.attempt(f"logits of {size} tokens", run)


def measure_heads(b: Bench) -> None:
    """GateLoop's heads of d_k x d_v states against their own bytes."""
    sizes = [(2, 32, 2, 4)] if b.tiny else [(8, 4096, 192, 8), (8, 4096, 96, 16), (8, 2048, 12, 64), (1, 2**17, 192, 8)]
    for batch, length, heads, size in sizes:
        for dtype in (FLOAT, HALF):
            for state_dtype in (torch.complex64, FLOAT):
                shape = batch, length, heads, size
                what = f"gateloop_heads_scan {shape} {_name(dtype)} {_name(state_dtype)}"
                b.attempt(what, lambda s=shape, d=dtype, a=state_dtype: _measure_heads(b, s, d, a))


def _measure_heads(b: Bench, shape, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    batch, length, heads, size = shape
    name = "gateloop_heads" if state_dtype.is_complex else "gateloop_heads, real"
    fields = {"shape": [*shape, size], "dtype": _name(dtype)}
    sets = _sets(lambda: (*(b.random(*shape, dtype=dtype) for _ in "qkv"), b.coefficients(*shape, dtype=state_dtype)))
    read, written = sum(x.nbytes for x in sets[0]), sets[0][2].nbytes
    with torch.no_grad():
        ours = seconds_of(_forward(gateloop_heads_scan, sets), b.device)
        b.add("heads", name, ours, read + written, direction="forward", **fields)
        calls = []
        for x in sets:
            final = b.random(batch, heads, size, size, dtype=state_dtype)
            arguments = (*x, None, None, None, torch.randn_like(x[2]), final, False, b.device.type)
            calls.append(lambda a=arguments: torch.ops.hf_recurrent.gateloop_heads_backward(*a))
        seconds = seconds_of(calls, b.device)
        b.add("heads", name, seconds, 2 * read + written, direction="backward", **fields)


def measure_peers(b: Bench) -> None:
    """The scans of others on the same values, forward; each ratio is their time over ours. Those of heads with real
    states are last, since Triton tunes them for minutes."""
    for package, reason in gpu_peers.absent().items():
        b.miss(package, reason)
    for shape in [(2, 64, 16)] if b.tiny else [(8, 2048, 1024), (8, 8192, 1024), (1, 65536, 1024)]:
        for dtype in (FLOAT, HALF):
            sets = _sets(functools.partial(_pair(b), shape, dtype))
            with torch.no_grad():
                ours = seconds_of(_forward(linear_scan, sets), b.device)
            for name, (layout, make) in gpu_peers.scans().items():
                what = f"{name} {shape} {_name(dtype)}"
                b.attempt(what, lambda a=(name, layout, make), s=sets, o=ours: _measure_peer(b, *a, s, o))
    for size in () if b.tiny else (8, 64):
        shape = 8, 2048, 1536 // size, size
        for dtype in (FLOAT, HALF):
            q, k, v = (b.random(*shape, dtype=dtype) for _ in "qkv")
            a = b.coefficients(*shape, dtype=FLOAT)
            logs = q, k, v, a.log()
            fields = {"shape": [*shape, size], "dtype": _name(dtype), "direction": "forward"}
            with torch.no_grad():
                ours = seconds_of([lambda x=(q, k, v, a): gateloop_heads_scan(*x)[0]], b.device)
            for name, scan in gpu_peers.heads_scans().items():

                def run(name=name, scan=scan, inputs=logs, fields=fields, ours=ours) -> None:
                    with torch.no_grad():
                        seconds = eager_seconds_of(lambda: scan(*inputs), b.device)
                    b.add("heads", name, seconds, **fields, times_ours=round(seconds / ours, 3), timed="eager")

                b.attempt(f"{name} {shape} {_name(dtype)}", run)


def _captured_or_eager(calls: list[Callable], device: torch.device) -> tuple[float, str]:
    """Seconds, and how they were measured."""
    try:
        return seconds_of(calls, device), _way_of(device)
    except RuntimeError:  # what cannot be captured into a graph is timed as it runs
        if device.type == "cuda":
            torch.cuda.synchronize()
        return eager_seconds_of(calls[0], device), "eager"


def _measure_peer(b: Bench, name: str, layout: str, make: Callable, sets, ours: float) -> None:
    scan = make()
    shape, dtype = list(sets[0][1].shape), _name(sets[0][1].dtype)
    if layout == "logs":
        sets = [(a.log(), x) for a, x in sets]
    elif layout == "channels":
        sets = [tuple(x.mT.contiguous() for x in pair) for pair in sets]
    calls = [lambda x=x: scan(*x) for x in sets]
    with torch.no_grad():
        seconds, how = _captured_or_eager(calls, b.device)
    fields = {"shape": shape, "dtype": dtype, "direction": "forward", "timed": how}
    b.add("peers", name, seconds, **fields, times_ours=round(seconds / ours, 3))


def measure_layers(b: Bench) -> None:
    """A training step of a layer against cuDNN's GRU and LSTM of the same width, batch 64, as in the paper."""
    widths, lengths, batch = ([8], [16], 2) if b.tiny else ([64, 256], [512, 4096], 64)
    for ours, theirs in ((MinGRUMixer, nn.GRU), (MinLSTMMixer, nn.LSTM)):
        for width in widths:
            for length in lengths:
                what = f"{theirs.__name__} {(batch, length, width)}"
                b.attempt(what, lambda a=(ours, theirs), s=(batch, length, width): _measure_layer(b, *a, s))


def _measure_layer(b: Bench, ours: type, theirs: type, shape) -> None:
    x, grad = (b.random(*shape, dtype=FLOAT) for _ in "xg")
    config = getattr(hf_recurrent, ours.__name__.replace("Mixer", "Config"))
    config = config(hidden_size=shape[2], expansion=1, conv_kernel=0, vocab_size=8)
    mixer, rnn = ours(config).to(b.device), theirs(shape[2], shape[2], batch_first=True).to(b.device)

    def step(module: nn.Module, call: Callable) -> Callable:
        parameters = tuple(module.parameters())
        return lambda: torch.autograd.grad(call(module), parameters, grad)

    fields = {"shape": list(shape), "dtype": "float32", "direction": "training step"}
    seconds, how = _captured_or_eager([step(mixer, lambda m: m(x, {}, None, None)[0])], b.device)
    peer, their_way = _captured_or_eager([step(rnn, lambda m: m(x)[0])], b.device)
    name, times = ours.__name__.removesuffix("Mixer"), round(peer / seconds, 2)
    b.add("layers", name, seconds, **fields, timed=how, times_faster=times)
    b.add("layers", f"nn.{theirs.__name__}", peer, **fields, timed=their_way)


def _training_step(
    b: Bench, family: str, shape, in_pieces: bool = False, compiled: bool = False, **options
) -> Callable:
    config = getattr(hf_recurrent, f"{family}Config")(**options)
    model = getattr(hf_recurrent, f"{family}ForCausalLM")(config).to(b.device, HALF).train()
    ids = torch.randint(config.vocab_size, shape, device=b.device)
    called = torch.compile(model, backend="eager" if b.tiny else "inductor") if compiled else model

    def run():
        called(input_ids=ids, labels=ids, use_cache=False, skip_logits=in_pieces).loss.backward()
        model.zero_grad(set_to_none=True)

    return run


def measure_step(b: Bench) -> None:
    """Forward and backward of models of 125M parameters in bfloat16, and of the same without recurrences."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32} if b.tiny else {}
    shape = (2, 16) if b.tiny else (8, 2048)
    # The defaults are 12 layers of 768; Longhorn's blocks have no MLP and are twice as many.
    for family, layers in (("MinGRU", 12), ("MinLSTM", 12), ("GateLoop", 12), ("Longhorn", 24)):

        def run(family: str = family, layers: int = layers) -> None:
            step = _training_step(b, family, shape, **{"num_hidden_layers": layers, **sizes})
            seconds = eager_seconds_of(step, b.device)
            product = training_steps.with_product(lambda _: step())
            without = eager_seconds_of(lambda: product(0), b.device)
            fields = {"shape": list(shape), "dtype": "bfloat16", "direction": "training step"}
            b.add("step", family, seconds, **fields, of_model_without_recurrence=round(without / seconds, 4))

        b.attempt(f"training step of {family}", run)
    # As `hf-recurrent train` has it; with --compile, which takes a minute, last.
    for what, compiled in (("loss in pieces", False), ("loss in pieces, compiled", True)):

        def run(what: str = what, compiled: bool = compiled) -> None:
            step = _training_step(b, "MinGRU", shape, in_pieces=True, compiled=compiled, **sizes)
            fields = {"shape": list(shape), "dtype": "bfloat16", "direction": "training step"}
            b.add("step", f"MinGRU, {what}", eager_seconds_of(step, b.device), **fields)

        b.attempt(f"training step of MinGRU, {what}", run)


def measure_decode(b: Bench) -> None:
    """One token for a batch: the scan of one layer, its state updated in place, captured into a graph."""
    for batch in (2,) if b.tiny else (1, 64, 512):
        channels, size = (16, 4) if b.tiny else (1536, 8)
        shape, heads = (batch, 1, channels), (batch, 1, channels // size, size)
        cells = [
            ("mingru_vanilla", mingru_scan, [(shape, HALF)] * 2, ((batch, channels), FLOAT)),
            ("gateloop_polar_sigmoid", gateloop_scan, [(shape, HALF)] * 5, ((batch, channels), torch.complex64)),
            (
                "gateloop_heads",
                gateloop_heads_scan,
                [(heads, HALF)] * 3 + [(heads, torch.complex64)],
                ((*heads[::2], size, size), torch.complex64),
            ),
        ]
        for name, scan, tensors, state_of in cells:

            def run(shape=shape, name=name, scan=scan, tensors=tensors, state_of=state_of) -> None:
                inputs = [b.random(*size, dtype=dtype) for size, dtype in tensors]
                state = b.random(*state_of[0], dtype=state_of[1])
                moved = sum(x.nbytes for x in inputs) + inputs[0].nbytes + 2 * state.nbytes
                with torch.no_grad():
                    calls = [lambda: scan(*inputs, state, update_state=True)[0]] * 20
                    seconds = seconds_of(calls, b.device)
                b.add("decode", name, seconds, moved, shape=list(shape), dtype="bfloat16", direction="forward")

            b.attempt(f"decode {name} {shape}", run)


# ---- command line ----------------------------------------------------------------------------------------------------

SECTIONS = {  # in this order: of the last, some may find no time
    "copy": measure_copy,
    "check": measure_check,
    "sanitizer": measure_sanitizer,
    "scan": measure_scan,
    "cells": measure_cells,
    "long": measure_long,
    "longhorn": measure_longhorn,
    "convolution": measure_convolution,
    "elementwise": measure_elementwise,
    "heads": measure_heads,
    "peers": measure_peers,
    "layers": measure_layers,
    "vocabulary": measure_vocabulary,
    "step": measure_step,
    "decode": measure_decode,
}
PACKAGES = ("hf-recurrent", "torch", "transformers", "cuda-core", "nvidia-cuda-nvrtc", *gpu_peers.PACKAGES)


def about(device: torch.device) -> dict:
    found = machine(PACKAGES)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "capability": list(torch.cuda.get_device_capability(device)),
            "cuda": torch.version.cuda,
        }
    else:
        found |= {"gpu": "no GPU"}
    return found


def stem_of(machine: dict) -> str:
    """What the files of a GPU's results begin with."""
    return re.sub(r"[^a-z0-9]+", "-", machine["gpu"].lower()).strip("-")


def _before(path: Path, tiny: bool) -> dict:
    """What earlier runs have found."""
    nothing = {"tiny": tiny, "runs": [], "results": [], "not_measured": {}}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict) and found.keys() == nothing.keys() and found["tiny"] is tiny:
            return found
    return nothing


def _drop(section: str, document: dict) -> None:
    for earlier in document["runs"]:
        earlier["seconds"].pop(section, None)
    document["runs"] = [earlier for earlier in document["runs"] if earlier["seconds"]]
    document["results"] = [row for row in document["results"] if row["section"] != section]
    document["not_measured"].pop(section, None)


def run(b: Bench, sections: list[str], folder: Path, command: str) -> dict:
    """Runs the sections, writing `folder`/<gpu>.json and .md (<gpu>-tiny of tiny sizes) after each, and .png at the
    end. What earlier runs have found in a section stays until it has been measured again."""
    this = {"command": command, "machine": about(b.device), "seconds": {}}
    stem = stem_of(this["machine"]) + ("-tiny" if b.tiny else "")
    before = _before(folder / f"{stem}.json", b.tiny)
    for section in sections:
        start, b.section, begun = time.monotonic(), section, b.left() >= 0
        b.attempt(section, lambda section=section: SECTIONS[section](b))
        if begun:
            this["seconds"][section] = round(time.monotonic() - start, 1)
            _drop(section, before)
        if b.copy_speed:
            this["copy_gigabytes_per_second"] = round(b.copy_speed / 1e9, 1)
        rows = before["results"] + b.results
        document = {
            "tiny": b.tiny,
            "runs": [*before["runs"], *([this] if this["seconds"] else [])],
            "results": [row for name in SECTIONS for row in rows if row["section"] == name],
            "not_measured": before["not_measured"] | b.not_measured,
        }
        texts = {"json": json.dumps(document, indent=1) + "\n", "md": gpu_report.markdown(document)}
        for suffix, text in texts.items():
            write_whole(folder / f"{stem}.{suffix}", text)
    with replacing(folder / f"{stem}.png") as path:
        gpu_report.draw(document, path)
    return document


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="examples:\n  python benchmarks/gpu.py\n  python benchmarks/gpu.py --only copy check scan\n"
        "  python benchmarks/gpu.py --device cpu --tiny --output runs/tiny      # to see that it works",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cuda (default) or cpu")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        default=list(SECTIONS),
        help="the sections to measure; the others in the results stay",
    )
    parser.add_argument("--minutes", type=float, default=7.5, help="no new measurement is begun after (default 7.5)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no CUDA device; --device cpu --tiny shows that the benchmark itself works")
    if arguments.device == "cuda" and (reason := cuda.unavailable_reason()) is not None:
        parser.error(f"the CUDA kernels do not run here, and what takes their place would be measured: {reason}")
    make_folder(parser, arguments.output)
    torch.manual_seed(0)
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    given = " ".join(sys.argv[1:] if argv is None else argv)
    b = Bench(device, arguments.tiny, arguments.minutes)
    document = run(b, arguments.only, arguments.output, f"python benchmarks/gpu.py {given}".strip())
    print(gpu_report.markdown(document))
    failures = sum(len(row["failures"]) for row in b.results if row["section"] == "check")
    return 1 if failures or any(section in missed for section, missed in b.not_measured.items()) else 0


if __name__ == "__main__":
    sys.exit(main())
