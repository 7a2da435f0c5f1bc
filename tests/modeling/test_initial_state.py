"""Learned initial states. (Used wherever a text starts: the "full" variant of families.py, in all the other tests.)"""

from dataclasses import fields

import pytest
import torch
from families import causal_lm, each_family, states, token_ids
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM

import hf_recurrent


def learned(config):
    options = {field.name: getattr(config, field.name) for field in fields(config)}
    return type(config)(**{**options, "learned_initial_state": True})


def initial_states(model) -> list[torch.nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if name.endswith("mixer.initial_state")]


@each_family
def test_it_is_zero_before_training(config):
    fresh = AutoModelForCausalLM.from_config(learned(config)).double()
    assert len(initial_states(fresh)) == config.num_hidden_layers
    assert not any(parameter.any() for parameter in initial_states(fresh))
    plain = causal_lm(config)
    assert initial_states(plain) == []
    missing, unexpected = fresh.load_state_dict(plain.state_dict(), strict=False)
    assert len(missing) == config.num_hidden_layers and not unexpected
    input_ids = token_ids(config, 2, 7)
    for arguments in ({}, {"position_ids": torch.tensor([[0, 1, 0, 0, 1, 2, 3]])}):
        got = fresh.eval()(input_ids, **arguments).logits
        torch.testing.assert_close(got, plain(input_ids, **arguments).logits, rtol=1e-10, atol=1e-12)


@each_family
def test_every_start_of_a_document_trains_it(config):
    model = causal_lm(learned(config))
    documents = [token_ids(config, 1, length, seed=length) for length in (3, 1, 5)]
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    model(torch.cat(documents, dim=1), position_ids=positions).logits.square().sum().backward()
    packed = [parameter.grad.clone() for parameter in initial_states(model)]
    model.zero_grad()
    for document in documents:
        model(document).logits.square().sum().backward()
    for got, parameter in zip(packed, initial_states(model), strict=True):
        assert got.any()
        torch.testing.assert_close(got, parameter.grad, rtol=1e-9, atol=1e-11)


@each_family
@torch.no_grad()
def test_where_it_is_the_state(config):
    """Before the first real token, and nowhere else: a cache that is carried on has its own."""
    model = causal_lm(learned(config))
    padding = torch.zeros(2, 4, dtype=torch.long)
    cache = model(token_ids(config, 2, 4), attention_mask=padding, use_cache=True).past_key_values
    for layer, parameter in zip(cache.layers, initial_states(model), strict=True):
        state = layer.states["recurrent"]
        expected = torch.view_as_complex(parameter) if state.is_complex() else parameter
        assert torch.equal(state, expected.expand_as(state))
        assert "conv" not in layer.states or not layer.states["conv"].any()
    other = model(token_ids(config, 2, 4), use_cache=True).past_key_values
    before = [state.clone() for state in states(other)]
    model(token_ids(config, 2, 4), attention_mask=padding, past_key_values=other)
    assert all(torch.equal(x, y) for x, y in zip(states(other), before, strict=True))


@each_family
def test_it_does_not_decay(config):
    model = causal_lm(learned(config))
    decay = {id(p): group["weight_decay"] for group in model.parameter_groups(1e-3, 0.1) for p in group["params"]}
    assert all(decay[id(parameter)] == 0 for parameter in initial_states(model))


@pytest.mark.parametrize("config_class", [hf_recurrent.LonghornConfig, hf_recurrent.S5Config])
def test_not_in_both_directions(config_class):
    with pytest.raises(StrictDataclassError) as error:
        config_class(bidirectional=True, learned_initial_state=True)
    assert "learned_initial_state=True needs bidirectional=False" in f"{error.value} {error.value.__cause__}"
