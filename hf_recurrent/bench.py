"""The short benchmark behind `hf-recurrent bench`: each scan against the time that memory alone would take."""

import importlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .measure import paired
from .scan import gateloop_heads_scan, gateloop_scan, linear_scan, longhorn_scan, mingru_scan, minlstm_scan, s5_scan
from .scan.convolution import _short_convolution, short_convolution
from .scan.elementwise import _skip_silu_gate, skip_silu_gate
from .versions import version_of

PASSES = ("forward", "backward")
INPUT_SETS = 3  # used in turn: no call finds its input in a cache because the call before has just read it
LARGE = 2**28  # bytes of a tensor of which no cache holds anything from one call to the next: one set is enough
STATE_SIZE = 16  # of Longhorn
TAPS = 4  # of the short convolution
HEAD_SIZE = 8  # of GateLoop; where it does not divide the channels, what divides both


@dataclass(frozen=True)
class Case:
    """
    One scan.

    Args:
        name: as the tables have it.
        inputs: shape, dtype, device -> the tensors that the scan takes.
        function: these tensors -> (B, L, D) outputs.
        moved: tensors of the output's size that forward, and backward, must read or write, each counted once. What is
            smaller by a dimension is left out; so is what forward keeps for backward, of which it is timed without.
        complex: the dtypes are complex, made of two numbers of the dtype named.
    """

    name: str
    inputs: Callable[[tuple[int, ...], torch.dtype, torch.device], tuple[Tensor, ...]]
    function: Callable[..., Tensor]
    moved: tuple[int, int]
    complex: bool = False


def _normal(count: int) -> Callable:
    def make(shape, dtype, device):
        return tuple(torch.randn(shape, device=device).to(dtype) for _ in range(count))

    return make


def _decays(shape, dtype, device) -> Tensor:
    return (torch.rand(shape, device=device) * 0.98 + 0.01).to(dtype)


def _real_scan(shape, dtype, device):
    return _decays(shape, dtype, device), *_normal(1)(shape, dtype, device)


def _turns(shape, device) -> Tensor:
    """Complex numbers of modulus below 1."""
    return torch.polar(_decays(shape, torch.float32, device), torch.randn(shape, device=device))


def _complex_scan(shape, dtype, device):
    return _turns(shape, device), torch.randn(shape, dtype=torch.complex64, device=device)


def _constant_scan(shape, dtype, device):
    return _turns(shape[-1:], device), torch.randn(shape, dtype=torch.complex64, device=device)


def _irregular(shape, dtype, device):
    rate = torch.complex(-torch.rand(shape[-1], device=device), torch.randn(shape[-1], device=device))
    return torch.randn(shape, dtype=torch.complex64, device=device), rate, torch.rand(shape[:2], device=device)


def _longhorn(shape, dtype, device):
    x, dt = _normal(2)(shape, dtype, device)
    return x, dt, *_normal(2)((*shape[:2], STATE_SIZE), dtype, device)


def _convolution(shape, dtype, device):
    (weight,) = _normal(1)((shape[-1], 1, TAPS), dtype, device)
    return *_normal(1)(shape, dtype, device), weight, *_normal(1)(shape[-1:], dtype, device)


def _skipped(shape, dtype, device):
    return *_normal(3)(shape, dtype, device), *_normal(1)(shape[-1:], dtype, device)


def _heads(shape, dtype, device):
    """q, k, v, and one transition for each head, as the released package has them."""
    batch, length, channels = shape
    size = math.gcd(HEAD_SIZE, channels)
    heads = batch, length, channels // size
    return *_normal(3)((*heads, size), dtype, device), _turns((*heads, 1), device)


def _first(function: Callable, **options) -> Callable[..., Tensor]:
    return lambda *inputs: function(*inputs, **options)[0]


CASES = (
    Case("linear_scan", _real_scan, _first(linear_scan), (3, 5)),
    Case("minGRU cell", _normal(2), _first(mingru_scan), (3, 6)),
    Case("minGRU cell, positive", _normal(2), _first(mingru_scan, positive=True), (3, 6)),
    Case("minLSTM cell", _normal(3), _first(minlstm_scan), (4, 8)),
    Case("minLSTM cell, positive", _normal(3), _first(minlstm_scan, positive=True), (4, 8)),
    Case("GateLoop cell", _normal(5), _first(gateloop_scan), (6, 13)),
    Case(
        f"GateLoop cell, heads of {HEAD_SIZE} x {HEAD_SIZE}",
        _heads,
        lambda *inputs: gateloop_heads_scan(*inputs)[0].flatten(2),
        (4, 7),
    ),
    Case("linear_scan, complex", _complex_scan, _first(linear_scan), (3, 5), complex=True),
    Case("linear_scan, constant complex a (S5)", _constant_scan, _first(linear_scan), (2, 3), complex=True),
    Case("S5 cell, per-step", _irregular, _first(s5_scan), (2, 4), complex=True),
    Case(f"Longhorn cell, m = {STATE_SIZE}", _longhorn, _first(longhorn_scan), (3, 5)),
    Case(f"short convolution, {TAPS} taps, SiLU", _convolution, _first(short_convolution, silu=True), (2, 3)),
    Case("short convolution, in plain PyTorch", _convolution, _first(_short_convolution, silu=True), (2, 3)),
    Case("skip and SiLU gate", _skipped, skip_silu_gate, (4, 7)),
    Case("skip and SiLU gate, in plain PyTorch", _skipped, _skip_silu_gate, (4, 7)),
)
DTYPES = (torch.float32, torch.bfloat16)


