"""Checkpoints of a run on a task, from which it goes on as if it had not stopped."""

import dataclasses
import json

import numpy as np
import torch
from transformers import PreTrainedModel

from ..training.checkpoints import compare_versions, reading, restored, versions
from ..training.folder import RunFolder
from .settings import TaskTraining

SETTINGS, CURVE = "task-settings.json", "curve.jsonl"
TENSORS, STATE = "state.bin", "state.json"
FORMAT = 1
FREE = ("max_steps",)  # of the settings, what may differ between a checkpoint and the run that goes on from it


class TaskFolder(RunFolder):
    """The folder of a run on a task: the model's files, `task.json`, `task-settings.json`, `curve.jsonl`,
    `checkpoints/`."""

    mark, lines, command = SETTINGS, CURVE, "hf-recurrent train --task"


@dataclasses.dataclass
class Progress:
    """Where a run is, beside its tensors.

    Args:
        step: optimiser steps taken.
        seconds: time spent, interruptions not counted.
        curve: what was measured.
        losses: of the steps since then.
        extended: where it went on with another number of steps: the "step", and the "max_steps" until then.
    """

    step: int = 0
    seconds: float = 0.0
    curve: list[dict] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    extended: list[dict] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Trained:
    """All that a step changes."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    examples: np.random.Generator
    progress: Progress = dataclasses.field(default_factory=Progress)


def settings(training: TaskTraining) -> dict:
    """What a run is: its arguments, and how the files that it reads are divided."""
    return {**vars(training), "division": training.division}


def settings_text(training: TaskTraining) -> str:
    """The settings of a run, as its folder has them."""
    return json.dumps(settings(training), indent=2) + "\n"


def save(folder: TaskFolder, training: TaskTraining, run: Trained, keep: int) -> None:
    """Save a checkpoint, whole or not at all, and remove all but the newest `keep`.

    Raises:
        OSError: it cannot be written; earlier ones are untouched.
    """
    tensors = {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "schedule": run.schedule.state_dict(),
        "random": torch.get_rng_state(),
    }
    if run.model.device.type == "cuda":
        tensors["random_cuda"] = torch.cuda.get_rng_state(run.model.device)
    state = {"format": FORMAT, "versions": versions(), "settings": settings(training)}
    state |= {"progress": vars(run.progress), "examples": run.examples.bit_generator.state}
    with folder.new_checkpoint(run.progress.step, keep) as temporary:
        torch.save(tensors, temporary / TENSORS)
        (temporary / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def load(folder: TaskFolder, training: TaskTraining, run: Trained) -> None:
    """Bring a run to where the folder's newest whole checkpoint is, torch's random numbers included.

    Raises:
        ValueError: the checkpoint is of another run, or cannot be read; `max_steps` lie behind it.
    """
    checkpoint = folder.newest_checkpoint()
    with reading(checkpoint):
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        then, saved_format = dict(state["settings"]), state["format"]
    if saved_format != FORMAT:
        raise ValueError(f"--resume: {checkpoint} has format {saved_format}, expected {FORMAT}")
    now = json.loads(settings_text(training))
    if then.get("division") != now["division"]:
        raise ValueError(
            f"--resume: {checkpoint} was trained on other digits of {training.sizes['folder']} than it would be now: "
            "divided in the file's order, or with train files that have come or gone; --overwrite begins anew"
        )
    for name in {**then, **now}:
        if name not in FREE and then.get(name) != now.get(name):
            raise ValueError(f"--resume: {checkpoint} was written with {name} {then.get(name)}, now: {now.get(name)}")
    with reading(checkpoint):
        compare_versions(state["versions"], checkpoint)
        run.progress = restored(Progress, state["progress"])
        run.examples.bit_generator.state = state["examples"]
        tensors = torch.load(checkpoint / TENSORS, map_location="cpu", weights_only=True)
        run.model.load_state_dict(tensors["model"])
        run.optimizer.load_state_dict(tensors["optimizer"])
        run.schedule.load_state_dict(tensors["schedule"])
        torch.set_rng_state(tensors["random"])
        if run.model.device.type == "cuda" and "random_cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random_cuda"], run.model.device)
        # By the schedule of these steps: that of fewer may have come to 0.
        rates = zip(run.optimizer.param_groups, run.schedule.base_lrs, run.schedule.lr_lambdas, strict=True)
        for group, highest, ratio in rates:
            group["lr"] = highest * ratio(run.progress.step)
    # A run that was killed behind its last checkpoint has no more steps to take, and ends.
    if run.progress.step > training.max_steps or run.progress.step == training.max_steps != then.get("max_steps"):
        raise ValueError(
            f"--max-steps must be above {run.progress.step}, where {checkpoint} is, got {training.max_steps}"
        )
    if training.max_steps != then.get("max_steps"):
        run.progress.extended.append({"step": run.progress.step, "max_steps": then.get("max_steps")})
