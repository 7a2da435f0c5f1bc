"""Interruptions of every kind, after which the run is what it would have been without them, to the last bit."""

import json
import operator
import random
import re
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file
from workers import command_line, finish, start, start_group

from hf_recurrent.tasks.settings import TaskTraining
from hf_recurrent.tasks.train import train_task
from hf_recurrent.training.folder import RunFolder

TEXT = "".join(f"def f{n}(x):\n    return x + {n * n}\n\n\n" for n in range(120))
TINY = "--hidden-size 16 --num-hidden-layers 2 --sequence-length 32 --tokenizer bytes --cpu --log-steps 3".split()
RUN = [*TINY, *"--batch-size 4 --hidden-dropout 0.1 --save-steps 4 --eval-steps 9 --no-token-cache".split()]
CURVE = ("step", "loss", "grad_norm", "lr", "validation_loss")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def flags(text, folder, *more):
    return ["train", *RUN, "--data-files", text, "--output-dir", folder, "--resume", "auto", *more]


def curve(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [[line.get(name) for name in CURVE] for line in lines]


def same_weights(one, other):
    one, other = (load_file(folder / "model.safetensors") for folder in (one, other))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def kill_at_random(processes, folder, generator):
    """Let them train for a moment, or begin to prepare, then kill -9 all of them."""
    begun, metrics = time.monotonic(), folder / "metrics.jsonl"

    def changed():
        return metrics.stat().st_mtime_ns if metrics.exists() else 0

    before = changed()
    if generator.random() < 0.7:
        while changed() == before and all(map(operator.methodcaller("is_alive"), processes)):
            assert time.monotonic() - begun < 60
            time.sleep(0.002)
    time.sleep(generator.random() * 0.3)
    for process in processes:
        process.kill()
    finish(processes)


@pytest.mark.parametrize("processes", [1, 2])
def test_kill_9_at_any_moment(tmp_path, text, processes):
    steps = ["--max-steps", "90", "--batch-size", str(4 // processes)]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    generator = random.Random(processes)

    def begin(folder, log):
        if processes == 1:
            return [start(command_line, *flags(text, folder, *steps), log=log)]
        return start_group(command_line, *flags(text, folder, *steps), processes=processes, log=log)

    assert finish(begin(whole, tmp_path / "whole.log")) == [0] * processes
    for attempt in range(5 if processes == 1 else 3):
        kill_at_random(begin(killed, tmp_path / f"{attempt}.log"), killed, generator)
    log = tmp_path / "last.log"
    assert finish(begin(killed, log)) == [0] * processes, [path.read_text() for path in tmp_path.glob("last.log*")]
    assert curve(killed) == curve(whole)
    assert same_weights(killed, whole)


def test_sigterm_saves_and_exits_0(tmp_path, text):
    folder = tmp_path / "run"
    process = start(command_line, *flags(text, folder, "--max-steps", "1000000"), log=tmp_path / "log")
    while process.is_alive() and not ((folder / "metrics.jsonl").exists() and len(curve(folder)) > 2):
        time.sleep(0.01)
    process.terminate()
    assert finish([process]) == [0], (tmp_path / "log").read_text()
    newest = RunFolder(str(folder)).newest_checkpoint()
    saved = json.loads((newest / "state.json").read_text())
    assert f"stopped after step {saved['state']['step']}" in (tmp_path / "log").read_text()
    assert saved["versions"]["torch"] == torch.__version__
    assert (newest / "train.yaml").is_file() and (newest / "random_states_0.pkl").is_file()


# ---- checkpoints that are not whole ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A run's folder with two checkpoints."""
    run = RunFolder(str(tmp_path / "run"))
    run.open("seed: 1\n")
    for step in (2, 4):
        save(run, step, keep=3)
    return run


def save(run, step, keep):
    with run.new_checkpoint(step, keep) as temporary:
        for name in ("state.json", "optimizer.bin"):
            (temporary / name).write_text(f"{name} {step}")


@pytest.mark.parametrize("damage", ["cut", "gone", "list"])
def test_a_damaged_checkpoint_is_passed_over(folder, damage):
    newest = folder.newest_checkpoint()
    assert newest == folder.checkpoint(4)
    if damage == "cut":
        (newest / "optimizer.bin").write_text("opt")
    elif damage == "gone":
        (newest / "optimizer.bin").unlink()
    else:
        (newest / "files.json").write_text("{")
    with pytest.warns(UserWarning, match=r"step-00000004 is damaged \(.*\): passed over"):
        assert folder.newest_checkpoint() == folder.checkpoint(2)
    folder.reopen(2)
    assert not newest.exists()
    save(folder, 4, keep=3)
    assert folder.newest_checkpoint() == folder.checkpoint(4)


PROGRESS = {"step": 2, "seconds": 1.0, "curve": [], "losses": []}


@pytest.mark.parametrize(
    "damage, message",
    [
        ({"settings": [1]}, "cannot convert dictionary update sequence"),
        ({"progress": PROGRESS | {"step": "x"}}, "its state.json has step 'x'"),
        ({"progress": PROGRESS | {"seconds": "x"}}, "its state.json has seconds 'x'"),
        ({"progress": PROGRESS | {"curve": [1]}}, "its state.json has curve [1]"),
        ({"progress": PROGRESS | {"losses": None}}, "its state.json has losses None"),
    ],
)
def test_a_damaged_checkpoint_of_a_task_changes_nothing(tmp_path, damage, message):
    sizes, config = {"length": 8, "data_tokens": 2, "vocab_size": 8}, {"hidden_size": 8, "num_hidden_layers": 1}
    training = TaskTraining("selective_copying", sizes, "mingru", config, 4, 2, eval_examples=4)
    train_task(training, tmp_path / "run", save_steps=2)
    (tmp_path / "run" / "task.json").unlink()
    checkpoint = RunFolder(str(tmp_path / "run")).newest_checkpoint()
    state = checkpoint / "state.json"
    (checkpoint / "files.json").unlink()
    state.write_text(json.dumps(json.loads(state.read_text()) | damage))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=re.escape(f"--resume: {checkpoint} cannot be read: {message}")):
        train_task(training, tmp_path / "run", resume="newest")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_kill_while_old_checkpoints_go(folder, monkeypatch):
    remove = shutil.rmtree

    def killed(path, ignore_errors=False):
        if "old" not in path.name:
            return remove(path, ignore_errors=ignore_errors)
        (path / "optimizer.bin").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            save(folder, 6, keep=1)
    assert folder.newest_checkpoint() == folder.checkpoint(6)
    folder.reopen(6)
    assert {path.name for path in folder.checkpoints.iterdir()} == {"step-00000004", "step-00000006"}


def test_auto_takes_what_a_killed_run_left_and_nothing_else(tmp_path):
    path = tmp_path / "run"
    run = RunFolder(str(path))
    run.check(overwrite=False, resume="auto")  # nothing there
    path.mkdir()
    (path / ".unfinished-abc").mkdir()
    run.check(overwrite=False, resume="auto")
    run.check(overwrite=False, resume=None)
    run.open("seed: 1\n")
    (path / "metrics.jsonl").write_text('{"step": 0}\n')
    run.check(overwrite=False, resume="auto")
    with pytest.raises(FileExistsError, match="holds an earlier run"):
        run.check(overwrite=False, resume=None)
    with pytest.raises(FileNotFoundError, match="there is no whole checkpoint in"):
        run.check(overwrite=False, resume="newest")
    (path / "model.safetensors").write_text("weights")
    with pytest.raises(FileExistsError, match="holds an earlier run: replace it by --overwrite"):
        run.check(overwrite=False, resume="auto")
    (path / "train.yaml").unlink()
    with pytest.raises(FileExistsError, match="not written by hf-recurrent train"):
        run.check(overwrite=False, resume="auto")
