"""The output folder: whatever is in it is whole, and what was there stays until something whole replaces it."""

import contextlib
import glob
import io
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from ..files import UNFINISHED, existing, saving, sync, sync_tree, write_whole
from ..messages import counted
from .lock import LOCK, release, take

ARGUMENTS = "train.yaml"  # also the mark of a folder that `hf-recurrent train` wrote
METRICS = "metrics.jsonl"
BAD_BATCHES = "bad_batches.jsonl"
TRACKERS = "trackers"  # what trackers write that keep files
WEIGHTS = "model.safetensors"
FILES = "files.json"  # of a checkpoint: the sizes of its files, by which a damaged one is told
LARGEST = 1e300  # of what metrics hold; beyond, the axes of a picture overflow


class RunFolder:
    """The folder of one training run: the model's files, `train.yaml`, `metrics.jsonl`, `loss.png`, `checkpoints/`.

    Runs of other kinds have other names for `train.yaml` and `metrics.jsonl`: `mark` and `lines`; and `command`, which
    writes them.
    """

    mark, lines, command = ARGUMENTS, METRICS, "hf-recurrent train"

    def __init__(self, path: str):
        self.path = Path(path)
        self._previous: Path | None = None  # where an earlier run lies until this one has saved
        self._lock: io.FileIO | None = None
        self._made: list[Path] = []  # folders that were made for the lock
        self._lost = False  # whether the name has gone to another run while the folder was moved aside
        self._warned: set[Path] = set()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def _by_step(self) -> list[tuple[int, Path]]:
        """The checkpoints by their steps, ascending, whether they are whole or not; not what others have put there."""
        named = [(re.fullmatch(r"step-(\d{8,})", path.name), path) for path in _entries(self.checkpoints)]
        return sorted((int(match[1]), path) for match, path in named if match)

    def lock(self) -> None:
        """Keep other runs out of the folder, until `unlock` or the end of this process, whatever ends it. Where there
        are no locks they are not kept out.

        Raises:
            BlockingIOError: another run is using it.
        """
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self._lock = take(self.path)
        self._made = missing

    def unlock(self) -> None:
        """Let others have the folder; nothing is left of what `lock` has made."""
        if self._lock is not None:
            release(self._lock, self.path)
            self._lock = None
        for folder in self._made:
            with contextlib.suppress(OSError):  # it has been used
                folder.rmdir()
        self._made = []

    def _lock_anew(self) -> None:
        """After the folder, and its lock's file in it, have been moved aside.

        Raises:
            BlockingIOError: in that moment another run has taken the name.
        """
        if self._lock is None:
            return
        (self._previous / LOCK).unlink(missing_ok=True)
        with self._lock:
            self._lock = None
            try:
                self.lock()
            except BlockingIOError as error:
                self._lost = True
                raise BlockingIOError(f"{error}; the earlier run is in {self._previous}") from None

    def check(self, *, overwrite: bool, resume: str | None) -> None:
        """Refuse a folder that cannot be used, before any work is done. Nothing is left behind.

        Args:
            resume: "newest" needs a checkpoint. "auto" does not, where there is nothing or what a killed run has left
                before its first checkpoint.

        Raises:
            FileExistsError: it holds something else, or an earlier run without `overwrite` or `resume`.
            FileNotFoundError: `resume` without a checkpoint.
            OSError: it cannot be written to.
        """
        if self.path.exists() and not self.path.is_dir():
            raise FileExistsError(f"--output-dir {self.path}: a file of that name is in the way")
        if resume and self.newest_checkpoint() is not None:
            pass
        elif resume == "newest":
            raise FileNotFoundError(f"--resume: there is no whole checkpoint in {self.checkpoints}")
        elif _entries(self.path) and not (resume == "auto" and self._barely_begun()):
            if not (self.path / self.mark).is_file():
                raise FileExistsError(
                    f"--output-dir {self.path}: not empty, and not written by {self.command}: choose another"
                )
            if not overwrite:
                go_on = "" if self.newest_checkpoint() is None else "continue it by --resume, "
                raise FileExistsError(
                    f"--output-dir {self.path}: holds an earlier run: {go_on}replace it by --overwrite, or choose "
                    "another folder"
                )
        try:
            with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=existing(self.path)):
                pass
        except OSError as error:
            raise OSError(f"--output-dir {self.path}: cannot be written to: {error.strerror or error}") from None

    def open(self, arguments: str) -> None:
        """Begin to use the folder. An earlier run in it that is to be replaced moves aside.

        Args:
            arguments: the text of `train.yaml`, or of what stands for it.

        Raises:
            BlockingIOError: another run has taken the folder's name, while it had none.
        """
        for left in self.path.parent.glob(f"{glob.escape(self.path.name)}.previous-*"):
            warnings.warn(f"{left} holds an earlier run, which one that was killed was to replace", stacklevel=2)
        if self._barely_begun():
            for leftover in (*_unfinished(self.path), *_entries(self.path)):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        if (self.path / self.mark).is_file():
            self._previous = _free_name(self.path, "previous")
            os.rename(self.path, self._previous)
            self._lock_anew()
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.path / self.mark, arguments)

    def reopen(self, step: int) -> None:
        """Go on with the folder as it was at `step`: clear later metrics and checkpoints (damaged ones, or they would
        be gone on from) and what a killed process left unfinished."""
        for folder in (self.path, self.checkpoints):
            for leftover in _unfinished(folder):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        for number, later in self._by_step():
            if number > step:
                self._remove(later)
        for name in (self.lines, BAD_BATCHES):
            lines = [json.dumps(line) + "\n" for line in self._lines(name) if line["step"] <= step]
            if lines or name == self.lines:
                write_whole(self.path / name, "".join(lines))
            else:
                (self.path / name).unlink(missing_ok=True)

    def _barely_begun(self) -> bool:
        """Whether the folder holds no more than a run that was killed before it had saved anything."""
        names = {path.name for path in _entries(self.path)}
        known = {self.mark, self.lines, BAD_BATCHES, TRACKERS, self.checkpoints.name}
        return names <= known and not _entries(self.checkpoints)

    def kept(self) -> None:
        """Something whole has been saved: what it replaces can go."""
        if self._previous is not None:
            _discard(self._previous)
            self._previous = None

    def close(self) -> None:
        """Unlock the folder. After a failure: where nothing has been saved, put the earlier run back, or leave nothing
        behind. What there is to be learned from it, metrics of steps and bad batches, stays in a folder beside."""
        try:
            if not self._lost:
                self._clear_failure()
        finally:
            self.unlock()

    def _clear_failure(self) -> None:
        if self.newest_checkpoint() is not None or (self.path / WEIGHTS).is_file():
            return
        moved = self._previous is None or self._previous.exists()  # else the folder is still the earlier run's
        if moved and (self.path / self.mark).is_file():
            if any(line["step"] > 0 for name in (self.lines, BAD_BATCHES) for line in self._lines(name)):
                failed = self._set_aside()
                warnings.warn(f"nothing had been saved: the run's metrics are in {failed}", stacklevel=2)
                moved = failed != self.path
            else:
                shutil.rmtree(self.path, ignore_errors=True)
        if self._previous is not None and moved:
            self.unlock()  # the name is free only where no lock's file is in the folder
            try:
                os.rename(self._previous, self.path)
            except OSError as error:  # another run was waiting for it
                reason = error.strerror or error
                warnings.warn(f"{self._previous} holds the earlier run, which cannot go back: {reason}", stacklevel=2)
        self._previous = None

    def _set_aside(self) -> Path:
        """Where the folder has been moved to; itself, where it stays: as a link, the working folder, a mount point, or
        in a folder that cannot be written to."""
        if self.path.is_symlink() or self.path.resolve() == Path.cwd():
            return self.path
        failed = _free_name(self.path, "failed")
        try:
            os.rename(self.path, failed)
        except OSError:
            return self.path
        (failed / LOCK).unlink(missing_ok=True)
        return failed

    # ---- metrics

    def log(self, line: dict, name: str | None = None) -> None:
        """Append a line to `metrics.jsonl`, or to another file."""
        path = self.path / (name or self.lines)
        with saving(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def metrics(self) -> list[dict]:
        """The lines of metrics, each with its step, without what is no number in them."""
        lines = self._lines(self.lines)
        return [{name: value for name, value in line.items() if _is_number(value)} for line in lines]

    def _lines(self, name: str) -> list[dict]:
        """The lines of a file that have a step. A warning, one for each file, tells how many others there are."""
        path = self.path / name
        if not path.is_file():
            return []
        lines, odd = [], 0
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):  # a killed process can leave half a line
                continue
            step = line.get("step") if isinstance(line, dict) else None
            if type(step) is int and 0 <= step < 2**63:  # True is an int, too
                lines.append(line)
            else:
                odd += 1
        if odd and path not in self._warned:
            self._warned.add(path)
            warnings.warn(f"{path}: {counted(odd, 'line')} without a step passed over", stacklevel=3)
        return lines

    # ---- what must be whole

    @contextlib.contextmanager
    def publish(self) -> Iterator[Path]:
        """A temporary folder whose files are moved into the run's folder when all of them have been written.

        Raises:
            OSError: something could not be written; the earlier files are untouched.
        """
        temporary = self.path / f"{UNFINISHED}model"
        with saving(self.path):
            try:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                yield temporary
                sync_tree(temporary)
                for file in sorted(temporary.iterdir()):
                    os.replace(file, self.path / file.name)
                sync(self.path)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def newest_checkpoint(self) -> Path | None:
        """The newest checkpoint that is whole; says which newer ones are not."""
        for _, path in reversed(self._by_step()):
            fault = _fault(path)
            if fault is None:
                return path
            if path not in self._warned:
                self._warned.add(path)
                warnings.warn(f"{path} is damaged ({fault}): passed over", stacklevel=2)
        return None

    @contextlib.contextmanager
    def new_checkpoint(
        self, step: int, keep: int, *, main: bool = True, wait: Callable[[], None] = lambda: None
    ) -> Iterator[Path]:
        """A temporary folder that becomes a checkpoint when it has been written; then all but the newest `keep` go.

        Args:
            main: whether this is the process that creates and names it. All of them may write into it.
            wait: returns when every process has called it.

        Raises:
            OSError: something could not be written; earlier checkpoints are untouched.
        """
        temporary, path = self.checkpoints / f"{UNFINISHED}{step:08d}", self.checkpoint(step)
        with saving(path):
            try:
                if main:
                    shutil.rmtree(temporary, ignore_errors=True)
                    temporary.mkdir(parents=True)
                wait()
                yield temporary
                wait()
                if main:
                    sizes = {file.relative_to(temporary).as_posix(): file.stat().st_size for file in _files(temporary)}
                    text = json.dumps(sizes, indent=2, sort_keys=True) + "\n"
                    (temporary / FILES).write_text(text, encoding="utf-8")
                    sync_tree(temporary)
                    os.rename(temporary, path)
                    sync(self.checkpoints)
            finally:
                if main:
                    shutil.rmtree(temporary, ignore_errors=True)
        if main:
            self.kept()
            for _, old in self._by_step()[:-keep]:
                self._remove(old)
        wait()

    def _remove(self, checkpoint: Path) -> None:
        """Under another name first, so that a kill leaves no checkpoint that lacks files."""
        doomed = checkpoint.with_name(f"{UNFINISHED}old-{checkpoint.name}")
        os.rename(checkpoint, doomed)
        _discard(doomed)


