import bz2
import csv
import gzip
import io
import json
import lzma
import re
import sysconfig
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from hf_recurrent.modeling.model import IGNORED
from hf_recurrent.training.arguments import DataArguments
from hf_recurrent.training.documents import Corpus, Documents, Part, in_random_order, in_validation, split
from hf_recurrent.training.input import build_rows
from hf_recurrent.training.mixing import BLOCK, MixedRows
from hf_recurrent.training.rows import Place, ShuffledRows, StreamedRows, count_rows, count_targets, pack, pad
from hf_recurrent.training.sources import dataset_documents, expand, file_documents, load_corpus, stdlib_documents
from hf_recurrent.training.tokenizer import byte_tokenizer
from hf_recurrent.training.tokens import TokenStream, concatenate, encode, encode_batch, pieces
from hf_recurrent.training.validation import validation_rows

SHARED = Path(__file__).parents[3] / "shared" / "data"
END = 256


def documents(*texts):
    return Documents(lambda epoch: ((text, text) for text in texts))


def texts_of(docs):
    return list(docs.texts())


# ---- rows ------------------------------------------------------------------------------------------------------------


@st.composite
def streams(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    starts = np.cumsum([0, *lengths[:-1]])
    return TokenStream(np.arange(1, sum(lengths) + 1, dtype=np.uint16), starts)


@settings(max_examples=200, deadline=None)
@given(stream=streams(), length=st.integers(2, 7))
def test_packing_equals_a_slow_loop(stream, length):
    rows = count_rows(stream, length)
    packed = pack(stream, np.arange(rows), length)
    for row in range(rows):
        position = 0
        for column in range(length):
            place = row * (length - 1) + column
            position = 0 if column == 0 or place in stream.starts else position + 1
            assert packed["input_ids"][row, column] == stream.tokens[place]
            assert packed["position_ids"][row, column] == position
            assert packed["labels"][row, column] == (IGNORED if position == 0 else stream.tokens[place])


@settings(max_examples=100, deadline=None)
@given(stream=streams(), length=st.integers(2, 7))
def test_every_token_is_a_target_once_but_the_documents_first(stream, length):
    used = count_rows(stream, length) * (length - 1) + 1
    labels = pack(stream, np.arange(count_rows(stream, length)), length)["labels"]
    expected = np.delete(stream.tokens[:used], stream.starts[stream.starts < used])
    assert sorted(labels[labels != IGNORED]) == expected.tolist()


def test_rows_have_no_padding_and_are_as_many_as_fit():
    stream = TokenStream(np.arange(10, dtype=np.uint16), np.array([0]))
    assert [count_rows(stream, length) for length in (2, 4, 10, 11)] == [9, 3, 1, 0]
    assert pack(stream, np.array([2]), 4)["input_ids"].tolist() == [[6, 7, 8, 9]]


def test_target_counts():
    stream = TokenStream(np.array([0, 5, 5, 0, 0, 5, 0], np.uint16), np.array([0, 4]))
    assert count_targets(stream, 6).tolist() == [2, 0, 0, 0, 0, 3]


@settings(max_examples=100, deadline=None)
@given(stream=streams(), length=st.integers(2, 7))
def test_target_counts_without_packing(stream, length):
    """As the rows have them: what lies beyond a row of a long document is no target."""
    rows = ShuffledRows(stream, length, seed=0, packing=False)
    labels = rows.take(0, rows.per_epoch)["labels"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_recurrent.training.rows.PIECE", 3)
        counts = rows.target_counts(1 << 16)
    assert np.array_equal(counts, np.bincount(labels[labels != IGNORED], minlength=1 << 16))


def test_counting_takes_no_more_memory_than_a_piece():
    stream = TokenStream(np.arange(1 << 22, dtype=np.uint16), np.arange(0, 1 << 22, 7))
    tracemalloc.start()
    counts = count_targets(stream, 1 << 16)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 12 * 2**20
    firsts = np.bincount(stream.starts % (1 << 16), minlength=1 << 16)
    np.testing.assert_array_equal(counts, (1 << 22) // (1 << 16) - firsts)


def test_shuffled_rows_are_permutations_of_seed_and_epoch():
    stream = TokenStream(np.arange(41, dtype=np.uint16), np.array([0]))
    rows = ShuffledRows(stream, 5, seed=3)
    assert rows.per_epoch == 10
    first, second = (rows.take(epoch * 10, 10)["input_ids"] for epoch in (0, 1))
    assert sorted(first[:, 0]) == sorted(second[:, 0]) == list(range(0, 40, 4))
    assert first.tolist() != second.tolist()
    assert ShuffledRows(stream, 5, seed=3).take(10, 10)["input_ids"].tolist() == second.tolist()
    assert ShuffledRows(stream, 5, seed=4).take(0, 10)["input_ids"].tolist() != first.tolist()


def test_shuffled_rows_do_not_depend_on_how_they_are_taken():
    rows = ShuffledRows(TokenStream(np.arange(41, dtype=np.uint16), np.array([0])), 5, seed=0)
    whole = rows.take(0, 35)["input_ids"]  # over several epochs
    parts = [rows.take(first, 7)["input_ids"] for first in range(0, 35, 7)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_a_corpus_shorter_than_one_row():
    with pytest.raises(ValueError, match="shorter than one row: 4 tokens for training, --sequence-length 5"):
        ShuffledRows(TokenStream(np.arange(4, dtype=np.uint16), np.array([0])), 5, seed=0)
    with pytest.raises(ValueError, match="shorter than one row: 4 tokens for training, --sequence-length 5"):
        StreamedRows(documents("ab"), byte_tokenizer(), 5)


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=6), length=st.integers(2, 6))
def test_streamed_rows_are_those_of_the_whole_stream(texts, length):
    tokenizer = byte_tokenizer()
    stream = concatenate(encode(tokenizer, texts))
    count = count_rows(stream, length)
    if count == 0:
        return
    expected = pack(stream, np.arange(count), length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_recurrent.training.tokens.BATCH", 1)  # a document at a time
        rows = StreamedRows(documents(*texts), tokenizer, length)
        twice = rows.take(0, 2 * count)
        assert not rows.target_counts(257).any()  # read, and not trained on yet
        rows.release(2 * count)
        assert all(np.array_equal(twice[name], np.tile(value, (2, 1))) for name, value in expected.items())
        later = StreamedRows(documents(*texts), tokenizer, length)
        later.release(count)  # as a run that goes on does
        again = later.take(count, count)
        assert all(np.array_equal(again[name], value) for name, value in expected.items())
        later.release(2 * count)
    counts = rows.target_counts(257)
    assert np.array_equal(later.target_counts(257), counts)
    assert counts.sum() == 2 * (expected["labels"] != IGNORED).sum()
    with pytest.raises(ValueError, match="have been read already"):
        rows.take(0, 1)


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [True, False])
# Rows are read ahead of those trained on; or those at the end of a step are another process's, and are not read.
@pytest.mark.parametrize(("read", "trained"), [(3, 0), (1, 3)])
def test_a_stream_goes_on_from_a_place_near_the_rows_trained_on(packing, read, trained, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_recurrent.training.tokens.BATCH", 30)  # two documents or three at a time
    texts = [chr(97 + n % 26) * (5 + n % 17) for n in range(24)]

    def stream(**more):
        def in_order(epoch):  # each epoch in an order of its own
            for n in np.random.default_rng(epoch).permutation(len(texts)):
                yield texts[n], texts[n]

        return StreamedRows(Documents(in_order), byte_tokenizer(), 8, packing, **more)

    def tokenised(tokenizer, batch, dtype):
        documents.extend("".join(pieces) for pieces in batch)
        return encode_batch(tokenizer, batch, dtype)

    whole, count, documents = stream(), 100, []
    expected = whole.take(0, count)
    whole.release(count)
    first = stream()
    monkeypatch.setattr("hf_recurrent.training.tokens.encode_batch", tokenised)
    for place in range(0, 90, 3):
        used = place + trained
        first.take(place, read)
        first.release(used)
        first.place().save(tmp_path / "place.npz")
        documents.clear()
        later = stream(start=Place.load(tmp_path / "place.npz"))
        later.release(used)
        taken = later.take(used, 4)
        assert len(documents) < 16  # those of the part that the place lies before, and of few more
        assert all(np.array_equal(taken[name], expected[name][used : used + 4]) for name in taken)
        later.take(used + 4, count - used - 4)
        later.release(count)
        assert np.array_equal(later.target_counts(257), whole.target_counts(257))


def test_documents_begin_and_end_with_the_end_token():
    stream = concatenate(encode(byte_tokenizer(), ["ab", "é"]))
    assert stream.tokens.tolist() == [END, 97, 98, END, END, 195, 169, END]
    assert stream.starts.tolist() == [0, 4]
    assert stream.tokens.dtype == np.uint16


def test_a_text_cannot_end_its_document():
    stream = concatenate(encode(byte_tokenizer(), ["a<|endoftext|>b"]))
    assert (stream.tokens == END).sum() == 2
    assert bytes(stream.tokens[1:-1].astype(np.uint8)) == b"a<|endoftext|>b"


def test_a_tokenizer_with_two_different_ends():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    assert concatenate(encode(tokenizer, ["a"])).tokens.tolist() == [257, 97, END]
    tokenizer.bos_token = None
    assert concatenate(encode(tokenizer, ["a"])).tokens.tolist() == [END, 97, END]


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab\n", max_size=50), size=st.integers(1, 20))
def test_pieces_are_the_text(text, size):
    cut = list(pieces(text, size))
    assert "".join(cut) == text
    assert all(piece.endswith("\n") and len(piece) > size for piece in cut[:-1])


def test_long_documents_are_tokenised_in_pieces(monkeypatch):
    monkeypatch.setattr("hf_recurrent.training.tokens.pieces", lambda text: pieces(text, 5))
    monkeypatch.setattr("hf_recurrent.training.tokens.BATCH", 20)
    texts = ["one two\nthree\n\nfour" * 3, "x", "five\n" * 9]
    stream = concatenate(encode(byte_tokenizer(), texts))
    expected = [[END, *text.encode(), END] for text in texts]
    assert stream.tokens.tolist() == sum(expected, [])
    assert stream.starts.tolist() == np.cumsum([0, *map(len, expected[:-1])]).tolist()


def test_padded_rows_are_one_document_each():
    stream = TokenStream(np.array([9, 1, 2, 3, 9, 9, 4, 9, 9, 5, 6, 9], np.uint16), np.array([0, 5, 8]))
    rows = pad(stream, np.array([2, 0, 1]), 4)
    assert rows["input_ids"].tolist() == [[9, 5, 6, 9], [9, 1, 2, 3], [9, 4, 9, 9]]
    assert rows["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]]
    assert rows["labels"].tolist() == [[IGNORED, 5, 6, 9], [IGNORED, 1, 2, 3], [IGNORED, 4, 9, IGNORED]]
    shuffled = ShuffledRows(stream, 4, seed=1, packing=False)
    assert shuffled.per_epoch == 3
    order = shuffled.numbers(0, 6)
    assert sorted(order[:3]) == sorted(order[3:]) == [0, 1, 2]
    assert np.array_equal(shuffled.take(0, 6)["labels"], pad(stream, order, 4)["labels"])
    assert shuffled.identify(0, 1)[0]["documents"] == [order[0], order[0]]
    streamed = StreamedRows(documents("ab", "abcdefg"), byte_tokenizer(), 6, packing=False)
    taken = streamed.take(0, 3)  # into the second epoch
    assert taken["attention_mask"].sum(1).tolist() == [4, 6, 4]
    assert np.array_equal(taken["input_ids"][0], taken["input_ids"][2])


def test_slow_tokenizers_tokenise_in_processes(monkeypatch):
    tokenizer = ByT5Tokenizer()
    assert not tokenizer.is_fast
    monkeypatch.setattr("hf_recurrent.training.tokens.BATCH", 40)
    texts = [f"text {n} </s> é" * (n % 5 + 1) for n in range(30)]
    stream = concatenate(encode(tokenizer, texts))
    expected = [[1, *(byte + 3 for byte in text.encode()), 1] for text in texts]
    assert stream.tokens.tolist() == sum(expected, []) and len(stream.starts) == 30


def test_what_a_tokenizer_was_saved_with_changes_nothing():
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert concatenate(encode(tokenizer, ["abcdef"])).tokens.tolist() == [END, *b"abcdef", END]


def test_the_digest_sees_tokens_and_boundaries():
    tokens, starts = np.arange(9, dtype=np.uint16), np.array([0, 4])
    digest = TokenStream(tokens, starts).digest
    assert digest == TokenStream(tokens.copy(), starts.copy()).digest
    assert digest != TokenStream(tokens[::-1], starts).digest
    assert digest != TokenStream(tokens, np.array([0, 5])).digest


def test_validation_rows_hold_everything():
    texts = ["hello world", "é" * 7]
    rows = validation_rows(documents(*texts), byte_tokenizer(), sequence_length=6, vocab_size=300)
    contents = [text.encode() for text in texts]
    labels = rows.rows["labels"]
    # Each byte and both ends are predicted once; the padding of the last row is not.
    assert sorted(labels[labels != IGNORED]) == sorted([*b"".join(contents), END, END])
    assert rows.targets == (labels != IGNORED).sum() == sum(map(len, contents)) + 2
    assert rows.target_counts[ord("l")] == 3 and len(rows.target_counts) == 300
    assert rows.text_bytes == sum(map(len, contents)) and rows.documents == 2
    assert rows.gzip_bytes == len(gzip.compress(b"".join(contents), 9))


def test_no_validation_text():
    with pytest.raises(ValueError, match="there is no validation text: give --validation-files"):
        validation_rows(documents(""), byte_tokenizer(), 8, 257)


# ---- the split -------------------------------------------------------------------------------------------------------


def test_the_split_depends_on_the_key_alone():
    # Written down: another release must not move a file to the other side.
    keys = [f"module_{number}.py" for number in range(200)]
    held_out = [key for key in keys if in_validation(key, 0.05)]
    assert held_out == [f"module_{number}.py" for number in (5, 30, 60, 63, 68, 73, 183, 185)]
    train, validation = split(documents(*keys), 0.05)
    assert texts_of(validation) == held_out
    assert sorted(texts_of(train) + held_out) == sorted(keys)
    assert set(held_out) < {key for key in keys if in_validation(key, 0.2)}


def test_a_sample_does_not_depend_on_the_order():
    keys = [f"module_{number}.py" for number in range(200)]
    chosen = texts_of(documents(*keys).sample(8))
    assert texts_of(documents(*reversed(keys)).sample(8)) == chosen
    assert sorted(chosen) == sorted(key for key in keys if in_validation(key, 0.05))  # the smallest hashes, there too
    assert sorted(texts_of(documents(*keys).sample(999))) == sorted(keys)
    assert texts_of(documents(*keys).sample(None)) == keys
    # What is there many times is neither the whole sample nor left out.
    often = texts_of(documents(*keys, *["again"] * 200).sample(40))
    assert 10 < often.count("again") < 30
    assert sorted(texts_of(documents(*["again"] * 200, *reversed(keys)).sample(40))) == sorted(often)


def test_one_long_document_is_split_at_its_tail():
    train, validation = split(documents("abcdefghij"), 0.25)
    assert (texts_of(train), texts_of(validation)) == (["abcdefg"], ["hij"])


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data beside the repository")
def test_a_tenth_of_tiny_shakespeare_is_the_papers_split():
    corpus = file_documents([str(SHARED / "tinyshakespeare.txt")], "text")
    train, validation = split(corpus, 0.1)
    assert [len(text) for text in texts_of(train) + texts_of(validation)] == [1_003_854, 111_540]


def test_no_validation_share():
    assert split(documents("a", "b"), 0)[1] is None


# ---- sources ---------------------------------------------------------------------------------------------------------


def test_the_standard_library():
    docs = {document.key: document.text for document in stdlib_documents()}
    names = list(docs)
    assert names == sorted(names) and len(names) > 300
    assert docs["argparse.py"] == Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="utf-8")
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in names)


def test_undecodable_files_tests_and_packages_are_left_out(tmp_path):
    for name in ("b.py", "a.py", "p/m.py", "test/t.py", "p/tests/t.py", "site-packages/q.py", "p/idle_test/t.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\r\n", newline="")
    (tmp_path / "latin.py").write_bytes(b"# \xe9")
    (tmp_path / "empty.py").write_text("")
    found = [(document.key, document.text) for document in stdlib_documents(tmp_path)]
    assert found == [(n, f"# {n}\r\n") for n in ("a.py", "b.py", "p/m.py")]


def write_files(folder):
    """One file of each kind; the texts they hold."""
    records = [{"text": "json 1\nline", "n": 1}, {"text": "json 2", "n": 2}]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "a.txt").write_text("plain\r\ntext é\n", encoding="utf-8", newline="")
    (folder / "b.jsonl").write_text(lines)
    (folder / "c.json").write_text(json.dumps(records))
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for name, module in (("e.txt.gz", gzip), ("f.md.bz2", bz2), ("g.xz", lzma)):
        (folder / name).write_bytes(module.compress(b"packed\n"))
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["pq 1", "pq 2", "", "pq 3"]}), folder / "h.parquet")
    return [
        "plain\r\ntext é\n",
        *["json 1\nline", "json 2"] * 3,
        *["packed\n"] * 3,
        *["pq 1", "pq 2", "pq 3"],
    ]


