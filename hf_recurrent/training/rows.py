"""Token streams to rows: packed ones, in which documents never see each other, or one for each document.

A packed row is `sequence_length` consecutive tokens of the stream, and the next row begins with the last token of this
one, so that every token is predicted in exactly one row. At a document's first token `position_ids` restart at 0, where
the model drops its state, and the label is -100: nothing is predicted across a boundary.
"""

import collections
import copy
import dataclasses
import itertools
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..modeling.model import IGNORED
from .documents import Documents, Position
from .tokens import TokenStream, concatenate, encode, largest_id

PIECE = 1 << 20  # tokens counted at a time


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


def pad(stream: TokenStream, documents: np.ndarray, sequence_length: int) -> dict[str, np.ndarray]:
    """A row for each document, of its first `sequence_length` tokens, or of all and padding behind them.

    Args:
        documents: (B,) numbers of documents in the stream.

    Returns:
        What `pack` does, and `attention_mask`, (B, L) int64, 0 at padding, where `labels` are -100. Padding has the
        token that ends documents.
    """
    columns, first = np.arange(sequence_length), stream.starts[documents][:, None]
    real = columns < stream.lengths[documents][:, None]
    input_ids = stream.tokens[np.where(real, first + columns, len(stream.tokens) - 1)].astype(np.int64)
    return {
        "input_ids": input_ids,
        "position_ids": np.broadcast_to(columns, input_ids.shape).copy(),
        "labels": np.where(real & (columns > 0), input_ids, IGNORED),
        "attention_mask": real.astype(np.int64),
    }


def count_targets(stream: TokenStream, vocab_size: int, longest: int | None = None) -> np.ndarray:
    """How often each token is a target, (V,) int64: every token of the stream but the documents' first ones is; with
    `longest`, none of a document beyond so many tokens."""
    counts = np.zeros(vocab_size, np.int64)
    # In pieces: bincount makes int64 of all that it is given, and the tokens may be more than memory holds.
    for start in range(0, len(stream.tokens), PIECE):
        tokens = stream.tokens[start : start + PIECE]
        if longest is not None:
            places = np.arange(start, start + len(tokens))
            places -= stream.starts[np.searchsorted(stream.starts, places, side="right") - 1]
            tokens = tokens[places < longest]
        counts += np.bincount(tokens, minlength=vocab_size)
    for start in range(0, len(stream.starts), PIECE):
        counts -= np.bincount(stream.tokens[stream.starts[start : start + PIECE]], minlength=vocab_size)
    return counts


def _too_short(tokens: int, sequence_length: int) -> ValueError:
    return ValueError(
        f"the corpus is shorter than one row: {tokens} tokens for training, --sequence-length {sequence_length}"
    )


