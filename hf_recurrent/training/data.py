"""Text to packed rows: corpora, their split, tokens, and rows in which documents never see each other.

A token stream is the documents one after the other, each as `[bos] tokens [eos]`. A row is `sequence_length`
consecutive tokens of the stream, and the next row begins with the last token of this one, so that every token is
predicted in exactly one row. At a document's first token `position_ids` restart at 0, where the model drops its state,
and the label is -100: nothing is predicted across a boundary.
"""

import bz2
import glob
import gzip
import hashlib
import itertools
import lzma
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..hub import access
from ..messages import first_line
from ..modeling.model import IGNORED

# Folders of the standard library that hold tests or other people's packages.
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
COMPRESSIONS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
LOADERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}
PIECE = 1 << 20  # characters; longer documents are tokenised piece by piece, which bounds memory and uses every core
BATCH = 1 << 22  # characters tokenised in one call
STREAMED_VALIDATION = 500  # documents held out of a stream, unless --max-validation-documents says otherwise
SHUFFLE_BUFFER = 10_000  # documents of a stream shuffled at a time


# ---- documents -------------------------------------------------------------------------------------------------------


class Documents:
    """Documents that can be iterated over again and again, as pairs (key, text). Empty texts are left out.

    Args:
        read: called with an epoch number, or None, it iterates over all documents. The order may depend on the epoch.
    """

    def __init__(self, read: Callable[[int | None], Iterable[tuple[str, str]]]):
        self._read = read

    def epoch(self, epoch: int | None) -> Iterator[tuple[str, str]]:
        return ((key, text) for key, text in self._read(epoch) if text)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return self.epoch(None)

    def texts(self) -> Iterator[str]:
        return (text for _, text in self)

    def map(self, function: Callable[[Iterator[tuple[str, str]]], Iterable[tuple[str, str]]]) -> "Documents":
        """The documents that `function` makes of an iterator over these."""
        return Documents(lambda epoch: function(self.epoch(epoch)))

    def head(self, count: int | None) -> "Documents":
        return self if count is None else self.map(lambda documents: itertools.islice(documents, count))


@dataclass
class Corpus:
    """Documents to train on and to validate on.

    Args:
        description: one phrase for the user.
        streaming: the training documents are too many to hold; they are read in shuffled order, tokenised on the way.
    """

    description: str
    train: Documents
    validation: Documents | None
    streaming: bool = False


def in_validation(key: str, share: float) -> bool:
    """Whether the document named `key` is one of the `share` held out.

    A hash of the key alone decides: the answer is the same in every run and does not depend on other documents.
    """
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def split(documents: Documents, share: float) -> tuple[Documents, Documents | None]:
    """Split documents into training and validation.

    The hash of a document's key decides. Where that would leave one side empty (one long document, say), the last
    `share` of each document's characters is held out instead.
    """
    if share == 0:
        return documents, None
    if _has_both_sides(documents, share):
        return (
            documents.map(lambda items: (item for item in items if not in_validation(item[0], share))),
            documents.map(lambda items: (item for item in items if in_validation(item[0], share))),
        )
    return (
        documents.map(lambda items: ((key, text[: int(len(text) * (1 - share))]) for key, text in items)),
        documents.map(lambda items: ((key, text[int(len(text) * (1 - share)) :]) for key, text in items)),
    )


def _has_both_sides(documents: Documents, share: float) -> bool:
    sides = set()
    for key, _ in documents:
        sides.add(in_validation(key, share))
        if len(sides) == 2:
            return True
    return False


# ---- sources ---------------------------------------------------------------------------------------------------------


