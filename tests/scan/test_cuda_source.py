"""The CUDA kernels without a GPU: compiled through the run-time path, and their bodies run on the host by a shim."""

import contextlib
import mmap
import re
import shutil
import sys
import threading
from unittest import mock

import numpy as np
import pytest
import torch
from oracle import CELLS, alike, coefficients, compare, linear, mask_and_reset, mingru_positive, random, run
from torch._subclasses import FakeTensorMode

from hf_recurrent.scan import (
    BackendUnavailable,
    backend_report,
    cells,
    convolution_cuda,
    cpu,
    cuda,
    cuda_kernels,
    elementwise_cuda,
    linear_scan,
)

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
PAIRS = [
    (cell, dtype)
    for cell in cpu.CELLS
    for dtype in (torch.float32, torch.bfloat16, torch.complex64)
    if cell == "linear" or not dtype.is_complex
]
WIDE = [pair for pair in PAIRS if "vanilla" not in pair[0]]
REST = [(cell, torch.float32) for cell in cpu.CELLS if "vanilla" in cell]
DOUBLES = [(cell, torch.float64) for cell in ("linear", "minlstm_positive")]


def test_every_cell_has_a_kernel_on_both_devices():
    assert cpu.CELLS.keys() == {cell.name for cell in cells.STATE_CELLS}
    assert cpu.STORAGES.keys() == cuda_kernels.TYPES.keys()


# ---- the compiler's report -------------------------------------------------------------------------------------------


def check_report(module, architecture):
    """The registers of each kernel, none of which spills any or keeps anything in local memory, and its PTX."""
    core = pytest.importorskip("cuda.core", reason="needs the packages of the extra 'cuda'")
    programs, make = [], core.Program

    def program(*arguments):
        programs.append(make(*arguments))
        return programs[-1]

    with mock.patch.object(core, "Program", program):
        compiled = cuda_kernels.compile_module(module, architecture)
    assert compiled.cubin[:4] == b"\x7fELF"
    kernels = re.findall(r"Compiling entry function '(\w+)' for '(\w+)'", compiled.report)
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", compiled.report)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", compiled.report)]
    assert len(kernels) == len(frames) == len(registers) > 0, compiled.report
    for (kernel, target), frame in zip(kernels, frames, strict=True):
        assert target == architecture and set(frame) == {"0"}, f"{kernel}: {frame}"
    return dict(zip((kernel for kernel, _ in kernels), registers, strict=True)), _ptx(programs[0])


def check_scan(name, dtype, narrow, architecture, row=None, once=False):
    """A cell's kernels: as many blocks fit onto a multiprocessor as is said, and they write in accesses as wide as
    those that read."""
    cell, width = cells.BY_NAME[name], 1 if narrow else cuda.WIDTHS[dtype.itemsize]
    registers, ptx = check_report(cuda.module_for(name, dtype, width, row, once), architecture)
    assert len(registers) == (2 if once else 5)
    ahead, back = cuda._tunings(cell, dtype, width)
    for kernel, tuning in (("scan_forward", ahead), ("scan_backward", back)):
        assert registers[kernel] * cuda.THREADS * tuning.blocks <= 65536  # the registers of a multiprocessor
    if width > 1:  # one by one: a segment's final state, sums over its positions, and over channels, on both ways
        parts, sums = 2 if cell.state_dtype(dtype).is_complex else 1, 2 * back.steps * cell.timed
        parts *= 1 + once  # and what leaves a tile
        for kernel, most in (("scan_forward", parts), ("scan_backward", 2 * parts + sums)):
            one_by_one = re.findall(r"\bst\.global\.(?!v\d)[.\w]+", ptx[kernel])
            assert len(one_by_one) <= most, f"{kernel}: {one_by_one}"


def _ptx(program):
    """By kernel."""
    from cuda.bindings import nvrtc

    _, size = nvrtc.nvrtcGetPTXSize(program.handle)
    text = bytes(size)
    nvrtc.nvrtcGetPTX(program.handle, text)
    return dict(part.split("(", 1) for part in text.decode().split(".entry ")[1:])


