"""The CUDA kernels of GateLoop's heads without a GPU, as test_cuda_source.py has it for the others."""

import pytest
import torch
from oracle import mask_and_reset, random
from test_cuda_source import ARCHITECTURES, check_report
from test_gateloop_heads import compare, inputs_for, run

from hf_recurrent.scan import gateloop_heads_cuda, gateloop_heads_scan

FLOAT, HALF, COMPLEX = torch.float32, torch.bfloat16, torch.complex64


def test_compiles_without_spills():
    cases = [((HALF, COMPLEX, 8, 8), architecture) for architecture in ARCHITECTURES]
    print(cases)


# (batch, length, heads, d_k, d_v), multiprocessors of more than one splitting time
SHAPES = [
    (1, 1, 1, 2, 2), (2, 33, 3, 2, 2), (1, 1000, 3, 4, 4), (2, 33, 3, 8, 8), (2, 7, 3, 3, 5), (2, 33, 3, 16, 16),
    (1, 2, 1, 64, 64), (1, 150, 2, 8, 40)
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bodies_against_the_loop(host, shape):
    mask, reset = mask_and_reset(*shape[:2])
    start = random(*shape[2:], dtype=COMPLEX)
    compare(inputs_for(*shape, FLOAT), "cuda")
    compare(inputs_for(*shape, FLOAT), "cuda", mask=mask, reset=reset, reverse=True)
    compare(inputs_for(*shape, FLOAT), "cuda", mask=mask, reset=reset, start=start)
