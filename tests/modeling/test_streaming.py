"""Texts of any length, read in chunks in constant memory."""

import itertools

import pytest
import torch
from families import causal_lm, each_family, states, token_ids

from hf_recurrent import MinGRUConfig, RecurrentCache, stream


@each_family
@pytest.mark.parametrize("chunk_size", [1, 5, 100])
def test_a_stream_is_one_call(config, chunk_size):
    model, text = causal_lm(config), token_ids(config, 1, 23)
    cache = RecurrentCache(config)
    ids, logits = zip(*stream(model, text[0].tolist(), cache, chunk_size), strict=True)
    assert torch.equal(torch.cat(ids), text[0]) and all(len(x) <= chunk_size for x in ids)
    with torch.no_grad():
        whole = model(text, use_cache=True)
    torch.testing.assert_close(torch.cat(logits), whole.logits[0], rtol=1e-9, atol=1e-11)
    assert cache.get_seq_length() == 23
    for x, y in zip(states(cache), states(whole.past_key_values), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


def test_a_stream_of_a_tensor_makes_no_tensor_of_each_token(monkeypatch):
    config = MinGRUConfig(vocab_size=61, hidden_size=12, num_hidden_layers=1)
    model, text = causal_lm(config), token_ids(config, 1, 23)[0]
    monkeypatch.setattr(torch.Tensor, "__iter__", lambda _: pytest.fail("a million tokens would take 500 MB"))
    assert torch.equal(torch.cat([ids for ids, _ in stream(model, text, chunk_size=7)]), text)


@each_family
def test_a_stream_without_an_end(config):
    """Asked for no more than it has to give, and of constant memory; it goes on where it was left."""
    model = causal_lm(config)
    asked = 0

    def endless():
        nonlocal asked
        for asked in itertools.count(1):  # noqa: B007
            yield asked % config.vocab_size

    cache, sizes = RecurrentCache(config), []
    source = endless()
    for ids, _ in itertools.islice(stream(model, source, cache, chunk_size=8), 6):
        sizes.append(cache.nbytes)
        assert asked == cache.get_seq_length() == 8 * len(sizes) and ids.tolist()[-1] == asked % config.vocab_size
    assert len(set(sizes)) == 1
    ids, _ = next(stream(model, source, cache, chunk_size=3))
    assert ids.tolist() == [49, 50, 51] and cache.get_seq_length() == 51


@each_family
def test_streams_that_cannot_be(config):
    model, cache = causal_lm(config), RecurrentCache(config)
    with pytest.raises(IndexError, match="token 12 of the stream is 61, outside the vocabulary of 61"):
        list(stream(model, [*range(12), 61], cache, chunk_size=5))
    assert cache.get_seq_length() == 10
    before = [state.clone() for state in states(cache)]
    for token in (1.0, "3", None):
        with pytest.raises(TypeError, match=f"token 1 of the stream is {token!r}, not an integer"):
            list(stream(model, [1, token], cache))
    with pytest.raises(IndexError, match="token 0 of the stream is -1"):
        list(stream(model, iter([-1]), cache))
    assert cache.get_seq_length() == 10
    assert all(torch.equal(x, y) for x, y in zip(states(cache), before, strict=True))
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        next(stream(model, [1], chunk_size=0))
    with torch.no_grad():
        cache = model(token_ids(config, 2, 3), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="the states of 2 rows, a stream is one"):
        next(stream(model, [1], cache))
    assert list(stream(model, [])) == []