@pytest.mark.parametrize(
    "cell, dtype, narrow, architecture",
    [(*pair, False, architecture) for pair in WIDE for architecture in ARCHITECTURES]
    + [(*pair, True, "sm_90") for pair in WIDE]
    + [(*pair, False, "sm_90") for pair in REST + DOUBLES],
    ids=str,
)
def test_scan_compiles_without_spills(cell, dtype, narrow, architecture):
    check_scan(cell, dtype, narrow, architecture)


@pytest.mark.parametrize("cell, dtype", WIDE, ids=str)
def test_reading_once_compiles_without_spills(cell, dtype):
    check_scan(cell, dtype, False, "sm_90", once=True)


@pytest.mark.parametrize("row", [row for row in cuda.ROWS if row != 16])
def test_other_rows_compile_without_spills(row):
    check_scan("linear", torch.float32, False, "sm_90", row)
    check_scan("mingru_positive", torch.bfloat16, False, "sm_90", row)


@pytest.mark.parametrize(
    "module",
    [
        *(
            cuda.module_for(cell, dtype, cuda.WIDTHS[2])
            for cell in ("linear", "mingru_positive")
            for dtype in (torch.bfloat16, torch.float16)
        ),
        convolution_cuda.module_for(torch.bfloat16, 4, convolution_cuda.widest(torch.bfloat16, 4), True),
        elementwise_cuda.module_for("SiluGate", torch.bfloat16, elementwise_cuda.widest(torch.bfloat16)),
    ],
    ids=lambda module: f"{module.stem} {dict(module.macros)['HFR_TYPE']}",
)
def test_16_bits_on_a_gpu_without_instructions_for_them(module):
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs the packages of the extra 'cuda'")
    if 75 not in nvrtc.nvrtcGetSupportedArchs()[-1]:
        pytest.skip("this NVRTC compiles for no GPU that lacks them")
    assert cuda_kernels.compile_module(module, "sm_75").cubin  # some spill a few registers there


def test_unknown_architecture_is_said():
    pytest.importorskip("cuda.core", reason="needs the packages of the extra 'cuda'")
    module = cuda.module_for("linear", torch.float32, 4)
    with pytest.raises(BackendUnavailable, match="could not compile the kernels scan_cuda .* for sm_12345: .*arch"):
        cuda_kernels.compile_module(module, "sm_12345")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu():
    assert backend_report()["cuda"] == "PyTorch sees no CUDA device"


# ---- their bodies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell, dtype", WIDE + REST, ids=str)
def test_bodies_against_the_oracle(host, cell, dtype):
    scan, count = {"linear": (linear, 2), **CELLS}[cell]
    state_dtype = torch.promote_types(dtype, torch.float32)
    # The last is two segments of time; widths of 33 are odd, 40 is walked in wide accesses.
    for shape, multiprocessors in [((1, 1, 1), 1), ((3, 2, 33), 1), ((3, 150, 40), 1), ((1, 1025, 16), 4)]:
        host.multiprocessors = multiprocessors
        host.launched.clear()
        first = coefficients if cell == "linear" else random
        inputs = first(*shape, dtype=dtype), *(random(*shape, dtype=dtype) for _ in range(count - 1))
        compare(scan, inputs, None, backend="cpu")
        assert ("scan_forward_segments" in host.launched) == (multiprocessors > 1)
        mask, reset = mask_and_reset(*shape[:2])
        for reverse in (False, True):
            state = random(shape[0], shape[2], dtype=state_dtype)
            compare(scan, inputs, state, backend="cpu", mask=mask, reset=reset, reverse=reverse)


