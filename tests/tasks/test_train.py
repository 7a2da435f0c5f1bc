"""`hf-recurrent train --task`."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_recurrent import cli
from hf_recurrent.tasks import generate
from hf_recurrent.tasks.train import SIGNAL_TASKS, TRAINABLE, TaskTraining, measure, train_task

SMALL = {
    "selective_copying": {"length": 12, "data_tokens": 3, "vocab_size": 6},
    "associative_recall": {"length": 12, "pairs": 2, "vocab_size": 12},
    "memory_horizon": {"length": 12},
    "induction_heads": {"length": 12, "vocab_size": 6},
    "listops": {"shortest": 5, "longest": 20},
    "pendulum": {"steps": 8, "grid": 16, "size": 6, "duration": 1.6},
    "pathfinder": {"size": 16, "length": 6, "distractors": 0},
    "tones": {"classes": 2, "rate": 4800, "seconds": 0.02},
}


@pytest.mark.parametrize("task", TRAINABLE)
def test_a_model_learns(task):
    config = {"hidden_size": 24} | ({"state_size": 16, "num_blocks": 2} if task in SIGNAL_TASKS else {})
    training = TaskTraining(
        task, SMALL[task], config=config, max_steps=40, batch_size=32, eval_examples=50, evaluations=2
    )
    told = []
    result = train_task(training, progress=lambda *args: told.append(args))
    assert [step for step, _, _ in told] == list(range(1, 41))
    assert sum(loss for _, loss, _ in told[-5:]) < sum(loss for _, loss, _ in told[:5])
    assert [row["step"] for row in result["curve"]] == [20, 40]
    assert 0 <= result[result["metric"]] <= 1 and result["metric"] == ("mse" if task == "pendulum" else "accuracy")
    again = train_task(training)
    assert again["curve"] == result["curve"]


def test_the_command_learns_selective_copying(tmp_path, capsys):
    flags = ["--task-args", "length=8,data_tokens=2,vocab_size=6", "--max-steps", "250", "--learning-rate", "1e-2"]
    flags += ["--hidden-size", "32", "--eval-examples", "200", "--output-dir", str(tmp_path / "run"), "--cpu"]
    assert cli.main(["train", "--task", "selective_copying", *flags]) == 0
    said = capsys.readouterr().out
    assert "step 250: loss" in said and "Written: the model and task.json" in said
    result = json.loads((tmp_path / "run" / "task.json").read_text())
    assert result["accuracy"] > 0.99  # a guess is right once in four times
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    held_out = generate("selective_copying", 200, 0, "validation", length=8, data_tokens=2, vocab_size=6)
    assert measure(model, held_out, 64) == pytest.approx(result["accuracy"])
    assert cli.main(["train", "--task", "selective_copying", *flags]) == 2
    assert "holds an earlier run; --overwrite replaces it" in capsys.readouterr().err


def test_a_peer_is_trained_alike():
    config = {"hidden_size": 16, "num_hidden_layers": 1}
    training = TaskTraining(
        "induction_heads", SMALL["induction_heads"], "mamba", config, 2, 4, weight_decay=0.1, eval_examples=4
    )
    result = train_task(training)
    assert result["model_type"] == "mamba" and [row["step"] for row in result["curve"]] == [1, 2]
    assert result["seconds"] > 0 and result["device"] == "cpu" and result["machine"]["date"]


def test_listops_has_a_classifier(tmp_path):
    training = TaskTraining("listops", SMALL["listops"], "longhorn", max_steps=2, batch_size=4, eval_examples=4)
    train_task(training, tmp_path)
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path).config.num_labels == 10


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--task", "listop"], "--task listop: cannot be trained on here; the nearest valid one is listops"),
        (["--task", "pendulum", "--model-type", "mingru"], "--model-type mingru: pendulum is read as numbers"),
        (["--task", "pendulum", "--config-overrides", "input_size=3"], "input_size is not a field"),
        (["--task", "tones", "--task-args", "rate=3000"], "rate / decimation must be at least 2400"),
        (["--task", "listops", "--model-type", "mamba"], "--model-type mamba: no such family"),
        (["--task", "memory_horizon", "--model-type", "mambo"], "no such family; the nearest valid one is mamba"),
        (["--task", "listops", "--task-args", "depth=3"], "listops has no argument 'depth'"),
        (["--task", "listops", "--task-args", "shortest"], "--task-args: expected key=value"),
        (["--task", "listops", "--config-overrides", "vocab_size=3"], "vocab_size is not a field"),
        (["--task", "listops", "--config-overrides", "hidden_size=3"], "hidden_size has a flag of its own"),
        (["--task", "listops", "--max-steps", "0"], "--max-steps: must be at least 1, got 0"),
        (["--task", "listops", "--steps", "3"], "unknown flag --steps"),
    ],
)
def test_bad_flags(flags, message, capsys):
    assert cli.main(["train", *flags]) == 2
    assert message in capsys.readouterr().err
