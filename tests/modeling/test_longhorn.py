"""Longhorn against its paper's equations, written token by token."""

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError

from hf_recurrent import LonghornConfig, LonghornForCausalLM
from hf_recurrent.modeling.longhorn import LonghornMixer

TINY = {"vocab_size": 61, "hidden_size": 12, "num_hidden_layers": 2, "state_size": 5}


def mixer_by_token(mixer: LonghornMixer, x: torch.Tensor) -> torch.Tensor:
    """(L, hidden_size) -> the same: arXiv 2407.14207, algorithm 1, with the block around it."""
    weights = dict(mixer.named_parameters())
    d, m = mixer.D.shape[0], mixer.state_shapes["recurrent"][1]
    kernel, bias = weights["conv1d.weight"][:, 0], weights["conv1d.bias"]
    window, state, outputs = x.new_zeros(kernel.shape[1], d), x.new_zeros(d, m), []
    for token in x:
        u, z = (weights["in_proj.weight"] @ token).split(d)
        window = torch.cat([window[1:], u[None]])
        u = F.silu((window * kernel.T).sum(0) + bias)
        dt, k, q = (weights["x_proj.weight"] @ u).split(mixer.widths)
        beta = torch.sigmoid(weights["dt_head.weight"] @ dt + weights["dt_head.bias"])
        eps = beta / (1 + beta * k.dot(k))
        state = (1 - torch.outer(eps, k * k)) * state + torch.outer(eps * u, k)
        outputs.append(weights["out_proj.weight"] @ ((state @ q + mixer.D * u) * F.silu(z)))
    return torch.stack(outputs)


def test_mixer_is_the_papers():
    torch.manual_seed(0)
    mixer = LonghornMixer(LonghornConfig(**TINY)).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=0.5)
    x = torch.randn(3, 20, 12, dtype=torch.float64)
    y, state = mixer(x, {}, None, None)
    assert state["recurrent"].shape == (3, 24, 5) and state["conv"].shape == (3, 3, 24)
    torch.testing.assert_close(y, torch.stack([mixer_by_token(mixer, row) for row in x]), rtol=1e-10, atol=1e-12)


def test_the_state_answers_what_it_was_taught():
    """The update solves an online regression: with beta near 1 and a unit one-hot key, S k moves halfway to x, exactly
    (eps = beta / (1 + beta)), and what other keys hold is untouched."""
    from hf_recurrent.scan import longhorn_scan

    keys = torch.eye(4, dtype=torch.float64)[None]
    x = torch.randn(1, 4, 3, dtype=torch.float64)
    _, state = longhorn_scan(x, torch.full_like(x, 40.0), keys, keys)
    torch.testing.assert_close(state, x.mT / 2)


def test_names_of_the_original():
    """Parameters have the names of the authors' checkpoints, so that conversion is a rename."""
    names = {
        name.removeprefix("model.layers.0.mixer.") for name in LonghornForCausalLM(LonghornConfig(**TINY)).state_dict()
    }
    assert {
        "D",
        "in_proj.weight",
        "conv1d.weight",
        "conv1d.bias",
        "x_proj.weight",
        "dt_head.weight",
        "dt_head.bias",
        "out_proj.weight",
    } <= names


def test_initialisation():
    model = LonghornForCausalLM(LonghornConfig(**TINY))
    for layer in model.model.layers:
        assert (layer.mixer.D == 1).all() and (layer.mixer.dt_head.bias == 0).all()
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    "name, layers, width, parameters", [("longhorn-125m", 12, 768, 83.5e6), ("longhorn-350m", 24, 1024, 210e6)]
)
def test_presets(name, layers, width, parameters):
    config = LonghornConfig.from_preset(name)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size % 8) == (layers, width, 0)
    assert config.step_rank == width // 16
    with torch.device("meta"):
        model = LonghornForCausalLM(config)
    assert model.num_parameters() == pytest.approx(parameters, rel=0.02)


@pytest.mark.parametrize(
    "options", [{"state_size": 0}, {"dt_rank": 0}, {"dt_rank": "small"}, {"conv_kernel": 1}], ids=str
)
def test_bad_options(options):
    with pytest.raises(StrictDataclassError, match=next(iter(options))):
        LonghornConfig(**options)
