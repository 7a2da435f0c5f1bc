"""Longhorn's CUDA kernels without a GPU, as test_cuda_source.py has it for the others."""

import re

import pytest
import torch
from oracle import mask_and_reset, random
from test_cuda_source import ARCHITECTURES, check_report
from test_gateloop_heads_cuda import shifted
from test_longhorn_scan import compare, inputs_for, run

from hf_recurrent.scan import longhorn_cuda, longhorn_scan


@pytest.mark.parametrize(
    "dtype, m, architecture",
    [(torch.bfloat16, 16, architecture) for architecture in ARCHITECTURES]
    + [(torch.float32, m, "sm_90") for m in (1, 12, 16, 17, 32, 48, 64, 128)]
    + [(torch.float64, m, "sm_90") for m in (16, 32, 48, 64)],
    ids=str,
)
def test_compiles_without_spills(dtype, m, architecture):
    assert m <= longhorn_cuda.MAX_STATES[dtype]
    registers, ptx = check_report(longhorn_cuda.module_for(dtype, m), architecture)
    assert len(registers) == 4
    if (dtype, m) == (torch.bfloat16, 16):  # blocks of 128 threads to a multiprocessor: four forward, three backward
        assert registers["longhorn_forward"] <= 128 and registers["longhorn_backward"] <= 168
        # Of states, 8 bytes at once, and of checkpoints 16.
        assert "st.global.v2" in ptx["longhorn_forward"] and "st.global.v4" in ptx["longhorn_forward"]
        assert not re.search(r"st\.global\.[a-z]32\b", ptx["longhorn_forward"])


# (batch, length, channels, m)
SHAPES = [(1, 1, 1, 1), (3, 2, 33, 16), (2, 19, 35, 5), (1, 21, 35, 24), (1, 12, 20, 40)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bodies_against_the_oracle(host, shape):
    mask, reset = mask_and_reset(*shape[:2])
    dtypes = (torch.float32, torch.bfloat16) if shape[3] == 16 else (torch.float32,)
    for dtype in dtypes:
        compare(inputs_for(*shape, dtype), "cuda")
        for reverse in (False, True):
            compare(inputs_for(*shape, dtype), "cuda", mask=mask, reset=reset, reverse=reverse)


def test_segments_of_time(host):
    host.multiprocessors = 8
    mask, reset = mask_and_reset(2, 1030)
    for options in ({}, {"mask": mask, "reset": reset, "reverse": True}):
        host.launched.clear()
        compare(inputs_for(2, 1030, 5, 2, torch.float32), "cuda", **options)
        assert "longhorn_backward_segments" in host.launched


def test_no_race(host):
    """The order in which the threads of a block come to run between two barriers changes no bit."""
    for shape, multiprocessors in [((2, 21, 40, 16), 1), ((1, 1050, 5, 2), 4)]:
        host.multiprocessors = multiprocessors
        inputs = inputs_for(*shape, torch.float32)
        batch, length, channels, m = shape
        weights = random(batch, length, channels, dtype=torch.float64), random(batch, channels, m, dtype=torch.float64)
        results = []
        for host.reversed in (False, True):
            results.append(run(inputs, weights, "cuda"))
        for x, y in zip(*results, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("reverse", [False, True])
def test_reset_stops_what_is_not_finite(host, reverse):
    """A NaN spoils no other document of its row, in one segment of time or in several."""
    host.multiprocessors = 4
    inputs = inputs_for(1, 1050, 3, 2, torch.float32)
    reset = torch.zeros(1, 1050, dtype=torch.bool)
    reset[0, [480, 600]] = True
    inputs[2][0, 500] = float("nan")
    weights = random(1, 1050, 3, dtype=torch.float64), torch.zeros(1, 3, 2, dtype=torch.float64)
    o, _, *grads, _ = run(inputs, weights, "cuda", reset=reset, reverse=reverse)
    for x in (o, *grads):
        assert x[:, :480].isfinite().all() and x[:, 600:].isfinite().all()
    assert o[:, 500].isnan().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("length", [37, 1050])
def test_padding_holds_anything(host, length, bad):
    """What is not finite at padding, but for q, which reads the state there too, reaches nothing else."""
    host.multiprocessors = 4
    mask, reset = mask_and_reset(2, length)
    inputs = inputs_for(2, length, 5, 3, torch.float32)
    for x in inputs[:3]:
        x[~mask] = bad
    leaves = [x.requires_grad_() for x in inputs]
    o, final = longhorn_scan(*leaves, mask=mask, reset=reset)
    grads = torch.autograd.grad(o.sum() + final.sum(), leaves)
    assert all(x.isfinite().all() for x in (o, final, *grads))
    assert not any(grad[~mask].any() for grad in grads[:3])


@pytest.mark.parametrize("shape", [(2, 5, 3, 0), (2, 5, 0, 4), (2, 0, 3, 4), (0, 5, 3, 4)], ids=str)
def test_empty(host, shape):
    *inputs, state = inputs_for(*shape, torch.float32)
    inputs = [x.requires_grad_() for x in (*inputs, state)]
    o, final = longhorn_scan(*inputs)
    torch.testing.assert_close(o, torch.zeros_like(inputs[0]))
    *grads, grad_state = torch.autograd.grad(o.sum() + final.sum(), inputs)
    assert all(not grad.any() for grad in grads)
    if shape[1] == 0:
        torch.testing.assert_close(grad_state, torch.ones_like(grad_state))


def test_more_states_than_the_kernels_take(host):
    """Runs in plain PyTorch where nothing was asked for, and says no where the kernels were."""
    inputs = inputs_for(1, 3, 2, 300, torch.float32)
    longhorn_scan(*inputs)
    assert not host.launched
    with pytest.raises(ValueError, match="backend 'cuda' takes m up to 128 in torch.float32, got 300"):
        longhorn_scan(*inputs, backend="cuda")


def test_alignment(host):
    """States at no multiple of 16 bytes."""
    inputs = [x.requires_grad_() for x in inputs_for(2, 11, 5, 16, torch.float32)]
    *inputs, state = inputs
    weights = [torch.ones(2, 11, 5), random(2, 5, 16, dtype=torch.float32)]

    def gradients(state, weight):
        o, final = longhorn_scan(*inputs, state)
        return o, final, *torch.autograd.grad([o, final], [*inputs, state], [weights[0], weight])

    want = gradients(state, weights[1])
    got = gradients(shifted(state.detach(), 8).requires_grad_(), shifted(weights[1], 8))
    assert all(torch.equal(x, y) for x, y in zip(want, got, strict=True))
    place = shifted(state.detach(), 8)
    with torch.no_grad():
        o, updated = longhorn_scan(*inputs, place, update_state=True)
    assert updated is place and torch.equal(o, want[0]) and torch.equal(place, want[1])


def test_strided_inputs(host):
    packed = random(2, 12, 2 * 33 + 2 * 4, dtype=torch.float32)
    views = packed.split([33, 33, 4, 4], dim=2)
    got = longhorn_scan(*views)
    want = longhorn_scan(*(x.contiguous() for x in views))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
