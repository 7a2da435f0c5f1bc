import errno
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from hf_recurrent.training.folder import ARGUMENTS, RunFolder, write_whole


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def run(tmp_path):
    """A folder with a model and a checkpoint in it."""
    folder = RunFolder(str(tmp_path / "run"))
    folder.open("seed: 1\n")
    save(folder, "first")
    checkpoint(folder, 5)
    return folder


def save(folder, content):
    with folder.publish() as temporary:
        (temporary / "config.json").write_text(content)
        (temporary / "model.safetensors").write_text(content)


def checkpoint(folder, step, keep=2):
    with folder.new_checkpoint(step, keep) as temporary:
        (temporary / "state.json").write_text(str(step))


def test_a_failing_save_leaves_the_earlier_files(run):
    before = tree(run.path)
    with pytest.raises(
        OSError, match="cannot save .*run: no space .*MiB are free on that disk.; what was saved before is untouched"
    ):
        with run.publish() as temporary:
            (temporary / "config.json").write_text("second")
            raise RuntimeError("no space\nat line 3")
    assert tree(run.path) == before
    (run.path / "x.txt").mkdir()  # in the way
    with pytest.raises(OSError, match="cannot save .*x.txt"):
        write_whole(run.path / "x.txt", "content")
    (run.path / "x.txt").rmdir()
    assert tree(run.path) == before


def test_a_full_disk(run):
    (run.path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="cannot save .*No space left on device"):
        with run.publish() as temporary:
            shutil.copyfile(run.path / ARGUMENTS, temporary / "config.json")
            os.write(os.open(run.path / "full", os.O_WRONLY), b"weights")
    assert (run.path / "config.json").read_text() == "first"
    assert not list(run.path.glob(".unfinished*"))


def test_copies_of_checkpoints_are_left_alone(run):
    for name in ("step-best", "step-00000009.bak", "best"):
        shutil.copytree(run.checkpoint(5), run.checkpoints / name)
    assert run.newest_checkpoint() == run.checkpoint(5)
    checkpoint(run, 7, keep=1)
    run.reopen(6)
    assert {path.name for path in run.checkpoints.iterdir()} == {"step-best", "step-00000009.bak", "best"}
    assert run.newest_checkpoint() is None


def test_checkpoints_are_rotated(run):
    for step in (10, 15, 20):
        checkpoint(run, step)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000015", "step-00000020"]
    assert run.newest_checkpoint() == run.checkpoint(20)


def test_what_cannot_be_removed_ends_no_training(run, tmp_path, monkeypatch):
    """As on NFS, where files stay that another process has open."""
    remove = shutil.rmtree

    def busy(path, *args, **options):
        if Path(path).name.startswith((".unfinished-old", "run.previous")):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        remove(path, *args, **options)

    monkeypatch.setattr(shutil, "rmtree", busy)
    with pytest.warns(UserWarning, match="old-step-00000005 cannot be removed: Directory not empty"):
        checkpoint(run, 10, keep=1)
    assert run.newest_checkpoint() == run.checkpoint(10) and not run.checkpoint(5).exists()
    new = RunFolder(str(run.path))
    new.open("seed: 2\n")
    with pytest.warns(UserWarning, match="run.previous-1 cannot be removed"):
        checkpoint(new, 3)
    new.close()
    assert new.newest_checkpoint() == new.checkpoint(3)


