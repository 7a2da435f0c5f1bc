"""Several processes train as one does: real process groups on the CPU, by gloo."""

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import DOCUMENTS, TINY, assert_same, curve, forget_the_end, output
from workers import command_line, finish, start_group

import hf_recurrent
from hf_recurrent.training import agreement


def test_processes_equal_one(train_processes):
    flags = "--total-batch-size 8 --max-steps 8 --save-steps 3 --keep-checkpoints 9".split()
    one = train_processes("one", 1, *flags)
    two = train_processes("two", 2, *flags)
    two_passes = ["--batch-size", "1", "--gradient-checkpointing"]
    four = train_processes("four", 4, *flags, *two_passes)
    assert_same(two, one)
    assert_same(four, one)
    # A checkpoint of two processes goes on in any number of them; so does one process's.
    for name, processes in (("one", 2), ("two", 1), ("four", 4)):
        folder = one if name == "one" else two
        newer = folder / "checkpoints" / "step-00000006"
        newer.rename(folder.parent / f"{name}-6")
        forget_the_end(folder)
        resumed = train_processes(folder.name, processes, *flags, "--resume")
        assert_same(resumed, four)


def test_several_sources_in_several_processes(train_processes, tmp_path):
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "train.jsonl").write_text(DOCUMENTS.replace("def y", "def q"))
    sources = [f"{{data_files: [{tmp_path}/documents.jsonl], weight: 3}}"]
    sources += [f"{{dataset: {tmp_path}/dataset, streaming: true}}"]
    flags = ["--total-batch-size", "8", "--max-steps", "5", "--health-steps", "5", "--packing", "no"]
    one, two = (train_processes(name, number, *flags, sources=sources) for name, number in (("one", 1), ("two", 2)))
    assert_same(two, one)
    for folder in (one, two):
        [memory] = curve(folder, "memory_16/layer_1")["memory_16/layer_1"]
        assert 0 < memory < 1


def test_rows_over_several_processes(train_processes):
    """Context parallelism: two replicas of two processes, one of four, and one whose processes have shards."""
    flags = "--total-batch-size 8 --max-steps 6 --save-steps 3 --keep-checkpoints 9 --health-steps 3".split()
    one = train_processes("one", 1, *flags)
    four = train_processes("four", 4, *flags, "--context-parallel", "2", "--batch-size", "1")
    assert "context     each row over 2 processes" in output(four)
    assert_same(four, one)
    sharded = ["--context-parallel", "4", "--fsdp", "--gradient-checkpointing"]
    assert_same(train_processes("sharded", 4, *flags, *sharded), one)
    # The rows of a step are the same, so that a run may go on over other processes.
    resumed = train_processes(forget_the_end(four).name, 2, *flags, "--resume", "--context-parallel", "2")
    assert_same(resumed, one)


def test_padded_rows_over_several_processes(train_processes):
    flags = "--total-batch-size 8 --max-steps 4 --health-steps 2 --packing no --model-type longhorn".split()
    flags += ["--sequence-length", "31"]  # parts of 16 and 15, of which some are padding alone
    one = train_processes("one", 1, *flags)
    four = train_processes("four", 4, *flags, "--context-parallel", "2")
    assert_same(four, one)
    [first, second] = curve(four, "memory_1")["memory_1"]
    assert 0 < first < 1 and 0 < second < 1


def test_what_is_refused_before_the_first_step(train_processes):
    folder = train_processes("refused", 2, "--total-batch-size", "9", "--max-steps", "2", status=2)
    assert "--total-batch-size 9 cannot be shared evenly by 2 processes" in output(folder)
    assert not folder.exists()
    folder = train_processes("grouped", 2, "--context-parallel", "3", status=2)
    assert "--context-parallel 3 must divide the number of processes, got 2" in output(folder)
    overrides = ["--config-overrides", "learned_initial_state=true"]
    folder = train_processes("learned", 2, "--context-parallel", "2", *overrides, "--max-steps", "1", status=2)
    assert "needs learned_initial_state=False, got True" in output(folder)
    run = train_processes("run", 1, "--batch-size", "2", "--max-steps", "2", "--save-steps", "1")
    train_processes("run", 2, "--batch-size", "2", "--max-steps", "2", "--save-steps", "1", "--resume", status=2)
    assert "was written with 2 rows per optimiser step (batch size x passes x processes), now they are 4" in output(run)