@pytest.mark.parametrize("channels, row", [(128, 32), (64, 16), (96, 8)], ids=str)
def test_few_flags(host, channels, row):
    """Most threads' positions have none, and go the way without choices; a thread holds one or two flags of a tile."""
    length = 700
    assert cuda.row_for("linear", (2, length, channels), 4, 1, 1) == row
    mask, reset = torch.ones(2, length, dtype=torch.bool), torch.zeros(2, length, dtype=torch.bool)
    mask[0, 300:333] = mask[1, 690:] = mask[1, 15] = False
    reset[0, [16, 255, 310, 511]] = reset[1, [0, 699]] = True
    for scan, dtype in ((linear, torch.bfloat16), (mingru_positive, torch.float32)):
        inputs = 0.99 * coefficients(2, length, channels, dtype=dtype), random(2, length, channels, dtype=dtype)
        state = random(2, channels, dtype=torch.float32)
        for reverse in (False, True):
            compare(scan, inputs, state, backend="cpu", mask=mask, reset=reset, reverse=reverse)
    # A position without flags is computed as it is where there are none at all.
    no = torch.zeros(2, length, dtype=torch.bool)
    for x, y in zip(*(linear_scan(*inputs, state, reset=r, backend="cpu") for r in (None, no)), strict=True):
        assert torch.equal(x, y)


def test_states_that_pass_from_block_to_block(host):
    """More rows of channels than blocks at once, and not a multiple of them: time in links, each byte read once."""
    host.multiprocessors = 2
    assert cuda_kernels.links_of(1100, 3, 2) == 2 and cuda_kernels.links_of(1100, 4, 2) == 1
    mask, reset = mask_and_reset(3, 1100)
    state = random(3, 64, dtype=torch.float32)
    for options in ({}, {"mask": mask, "reset": reset}, {"mask": mask, "reset": reset, "reverse": True}):
        inputs = 0.99 * coefficients(3, 1100, 64, dtype=torch.float32), random(3, 1100, 64, dtype=torch.float32)
        compare(linear, inputs, state, backend="cpu", **options)
    compare(linear, (0.99 * coefficients(64, dtype=torch.float32), inputs[1]), state, backend="cpu")
    for host.seed in (1, 2):  # blocks side by side
        host.resident = 2
        compare(linear, inputs, state, backend="cpu", mask=mask, reset=reset)
    host.resident, host.seed = 1, 0
    inputs = [random(3, 1100, 64, dtype=torch.bfloat16) for _ in range(2)]
    compare(mingru_positive, inputs, state, backend="cpu")
    assert set(host.launched) == {"scan_forward", "scan_backward"}
    # An infinity passes, and a product that overflows says nothing: no products are passed.
    a, b = torch.full((3, 1100, 64), 1.2), torch.zeros(3, 1100, 64)
    a[:, :600] = 0.9
    b[0, 20, 5] = float("inf")
    got, want = (linear_scan(a, b, state.abs() * 1e-3, backend=backend) for backend in ("cpu", "reference"))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=0, equal_nan=True)


def test_a_state_updated_in_place_passes_from_block_to_block(host):
    host.multiprocessors = 2
    a, b = coefficients(3, 1100, 64, dtype=torch.float32), random(3, 1100, 64, dtype=torch.float32)
    state = random(3, 64, dtype=torch.float32)
    want = linear_scan(a, b, state, backend="reference")
    with torch.no_grad():
        h, final = linear_scan(a, b, state, update_state=True, backend="cpu")
    assert final.data_ptr() == state.data_ptr()
    torch.testing.assert_close((h, final), want, rtol=1e-4, atol=1e-4)


# ---- rows too few to fill a GPU, read once ---------------------------------------------------------------------------


