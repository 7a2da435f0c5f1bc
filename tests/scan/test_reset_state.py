"""Documents that start from a state of their own instead of zero: against each document alone."""

import itertools

import pytest
import torch
from oracle import CELLS, linear

from hf_recurrent.scan import linear_scan, longhorn_scan, mingru_scan


def document_by_document(scan, inputs, initial_state, start, mask, reset):
    """Outputs and final states, row by row and call by call."""
    outputs, finals = [], []
    for row in range(len(mask)):
        real = mask[row].nonzero()[:, 0]
        marks = [i for i, t in enumerate(real) if reset[row, t]]
        state, parts = initial_state[row : row + 1], []
        for first, end in itertools.pairwise(sorted({0, *marks, len(real)})):
            state = start[None] if first in marks else state
            y, state = scan(*(x[row : row + 1, real[first:end]] for x in inputs), state)
            parts.append(y[0])
        outputs.append(torch.cat(parts))
        finals.append(state)
    return torch.cat(outputs), torch.cat(finals)


SCANS = {"linear": (linear, 2), "complex": (linear, 2), **CELLS, "longhorn": (longhorn_scan, 4)}


@pytest.mark.parametrize("backend", ["reference", "chunked", None])
@pytest.mark.parametrize("name", SCANS)
def test_values_and_gradients(name, backend):
    torch.manual_seed(1)
    scan, count = SCANS[name]
    batch, length, channels, m = 3, 17, 5, 3
    dtype = torch.complex128 if name == "complex" else torch.float64
    inputs = [torch.randn(batch, length, channels, dtype=dtype) for _ in range(count)]
    shape = (channels,)
    if name == "longhorn":
        inputs[2:] = [torch.randn(batch, length, m, dtype=dtype) for _ in range(2)]
        shape = (channels, m)
    start, initial = torch.randn(*shape, dtype=dtype), torch.randn(batch, *shape, dtype=dtype)
    mask, reset = torch.rand(batch, length) < 0.8, torch.rand(batch, length) < 0.3
    mask[:, 1], reset[0] = True, False
    leaves = [x.requires_grad_() for x in (*inputs, initial, start)]
    y, final = scan(*inputs, initial, mask=mask, reset=reset, reset_state=start, backend=backend)
    got = y[mask], final
    want = document_by_document(scan, inputs, initial, start, mask, reset)
    weights = [torch.randn_like(x) for x in want]
    grads = []
    for outputs in (got, want):
        loss = sum((w.conj() * x).sum().real for w, x in zip(weights, outputs, strict=True))
        grads.append(torch.autograd.grad(loss, leaves))
    for x, z in zip((*got, *grads[0]), (*want, *grads[1]), strict=True):
        torch.testing.assert_close(x, z, rtol=1e-10, atol=1e-10)


def test_low_precision_keeps_the_start():
    x = torch.randn(1, 6, 4).bfloat16()
    reset = torch.zeros(1, 6, dtype=torch.bool)
    reset[0, 3] = True
    start = torch.full((4,), 1 + 2**-12)
    shut = torch.full_like(x, -200.0)  # gates that keep everything
    _, final = mingru_scan(x, shut, reset=reset, reset_state=start)
    assert torch.equal(final[0], start)
    y, final = longhorn_scan(x, shut, x[..., :2], x[..., :2], reset=reset, reset_state=start[:, None].expand(-1, 2))
    assert y.dtype is torch.bfloat16 and torch.equal(final[0], start[:, None].expand(-1, 2))


@pytest.mark.parametrize("channels, m", [(0, 3), (3, 0)])
def test_longhorn_without_states(channels, m):
    x, k, reset = torch.rand(2, 5, channels), torch.rand(2, 5, m), torch.ones(2, 5, dtype=torch.bool)
    o, final = longhorn_scan(x, x, k, k, reset=reset, reset_state=torch.rand(channels, m))
    assert torch.equal(o, torch.zeros(2, 5, channels)) and final.shape == (2, channels, m)


def test_what_cannot_be():
    a = torch.rand(2, 5, 3)
    with pytest.raises(ValueError, match=r"reset_state must have the shape \(3,\) or \(2, 3\), got \(4,\)"):
        linear_scan(a, a, reset_state=torch.zeros(4))
    with pytest.raises(TypeError, match="reset_state is torch.complex64, but the inputs are real"):
        linear_scan(a, a, reset_state=torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match="reset_state goes with reverse=False"):
        linear_scan(a, a, reset_state=torch.zeros(3), reverse=True)
    with pytest.raises(ValueError, match=r"reset_state must have the shape \(3, 2\), got \(3,\)"):
        longhorn_scan(a, a, a[..., :2], a[..., :2], reset_state=torch.zeros(3))
