"""Real training, of a model small enough for a second."""

import dataclasses
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from runs import forget_the_end
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_recurrent  # noqa: F401  (registers the families)
from hf_recurrent import cli
from hf_recurrent.modeling.model import IGNORED
from hf_recurrent.training import TrainArguments, arguments, distributed
from hf_recurrent.training.health import health
from hf_recurrent.training.loop import Run
from hf_recurrent.training.loss_policy import LossPolicy
from hf_recurrent.training.model import families
from hf_recurrent.training.optimizer import create_optimizer, learning_rate_ratio
from hf_recurrent.training.signals import interrupts
from hf_recurrent.training.tokenizer import train_bpe

TINY = "--hidden-size 16 --num-hidden-layers 2 --sequence-length 32 --batch-size 4 --log-steps 1 --eval-rows 4".split()
TEXT = "".join(f"def f{n}(x):\n    return x + {n * n}\n\n\n" for n in range(120))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture
def train(text, tmp_path):
    """Train by the command line. Returns the exit status, the output folder, and its metrics."""

    def run(*flags, name="run", status=0):
        folder = tmp_path / name
        argv = ["train", *TINY, "--output-dir", str(folder)]
        if not {"--data-files", "--dataset"} & set(flags):
            argv += ["--data-files", text, "--tokenizer", "bytes"]
        assert cli.main([*argv, *map(str, flags)]) == status
        return folder

    return run


def metrics(folder, name):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- a whole run -----------------------------------------------------------------------------------------------------


def test_the_default_corpus_from_end_to_end(tmp_path, capsys):
    folder = tmp_path / "run"
    flags = "--max-documents 12 --vocab-size 400 --max-steps 6 --eval-steps 3".split()
    assert cli.main(["train", *TINY, *flags, "--output-dir", str(folder)]) == 0
    out = capsys.readouterr().out
    for phrase in (
        "Python's standard library",
        "bits per byte",
        "unigram over the same tokens",
        "gzip -9",
        str(folder),
    ):
        assert phrase in out
    assert {path.name for path in folder.iterdir()} == {
        "checkpoints",
        "config.json",
        "generation_config.json",
        "loss.png",
        "metrics.jsonl",
        "model.safetensors",
        "modeling_mingru.py",
        "tokenizer.json",
        "tokenizer_config.json",
        "train.yaml",
    }
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "validation_loss" in line] == [0, 3, 6]
    costs = {"tokens_per_second", "model_flops_per_second", "peak_share", "input_share", "peak_memory_bytes"}
    assert set(lines[1]) == {"step", "tokens", "loss", "lr", "grad_norm", "elapsed"} | costs
    assert 0 < lines[1]["input_share"] < 1 and lines[1]["peak_memory_bytes"] > 2**24
    weights = 2 * (16 * 2 * 32 + 32 * 16 + 2 * 16 * 64) + 16 * 400
    assert lines[1]["model_flops_per_second"] == pytest.approx(lines[1]["tokens_per_second"] * 6 * weights, rel=1e-3)
    assert lines[1]["tokens"] == 4 * 32
    assert abs(lines[0]["validation_loss"] - math.log(400)) < 0.2 and lines[-1]["validation_loss"] < math.log(400)
    assert lines[-1]["validation_perplexity"] == math.exp(lines[-1]["validation_loss"])

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "mingru" and model.config.vocab_size == len(tokenizer) == 400
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    ids = tokenizer("def ", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=3).shape[1] <= ids["input_ids"].shape[1] + 3


def test_the_demo(tmp_path):
    recipe = Path(__file__).parents[2] / "examples" / "recipes" / "stdlib_mingru.yaml"
    folder = tmp_path / "demo"
    smaller = "--max-documents 20 --hidden-size 16 --batch-size 1 --max-minutes 0.01".split()
    assert cli.main(["train", str(recipe), *smaller, "--output-dir", str(folder)]) == 0
    assert metrics(folder, "validation_bits_per_byte")


def test_bits_per_byte_by_hand(train):
    folder = train("--max-steps", 3)
    tail = TEXT[int(len(TEXT) * 0.95) :].encode()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = [256, *tail, 256]
    nats = 0.0
    for start in range(0, len(tokens) - 1, 31):  # rows share one token
        row = torch.tensor([tokens[start : start + 32]])
        with torch.no_grad():
            log_p = model(row).logits[0].log_softmax(-1)
        nats -= log_p[:-1].gather(1, row[0, 1:, None]).sum().item()
    expected = nats / math.log(2) / len(tail)
    assert metrics(folder, "validation_bits_per_byte")[-1] == pytest.approx(expected, rel=1e-6)
    assert metrics(folder, "validation_loss")[-1] == pytest.approx(nats / (len(tail) + 1), rel=1e-6)


def test_the_same_seed_gives_the_same_run(train):
    flags = ["--max-steps", 8, "--hidden-dropout", 0.1]
    first, second, other = train(*flags), train(*flags, name="again"), train(*flags, "--seed", 1, name="other")
    assert metrics(first, "loss") == metrics(second, "loss") != metrics(other, "loss")
    assert same(weights(first), weights(second))