@pytest.mark.parametrize("cell, dtype", WIDE, ids=str)
def test_bodies_that_read_once(once, cell, dtype):
    scan, count = {"linear": (linear, 2), **CELLS}[cell]
    state_dtype = torch.promote_types(dtype, torch.float32)
    for shape in [(1, 1100, 16), (2, 1090, 72)]:
        first = coefficients if cell == "linear" else random
        inputs = first(*shape, dtype=dtype), *(random(*shape, dtype=dtype) for _ in range(count - 1))
        mask, reset = mask_and_reset(*shape[:2])
        state = random(shape[0], shape[2], dtype=state_dtype)
        compare(scan, inputs, None, backend="cpu")
        for reverse in (False, True):
            compare(scan, inputs, state, backend="cpu", mask=mask, reset=reset, reverse=reverse)
    assert set(once.launched) == {"scan_forward", "scan_backward"}


def test_no_bit_depends_on_which_block_takes_a_tile(once):
    """Nor on how many there are, in which order they run, or how many of them side by side; nor does one that waits
    keep others from what it waits for."""
    for shape in [(1, 2100, 33), (2, 1100, 64)]:
        inputs = [random(*shape, dtype=torch.float32) for _ in range(2)]
        state = random(shape[0], shape[2], dtype=torch.float32)
        weights = random(*shape, dtype=torch.float64), random(shape[0], shape[2], dtype=torch.float64)
        results = []
        for run_of in [(9, 1, 0, False), (9, 1, 0, True), (9, 1, 1, False), (9, 2, 2, False), (20, 16, 3, True)]:
            once.multiprocessors, once.resident, once.seed, once.reversed = run_of
            results.append(run(mingru_positive, inputs, state, weights, backend="cpu"))
        alike(results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_constant_coefficients_read_once(once, dtype):
    """Their gradient is summed over each tile, and then over tiles: no bit depends on who takes which."""
    inputs = 0.99 * coefficients(16, dtype=dtype), random(1, 1100, 16, dtype=dtype)
    state = random(1, 16, dtype=dtype)
    compare(linear, inputs, state, backend="cpu")
    weights = random(1, 1100, 16, dtype=dtype), random(1, 16, dtype=dtype)
    results = []
    for once.seed in (1, 2):
        results.append(run(linear, inputs, state, weights, backend="cpu"))
    alike(results)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_read_once(once, bad, reverse):
    """The state passes from tile to tile there, whichever blocks have them: an infinity stays one, though the products
    of the tiles after it are zero."""
    length = 1100
    a, b = torch.full((1, length, 16), 0.3), random(1, length, 16, dtype=torch.float32)
    b[0, 700, 3] = bad
    for once.seed, once.resident in [(0, 1), (1, 3), (2, 9)]:
        for reset in (None, torch.arange(length)[None] == 800, torch.arange(length)[None] == 650):
            got = linear_scan(a, b, reset=reset, reverse=reverse, backend="cpu")
            want = linear_scan(a, b, reset=reset, reverse=reverse, backend="reference")
            torch.testing.assert_close(got, want, equal_nan=True)


def test_products_that_overflow_read_once(once):
    """That of one tile of 128 does, and with it what is folded of all after it, which the state does not."""
    a, b = torch.ones(1, 1024, 16), torch.zeros(1, 1024, 16)
    a[:, 256:384], a[:, 384:512] = 3, 1 / 3
    results = []
    for once.seed, once.resident in [(0, 1), (1, 3), (2, 9)]:
        for initial in (None, torch.full((1, 16), 1e-30)):
            got = linear_scan(a, b, initial, backend="cpu")
            want = linear_scan(a, b, initial, backend="reference")
            torch.testing.assert_close(got, want, rtol=1e-4, atol=0)
        results.append(got)
    alike(results)


def test_a_state_updated_in_place_read_once(once):
    a, b = coefficients(3, 1100, 64, dtype=torch.float32), random(3, 1100, 64, dtype=torch.float32)
    state = random(3, 64, dtype=torch.float32)
    want = linear_scan(a, b, state, backend="reference")
    with torch.no_grad():
        h, final = linear_scan(a, b, state, update_state=True, backend="cpu")
    assert final.data_ptr() == state.data_ptr()
    torch.testing.assert_close((h, final), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "cell, shape, row",
    [
        ("linear", (8, 8192, 1024), 16),  # 128 blocks, and 64 of a wider row would leave half of the GPU idle
        ("linear", (8, 4096, 1536), 32),  # 96, which keep memory busy
        ("minlstm_positive", (8, 4096, 1536), 16),  # 192, in links
        ("linear", (16, 2048, 2048), 32),
        ("linear", (512, 1, 1024), 16),  # one position
        ("linear", (1, 2**20, 1024), 32),  # time is split in any case
        ("linear", (1, 2**20, 64), 16),  # all there is
        ("linear", (1, 2**20, 40), 16),
        ("linear", (1, 2**20, 96), 8),  # of which three blocks have all channels
    ],
    ids=str,
)
def test_how_many_threads_are_side_by_side(cell, shape, row):
    assert cuda.row_for(cell, shape, 4, 132, 132) == row


@pytest.mark.parametrize(
    "length, blocks, at_once, links",
    [
        (4096, 192, 132, 2),  # 1.45 blocks each
        (2048, 384, 132, 1),  # 2.9
        (4096, 131, 132, 1),  # each its own
        (2**20, 140, 132, 8),
        (1023, 140, 132, 1),  # too short
        (4096, 100, 132, 1),  # some would wait for others
    ],
)
def test_links(length, blocks, at_once, links):
    assert cuda_kernels.links_of(length, blocks, at_once) == links


def test_broadcast_and_strided_bodies(host):
    for shape in [(72,), (9, 1), (3, 1, 72), (9, 72)]:
        compare(
            linear,
            (coefficients(*shape, dtype=torch.float32), random(3, 9, 72, dtype=torch.float32)),
            None,
            backend="cpu",
        )
    packed = random(3, 9, 144, dtype=torch.float32)
    compare(mingru_positive, (packed[..., :72], packed[..., 72:]), None, backend="cpu")
    compare(mingru_positive, (packed[..., ::2], packed[..., 1::2]), None, backend="cpu")
    a, b = coefficients(2, 9, 5, dtype=torch.float32), random(2, 9, 5, dtype=torch.float32).requires_grad_()
    linear_scan(a, b, backend="cpu")[0].sum().backward()  # an expanded gradient: all strides zero
    assert torch.isfinite(b.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_constant_coefficients_in_segments(host, dtype):
    """As S5 has them: their gradient is summed over time within each segment."""
    host.multiprocessors = 4
    state = random(1, 16, dtype=dtype)
    # Below one, lest rounding add up over all of the sequence, as it does in the loop too.
    inputs = 0.99 * coefficients(16, dtype=dtype), random(1, 1100, 16, dtype=dtype)
    compare(linear, inputs, state, backend="cpu")
    assert "scan_backward_segments" in host.launched


def test_no_race(host):
    """The order in which the threads of a block come to run between two barriers changes no bit."""
    for shape, multiprocessors in [((2, 300, 40), 1), ((1, 1100, 33), 5), ((3, 1100, 64), 1)]:
        host.multiprocessors = multiprocessors
        inputs = [random(*shape, dtype=torch.float32) for _ in range(2)]
        state = random(shape[0], shape[2], dtype=torch.float32)
        weights = random(*shape, dtype=torch.float64), random(shape[0], shape[2], dtype=torch.float64)
        results = []
        for host.reversed in (False, True):
            results.append(run(mingru_positive, inputs, state, weights, backend="cpu"))
        alike(results)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite(host, bad, reverse):
    """An infinity in one segment of time neither vanishes with a product that has faded nor passes a reset."""
    host.multiprocessors = 4
    length = 1100
    a, b = torch.full((1, length, 16), 0.5), random(1, length, 16, dtype=torch.float32)
    b[0, 700, 3] = bad
    for reset in (None, torch.arange(length)[None] == 800, torch.arange(length)[None] == 650):
        got = linear_scan(a, b, reset=reset, reverse=reverse, backend="cpu")
        want = linear_scan(a, b, reset=reset, reverse=reverse, backend="reference")
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x.isfinite(), y.isfinite())
            torch.testing.assert_close(x[x.isfinite()], y[y.isfinite()])


def test_products_that_overflow(host):
    """A state of zero stays zero, and a small one grows to what it is, though the product of a segment overflows."""
    host.multiprocessors = 4
    a, b = torch.full((1, 1024, 16), 1.2), torch.zeros(1, 1024, 16)
    a[:, :600] = 0.9
    state = torch.full((1, 16), 1e-3)
    for initial in (None, state):
        got = linear_scan(a, b, initial, backend="cpu")
        want = linear_scan(a, b, initial, backend="reference")
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=0)