@pytest.mark.parametrize("failing", ["first", "other"])
def test_one_of_two_processes_fails(run, failing):
    """Its barrier breaks, as it does where a process has gone: the other one ends too, and nothing is left."""
    barrier, raised = threading.Barrier(2, timeout=30), {}

    def process(name):
        try:
            with run.new_checkpoint(10, 1, main=name == "first", wait=barrier.wait) as temporary:
                (temporary / name).write_text(name)
                if name == failing:
                    raise RuntimeError("no space")
        except OSError as error:
            raised[name] = str(error)
            barrier.abort()

    threads = [threading.Thread(target=process, args=[name]) for name in ("first", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised.keys() == {"first", "other"} and "step-00000010: no space" in raised[failing]
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000005"]


def test_an_interrupted_save_leaves_nothing(run):
    with pytest.raises(KeyboardInterrupt):
        with run.new_checkpoint(10, 1) as temporary:
            (temporary / "state.json").write_text("10")
            raise KeyboardInterrupt
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000005"]


@pytest.mark.parametrize("text", ["[]", "null", "3", "{"])
def test_a_damaged_list_of_files(run, text):
    checkpoint(run, 10)
    (run.checkpoint(10) / "files.json").write_text(text)
    with pytest.warns(UserWarning, match="step-00000010 is damaged .files.json"):
        assert run.newest_checkpoint() == run.checkpoint(5)


def test_an_unfinished_checkpoint_does_not_count(run):
    (run.checkpoints / ".unfinished-00000009").mkdir()
    (run.path / ".unfinished-model").mkdir()
    assert run.newest_checkpoint() == run.checkpoint(5)
    run.reopen(5)
    assert not list(run.path.rglob(".unfinished*"))


def test_going_on_forgets_later_metrics(run):
    for step in (4, 5, 6):
        run.log({"step": step})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')  # killed while writing
    run.reopen(5)
    assert run.metrics() == [{"step": 4}, {"step": 5}]
    assert (run.path / "metrics.jsonl").read_text().splitlines() == [json.dumps({"step": s}) for s in (4, 5)]


def test_going_on_forgets_lines_without_a_step(run):
    for name in ("metrics.jsonl", "bad_batches.jsonl"):
        (run.path / name).write_text('5\n{"loss": 1}\n{"step": 4, "fault": "x"}\n{"step": "5"}\n{"step": 6}\n')
    with pytest.warns(UserWarning) as warned:
        run.reopen(5)
    names = ("metrics.jsonl", "bad_batches.jsonl")
    expected = [f"{run.path / name}: 3 lines without a step passed over" for name in names]
    assert [str(one.message) for one in warned] == expected
    assert all((run.path / name).read_text() == '{"step": 4, "fault": "x"}\n' for name in names)


def test_folders_that_are_refused(run, tmp_path):
    with pytest.raises(FileExistsError, match="holds an earlier run: continue it by --resume, replace it by --over"):
        run.check(overwrite=False, resume=None)
    run.check(overwrite=True, resume=None)
    run.check(overwrite=False, resume="newest")
    other = tmp_path / "other"
    other.mkdir()
    RunFolder(str(other)).check(overwrite=False, resume=None)  # empty
    with pytest.raises(FileNotFoundError, match="--resume: there is no whole checkpoint in .*other"):
        RunFolder(str(other)).check(overwrite=False, resume="newest")
    (other / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="other: not empty, and not written by hf-recurrent train"):
        RunFolder(str(other)).check(overwrite=True, resume=None)
    with pytest.raises(FileExistsError, match="thesis.txt: a file of that name is in the way"):
        RunFolder(str(other / "thesis.txt")).check(overwrite=True, resume=None)
    with pytest.raises(OSError, match="thesis.txt/deeper: cannot be written to: Not a directory"):
        RunFolder(str(other / "thesis.txt" / "deeper")).check(overwrite=False, resume=None)
    assert [path.name for path in other.iterdir()] == ["thesis.txt"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc, whose folders nobody can write to")
def test_a_read_only_folder():
    with pytest.raises(OSError, match="--output-dir /proc/self/run: cannot be written to"):
        RunFolder("/proc/self/run").check(overwrite=False, resume=None)


def test_checking_leaves_nothing_behind(tmp_path):
    RunFolder(str(tmp_path / "a" / "b")).check(overwrite=False, resume=None)
    assert not any(tmp_path.iterdir())


def test_what_is_replaced_stays_until_something_is_saved(run, tmp_path):
    before = tree(run.path)
    new = RunFolder(str(run.path))
    new.open("seed: 2\n")
    new.log({"step": 0})
    [aside] = [path for path in tmp_path.iterdir() if path != run.path]
    assert aside.name == "run.previous-1" and tree(aside) == before
    new.close()  # failed before it saved anything
    assert tree(run.path) == before and list(tmp_path.iterdir()) == [run.path]

    new.open("seed: 2\n")
    save(new, "second")
    new.kept()
    new.close()
    assert (run.path / "config.json").read_text() == "second" and list(tmp_path.iterdir()) == [run.path]
    assert not run.checkpoints.exists()


def test_what_a_killed_run_was_to_replace_is_named(run):
    killed = RunFolder(str(run.path))
    killed.open("seed: 2\n")
    with pytest.warns(UserWarning, match="run.previous-1 holds an earlier run, which one that"):
        RunFolder(str(run.path)).open("seed: 3\n")


def test_a_run_that_saved_nothing_leaves_its_metrics_beside(run, tmp_path):
    before = tree(run.path)
    for number in (1, 2):
        new = RunFolder(str(run.path))
        new.open("seed: 2\n")
        new.log({"step": 3})
        with pytest.warns(UserWarning, match=f"nothing had been saved: the run's metrics are in .*run.failed-{number}"):
            new.close()
        failed = RunFolder(str(tmp_path / f"run.failed-{number}"))
        assert failed.metrics() == [{"step": 3}] and (failed.path / ARGUMENTS).read_text() == "seed: 2\n"
    assert tree(run.path) == before


def test_a_folder_that_cannot_be_moved_stays(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("../link", "."):
        folder = RunFolder(name)
        folder.open("seed: 1\n")
        folder.log({"step": 3})
        with pytest.warns(UserWarning, match=f"the run's metrics are in {name}$"):
            folder.close()
        assert RunFolder(name).metrics() == [{"step": 3}]
    assert {path.name for path in tmp_path.iterdir()} == {"real", "link", "here"}


def test_a_run_that_saved_nothing_leaves_nothing(tmp_path):
    folder = RunFolder(str(tmp_path / "run"))
    folder.open("seed: 1\n")
    folder.log({"step": 0})
    folder.close()
    assert not any(tmp_path.iterdir())
