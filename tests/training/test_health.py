"""The coefficients that `health` sees are those by which a state really fades."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_recurrent import FAMILIES, GateLoopConfig, LonghornConfig, MinGRUConfig, S5Config
from hf_recurrent.modeling.layers import RecurrentBlock
from hf_recurrent.training import health as module
from hf_recurrent.training.health import health, summarise, windows

SIZES = {"vocab_size": 13, "hidden_size": 8, "num_hidden_layers": 2, "hidden_dropout": 0.5}
CONFIGS = [
    *(config_class(**SIZES) for config_class in FAMILIES),
    GateLoopConfig(**SIZES, data_controlled=False, num_heads=2),
    GateLoopConfig(**SIZES, transition="cartesian", complex_transition=False, conv_kernel=3),
    LonghornConfig(**SIZES, state_size=3, conv_kernel=0),
    S5Config(**SIZES, discretization="bilinear", step_rescale=2.0),
    MinGRUConfig(**SIZES, conv_residual=True),
]


def batch_of(length=20, rows=2):
    ids = torch.arange(rows * length).view(rows, length) % 13
    return {"input_ids": ids, "position_ids": torch.arange(length).expand(rows, -1), "labels": ids}


def faded(mixer, x):
    """|a| of one row by the mixer itself: what an additional state before a token adds to the state after it."""
    shape = mixer.state_shapes["recurrent"]
    dtype = torch.complex64 if mixer.complex_state else torch.float32
    convolution = {name: torch.zeros(1, *size) for name, size in mixer.state_shapes.items() if name == "conv"}
    places = []
    for place in range(x.shape[1]):
        states = [torch.zeros(1, *shape, dtype=dtype), torch.ones(1, *shape, dtype=dtype)]
        after = [mixer(x[:, place : place + 1], {"recurrent": h, **convolution}, None, None)[1] for h in states]
        places.append((after[1]["recurrent"] - after[0]["recurrent"]).abs().flatten())
        convolution = {name: after[0][name] for name in convolution}
    return torch.stack(places)[None]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_every_family(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    for parameter in model.parameters():  # away from the initial values, all alike, of some of them
        parameter.data += 0.3 * torch.randn_like(parameter)
    batch = batch_of()
    inputs = []
    mixers = [block.mixer for block in model.modules() if isinstance(block, RecurrentBlock)]
    handles = [mixer.register_forward_hook(lambda mixer, given, _: inputs.append(given[0])) for mixer in mixers]
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    result = health(model, batch, lambda values: values)
    for handle in handles:
        handle.remove()
    assert torch.equal(torch.get_rng_state(), generator) and model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(child._forward_hooks for child in model.modules())
    names = ("gates_closed", "gates_open", "memory_1", "memory_16")
    assert set(result) == {*names, *(f"{name}/layer_{number}" for name in names for number in (0, 1))}
    with torch.no_grad():
        for number, (mixer, x) in enumerate(zip(mixers, inputs, strict=True)):
            a = faded(mixer.eval(), x).double()
            products = torch.stack([a[:, start : start + 16].prod(1) for start in range(a.shape[1] - 15)])
            expected = [(a < 0.01).double(), (a > 0.99).double(), a, products]
            for name, value in zip(names, expected, strict=True):
                assert result[f"{name}/layer_{number}"] == pytest.approx(value.mean().item(), rel=1e-4, abs=1e-6), name
    for name in names:
        assert result[name] == pytest.approx(sum(result[f"{name}/layer_{number}"] for number in (0, 1)) / 2)


def test_a_family_that_is_not_known_would_be_missed():
    assert {config_class.model_type for config_class in FAMILIES} == {
        mixer.__name__.removesuffix("Mixer").lower() for mixer in module.FAMILIES
    }


def test_windows_and_summary():
    assert [windows(length) for length in (1, 15, 16, 5000)] == [[1], [1], [1, 16], [1, 16, 256, 4096]]
    a = torch.full((1, 40, 3), 0.5)
    a[..., 1], a[..., 2] = 0.999, 0.001
    found = {name: value.item() for name, value in summarise(iter([a]), 256).items()}
    assert found["gates_closed"] == found["gates_open"] == pytest.approx(1 / 3)
    assert found["memory_16"] == pytest.approx((0.5**16 + 0.999**16) / 3, rel=1e-6)
    assert found["memory_256"] != found["memory_256"]  # nan: the row is shorter
    assert summarise(iter([torch.zeros(1, 1, 2)]), 300)["memory_256"] == 0


def test_the_longest_row_without_its_padding():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MinGRUConfig(**SIZES))
    batch = batch_of(rows=3)
    alone = {name: values[1:2, :18] for name, values in batch.items()}
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 4:] = mask[1, 18:] = mask[2, 2:] = 0
    padded = health(model, batch | {"attention_mask": mask}, lambda values: values)
    assert padded == health(model, alone, lambda values: values)
    short = {name: values[:1, :9] for name, values in batch.items()}
    parts = [{}, {}]

    def both(values):  # as if one process had a longer row than the other
        parts[0]["values"] = values
        return values + torch.stack([torch.zeros_like(values[0]), torch.ones_like(values[1])]) * values[1:]

    assert "memory_16" not in health(model, short, lambda values: values)
    assert health(model, batch | {"attention_mask": 0 * mask}, lambda values: values) == {}  # nothing but padding
    assert health(model, alone, both)["memory_16"] == pytest.approx(padded["memory_16"] / 2)
