"""One run at a time in an output folder."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import TINY, start_run
from workers import command_line, finish, start, start_group

import hf_recurrent
from hf_recurrent.tasks.settings import TaskTraining
from hf_recurrent.tasks.train import train_task
from hf_recurrent.training import lock
from hf_recurrent.training.folder import ARGUMENTS, RunFolder
from hf_recurrent.training.lock import LOCK

HERE = f"is in use by another run (process {os.getpid()} on host {socket.gethostname()})"


def refused(folder):
    with pytest.raises(BlockingIOError) as error:
        RunFolder(str(folder.path)).lock()
    assert str(error.value) == f"--output-dir {folder.path}: {HERE}"
    return True


def free(folder):
    other = RunFolder(str(folder.path))
    other.lock()
    other.unlock()
    return True


@pytest.fixture
def folder(tmp_path):
    """A folder that is locked."""
    folder = RunFolder(str(tmp_path / "deep" / "run"))
    folder.lock()
    yield folder
    folder.unlock()


def test_the_second_is_refused_and_nothing_is_left(folder, tmp_path):
    assert refused(folder)
    folder.check(overwrite=False, resume=None)  # the lock's file is nobody's run
    folder.unlock()
    assert not any(tmp_path.iterdir())
    assert free(folder)


def test_the_second_waits_for_the_name_of_the_first(folder, monkeypatch):
    """The name is written just after the lock is taken."""
    path = folder.path / LOCK
    name = path.read_bytes()
    path.write_bytes(b"")
    monkeypatch.setattr(lock.time, "sleep", lambda _: path.write_bytes(name))
    assert refused(folder)
    path.write_bytes(b"")  # on a full disk
    monkeypatch.setattr(lock.time, "sleep", lambda _: None)
    with pytest.raises(BlockingIOError, match="is in use by another run$"):
        RunFolder(str(folder.path)).lock()


def test_a_run_clears_up_around_its_lock(folder):
    (folder.path / ".unfinished-abc").mkdir()
    folder.open("seed: 1\n")
    assert refused(folder)
    with folder.new_checkpoint(5, 2) as temporary:
        (temporary / "state.json").write_text("5")
    (folder.path / ".unfinished-abc").mkdir()
    folder.reopen(5)
    assert refused(folder) and [path.name for path in folder.path.glob(".unfinished-*")] == [LOCK]
    folder.close()
    assert free(folder) and {path.name for path in folder.path.iterdir()} == {ARGUMENTS, "metrics.jsonl", "checkpoints"}


def test_the_folder_of_an_earlier_run_moves_and_the_name_stays_locked(folder):
    folder.open("seed: 1\n")
    (folder.path / "model.safetensors").write_text("first")
    folder.close()
    before = {path.name for path in folder.path.iterdir()}

    new = RunFolder(str(folder.path))
    new.lock()
    new.open("seed: 2\n")
    [aside] = [path for path in folder.path.parent.iterdir() if path != folder.path]
    assert refused(new) and {path.name for path in aside.iterdir()} == before
    new.close()  # it has saved nothing
    assert free(new) and {path.name for path in folder.path.iterdir()} == before

    new.lock()
    new.open("seed: 2\n")
    new.log({"step": 3})
    with pytest.warns(UserWarning, match="the run's metrics are in .*run.failed-1"):
        new.close()
    assert not list(folder.path.parent.rglob(LOCK))


def test_another_takes_the_name_while_nothing_has_it(folder, monkeypatch):
    folder.open("seed: 1\n")
    (folder.path / "model.safetensors").write_text("first")
    folder.close()
    other, rename = RunFolder(str(folder.path)), os.rename

    def and_then_the_other(source, target):
        rename(source, target)
        monkeypatch.setattr(os, "rename", rename)
        other.lock()
        other.open("seed: 3\n")

    folder.lock()
    monkeypatch.setattr(os, "rename", and_then_the_other)
    with pytest.warns(UserWarning, match="holds an earlier run"), pytest.raises(BlockingIOError) as error:
        folder.open("seed: 2\n")
    previous = folder.path.with_name("run.previous-1")
    assert str(error.value) == f"--output-dir {folder.path}: {HERE}; the earlier run is in {previous}"
    folder.close()
    assert (folder.path / ARGUMENTS).read_text() == "seed: 3\n" and refused(other)
    assert {path.name for path in previous.iterdir()} == {ARGUMENTS, "model.safetensors"}
    other.close()


def test_another_takes_the_name_before_the_earlier_run_is_back(folder, monkeypatch):
    folder.open("seed: 1\n")
    (folder.path / "model.safetensors").write_text("first")
    folder.close()
    new, other = RunFolder(str(folder.path)), RunFolder(str(folder.path))
    new.lock()
    new.open("seed: 2\n")
    unlock = new.unlock
    monkeypatch.setattr(new, "unlock", lambda: (unlock(), other.lock()) if other._lock is None else None)
    with pytest.warns(UserWarning, match="run.previous-1 holds the earlier run, which cannot go back: Directory not"):
        new.close()
    assert refused(other)
    other.unlock()


@pytest.mark.parametrize("missing", ["locks", "fcntl"])
def test_where_there_are_no_locks_there_is_none(tmp_path, monkeypatch, missing):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    if missing == "locks":
        monkeypatch.setattr(lock.fcntl, "flock", flock)
    else:
        monkeypatch.setattr(lock, "fcntl", None)
    folders = [RunFolder(str(tmp_path / "run")) for _ in range(2)]
    for folder in folders:
        folder.lock()
    assert not list(tmp_path.rglob(LOCK))
    folders[0].open("seed: 1\n")
    folders[0].close()
    assert not any(tmp_path.iterdir())


HOLD_AND_FORK = """
import os, sys, time
from hf_recurrent.training.folder import RunFolder
folder = RunFolder(sys.argv[1])
folder.lock()
child = os.fork()
if child == 0:
    folder.unlock()  # which is not its own
    open(sys.argv[1] + ".forked", "w").close()