def test_data_files_of_every_kind(tmp_path):
    expected = write_files(tmp_path)
    docs = file_documents(expand([str(tmp_path / "*")], "--data-files"), "text")
    assert texts_of(docs) == expected
    assert texts_of(docs) == expected  # again and again
    assert texts_of(docs.head(3)) == expected[:3]


@pytest.mark.parametrize(("name", "delimiter"), [("we[1]rd.csv", ","), ("a.tsv", "\t"), ("a.csv.gz", ",")])
def test_texts_in_csv_files_are_kept_to_the_character(tmp_path, name, delimiter):
    texts = ["NA", "1e5", "0012", 'a, "b"\tc', "two\r\nlines\n", " spaces ", "é", "x" * (1 << 18)]
    written = io.StringIO()
    csv.writer(written, delimiter=delimiter).writerows([["n", "text"], *enumerate(texts[:4]), [], ["z", ""]])
    csv.writer(written, delimiter=delimiter).writerows(enumerate(texts[4:]))
    content = b"\xef\xbb\xbf" * (delimiter == "\t") + written.getvalue().encode()  # as Excel begins its files
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert texts_of(file_documents(expand([str(tmp_path / name)], "--data-files"), "text")) == texts


def test_globs_and_names(tmp_path):
    for name in ("x/2.txt", "x/1.txt", "x/y/3.txt", "[odd].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = expand([str(tmp_path / "x/**/*.txt"), str(tmp_path / "[odd].txt")], "--data-files")
    assert [Path(name).relative_to(tmp_path).as_posix() for name in found] == [
        "x/1.txt",
        "x/2.txt",
        "x/y/3.txt",
        "[odd].txt",
    ]
    with pytest.raises(FileNotFoundError, match=r"--data-files .*none\*: no such file"):
        expand([str(tmp_path / "none*")], "--data-files")
    with pytest.raises(FileNotFoundError, match="--validation-files .*x: is a folder"):
        expand([str(tmp_path / "x")], "--validation-files")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"caf\xe9", "not UTF-8 text: .* at byte 3"),
        ("a.txt.gz", b"not an archive", "cannot be read: Not a gzipped file"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "cannot be read as json"),
        ("a.jsonl", b'{"txt": "a", "n": 1}\n', "no column 'text'; it has 'txt', 'n': choose one by --text-column"),
        ("a.jsonl", b'{"text": 3}\n', "record 0: column 'text' holds 3, expected text"),
        ("a.csv", b"txt,n\na,1\n", "no column 'text'; it has 'txt', 'n': choose one by --text-column"),
        ("a.csv", b"text\nHello, world\n", "cannot be read as csv: line 2: got 2 values, expected 1"),
        ("a.tsv", b'text\tn\n"never closed\t1\n', "cannot be read as tsv: line 2: unexpected end of data"),
        ("a.parquet", b"PAR1 garbage", "cannot be read as parquet: .*magic bytes"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, message):
    good, bad = tmp_path / "good.txt", tmp_path / name
    good.write_text("good")
    bad.write_bytes(content)
    with pytest.raises(ValueError, match=f"{bad}: {message}"):
        texts_of(file_documents([str(good), str(bad)], "text"))


