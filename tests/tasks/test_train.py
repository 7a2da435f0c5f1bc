"""`hf-recurrent train --task`."""

import dataclasses
import json
import os
import shutil
import signal

import pytest
import torch
from mnist import write_digits
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_recurrent import cli
from hf_recurrent.tasks import generate
from hf_recurrent.tasks import train as tasks_train
from hf_recurrent.tasks.measures import measure
from hf_recurrent.tasks.settings import SIGNAL_TASKS, TRAINABLE, TaskTraining
from hf_recurrent.tasks.train import train_task

SMALL = {
    "selective_copying": {"length": 12, "data_tokens": 3, "vocab_size": 6},
    "associative_recall": {"length": 12, "pairs": 2, "vocab_size": 12},
    "memory_horizon": {"length": 12},
    "induction_heads": {"length": 12, "vocab_size": 6},
    "listops": {"shortest": 5, "longest": 20},
    "pendulum": {"steps": 8, "grid": 16, "size": 6, "duration": 1.6},
    "pathfinder": {"size": 20, "length": 8, "distractors": 0},
    "tones": {"classes": 2, "rate": 4800, "seconds": 0.02},
}


@pytest.fixture
def small(tmp_path):
    folder = tmp_path / "digits"
    folder.mkdir()
    write_digits(folder, "t10k", 500)
    return SMALL | {"digits": {"folder": str(folder)}}


@pytest.mark.parametrize("task", TRAINABLE)
def test_a_model_learns(task, small):
    config = {"hidden_size": 24} | ({"state_size": 16, "num_blocks": 2} if task in SIGNAL_TASKS else {})
    training = TaskTraining(
        task, small[task], config=config, max_steps=40, batch_size=32, eval_examples=50, evaluations=2
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
    assert "step 250: loss" in said and "The model and task.json are in" in said
    result = json.loads((tmp_path / "run" / "task.json").read_text())
    assert result["accuracy"] > 0.99  # a guess is right once in four times
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    held_out = generate("selective_copying", 200, 0, "validation", length=8, data_tokens=2, vocab_size=6)
    assert measure(model, held_out, 64) == pytest.approx(result["accuracy"])
    assert cli.main(["train", "--task", "selective_copying", *flags]) == 2
    assert "holds an earlier run: continue it by --resume, replace it by --overwrite" in capsys.readouterr().err


def test_a_peer_is_trained_alike(tmp_path):
    config = {"hidden_size": 16, "num_hidden_layers": 1}
    training = TaskTraining(
        "induction_heads", SMALL["induction_heads"], "mamba", config, 2, 4, weight_decay=0.1, eval_examples=4
    )
    result = train_task(training, tmp_path / "run")
    begun = dataclasses.replace(training, start_from=str(tmp_path / "run"), seed=1).create_model().state_dict()
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    assert all(torch.equal(begun[name], weight) for name, weight in trained.items())
    assert result["model_type"] == "mamba" and [row["step"] for row in result["curve"]] == [1, 2]
    assert result["seconds"] > 0 and result["device"] == "cpu" and result["machine"]["date"]


def test_listops_has_a_classifier(tmp_path):
    training = TaskTraining("listops", SMALL["listops"], "longhorn", max_steps=2, batch_size=4, eval_examples=4)
    train_task(training, tmp_path)
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path).config.num_labels == 10


def interrupted_at(step):
    """Ends a training as kill -9 does, after so many steps."""

    def progress(done, loss, measured):
        if done == step:
            raise KeyboardInterrupt

    return progress


