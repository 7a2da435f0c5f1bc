"""Several processes train as one does: real process groups on the CPU, by gloo."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from workers import command_line, finish, start, start_group

import hf_recurrent

# Documents of different lengths: rows, and so the parts of each process, have different numbers of targets.
DOCUMENTS = "".join(json.dumps({"text": "x" * (n % 23) + "def y(z):" * (n % 5) + "."}) + "\n" for n in range(240))
TINY = "--hidden-size 16 --num-hidden-layers 2 --sequence-length 32 --tokenizer bytes --cpu --log-steps 1".split()
TINY += "--no-token-cache --validation-share 0.2 --eval-rows 6 --learning-rate 1e-2 --max-grad-norm 0.5".split()


@pytest.fixture
def train(tmp_path):
    """Train by the command line in some processes. Returns the output folder; the logs lie beside it."""
    data = tmp_path / "documents.jsonl"
    data.write_text(DOCUMENTS)

    def run(name, processes, *flags, sources=(), status=0):
        folder = tmp_path / name
        corpus = ["--sources", *sources] if sources else ["--data-files", data]
        argv = ["train", *TINY, *corpus, "--output-dir", folder, *flags]
        log = str(tmp_path / f"{name}.log")
        if processes == 1:
            group = [start(command_line, *argv, log=f"{log}.0")]
        else:
            group = start_group(command_line, *argv, processes=processes, log=log)
        codes = finish(group)
        assert codes == [status] * processes, output(folder)
        return folder

    return run


def output(folder):
    return "\n".join(path.read_text() for path in sorted(folder.parent.glob(f"{folder.name}.log.*")))


def curve(folder, *names):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {name: [line[name] for line in lines if name in line] for name in names}


def assert_same(one, other, tolerance=1e-5):
    names = ("loss", "grad_norm", "validation_loss", "lr", "tokens")
    one_curve, other_curve = curve(one, *names), curve(other, *names)
    for name in names:
        assert len(one_curve[name]) > 1
        assert one_curve[name] == pytest.approx(other_curve[name], rel=tolerance), name
    weights, others = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=tolerance, atol=tolerance)


def test_processes_equal_one(train):
    flags = "--total-batch-size 8 --max-steps 8 --save-steps 3 --keep-checkpoints 9".split()
    one = train("one", 1, *flags)
    two = train("two", 2, *flags)
    four = train("four", 4, *flags, "--batch-size", "1")  # in two passes
    assert_same(two, one)
    assert_same(four, one)
    # A checkpoint of two processes goes on in any number of them; so does one process's.
    for name, processes in (("one", 2), ("two", 1), ("four", 4)):
        folder = one if name == "one" else two
        newer = folder / "checkpoints" / "step-00000006"
        newer.rename(folder.parent / f"{name}-6")
        resumed = train(folder.name, processes, *flags, "--resume")
        assert_same(resumed, four)


def test_several_sources_in_several_processes(train, tmp_path):
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "train.jsonl").write_text(DOCUMENTS.replace("def y", "def q"))
    sources = [f"{{data_files: [{tmp_path}/documents.jsonl], weight: 3}}"]
    sources += [f"{{dataset: {tmp_path}/dataset, streaming: true}}"]
    flags = ["--total-batch-size", "8", "--max-steps", "5", "--health-steps", "5", "--packing", "no"]
    one, two = (train(name, number, *flags, sources=sources) for name, number in (("one", 1), ("two", 2)))
    assert_same(two, one)
    for folder in (one, two):
        [memory] = curve(folder, "memory_16/layer_1")["memory_16/layer_1"]
        assert 0 < memory < 1


def test_what_is_refused_before_the_first_step(train):
    folder = train("refused", 2, "--total-batch-size", "9", "--max-steps", "2", status=2)
    assert "--total-batch-size 9 cannot be shared evenly by 2 processes" in output(folder)
    assert not folder.exists()
    run = train("run", 1, "--batch-size", "2", "--max-steps", "2", "--save-steps", "1")
    train("run", 2, "--batch-size", "2", "--max-steps", "2", "--save-steps", "1", "--resume", status=2)
    assert "was written with 2 rows per optimiser step (batch size x passes x processes), now they are 4" in output(run)


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
    assert "hf-recurrent: error: " in out, out  # the survivor's
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