@pytest.fixture
def dataset_folder(tmp_path):
    folder = tmp_path / "dataset"
    folder.mkdir()
    for name, count in (("train", 30), ("validation", 3)):
        lines = [json.dumps({"content": f"{name} {number}"}) for number in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return str(folder)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset(dataset_folder, streaming):
    docs = dataset_documents(dataset_folder, None, "train", "content", streaming=streaming)
    expected = [f"train {number}" for number in range(30)]
    assert texts_of(docs) == expected
    few = dataset_documents(dataset_folder, None, "train", "content", streaming=streaming, max_documents=4)
    assert texts_of(few) == expected[:4]
    orders = [[document.text for document in docs.epoch(epoch)] for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] and sorted(orders[0]) == sorted(orders[1]) == sorted(expected)
    assert (orders[0] != orders[1]) == streaming  # loaded rows are shuffled once they are packed


@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6), epoch=st.integers(0, 3), share=st.sampled_from([0, 0.4])
)
@settings(max_examples=40, deadline=None)
def test_a_random_order_goes_on_from_every_position(sizes, epoch, share):
    shards = [[f"{shard} {number}" for number in range(size)] for shard, size in enumerate(sizes)]

    def seek(epoch, start):
        return in_random_order(lambda shard, count: iter(shards[shard][count:]), len(shards), 5, epoch, start)

    docs = Documents(lambda epoch: ((text, text) for texts in shards for text in texts), seek)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_recurrent.training.documents.SHUFFLED", 4)
        if share and sum(sizes):
            docs, _ = split(docs, share)
        whole = list(docs.epoch(epoch))
        assert sorted(document.text for document in whole) == sorted(texts_of(docs))
        for number, document in enumerate(whole, 1):
            assert list(docs.epoch(epoch, document.after)) == whole[number:]


