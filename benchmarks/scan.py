"""How close the scans come to the speed of memory, and how they compare with the peers from the package index.

Every figure is a ratio of paired runs: a candidate's time divided by the time of its limit measured just before it. The
limit of a scan is torch.add on tensors of the same shape and dtype, which reads two and writes one as the forward scan
does; where backward moves more bytes (counted once each), the limit's time is scaled by the bytes. benchmarks/README.md
says what each section measures and why.
"""

import argparse
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import peers
import report
import training_steps
from hf_recurrent.measure import can_measure_peaks, machine, make_folder, paired, peak_bytes, positive
from hf_recurrent.scan import available_backends, linear_scan, mingru_scan

# Tensors moved, each counted once: forward reads a and b and writes h; backward reads dh, a and h and writes da and db
# (the minGRU cell reads dh, hidden, gate and h, and writes two).
FORWARD, SCAN_BOTH, CELL_BOTH = 3, 8, 9
INPUT_SETS = 3
FOOTPRINT = 2**27  # bytes of inputs that no processor's cache holds


class Measurement:
    """The settings of one run of this script and what it has found so far."""

    def __init__(self, quick: bool, repeats: int, all_peers: bool):
        self.quick, self.repeats, self.all_peers = quick, repeats, all_peers
        self.shapes = [(2, 256, 64), (1, 2048, 32)] if quick else [(8, 1024, 768), (1, 65536, 256)]
        self.step_shape = (2, 64) if quick else (8, 256)
        self.lengths = [2**k for k in (range(8, 12) if quick else range(10, 17))]
        self.length_channels = 32 if quick else 768
        self.results: list[dict] = []
        self.not_measured = peers.absent()

    def add(self, section: str, shape, dtype: str, passes: str, timings: dict, errors: dict | None = None) -> None:
        for name, timing in timings.items():
            row = {"section": section, "shape": list(shape), "dtype": dtype, "pass": passes, "name": name}
            row |= timing.summary()
            if errors:
                row["error"] = errors[name]
            self.results.append(row)


def _forward(function: Callable, inputs: list[tuple[Tensor, ...]]) -> Callable[[int], None]:
    def run(index):
        with torch.no_grad():
            function(*inputs[index % len(inputs)])

    return run


def _forward_backward(function: Callable, inputs: list[tuple[Tensor, ...]], grads: list[Tensor]) -> Callable:
    def run(index):
        x = inputs[index % len(inputs)]
        torch.autograd.grad(function(*x), x, grads[index % len(grads)])

    return run


def _error(function: Callable, inputs: tuple[Tensor, ...], expected: Tensor) -> float:
    """The largest deviation from the loop in float64, relative to its largest value."""
    with torch.no_grad():
        got = function(*inputs).double()
    return float(f"{((got - expected).abs().max() / expected.abs().max()).item():.2e}")


def _measure_both(m: Measurement, section: str, candidates: dict, inputs: dict, expected: Tensor, both: int) -> None:
    """Forward, and forward + backward, of candidates: name -> (kind of inputs, function).

    inputs: kind -> sets of tensors; the limit adds those of the kind "pair". expected: (B, L, D), what every candidate
    computes of its first set. both: the tensors that forward + backward moves.
    """
    shape, dtype = tuple(expected.shape), inputs["pair"][0][0].dtype
    dtype_name = str(dtype).removeprefix("torch.")
    for x in (x for sets in inputs.values() for one in sets for x in one):
        x.requires_grad_()
    grads = [torch.randn(shape).to(dtype) for _ in range(INPUT_SETS)]
    errors = {name: _error(function, inputs[kind][0], expected) for name, (kind, function) in candidates.items()}
    limit = _forward(torch.add, inputs["pair"])
    forward = {name: _forward(function, inputs[kind]) for name, (kind, function) in candidates.items()}
    backward = {name: _forward_backward(function, inputs[kind], grads) for name, (kind, function) in candidates.items()}
    for passes, functions, moved in zip(report.PASSES, (forward, backward), (FORWARD, both), strict=True):
        timings = paired(limit, functions, m.repeats, moved / FORWARD, f"{section} {shape} {dtype_name} {passes}")
        m.add(section, shape, dtype_name, passes, timings, errors)


def _backends(function: Callable, name: str) -> dict[str, tuple[str, Callable]]:
    """A candidate for the backend chosen by default, and one for the pure PyTorch fallback where that is another."""
    candidates = {name: ("pair", lambda *x: function(*x)[0])}
    if "cpu" in available_backends():
        candidates[f"{name}, chunked"] = ("pair", lambda *x: function(*x, backend="chunked")[0])
    return candidates


