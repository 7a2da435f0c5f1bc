"""Where compiled kernels live: one folder, `$HF_RECURRENT_CACHE` or `hf_recurrent` in the user's cache folder.

A file's name ends in a hash of everything that it was made from, so that a changed source, another compiler or a home
folder shared between different machines never meets the wrong one.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

SOURCES = Path(__file__).parent / "csrc"


class BackendUnavailable(RuntimeError):
    """A backend that cannot run here; the message is one line and says why."""


def turned_off(device_type: str) -> str | None:
    """What says that the compiled kernels of "cpu" or "cuda" are not to be used; None where nothing does.
    $HF_RECURRENT_KERNELS lists those that may be, or is "none": it is for finding out whether kernels are to blame.

    Raises:
        ValueError: it says something else.
    """
    value = os.environ.get("HF_RECURRENT_KERNELS") or "cpu,cuda"
    names = [name.strip().lower() for name in value.split(",")]
    if names != ["none"] and not {"cpu", "cuda"}.issuperset(names):
        raise ValueError(f"$HF_RECURRENT_KERNELS must be cpu, cuda, both with a comma between, or none; got {value!r}")
    return None if device_type in names else f"left out by HF_RECURRENT_KERNELS={value}"


def cache_folder() -> Path:
    """$HF_RECURRENT_CACHE, else hf_recurrent in $XDG_CACHE_HOME or ~/.cache."""
    if folder := os.environ.get("HF_RECURRENT_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_recurrent"


def source_identity(*suffixes: str) -> list[str]:
    """Names and contents of the kernel sources with these suffixes, as part of a hash."""
    paths = sorted(path for path in SOURCES.iterdir() if path.suffix in suffixes)
    return [part for path in paths for part in (path.name, path.read_text())]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _intact(path: Path) -> bool:
    """Loading a damaged library can kill the process, so it is read and compared first (well under a millisecond)."""
    try:
        return _digest(path) == _digest_file(path).read_text()
    except OSError:
        return False


def _path(stem: str, suffix: str, identity: list[str]) -> Path:
    key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:20]
    return cache_folder() / f"{stem}-{key}{suffix}"


def is_cached(stem: str, suffix: str, identity: list[str]) -> bool:
    """Whether `cached_file` finds the file made from `identity`."""
    return _intact(_path(stem, suffix, identity))


def cached_file(stem: str, suffix: str, identity: list[str], make: Callable[[Path], None]) -> Path:
    """The cached file made from `identity`; where there is none, `make(path)` writes it, in one process only while the
    others wait, and it appears under its name whole or not at all.

    Raises:
        BackendUnavailable: the cache folder cannot be written. Whatever `make` raises.
    """
    path = _path(stem, suffix, identity)
    folder = path.parent
    if _intact(path):  # also in a folder that was filled before it became read-only
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise BackendUnavailable(
            f"the cache folder {folder} cannot be written: {error.strerror} ($HF_RECURRENT_CACHE names another)"
        ) from error
    with FileLock(path.with_suffix(".lock")):
        if _intact(path):
            return path
        handle, name = tempfile.mkstemp(suffix=suffix, dir=folder)
        os.close(handle)
        try:
            make(Path(name))
            _digest_file(path).write_text(_digest(Path(name)))
            os.replace(name, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
    return path