def of_rank(*argvs):
    """Each process's own command line, with no long wait for what is not there."""
    agreement.SHARED_WITHIN = 1
    command_line(*argvs[int(os.environ["RANK"])])


def refused(tmp_path, message, *argvs):
    """Both processes end with the same line, and leave nothing."""

    def kept():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and ".log" not in path.name}

    before = kept()
    group = start_group(of_rank, *argvs, processes=2, log=tmp_path / "run.log")
    assert finish(group) == [2, 2], output(tmp_path / "run")
    assert all(message in (tmp_path / f"run.log.{rank}").read_text() for rank in range(2)), output(tmp_path / "run")
    assert kept() == before


def test_processes_that_were_told_different_things(tmp_path, train_processes):
    small = ["--max-steps", "2", "--save-steps", "2"]
    for name, seed in (("run", 0), ("base", 1)):
        train_processes(name, 1, *small, "--batch-size", "16", "--seed", str(seed))
    shutil.copytree(tmp_path / "run", tmp_path / "mount" / "run")
    (tmp_path / "other.jsonl").write_text(DOCUMENTS.replace("def", "fed"))
    common = ["train", *TINY, "--max-steps", "4", "--save-steps", "2", "--total-batch-size", "16"]
    data, other = ["--data-files", tmp_path / "documents.jsonl"], ["--data-files", tmp_path / "other.jsonl"]
    run, mount, new = (["--output-dir", tmp_path / name] for name in ("run", "mount/run", "new"))
    rate = ["--learning-rate", "1e-3"]
    check = functools.partial(refused, tmp_path)
    check("the processes differ: --learning-rate is 0.01 in process 0, 0.001 in", [*common, *data, *new],
          [*common, *data, *new, *rate])  # fmt: skip
    check("its tokens are not the same in all", [*common, *data, *new], [*common, *other, *new])
    # An earlier run on both machines, to be replaced or gone on from.
    for more in (["--overwrite"], ["--resume"]):
        check("does not see what process 0 has written there", *([*common, *data, *to, *more] for to in (run, mount)))
    check("run: holds an earlier run: continue it", [*common, *data, *new], [*common, *data, *run])
    models = [*TINY[4:], "--max-steps", "2", *data, *new, "--model"]
    check("or the weights of --model are not the same", *(["train", *models, tmp_path / m] for m in ("run", "base")))
    for name, text in (("held-out.jsonl", DOCUMENTS), ("held-out-2.jsonl", DOCUMENTS.replace("def", "fed"))):
        (tmp_path / name).write_text(text)
    validation = [*TINY[:-6], "--max-steps", "2", *data, *new, "--validation-files"]
    names = (tmp_path / "held-out.jsonl", tmp_path / "held-out-2.jsonl")
    check("the validation text or the weights", *(["train", *validation, name] for name in names))


def launch(tmp_path, *flags):
    (tmp_path / "documents.jsonl").write_text(DOCUMENTS)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command += ["-m", "hf_recurrent.training", *TINY, "--data-files", "documents.jsonl", "--output-dir", "run", *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(hf_recurrent.__file__).parents[1])}
    return subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)


def children(pid):
    """The processes under a launcher's, by Linux's own list of them."""
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text().split()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc to find the launcher's workers")
def test_a_worker_that_dies_under_accelerate_launch(tmp_path):
    with launch(tmp_path, "--max-steps", "1000000", "--eval-steps", "0", "--save-steps", "2") as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) > 4):
            time.sleep(0.05)
        assert process.poll() is None, process.stdout.read()
        os.kill(children(process.pid)[1], signal.SIGKILL)
        out, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "SIGKILL" in out, out  # the launcher's own words
    assert "hf-recurrent: error: another process of this run has ended" in out, out  # the survivor's
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