# Distributions with a scan of the same recurrence, and the module that has it.
PEERS = {"mambapy": "mambapy.pscan", "gateloop-transformer": "gateloop_transformer.associative_scan"}


def optional_module(package: str, module: str):
    """A module of a distribution, or None where that is not installed."""
    if version_of(package) is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it still uses of PyTorch is its authors' concern
        return importlib.import_module(module)


def plain_loop(a: Tensor, b: Tensor) -> Tensor:
    """What one writes first: a loop over time in PyTorch."""
    h, outputs = torch.zeros_like(b[:, 0]), []
    for a_t, b_t in zip(a.unbind(1), b.unbind(1), strict=True):
        h = a_t * h + b_t
        outputs.append(h)
    return torch.stack(outputs, dim=1)


def _combine(first, second):
    (a, h), (next_a, next_h) = first, second
    return next_a * a, torch.addcmul(next_h, next_a, h)


def peer_scans() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """name -> a function of (a, b), each (B, L, D), that gives h, for the plain loop and the peers installed."""
    found = {"plain loop": plain_loop}
    modules = {package: optional_module(package, module) for package, module in PEERS.items()}
    if pscan := modules["mambapy"]:
        found["mambapy pscan"] = lambda a, b: pscan.pscan(a[..., None], b[..., None])[..., 0]
    if gateloop := modules["gateloop-transformer"]:
        found["gateloop-transformer scan"] = lambda a, b: gateloop.associative_scan(_combine, (a, b))[1]
    return found


def _waiting(function: Callable[[int], object], device: torch.device) -> Callable[[int], object]:
    """`function`, which returns when the device has done what it asks for."""
    if device.type == "cpu":
        return function

    def run(index: int) -> None:
        function(index)
        torch.accelerator.synchronize(device)

    return run


def forward_of(function: Callable, inputs: list[tuple[Tensor, ...]]) -> Callable[[int], object]:
    """Forward alone, of one set of inputs after the other."""

    def run(index: int) -> None:
        with torch.no_grad():
            function(*inputs[index % len(inputs)])

    return run


def backward_of(function: Callable, inputs: list[tuple[Tensor, ...]]) -> Callable[[int], object]:
    """Backward alone, of outputs that are computed here, once."""
    for x in (x for one in inputs for x in one):
        x.requires_grad_()
    outputs = [function(*x) for x in inputs]
    grads = [torch.randn_like(y) for y in outputs]

    def run(index: int) -> None:
        index %= len(inputs)
        torch.autograd.grad(outputs[index], inputs[index], grads[index], retain_graph=True)

    return run


def measure_case(
    case: Case, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, rounds: int
) -> Iterator[dict]:
    """
    Times forward and backward of `case`, each run next to one of torch.add on tensors of the same shape and `dtype`.

    Yields:
        for each pass: name, shape, dtype, pass, milliseconds, limit_milliseconds (of torch.add, scaled by the bytes
        that the pass must move), ratio (of the two, the median over the pairs) and gigabytes_per_second.
    """
    sets = 1 if math.prod(shape) * dtype.itemsize >= LARGE else INPUT_SETS
    inputs = [case.inputs(shape, dtype, device) for _ in range(sets)]
    # Always real: torch.add is slower on complex tensors than their bytes make it.
    pairs = [_normal(2)(shape, dtype, device) for _ in range(sets)]
    add = _waiting(forward_of(torch.add, pairs), device)
    for name, moved, make in zip(PASSES, case.moved, (forward_of, backward_of), strict=True):
        candidate = _waiting(make(case.function, inputs), device)
        moved *= 2 if case.complex else 1
        timing = paired(add, {case.name: candidate}, rounds, moved / 3, f"{case.name} {name}")[case.name]
        summary = timing.summary()
        moved_bytes = moved * pairs[0][0].nbytes
        yield {
            "name": case.name,
            "shape": list(shape),
            "dtype": "complex64" if case.complex else str(dtype).removeprefix("torch."),
            "pass": name,
            **summary,
            "limit_milliseconds": round(summary["milliseconds"] / summary["ratio"], 4),
            "gigabytes_per_second": round(moved_bytes / summary["milliseconds"] / 1e6, 2),
        }