def test_a_stream_goes_on_without_the_shards_before(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_recurrent.training.documents.SHUFFLED", 8)
    for shard in range(5):
        lines = "".join(json.dumps({"text": f"{shard} {number}"}) + "\n" for number in range(11))
        (tmp_path / f"train-{shard}.jsonl").write_text(lines)
    docs = dataset_documents(str(tmp_path), None, "train", "text", streaming=True, seed=1)
    whole = [list(docs.epoch(epoch)) for epoch in (0, 1)]
    assert len({document.text for document in whole[0]}) == 55
    order = [[document.text.split()[0] for document in documents] for documents in whole]
    assert len(set(order[0][:8])) == 1 and order[0] != order[1]  # one shard after the other
    position = whole[1][36].after
    for shard in set(order[1][:16]):
        (tmp_path / f"train-{shard}.jsonl").write_text("no longer there")
    assert list(docs.epoch(1, position)) == whole[1][37:]


def test_a_place_of_an_older_version_is_refused(tmp_path):
    np.savez(tmp_path / "place.npz", row=3, epoch=0, documents=2, rows=3)
    with pytest.raises(ValueError, match="its stream is in the order of an older version"):
        Place.load(tmp_path / "place.npz")


def test_a_dataset_that_is_not_there(dataset_folder, tmp_path):
    with pytest.raises(ValueError, match="--dataset .*nowhere: split 'train' cannot be loaded"):
        dataset_documents(str(tmp_path / "nowhere"), None, "train", "text")
    with pytest.raises(ValueError, match="--dataset .*: split 'dev' cannot be loaded: Unknown split"):
        dataset_documents(dataset_folder, None, "dev", "content")
    with pytest.raises(ValueError, match="no column 'text'; it has 'content'"):
        texts_of(dataset_documents(dataset_folder, None, "train", "text"))


def test_load_corpus_takes_the_datasets_own_validation_split(dataset_folder):
    corpus = load_corpus(DataArguments(dataset=dataset_folder, text_column="content"), seed=0)
    assert len(texts_of(corpus.train)) == 30
    assert texts_of(corpus.validation) == ["validation 0", "validation 1", "validation 2"]
    args = DataArguments(dataset=dataset_folder, text_column="content", validation_share=0)
    assert load_corpus(args, seed=0).validation is None


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("split", ["validation", "train+validation", "all"])
def test_no_document_is_trained_on_and_validated_on(dataset_folder, split, streaming):
    source = {"dataset": dataset_folder, "text_column": "content", "streaming": streaming}
    corpus = load_corpus(DataArguments(**source, dataset_split=split, validation_share=0.3), seed=0)
    train, held_out = texts_of(corpus.train), texts_of(corpus.validation)
    assert held_out and not set(train) & set(held_out)
    if split != "validation":
        assert len(train) + len(held_out) == 33
    # Another source that trains on it counts as well.
    corpus = load_corpus(DataArguments(sources=[source, source | {"dataset_split": split}]), seed=0)
    assert not set(texts_of(corpus.train)) & set(texts_of(corpus.validation))


def test_slices_of_a_split(dataset_folder):
    source = {"dataset": dataset_folder, "text_column": "content"}
    args = DataArguments(**source, dataset_split="train[:90%]", validation_split="train[90%:]")
    assert texts_of(load_corpus(args, seed=0).validation) == ["train 27", "train 28", "train 29"]
    args = DataArguments(**source, dataset_split="train[:90%]")
    assert texts_of(load_corpus(args, seed=0).validation) == [f"validation {number}" for number in range(3)]
    for train, validation in (
        ("train", "train"), ("train[:90%]", "train[:90%]"), ("train", "train[90%:]"), ("train[:90%]+test", "train"),
        ("all", "test"), ("train", "dev + train"),
    ):  # fmt: skip
        message = f"--validation-split {validation}: --dataset-split {train} trains on its documents: expected another"
        with pytest.raises(ValueError, match=re.escape(message)):
            DataArguments(**source, dataset_split=train, validation_split=validation)
        with pytest.raises(ValueError, match=re.escape(message)):
            other = source | {"dataset_split": "other", "validation_split": validation}
            DataArguments(sources=[source | {"dataset_split": train}, other])


def test_load_corpus_from_files(tmp_path):
    write_files(tmp_path)
    args = DataArguments(data_files=[str(tmp_path / "a.txt")], validation_files=[str(tmp_path / "h.parquet")])
    corpus = load_corpus(args, seed=0)
    assert texts_of(corpus.train) == ["plain\r\ntext é\n"]
    assert texts_of(corpus.validation) == ["pq 1", "pq 2", "pq 3"]
    args.max_validation_documents = 2
    assert texts_of(load_corpus(args, seed=0).validation) == ["pq 3", "pq 2"]


def test_a_few_validation_documents_are_of_every_kind(tmp_path):
    """Not the first ones in the order of names."""
    names = [tmp_path / f"{kind}-{number}.txt" for kind in ("encodings", "other") for number in range(100)]
    for name in names:
        name.write_text(name.stem)
    files = list(map(str, names))
    args = DataArguments(data_files=files, validation_share=0.5, max_validation_documents=20)
    few = texts_of(load_corpus(args, seed=0).validation)
    assert len(few) == 20 and 5 <= sum(text.startswith("encodings") for text in few) <= 15
    args.data_files = files[::-1]
    assert texts_of(load_corpus(args, seed=1).validation) == few
    args.max_validation_documents = None
    assert set(few) < set(texts_of(load_corpus(args, seed=0).validation))


def test_a_file_is_not_trained_on_and_validated_on(tmp_path):
    file, link, other = (tmp_path / name for name in ("a.txt", "link.txt", "b.txt"))
    file.write_text("one")
    other.write_text("two")
    link.symlink_to(file)
    corpora = ({"data_files": [str(other), str(link)]}, {"sources": [{"data_files": [f"{tmp_path}/l*.txt"]}]})
    for corpus in corpora:
        args = DataArguments(**corpus, validation_files=[str(file)])
        with pytest.raises(ValueError) as error:
            load_corpus(args, seed=0)
        message = f"--validation-files {file}: --data-files {link} trains on it: expected another file"
        assert str(error.value) == message
    args = DataArguments(data_files=[str(file)], validation_files=[str(other)])
    assert texts_of(load_corpus(args, seed=0).validation) == ["two"]


@pytest.mark.parametrize("streaming", [False, True])
def test_an_end_of_text_that_is_written_out_is_told_once(streaming, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_RECURRENT_CACHE", str(tmp_path))
    tokenizer, args = byte_tokenizer(), DataArguments(sequence_length=8)
    joined = Part("joined.txt", documents("a tale", "one<|endoftext|>two", "three<|endoftext|>"), streaming=streaming)
    for _ in range(2):  # from the cache, too
        with pytest.warns(UserWarning) as warned:
            rows = build_rows(Corpus([joined], None), tokenizer, args, seed=0)
        (message,) = (str(one.message) for one in warned)
        assert message.startswith("joined.txt: <|endoftext|> stands in a text, where it is read as characters")
    ids = np.concatenate([rows.take(row, 1)["input_ids"][0] for row in range(4)])
    assert (ids == ord("<")).any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_rows(Corpus([joined], None), tokenizer, args, seed=0, visible=False)  # another process tells it
        build_rows(Corpus([Part("plain.txt", documents("a <|end|> b"))], None), tokenizer, args, seed=0)


def test_a_file_that_is_given_several_times_is_told(tmp_path):
    names = []
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text(name)
        names.append(str(tmp_path / name))
    args = DataArguments(data_files=[*names, f"{tmp_path}/*.txt", names[1]], validation_share=0)
    with pytest.warns(UserWarning) as warned:
        assert len(texts_of(load_corpus(args, seed=0).train)) == 7
    told = (
        f"--data-files {names[0]}: given 2 times, and 2 other files more than once: each time, its documents are read"
    )
    assert [str(one.message) for one in warned] == [told]
    args = DataArguments(data_files=names[:2], validation_files=[names[2]] * 3)
    with pytest.warns(UserWarning) as warned:
        load_corpus(args, seed=0)
    told = f"--validation-files {names[2]}: given 3 times: each time, its documents are read"
    assert [str(one.message) for one in warned] == [told]
    with warnings.catch_warnings():  # with weights it is meant so
        warnings.simplefilter("error")
        load_corpus(DataArguments(sources=[{"data_files": names[:1]}, {"data_files": names[:2]}]), seed=0)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("text, share", [("x", 0.05), ("x" * 5000, 0.99999999)])
def test_nothing_is_left_to_train_on(tmp_path, text, share, cache):
    (tmp_path / "a.txt").write_text(text)
    args = DataArguments(data_files=[str(tmp_path / "a.txt")], validation_share=share, token_cache=cache)
    message = "the corpus is shorter than one row: 0 tokens for training, --sequence-length 256"
    for args.packing in (True, False):
        with pytest.raises(ValueError, match=message):
            build_rows(load_corpus(args, seed=0), byte_tokenizer(), args, seed=0)


def test_an_empty_corpus(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match="the corpus is empty: there is no text in .* \\(train\\)"):
        load_corpus(DataArguments(dataset=str(tmp_path)), seed=0)
    (tmp_path / "empty.txt").write_text("")
    args = DataArguments(data_files=[str(tmp_path / "empty.*")], skip_unreadable_files=True)
    with (
        pytest.warns(UserWarning, match="empty.txt: the file is empty; left out"),
        pytest.raises(ValueError, match="the corpus is empty: there is no text in .*empty.txt"),
    ):
        load_corpus(args, seed=0)


# ---- several sources, damaged ones -----------------------------------------------------------------------------------


def test_several_sources(dataset_folder, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"a {n}"}) + "\n" for n in range(40)))
    sources = [
        {"data_files": [str(tmp_path / "a.jsonl")], "weight": 3, "max_documents": 30},
        f"{{dataset: {dataset_folder}, text_column: content, streaming: true}}",
    ]
    args = DataArguments(sources=sources, validation_share=0.2)
    corpus = load_corpus(args, seed=0)
    assert [part.weight for part in corpus.parts] == [3, 1] and [part.streaming for part in corpus.parts] == [
        False,
        True,
    ]
    first, second = (texts_of(part.train) for part in corpus.parts)
    assert len(second) == 30 and set(first) <= {f"a {n}" for n in range(30)}
    held_out = texts_of(corpus.validation)
    assert held_out[-3:] == ["validation 0", "validation 1", "validation 2"]  # the dataset's own
    assert sorted(first + held_out[:-3]) == sorted(f"a {n}" for n in range(30))
    assert texts_of(corpus.train)[:4] == [first[0], second[0], first[1], second[1]]
    assert sorted(texts_of(corpus.train)) == sorted(first + second)
    assert corpus.description == "2 sources"
    (tmp_path / "b.jsonl").write_text('{"text": "b 0"}\n{"text": "b 1"}\n{"text": "b 2"}\n')
    given = DataArguments(sources=sources, validation_files=[str(tmp_path / "b.jsonl")], max_validation_documents=2)
    corpus = load_corpus(given, seed=0)
    assert texts_of(corpus.validation) == ["b 0", "b 2"] and len(texts_of(corpus.parts[0].train)) == 30


