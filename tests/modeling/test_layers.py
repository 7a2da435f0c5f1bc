"""The shared layers against their definitions in plain PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_recurrent import MinGRUConfig
from hf_recurrent.modeling.layers import MLP, RecurrentBlock, RMSNorm, ShortConvolution

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def convolution_by_definition(conv, x, state, mask, reset):
    """Token by token: a list of the document's real inputs so far, of which the last k are weighed."""
    k = conv.kernel_size[0]
    outputs, states = torch.zeros_like(x), []
    for b, row in enumerate(x):
        past = [torch.zeros_like(row[0])] * (k - 1) if state is None else list(state[b])
        for t, token in enumerate(row):
            if not mask[b, t]:
                continue
            if reset[b, t]:
                past = [torch.zeros_like(token)] * (k - 1)
            past = [*past[-(k - 1) :], token]
            outputs[b, t] = sum(conv.weight[:, 0, j] * past[j] for j in range(k))
            if conv.bias is not None:
                outputs[b, t] += conv.bias
        states.append(torch.stack(past[-(k - 1) :]))
    return outputs, torch.stack(states)


@pytest.mark.parametrize("kernel_size", [2, 3, 4, 9])
@pytest.mark.parametrize("length", [1, 2, 3, 14])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("carried", [False, True])
def test_short_convolution(kernel_size, length, masked, packed, carried):
    conv = ShortConvolution(5, kernel_size, bias=length != 2).double()
    x = torch.randn(4, length, 5, dtype=torch.double, requires_grad=True)
    state = torch.randn(4, kernel_size - 1, 5, dtype=torch.double, requires_grad=True) if carried else None
    mask = torch.rand(4, length) < 0.6 if masked else None
    reset = torch.rand(4, length) < 0.3 if packed else None
    everywhere = torch.ones(4, length, dtype=torch.bool)
    y, new_state = conv(x, state, mask, reset)
    real = everywhere if mask is None else mask
    expected, expected_state = convolution_by_definition(conv, x, state, real, ~everywhere if reset is None else reset)
    torch.testing.assert_close(y[real], expected[real], **CLOSE)
    torch.testing.assert_close(new_state, expected_state, **CLOSE)
    assert y.isfinite().all()

    inputs = [x, conv.weight, *([conv.bias] if conv.bias is not None else []), *([state] if carried else [])]
    weights, state_weights = torch.randn_like(y), torch.randn_like(new_state)

    def gradients(y, new_state):
        loss = (y * weights)[real].sum() + (new_state * state_weights).sum()
        return torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)

    for got, want in zip(gradients(y, new_state), gradients(expected, expected_state), strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


def test_short_convolution_is_a_causal_conv1d_with_its_parameters():
    conv = ShortConvolution(6, 4, bias=True).double()
    reference = nn.Conv1d(6, 6, 4, groups=6, padding=3).double()
    reference.load_state_dict(conv.state_dict())
    x = torch.randn(2, 10, 6, dtype=torch.double)
    y, state = conv(x, None, None, None)
    torch.testing.assert_close(y, reference(x.transpose(1, 2))[:, :, :10].transpose(1, 2), **CLOSE)
    assert torch.equal(state, x[:, -3:]) and y.is_contiguous()


def test_short_convolution_keeps_other_rows_out():
    """An infinite input changes only what sees it: nothing is computed and then subtracted."""
    conv = ShortConvolution(3, 4, bias=True)
    x = torch.randn(2, 8, 3)
    reset = torch.zeros(2, 8, dtype=torch.bool)
    reset[0, 4] = True
    clean, clean_state = conv(x, None, None, reset)
    wild = x.clone()
    wild[0, 3] = float("inf")
    y, state = conv(wild, None, None, reset)
    assert torch.equal(y[0, 4:], clean[0, 4:]) and torch.equal(y[1], clean[1]) and torch.equal(state, clean_state)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_short_convolution_compiled(masked, packed):
    """Traced, it cannot look at which tokens need more than the plain convolution, and takes another way."""
    conv = ShortConvolution(5, 4, bias=True).double()
    x, state = torch.randn(2, 9, 5, dtype=torch.double), torch.randn(2, 3, 5, dtype=torch.double)
    mask = torch.rand(2, 9) < 0.6 if masked else None
    reset = torch.rand(2, 9) < 0.3 if packed else None
    expected, expected_state = conv(x, state, mask, reset)
    y, new_state = torch.compile(conv, fullgraph=True, backend="aot_eager")(x, state, mask, reset)
    real = slice(None) if mask is None else mask
    torch.testing.assert_close(y[real], expected[real], **CLOSE)
    torch.testing.assert_close(new_state, expected_state, **CLOSE)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16, torch.float64])
def test_rms_norm_computes_in_the_dtype_of_the_stream(weights, stream):
    norm = RMSNorm(8, eps=1e-3)
    nn.init.normal_(norm.weight)
    norm.to(weights)
    x = torch.randn(2, 5, 8, dtype=stream)
    wide = torch.promote_types(stream, torch.float32)
    x_wide = x.to(wide)
    expected = x_wide * (x_wide.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * norm.weight.to(wide)
    y = norm(x)
    assert y.dtype is weights
    torch.testing.assert_close(
        y, expected.to(weights), rtol=2e-2 if torch.bfloat16 in (weights, stream) else 1e-6, atol=1e-6
    )


def test_a_block_without_mlp_and_dropout_is_a_residual_mixer():
    config = MinGRUConfig(vocab_size=7, hidden_size=6, mlp_ratio=0)
    block = RecurrentBlock(config, lambda x, state, mask, reset: (2 * x, {"seen": mask}))
    x, mask = torch.randn(2, 3, 6), torch.ones(2, 3, dtype=torch.bool)
    y, state = block(x, {}, mask, None)
    torch.testing.assert_close(y, x + 2 * block.mixer_norm(x))
    assert state == {"seen": mask} and not hasattr(block, "mlp")


def test_mlp():
    config = MinGRUConfig(vocab_size=7, hidden_size=6, mlp_ratio=1.5, hidden_act="relu", use_bias=True)
    mlp = MLP(config)
    x = torch.randn(2, 3, 6)
    up, down = mlp.up_proj, mlp.down_proj
    expected = F.relu(x @ up.weight.T + up.bias) @ down.weight.T + down.bias
    assert up.weight.shape == (9, 6)
    torch.testing.assert_close(mlp(x), expected)


def test_layers_copy_and_pickle():
    conv = ShortConvolution(5, 4, bias=True)
    assert torch.equal(copy.deepcopy(conv).weight, conv.weight)