def _entries(folder: Path) -> list[Path]:
    """What a folder holds, but for what a killed process left unfinished."""
    found = folder.iterdir() if folder.is_dir() else ()
    return [path for path in found if not path.name.startswith(UNFINISHED)]


def _is_number(value: object) -> bool:
    """Whether it is one, and no bool, that can be drawn."""
    return type(value) in (int, float) and abs(value) <= LARGEST


def _unfinished(folder: Path) -> list[Path]:
    """What a killed process left unfinished; not the lock, which is this run's."""
    return [path for path in folder.glob(f"{UNFINISHED}*") if path.name != LOCK]


def _discard(folder: Path) -> None:
    """Warns where it cannot: on NFS, files stay that another process has open, which is no reason to end a training."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        warnings.warn(f"{folder} cannot be removed: {error.strerror or error}", stacklevel=2)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path != folder / FILES]


def _fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint: a file that is missing or has another size; None where nothing is. One without
    a list of files is of an older version, which is said when it is read."""
    if not (checkpoint / FILES).is_file():
        return None if (checkpoint / "state.json").is_file() else "it lacks state.json"
    try:
        sizes = json.loads((checkpoint / FILES).read_text(encoding="utf-8"))
    except ValueError as error:
        return f"{FILES}: {error}"
    if not isinstance(sizes, dict):
        return f"{FILES} names no files"
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.is_file():
            return f"it lacks {name}"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes of {size}"
    return None


def _free_name(path: Path, kind: str) -> Path:
    """A name beside `path` that is not taken: PATH.KIND-1 ..."""
    number = 1
    while (candidate := path.with_name(f"{path.name}.{kind}-{number}")).exists():
        number += 1
    return candidate
