"""What happens while a command line has not yet imported torch and Transformers, which takes seconds."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import PurePath


def is_command_line() -> bool:
    """Whether this process is `hf-recurrent` or `python -m hf_recurrent`: a command imports what it needs itself, once
    it has read its flags."""
    # `python -m` puts the module's name in the place of "-m" once the packages that it lies in have been imported.
    program = sys.argv[0] if sys.argv else ""
    return PurePath(program).stem == "hf-recurrent" or (
        program == "-m" and ("-m", "hf_recurrent") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    )


@contextlib.contextmanager
def quiet_interrupt() -> Iterator[None]:
    """On Ctrl-C leave at once and without a traceback, if this is `python -m hf_recurrent.training`, say, whose
    packages are imported before it can catch anything.

    A program that imports the package gets its KeyboardInterrupt.
    """
    if (
        sys.argv[:1] != ["-m"]
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