else:
    print(child, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_killed_process_keeps_nothing_locked_even_by_its_children(tmp_path):
    path = tmp_path / "run"
    env = os.environ | {"PYTHONPATH": str(Path(hf_recurrent.__file__).parents[1])}
    command = [sys.executable, "-c", HOLD_AND_FORK, str(path)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        while not path.with_name("run.forked").exists():
            time.sleep(0.01)
        with pytest.raises(BlockingIOError, match=f"process {process.pid} on host"):
            RunFolder(str(path)).lock()
        process.kill()
        process.wait()
        assert (path / LOCK).is_file() and free(RunFolder(str(path))) and not (path / LOCK).exists()
        os.kill(child, signal.SIGKILL)  # it was there all the time


# ---- whole runs


@pytest.mark.parametrize("flags", [[], ["--overwrite"], ["--resume", "auto"]])
def test_two_runs_begin_together(tmp_path, train_processes, flags):
    """One of them trains as if it were alone, and the other one has changed nothing."""
    if flags == ["--overwrite"]:
        train_processes("run", 1, "--max-steps", "2", "--seed", "7")
    flags = ["--max-steps", "1000000", "--save-steps", "10", *flags]
    folder, [first] = start_run(tmp_path, "run", 1, *flags)
    argv = ["train", *TINY, "--data-files", tmp_path / "documents.jsonl", "--output-dir", folder, *flags, "--seed", 1]
    runs = [first, start(command_line, *argv, log=tmp_path / "second.log")]
    begun = time.monotonic()
    while all(run.is_alive() for run in runs) and time.monotonic() - begun < 120:
        time.sleep(0.01)
    won = int(runs[1].is_alive())
    while runs[won].is_alive() and not list((folder / "checkpoints").glob("step-*0")):
        time.sleep(0.01)
    runs[won].terminate()
    codes = finish(runs)
    logs = [(tmp_path / name).read_text() for name in ("run.log.0", "second.log")]
    assert codes[won] == 0 and codes[1 - won] == 2, logs
    holder = f"process {runs[won].pid} on host {socket.gethostname()}"
    message = f"hf-recurrent: error: --output-dir {folder}: is in use by another run ({holder})"
    assert logs[1 - won].splitlines()[-1] == message
    assert f"seed: {won}\n" in (folder / ARGUMENTS).read_text()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 10
    assert not list(tmp_path.rglob(".unfinished*")) and not list(tmp_path.glob("run.*-1"))


def test_one_process_locks_for_all(folder, tmp_path, train_processes):
    argv = [*TINY, "--data-files", tmp_path / "documents.jsonl", "--max-steps", 1, "--output-dir", folder.path]
    (tmp_path / "documents.jsonl").write_text('{"text": "def y(z): ..."}\n' * 99)
    group = start_group(command_line, "train", *argv, processes=2, log=tmp_path / "log")
    assert finish(group) == [2, 2]
    first, second = ((tmp_path / f"log.{rank}").read_text().splitlines()[-1] for rank in range(2))
    assert first == f"hf-recurrent: error: --output-dir {folder.path}: {HERE}"
    assert second == f"hf-recurrent: error: process 0 has refused: --output-dir {folder.path}: {HERE}"
    assert [path.name for path in folder.path.iterdir()] == [LOCK]
    both = train_processes("both", 2, "--max-steps", 1)
    assert (both / "model.safetensors").is_file() and not (both / LOCK).exists()


def test_a_task_takes_the_lock(folder):
    training = TaskTraining(
        task="selective_copying",
        sizes={"length": 8, "data_tokens": 2, "vocab_size": 8},
        config={"hidden_size": 8, "num_hidden_layers": 1},
        max_steps=1,
        eval_examples=4,
        batch_size=4,
    )
    with pytest.raises(BlockingIOError, match="is in use by another run"):
        train_task(training, folder.path)
    folder.unlock()
    train_task(training, folder.path)
    assert free(folder)
    with pytest.raises(FileExistsError, match="holds an earlier run"):
        train_task(training, folder.path)
    assert free(folder)
