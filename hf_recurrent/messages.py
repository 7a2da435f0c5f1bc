"""Parts of messages: what other libraries raise as one line, counts, the nearest valid name."""

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator

LIKE = 0.5  # of 1, the least likeness of names of which one may be meant by the other
LISTED = 20  # valid names at most that a message lists


def first_line(error: BaseException) -> str:
    """The first line of an error's message (other libraries write many), or its kind where it has none.

    Two lines, where the first one ends in a colon.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])


@contextlib.contextmanager
def within_memory(remedy: str) -> Iterator[None]:
    """Turns whatever a library raises for too little memory, or for a size that overflows, into one MemoryError."""
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        told = re.search("out of memory|allocate memory|[Oo]verflow|Maximum allowed", str(error))
        if not isinstance(error, (MemoryError, OverflowError)) and not told:
            raise
        raise MemoryError(f"not enough memory: {remedy} ({first_line(error)})") from error


def counted(number: int, noun: str) -> str:
    """1 document; 2,000 documents."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def nearest(name: str, valid: Iterable[str], number: int = 1, *, listed: bool = True) -> str:
    """A hint at the valid names, at most `number` of them, that are most like `name`; where none is like it, at all of
    them if they are not too many, or with `listed` False at none, for a message that lists them anyway."""
    valid = list(valid)
    few = not listed or len(valid) <= LISTED
    close = difflib.get_close_matches(name, valid, n=number, cutoff=LIKE if few else 0)
    if valid and not close and listed:
        return f"; expected one of {', '.join(valid)}"
    if len(close) > 1:
        return f"; the nearest valid ones are {', '.join(close)}"
    return f"; the nearest valid one is {close[0]}" if close else ""
