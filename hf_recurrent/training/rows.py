"""Token streams to packed rows, in which documents never see each other.

A row is `sequence_length` consecutive tokens of the stream, and the next row begins with the last token of this one, so
that every token is predicted in exactly one row. At a document's first token `position_ids` restart at 0, where the
model drops its state, and the label is -100: nothing is predicted across a boundary.
"""

import itertools
from collections.abc import Iterator

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..modeling.model import IGNORED
from .documents import Documents
from .tokens import TokenStream, concatenate, encode


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
