"""What happens on Ctrl-C while a command line is still importing torch and Transformers, which takes seconds."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import PurePath


@contextlib.contextmanager
def quiet_interrupt() -> Iterator[None]:
    """Leave at once and without a traceback, as `hf_recurrent.cli.main` does later, if this is `hf-recurrent`.

    A program that imports the package gets its KeyboardInterrupt.
    """
    # `python -m` puts the module's name in the place of "-m" once the packages that it lies in have been imported.
    program = PurePath(sys.argv[0]).stem if sys.argv else ""
    if (
        program not in ("hf-recurrent", "-m")
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler  # ignored under nohup, say
        or threading.current_thread() is not threading.main_thread()  # only that one may set handlers
    ):
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
