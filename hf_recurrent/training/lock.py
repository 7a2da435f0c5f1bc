"""One run at a time in a folder: a lock that goes with its process, in whatever way that ends."""

import contextlib
import io
import os
import re
import socket
import time
import weakref
from pathlib import Path

from ..files import UNFINISHED

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = f"{UNFINISHED}lock"  # its holder's name is in it; a killed process leaves it, and it locks nothing then
ATTEMPTS = 10

_held: "weakref.WeakSet[io.FileIO]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A child that is forked has the same open file, and would keep the lock when this process has ended."""
    for file in list(_held):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def take(folder: Path) -> io.FileIO | None:
    """Lock a folder, which is made where it is not there.

    Returns:
        What holds the lock while it is open; None where there are no locks, on this system or in that file system, or
        where nothing can be written.

    Raises:
        BlockingIOError: another run has it; the message names its process.
    """
    if fcntl is None:
        return None
    for _ in range(ATTEMPTS):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = open(folder / LOCK, "a+b", buffering=0)  # noqa: SIM115 (for as long as the run lasts)
        except FileNotFoundError:  # another run has just removed the folder
            continue
        except OSError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                raise BlockingIOError(f"--output-dir {folder}: is in use by another run{_holder(file)}") from None
        except OSError:
            file.close()
            with contextlib.suppress(OSError):
                (folder / LOCK).unlink()
            return None
        if _is_there(file, folder):
            with contextlib.suppress(OSError):  # a full disk
                file.truncate(0)
                file.write(f"process {os.getpid()} on host {socket.gethostname()}\n".encode())
            _held.add(file)
            return file
        file.close()  # while it was opened, another run has removed it, or moved the folder
    return None


def release(file: io.FileIO, folder: Path) -> None:
    """Give back what `take` has returned. The lock's file goes, before another run can have it."""
    if file.closed:  # in a forked child
        return
    with contextlib.suppress(OSError):
        if _is_there(file, folder):
            (folder / LOCK).unlink()
    file.close()


def _is_there(file: io.FileIO, folder: Path) -> bool:
    """Whether this is the folder's lock, by its present name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(folder / LOCK))
    except FileNotFoundError:
        return False


def _holder(file: io.FileIO) -> str:
    """The name that the holder writes just after it has locked the file: what looks between the two waits for it."""
    for _ in range(ATTEMPTS):
        file.seek(0)
        found = re.match(r"process \d+ on host [\w.-]+\n", file.read(500).decode("utf-8", "replace"))
        if found:
            return f" ({found[0].rstrip()})"
        time.sleep(0.02)
    return ""
