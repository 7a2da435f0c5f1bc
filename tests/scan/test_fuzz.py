"""Random shapes, strides, masks and options of every scan against the float64 loop.

HF_RECURRENT_FUZZ sets the number of examples of each test.
"""

import os

import oracle
import pytest
import test_convolution
import test_gateloop_heads
import test_gateloop_scan
import test_longhorn_scan
import test_s5_scan
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from hf_recurrent.scan.cells import BY_NAME

EXAMPLES = int(os.environ.get("HF_RECURRENT_FUZZ", "40"))
fuzz = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES <= 40, suppress_health_check=list(HealthCheck)
)
LAYOUTS = ["contiguous", "slice of a projection", "every other channel", "time first", "channels first", "offset"]


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in memory of another order."""
    batch, length, channels = x.shape
    if layout == "slice of a projection":
        return torch.cat([x, x, x], dim=2)[..., channels : 2 * channels]
    if layout == "every other channel":
        return x.repeat_interleave(2, dim=2)[..., ::2]
    if layout == "time first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "channels first":
        return x.mT.contiguous().mT
    if layout == "offset":  # rows that start on no cache line
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    return x


@st.composite
def problems(draw):
    """Sizes, layouts, options and threads. Batches of one and lengths of 1024 and more may be divided in time."""
    batch = draw(st.integers(1, 5))
    channels = draw(st.one_of(st.integers(1, 70), st.sampled_from([128, 777])))
    long = channels < 71 and draw(st.integers(0, 9)) == 0
    length = 1100 if long else draw(st.integers(1, 80))
    options = {"reverse": draw(st.booleans())}
    torch.manual_seed(draw(st.integers(0, 2**31)))
    mask, reset = oracle.mask_and_reset(batch, length)
    options["mask"] = mask if draw(st.booleans()) else None
    options["reset"] = reset if draw(st.booleans()) else None
    layouts = [draw(st.sampled_from(LAYOUTS)) for _ in range(4)]
    threads, with_state = draw(st.integers(1, 4)), draw(st.booleans())
    note(f"{(batch, length, channels)} {layouts} {threads} threads, {options}")
    return (batch, length, channels), layouts, options, threads, with_state


@pytest.fixture(autouse=True)
def threads_restored():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@fuzz
@given(
    problems(),
    st.sampled_from(["linear", *oracle.CELLS]),
    st.sampled_from(oracle.REALS + oracle.COMPLEX),
    st.sampled_from(["chunked", "cpu"]),
    st.sampled_from([None, (1, 1, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]),
)
def test_scans(problem, cell, dtype, backend, constant):
    """`constant`: over which dimensions the linear scan's coefficients are broadcast, as 0."""
    shape, layouts, options, threads, with_state = problem
    torch.set_num_threads(threads)
    if dtype.is_complex:
        cell = "linear"
    scan, count = oracle.CELLS.get(cell, (oracle.linear, 2))
    inputs = [3 * oracle.random(*shape, dtype=dtype) for _ in range(count)]
    if cell == "linear":
        # The gradient of a constant is a sum over all positions: of many, it leaves float16's range.
        kept = (1, 1, 1) if constant is None or (dtype == torch.float16 and shape[1] > 80) else constant
        inputs[0] = oracle.coefficients(*(n if keep else 1 for n, keep in zip(shape, kept, strict=True)), dtype=dtype)
        if not kept[1]:  # of modulus one it would add up all positions, and all of their rounding errors
            inputs[0] *= 0.99
    inputs = [laid_out(x, layout) for x, layout in zip(inputs, layouts, strict=False)]
    state = None
    if with_state:
        kind = dtype if dtype.is_complex else torch.promote_types(dtype, torch.float32)
        state = oracle.random(shape[0], shape[2], dtype=kind)
    oracle.compare(scan, inputs, state, backend=backend, **options)


