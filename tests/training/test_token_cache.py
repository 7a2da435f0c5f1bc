"""Tokens are made once for each text and tokenizer, and whatever lies in the cache is checked."""

import numpy as np
import pytest

from hf_recurrent.training import token_cache
from hf_recurrent.training.documents import Documents
from hf_recurrent.training.token_cache import tokenised
from hf_recurrent.training.tokenizer import byte_tokenizer, train_bpe
from hf_recurrent.training.tokens import concatenate, encode

TEXTS = ("one", "two two", "three é")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "cache_folder", lambda: tmp_path)
    return tmp_path / "tokens"


def documents(*texts):
    return Documents(lambda epoch: ((text, text) for text in texts))


def entries(cache):
    return sorted(path.name for path in cache.glob("*") if path.is_dir())


def test_the_second_time_nothing_is_tokenised(cache, monkeypatch):
    tokenizer = byte_tokenizer()
    expected = concatenate(encode(tokenizer, TEXTS))
    first = tokenised(tokenizer, documents(*TEXTS))
    monkeypatch.setattr(token_cache, "encode", None)
    second = tokenised(byte_tokenizer(), documents(*TEXTS))
    for stream in (first, second):
        assert isinstance(stream.tokens, np.memmap)
        assert np.array_equal(stream.tokens, expected.tokens) and stream.tokens.dtype == expected.tokens.dtype
        assert np.array_equal(stream.starts, expected.starts) and stream.digest == expected.digest
    assert len(entries(cache)) == 1


def test_what_makes_another_entry(cache):
    tokenizer = byte_tokenizer()
    tokenised(tokenizer, documents(*TEXTS))
    tokenised(tokenizer, documents(*TEXTS[::-1]))
    tokenised(tokenizer, documents("".join(TEXTS)))
    tokenised(train_bpe(["one two " * 9], 260), documents(*TEXTS))
    other = byte_tokenizer()
    other.add_special_tokens({"bos_token": "<s>"})
    assert tokenised(other, documents(*TEXTS)).tokens[0] == 257
    assert len(entries(cache)) == 5
    tokenised(tokenizer, documents("not kept"), cache=False)
    assert len(entries(cache)) == 5


@pytest.mark.parametrize("damage", ["changed", "cut", "list", "gone"])
def test_a_damaged_entry_is_made_again(cache, damage):
    tokenizer = byte_tokenizer()
    expected = tokenised(tokenizer, documents(*TEXTS)).digest
    [entry] = (path for path in cache.iterdir() if path.is_dir())
    file = entry / ("stream.json" if damage == "list" else "tokens.bin")
    content = file.read_bytes()
    file.unlink()
    if damage != "gone":
        file.write_bytes(content[:-2] + (b"" if damage == "cut" else b"xy"))
    with pytest.warns(UserWarning, match="is damaged .*: tokenising again"):
        assert tokenised(tokenizer, documents(*TEXTS)).digest == expected
    assert tokenised(tokenizer, documents(*TEXTS)).digest == expected


def test_an_interruption_leaves_nothing(cache, monkeypatch):
    def interrupted(tokenizer, texts, description):
        yield from encode(tokenizer, ["one"])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(token_cache, "encode", interrupted)
        tokenised(byte_tokenizer(), documents(*TEXTS))
    assert not entries(cache)
    assert len(tokenised(byte_tokenizer(), documents(*TEXTS)).starts) == 3


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(token_cache, "cache_folder", lambda: tmp_path / "file")
    with pytest.warns(UserWarning, match="tokens are not kept for later runs: .*Not a directory"):
        assert len(tokenised(byte_tokenizer(), documents(*TEXTS)).starts) == 3