def test_elements_that_do_not_start_at_multiples_of_their_size(host):
    """As memory that came from elsewhere may; copied, since no GPU reads it."""
    buffer = torch.zeros(4 * 2 * 9 * 8 + 1, dtype=torch.uint8)
    b = torch.from_numpy(np.ndarray((2, 9, 8), dtype=np.float32, buffer=buffer.numpy(), offset=1))
    b.copy_(random(2, 9, 8, dtype=torch.float32))
    a = coefficients(2, 9, 8, dtype=torch.float32)
    assert b.data_ptr() % 4
    got = linear_scan(a, b, backend="cpu")[0]
    assert torch.equal(got, linear_scan(a, b.clone(), backend="cpu")[0])


def test_elements_beyond_32_bits(host):
    """Rows that lie 2^31 elements apart."""
    rows, width = 3, 8
    buffer = mmap.mmap(-1, 2 * (2**31 + rows * width))  # touched at both ends only
    b = torch.frombuffer(buffer, dtype=torch.bfloat16).as_strided((2, rows, width), (2**31, width, 1))
    b.copy_(random(2, rows, width, dtype=torch.bfloat16))
    a = coefficients(2, rows, width, dtype=torch.bfloat16)
    for channels in (slice(None), slice(1, None)):  # in wide accesses, and one by one
        got = linear_scan(a[..., channels], b[..., channels], backend="cpu")
        want = linear_scan(a[..., channels], b[..., channels].clone(), backend="cpu")
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


