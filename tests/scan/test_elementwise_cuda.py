"""The elementwise functions' CUDA kernels without a GPU, as test_cuda_source.py has it for the scans."""

import re

import pytest
import torch
from oracle import alike
from test_convolution_cuda import at_the_end_of_memory, sliced
from test_cuda_source import ARCHITECTURES, check_report
from test_elementwise import NAMES, SKIPPING, call, compare, every_function, inputs_for
from test_gateloop_heads_cuda import shifted

from hf_recurrent.scan import elementwise_cuda
from hf_recurrent.scan.elementwise import FUNCTIONS, gate, skip_silu_gate


@every_function
@pytest.mark.parametrize(
    "dtype, architecture",
    [(torch.bfloat16, architecture) for architecture in ARCHITECTURES]
    + [(dtype, "sm_90") for dtype in (torch.float32, torch.float16, torch.float64)]
    + [(torch.float64, "sm_100")],
    ids=str,
)
def test_compiles_without_spills(function, dtype, architecture):
    for width in (elementwise_cuda.widest(dtype), 1):
        module = elementwise_cuda.module_for(FUNCTIONS[NAMES[function]], dtype, width)
        registers, ptx = check_report(module, architecture)
        assert set(registers) == {"elementwise_forward", "elementwise_backward"}
        assert max(registers.values()) <= 128  # four blocks of 128 threads to a multiprocessor
        if width > 1:  # one by one: what a thread adds up for d
            stores = [re.findall(r"st\.global\S*", ptx[f"elementwise_{name}"]) for name in ("forward", "backward")]
            single = [sum(".v" not in store for store in those) for those in stores]
            assert single == [0, int(function in SKIPPING)], stores


# Several blocks of positions, rows that end within one, warps without channels, wide accesses and single ones.
HOST_SHAPES = [(1, 7, 1), (3, 2, 8), (2, 150, 36), (5, 33, 264), (70, 1, 5), (0, 3, 4), (2, 3, 0)]


@every_function
@pytest.mark.parametrize("shape", HOST_SHAPES, ids=str)
def test_bodies_against_the_definition(host, shape, function):
    common = shape[2] == 8
    for dtype in (torch.float32, torch.bfloat16, torch.float64) if common else (torch.float32,):
        for scaled in (False, True):
            compare(function, shape, dtype, scaled)
    assert set(host.launched) == ({"elementwise_forward", "elementwise_backward"} if min(shape) else set())


@every_function
def test_layouts(host, function):
    """Rows where accesses of several channels cannot begin, channels that do not lie side by side, a gradient that is
    expanded: as for tensors that are contiguous."""
    x, y, z, slopes = torch.randn(4, 2, 40, 36)
    d = torch.randn(36)

    def run(x, y, z, d, slopes):
        inputs = [t.detach().requires_grad_() for t in inputs_for(function, x, y, z, d)]
        out = call(function, *inputs)
        return [out, *torch.autograd.grad(out, inputs, slopes)]

    want = run(x, y, z, d, slopes)
    for odd in (sliced, lambda t: shifted(t, 4), lambda t: t.transpose(0, 2).contiguous().transpose(0, 2)):
        alike([want, run(odd(x), y, z, d, slopes), run(x, odd(y), odd(z), d, slopes), run(x, y, z, d, odd(slopes))])
    alike([want, run(x, y, z, shifted(d, 4), slopes)])
    alike([run(x, y, z, d, torch.ones(())[None, None].expand_as(x)), run(x, y, z, d, torch.ones_like(x))])


def test_no_race(host):
    """The order in which the threads of a block come to run between two barriers changes no bit."""
    torch.manual_seed(0)
    tensors = [*torch.randn(3, 2, 300, 36), torch.randn(36)]
    results = []
    for host.reversed in (False, True):
        inputs = [t.clone().requires_grad_() for t in tensors]
        results.append(torch.autograd.grad(skip_silu_gate(*inputs).sum(), inputs))
    alike(results)


def test_nothing_is_read_beyond_the_end(host):
    for channels in (5, 8):
        tensors = [*torch.randn(3, 2, 33, channels), torch.randn(channels)]
        inputs = [at_the_end_of_memory(t).requires_grad_() for t in tensors]
        out = skip_silu_gate(*inputs)
        torch.autograd.grad(out, inputs, at_the_end_of_memory(torch.ones(2, 33, channels)))


def test_without_gradients(host):
    with torch.no_grad():
        torch.testing.assert_close(gate(torch.ones(1, 2, 3), torch.zeros(1, 2, 3)), torch.full((1, 2, 3), 0.5))
    assert host.launched == ["elementwise_forward"]