def stream_of(value, length):
    return TokenStream(np.full(length, value, np.uint16), np.array([0, length // 2]))


def test_mixed_rows_are_each_sources_own_order_in_the_shares_asked_for():
    parts = [ShuffledRows(TokenStream(np.arange(9 + 40 * n, dtype=np.uint16) + 1000 * n, np.array([0])), 5, seed=n)
             for n in range(3)]  # fmt: skip
    mix = MixedRows(parts, [1, 2, 7], seed=4)
    count = 3 * BLOCK // 2  # over the border of two blocks
    sources = mix.sources(0, count)
    np.testing.assert_allclose(np.bincount(sources) / count, [0.1, 0.2, 0.7], atol=0.005)
    chosen = [0, 1, BLOCK - 3, BLOCK, count - 10]
    for first in chosen:
        taken = mix.take(first, 10)["input_ids"]
        for row, place in zip(taken, range(first, first + 10), strict=True):
            source = sources[place]
            before = int((sources[:place] == source).sum())
            assert np.array_equal(row, parts[source].take(before, 1)["input_ids"][0])
    fresh = MixedRows(parts, [10, 20, 70], seed=4)  # going on: nothing but the position is known
    assert np.array_equal(fresh.take(count - 10, 10)["input_ids"], mix.take(count - 10, 10)["input_ids"])
    assert fresh.digest == mix.digest and fresh.per_epoch == sum(part.per_epoch for part in parts)
    other = MixedRows(parts, [1, 2, 7], seed=5)
    assert not np.array_equal(other.sources(0, 100), sources[:100])


def test_mixing_streams_with_others():
    texts = [f"stream {n}" for n in range(50)]
    alone = StreamedRows(documents(*texts), byte_tokenizer(), 7)
    mix = MixedRows([StreamedRows(documents(*texts), byte_tokenizer(), 7), ShuffledRows(stream_of(65, 100), 7, seed=0)],
                    [1, 1], seed=0)  # fmt: skip
    assert mix.per_epoch is None
    sources = mix.sources(0, 60)
    rows = np.concatenate([mix.take(first, 20)["input_ids"] for first in (0, 20, 40)])
    assert np.array_equal(rows[sources == 0], alone.take(0, int((sources == 0).sum()))["input_ids"])
    assert (rows[sources == 1] == 65).all()
    mix.release(60)
    counts = mix.target_counts(300)
    assert counts[65] == pytest.approx(counts.sum() / 2)
    mine = [row for row in mix.identify(0, 60) if "documents" in row]
    assert len(mine) == (sources == 1).sum()


def test_rows_say_what_they_are():
    stream = TokenStream(np.arange(20, dtype=np.uint16), np.array([0, 3, 9, 10]))
    rows = ShuffledRows(stream, 5, seed=0, name="a.txt")
    for row in rows.identify(0, rows.per_epoch):
        first, last = row["documents"]
        start = row["row"] * 4
        assert row["source"] == "a.txt"
        assert stream.starts[first] <= start and (first == 3 or start < stream.starts[first + 1])
        assert stream.starts[last] <= start + 4 and (last == 3 or start + 4 < stream.starts[last + 1])


def test_unreadable_files_are_left_out_if_asked_for(tmp_path):
    import pyarrow
    import pyarrow.parquet

    write_files(tmp_path)
    good = texts_of(file_documents([str(tmp_path / "b.jsonl")], "text"))
    parquet, no_rows = (tmp_path / "h.parquet").read_bytes(), io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), no_rows)
    bad = {
        "cut.parquet": parquet[: len(parquet) // 2],
        "empty.jsonl": b"",
        "no_text.jsonl": b'{"text": ""}\n',
        "no_rows.parquet": no_rows.getvalue(),
        "cut.jsonl.gz": (tmp_path / "d.jsonl.gz").read_bytes()[:-12],
        "cut.txt.gz": (tmp_path / "e.txt.gz").read_bytes()[:-4],
        "late.jsonl": b'{"text": "good"}\n' * 3 + b"{",
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=str(tmp_path / name)):
            load_corpus(DataArguments(data_files=[str(tmp_path / name)], validation_share=0), 0).train.head(9).texts()
            texts_of(file_documents([str(tmp_path / name)], "text"))
    files = [str(tmp_path / name) for name in ["b.jsonl", *bad]]
    with pytest.warns(UserWarning) as warned:
        corpus = load_corpus(DataArguments(data_files=files, skip_unreadable_files=True, validation_share=0), 0)
    assert texts_of(corpus.train) == good
    messages = [str(warning.message) for warning in warned]
    assert len(messages) == len(bad)
    assert f"{tmp_path / 'no_rows.parquet'}: there is no text in it; left out" in messages
    for name, message in zip(bad, messages, strict=True):
        assert message.startswith(f"{tmp_path / name}: ") and message.endswith("; left out")
    (tmp_path / "we[1]rd.jsonl").write_bytes((tmp_path / "b.jsonl").read_bytes())
    assert texts_of(file_documents([str(tmp_path / "we[1]rd.jsonl")], "text")) == good
    (tmp_path / "other.jsonl").write_text('{"txt": "a"}\n')  # this is a mistake, not damage
    with pytest.raises(ValueError, match="other.jsonl: no column 'text'"):
        load_corpus(DataArguments(data_files=[str(tmp_path / "other.jsonl")], skip_unreadable_files=True), 0)


@pytest.mark.parametrize("streaming", [False, True])
def test_damaged_shards_of_a_dataset_are_named(tmp_path, streaming):
    import pyarrow
    import pyarrow.parquet

    for number in range(3):
        table = pyarrow.table({"text": [f"document {number} {n}" for n in range(5)]})
        pyarrow.parquet.write_table(table, tmp_path / f"train-{number}.parquet")
    shard = tmp_path / "train-1.parquet"
    whole = shard.read_bytes()
    args = DataArguments(dataset=str(tmp_path), streaming=streaming)
    for content, message in ((b"", "the file is empty"), (whole[:-20], "cannot be read as parquet")):
        shard.write_bytes(content)
        with pytest.raises(ValueError, match=f"--dataset {tmp_path}: {shard}: {message}"):
            load_corpus(args, seed=0)
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), shard)
    with pytest.raises(ValueError, match=f"{shard}: there is no text in it"):
        load_corpus(args, seed=0)
    damaged = bytearray(whole)
    damaged[4:40] = bytes(36)  # the footer is whole, the first page is not
    shard.write_bytes(damaged)
    with pytest.raises(ValueError, match=f"--dataset {tmp_path}: {shard}: cannot be read as parquet: "):
        texts_of(load_corpus(args, seed=0).parts[0].train)