class ShuffledRows:
    """Rows of a stream in an endless order: permutations of all rows, each a function of the seed and the epoch.

    Args:
        packing: rows as `pack` makes them; False for those of `pad`.
        name: of the source, for `identify`.

    Raises:
        ValueError: the stream is shorter than one row.
    """

    def __init__(self, stream: TokenStream, sequence_length: int, seed: int, packing: bool = True, name: str = ""):
        self.stream = stream
        self.sequence_length = sequence_length
        self.seed = seed
        self.name = name
        self.packing = packing
        self.per_epoch = count_rows(stream, sequence_length) if packing else len(stream.starts)
        if self.per_epoch == 0:
            raise _too_short(len(stream.tokens), sequence_length)
        self._order = (-1, np.empty(0, np.int64))  # the latest epoch and its permutation

    def _permutation(self, epoch: int) -> np.ndarray:
        latest, order = self._order
        if latest != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.per_epoch)
            self._order = (epoch, order)
        return order

    def numbers(self, first: int, count: int) -> np.ndarray:
        """Which rows of the stream the rows `first` ... `first + count - 1` of the endless order are."""
        places = np.arange(first, first + count)
        rows = np.empty(count, np.int64)
        for epoch in range(first // self.per_epoch, (first + count - 1) // self.per_epoch + 1):
            here = places // self.per_epoch == epoch
            rows[here] = self._permutation(epoch)[places[here] % self.per_epoch]
        return rows

    def take(self, first: int, count: int) -> dict[str, np.ndarray]:
        """The rows `first` ... `first + count - 1` of the endless order, as `pack` or `pad` give them."""
        layout = pack if self.packing else pad
        return layout(self.stream, self.numbers(first, count), self.sequence_length)

    def identify(self, first: int, count: int) -> list[dict]:
        """What these rows are: the source, the row's number in it, and the first and last document, counted from 0
        among the source's training documents."""
        found = []
        for number in self.numbers(first, count).tolist():
            documents = [number, number]
            if self.packing:
                ends = number * (self.sequence_length - 1) + np.array([0, self.sequence_length - 1])
                documents = (np.searchsorted(self.stream.starts, ends, side="right") - 1).tolist()
            found.append({"source": self.name, "row": number, "documents": documents})
        return found

    def release(self, used: int) -> None:
        """Rows before the number `used` have been trained on."""

    @property
    def digest(self) -> str:
        return self.stream.digest

    def target_counts(self, vocab_size: int) -> np.ndarray:
        return count_targets(self.stream, vocab_size, None if self.packing else self.sequence_length)


@dataclasses.dataclass
class Place:
    """Where a stream can be gone on from: between two of the parts that are tokenised at a time.

    Args:
        row: the next row's number, through all epochs.
        epoch, position: the epoch, and where in it the next document is.
        rows: how many of the epoch's rows lie before.
        tokens, starts: the tokens that no row has been filled with, as in a `TokenStream`; none at an epoch's start.
        counts: (V,) how often each token has been a target in the rows before.
    """

    row: int = 0
    epoch: int = 0
    position: Position = ()
    rows: int = 0
    tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.uint16))
    starts: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    counts: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))

    def save(self, path: Path) -> None:
        np.savez(path, **dataclasses.asdict(self))

    @classmethod
    def load(cls, path: Path) -> "Place":
        with np.load(path, allow_pickle=False) as file:
            values = {name: array if array.ndim else array.item() for name, array in file.items()}
        if "position" not in values:
            raise ValueError("its stream is in the order of an older version")
        return cls(**values | {"position": tuple(values["position"].tolist())})