def measure_scan(m: Measurement) -> None:
    """linear_scan on each backend, the plain loop and the peers' scans."""
    candidates = _backends(linear_scan, "linear_scan") | peers.scans()
    for shape in m.shapes:
        for dtype in (torch.float32, torch.bfloat16):
            # Coefficients of a minGRU lie between 0 and 1; positive inputs let the scan of logarithms take part.
            pairs = [tuple((torch.rand(shape) * 0.98 + 0.01).to(dtype) for _ in "ab") for _ in range(INPUT_SETS)]
            expected, _ = linear_scan(*(x.double() for x in pairs[0]), backend="reference")
            inputs = {"pair": pairs, "logs": [tuple(x.log() for x in pair) for pair in pairs]}
            _measure_both(m, "scan", candidates, inputs, expected, SCAN_BOTH)


def measure_cell(m: Measurement) -> None:
    """The fused minGRU cell in both variants, and minGRU-pytorch's core, which is the positive one."""
    vanilla, positive = (functools.partial(mingru_scan, positive=positive) for positive in (False, True))
    core = peers.mingru_pytorch_core()
    core_candidate = {"minGRU-pytorch core": ("joined", core)} if core else {}
    for shape in m.shapes:
        for dtype in (torch.float32, torch.bfloat16):
            pairs = [tuple(torch.randn(shape).to(dtype) for _ in "hg") for _ in range(INPUT_SETS)]
            inputs = {"pair": pairs, "joined": [(torch.cat(pair, dim=-1),) for pair in pairs]}
            for function, candidates in (
                (vanilla, _backends(vanilla, "mingru_scan vanilla")),
                (positive, _backends(positive, "mingru_scan positive") | core_candidate),
            ):
                expected, _ = function(*(x.double() for x in pairs[0]), backend="reference")
                _measure_both(m, "cell", candidates, inputs, expected, CELL_BOTH)
            if core and dtype is torch.float32:
                functions = {"minGRU-pytorch core": _forward(core, inputs["joined"])}
                timings = paired(_forward(positive, pairs), functions, m.repeats, title=f"core {shape} forward")
                m.add("core", shape, "float32", "forward", timings)


# ---- the paper's Shakespeare model -----------------------------------------------------------------------------------


def _models(all_peers: bool) -> dict[str, Callable[[], torch.nn.Module]]:
    return {"hf_recurrent minGRU": training_steps.minimal("MinGRU")} | peers.models(all_peers)


