"""States at fixed addresses: what compiled decoding asks of a cache. (What a cache can do: test_cache_programs.py.)"""

import copy
import pickle

import pytest
import torch
from families import FIRST, causal_lm, each_family, each_variant, states, token_ids
from transformers import CompileConfig

from hf_recurrent import StaticRecurrentCache

NEW = {"max_new_tokens": 6, "pad_token_id": 0, "do_sample": False}


def addresses(cache) -> list[int]:
    return [state.data_ptr() for state in [*states(cache), cache._seen]]


@each_variant
@torch.no_grad()
def test_static_decoding_gives_the_same_tokens(config):
    model = causal_lm(config)
    input_ids = token_ids(config, 2, 5)
    mask = torch.ones_like(input_ids)
    mask[0, :3] = 0
    for how in ({}, {"attention_mask": mask}, {"num_beams": 3}, {"prefill_chunk_size": 2}):
        expected = model.generate(input_ids, **how, **NEW)
        out = model.generate(input_ids, cache_implementation="static", return_dict_in_generate=True, **how, **NEW)
        assert torch.equal(out.sequences, expected)
        assert type(out.past_key_values) is StaticRecurrentCache and out.past_key_values.get_seq_length() == 10


@each_family
@torch.no_grad()
def test_compiled_decoding_compiles_once(config):
    """By `generate` itself, without a break, and not again for another prompt: the states are where they were."""
    model = causal_lm(config)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    compile_config = CompileConfig(fullgraph=True, dynamic=False, mode=None, backend=backend)
    compile_config._compile_all_devices = True  # `generate` compiles on accelerators only, unless told to
    torch._dynamo.reset()
    for length in (5, 3):
        input_ids = token_ids(config, 2, length)
        got = model.generate(input_ids, cache_implementation="static", compile_config=compile_config, **NEW)
        assert torch.equal(got, model.generate(input_ids, **NEW))
        if length == 5:
            first = len(graphs)
    assert 1 <= first <= 2 and len(graphs) == first


@torch.no_grad()
def test_compiled_by_inductor():
    config_class, options = FIRST["mingru"]
    config = config_class(**options)
    model = causal_lm(config, torch.float32)
    input_ids = token_ids(config, 1, 7)
    static = StaticRecurrentCache(config)
    dynamic = model(input_ids[:, :3], past_key_values=static, use_cache=True).past_key_values.clone()
    step, before = torch.compile(model, fullgraph=True), addresses(static)
    for token in input_ids[:, 3:].split(1, dim=1):
        got = step(token, past_key_values=static, use_cache=True).logits
        torch.testing.assert_close(got, model(token, past_key_values=dynamic).logits, rtol=1e-4, atol=1e-5)
    assert addresses(static) == before and static.get_seq_length() == 7


@each_family
@torch.no_grad()
def test_addresses_stay(config):
    model = causal_lm(config)
    cache = StaticRecurrentCache(config)
    cache.activate_past_recording()
    input_ids = token_ids(config, 2, 9)
    model(input_ids[:, :4], past_key_values=cache, use_cache=True)
    before, clone = addresses(cache), cache.clone()
    model(input_ids[:, 4:], past_key_values=cache)
    cache.crop(-2)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert addresses(cache) == before and cache.get_seq_length() == 7
    assert not set(addresses(clone)) & set(before) and clone.get_seq_length() == 4
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    again = model(input_ids, past_key_values=cache, use_cache=True)
    assert addresses(cache) == before
    assert torch.equal(again.logits, model(input_ids).logits)
    with torch.inference_mode():
        model(input_ids, past_key_values=cache)
        made_inside = model(input_ids, past_key_values=StaticRecurrentCache(config), use_cache=True).past_key_values
    assert addresses(cache) == before
    model(input_ids, past_key_values=made_inside)
    assert made_inside.get_seq_length() == cache.get_seq_length() == 18
    assert all(torch.equal(x, y) for x, y in zip(states(made_inside), states(cache), strict=True))


@each_family
@torch.no_grad()
def test_copies_have_addresses_of_their_own(config):
    model, cache = causal_lm(config), StaticRecurrentCache(config)
    input_ids = token_ids(config, 2, 4)
    model(input_ids, past_key_values=cache, use_cache=True)
    pickled = pickle.loads(pickle.dumps(cache))
    for other in (pickled, copy.deepcopy(cache), cache.to("cpu"), cache[:], StaticRecurrentCache.concatenate([cache])):
        assert type(other) is StaticRecurrentCache and other.get_seq_length() == 4
        assert all(torch.equal(x, y) for x, y in zip(states(other), states(cache), strict=True))
        assert not set(addresses(other)) & set(addresses(cache))
        expected = model(input_ids, past_key_values=cache.clone()).logits
        assert torch.equal(model(input_ids, past_key_values=other).logits, expected)


@each_family
def test_gradients_are_refused(config):
    model, cache = causal_lm(config), StaticRecurrentCache(config)
    with pytest.raises(RuntimeError, match=r"call the model under torch.no_grad\(\)"):
        model(token_ids(config, 2, 3), past_key_values=cache, use_cache=True)
    assert cache.batch_size == -1 and cache.get_seq_length() == 0