def stdlib_documents(root: Path | None = None) -> Documents:
    """The source files of the running interpreter's standard library, sorted by relative path, which is also their key.

    Tests and site-packages are left out, and so are files that are not UTF-8.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}

    def read(_):
        for name in sorted(paths):
            if NOT_LIBRARY.isdisjoint(name.split("/")):
                try:
                    yield name, paths[name].read_bytes().decode("utf-8")
                except UnicodeDecodeError:
                    continue

    return Documents(read)


def expand(patterns: list[str], flag: str) -> list[str]:
    """The files that patterns name, sorted within each pattern.

    Raises:
        FileNotFoundError: a pattern names no file.
    """
    files = []
    for pattern in patterns:
        # A name that exists is taken as it is, even with brackets in it.
        found = [pattern] if Path(pattern).is_file() else sorted(filter(_is_file, glob.glob(pattern, recursive=True)))
        if not found:
            reason = "is a folder: name its files, for example by a glob" if Path(pattern).is_dir() else "no such file"
            raise FileNotFoundError(f"{flag} {pattern}: {reason}")
        files += found
    return files


def _is_file(name: str) -> bool:
    return Path(name).is_file()


def file_documents(files: list[str], text_column: str) -> Documents:
    """Documents of local files: the records of .jsonl, .json and .parquet, and any other file as a whole.

    Files ending in .gz, .bz2 or .xz are decompressed. A document's key is its text.

    Raises (while iterating):
        ValueError: a file that cannot be read, or has no text in `text_column`; the message names it.
    """

    def read(_):
        for file in files:
            endings = [ending for ending in Path(file).suffixes if ending not in COMPRESSIONS]
            loader = LOADERS.get(endings[-1].lower() if endings else "")
            texts = [_read_text(file)] if loader is None else _read_records(loader, file, text_column)
            yield from ((text, text) for text in texts)

    return Documents(read)


def _read_text(file: str) -> str:
    try:
        with COMPRESSIONS.get(Path(file).suffix, open)(file, "rb") as stream:
            return stream.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except Exception as error:  # what a broken archive raises differs by its kind
        raise ValueError(f"{file}: cannot be read: {first_line(error)}") from error


def _read_records(loader: str, file: str, text_column: str) -> Iterator[str]:
    from datasets import load_dataset

    if Path(file).stat().st_size == 0:
        return
    try:
        # Streaming reads the file itself; otherwise a copy of it would stay in the datasets cache.
        records = iter(load_dataset(loader, data_files=[file], split="train", streaming=True))
        first = list(itertools.islice(records, 1))
        yield from _column(itertools.chain(first, records), text_column, file)
    except _Unreadable:
        raise
    except Exception as error:  # datasets, pyarrow and the decompressors each raise their own
        raise ValueError(f"{file}: cannot be read as {loader}: {access.reason(error, file)}") from error


class _Unreadable(ValueError):
    """A record without text; the message already names the file."""


def _column(records: Iterable[dict], column: str, source: str) -> Iterator[str]:
    for number, record in enumerate(records):
        if column not in record:
            raise _Unreadable(
                f"{source}: no column {column!r}; it has {', '.join(map(repr, record))}: choose one by --text-column"
            )
        if not isinstance(record[column], str):
            raise _Unreadable(f"{source}: record {number}: column {column!r} holds {record[column]!r}, expected text")
        yield record[column]


def dataset_documents(
    name: str,
    config: str | None,
    split: str,
    text_column: str,
    *,
    streaming: bool = False,
    max_documents: int | None = None,
    seed: int = 0,
) -> Documents:
    """Documents of a dataset on the Hub or in a folder, by `datasets.load_dataset`. A document's key is its text.

    With `streaming`, `epoch(n)` iterates in an order that is a function of the seed and n.

    Raises:
        ValueError: there is no such dataset, configuration, split or column.
    """
    from datasets import load_dataset

    access.prepare(name)
    try:
        dataset = load_dataset(name, config, split=split, streaming=streaming)
    except Exception as error:  # datasets raises a dozen kinds, network errors among them
        where = name if config is None else f"{name} --dataset-config {config}"
        reason = access.reason(error, name)
        raise ValueError(f"--dataset {where}: split {split!r} cannot be loaded: {reason}") from error
    if max_documents is not None:
        dataset = dataset.take(max_documents if streaming else min(max_documents, len(dataset)))

    def read(epoch):
        order = dataset
        if streaming and epoch is not None:
            order = dataset.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
            order.set_epoch(epoch)
        return ((text, text) for text in _column(order, text_column, name))

    return Documents(read)


def load_corpus(args, seed: int) -> Corpus:
    """The corpus that `DataArguments` ask for.

    Raises:
        ValueError, FileNotFoundError: what is asked for is not there or is empty.
    """
    validation = None
    if args.dataset:
        from datasets import get_dataset_split_names

        description = f"{args.dataset} ({args.dataset_split})"
        common = (args.dataset, args.dataset_config)
        documents = dataset_documents(
            *common,
            args.dataset_split,
            args.text_column,
            streaming=args.streaming,
            max_documents=args.max_documents,
            seed=seed,
        )
        validation_split = args.validation_split
        if validation_split is None and "validation" in get_dataset_split_names(*common):
            validation_split = "validation"
        if validation_split is not None and not args.validation_files and args.validation_share > 0:
            validation = dataset_documents(*common, validation_split, args.text_column, streaming=args.streaming)
    elif args.data_files:
        files = expand(args.data_files, "--data-files")
        description = files[0] if len(files) == 1 else f"{len(files)} files"
        documents = file_documents(files, args.text_column).head(args.max_documents)
    else:
        description = "Python's standard library"
        documents = stdlib_documents().head(args.max_documents)
    if args.validation_files:
        validation = file_documents(expand(args.validation_files, "--validation-files"), args.text_column)

    if next(iter(documents), None) is None:
        raise ValueError(f"the corpus is empty: there is no text in {description}")
    train = documents
    if validation is None:
        train, validation = split(documents, args.validation_share)
    if validation is not None:
        limit = args.max_validation_documents
        validation = validation.head(STREAMED_VALIDATION if limit is None and args.streaming else limit)
    return Corpus(description, train, validation, args.streaming)


# ---- tokens ----------------------------------------------------------------------------------------------------------


@dataclass
class TokenStream:
    """Documents one after the other, each as `[bos] tokens [eos]`.

    Args:
        tokens: (N,) unsigned integers.
        starts: (documents,) where each document begins in `tokens`, ascending, the first one 0.
    """

    tokens: np.ndarray
    starts: np.ndarray

    def digest(self) -> str:
        """A hash of the whole stream, to tell whether a corpus has changed."""
        digest = hashlib.sha256(np.ascontiguousarray(self.tokens).view(np.uint8))
        digest.update(np.ascontiguousarray(self.starts).view(np.uint8))
        return digest.hexdigest()


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """Cut a text after the first line end behind every `size` characters; together the pieces are the text."""
    start = 0
    while len(text) - start > size:
        end = text.find("\n", start + size) + 1 or len(text)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _batches(texts: Iterable[str]) -> Iterator[list[list[str]]]:
    """Documents as lists of pieces, grouped to about BATCH characters."""
    batch, size = [], 0
    for text in texts:
        batch.append(list(pieces(text)))
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], description: str | None = None
) -> Iterator[TokenStream]:
    """Tokenise documents, as one stream for every few megabytes of text; `description` names the progress bar.

    Special tokens that occur in a text are tokenised as the characters they are, so that no text can end its document.
    """
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    eos = np.array([tokenizer.eos_token_id], dtype)
    bos = eos if tokenizer.bos_token_id is None else np.array([tokenizer.bos_token_id], dtype)
    # The bar appears only where tokenising takes longer than two seconds.
    with tqdm(desc=description, unit="B", unit_scale=True, delay=2, leave=False, disable=description is None) as bar:
        for batch in _batches(texts):
            encoded = tokenizer(
                [piece for document in batch for piece in document],
                add_special_tokens=False,
                split_special_tokens=True,
                return_attention_mask=False,
                verbose=False,
            )["input_ids"]
            encoded = iter(encoded)
            parts, starts, position = [], [], 0
            for document in batch:
                ids = [np.array(next(encoded), dtype) for _ in document]
                parts += [bos, *ids, eos]
                starts.append(position)
                position += sum(map(len, ids)) + 2
                bar.update(sum(map(len, document)))
            yield TokenStream(np.concatenate(parts), np.array(starts, np.int64))


def concatenate(streams: Iterable[TokenStream]) -> TokenStream:
    streams = list(streams)
    offsets = itertools.accumulate((len(stream.tokens) for stream in streams), initial=0)
    return TokenStream(
        np.concatenate([stream.tokens for stream in streams]),
        np.concatenate([stream.starts + offset for stream, offset in zip(streams, offsets, strict=False)]),
    )


# ---- rows ------------------------------------------------------------------------------------------------------------


def pack(stream: TokenStream, rows: np.ndarray, sequence_length: int) -> dict[str, np.ndarray]:
    """Rows of a stream.

    Row r holds the tokens r (L - 1) ... r (L - 1) + L - 1 of the stream, L = `sequence_length`.

    Args:
        rows: (B,) row numbers.

    Returns:
        `input_ids`, `position_ids` and `labels`, each (B, L) int64. `position_ids` count from the document's first
        token, or from the row's where the document began before it. `labels` are in place (the model shifts them) and
        -100 where `position_ids` are 0: no row predicts its first token, nor the first token of a document.
    """
    first = rows[:, None] * (sequence_length - 1)
    index = first + np.arange(sequence_length)
    document = stream.starts[np.searchsorted(stream.starts, index, side="right") - 1]
    position_ids = index - np.maximum(document, first)
    input_ids = stream.tokens[index].astype(np.int64)
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "labels": np.where(position_ids == 0, IGNORED, input_ids),
    }


def count_rows(stream: TokenStream, sequence_length: int) -> int:
    """How many whole rows a stream holds."""
    return max(0, (len(stream.tokens) - 1) // (sequence_length - 1))


def count_targets(stream: TokenStream, vocab_size: int) -> np.ndarray:
    """How often each token is a target, (V,) int64: every token of the stream but the documents' first ones is."""
    counts = np.bincount(stream.tokens, minlength=vocab_size)
    return counts - np.bincount(stream.tokens[stream.starts], minlength=vocab_size)


