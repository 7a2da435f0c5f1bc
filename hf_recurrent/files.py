"""Files that appear under their name whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .messages import first_line

UNFINISHED = ".unfinished-"


def sync(path: Path) -> None:
    windows = os.name == "nt"
    if windows and path.is_dir():  # which it does not open
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    while not path.exists():
        path = path.parent
    return path


@contextlib.contextmanager
def saving(path: Path) -> Iterator[None]:
    """Turns whatever a failing save raises into one OSError that names `path` and says that earlier files are whole."""
    try:
        yield
    except Exception as error:  # safetensors, torch and the system raise their own kinds for a full disk
        reason = first_line(error)
        if not isinstance(error, OSError):  # torch's message for a full disk speaks of file positions
            reason += f" ({shutil.disk_usage(existing(path)).free / 2**20:,.0f} MiB are free on that disk)"
        raise OSError(f"cannot save {path}: {reason}; what was saved before is untouched") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name in the folder of `path`, for a file that takes the name `path` when the block ends without an
    error.

    Raises:
        OSError: it cannot be written; an earlier file of that name is untouched.
    """
    with saving(path):
        # A folder of its own: libraries that write several attempts, or a name of their choice, leave nothing behind.
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=path.parent) as folder:
            temporary = Path(folder, path.name)
            yield temporary
            sync(temporary)
            os.replace(temporary, path)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that takes the name `path`, in place of an earlier folder of that name, when the block ends
    without an error. A link stays, and the folder that it leads to is replaced.

    Raises:
        OSError: it cannot be written; an earlier folder of that name is untouched.
    """
    path = path.resolve()  # "." has no name, and once it is moved away, no relative path leads anywhere
    with saving(path):
        holder = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=path.parent))
    temporary, before = holder / path.name, holder / UNFINISHED  # which no folder is called
    try:
        temporary.mkdir()
        yield temporary
        with saving(path):
            sync_tree(temporary)
            if path.exists():
                os.rename(path, before)
            os.rename(temporary, path)
            sync(path.parent)
    finally:  # also Ctrl-C, which may come between the two; should it come here again, nothing is removed
        if before.exists() and not path.exists():
            os.rename(before, path)
        shutil.rmtree(holder)


def write_whole(path: Path, content: str) -> None:
    """Write a text file. Raises what `replacing` raises."""
    with replacing(path) as temporary:
        temporary.write_text(content, encoding="utf-8")
