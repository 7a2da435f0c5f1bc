"""The short convolution's CUDA kernels without a GPU, as test_cuda_source.py has it for the scans."""

import ctypes
import mmap
import re
import sys

import pytest
import torch
from oracle import mask_and_reset, random
from test_convolution import check_apart, compare, gradients, inputs_for
from test_cuda_source import ARCHITECTURES, check_report
from test_fuzz import LAYOUTS, laid_out
from test_gateloop_heads_cuda import shifted

from hf_recurrent.scan import convolution, convolution_cuda
from hf_recurrent.scan.convolution import short_convolution
from hf_recurrent.scan.ops import step_flags


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(
    "dtype, taps, architecture",
    [(torch.bfloat16, 4, architecture) for architecture in ARCHITECTURES]
    + [(dtype, taps, "sm_90") for dtype in (torch.float32, torch.float64) for taps in (2, 4, 6, 8)]
    + [(torch.float16, taps, "sm_90") for taps in (3, 7)],
    ids=str,
)
def test_compiles_without_spills(dtype, taps, architecture, silu):
    width = convolution_cuda.widest(dtype, taps)
    registers, ptx = check_report(convolution_cuda.module_for(dtype, taps, width, silu), architecture)
    assert len(registers) == 2
    # Blocks of 128 threads to a multiprocessor: three backward, and as many forward at least.
    assert max(registers.values()) <= 168
    for kernel in registers:
        stores = re.findall(r"st\.global\S*", ptx[kernel])
        assert stores and all((".v" in store) == (width > 1) for store in stores), stores


# (batch, length, channels, taps): several blocks of positions, warps without any, wide accesses and single ones
HOST_SHAPES = [
    (1, 1, 1, 4),
    (3, 2, 8, 4),
    (2, 300, 36, 4),
    (1, 150, 5, 4),
    (2, 140, 6, 2),
    (1, 300, 4, 8),
    (2, 33, 3, 1),
    (1, 140, 4, 6),
]


@pytest.mark.parametrize("shape", HOST_SHAPES, ids=str)
def test_bodies_against_the_oracle(host, shape):
    mask, reset = mask_and_reset(*shape[:2])
    common = shape[3] == 4 and shape[2] > 1
    for dtype in (torch.float32, torch.bfloat16, torch.float64) if common else (torch.float32,):
        compare(inputs_for(*shape, dtype), "cuda", silu=common)
        compare(inputs_for(*shape, dtype, False, False), "cuda", silu=common, mask=mask, reset=reset)
        compare(inputs_for(*shape, dtype), "cuda", silu=common, mask=mask)
        compare(inputs_for(*shape, dtype), "cuda", silu=common, reset=reset)
    assert set(host.launched) == {"convolution_forward", "convolution_backward"}


def test_random_bodies(host):
    """Padding and documents of all lengths, among them rows of padding alone and documents of one token."""
    for seed in range(30):
        torch.manual_seed(seed)
        batch, length = 1 + seed % 3, [5, 129, 260][seed % 3]
        mask = torch.rand(batch, length) < [0.02, 0.5, 0.98][seed // 3 % 3]
        reset = torch.rand(batch, length) < [0.01, 0.3, 0.9][seed // 9 % 3]
        compare(inputs_for(batch, length, 4, 4, torch.float32, bool(seed % 2)), "cuda", mask=mask, reset=reset)


def test_no_race(host):
    """The order in which the threads of a block come to run between two barriers changes no bit."""
    mask, reset = mask_and_reset(2, 300)
    inputs = inputs_for(2, 300, 36, 4, torch.float32)
    weights = torch.ones(2, 300, 36, dtype=torch.float64), torch.ones(2, 3, 36, dtype=torch.float64)
    results = []
    for host.reversed in (False, True):
        flags = step_flags(mask, reset, False)
        results.append(
            gradients(
                lambda x, w, b, s, flags=flags: torch.ops.hf_recurrent.short_convolution(
                    x, w, s, b, flags, True, "cuda"
                ),
                inputs,
                weights,
            )
        )
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(host, layout):
    inputs = inputs_for(2, 40, 36, 4, torch.float32)
    inputs[0], inputs[3] = laid_out(inputs[0], layout), laid_out(inputs[3], layout)
    compare(inputs, "cuda", silu=True)


def sliced(x: torch.Tensor) -> torch.Tensor:
    """The same values in rows that are longer by two, so that not all begin at a multiple of 16 bytes."""
    return torch.cat([x, x[..., :2]], dim=-1)[..., : x.shape[-1]]


@pytest.mark.parametrize("which", ["x", "state", "grad", "weight"])
def test_alignment(host, which):
    """Rows, a state, gradients and weights where accesses of several channels cannot begin."""
    x, weight, bias, state = inputs_for(2, 40, 36, 4, torch.float32)
    slopes = random(2, 40, 36, dtype=torch.float32)
    convolve = torch.ops.hf_recurrent.short_convolution

    def run(x, weight, state, slopes):
        inputs = [t.detach().requires_grad_() for t in (x, weight, state)]
        y, left = convolve(*inputs, bias, None, True, "cuda")
        return y, left, *torch.autograd.grad((y, left), inputs, (slopes, torch.ones_like(left)))

    want = run(x, weight, state, slopes)
    x, slopes = (sliced(t) if name == which else t for name, t in (("x", x), ("grad", slopes)))
    state, weight = (shifted(t, 4) if name == which else t for name, t in (("state", state), ("weight", weight)))
    for got, expected in zip(run(x, weight, state, slopes), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def at_the_end_of_memory(x: torch.Tensor) -> torch.Tensor:
    """The same values, behind which there is nothing that may be read."""
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
    size = -(-x.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    no_access = 0
    assert libc.mprotect(ctypes.c_void_p(whole.data_ptr() + size), ctypes.c_size_t(page), no_access) == 0
    place = whole[size - x.nbytes : size].view(x.dtype).view(x.shape)
    return place.copy_(x)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mprotect")
def test_nothing_is_read_beyond_the_end(host):
    for shape in ((1, 40, 5, 4), (2, 33, 8, 4)):
        x, weight, bias, state = (at_the_end_of_memory(t) for t in inputs_for(*shape, torch.float32))
        flags = at_the_end_of_memory(step_flags(*mask_and_reset(*shape[:2]), False))
        grads = at_the_end_of_memory(torch.ones_like(x)), at_the_end_of_memory(torch.ones_like(state))
        ops = torch.ops.hf_recurrent
        ops.short_convolution(x, weight, state, bias, flags, True, "cuda")
        ops.short_convolution_backward(x, weight, state, bias, flags, *grads, True, "cuda")


def test_more_positions_than_are_counted(host):
    x = torch.zeros(1, 1, 1).expand(1, 2**31, 1)
    with pytest.raises(ValueError, match="x must have at most 2147483392 positions on a GPU, got 2147483648"):
        convolution_cuda._Call(x, torch.ones(1, 1, 4), None, None, None, False)


def test_nothing_of_other_documents(host):
    check_apart(lambda *inputs, flags: torch.ops.hf_recurrent.short_convolution(*inputs, flags, True, "cuda"))


def test_more_taps_than_registers_hold(host):
    """Runs in plain PyTorch."""
    x, weight, bias, state = inputs_for(1, 20, 3, convolution.MOST_TAPS["cuda"] + 1, torch.float32)
    short_convolution(x.requires_grad_(), weight, bias, state)
    assert not host.launched
    short_convolution(x, weight[..., 1:], bias, state[:, 1:].contiguous())
    assert host.launched