def test_what_was_saved_repeats_the_run(train, tmp_path):
    folder = train("--max-steps", 3, "--learning-rate", "1e-2")
    again = tmp_path / "again"
    assert cli.main(["train", str(folder / "train.yaml"), "--output-dir", str(again)]) == 0
    assert same(weights(folder), weights(again))


@pytest.mark.parametrize("model_type", families())
def test_every_family_learns(train, model_type):
    folder = train("--model-type", model_type, "--max-steps", 60, "--learning-rate", "2e-2")
    assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == model_type
    assert metrics(folder, "validation_bits_per_byte")[-1] < 3 < metrics(folder, "validation_bits_per_byte")[0]


def test_accumulation_equals_a_larger_batch(train, text, tmp_path):
    # Documents of different lengths, so that rows have different numbers of targets.
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": "x" * (n % 23) + "y"}) + "\n" for n in range(200)))
    common = ["--data-files", lines, "--tokenizer", "bytes", "--max-steps", 5]
    large = train(*common, "--batch-size", 8, name="large")
    small = train(*common, "--batch-size", 2, "--gradient-accumulation-steps", 4, name="small")
    assert metrics(small, "loss") == pytest.approx(metrics(large, "loss"), rel=1e-6)
    assert metrics(small, "grad_norm") == pytest.approx(metrics(large, "grad_norm"), rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [
        (["--gradient-checkpointing"], 1e-6),
        (["--mixed-precision", "bf16"], 0.02),
        (["--mixed-precision", "no"], 0),
    ],
)
def test_ways_to_compute_the_same(train, flags, tolerance):
    plain = train("--max-steps", 4)
    AcceleratorState._reset_state(reset_partial_state=True)  # it keeps the precision for the whole process
    other = train("--max-steps", 4, *flags, name="other")
    assert metrics(other, "loss") == pytest.approx(metrics(plain, "loss"), rel=tolerance)
    assert all(weight.dtype == torch.float32 for weight in weights(other).values())


