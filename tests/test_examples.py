"""The scripts of examples/, each run as a user would, on little data."""

import gzip
import runpy
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_recurrent.tasks import generate
from hf_recurrent.tasks.digits import mixed

EXAMPLES = Path(__file__).parents[1] / "examples"
TEXT = "The quick brown fox jumps over the lazy dog. " * 60


def run(name: str, *argv) -> None:
    before = sys.argv
    sys.argv = [f"examples/{name}.py", *map(str, argv)]
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        sys.argv = before


def refused(capsys, name: str, *argv) -> str:
    """The one line that a script ends with before it does anything."""
    with pytest.raises(SystemExit) as stopped:
        run(name, *argv)
    said = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2 and said.startswith(f"{name}.py: error: ")
    return said


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "fox.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="module")
def pretrained(text, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "fox"
    sizes = ("--hidden-size", 16, "--layers", 2, "--minutes", 0.01)
    run("pretrain", "--data", text, *sizes, "--prompt", "The", "--output", folder)
    return folder


@pytest.mark.parametrize("script", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_help_says_what_it_does_and_how_to_call_it(script, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(script, "--help")
    said = capsys.readouterr().out
    assert stopped.value.code == 0 and f"python examples/{script}.py" in said


def test_pretrain(pretrained):
    assert (pretrained / "metrics.jsonl").is_file()
    assert AutoModelForCausalLM.from_pretrained(pretrained).config.model_type == "mingru"


@pytest.mark.parametrize("family", ["minlstm", "s5"])
def test_pretrain_with_trainer(family, text, tmp_path, capsys):
    flags = ("--hidden-size", 16, "--layers", 1, "--steps", 2, "--batch-size", 2, "--sequence-length", 64)
    rates = ("--recurrence-learning-rate", 1e-3) if family == "s5" else ()
    run("pretrain_with_trainer", "--data", text, text, "--model-type", family, *flags, *rates, "--output", tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.model_type == family
    assert len(AutoTokenizer.from_pretrained(tmp_path)("fox")["input_ids"]) == 3
    assert "loss" in capsys.readouterr().out


def test_rows_of_the_trainer_example_end_documents():
    pack = runpy.run_path(str(EXAMPLES / "pretrain_with_trainer.py"))["pack"]
    rows = pack([[5, 6, 7], [8, 9], [1, 2, 3]], 4)
    assert rows["position_ids"] == [[0, 1, 2, 0], [1, 0, 1, 2]]
    assert rows["labels"] == [[-100, 6, 7, -100], [9, -100, 2, 3]]


@pytest.mark.parametrize("script", ["pretrain", "pretrain_with_trainer"])
def test_what_pretraining_refuses(script, text, tmp_path, capsys):
    assert "invalid choice: 'mingr'" in refused(capsys, script, "--data", text, "--model-type", "mingr")
    assert "none.txt" in refused(capsys, script, "--data", text, tmp_path / "none.txt", "--output", tmp_path / "run")


def test_finetune_lora(pretrained, text, tmp_path, capsys):
    flags = ("--steps", 2, "--batch-size", 2, "--sequence-length", 32, "--rank", 2)
    run("finetune_lora", pretrained, "--data", text, *flags, "--output", tmp_path)
    assert "step 2: loss" in capsys.readouterr().out
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert "none.txt" in refused(capsys, "finetune_lora", tmp_path / "no model", "--data", tmp_path / "none.txt")


def test_saved_state(pretrained, text, tmp_path, capsys):
    flags = ("--prefix", text, "--state", tmp_path / "fox.safetensors", "--prompts", "The ", "A ")
    run("saved_state", pretrained, *flags, "--max-new-tokens", 5)
    first = capsys.readouterr().out
    assert (tmp_path / "fox.safetensors").is_file() and first.count("-" * 40) == 2
    run("saved_state", pretrained, *flags, "--max-new-tokens", 5)  # reads the file
    assert capsys.readouterr().out == first

    tokenizer, model = AutoTokenizer.from_pretrained(pretrained), AutoModelForCausalLM.from_pretrained(pretrained)
    whole = tokenizer(TEXT + "The ", return_tensors="pt")
    tokens = model.generate(**whole, max_new_tokens=5, do_sample=False)[0, len(tokenizer(TEXT)["input_ids"]) :]
    assert first.split("-" * 40)[1].strip("\n") == tokenizer.decode(tokens)
    for other in (TEXT[:100], TEXT.replace("dog", "cat")):
        (tmp_path / "other.txt").write_text(other)
        said = refused(capsys, "saved_state", pretrained, "--prefix", tmp_path / "other.txt", *flags[2:])
        assert f"--state {tmp_path / 'fox.safetensors'}: not of the text in --prefix" in said
    (tmp_path / "fox.safetensors").write_text("no state")
    assert "not a whole safetensors file" in refused(capsys, "saved_state", pretrained, *flags)
    assert "none.txt" in refused(capsys, "saved_state", pretrained, "--prefix", tmp_path / "none.txt", *flags[2:])


def test_evaluate(pretrained, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    (tmp_path / "choices.jsonl").write_text('{"question": "The quick brown", "choices": [" fox", " dog"]}\n' * 3)
    (tmp_path / "foxes.yaml").write_text(
        "task: foxes\ndataset_path: json\ndataset_kwargs: {data_files: {test: "
        f"{tmp_path / 'choices.jsonl'}"
        "}}\ntest_split: test\noutput_type: multiple_choice\ndoc_to_text: question\n"
        "doc_to_choice: choices\ndoc_to_target: 0\n"
    )
    run("evaluate", pretrained, "--text", text, "--tasks", "foxes", "--include-path", tmp_path)
    said = capsys.readouterr().out
    assert "bits per byte" in said and "|foxes" in said


def write_idx(file: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}i", *values.shape)
    file.write_bytes(gzip.compress(header + values.tobytes()))


def test_sequential_digits(tmp_path, capsys):
    generator = np.random.default_rng(0)
    images = generator.integers(256, size=(12, 28, 28)).astype(np.uint8)
    write_idx(tmp_path / "t10k-images-idx3-ubyte.gz", images)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", generator.integers(10, size=12).astype(np.uint8))
    read, _ = runpy.run_path(str(EXAMPLES / "sequential_digits.py"))["load"](tmp_path, None)
    held_out, last = read[8:, :, 0] * 255, images[8:].reshape(4, 784)  # which are not those of the file's order
    assert not np.allclose(held_out, last) and np.allclose(held_out, images[mixed(12)[8:]].reshape(4, 784))
    sizes = ("--epochs", 1, "--train-digits", 8, "--layers", 1, "--batch-size", 4, "--device", "cpu")
    run("sequential_digits", "--data", tmp_path, *sizes, "--output", tmp_path / "model")
    assert (tmp_path / "model" / "config.json").is_file()
    run("sequential_digits", "--data", tmp_path, *sizes, "--permutation-seed", 1, "--max-steps", 1)
    for flag, value, reason in (
        ("--batch-size", 9, "at most --train-digits, 8"),
        ("--max-steps", -1, "at least 1"),
        ("--learning-rate", float("nan"), "a number above 0"),
        ("--permutation-seed", -1, "at least 0"),
    ):
        said = refused(capsys, "sequential_digits", "--data", tmp_path, *sizes, flag, value)
        assert said.endswith(f"{flag} must be {reason}, got {value}")
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes((tmp_path / "t10k-labels-idx1-ubyte.gz").read_bytes()[:20])
    assert "--data: " in refused(capsys, "sequential_digits", "--data", tmp_path, *sizes)


def test_pendulum(tmp_path, capsys):
    sizes = ("--train", 6, "--test", 3, "--final-test", 5, "--epochs", 2, "--batch-size", 4, "--device", "cpu")
    run("pendulum", *sizes, "--output", tmp_path / "model")
    said = capsys.readouterr().out
    assert "epoch 2: loss " in said and " in the test, " in said
    example = runpy.run_path(str(EXAMPLES / "pendulum.py"))
    model = example["PendulumModel"]()
    model.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    errors = example["squared_errors"](model, *example["tensors"](generate("pendulum", 5, 0, "test"), "cpu"))
    assert said.splitlines()[-1].startswith(f"5 others: mean {errors.mean():.5f}, its standard error 0.")
    with pytest.raises(SystemExit):  # before it has trained
        run("pendulum", "--output", tmp_path / "model" / "config.json")
    assert "--output" in (said := capsys.readouterr().err) and "File exists" in said


def test_assisted_generation(text, tmp_path, capsys):
    sizes = ("--hidden-size", 16, "--assistant-hidden-size", 8, "--layers", 2, "--assistant-layers", 1)
    minutes = ("--minutes", 0.01, "--assistant-minutes", 0.01)
    lengths = ("--prompts", 2, "--new-tokens", 8, "--sequence-length", 32)
    run("assisted_generation", "--data", text, *sizes, *minutes, *lengths, "--output", tmp_path)
    assert "of the time of greedy decoding" in capsys.readouterr().out