@fuzz
@given(
    problems(),
    st.sampled_from(
        [(cell, torch.float32) for cell in oracle.GATELOOP_CELLS] + [(test_gateloop_scan.POLAR, torch.bfloat16)]
    ),
    st.sampled_from(["chunked", "cpu"]),
)
def test_gateloop(problem, kind, backend):
    """Kernels that test_gateloop_scan.py has compiled."""
    cell, dtype = kind
    shape, layouts, options, threads, with_state = problem
    torch.set_num_threads(threads)
    scan, count = oracle.GATELOOP_CELLS[cell]
    inputs = [oracle.random(*shape, dtype=dtype) for _ in range(count)]
    inputs = [laid_out(x, layout) for x, layout in zip(inputs, (layouts * 2)[:count], strict=True)]
    state = None
    if with_state:
        state = oracle.random(shape[0], shape[2], dtype=BY_NAME[cell].state_dtype(dtype))
    oracle.compare(scan, inputs, state, backend=backend, **options)


@fuzz
@given(problems(), st.sampled_from(["zoh", "bilinear"]), st.sampled_from(["chunked", "cpu"]))
def test_s5(problem, discretization, backend):
    """Kernels that test_s5_scan.py has compiled."""
    shape, layouts, options, threads, with_state = problem
    torch.set_num_threads(threads)
    driven, rate, times = test_s5_scan.problem(*shape, torch.complex64)
    times = laid_out(times[..., None], layouts[1])[..., 0]
    state = oracle.random(shape[0], shape[2], dtype=torch.complex64) if with_state else None
    inputs = [laid_out(driven, layouts[0]), rate, times]
    test_s5_scan.compare(discretization, inputs, state, backend=backend, **options)


@fuzz
@given(problems(), st.sampled_from(oracle.REALS), st.sampled_from(["chunked", "cpu"]), st.integers(1, 17))
def test_longhorn(problem, dtype, backend, m):
    (batch, length, channels), layouts, options, threads, _ = problem
    torch.set_num_threads(threads)
    length, channels = min(length, 80), min(channels, 130)  # the loop holds a state of channels x m for each position
    mask, reset = (x if x is None else x[:, :length] for x in (options["mask"], options["reset"]))
    *inputs, state = test_longhorn_scan.inputs_for(batch, length, channels, m, dtype)
    inputs = [laid_out(x, layout) for x, layout in zip(inputs, layouts, strict=True)]
    test_longhorn_scan.compare([*inputs, state], backend, reverse=options["reverse"], mask=mask, reset=reset)


@fuzz
@given(
    problems(),
    st.sampled_from([(torch.float32, True), (torch.float32, False), (torch.bfloat16, True), (torch.float64, True)]),
    st.sampled_from(["chunked", "cpu"]),
    st.tuples(st.integers(1, 18), st.integers(1, 9), st.integers(1, 18)),
    st.lists(st.integers(0, 3), max_size=2),
)
def test_gateloop_heads_scan(problem, kind, backend, sizes, shared):
    """Kernels that test_gateloop_heads.py has compiled. `shared`: over which dimensions the transitions are alike."""
    (batch, length, _), layouts, options, threads, with_start = problem
    torch.set_num_threads(threads)
    length = min(length, 80)  # the loop has a state of every position
    options = {name: x[:, :length] if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    *inputs, state = test_gateloop_heads.inputs_for(batch, length, *sizes, *kind, shared)
    inputs = [
        laid_out(x.flatten(2), layout).unflatten(2, x.shape[2:]) for x, layout in zip(inputs, layouts, strict=True)
    ]
    start = None
    if with_start and options["reset"] is not None and not options["reverse"]:
        start = oracle.random(*state.shape[1:], dtype=state.dtype)
    test_gateloop_heads.compare([*inputs, state], backend, start=start, **options)


@fuzz
@given(problems(), st.sampled_from(oracle.REALS), st.integers(1, 10), st.booleans(), st.booleans())
def test_short_convolution(problem, dtype, taps, silu, with_bias):
    shape, layouts, options, threads, with_state = problem
    torch.set_num_threads(threads)
    x, weight, bias, state = test_convolution.inputs_for(*shape, taps, dtype, with_state, with_bias)
    state = state if state is None else laid_out(state, layouts[1])
    masks = {name: options[name] for name in ("mask", "reset")}
    test_convolution.compare([laid_out(x, layouts[0]), weight, bias, state], "cpu", silu=silu, **masks)