class NoFloat64(TorchDispatchMode):
    """As on Apple's GPUs."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        assert getattr(result, "dtype", None) != torch.float64, operator
        return result


def test_a_device_without_float64(text, tmp_path, monkeypatch):
    argv = ["--data-files", text, "--tokenizer", "bytes", "--output-dir", tmp_path / "run", "--max-steps", 1, "--cpu"]
    run = Run(*arguments.parse([*TINY, *map(str, argv)]))
    batch = run._batch({name: values[:2] for name, values in run.validation.rows.items()})
    exact = run.evaluate(np.arange(4)), health(run.model, batch, lambda values: values)
    assert distributed.widest(torch.device("mps")) == torch.float32
    monkeypatch.setattr(distributed, "widest", lambda device: torch.float32)
    with NoFloat64():
        found = run.evaluate(np.arange(4)), health(run.model, batch, lambda values: values)
    assert found[0] == pytest.approx(exact[0]) and found[1] == pytest.approx(exact[1], rel=1e-4)


def test_the_launchers_precision_is_the_runs(train, monkeypatch, capsys):
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as `accelerate launch --mixed_precision bf16` does
    folder = train("--max-steps", 2, "--save-steps", 1)
    assert "\nmixed_precision: bf16\n" in (folder / "train.yaml").read_text()
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    AcceleratorState._reset_state(reset_partial_state=True)
    train("--max-steps", 2, "--save-steps", 1, "--resume", status=2)
    assert "was written with --mixed-precision bf16, now it is None" in capsys.readouterr().err


def test_tied_embeddings_and_other_overrides(train):
    overrides = "tie_word_embeddings=true,candidate=vanilla,norm_eps=1e-5"
    folder = train("--max-steps", 4, "--config-overrides", overrides, "--save-steps", 2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.config.candidate, model.config.norm_eps) == ("vanilla", 1e-5)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    before = weights(folder)
    forget_the_end(folder)
    assert same(
        weights(train("--max-steps", 4, "--config-overrides", overrides, "--save-steps", 2, "--resume")), before
    )


def test_budgets(train):
    rows = (int(len(TEXT) * 0.95) + 1) // 31  # the bytes and two ends, in rows that share one token
    folder = train("--num-epochs", 0.5)
    assert metrics(folder, "step")[-1] == math.ceil(rows / 2 / 4)
    folder = train("--num-epochs", 0.5, "--max-steps", 2, name="steps")
    assert metrics(folder, "step")[-1] == 2
    folder = train("--max-minutes", 0.01, name="minutes")
    assert 0.6 <= metrics(folder, "elapsed")[-1] < 10
    assert metrics(folder, "lr")[-1] < max(metrics(folder, "lr"))


def test_no_validation(train):
    folder = train("--max-steps", 2, "--validation-share", 0)
    assert metrics(folder, "loss") and not metrics(folder, "validation_loss")
    assert (folder / "loss.png").exists()


def test_continuing_from_a_model(train):
    first = train("--max-steps", 20, "--learning-rate", "1e-2")
    folder, tokenizer = first.parent / "second", AutoTokenizer.from_pretrained(first)
    data = str(first.parent / "text.txt")
    flags = ["--model", str(first), "--data-files", data, "--output-dir", str(folder), "--max-steps", "1"]
    tiny = TINY[4:]  # without the new model's size
    assert cli.main(["train", *tiny, *flags]) == 0
    assert metrics(folder, "validation_loss")[0] < metrics(first, "validation_loss")[0] - 0.5
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer.get_vocab()


def test_a_model_in_bfloat16_is_trained_in_float32_and_need_not_be_there_at_a_resume(train):
    first = train("--max-steps", 1)
    folder = first.parent / "second"
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.bfloat16)
    model.generation_config.max_length = 77
    model.save_pretrained(first)
    flags = ["--model", first, "--data-files", first.parent / "text.txt", "--output-dir", folder]
    argv = ["train", *TINY[4:], *map(str, flags), "--max-steps", "3", "--save-steps", "2"]
    assert cli.main(argv) == 0
    before = weights(folder)
    assert {weight.dtype for weight in before.values()} == {torch.float32}
    shutil.rmtree(first)
    forget_the_end(folder)
    assert cli.main([*argv, "--resume"]) == 0
    assert same(weights(folder), before)
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.max_length == 77


def test_a_streamed_dataset(train, tmp_path):
    folder = tmp_path / "dataset"
    folder.mkdir()
    lines = "".join(json.dumps({"content": f"def f{n}(x):\n    return x + {n * n}\n"}) + "\n" for n in range(300))
    (folder / "train.jsonl").write_text(lines)
    flags = ["--dataset", folder, "--text-column", "content", "--max-steps", 6, "--save-steps", 3]
    streamed = train(*flags, "--vocab-size", 300, "--streaming", "--save-steps", 3)
    loaded = train(*flags, "--vocab-size", 300, name="loaded")
    assert len(metrics(streamed, "loss")) == len(metrics(loaded, "loss")) == 6
    assert (
        metrics(streamed, "validation_loss")[0] == metrics(loaded, "validation_loss")[0]
    )  # the same held-out documents
    before = weights(streamed)
    forget_the_end(streamed)
    assert same(weights(train(*flags, "--vocab-size", 300, "--streaming", "--resume")), before)


def test_several_sources_from_end_to_end(text, tmp_path, capsys):
    folder = tmp_path / "dataset"
    folder.mkdir()
    lines = "".join(json.dumps({"content": f"def f{n}(x):\n    return x + {n * n}\n"}) + "\n" for n in range(300))
    (folder / "train.jsonl").write_text(lines)
    streamed = f"{{dataset: {folder}, text_column: content, streaming: true}}"
    sources = [f"{{data_files: ['{text}'], weight: 3}}", streamed]
    flags = ["--max-steps", 6, "--save-steps", 4, "--health-steps", 2, "--hidden-dropout", 0.1, "--tokenizer", "bytes"]
    argv = ["train", *TINY, *map(str, flags), "--output-dir", str(tmp_path / "mixed"), "--sources", *sources]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "3,862 tokens in 1 document to train on, 75.0% of the rows" in out
    assert f"            {folder} (train), 25.0% of the rows, " in out
    mixed = tmp_path / "mixed"
    before, curve = weights(mixed), (metrics(mixed, "loss"), metrics(mixed, "memory_16/layer_1"))
    assert len(curve[1]) == 3
    # The settings that were saved, on from step 4: what has been read ahead is read again.
    forget_the_end(mixed)
    assert cli.main(["train", str(mixed / "train.yaml"), "--resume"]) == 0
    assert same(weights(mixed), before)
    assert (metrics(mixed, "loss"), metrics(mixed, "memory_16/layer_1")) == curve
    assert cli.main([*argv[:-2], sources[0].replace("3}", "2}"), sources[1], "--resume"]) == 2
    assert "was written with --sources [{'data_files'" in capsys.readouterr().err


def test_documents_without_packing(text, tmp_path, capsys):
    """The loss of a step is that of its documents, each alone and cut off."""
    lines = tmp_path / "lines.jsonl"
    texts = [f"{n}" * (1 + n % 9) for n in range(30)]
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    flags = ["--data-files", str(lines), "--tokenizer", "bytes", "--validation-files", text, "--packing", "no"]
    flags += ["--output-dir", str(tmp_path / "run"), "--sequence-length", "12", "--max-steps", "1"]
    run = Run(*arguments.parse([*TINY, *flags, "--batch-size", "15", "--gradient-accumulation-steps", "2"]))
    cut = sum(len(text) + 2 > 12 for text in texts)
    said, kept = capsys.readouterr().out, sum(min(len(text) + 2, 12) for text in texts)
    assert f": {kept} tokens in 30 documents to train on, {cut} documents cut off, " in said
    nats = count = 0
    with torch.no_grad():
        for document in texts:
            ids = torch.tensor([[256, *document.encode(), 256][:12]])
            nats += run.model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
    run.train()
    assert metrics(tmp_path / "run", "loss") == pytest.approx([nats / count], rel=1e-6)


# ---- the parts -------------------------------------------------------------------------------------------------------


def test_the_optimizer_has_the_models_groups():
    config = hf_recurrent.S5Config(hidden_size=8, num_hidden_layers=1, vocab_size=11, state_size=4, num_blocks=1)
    model = AutoModelForCausalLM.from_config(config)
    args = TrainArguments(learning_rate=0.2, weight_decay=0.3, adam_beta2=0.9)
    groups = create_optimizer(model, args, torch.device("cpu")).param_groups
    expected = model.parameter_groups(0.2, 0.3)
    for group, decay in zip(groups, (0.3, 0.0), strict=True):
        assert (group["lr"], group["weight_decay"], group["betas"]) == (0.2, decay, (0.9, 0.9))
    assert [list(map(id, g["params"])) for g in groups] == [list(map(id, g["params"])) for g in expected]


def test_learning_rate_ratio():
    assert learning_rate_ratio(0.0, 0.25, 0.1) == 0.25
    assert learning_rate_ratio(0.5, 3.0, 0.0) == pytest.approx(0.5)
    assert learning_rate_ratio(1.0, 3.0, 0.1) == pytest.approx(0.1)
    assert learning_rate_ratio(1.2, 3.0, 0.1) == pytest.approx(0.1)
    assert learning_rate_ratio(0.7, 3.0, 1.0) == 1.0


@pytest.mark.parametrize("warmup", [0, 0.25, 2])
def test_the_learning_rates_course(train, warmup):
    rates = metrics(train("--max-steps", 8, "--warmup-steps", warmup, "--learning-rate", 1.0), "lr")
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(1, 9)]
    if warmup:
        expected[0] *= 0.5
    assert rates == pytest.approx(expected, rel=1e-12)


def test_rows_do_not_see_other_documents(train, text, tmp_path):
    """The loss of packed documents is that of each alone."""
    lines = tmp_path / "lines.jsonl"
    texts = [f"{n}" * (1 + n % 7) for n in range(40)]
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    folder = str(tmp_path / "run")
    flags = ["--data-files", text, "--tokenizer", "bytes", "--output-dir", folder, "--validation-files", str(lines)]
    run = Run(*arguments.parse([*TINY, *flags, "--sequence-length", "500"]))
    run.model.eval()
    nats = count = 0
    with torch.no_grad():
        for document in texts:
            ids = torch.tensor([[256, *document.encode(), 256]])
            nats += run.model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
    rows = run.validation.rows["labels"]
    assert len(rows) == 1 and (rows != IGNORED).sum() == count
    assert run.evaluate(torch.arange(1).numpy()) == pytest.approx(nats / count, rel=1e-6)


# ---- interruptions ---------------------------------------------------------------------------------------------------

RESUMABLE = ["--hidden-dropout", 0.1, "--save-steps", 5, "--log-steps", 4, "--eval-steps", 7]


def test_resuming_equals_not_stopping(train, monkeypatch):
    whole = train(*RESUMABLE, "--max-steps", 12)
    step = Run._step
    with monkeypatch.context() as patch:

        def until_8(run):
            if run.state.step == 8:
                raise OSError("out of luck")
            return step(run)

        patch.setattr(Run, "_step", until_8)
        train(*RESUMABLE, "--max-steps", 12, name="stopped", status=2)
    stopped = train(*RESUMABLE, "--max-steps", 12, "--resume", name="stopped")
    for name in ("step", "loss", "grad_norm", "lr", "validation_loss"):
        assert metrics(stopped, name) == metrics(whole, name)
    assert same(weights(stopped), weights(whole))


def test_average_losses_are_added_up_alike_in_every_process(train, monkeypatch):
    """From each step's own loss, which all processes know: parts of their own, added up, would be rounded otherwise
    after a resume."""
    judge = LossPolicy.judge

    def judged(policy, loss, norm):
        return dataclasses.replace(judge(policy, loss, norm), loss=float(policy.state.step))

    monkeypatch.setattr(LossPolicy, "judge", judged)
    run = train("--max-steps", 7, "--save-steps", 5, "--log-steps", 3)
    assert metrics(run, "loss") == [1, 4, 6]
    forget_the_end(run)
    train("--max-steps", 7, "--save-steps", 5, "--log-steps", 3, "--resume")
    assert metrics(run, "loss") == [1, 4, 6]


def test_ctrl_c_saves_and_going_on_equals_not_stopping(train, monkeypatch, capsys):
    whole = train(*RESUMABLE, "--max-steps", 12)
    step = Run._step

    def interrupted_at_7(run):
        if run.state.step == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return step(run)

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_step", interrupted_at_7)
        folder = train(*RESUMABLE, "--max-steps", 12, name="stopped", status=130)
    captured = capsys.readouterr()
    assert f"stopped after step 7; the model is saved in {folder}" in captured.out
    assert f"hf-recurrent train {folder / 'train.yaml'} --resume" in captured.out
    assert "stopping after this step" in captured.err
    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == 16
    assert cli.main(["train", str(folder / "train.yaml"), "--resume"]) == 0
    for name in ("step", "loss", "grad_norm", "lr", "validation_loss"):
        assert metrics(folder, name) == metrics(whole, name)
    assert same(weights(folder), weights(whole))


def test_sigterm_in_the_last_validation(train, monkeypatch):
    flags = [*RESUMABLE, "--max-steps", 4, "--resume", "auto", "--save-steps", 0]  # without a checkpoint so far
    whole, evaluate = train(*flags), Run.evaluate

    def interrupted(run, rows, description=None, *more):
        if description is not None:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(run, rows, description, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "evaluate", interrupted)
        folder = train(*flags, name="stopped")
    assert len(metrics(folder, "validation_loss")) == 1
    train(*flags, name="stopped")
    for name in ("step", "loss", "grad_norm", "lr", "validation_loss"):
        assert metrics(folder, name) == metrics(whole, name)
    assert same(weights(folder), weights(whole))


def test_a_run_that_has_come_to_its_end(train, monkeypatch, capsys):
    """Nothing is done again; more steps go on where it ended."""
    longer = train(*RESUMABLE, "--max-steps", 6, "--min-learning-rate-ratio", 1, "--warmup-steps", 0, name="longer")
    flags = [*RESUMABLE, "--min-learning-rate-ratio", 1, "--warmup-steps", 0, "--resume", "auto", "--max-steps"]
    run = train(*flags, 3)
    lines, before = (run / "metrics.jsonl").read_text(), weights(run)
    arguments = (run / "train.yaml").read_text()
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_step", None)
        patch.setattr(Run, "evaluate", None)
        train(*flags, 2)  # fewer, by which it was not trained
        assert (run / "train.yaml").read_text() == arguments
        capsys.readouterr()
        train(*flags, 3)
    out = capsys.readouterr().out
    assert "the run has come to its end, after step 3, before: there is nothing to train" in out
    assert f"loss {metrics(run, 'validation_loss')[-1]:.3f} nats per token" in out
    assert (run / "metrics.jsonl").read_text() == lines and same(weights(run), before)

    train(*flags, 6)
    assert same(weights(run), weights(longer)) and "max_steps: 6" in (run / "train.yaml").read_text()


@pytest.mark.parametrize("error", [RuntimeError("reentrant call inside stderr"), OSError("the terminal is gone")])
def test_a_signal_that_cannot_be_announced_ends_the_run_all_the_same(monkeypatch, error):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr(tqdm, "write", broken)
    with interrupts() as interrupted:
        assert interrupted() == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupted() == signal.SIGTERM


def test_ctrl_c_while_the_earlier_run_moves_aside(train, monkeypatch, tmp_path):
    before = {path: path.read_bytes() for path in train("--max-steps", 2).rglob("*") if path.is_file()}

    def interrupted(path, content):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_recurrent.training.folder.write_whole", interrupted)
    run = train("--max-steps", 2, "--overwrite", status=130)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"run", "text.txt"}


def start(tmp_path, *flags, **more):
    """`hf-recurrent train` in a process of its own."""
    command = [sys.executable, "-m", "hf_recurrent", "train", *TINY, "--output-dir", "run", "--no-token-cache"]
    command += map(str, flags)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(hf_recurrent.__file__).parents[1])}
    return subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True, **more)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_in_a_process_of_its_own(tmp_path, text, number):
    flags = ["--data-files", text, "--tokenizer", "bytes", "--max-steps", 100_000]
    with start(tmp_path, *flags, stdout=subprocess.PIPE) as process:
        folder = tmp_path / "run"
        while process.poll() is None and not (folder / "metrics.jsonl").exists():
            pass
        while process.poll() is None and len(metrics(folder, "loss")) < 3:
            pass
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    # A preemption that has been provided for is a success to whoever sent it.
    assert process.returncode == (130 if number == signal.SIGINT else 0), err
    assert "the model is saved in run" in out and "Traceback" not in err
    assert "3,862 tokens in 1 document to train on, 205 tokens in 1 to validate on" in out
    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == 16
    assert len(list((folder / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize("limit", [60_000, 8_000])  # bytes that a file may have: the checkpoint fits, or not even that
def test_a_disk_that_fills_up(tmp_path, text, train, limit):
    earlier = train("--max-steps", 2)
    before = {path: path.read_bytes() for path in earlier.rglob("*") if path.is_file()}
    flags = ["--data-files", text, "--tokenizer", "bytes", "--max-steps", 4, "--save-steps", 2, "--overwrite"]
    flags += ["--hidden-size", 64]

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    with start(tmp_path, *flags, preexec_fn=limited) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    last = err.strip().splitlines()[-1]
    assert last.startswith("hf-recurrent: error: cannot save run") and "what was saved before is untouched" in last
    assert "Traceback" not in err
    assert {path: path.read_bytes() for path in earlier.rglob("*") if path.is_file()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.failed-1", "text.txt"}
    assert {path.name for path in (tmp_path / "run.failed-1").iterdir()} >= {"train.yaml", "metrics.jsonl"}


def test_a_run_whose_steps_are_all_skipped(train, capsys):
    flags = ("--warmup-steps", 0, "--max-grad-norm", 0, "--learning-rate", "1e30", "--on-bad-loss", "skip")
    run = train(*flags, "--max-steps", 3)
    out, err = capsys.readouterr()
    assert "warning: the validation loss is nan at step 3" in out and "step 3, all of them skipped, " in err
    for line in (run / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_weights_that_are_not_finite_replace_nothing(train, capsys):
    common = ("--warmup-steps", 0, "--max-grad-norm", 0, "--log-steps", 100)
    diverging = (*common, "--learning-rate", "1e30", "--max-steps", 40, "--save-steps")
    run = train(*common, "--max-steps", 2)
    before = weights(run)
    train(*diverging, 20, "--overwrite", status=2)
    assert "the loss is nan at step 2: try a --learning-rate smaller than 1e+30" in capsys.readouterr().err
    assert same(weights(run), before) and not (run / "bad_batches.jsonl").exists()
    beside = run.with_name("run.failed-1") / "bad_batches.jsonl"
    assert json.loads(beside.read_text())["step"] == 2

    # Checkpoints of the run's own beginning stay, and none after it has broken down is written.
    run = train(*diverging, 1, "--keep-checkpoints", 1, name="other", status=2)
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert all(weight.isfinite().all() for weight in torch.load(checkpoint / "pytorch_model.bin").values())


# ---- bad input -------------------------------------------------------------------------------------------------------


def failure(argv, capsys):
    """The line that a refused command line leaves."""
    assert cli.main(["train", *TINY, *map(str, argv)]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("hf-recurrent: error: ")
    return line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokenizer", "bytes", "--sequence-length", 10_000], "the corpus is shorter than one row: 3862 tokens"),
        (["--vocab-size", 100], "--vocab-size 100 is smaller than the byte alphabet"),
        (["--model-type", "mingrru"], "--model-type mingrru: no such family; the nearest valid one is mingru"),
        (["--model-type", "llama"], "--model-type llama: no such family"),
        (["--hidden-size", 10**11], "not enough memory: try a smaller --batch-size, --sequence-length or model ("),
        (["--config-overrides", "expansion=1e300"], "not enough memory: try a smaller --batch-size"),
        (["--batch-size", 10**12], "not enough memory: try a smaller --batch-size, --sequence-length or model ("),
        (["--conv-kernel", 1], "--conv-kernel: expected 0 (no convolution) or at least 2 taps, got 1"),
        (["--expansion", 1.01], "expansion * hidden_size must be a whole number"),
        (
            ["--config-overrides", "candidat=vanilla"],
            "candidat is not a field of MinGRUConfig; the nearest valid one is c",
        ),
        (["--config-overrides", "candidate=log"], "--config-overrides: candidate: "),
        (["--config-overrides", "hidden_size=8"], "hidden_size is also given as a flag"),
        (["--config-overrides", "vocab_size=8"], "vocab_size is the tokenizer's to give"),
        (["--config-overrides", "norm_eps=[1"], "--config-overrides: norm_eps: got '[1', expected a YAML scalar"),
        (["--config-overrides", "candidate"], "expected key=value,key=value, got 'candidate'"),
        (["--mixed-precision", "fp16", "--cpu"], "fp16"),
        (["--model", "nowhere/at/all"], "--model"),
        (["--recurrence-learning-rate", "1e-4"], "a mingru has no parameters with a learning rate of their own"),
        (["--on-loss-spike", "skip", "--loss-spike-threshold", 0], "--on-loss-spike skip and --loss-spike-threshold 0"),
        (["--no-token-cache", "--token-cache-gb", 3], "--no-token-cache and --token-cache-gb cannot both be given"),
        (["--learning-rate", "1e30", "--max-steps", 50, "--max-grad-norm", 0, "--warmup-steps", 0], "the loss is"),
    ],
)
def test_what_is_refused(flags, message, text, tmp_path, capsys):
    if "--model" in flags:
        flags = [*flags, "--tokenizer", "bytes"]
    out = tmp_path / "out"
    argv = ["--data-files", text, "--output-dir", out, *flags]
    if "--model" in flags:
        assert cli.main(["train", *TINY[4:], *map(str, argv)]) == 2
        line = capsys.readouterr().err
    else:
        line = failure(argv, capsys)
    assert message in line
    assert not out.exists()


def test_a_model_is_refused_before_the_corpus_is_read(tmp_path, capsys):
    common = ["--data-files", tmp_path / "missing.txt", "--output-dir", tmp_path / "out"]
    assert "missing.txt" in failure(common, capsys)
    assert "candidat is not a field" in failure([*common, "--config-overrides", "candidat=vanilla"], capsys)
    split = ["--context-parallel", 2, "--model-type", "s5", "--config-overrides", "bidirectional=true", "--dry-run"]
    assert "got bidirectional=True" in failure([*common, *split], capsys)


def test_a_model_of_another_type(text, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    common = ["train", *TINY[4:], "--data-files", text, "--model", str(other), "--output-dir", str(tmp_path / "out")]
    assert cli.main(common) == 2
    assert "the folder has no config.json" in capsys.readouterr().err
    (other / "config.json").write_text('{"model_type": "gpt2"}')
    assert cli.main([*common, "--tokenizer", "bytes"]) == 2
    assert "is of type 'gpt2'; this package knows " in capsys.readouterr().err
    (other / "config.json").write_text('{"model_type": "mingru"}')
    (other / "model.safetensors").write_bytes(b"broken")
    assert cli.main([*common, "--tokenizer", "bytes"]) == 2
    assert f"--model {other}: its weights cannot be loaded" in capsys.readouterr().err


def test_a_tokenizer_that_does_not_fit_the_model(train, text, tmp_path, capsys):
    small = train("--max-steps", 1)
    large = tmp_path / "large"
    train_bpe([TEXT], 300).save_pretrained(large)
    argv = ["--model", small, "--data-files", text, "--tokenizer", large, "--output-dir", tmp_path / "out"]
    assert cli.main(["train", *TINY[4:], *map(str, argv)]) == 2
    message = "the tokenizer does not fit the model: it has 300 tokens, the model's vocabulary has 257"
    assert message in capsys.readouterr().err


def test_weights_that_are_no_longer_finite_are_not_saved(text, tmp_path):
    argv = ["--data-files", text, "--tokenizer", "bytes", "--output-dir", tmp_path / "run", "--max-steps", 1]
    argv += ["--model-type", "s5", "--config-overrides", "norm=batch"]
    run = Run(*arguments.parse([*TINY, *map(str, argv)]))
    for tensor in (next(run.model.parameters()).data, next(run.model.buffers())):  # running statistics too
        whole = tensor.clone()
        tensor[0] = math.inf
        for save in (run.save_model, run.save_checkpoint):
            with pytest.raises(FloatingPointError, match="the weights are no longer finite at step 0: try a --learn"):
                save()
        tensor.copy_(whole)
    run.folder.unlock()
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_with_other_special_tokens_than_the_model(train, text, tmp_path, capsys):
    train_bpe([TEXT], 300).save_pretrained(tmp_path / "bpe")
    model = train("--max-steps", 1, "--tokenizer", tmp_path / "bpe")
    argv = ["--model", model, "--data-files", text, "--tokenizer", "bytes", "--output-dir", tmp_path / "out"]
    for more in ([], ["--dry-run"]):
        assert cli.main(["train", *TINY[4:], *map(str, argv), *more]) == 2
        message = "the tokenizer does not fit the model: its bos_token_id is 256, the model's is 0"
        assert message in capsys.readouterr().err
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))  # its own is accepted, named or not
    for name, tokenizer in (("one", []), ("two", ["--tokenizer", model])):
        argv = ["--model", model, "--data-files", text, *tokenizer, "--output-dir", tmp_path / name, "--max-steps", 1]
        assert cli.main(["train", *TINY[4:], *map(str, argv)]) == 0


def test_a_tokenizer_with_a_token_beyond_its_number(train, text, tmp_path, capsys):
    small = train("--max-steps", 1)
    content = json.loads((small / "tokenizer.json").read_text())
    content["model"]["vocab"]["zz"] = 400
    (tmp_path / "sparse").mkdir()
    (tmp_path / "sparse" / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "sparse" / "tokenizer_config.json").write_text((small / "tokenizer_config.json").read_text())
    argv = ["--model", small, "--data-files", text, "--tokenizer", tmp_path / "sparse"]
    argv += ["--output-dir", tmp_path / "out"]
    assert cli.main(["train", *TINY[4:], *map(str, argv)]) == 2
    assert "the tokenizer does not fit the model: it has 401 tokens" in capsys.readouterr().err
    new = train("--max-steps", 1, "--tokenizer", tmp_path / "sparse", name="new")
    assert json.loads((new / "config.json").read_text())["vocab_size"] == 401


def test_a_run_that_is_not_the_checkpoints(train, text, tmp_path, capsys):
    forget_the_end(train("--max-steps", 4, "--save-steps", 2))
    capsys.readouterr()
    train("--max-steps", 4, "--save-steps", 2, "--resume", "--learning-rate", 1.0, status=2)
    line = capsys.readouterr().err
    assert "step-00000002 was written with --learning-rate 0.002, now it is 1.0" in line
    [checkpoint] = (tmp_path / "run" / "checkpoints").iterdir()
    for name in ("optimizer.bin", "random_states_0.pkl"):
        whole = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(bytes(len(whole)))
        train("--max-steps", 4, "--save-steps", 2, "--resume", status=2)
        assert "step-00000002 cannot be read: " in capsys.readouterr().err
        (checkpoint / name).write_bytes(whole)
    state = checkpoint / "state.json"
    written = state.read_text()
    without = json.dumps({name: value for name, value in json.loads(written).items() if name != "digest"})
    for content, message in (
        ("3", "step-00000002 cannot be read: "),
        ("{}", "has format None, expected 3"),
        (without, "step-00000002 cannot be read: its state.json lacks digest"),
        (written.replace('"rows": ', '"rows":-'), "cannot be read: its state.json has step 2 and rows -"),
        (written.replace('"step"', '"stop"'), "cannot be read: "),
    ):
        state.write_text(content.ljust(len(written)))
        train("--max-steps", 4, "--save-steps", 2, "--resume", status=2)
        assert message in capsys.readouterr().err
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path != state and path.is_file()}
    (checkpoint / "files.json").rename(tmp_path / "files.json")  # by which most of the damage is told
    whole = json.loads(written)
    for name, value in (
        ("seconds", "x"), ("seconds", None), ("seconds", math.nan), ("loss_sum", None), ("loss_steps", 1.5),
        ("rows", True), ("recent_losses", 3), ("recent_losses", [1.0, "x"]), ("skipped", [0]),
    ):  # fmt: skip
        state.write_text(json.dumps(whole | {"state": whole["state"] | {name: value}}))
        train("--max-steps", 4, "--save-steps", 2, "--resume", status=2)
        message = f"--resume: {checkpoint} cannot be read: its state.json has {name} {value!r}"
        assert capsys.readouterr().err.splitlines()[-1] == f"hf-recurrent: error: {message}"
    state.write_text(json.dumps(whole | {"versions": "1.0"}))
    train("--max-steps", 4, "--save-steps", 2, "--resume", status=2)
    assert "step-00000002 cannot be read: its state.json has versions '1.0'" in capsys.readouterr().err
    (tmp_path / "files.json").rename(checkpoint / "files.json")
    assert all(path.read_bytes() == content for path, content in before.items())
    state.write_text(written)
    Path(text).write_text(TEXT.upper())
    train("--max-steps", 4, "--save-steps", 2, "--resume", status=2)
    assert "the corpus or its tokens have changed since" in capsys.readouterr().err
    train("--max-steps", 4, status=2)
    assert "holds an earlier run: continue it by --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    "loss, shown, logged",
    [(3.0, "20.09", True), (23.5, "1.61e+10", True), (700.5, "1.67e+304", True), (23490.0, "inf", False)],
)
def test_perplexities_of_every_size(train, monkeypatch, capsys, loss, shown, logged):
    monkeypatch.setattr(Run, "evaluate", lambda self, *_: loss)
    run = train("--max-steps", 1)
    told = f"): loss {loss:.3f} nats per token, perplexity {shown}\n"
    assert told in capsys.readouterr().out
    assert metrics(run, "validation_perplexity") == ([math.exp(loss)] * 2 if logged else [])
    assert metrics(run, "validation_loss") == [loss] * 2
    monkeypatch.setattr(Run, "evaluate", None)
    train("--max-steps", 1, "--resume")  # what is known already is not measured again
    assert told in capsys.readouterr().out


def test_bars_are_rare_in_a_log(tmp_path, train, monkeypatch):
    bars = {}

    class Recorded(tqdm):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            if not self.disable:
                bars[self.desc] = self.mininterval

    monkeypatch.setattr("hf_recurrent.training.progress.tqdm", Recorded)
    train("--max-steps", 1, "--tokenizer", "bpe", "--vocab-size", 300, "--skip-unreadable-files")
    names = {"", "checking files", "reading for the tokenizer", "reading", "tokenising", "tokenising validation text"}
    assert bars.keys() == names | {"validating"} and set(bars.values()) == {10}
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    train("--max-steps", 1, name="watched")
    assert bars[""] == bars["validating"] == 0.1


def test_a_stream_has_no_epochs(tmp_path, capsys):
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "train.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    argv = ["--dataset", tmp_path / "dataset", "--streaming", "--tokenizer", "bytes", "--output-dir", tmp_path / "out"]
    assert "with --streaming give --max-steps or --max-minutes" in failure(argv, capsys)


def test_a_broken_file_is_one_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with start(tmp_path, "--data-files", "a.jsonl") as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err.startswith("hf-recurrent: error: a.jsonl: cannot be read as json: ") and err.count("\n") == 1


def test_a_compiler_that_is_missing(tmp_path, text, monkeypatch):
    flags = ["--data-files", text, "--tokenizer", "bytes", "--max-steps", 1, "--compile"]
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with start(tmp_path, *flags) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "hf-recurrent: error: --compile: torch.compile does not work here" in err and "Traceback" not in err
    assert not (tmp_path / "run").exists()
