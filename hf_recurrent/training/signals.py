"""Signals that end a run after its current step."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from tqdm.auto import tqdm


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], int]]:
    """Notes SIGINT and SIGTERM; a second SIGINT raises KeyboardInterrupt at once. Yields a function that gives the
    first one's number, or 0."""
    seen = 0

    def note(number, frame):
        nonlocal seen
        if seen:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return  # `accelerate launch` sends SIGTERM too, to the processes that Ctrl-C has reached
        seen = number
        # It may have come in the middle of another write, or the terminal may be gone.
        with contextlib.suppress(RuntimeError, OSError):
            tqdm.write("stopping after this step (Ctrl-C again: at once, without saving)", file=sys.stderr)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield lambda: 0
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
