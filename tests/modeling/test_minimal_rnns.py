"""minGRU and minLSTM against the equations of their paper, and against the released package minGRU-pytorch."""

import pytest
import torch
from families import causal_lm, token_ids
from huggingface_hub.errors import StrictDataclassError
from minGRU_pytorch.minGRU import minGRU
from minGRU_pytorch.minLM import minLM
from minGRU_pytorch.minLSTM import minLSTM
from torch import nn

from hf_recurrent import MinGRUConfig, MinLSTMConfig
from hf_recurrent.modeling.mingru import MinGRUMixer
from hf_recurrent.modeling.minlstm import MinLSTMMixer

# Each configuration with its mixer, and the released module with the name of its projection.
PAIRS = {
    "mingru": (MinGRUConfig, MinGRUMixer, minGRU, "to_hidden_and_gate"),
    "minlstm": (MinLSTMConfig, MinLSTMMixer, minLSTM, "to_hidden_and_f_i_gate"),
}
each = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


def twins(pair, expansion=1.5):
    """A mixer and a released module with the same weights, in float64."""
    config_class, mixer_class, released_class, projection = pair
    config = config_class(vocab_size=7, hidden_size=10, expansion=expansion, conv_kernel=0)
    mixer, released = mixer_class(config).double(), released_class(10, expansion_factor=expansion).double()
    mixer.in_proj.load_state_dict(getattr(released, projection).state_dict())
    if mixer.out_proj is not None:
        mixer.out_proj.load_state_dict(released.to_out.state_dict())
    return mixer, released


@each
@pytest.mark.parametrize("candidate", ["positive", "vanilla"])
@torch.no_grad()
def test_the_mixer_computes_the_papers_equations(pair, candidate):
    config_class, mixer_class, *_ = pair
    config = config_class(vocab_size=7, hidden_size=6, expansion=2, conv_kernel=0, candidate=candidate)
    mixer = mixer_class(config).double()
    x, h = torch.randn(2, 9, 6, dtype=torch.double), torch.randn(2, 12, dtype=torch.double)
    weights = mixer.in_proj.weight.chunk(mixer.num_inputs)
    y, state = mixer(x, {"recurrent": h}, None, None)
    for t in range(9):
        hidden, *gates = (x[:, t] @ weight.T for weight in weights)
        if candidate == "positive":
            hidden = torch.where(hidden >= 0, hidden + 0.5, hidden.sigmoid())
        if config_class is MinGRUConfig:
            z = gates[0].sigmoid()
            h = (1 - z) * h + z * hidden
        else:
            f, i = (gate.sigmoid() for gate in gates)
            h = f / (f + i) * h + i / (f + i) * hidden
        torch.testing.assert_close(y[:, t], mixer.out_proj(h), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state["recurrent"], h, rtol=1e-12, atol=1e-12)


@each
@pytest.mark.parametrize("expansion", [1, 1.5])
@pytest.mark.parametrize("length", [1, 2, 300])
def test_the_mixer_equals_the_released_module(pair, expansion, length):
    mixer, released = twins(pair, expansion)
    x = 3 * torch.randn(2, length, 10, dtype=torch.double)
    outputs, gradients = [], []
    for module in (lambda x: mixer(x, {}, None, None)[0], released):
        leaf = x.clone().requires_grad_()
        outputs.append(module(leaf))
        gradients += torch.autograd.grad(outputs[-1].square().sum(), leaf)
    torch.testing.assert_close(*outputs, rtol=1e-7, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-10)


