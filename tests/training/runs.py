"""A tiny run of the command line, in one process or several, and what to compare of two of them."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from workers import command_line, finish, start, start_group

# Documents of different lengths: rows, and so the parts of each process, have different numbers of targets.
DOCUMENTS = "".join(json.dumps({"text": "x" * (n % 23) + "def y(z):" * (n % 5) + "."}) + "\n" for n in range(240))
TINY = "--hidden-size 16 --num-hidden-layers 2 --sequence-length 32 --tokenizer bytes --cpu --log-steps 1".split()
TINY += "--no-token-cache --validation-share 0.2 --eval-rows 6 --learning-rate 1e-2 --max-grad-norm 0.5".split()


def start_run(directory, name, processes, *flags, sources=()):
    """Begin to train by the command line in some processes, on `sources` or else on DOCUMENTS. Returns the output
    folder, beside which the logs lie, and the processes."""
    data = directory / "documents.jsonl"
    data.write_text(DOCUMENTS)
    folder = directory / name
    corpus = ["--sources", *sources] if sources else ["--data-files", data]
    argv = ["train", *TINY, *corpus, "--output-dir", folder, *flags]
    log = str(directory / f"{name}.log")
    if processes == 1:
        return folder, [start(command_line, *argv, log=f"{log}.0")]
    return folder, start_group(command_line, *argv, processes=processes, log=log)


def run_processes(directory, name, processes, *flags, sources=(), status=0):
    """Train by the command line in some processes, to the end. Returns the output folder."""
    folder, group = start_run(directory, name, processes, *flags, sources=sources)
    assert finish(group) == [status] * processes, output(folder)
    return folder


def forget_the_end(folder):
    """Remove the newest checkpoint, so that a resume goes on from the one before. Returns the folder."""
    checkpoints = sorted((folder / "checkpoints").glob("step-*"))
    assert len(checkpoints) > 1
    shutil.rmtree(checkpoints[-1])
    return folder


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
