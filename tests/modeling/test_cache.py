"""RecurrentCache as a value, and the errors of a cache that does not fit."""

import copy
import pickle
from dataclasses import fields

import pytest
import torch
from families import causal_lm, each_family, states, token_ids
from transformers import DynamicCache
from transformers.cache_utils import Cache

from hf_recurrent import RecurrentCache


@pytest.fixture
def model(config):
    return causal_lm(config)


def filled(model, batch=3, length=5):
    with torch.no_grad():
        return model(token_ids(model.config, batch, length), use_cache=True).past_key_values


@each_family
def test_a_new_cache_is_empty(config):
    cache = RecurrentCache(config)
    assert isinstance(cache, Cache) and len(cache) == config.num_hidden_layers
    assert cache.get_seq_length() == 0 and cache.nbytes == 0 and cache.batch_size == -1
    assert cache.get_max_length() == -1
    assert not cache.is_compileable and not cache.is_croppable and not cache.is_initialized


@each_family
def test_sizes_and_names(model):
    cache = filled(model)
    assert cache.batch_size == 3 and cache.get_seq_length() == 5
    assert cache.nbytes == sum(x.numel() * x.element_size() for x in states(cache))
    for held, layer in zip(cache.layers, model.model.layers, strict=True):
        assert {name: tuple(x.shape) for name, x in held.states.items()} == {
            name: (3, *shape) for name, shape in layer.mixer.state_shapes.items()
        }
        assert "recurrent" in held.states
    assert "3" in repr(cache) and f"{cache.nbytes} bytes" in repr(cache)
    assert "recurrent" in repr(cache.layers[0])


@each_family
def test_batch_operations(model):
    reference = states(filled(model))
    operations = {
        "reorder_cache": (torch.tensor([2, 0, 0]), [2, 0, 0]),
        "batch_select_indices": (torch.tensor([1]), [1]),
        "batch_repeat_interleave": (2, [0, 0, 1, 1, 2, 2]),
    }
    for name, (argument, rows) in operations.items():
        cache = filled(model)
        getattr(cache, name)(argument)
        assert cache.batch_size == len(rows) and cache.get_seq_length() == 5
        for x, y in zip(states(cache), reference, strict=True):
            assert torch.equal(x, y[rows])
        empty = RecurrentCache(model.config)
        getattr(empty, name)(argument)
        assert empty.nbytes == 0


@each_family
def test_reset_starts_again(model):
    cache = filled(model)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    again = model(token_ids(model.config, 2, 4), past_key_values=cache)
    assert torch.equal(again.logits, model(token_ids(model.config, 2, 4)).logits)


@each_family
def test_copies_are_independent(model):
    cache = filled(model)
    before = [x.clone() for x in states(cache)]
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        model(token_ids(model.config, 3, 2), past_key_values=other)
        assert other.get_seq_length() == 7 and cache.get_seq_length() == 5
        assert all(torch.equal(x, y) for x, y in zip(states(cache), before, strict=True))


@each_family
def test_states_are_replaced_and_never_written_into(model):
    cache = filled(model)
    kept = [dict(layer.states) for layer in cache.layers]
    before = [{name: x.clone() for name, x in layer.items()} for layer in kept]
    model(token_ids(model.config, 3, 2), past_key_values=cache)
    for held, values in zip(kept, before, strict=True):
        assert all(torch.equal(held[name], values[name]) for name in values)


@each_family
def test_crop_and_recording_are_refused(model):
    cache = filled(model)
    cache.crop(0)
    for n in (-2, 3):
        with pytest.raises(NotImplementedError, match=f"cannot remove {abs(n)} tokens"):
            cache.crop(n)
    with pytest.raises(NotImplementedError, match="does not record past states"):
        cache.activate_past_recording()
    assert cache.get_seq_length() == 5


@each_family
def test_use_cache_decides_what_is_returned_and_written(model):
    input_ids = token_ids(model.config, 3, 4)
    cache = filled(model)
    before = [x.clone() for x in states(cache)]
    out = model(input_ids, past_key_values=cache, use_cache=False)
    assert out.past_key_values is None and cache.get_seq_length() == 5
    assert all(torch.equal(x, y) for x, y in zip(states(cache), before, strict=True))
    written = model(input_ids, past_key_values=cache)
    assert written.past_key_values is cache and torch.equal(out.logits, written.logits)
    assert model(input_ids, use_cache=False).past_key_values is None
    model.config.use_cache = False
    assert model(input_ids).past_key_values is None
    assert model(input_ids, use_cache=True).past_key_values.get_seq_length() == 4


@each_family
def test_a_cache_that_does_not_fit(model, config):
    input_ids = token_ids(config, 3, 2)
    with pytest.raises(TypeError, match="past_key_values must be a RecurrentCache, got a DynamicCache"):
        model(input_ids, past_key_values=DynamicCache())
    with pytest.raises(TypeError, match="past_key_values must be a RecurrentCache, got a tuple"):
        model(input_ids, past_key_values=((input_ids, input_ids),))
    with pytest.raises(ValueError, match="holds the states of 2 rows, the input has 3"):
        model(input_ids, past_key_values=filled(model, batch=2))

    def other(**changes):
        options = {field.name: getattr(config, field.name) for field in fields(config)}
        return filled(causal_lm(type(config)(**{**options, **changes})))

    with pytest.raises(ValueError, match="past_key_values has 3 layers, .*Model has 2"):
        model(input_ids, past_key_values=other(num_hidden_layers=3))
    with pytest.raises(ValueError, match="states of another model: layer 0 has the shapes .*'recurrent'"):
        size = "state_size" if hasattr(config, "state_size") else "hidden_size"
        model(input_ids, past_key_values=other(**{size: getattr(config, size) * 2}))


@each_family
def test_a_call_that_fails_leaves_the_cache_as_it_was(model):
    cache = filled(model)
    before = [x.clone() for x in states(cache)]

    def fail(*args):
        raise KeyboardInterrupt

    hook = model.model.layers[-1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(token_ids(model.config, 3, 2), past_key_values=cache)
    hook.remove()
    assert cache.get_seq_length() == 5
    assert all(torch.equal(x, y) for x, y in zip(states(cache), before, strict=True))
