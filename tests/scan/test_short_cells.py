"""The fused cells in 16 bits, whose exponentials are less exact than float32's: how exact, for every number there is
and over long sequences; and the conversions."""

import ctypes
import math
import subprocess

import pytest
import torch
from oracle import CELLS, GATELOOP_CELLS, linear, random, run

from hf_recurrent.scan import cpu, kernel_cache

TRANSITIONS = ["gateloop_polar_sigmoid", "gateloop_real_exponential"]
SHORT = [torch.bfloat16, torch.float16]
EXPONENTIAL = 3e-5  # of an exponential, and of a weight near zero or one, relative to itself or to what is left to one
CLAMPED = 1e-37  # gates beyond +-87 are taken for +-87, and a bfloat16 below 1.2e-38 for zero
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
ORACLE = 1e-15  # of five times PyTorch's derivative of a sigmoid that has rounded to one: zero
LEAST = {torch.bfloat16: CLAMPED, torch.float16: 2**-24}


def every_number(dtype: torch.dtype) -> torch.Tensor:
    """All 65536, as one position's channels."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(1, 1, -1)


def both_orders(x: torch.Tensor):
    """Numbers in the order of their bits, alike in size, and shuffled, so that every vector has extreme ones."""
    torch.manual_seed(0)
    return x, x[..., torch.randperm(x.shape[-1])]


def wanted(scan, inputs, state, weights):
    return run(scan, [x.double() for x in inputs], state.double(), [w.double() for w in weights], backend="reference")


def within(got, want, relative, absolute):
    error = (got.double() - want).abs()
    excess = error - relative * want.abs() - absolute
    worst = excess.flatten().argmax()
    assert (excess <= 0).all(), f"{got.flatten()[worst]} for {want.flatten()[worst]}"


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_every_gate(cell, dtype):
    """The weights of the state and of what enters, and all gradients, each relative to itself, for every gate."""
    scan, count = CELLS[cell]
    for gate in both_orders(every_number(dtype)[every_number(dtype).isfinite()].view(1, 1, -1)):
        other = random(*gate.shape, dtype=dtype) if count == 3 else None
        for k in range(1, count):
            gates = [gate] if count == 2 else [gate, other] if k == 1 else [other, gate]
            for candidate, before in ((-0.5 if "positive" in cell else 1.0, 0.0), (0.0, 1.0), (-2.0, 3.0)):
                hidden = torch.full_like(gate, candidate)
                state = torch.full((1, gate.shape[2]), before)
                weights = torch.ones_like(gate), torch.zeros_like(state)
                got = run(scan, [hidden, *gates], state, weights, backend="cpu")
                want = wanted(scan, [hidden, *gates], state, weights)
                # Where two terms cancel, an error is a fraction of them.
                size = max(abs(candidate), before, 1) if candidate and before else 0
                within(got[1], want[1], 2 * EXPONENTIAL, 2 * EXPONENTIAL * size + CLAMPED)
                within(got[0], want[0], ROUNDING[dtype] + 2 * EXPONENTIAL, 2 * EXPONENTIAL * size + LEAST[dtype])
                for x, y in zip(got[2:-1], want[2:-1], strict=True):
                    within(x, y, ROUNDING[dtype] + 4 * EXPONENTIAL, max(LEAST[dtype], ORACLE))
                within(got[-1], want[-1], 2 * EXPONENTIAL, CLAMPED)


@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_every_candidate(dtype):
    """minGRU's positive candidate, and its slope."""
    for hidden in both_orders(every_number(dtype)[every_number(dtype).isfinite()].view(1, 1, -1)):
        gate, state = torch.full_like(hidden, 6), torch.zeros(1, hidden.shape[2])
        weights = torch.ones_like(hidden), torch.zeros_like(state)
        got = run(CELLS["mingru_positive"][0], [hidden, gate], state, weights, backend="cpu")
        want = wanted(CELLS["mingru_positive"][0], [hidden, gate], state, weights)
        for x, y in zip(got[1:3], want[1:3], strict=True):
            within(x, y, ROUNDING[dtype] + 4 * EXPONENTIAL, max(LEAST[dtype], ORACLE))