# ---- machines on which the kernels cannot be made --------------------------------------------------------------------

MODULE = cuda.module_for("linear", torch.float32, 4)


def test_without_the_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'hf-recurrent\[cuda\]' brings NVRTC"):
        cuda_kernels.compile_module(MODULE, "sm_90")


def test_without_nvrtc(monkeypatch):
    core = pytest.importorskip("cuda.core", reason="needs the packages of the extra 'cuda'")

    def refuse(*args):
        raise RuntimeError("Failure finding libnvrtc.so: no such file")

    monkeypatch.setattr(core, "Program", refuse)
    with pytest.raises(BackendUnavailable, match="the kernels scan_cuda .* for sm_90: Failure finding libnvrtc"):
        cuda_kernels.compile_module(MODULE, "sm_90")


def test_a_source_that_does_not_compile(monkeypatch, tmp_path):
    """The compiler's own line is passed on, and nothing is cached."""
    pytest.importorskip("cuda.core", reason="needs the packages of the extra 'cuda'")
    sources = tmp_path / "csrc"
    shutil.copytree(cuda_kernels.kernel_cache.SOURCES, sources)
    (sources / "device.h").write_text("#pragma once\nnot C++\n")
    monkeypatch.setattr(cuda_kernels.kernel_cache, "SOURCES", sources)
    monkeypatch.setenv("HF_RECURRENT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(BackendUnavailable, match=r"for sm_90: .*device\.h.*error: ") as raised:
        cuda_kernels.cubin(MODULE, "sm_90")
    said = str(raised.value)
    assert "the kernels scan_cuda (CELL=LinearCell<StateOf<float>::type>, TYPE=float, WIDTH=4, " in said
    assert said.endswith("; HF_RECURRENT_KERNELS=cpu in the environment does without the CUDA kernels")
    assert "HFR_" not in said and "\n" not in said
    assert not list((tmp_path / "cache").glob("*.cubin"))


@pytest.mark.parametrize(
    "error, reason",
    [
        (BackendUnavailable("NVRTC is missing"), "NVRTC is missing"),
        (RuntimeError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION: the driver\nis too old"), "RuntimeError: CUDA_ERROR_UNSUPP"),
        (None, "first run: AssertionError"),  # it runs, and computes something else
    ],
)
def test_a_first_run_that_fails_is_said(host, monkeypatch, error, reason):
    """And costs speed, never a wrong number: the fallback computes."""

    def launch(module, entry, device, grid, threads, arguments):
        if error is not None:
            raise error

    see_a_gpu(monkeypatch)
    monkeypatch.setattr(cuda_kernels, "launch", launch)
    said = cuda.unavailable_reason.__wrapped__()
    assert reason in said and "\n" not in said


def test_kernels_that_are_turned_off_do_not_run(host, monkeypatch):
    see_a_gpu(monkeypatch)
    monkeypatch.setenv("HF_RECURRENT_KERNELS", "cpu")
    assert cuda.unavailable_reason.__wrapped__() == "left out by HF_RECURRENT_KERNELS=cpu" and not host.launched


def test_a_first_run_without_memory_is_not_the_last(host, monkeypatch):
    see_a_gpu(monkeypatch)
    there_is_some = cuda_kernels.launch

    def launch(*_):
        raise torch.OutOfMemoryError("of another process")

    cuda.unavailable_reason.cache_clear()
    try:
        monkeypatch.setattr(cuda_kernels, "launch", launch)
        with pytest.raises(torch.OutOfMemoryError):
            cuda.unavailable_reason()
        monkeypatch.setattr(cuda_kernels, "launch", there_is_some)
        assert cuda.unavailable_reason() is None
    finally:
        cuda.unavailable_reason.cache_clear()


@pytest.mark.parametrize(
    "driver_knows, compiler, install",
    [
        (12080, (13, 2), "the driver knows 12.8: pip install 'cuda-bindings<13' nvidia-cuda-nvrtc-cu12)"),
        (13020, (14, 0), "the driver knows 13.2: pip install 'cuda-bindings<14' 'nvidia-cuda-nvrtc<14')"),
        (11080, (12, 9), "the driver knows CUDA 11.8: one of CUDA 12 or later is needed)"),
        (12040, (12, 9), ""),  # any of the same major version loads what it compiles
        (13020, (12, 8), ""),
    ],
)
def test_a_driver_older_than_the_compiler(host, monkeypatch, driver_knows, compiler, install):
    """Is said, with what to do, beside what the driver itself says."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="needs the packages of the extra 'cuda'")
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")

    def launch(*_):
        raise RuntimeError("CUDA_ERROR_INVALID_IMAGE: the device kernel image is invalid")

    see_a_gpu(monkeypatch)
    monkeypatch.setattr(cuda_kernels, "launch", launch)
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (0, driver_knows))
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (0, *compiler))
    said = cuda.unavailable_reason.__wrapped__()
    assert "CUDA_ERROR_INVALID_IMAGE" in said and said.endswith(install or "image is invalid")
    assert ("the driver knows" in said) == bool(install)


def see_a_gpu(monkeypatch):
    """Whose memory is the host's."""
    for name, make in {name: getattr(torch, name) for name in ("linspace", "ones")}.items():
        monkeypatch.setattr(torch, name, lambda *a, make=make, device=None, **k: make(*a, **k))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_the_first_run_is_of_what_is_there(host, monkeypatch):
    """Not of the default dtype, nor of what stands for tensors where the first scan is exported; by the kernels that
    most scans take, of one module."""
    modules, launch = set(), cuda_kernels.launch

    def note(module, *others):
        modules.add(module)
        launch(module, *others)

    see_a_gpu(monkeypatch)
    monkeypatch.setattr(cuda_kernels, "launch", note)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode():
            assert cuda.unavailable_reason.__wrapped__() is None
    finally:
        torch.set_default_dtype(torch.float32)
    assert {"scan_forward", "scan_backward"} <= set(host.launched)
    assert [dict(module.macros)["HFR_WIDTH"] for module in modules] == ["4"]


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_every_thread_has_a_context_before_it_launches(monkeypatch):
    """Backward's has none before PyTorch's own first kernel on it; PyTorch's guard of device 0 does not give it one."""
    core = pytest.importorskip("cuda.core", reason="needs the packages of the extra 'cuda'")
    calls = []

    class Device:
        def __init__(self, index):
            self.index = index

        def set_current(self):
            calls.append((threading.current_thread().name, f"context of {self.index}"))

    def launch(stream, config, kernel, *arguments):
        calls.append((threading.current_thread().name, kernel))

    monkeypatch.setattr(core, "Device", Device)
    monkeypatch.setattr(core, "launch", launch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: mock.Mock(cuda_stream=0))
    monkeypatch.setattr(cuda_kernels, "_kernel", lambda module, entry, device_index: entry)

    def run():
        for entry in ("first", "second"):
            cuda_kernels.launch(MODULE, entry, torch.device("cuda", 0), (1, 1), 256, [])

    for name in "ab":
        thread = threading.Thread(target=run, name=name)
        thread.start()
        thread.join()
    assert calls == [(name, what) for name in "ab" for what in ("context of 0", "first", "second")]


def test_a_launch_gets_a_stream_of_cuda_core(monkeypatch):
    """Of the handle that PyTorch's current stream has now: cuda-core warns of any other object at each launch."""
    core = pytest.importorskip("cuda.core", reason="needs the packages of the extra 'cuda'")
    streams = []
    monkeypatch.setattr(core, "launch", lambda stream, *others: streams.append(stream))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cuda_kernels, "_enter_context", lambda device_index: None)
    monkeypatch.setattr(cuda_kernels, "_kernel", lambda module, entry, device_index: entry)
    for handle in (0, 4096, 0):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda handle=handle: mock.Mock(cuda_stream=handle))
        cuda_kernels.launch(MODULE, "scan_forward", torch.device("cuda", 0), (1, 1), 256, [])
    assert all(isinstance(stream, core.Stream) for stream in streams)
    assert [int(stream.handle) for stream in streams] == [0, 4096, 0]