def _too_short(tokens: int, sequence_length: int) -> ValueError:
    return ValueError(
        f"the corpus is shorter than one row: {tokens} tokens for training, --sequence-length {sequence_length}"
    )


class ShuffledRows:
    """Rows of a stream in an endless order: permutations of all rows, each a function of the seed and the epoch.

    Raises:
        ValueError: the stream is shorter than one row.
    """

    def __init__(self, stream: TokenStream, sequence_length: int, seed: int):
        self.stream = stream
        self.sequence_length = sequence_length
        self.seed = seed
        self.per_epoch = count_rows(stream, sequence_length)
        if self.per_epoch == 0:
            raise _too_short(len(stream.tokens), sequence_length)
        self._order = (-1, np.empty(0, np.int64))  # the latest epoch and its permutation

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self.seed, epoch]).permutation(self.per_epoch))
        return self._order[1]

    def take(self, first: int, count: int) -> dict[str, np.ndarray]:
        """The rows `first` ... `first + count - 1` of the endless order, as `pack` gives them."""
        places = np.arange(first, first + count)
        rows = np.empty(count, np.int64)
        for epoch in range(first // self.per_epoch, (first + count - 1) // self.per_epoch + 1):
            here = places // self.per_epoch == epoch
            rows[here] = self._permutation(epoch)[places[here] % self.per_epoch]
        return pack(self.stream, rows, self.sequence_length)

    def digest(self) -> str:
        return self.stream.digest()

    def target_counts(self, vocab_size: int) -> np.ndarray:
        return count_targets(self.stream, vocab_size)


class StreamedRows:
    """Rows of documents that are read and tokenised on the way, epoch after epoch, without end.

    Rows come in the order of the stream. Going on from a later place reads what lies before it again.

    Raises:
        ValueError: an epoch is shorter than one row.
    """

    def __init__(self, documents: Documents, tokenizer: PreTrainedTokenizerBase, sequence_length: int):
        self.documents = documents
        self.tokenizer = tokenizer
        self.sequence_length = sequence_length
        rows = self._read()
        self._rows = itertools.chain(
            [next(rows)], rows
        )  # the first one now: a corpus that is too short is said at once
        self._position = 0
        self._counts = np.zeros(len(tokenizer), np.int64)

    def _read(self) -> Iterator[dict[str, np.ndarray]]:
        """Each row, (1, L) arrays, epoch after epoch. The last tokens of an epoch that fill no row are left out."""
        for epoch in itertools.count():
            rest = None
            rows_seen = 0
            for part in encode(self.tokenizer, (text for _, text in self.documents.epoch(epoch))):
                stream = part if rest is None else concatenate([rest, part])
                rows = count_rows(stream, self.sequence_length)
                for row in range(rows):
                    yield pack(stream, np.array([row]), self.sequence_length)
                rows_seen += rows
                used = rows * (self.sequence_length - 1)
                starts = stream.starts[stream.starts > used] - used
                # What is left begins where the next row does: position 0 there, whichever document it is in.
                rest = TokenStream(stream.tokens[used:], np.concatenate([np.zeros(1, np.int64), starts]))
            if rows_seen == 0:
                raise _too_short(0 if rest is None else len(rest.tokens), self.sequence_length)

    def take(self, first: int, count: int) -> dict[str, np.ndarray]:
        """The rows `first` ... `first + count - 1`, as `pack` gives them. `first` may not go back."""
        if first < self._position:
            raise ValueError(f"rows before {self._position} have been read already, asked for {first}")
        for _ in range(first - self._position):
            self._count(next(self._rows))
        rows = [next(self._rows) for _ in range(count)]
        for row in rows:
            self._count(row)
        self._position = first + count
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    def _count(self, row: dict[str, np.ndarray]) -> None:
        labels = row["labels"]
        self._counts += np.bincount(labels[labels != IGNORED], minlength=len(self._counts))

    def digest(self) -> str:
        """Nothing is known of what has not been read."""
        return "streaming"

    def target_counts(self, vocab_size: int) -> np.ndarray:
        """Counts over the rows read so far."""
        return np.pad(self._counts, (0, vocab_size - len(self._counts)))


@dataclass
class ValidationRows:
    """The whole validation text as rows, the last one padded, with what its baselines need.

    Args:
        rows: `input_ids`, `position_ids`, `labels`, each (R, L).
        target_counts: (V,) how often each token is a target.
        text_bytes: UTF-8 bytes of the text.
        gzip_bytes: what `gzip -9` makes of the documents one after the other.
    """

    rows: dict[str, np.ndarray]
    documents: int
    target_counts: np.ndarray
    text_bytes: int
    gzip_bytes: int

    @property
    def targets(self) -> int:
        return int(self.target_counts.sum())


def validation_rows(
    documents: Documents, tokenizer: PreTrainedTokenizerBase, sequence_length: int, vocab_size: int
) -> ValidationRows:
    """Tokenise and pack validation documents. Every token but the documents' first is a target in exactly one row.

    Raises:
        ValueError: there is no text to validate on.
    """
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)  # 31: with gzip's header and checksum
    count = text_bytes = gzip_bytes = 0

    def measured():
        nonlocal count, text_bytes, gzip_bytes
        for text in documents.texts():
            content = text.encode("utf-8")
            count, text_bytes = count + 1, text_bytes + len(content)
            gzip_bytes += len(compressor.compress(content))
            yield text

    streams = list(encode(tokenizer, measured(), "tokenising validation text"))
    if not streams:
        raise ValueError("there is no validation text: give --validation-files, or --validation-share 0 to do without")
    gzip_bytes += len(compressor.flush())
    stream = concatenate(streams)
    rows = -(-(len(stream.tokens) - 1) // (sequence_length - 1))
    missing = rows * (sequence_length - 1) + 1 - len(stream.tokens)
    padding = np.full(missing, tokenizer.eos_token_id, stream.tokens.dtype)
    padded = TokenStream(np.concatenate([stream.tokens, padding]), stream.starts)
    packed = pack(padded, np.arange(rows), sequence_length)
    if missing:
        packed["labels"][-1, -missing:] = IGNORED
    return ValidationRows(packed, count, count_targets(stream, vocab_size), text_bytes, gzip_bytes)
