"""The short convolution's CUDA kernels without a GPU, as test_cuda_source.py has it for the scans."""

import re

import pytest
import torch
from oracle import mask_and_reset
from test_convolution import check_apart, compare, gradients, inputs_for
from test_cuda_source import ARCHITECTURES, check_report
from test_fuzz import LAYOUTS, laid_out

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


def test_nothing_of_other_documents(host):
    check_apart(lambda *inputs, flags: torch.ops.hf_recurrent.short_convolution(*inputs, flags, True, "cuda"))


def test_more_taps_than_registers_hold(host):
    """Runs in plain PyTorch."""
    x, weight, bias, state = inputs_for(1, 20, 3, convolution.MOST_TAPS["cuda"] + 1, torch.float32)
    short_convolution(x.requires_grad_(), weight, bias, state)
    assert not host.launched
    short_convolution(x, weight[..., 1:], bias, state[:, 1:].contiguous())
    assert host.launched