@pytest.mark.parametrize("cell", TRANSITIONS)
@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_every_transition(cell, dtype):
    """GateLoop's coefficient for every magnitude and every angle up to 2^20: to a fraction of its size, and of what is
    left to one."""

    scan, count = GATELOOP_CELLS[cell]
    for number in both_orders(every_number(dtype)[every_number(dtype).isfinite()].view(1, 1, -1)):
        angle = torch.where(number.abs() < 2**20, number, 0).flip(-1)
        one, zero = torch.ones_like(number), torch.zeros_like(number)
        state = torch.ones(1, number.shape[2], dtype=torch.complex64 if "polar" in cell else torch.float32)
        inputs = [one, zero, one, number, angle][:count]
        final = scan(*inputs, state, backend="cpu")[1]
        wide = torch.complex128 if "polar" in cell else torch.float64
        want = scan(*[x.double() for x in inputs], state.to(wide), backend="reference")[1]
        assert (
            (final.abs() - want.abs()).abs() <= EXPONENTIAL * torch.minimum(want.abs(), 1 - want.abs()) + 2e-7
        ).all()
        if "polar" in cell:  # the angle, to floats' precision
            turned = (final / final.abs().clamp(1e-30) - want / want.abs().clamp(1e-30)).abs()
            limit = 1e-6 if "tanh" not in cell else 4e-6 + 4 * EXPONENTIAL
            assert (turned <= limit)[want.abs() > 1e-30].all()


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_errors_do_not_grow(cell, dtype):
    """A gate that stays as it is errs in the same direction at all steps. Over memories of one to 160,000 steps the
    state is after thousands of steps what it should be, as closely as after a few, but for float32's own rounding."""
    scan, count = CELLS[cell]
    steps, levels = 4097, torch.linspace(-12, 12, 385).to(dtype)
    gates = [levels.expand(1, steps, -1).contiguous()]
    if count == 3:
        gates.append(-gates[0])
    hidden = torch.linspace(-2, 2, steps).view(1, -1, 1).expand(gates[0].shape).contiguous().to(dtype)
    inputs, state = [hidden, *gates], torch.full((1, len(levels)), 1.5)
    want = scan(*(x.double() for x in inputs), state.double(), backend="reference")[0]
    rounding = (scan(*(x.float() for x in inputs), state, backend="cpu")[0].double() - want).abs()
    for begin in range(0, steps, 256):
        part = slice(begin, begin + 256)
        _, state = scan(*(x[:, part] for x in inputs), state, backend="cpu")
        error = (state.double() - want[:, part][:, -1]).abs()
        assert error.max() <= 2 * EXPONENTIAL + 1.5 * rounding[:, part].max()


@pytest.mark.parametrize("dtype", [torch.float32, *SHORT], ids=str)
@pytest.mark.parametrize("cell", [*CELLS, *GATELOOP_CELLS])
def test_a_large_gate_changes_no_other_channel(cell, dtype):
    """Chunks without large gates are computed without clamps: to the same numbers, but for the rounding of loops that
    were compiled apart."""
    scan, count = (CELLS | GATELOOP_CELLS)[cell]
    torch.manual_seed(0)
    inputs = [random(2, 9, 70, dtype=dtype) for _ in range(count)]
    weights = random(2, 9, 70, dtype=torch.float32), random(2, 70, dtype=torch.float32)
    others, roundings = torch.arange(70) != 5, {torch.float32: 2**-21} | ROUNDING
    small = run(scan, inputs, None, weights, backend="cpu")
    for size in (60.0, -90.0):
        first_gate = {**dict.fromkeys(CELLS, 1), **dict.fromkeys(GATELOOP_CELLS, 3)}[cell]
        gates = [x if n < first_gate else torch.where(others, x, size) for n, x in enumerate(inputs)]
        for large, x in zip(run(scan, gates, None, weights, backend="cpu"), small, strict=True):
            torch.testing.assert_close(large[..., others], x[..., others], rtol=2 * roundings[dtype], atol=2e-6)


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("cell", [*CELLS, *TRANSITIONS])
def test_what_is_not_finite_is_as_in_float32(cell, dtype):
    scan, count = {**CELLS, **GATELOOP_CELLS}[cell]
    extremes = torch.tensor([-math.inf, -6e4, -88, -41, -1, 0, 2, 41, 88, 6e4, math.inf, math.nan]).to(dtype)
    inputs = [x.flatten().view(1, 1, -1) for x in torch.meshgrid(*[extremes] * 3, indexing="ij")]
    inputs += [torch.ones_like(inputs[0])] * (count - 3)
    inputs = inputs[:count]
    if "gateloop" in cell:
        inputs = [*inputs[3:], *inputs[:3]][:count]  # gates are last
    complex_state = "gateloop" in cell and "real" not in cell
    state = torch.ones(1, inputs[0].shape[2], dtype=torch.complex64 if complex_state else torch.float32)
    got, want = (scan(*(x.to(t) for x in inputs), state, backend="cpu")[0] for t in (dtype, torch.float32))
    want = want.to(dtype).float()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    finite = want.isfinite()
    torch.testing.assert_close(got.float()[finite], want[finite], rtol=4 * ROUNDING[dtype], atol=1e-4)


