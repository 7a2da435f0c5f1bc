"""Documents, and how some of them are held out for validation."""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


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