# ---- CUDA graphs -----------------------------------------------------------------------------------------------------


def test_the_first_scan_is_not_captured(monkeypatch):
    """It compares numbers, which a capture cannot, and would take the failure for one of the kernels, for good."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="first scan on a GPU cannot be captured into a CUDA graph"):
        cuda.unavailable_reason.__wrapped__()


def test_a_kernel_is_loaded_during_a_capture(monkeypatch):
    """One that has not run before: the capture is told that what loading allocates is no part of the graph."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="needs the packages of the extra 'cuda'")
    modes, before = [], driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL

    def exchange(mode):
        modes.append(mode)
        return driver.CUresult.CUDA_SUCCESS, before

    class Loaded:
        def get_kernel(self, entry):
            assert modes == [driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED]
            return entry

    monkeypatch.setattr(driver, "cuThreadExchangeStreamCaptureMode", exchange)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(cuda_kernels, "_load", lambda module, device_index: Loaded())
    assert cuda_kernels._kernel.__wrapped__(MODULE, "scan_forward", 0) == "scan_forward"
    assert modes[1:] == [before]


def test_many_rows_of_blocks(monkeypatch):
    """More rows than a grid has: its blocks walk on."""
    monkeypatch.setattr(cuda_kernels, "multiprocessors", lambda device: 132)
    scan = cuda_kernels.Scan(
        MODULE, 256, 1, (200_000, 7, 8), (8,), torch.float32, torch.device("meta"), None, False, []
    )
    assert scan.grid == (1, 65535) and scan.segments == 1