# ---- conversions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_scans_convert_as_pytorch_does(dtype):
    """Every 16-bit number in, and float32 of every kind out."""
    numbers = every_number(dtype)
    _, final = linear(torch.zeros_like(numbers), numbers, backend="cpu")
    torch.testing.assert_close(final[0], numbers[0, 0].float(), rtol=0, atol=0, equal_nan=True)
    bits = torch.cat(
        [
            torch.randint(-(2**31), 2**31, (3000,)),
            torch.arange(-3, 4) + 0x3F808000,
            torch.arange(0x7F7FFFF0, 0x7F800010),
        ]
    )
    floats = torch.cat(
        [bits.to(torch.int32).view(torch.float32), random(77, dtype=torch.float32), numbers[0, 0, ::50].float() * 1.01]
    )
    h, _ = linear(
        torch.ones(dtype=dtype, size=(1, 1, len(floats))),
        torch.zeros(1, 1, len(floats), dtype=dtype),
        floats[None],
        backend="cpu",
    )
    torch.testing.assert_close(h[0, 0], floats.to(dtype), rtol=0, atol=CLAMPED, equal_nan=True)


CONVERSIONS = """
#include "convert_cpu.h"
extern "C" void to_bfloat16(const float* x, hfr::BFloat16* y, int64_t n) { narrow(x, y, n); }
extern "C" void to_float16(const float* x, hfr::Float16* y, int64_t n) { narrow(x, y, n); }
extern "C" void from_float16(const hfr::Float16* x, float* y, int64_t n) { widen(x, y, n); }
"""


@pytest.mark.parametrize("flags", [["-march=native"], ["-march=native", "-mno-avx512f"], []], ids=" ".join)
def test_conversions_with_other_instructions(flags, tmp_path):
    if "-mno-avx512f" in flags and cpu.platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("an option of x86 compilers")
    source, library = tmp_path / "conversions.cpp", tmp_path / "conversions.so"
    source.write_text(CONVERSIONS)
    command = [*cpu._compiler(), "-std=c++17", "-O1", "-shared", "-fPIC", *flags, f"-I{kernel_cache.SOURCES}"]
    subprocess.run([*command, "-o", library, source], check=True)
    functions = ctypes.CDLL(str(library))

    def call(name, x, dtype):
        y = torch.full((len(x) + 1,), 7, dtype=dtype)
        getattr(functions, name)(*map(ctypes.c_void_p, (x.data_ptr(), y.data_ptr())), ctypes.c_int64(len(x)))
        assert y[-1] == 7  # nothing is written beyond the row
        return y[:-1]

    halves = every_number(torch.float16).flatten()
    torch.testing.assert_close(
        call("from_float16", halves, torch.float32), halves.float(), rtol=0, atol=0, equal_nan=True
    )
    torch.manual_seed(0)
    for length in (1, 15, 16, 17, 31, 33, 4099):
        floats = torch.randint(-(2**31), 2**31, (length,)).to(torch.int32).view(torch.float32)
        for name, dtype in (("to_bfloat16", torch.bfloat16), ("to_float16", torch.float16)):
            got = call(name, floats, dtype)
            torch.testing.assert_close(got, floats.to(dtype), rtol=0, atol=CLAMPED, equal_nan=True)
