"""Tokens are made once for each text and tokenizer, and whatever lies in the cache is checked."""

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from hf_recurrent.training import DataArguments, token_cache
from hf_recurrent.training.documents import Corpus, Documents, Part
from hf_recurrent.training.input import build_rows, prune_token_cache
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


def test_a_file_system_without_locks(cache, monkeypatch):
    """Some network ones: files that exist take their place."""
    fcntl = pytest.importorskip("fcntl")

    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    for _ in range(2):
        with pytest.warns(UserWarning, match="flock not supported on this filesystem"):
            assert isinstance(tokenised(byte_tokenizer(), documents(*TEXTS)).tokens, np.memmap)
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


def test_a_cache_that_may_only_be_read(cache):
    """Root may write everywhere; a folder in the lock's place cannot be locked by it either."""
    digest = tokenised(byte_tokenizer(), documents(*TEXTS)).digest
    [folder] = token_cache.entries()
    folder.with_name(f"{folder.name}.lock").unlink(missing_ok=True)  # some versions remove it themselves
    folder.with_name(f"{folder.name}.lock").mkdir()
    stream = tokenised(byte_tokenizer(), documents(*TEXTS))
    assert isinstance(stream.tokens, np.memmap) and stream.digest == digest


def test_a_cache_that_cannot_be_read(cache):
    cache.symlink_to(cache)
    assert token_cache.entries() == {} and token_cache.prune(0, []) == (0, 0)


@pytest.mark.parametrize("relative", [False, True])
def test_a_run_keeps_its_own_tokens_in_a_cache_by_another_path(relative, tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to("disk")
    monkeypatch.chdir(tmp_path)
    folder = Path("disk") if relative else tmp_path / "cache"
    monkeypatch.setattr(token_cache, "cache_folder", lambda: folder)
    stream, _ = used(folder, *TEXTS)
    assert token_cache.prune(0, [stream]) == (0, 0) and len(token_cache.entries()) == 1


def used(cache, *texts):
    """The stream of a text, and its folder."""
    stream = tokenised(byte_tokenizer(), documents(*texts))
    return stream, Path(stream.tokens.filename).parent


def test_what_was_used_longest_ago_goes_first(cache):
    streams, folders = zip(*(used(cache, name * 500) for name in "abcd"), strict=True)
    for age, folder in enumerate(reversed(folders)):
        os.utime(folder, (time.time() - 60 * (age + 1),) * 2)
    size = sum(token_cache.entries().values())
    assert list(token_cache.entries()) == list(folders) and size > 4 * 500
    assert token_cache.prune(size, []) == (0, 0)
    used(cache, "a" * 500)  # which makes it the newest
    assert list(token_cache.entries())[0] == folders[1]
    number, freed = token_cache.prune(size / 2, [streams[1]])
    assert number == 2 and freed == pytest.approx(size / 2, rel=0.05)
    assert set(token_cache.entries()) == {folders[0], folders[1]}
    assert streams[2].tokens.tolist()[1:501] == [99] * 500  # still mapped
    with FileLock(f"{folders[0]}.lock", thread_local=False), ThreadPoolExecutor() as another:
        assert another.submit(token_cache.prune, 0, [streams[1]]).result() == (0, 0)
    assert token_cache.prune(0, []) == (2, size - freed)
    assert not token_cache.entries() and not entries(cache)


def test_what_a_killed_process_left_is_removed_after_a_day(cache):
    _, folder = used(cache, *TEXTS)
    left = cache / ".unfinished-x" / "entry"
    left.mkdir(parents=True)
    (left / "tokens.bin").write_bytes(bytes(1000))
    (left / "here").symlink_to("gone")  # as if it were removed while it is looked at
    assert token_cache.prune(1e9, []) == (0, 0)
    (left / "here").unlink()
    for path in (left / "tokens.bin", left, left.parent):
        os.utime(path, (time.time() - 25 * 3600,) * 2)
    assert token_cache.prune(1e9, []) == (1, 1000)
    assert list(token_cache.entries()) == [folder]


def test_a_run_keeps_its_own_tokens(cache, capsys):
    tokenizer, corpus = byte_tokenizer(), Corpus([Part("text", documents("ab" * 400))], None)
    args = DataArguments(sequence_length=16, token_cache_gb=0)
    _, other = used(cache, "other")
    rows = build_rows(corpus, tokenizer, args, seed=0, visible=False)
    assert prune_token_cache(rows, args) == "token cache 1 folder removed, 0.00 GB: --token-cache-gb 0"
    assert prune_token_cache(rows, args) == "" and not other.exists() and len(token_cache.entries()) == 1
    assert prune_token_cache(rows, DataArguments(token_cache=False)) == ""
