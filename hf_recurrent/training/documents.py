"""Documents, and how some of them are held out for validation."""

import collections
import hashlib
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SHUFFLED = 10_000  # documents of a stream shuffled at a time

Position = tuple[int, ...]  # between two documents of an epoch; () is before all of them


class Document(NamedTuple):
    """
    Args:
        key: decides whether it is held out.
        after: the position behind it.
    """

    key: str
    text: str
    after: Position = ()


class Documents:
    """Documents that can be iterated over again and again. Empty texts are left out.

    Args:
        read: called with an epoch number, or None, it iterates over all documents, as keys and texts. The order may
            depend on the epoch.
        seek: iterates over those of an epoch behind a position. Without it positions are counts, and the documents
            before one are read.
    """

    def __init__(
        self,
        read: Callable[[int | None], Iterable[tuple]],
        seek: Callable[[int, Position], Iterable[Document]] | None = None,
    ):
        self._read = read
        self._seek = seek

    def epoch(self, epoch: int | None, start: Position = ()) -> Iterator[Document]:
        if self._seek is not None and epoch is not None:
            documents = self._seek(epoch, start)
        else:
            behind = itertools.islice(enumerate(self._read(epoch), 1), sum(start), None)
            documents = (Document(key, text, (number,)) for number, (key, text, *_) in behind)
        return (document for document in documents if document.text)

    def __iter__(self) -> Iterator[Document]:
        return self.epoch(None)

    def texts(self) -> Iterator[str]:
        return (document.text for document in self)

    def each(self, function: Callable[[Document], Document | None]) -> "Documents":
        """What `function` makes of each document; None leaves it out."""

        def seek(epoch, start):
            return filter(None, map(function, self.epoch(epoch, start)))

        return Documents(lambda epoch: seek(epoch, ()), seek)

    def head(self, count: int | None) -> "Documents":
        return self if count is None else Documents(lambda epoch: itertools.islice(self.epoch(epoch), count))

    def sample(self, count: int | None) -> "Documents":
        """Those with the smallest hashes: the same ones in the same order, whatever the order of all. All of them are
        read for it."""
        if count is None:
            return self

        def read(epoch):
            seen = collections.Counter()

            def place(document):
                first = _hash(document.key)
                seen[first] += 1
                # One that is there many times is to come as often as it would by chance, not all times or never.
                return first if seen[first] == 1 else _hash(f"{seen[first]} {document.key}")

            return heapq.nsmallest(count, self.epoch(epoch), place)

        return Documents(read)


@dataclass
class Part:
    """One source of a corpus.

    Args:
        description: one phrase for the user.
        train: the documents to train on.
        streaming: they are too many to hold; they are read in shuffled order, tokenised on the way.
        weight: its share of the rows, in parts of the sum over all sources.
    """

    description: str
    train: Documents
    streaming: bool = False
    weight: float = 1.0


@dataclass
class Corpus:
    """The sources to train on, and documents to validate on."""

    parts: list[Part]
    validation: Documents | None

    @property
    def description(self) -> str:
        return self.parts[0].description if len(self.parts) == 1 else f"{len(self.parts)} sources"

    @property
    def train(self) -> Documents:
        """The documents of all sources, one of each in turn while it lasts."""
        return in_turn([part.train for part in self.parts])


def chained(documents: list[Documents]) -> Documents:
    """One after the other."""
    return Documents(lambda epoch: itertools.chain.from_iterable(each.epoch(epoch) for each in documents))


def in_turn(documents: list[Documents]) -> Documents:
    """One document of each, again and again, until the last of them has ended."""

    def read(epoch):
        left = [each.epoch(epoch) for each in documents]
        while left:
            for each in list(left):
                try:
                    yield next(each)
                except StopIteration:
                    left.remove(each)

    return Documents(read)


def in_validation(key: str, share: float) -> bool:
    """Whether the document named `key` is one of the `share` held out.

    A hash of the key alone decides: the answer is the same in every run and does not depend on other documents.
    """
    return _hash(key) < share * 2**64


def _hash(key: str) -> int:
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def in_random_order(
    read: Callable[[int, int], Iterator[str]], shards: int, seed: int, epoch: int, start: Position
) -> Iterator[Document]:
    """Documents of a source in an order that is a function of the seed and the epoch: its shards one after the other in
    a random order, and of these blocks of SHUFFLED documents, each in a random order. To go on from a position reads no
    more than the documents of a shard and a block before it. A document's key is its text.

    Args:
        read: (shard, count) -> the texts of the shard behind so many.
        start: where a block begins, as the shard's place in the order and a number of its documents, and how many
            documents of the block lie before.
    """
    order = np.random.default_rng([seed, epoch]).permutation(shards).tolist()

    def texts(place, count):
        for later in range(place, shards):
            for text in read(order[later], count):
                count += 1
                yield text, (later, count)
            count = 0

    *begin, before = start or (0, 0, 0)
    behind = texts(*begin)
    while block := list(itertools.islice(behind, SHUFFLED)):
        mixed = np.random.default_rng([seed, epoch, *begin]).permutation(len(block)).tolist()
        for count, number in enumerate(mixed[before:], before + 1):
            text, _ = block[number]
            yield Document(text, text, (*begin, count))
        begin, before = block[-1][1], 0


def split(documents: Documents, share: float) -> tuple[Documents, Documents | None]:
    """Split documents into training and validation.

    The hash of a document's key decides. Where that would leave one side empty (one long document, say), the last
    `share` of each document's characters is held out instead.
    """
    if share == 0:
        return documents, None
    if _has_both_sides(documents, share):
        return (
            documents.each(lambda document: None if in_validation(document.key, share) else document),
            documents.each(lambda document: document if in_validation(document.key, share) else None),
        )

    def cut(text):
        return int(len(text) * (1 - share))

    return (
        documents.each(lambda document: document._replace(text=document.text[: cut(document.text)])),
        documents.each(lambda document: document._replace(text=document.text[cut(document.text) :])),
    )


def _has_both_sides(documents: Documents, share: float) -> bool:
    sides = set()
    for document in documents:
        sides.add(in_validation(document.key, share))
        if len(sides) == 2:
            return True
    return False