def test_a_curriculum_starts_from_the_weights_of_an_earlier_run(tmp_path):
    config = {"hidden_size": 8, "num_hidden_layers": 1}
    sizes = {"length": 12, "pairs": 2, "vocab_size": 12}
    short = TaskTraining("associative_recall", sizes, "longhorn", config, max_steps=3, eval_examples=4)
    train_task(short, tmp_path / "short")
    longer = dataclasses.replace(short, sizes=sizes | {"length": 20}, start_from=str(tmp_path / "short"), seed=1)
    earlier = AutoModelForCausalLM.from_pretrained(tmp_path / "short")
    begun = longer.create_model().state_dict()
    assert all(torch.equal(begun[name], weight) for name, weight in earlier.state_dict().items())
    assert train_task(longer)["start_from"] == str(tmp_path / "short")
    for changes, message in (
        ({"config": config | {"hidden_size": 12}}, r"model.embed_tokens.weight has the shape \(12, 8\), here it is"),
        ({"config": config | {"num_hidden_layers": 2}}, r"has the shape None, here it is"),
        ({"config": config | {"learned_initial_state": True}}, "has the shape None, here it is"),
        ({"config": config | {"hidden_act": "silu"}}, "--start-from .*short: was trained with hidden_act gelu, here"),
        ({"model_type": "mingru"}, "holds a LonghornForCausalLM, expected a MinGRUForCausalLM"),
        ({"start_from": str(tmp_path)}, "--start-from .*: the folder has no config.json, so it holds no model"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(longer, **changes).create_model()
    dataclasses.replace(longer, config=config | {"hidden_dropout": 0.1}).create_model()
    with pytest.raises(KeyboardInterrupt):
        train_task(longer, tmp_path / "longer", progress=interrupted_at(3), save_steps=2)
    shutil.rmtree(tmp_path / "short")  # is needed at the beginning alone
    assert train_task(longer, tmp_path / "longer", resume="newest")["curve"][-1]["step"] == 3


@pytest.mark.parametrize(
    "task, model_type, trained, wanted, message",
    [
        ("listops", "mingru", {"candidate": "vanilla"}, {}, "was trained with candidate vanilla, here it is positive"),
        ("pendulum", "s5", {"discretization": "bilinear"}, {}, "discretization bilinear, here it is zoh"),
        ("listops", "mingru", {"learned_initial_state": True}, {}, r"has the shape \(16,\), here it is None"),
        ("pendulum", "s5", {"dt_max": 0.2}, {"c_init": "lecun_normal"}, None),  # of new weights
        ("induction_heads", "mamba", {"time_step_min": 0.01}, {"use_mambapy": True}, None),
    ],
)
def test_weights_that_mean_something_else_are_not_started_from(task, model_type, trained, wanted, message, tmp_path):
    config = {"hidden_size": 8, "num_hidden_layers": 1}
    config |= {"state_size": 4, "num_blocks": 1} if task == "pendulum" else {}
    earlier = TaskTraining(task, SMALL[task], model_type, config | trained)
    earlier.create_model().save_pretrained(tmp_path / "earlier")
    # The pendulum's step_rescale follows from its grid: the unit of time stays the same part of it.
    sizes = SMALL[task] | ({"grid": 32} if task == "pendulum" else {})
    next_one = TaskTraining(task, sizes, model_type, config | wanted, start_from=str(tmp_path / "earlier"))
    if message is None:
        next_one.create_model()
    else:
        with pytest.raises(ValueError, match=message):
            next_one.create_model()


# ---- interruptions ---------------------------------------------------------------------------------------------------

DROPPED_OUT = {"hidden_size": 8, "num_hidden_layers": 1, "hidden_dropout": 0.2}


def signalled_at(step):
    def progress(done, loss, measured):
        if done == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return progress


def same_weights(one, other):
    one, other = (load_file(folder / "model.safetensors") for folder in (one, other))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("task, model_type", [("selective_copying", "mingru"), ("pendulum", "s5"), ("listops", None)])
def test_an_interrupted_training_ends_as_one_that_was_not(task, model_type, tmp_path):
    config = DROPPED_OUT | ({"state_size": 4, "num_blocks": 1} if model_type == "s5" else {})
    training = TaskTraining(
        task, SMALL[task], model_type, config, 14, 4, weight_decay=0.1, eval_examples=8, evaluations=3
    )
    whole = train_task(training, tmp_path / "whole", save_steps=0)
    assert not (tmp_path / "whole" / "checkpoints").exists()
    stopped = train_task(training, tmp_path / "run", progress=signalled_at(3), resume="auto")
    assert stopped == {"interrupted": signal.SIGTERM, "step": 3}
    assert not (tmp_path / "run" / "task.json").exists()
    with pytest.raises(KeyboardInterrupt):
        train_task(training, tmp_path / "run", progress=interrupted_at(13), resume="auto", save_steps=2)
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == [
        "step-00000010",
        "step-00000012",
    ]
    torch.manual_seed(99)  # what another process has
    told = []
    result = train_task(training, tmp_path / "run", progress=lambda *args: told.append(args[0]), resume="newest")
    assert told == [13, 14]
    assert result["curve"] == whole["curve"]
    assert same_weights(tmp_path / "run", tmp_path / "whole")
    lines = [json.loads(line) for line in (tmp_path / "run" / "curve.jsonl").read_text().splitlines()]
    assert lines == result["curve"] == json.loads((tmp_path / "run" / "task.json").read_text())["curve"]


def test_the_command_goes_on(tmp_path, capsys, monkeypatch):
    flags = ["train", "--task", "induction_heads", "--task-args", "length=8,vocab_size=6", "--hidden-size", "8"]
    flags += ["--batch-size", "2", "--eval-examples", "2", "--output-dir", str(tmp_path / "run"), "--cpu"]
    seen, step = [], tasks_train._step

    def signalled(training, run):
        if len(seen) == 4:
            os.kill(os.getpid(), seen[0])
        seen.append(run.progress.step)
        return step(training, run)

    monkeypatch.setattr(tasks_train, "_step", signalled)
    for number, status in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
        seen[:] = [number] * 4
        assert cli.main([*flags, "--max-steps", "9", "--resume", "auto"]) == status
    assert "stopped after step 2: the same command with --resume goes on" in capsys.readouterr().out
    assert cli.main([*flags, "--max-steps", "9"]) == 2
    assert "continue it by --resume" in capsys.readouterr().err
    assert cli.main([*flags, "--max-steps", "2", "--resume"]) == 2
    assert "--max-steps must be above 2" in capsys.readouterr().err
    assert cli.main([*flags, "--max-steps", "9", "--seed", "1", "--resume"]) == 2
    assert "was written with seed 0, now: 1" in capsys.readouterr().err
    assert cli.main([*flags, "--max-steps", "9", "--resume"]) == 0
    assert capsys.readouterr().out.startswith("going on from step 2\n")
    assert cli.main([*flags, "--max-steps", "8", "--resume"]) == 2
    assert "--max-steps must be above 9" in capsys.readouterr().err
    state = tmp_path / "run" / "checkpoints" / "step-00000009" / "state.bin"
    size = state.stat().st_size
    state.write_bytes(b"x" * size)
    assert cli.main([*flags, "--max-steps", "10", "--resume"]) == 2
    assert "--resume: " in (said := capsys.readouterr().err) and "cannot be read" in said
    assert json.loads((tmp_path / "run" / "task.json").read_text())["curve"][-1]["step"] == 9


@pytest.mark.parametrize("save_steps", [0, 2])
def test_a_finished_training_is_not_done_again(tmp_path, save_steps):
    training = TaskTraining("listops", SMALL["listops"], max_steps=3, batch_size=2, eval_examples=2)
    whole = train_task(training, tmp_path / "run", resume="auto", save_steps=save_steps)
    weights = (tmp_path / "run" / "model.safetensors").stat().st_mtime_ns
    for resume in ("auto", "newest"):
        result = train_task(training, tmp_path / "run", progress=interrupted_at(3), resume=resume)
        assert result == json.loads(json.dumps(whole))
    assert (tmp_path / "run" / "model.safetensors").stat().st_mtime_ns == weights
    longer = dataclasses.replace(training, max_steps=5)
    if save_steps:
        resumed = []
        result = train_task(longer, tmp_path / "run", resume="newest", resumed=resumed.append)
        assert resumed == [3] and [row["step"] for row in result["curve"]] == [1, 2, 3, 4, 5]
        assert result["curve"][:3] == whole["curve"]
    else:
        with pytest.raises(FileNotFoundError, match="--resume: there is no whole checkpoint in"):
            train_task(longer, tmp_path / "run", resume="newest")


def test_a_training_that_has_come_to_its_end_goes_on(tmp_path):
    """Its learning rate had come to 0; the first of the further steps has one of its own."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1}
    training = TaskTraining("listops", SMALL["listops"], None, sizes, 4, 2, eval_examples=2, evaluations=2)
    train_task(training, tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "longer")
    longer = train_task(dataclasses.replace(training, max_steps=5), tmp_path / "longer", resume="newest")
    assert [row["step"] for row in longer["curve"]] == [2, 4, 5]
    assert not same_weights(tmp_path / "run", tmp_path / "longer")


def test_a_training_that_was_killed_behind_its_last_checkpoint_ends(tmp_path):
    training = TaskTraining("listops", SMALL["listops"], max_steps=3, batch_size=2, eval_examples=2)
    whole = train_task(training, tmp_path / "run")
    for file in ("task.json", "model.safetensors"):
        (tmp_path / "run" / file).unlink()
    result = train_task(training, tmp_path / "run", progress=interrupted_at(3), resume="newest")
    assert result["curve"] == whole["curve"] and (tmp_path / "run" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "run" / "task.json").read_text()) == result


def test_more_digits_than_there_are(small, capsys):
    flags = ["train", "--task", "digits", "--task-args", f"folder={small['digits']['folder']}"]
    for flag, value, most in (
        ("--batch-size", 401, "400, the digits of the train split"),
        ("--eval-examples", 51, "50, "),
    ):
        assert cli.main([*flags, "--eval-examples", "50", flag, str(value)]) == 2
        said = capsys.readouterr().err
        assert f"{flag} must be at most {most}" in said and said.endswith(f"got {value}\n")


@pytest.mark.parametrize("steps, at", [(19, [2, 4, 6, 8, 10, 12, 14, 16, 18, 19]), (3, [1, 2, 3])])
def test_a_metric_is_measured_as_often_as_is_said(steps, at):
    training = TaskTraining("listops", SMALL["listops"], None, {"hidden_size": 8}, steps, 2, eval_examples=2)
    assert [row["step"] for row in train_task(training)["curve"]] == at


def test_digits_that_were_divided_otherwise(small, tmp_path):
    """Where an older version has written the run, or train files have been added."""
    config = {"hidden_size": 8, "num_hidden_layers": 1, "state_size": 4, "num_blocks": 1}
    training = TaskTraining("digits", small["digits"], None, config, 2, 2, eval_examples=2)
    assert train_task(training, tmp_path / "run")["division"] == "mixed"
    for file in (tmp_path / "run").glob("**/*.json"):
        content = json.loads(file.read_text())
        (content.get("settings") or content).pop("division", None)
        file.write_text(json.dumps(content, indent=2) + "\n")
    (tmp_path / "run" / "checkpoints" / "step-00000002" / "files.json").unlink()
    for max_steps in (2, 3):
        with pytest.raises(ValueError, match="was trained on other digits of .*--overwrite begins anew"):
            train_task(dataclasses.replace(training, max_steps=max_steps), tmp_path / "run", resume="newest")
    write_digits(tmp_path / "digits", "train", 24)
    assert train_task(training, tmp_path / "run", resume="newest")["curve"][-1]["step"] == 2
    assert training.division is None


@pytest.mark.parametrize("option, value", [("keep_checkpoints", 0), ("keep_checkpoints", -1), ("save_steps", -1)])
def test_checkpoints_that_cannot_be_kept(option, value, tmp_path):
    training = TaskTraining("listops", SMALL["listops"], max_steps=2, batch_size=2, eval_examples=2)
    with pytest.raises(ValueError, match=f"{option} must be at least [01], got {value}"):
        train_task(training, tmp_path / "run", **{option: value})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("setting", ["max_steps", "batch_size", "eval_examples", "evaluations"])
def test_settings_of_nothing(setting):
    with pytest.raises(ValueError, match=f"{setting} must be at least 1, got 0"):
        TaskTraining("listops", SMALL["listops"], **{setting: 0})


def test_an_earlier_run_stays_until_another_has_saved(tmp_path):
    training = TaskTraining("listops", SMALL["listops"], max_steps=2, batch_size=2, eval_examples=2)
    train_task(training, tmp_path / "run")
    before = (tmp_path / "run" / "task.json").read_text()
    with pytest.raises(KeyboardInterrupt), pytest.warns(UserWarning, match="metrics are in .*run.failed-1"):
        train_task(training, tmp_path / "run", progress=interrupted_at(1), overwrite=True)
    assert (tmp_path / "run" / "task.json").read_text() == before
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.failed-1"}
    (tmp_path / "run" / "task-settings.json").rename(tmp_path / "run" / "train.yaml")  # as if it were another kind's
    with pytest.raises(FileExistsError, match="not written by hf-recurrent train --task: choose another"):
        train_task(training, tmp_path / "run", overwrite=True)
    with pytest.raises(ValueError, match="--resume needs --output-dir"):
        train_task(training, resume="auto")


@pytest.mark.parametrize(
    "flags, message",
    [
        *(
            (["--task", "listops", f"{flag}={value}"], f"{flag}: must be ")
            for flag, values in {
                "--learning-rate": ("0", "0.0", "-0.0", "-1e-3", "nan", "inf", "1e999"),
                "--weight-decay": ("-0.1", "nan", "inf"),
            }.items()
            for value in values
        ),
        (["--task", "listops", "--learning-rate", "fast"], "--learning-rate: invalid float value: 'fast'"),
        (["--task", "listops", "--max-steps", "0"], "--max-steps: must be at least 1"),
        (["--task", "listops", "--seed", "-1"], "--seed"),
        (["--task", "listop"], "--task listop: cannot be trained on here; the nearest valid one is listops"),
        (["--task", "nosuch"], "cannot be trained on here; expected one of selective_copying, associative_recall, "),
        (
            ["--task", "listops", "--model-type", "x"],
            "--model-type x: no such family; expected one of gateloop, longhorn",
        ),
        (["--task", "pendulum", "--model-type", "mingru"], "--model-type mingru: pendulum is read as numbers"),
        (["--task", "pendulum", "--config-overrides", "input_size=3"], "input_size is not a field"),
        (
            ["--task", "tones", "--task-args", "rate=3000"],
            "rate / decimation must be at least 2400 for tones up to 1200 Hz, got 1500, at half the rate, at which",
        ),
        (["--task", "tones", "--task-args", "rate=2000"], "for tones up to 1200 Hz, got 2000\n"),
        (["--task", "listops", "--model-type", "mamba"], "--model-type mamba: is compared on selective_copying, "),
        (["--task", "memory_horizon", "--model-type", "mambo"], "no such family; the nearest valid one is mamba"),
        (["--task", "listops", "--task-args", "depth=3"], "listops has no argument 'depth'"),
        (["--task", "listops", "--task-args", "shortest"], "--task-args: expected key=value"),
        (["--task", "listops", "--task-args", "longest=9, longest=8"], "--task-args: longest is given twice"),
        (["--task", "listops", "--config-overrides", "vocab_size=3"], "vocab_size is not a field"),
        (["--task", "listops", "--config-overrides", "hidden_size=3"], "hidden_size has a flag of its own"),
        (["--task", "listops", "--max-steps", "0"], "--max-steps: must be at least 1, got 0"),
        (["--task", "listops", "--steps", "3"], "unknown flag --steps"),
        (["--task", "listops", "--overwrite", "--resume"], "--overwrite and --resume cannot both be given"),
        (["--task", "listops", "--resume", "auto"], "--resume needs --output-dir"),
    ],
)
def test_bad_flags(flags, message, capsys):
    assert cli.main(["train", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_launcher_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", "--task", "listops"]) == 2
    assert "--task trains in one process, got 2 of a launcher" in capsys.readouterr().err