def _training_step(model: torch.nn.Module, batches: list[Tensor]) -> Callable[[int], None]:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)

    def run(index):
        model(batches[index % len(batches)]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def measure_step(m: Measurement) -> None:
    """Forward, loss, backward and AdamW step of each model on the same batches of random characters."""
    batches = [torch.randint(peers.VOCABULARY, m.step_shape) for _ in range(INPUT_SETS)]
    ours = training_steps.minimal("MinGRU")
    limit = training_steps.with_product(_training_step(ours(), batches))
    candidates = {name: _training_step(build(), batches) for name, build in _models(m.all_peers).items()}
    candidates["matrix products alone"] = training_steps.matrix_products(ours(), batches[0].numel())
    timings = paired(limit, candidates, m.repeats, title=f"training step {m.step_shape}")
    m.add("step", m.step_shape, "float32", "training step", timings)


def measure_families(m: Measurement) -> None:
    """A training step of each family against the same with a product for its recurrence, and against its bare matrix
    products (which are all that the peer is measured against)."""
    batches = [torch.randint(peers.VOCABULARY, m.step_shape) for _ in range(INPUT_SETS)]
    for name, build in training_steps.models(m.all_peers).items():
        step = _training_step(build(), batches)
        limits = {"products": training_steps.matrix_products(build(), batches[0].numel())}
        if name in training_steps.OURS:
            limits["families"] = training_steps.with_product(_training_step(build(), batches))
        for section, limit in limits.items():
            timings = paired(limit, {name: step}, m.repeats, title=f"{name} {m.step_shape}")
            m.add(section, m.step_shape, "float32", "training step", timings)


# ---- peak memory -----------------------------------------------------------------------------------------------------

MEMORY_MODELS = ("hf_recurrent minGRU", "minGRU-pytorch minLM")


def peak_memory(name: str, shape: tuple[int, int]) -> float:
    """MiB of resident memory that three training steps take at their peak, beyond the process with its model built."""
    model = _models(all_peers=False)[name]()
    step = _training_step(model, [torch.randint(peers.VOCABULARY, shape)])

    def steps():
        for index in range(3):
            step(index)

    return peak_bytes(steps) / 2**20


def measure_memory(m: Measurement) -> None:
    """Each model in a process of its own, so that none inherits the memory that another has left behind."""
    if not can_measure_peaks():
        m.not_measured["peak memory"] = "needs the /proc of Linux"
        return
    for name in MEMORY_MODELS:
        if name not in _models(all_peers=False):
            continue
        command = [sys.executable, __file__, "--peak-memory-of", name, "--threads", str(torch.get_num_threads())]
        command += ["--quick"] if m.quick else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        row = {"section": "memory", "name": name, "shape": list(m.step_shape)}
        m.results.append(row | {"mebibytes": json.loads(done.stdout)})


# ---- time over length ------------------------------------------------------------------------------------------------


def measure_length(m: Measurement) -> None:
    """Time over length at a fixed width; torch.add beside it shows what caches and the allocator do to any function."""
    functions = {
        "torch.add": torch.add,
        "linear_scan": lambda a, b: linear_scan(a, b)[0],
        "mingru_scan positive": lambda hidden, gate: mingru_scan(hidden, gate, positive=True)[0],
    }
    medians: dict[str, list[float]] = {name: [] for name in functions}
    for length in m.lengths:
        shape = (1, length, m.length_channels)
        # Enough sets that the inputs of every length come from memory, not from a cache.
        sets = max(2, -(-FOOTPRINT // (8 * length * m.length_channels)))
        inputs = [(torch.rand(shape), torch.rand(shape)) for _ in range(sets)]
        candidates = {name: _forward(function, inputs) for name, function in functions.items()}
        for name, timing in paired(candidates["torch.add"], candidates, m.repeats, title=f"length {length}").items():
            medians[name].append(timing.summary()["milliseconds"])
    for name, milliseconds in medians.items():
        exponent = float(np.polyfit(np.log(m.lengths), np.log(milliseconds), 1)[0])
        row = {"section": "length", "name": name, "channels": m.length_channels, "lengths": m.lengths}
        m.results.append(row | {"milliseconds": milliseconds, "exponent": round(exponent, 4)})


# ---- command line ----------------------------------------------------------------------------------------------------

MEASURES = {
    "scan": measure_scan,
    "cell": measure_cell,
    "step": measure_step,
    "families": measure_families,
    "memory": measure_memory,
    "length": measure_length,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="examples:\n  python benchmarks/scan.py --quick\n  python benchmarks/scan.py --only scan cell",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few rounds, to see that it works")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES), help="the sections to measure")
    parser.add_argument("--repeats", type=positive, help="rounds of paired runs (default 21; 3 with --quick)")
    parser.add_argument("--threads", type=positive, help="threads of PyTorch and of the kernels (default: PyTorch's)")
    parser.add_argument(
        "--all-peers", action="store_true", help="also the slowest peer, Transformers' Mamba with mambapy"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/benchmarks"), help="folder of scan.json, .md and .png"
    )
    parser.add_argument("--peak-memory-of", choices=MEMORY_MODELS, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    m = Measurement(arguments.quick, arguments.repeats or (3 if arguments.quick else 21), arguments.all_peers)
    if arguments.peak_memory_of:
        print(json.dumps(peak_memory(arguments.peak_memory_of, m.step_shape)))
        return
    make_folder(parser, arguments.output)
    for section in arguments.only:
        MEASURES[section](m)
    flags = [name for name, given in (("--quick", m.quick), ("--all-peers", m.all_peers)) if given]
    if arguments.only != list(MEASURES):
        flags += ["--only", *arguments.only]
    document = {
        "command": " ".join(["python benchmarks/scan.py", *flags, f"--repeats {m.repeats}"]),
        "quick": m.quick,
        "machine": machine(("hf-recurrent", "torch", "transformers", "numpy", *peers.PACKAGES)),
        "results": m.results,
        "not_measured": m.not_measured,
    }
    report.save(document, arguments.output)
    print(report.markdown(document))
    print(f"Written: {arguments.output / 'scan.json'}, scan.md and scan.png")


if __name__ == "__main__":
    main()
