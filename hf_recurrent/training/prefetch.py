"""Input that is made ready while the step before it trains."""

import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
DEPTH = 2  # steps whose input may be ready
PATIENCE = 10.0  # seconds to wait for the thread's end: it may be reading from a network that does not answer


class Prefetcher(Generic[T]):
    """`make(first)`, `make(first + stride)` ... in their order, made by a thread of its own. What `make` raises is
    raised where its value would have been returned.

    To be used in a `with` statement, which ends the thread.
    """

    def __init__(self, make: Callable[[int], T], first: int, stride: int):
        self._ready: queue.Queue = queue.Queue(DEPTH)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(make, first, stride), name="input", daemon=True)

    def _run(self, make: Callable[[int], T], first: int, stride: int) -> None:
        for position in itertools.count(first, stride):
            try:
                item = (make(position), None)
            except BaseException as error:
                item = (None, error)
            self._ready.put(item)
            if self._stopped.is_set() or item[1] is not None:
                return

    def next(self) -> T:
        value, error = self._ready.get()
        if error is not None:
            raise error
        return value

    def __enter__(self) -> "Prefetcher[T]":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stopped.set()
        begun = time.monotonic()
        while self._thread.is_alive() and time.monotonic() - begun < PATIENCE:  # what is in its way is taken out
            try:
                self._ready.get(timeout=0.01)
            except queue.Empty:
                pass