class StreamedRows:
    """Rows of documents that are read and tokenised on the way, epoch after epoch, without end.

    Rows come in the order of the stream. Going on from a later row tokenises again what lies before it, from the
    beginning or from a `place` on.

    Args:
        packing, name: as for `ShuffledRows`.
        start: the place from which to go on.

    Raises:
        ValueError: an epoch is shorter than one row.
    """

    per_epoch = None  # nobody knows
    digest = "streaming"  # nothing is known of what has not been read

    def __init__(
        self,
        documents: Documents,
        tokenizer: PreTrainedTokenizerBase,
        sequence_length: int,
        packing: bool = True,
        name: str = "",
        start: Place | None = None,
    ):
        start = start or Place(counts=np.zeros(largest_id(tokenizer) + 1, np.int64))
        self.documents = documents
        # A fast one is not to be used by two threads, of which this may be one.
        self.tokenizer = copy.deepcopy(tokenizer)
        self.sequence_length = sequence_length
        self.packing = packing
        self.name = name
        self._position = self._used = start.row
        self._unused: collections.deque = collections.deque()  # labels of rows that have been read, and not trained on
        self._counts = start.counts.copy()
        self._places: collections.deque[Place] = collections.deque()  # the first one no later than the rows trained on
        self._lock = threading.Lock()  # rows may be taken in one thread and released in another
        rows = self._read(start)
        # The first one now: a corpus that is too short is said at once.
        self._rows = itertools.chain([next(rows)], rows)

    def _read(self, start: Place) -> Iterator[dict[str, np.ndarray]]:
        """Each row, (1, L) arrays, epoch after epoch."""
        layout = self._packed if self.packing else self._padded
        while True:
            positions: collections.deque[Position] = collections.deque()
            yield from layout(self._parts(start, positions), positions, start)
            start = Place(epoch=start.epoch + 1)

    def _parts(self, start: Place, positions: collections.deque[Position]) -> Iterator[TokenStream]:
        """The rest of an epoch, tokenised; `positions` gets those behind its documents."""

        def texts():
            for document in self.documents.epoch(start.epoch, start.position):
                positions.append(document.after)
                yield document.text

        return encode(self.tokenizer, texts())

    def _note(self, epoch: int, position: Position, rows: int, rest: TokenStream | None = None) -> None:
        """That the next part can be gone on from."""
        with self._lock:
            counts = self._counts + self._counted(np.array(self._unused, np.int64))
            place = Place(self._position, epoch, position, rows, counts=counts)
            if rest is not None:
                place.tokens, place.starts = rest.tokens, rest.starts
            self._places.append(place)

    def place(self) -> Place:
        """The latest place to go on from before the rows that have not been trained on."""
        with self._lock:
            return self._places[0]

    def _packed(
        self, parts: Iterable[TokenStream], positions: collections.deque[Position], start: Place
    ) -> Iterator[dict[str, np.ndarray]]:
        """The last tokens of an epoch that fill no row are left out."""
        rest = TokenStream(start.tokens, start.starts) if len(start.tokens) else None
        rows_seen, position = start.rows, start.position
        for part in parts:
            self._note(start.epoch, position, rows_seen, rest)
            for _ in part.starts:
                position = positions.popleft()
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

    def _padded(
        self, parts: Iterable[TokenStream], positions: collections.deque[Position], start: Place
    ) -> Iterator[dict[str, np.ndarray]]:
        rows_seen, position = start.rows, start.position
        for part in parts:
            self._note(start.epoch, position, rows_seen)
            for document in range(len(part.starts)):
                position = positions.popleft()
                yield pad(part, np.array([document]), self.sequence_length)
            rows_seen += len(part.starts)
        if rows_seen == 0:
            raise _too_short(0, self.sequence_length)

    def take(self, first: int, count: int) -> dict[str, np.ndarray]:
        """The rows `first` ... `first + count - 1`, as `pack` or `pad` give them. `first` may not go back."""
        if first < self._position:
            raise ValueError(f"rows before {self._position} have been read already, asked for {first}")
        for _ in range(first - self._position):
            self._next()
        rows = [self._next() for _ in range(count)]
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    def _next(self) -> dict[str, np.ndarray]:
        row = next(self._rows)
        with self._lock:
            if self._position < self._used:
                self._counts += self._counted(row["labels"])
                self._forget_places(self._position + 1)
            else:
                self._unused.append(row["labels"])
            self._position += 1
        return row

    def _counted(self, labels: np.ndarray) -> np.ndarray:
        return np.bincount(labels[labels != IGNORED], minlength=len(self._counts))

    def _forget_places(self, row: int) -> None:
        """Those before the last one that is no later than the row."""
        while len(self._places) > 1 and self._places[1].row <= row:
            self._places.popleft()

    def identify(self, first: int, count: int) -> list[dict]:
        """The source, and the row's number in it, counted through all epochs."""
        return [{"source": self.name, "row": row} for row in range(first, first + count)]

    def release(self, used: int) -> None:
        """Rows before the number `used` have been trained on."""
        with self._lock:
            for _ in range(min(used - self._used, len(self._unused))):
                self._counts += self._counted(self._unused.popleft())
            self._used = used
            self._forget_places(min(used, self._position))

    def target_counts(self, vocab_size: int) -> np.ndarray:
        """Counts over the rows that have been trained on."""
        return np.pad(self._counts, (0, vocab_size - len(self._counts)))