@each
@torch.no_grad()
def test_the_language_model_equals_the_released_one(pair):
    config_class, _, released_class, projection = pair
    sizes = {"vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 2, "expansion": 1.5, "mlp_ratio": 4}
    # RMSNorm's own default epsilon, and biases in the MLPs only.
    config = config_class(**sizes, conv_kernel=0, use_bias=True, norm_eps=torch.finfo(torch.float64).eps)
    model = causal_lm(config)
    released = minLM(num_tokens=31, dim=12, depth=2, expansion=1.5, use_lstm=released_class is minLSTM).double()
    for module in released.modules():
        if isinstance(module, nn.RMSNorm):
            module.weight.uniform_(0.5, 1.5)
    renamed = {"model.embed_tokens": released.token_emb, "model.norm": released.norm, "lm_head": released.to_logits}
    for i, (_, norm, rnn, mlp_norm, mlp, _) in enumerate(released.layers):
        parts = {"mixer_norm": norm, "mixer.in_proj": getattr(rnn, projection), "mixer.out_proj": rnn.to_out}
        parts |= {"mlp_norm": mlp_norm, "mlp.up_proj": mlp[0], "mlp.down_proj": mlp[2]}
        renamed |= {f"model.layers.{i}.{name}": module for name, module in parts.items()}
    weights = {f"{name}.{key}": x for name, module in renamed.items() for key, x in module.state_dict().items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and all(name.endswith("_proj.bias") and ".mixer." in name for name in missing)
    input_ids = token_ids(config, 2, 40)
    torch.testing.assert_close(model(input_ids).logits, released(input_ids), rtol=1e-7, atol=1e-10)


@each
@torch.no_grad()
def test_a_carried_state_is_used_as_it_is(pair):
    """The released minLSTM applies g to a carried state again; what two calls give then differs from one call."""
    mixer, released = twins(pair)
    x = torch.randn(2, 9, 10, dtype=torch.double)
    whole, _ = mixer(x, {}, None, None)
    torch.testing.assert_close(whole, released(x), rtol=1e-7, atol=1e-12)
    _, state = mixer(x[:, :4], {}, None, None)
    second, _ = mixer(x[:, 4:], state, None, None)
    torch.testing.assert_close(second, whole[:, 4:], rtol=1e-12, atol=1e-12)
    _, theirs = released(x[:, :4], return_next_prev_hidden=True)
    torch.testing.assert_close(state["recurrent"], theirs[:, 0], rtol=1e-7, atol=1e-12)
    their_second = released(x[:, 4:], theirs)
    if isinstance(released, minLSTM):
        assert ((their_second - whole[:, 4:]).abs().max() > 0.01 * whole.abs().max()).item()
    else:
        torch.testing.assert_close(their_second, whole[:, 4:], rtol=1e-7, atol=1e-12)


@each
def test_presets(pair):
    config_class, *_ = pair
    family = config_class.model_type
    config = config_class.from_preset(f"{family}-shakespeare")
    assert (config.num_hidden_layers, config.hidden_size, config.recurrent_size) == (3, 384, 768)
    assert (config.conv_kernel, config.hidden_dropout, config.candidate) == (4, 0.2, "positive")
    config = config_class.from_preset(f"{family}-selective-copying", hidden_dropout=0.0)
    assert (config.num_hidden_layers, config.hidden_size, config.recurrent_size, config.vocab_size) == (3, 64, 384, 16)
    assert (config.conv_kernel, config.mlp_ratio, config.hidden_dropout) == (0, 0, 0.0)


def convolved(config_class, dtype=torch.float64):
    """A language model whose convolutions have branches of their own."""
    config = config_class(
        vocab_size=31, hidden_size=12, num_hidden_layers=2, conv_kernel=3, conv_residual=True, use_mlp_bias=True,
        initializer_range=0.4,
    )  # fmt: skip
    return causal_lm(config, dtype)


@each
@torch.no_grad()
def test_a_convolution_with_a_branch_of_its_own(pair):
    """In pieces, padded, packed and taken back, as everything else (the released package: test_sources.py)."""
    model = convolved(pair[0])
    assert all(isinstance(layer.mixer_norm, nn.Identity) for layer in model.model.layers)
    close = {"rtol": 1e-9, "atol": 1e-10}
    input_ids = token_ids(model.config, 2, 12)
    whole = model(input_ids).logits
    cache, pieces = None, []
    for piece in input_ids.split([1, 5, 2, 4], dim=1):
        outputs = model(piece, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        pieces.append(outputs.logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, **close)
    padded, mask = (torch.cat([x.new_zeros(2, 3), x], dim=1) for x in (input_ids, torch.ones_like(input_ids)))
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 3:], whole, **close)
    positions = torch.cat([torch.arange(12), torch.arange(12)])[None]
    packed = model(input_ids.view(1, 24), position_ids=positions).logits
    torch.testing.assert_close(packed.view(2, 12, -1), whole, **close)
    cache = model(input_ids[:, :6], use_cache=True).past_key_values
    before = cache.clone()
    cache.activate_past_recording()
    model(input_ids[:, 6:9], past_key_values=cache, use_cache=True)
    cache.crop(-3)
    for layer, expected in zip(cache.layers, before.layers, strict=True):
        assert all(torch.equal(state, expected.states[name]) for name, state in layer.states.items())


@each
def test_a_convolutions_branch_trains_and_keeps_the_wide_stream(pair):
    model = convolved(pair[0], torch.bfloat16).train()
    input_ids = token_ids(model.config, 2, 12)
    outputs = model(input_ids, labels=input_ids, output_hidden_states=True)
    outputs.loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    assert outputs.hidden_states[1].dtype == torch.float32
    with pytest.raises(StrictDataclassError, match="conv_residual=True needs a convolution"):
        pair[0](conv_residual=True, conv_kernel=0)


@each
def test_biases_of_the_mlp_alone(pair):
    for use_bias in (False, True):
        for use_mlp_bias in (None, False, True):
            sizes = {"vocab_size": 7, "hidden_size": 8, "num_hidden_layers": 1}
            layer = causal_lm(pair[0](**sizes, use_bias=use_bias, use_mlp_bias=use_mlp_bias)).model.layers[0]
            assert (layer.mixer.in_proj.bias is not None) == use_bias
            expected = use_bias if use_mlp_bias is None else use_mlp_bias
            assert (layer.mlp.up_proj.bias is not None) == (layer.mlp.down_proj.bias is not None) == expected
