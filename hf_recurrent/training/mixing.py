"""Several sources in one order of rows."""

import hashlib
import threading

import numpy as np

from .rows import ShuffledRows, StreamedRows

BLOCK = 1 << 16  # rows whose sources are drawn at a time


class MixedRows:
    """Rows of several sources in an endless order. Each row is drawn from a source with a probability of its weight, as
    `datasets.interleave_datasets` draws examples, and is the next one in that source's own order; a source that comes
    to its end begins anew. The draws are a function of the seed and the position, so of them the position is all there
    is to save.

    Args:
        parts: the sources' rows.
        weights: above 0; their sum is of no consequence.
    """

    def __init__(self, parts: list[ShuffledRows | StreamedRows], weights: list[float], seed: int):
        self.parts = parts
        self.shares = np.array(weights) / np.sum(weights)
        self.seed = seed
        lengths = [part.per_epoch for part in parts]
        self.per_epoch = None if None in lengths else sum(lengths)  # as many rows as all sources have together
        self._before = [np.zeros(len(parts), np.int64)]  # rows of each source before each block
        self._lock = threading.Lock()
        self._drawn = (-1, np.empty(0, np.int64))  # the latest block and its sources

    def _block(self, number: int) -> np.ndarray:
        latest, sources = self._drawn
        if latest != number:
            sources = np.random.default_rng([self.seed, 0, number]).choice(len(self.parts), BLOCK, p=self.shares)
            self._drawn = (number, sources)
        return sources

    def _rows_before(self, position: int) -> np.ndarray:
        """How many of the rows before a position each source has given, (sources,)."""
        number, rest = divmod(position, BLOCK)
        with self._lock:  # rows may be taken in one thread and released in another
            for missing in range(len(self._before) - 1, number):
                self._before.append(self._before[-1] + self._numbers(self._block(missing)))
        return self._before[number] + self._numbers(self._block(number)[:rest])

    def _numbers(self, sources: np.ndarray) -> np.ndarray:
        return np.bincount(sources, minlength=len(self.parts))

    def sources(self, first: int, count: int) -> np.ndarray:
        """The source of each of the rows `first` ... `first + count - 1`."""
        places = np.arange(first, first + count)
        blocks = [
            self._block(number)[places[places // BLOCK == number] % BLOCK] for number in np.unique(places // BLOCK)
        ]
        return np.concatenate(blocks)

    def _shared_out(self, first: int, count: int):
        """For each source that has some of these rows: its rows, where they stand among these, its first and their
        number."""
        sources, before = self.sources(first, count), self._rows_before(first)
        for number, part in enumerate(self.parts):
            places = np.flatnonzero(sources == number)
            if len(places):
                yield part, places, int(before[number]), len(places)

    def take(self, first: int, count: int) -> dict[str, np.ndarray]:
        """The rows `first` ... `first + count - 1`, as `pack` or `pad` give them."""
        rows: dict[str, np.ndarray] = {}
        for part, places, start, number in self._shared_out(first, count):
            for name, values in part.take(start, number).items():
                rows.setdefault(name, np.empty((count, *values.shape[1:]), values.dtype))[places] = values
        return rows

    def identify(self, first: int, count: int) -> list[dict]:
        """What these rows are, as each source tells."""
        found: list = [None] * count
        for part, places, start, number in self._shared_out(first, count):
            for place, row in zip(places.tolist(), part.identify(start, number), strict=True):
                found[place] = row
        return found

    def release(self, used: int) -> None:
        """Rows before the number `used` have been trained on."""
        for part, number in zip(self.parts, self._rows_before(used).tolist(), strict=True):
            part.release(number)

    @property
    def digest(self) -> str:
        return hashlib.sha256(" ".join(part.digest for part in self.parts).encode()).hexdigest()

    def target_counts(self, vocab_size: int) -> np.ndarray:
        """How often each token is a target in as many rows as the sources have, or have given, together, each with its
        share."""
        counts = [part.target_counts(vocab_size).astype(float) for part in self.parts]
        total = sum(count.sum() for count in counts)
        return sum(
            share * total * count / max(count.sum(), 1) for share, count in zip(self.shares, counts, strict=True)
        )
