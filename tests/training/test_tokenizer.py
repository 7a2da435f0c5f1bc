import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hf_recurrent.training.tokenizer import END_OF_TEXT, byte_symbols, byte_tokenizer, load_tokenizer, train_bpe

TEXTS = ["def f(x):\n    return x + 1\n" * 20, "import os\n\n\nclass A:\n    pass\n" * 20]


@pytest.fixture(scope="module", params=["bpe", "bytes"])
def tokenizer(request, tmp_path_factory):
    """A tokenizer as it comes back from a folder."""
    folder = tmp_path_factory.mktemp(request.param)
    (train_bpe(TEXTS, 300) if request.param == "bpe" else byte_tokenizer()).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_round_trip(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id not in ids


def test_round_trip_of_every_character(tokenizer):
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000)])) + " a , b . c  'm  n't\r\n\t"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens(tokenizer):
    assert tokenizer.bos_token == tokenizer.eos_token == tokenizer.pad_token == END_OF_TEXT
    assert tokenizer(f"a{END_OF_TEXT}")["input_ids"][-1] == tokenizer.eos_token_id


def test_byte_ids_are_bytes():
    tokenizer = byte_tokenizer()
    text = "naïve 日本語 \x00\x7f"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert len(tokenizer) == 257 and tokenizer.eos_token_id == 256


def test_byte_symbols_are_those_of_the_tokenizers_library():
    from tokenizers.pre_tokenizers import ByteLevel

    assert sorted(byte_symbols()) == sorted(ByteLevel.alphabet())


def test_bpe_is_trained_alike_every_time():
    first, second = (train_bpe(TEXTS, 280).backend_tokenizer.to_str() for _ in range(2))
    assert first == second


def test_bpe_merges_what_is_frequent():
    tokenizer = train_bpe(TEXTS, 300)
    assert 257 < len(tokenizer) <= 300
    assert len(tokenizer("    return x")["input_ids"]) < len("    return x")


def test_vocabulary_smaller_than_the_byte_alphabet():
    assert len(train_bpe(["a"], 257)) == 257
    with pytest.raises(ValueError, match="--vocab-size 256 is smaller than the byte alphabet: at least 257"):
        train_bpe(["a"], 256)


def test_missing_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="--tokenizer .*nowhere: no such folder"):
        load_tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=f"--tokenizer {tmp_path}: cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_tokenizer_without_an_end(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        load_tokenizer(str(tmp_path))
