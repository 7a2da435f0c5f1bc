"""Training on a generated task: fresh examples at every step, and how good the answers are on others."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup

from ..files import write_whole
from ..malloc import keep_freed_memory
from ..measure import machine
from ..training.signals import interrupts
from . import TASKS, generate
from .checkpoints import TaskFolder, Trained, load, save, settings, settings_text
from .measures import answers, at_half_rate, measure, tensors
from .settings import TaskTraining

RESULT = "task.json"


def _groups(model: PreTrainedModel, training: TaskTraining) -> list[dict]:
    if hasattr(model, "parameter_groups"):
        return model.parameter_groups(training.learning_rate, training.weight_decay)
    parameters = list(model.parameters())  # a peer's: matrices decay, as ours do
    return [
        {"params": [p for p in parameters if (p.ndim >= 2) is matrices], "lr": training.learning_rate, **decay}
        for matrices, decay in ((True, {"weight_decay": training.weight_decay}), (False, {"weight_decay": 0.0}))
    ]


def train_task(
    training: TaskTraining,
    output: str | Path | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, float, float | None], None] = lambda step, loss, accuracy: None,
    *,
    resumed: Callable[[int], None] = lambda step: None,
    resume: str | None = None,
    overwrite: bool = False,
    save_steps: int = 1000,
    keep_checkpoints: int = 2,
) -> dict:
    """
    Trains a new model, or goes on with an interrupted training, to the same bits as if it had not been interrupted; or
    with one that has come to its end, for more steps.

    With `output`, SIGINT and SIGTERM end the training after the current step: a checkpoint and the model are saved.

    Args:
        output: a folder for the model, task.json (what is returned), curve.jsonl (what was measured so far) and
            checkpoints.
        progress: is told each step's number and loss, and the metric where it was measured.
        resumed: is told the step that a training goes on from, before its first one.
        resume: "newest" goes on from the newest whole checkpoint in `output`; "auto" too, and begins anew where there
            is none. Where the same training has come to its end, that is returned, and nothing is done again. With more
            `max_steps` it goes on: its curve keeps what was measured before, and the learning rate is that of the new
            number from there on.
        overwrite: replace an earlier run in `output`, as soon as this one has saved.
        save_steps: between checkpoints, of which the end has one too; 0 for none, except after an interruption.
        keep_checkpoints: the newest ones, which are kept.

    Returns:
        The training's arguments and `division`, "parameters", "metric": its name, under which the last one is, "curve":
        for each measurement step, loss (the mean since the one before) and metric; of tones also "half_rate", as
        `at_half_rate` says; where it went on with another number of steps "extended", a list of the "step" and the
        "max_steps" until then; "seconds", of all of it, "device" and "machine". After a signal instead "interrupted",
        its number, and "step", after which it ended.

    Raises:
        ValueError: what `TaskTraining.create_model` raises; `save_steps` below 0 or `keep_checkpoints` below 1; a
            checkpoint that is of another run or cannot be read.
        OSError: a folder that cannot be used, that another run uses, or that holds an earlier run; what was saved
            before is untouched.
        FloatingPointError: the loss or its gradient is not finite.
    """
    for name, value, least in (("save_steps", save_steps, 0), ("keep_checkpoints", keep_checkpoints, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    folder = None if output is None else TaskFolder(str(output))
    if folder is None and resume:
        raise ValueError("--resume needs --output-dir, where the checkpoints are")
    if resume and (result := _finished(folder, training)) is not None:
        return result
    options = {"resumed": resumed, "resume": resume, "overwrite": overwrite}
    options |= {"save_steps": save_steps, "keep_checkpoints": keep_checkpoints}
    if folder is None:
        return _train(training, folder, device, progress, **options)
    folder.lock()
    try:
        return _train(training, folder, device, progress, **options)
    finally:
        folder.unlock()


def _train(
    training: TaskTraining,
    folder: TaskFolder | None,
    device: torch.device | str,
    progress: Callable[[int, float, float | None], None],
    *,
    resumed: Callable[[int], None],
    resume: str | None,
    overwrite: bool,
    save_steps: int,
    keep_checkpoints: int,
) -> dict:
    """What `train_task` does, in a folder that no other run uses."""
    if folder is not None:
        folder.check(overwrite=overwrite, resume=resume)
    goes_on = bool(resume) and folder.newest_checkpoint() is not None
    # A checkpoint has all weights, so that the earlier run need not be there any more.
    run = _begin(dataclasses.replace(training, start_from=None) if goes_on else training, device)
    if goes_on:
        load(folder, training, run)
        resumed(run.progress.step)
    before, started = run.progress.seconds, time.perf_counter()
    held_out = generate(training.task, training.eval_examples, training.seed, "validation", **training.sizes)

    def to_save(stopped: int) -> bool:
        step = run.progress.step
        return bool(stopped or (save_steps and (step % save_steps == 0 or step == training.max_steps)))

    with _opened(folder, training, run.progress.step) as interrupted:
        stopped = 0
        while run.progress.step < training.max_steps and not stopped:
            loss, measured = _step(training, run), None
            step = run.progress.step
            if step * training.evaluations % training.max_steps < training.evaluations:
                measured = measure(run.model, held_out, training.batch_size)
                line = {"step": step, "loss": float(np.mean(run.progress.losses)), training.metric: measured}
                run.progress.curve.append(line)
                run.progress.losses = []
                if folder is not None:
                    folder.log(line)
            progress(step, loss, measured)
            run.progress.seconds = before + time.perf_counter() - started
            stopped = interrupted() if step < training.max_steps else 0
            if folder is not None and to_save(stopped):
                save(folder, training, run, keep_checkpoints)
        result = {"interrupted": stopped, "step": run.progress.step} if stopped else _result(training, run, device)
        if folder is not None:
            _publish(folder, training, run.model, None if stopped else result)
    return result


def _finished(folder: TaskFolder, training: TaskTraining) -> dict | None:
    """What `folder` holds of the same training, if that has come to its end."""
    try:
        result = json.loads((folder.path / RESULT).read_text(encoding="utf-8"))
        wanted = json.loads(settings_text(training))
        return result if {name: result.get(name) for name in wanted} == wanted else None
    except (OSError, ValueError, AttributeError):  # there is none, or not whole
        return None


def _begin(training: TaskTraining, device: torch.device | str) -> Trained:
    model = training.create_model().to(device).train()
    if model.device.type == "cpu":
        keep_freed_memory()
    optimizer = torch.optim.AdamW(_groups(model, training))
    schedule = get_cosine_schedule_with_warmup(optimizer, max(1, training.max_steps // 10), training.max_steps)
    return Trained(model, optimizer, schedule, np.random.default_rng([training.seed, 0]))


@contextlib.contextmanager
def _opened(folder: TaskFolder | None, training: TaskTraining, step: int):
    """The folder ready for a run that is at `step`. Yields a function that gives the number of a signal, or 0."""
    if folder is None:
        yield lambda: 0
        return
    try:
        if step:
            folder.reopen(step)
            write_whole(folder.path / folder.mark, settings_text(training))
        else:
            folder.open(settings_text(training))
        with interrupts() as interrupted:
            yield interrupted
    finally:
        folder.close()


def _step(training: TaskTraining, run: Trained) -> float:
    """One optimiser step; its loss."""
    arrays = TASKS[training.task](run.examples, training.batch_size, **training.sizes)
    loss, _, _ = answers(run.model, tensors(arrays, slice(None), run.model.device))
    run.optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    value, step = loss.item(), run.progress.step + 1
    if not (loss.isfinite() and norm.isfinite()):
        raise FloatingPointError(
            f"the loss is {value} and its gradient's norm {norm.item()} at step {step}: try a smaller --learning-rate"
        )
    run.optimizer.step()
    run.schedule.step()
    run.progress.step = step
    run.progress.losses.append(value)
    return value


def _result(training: TaskTraining, run: Trained, device: torch.device | str) -> dict:
    """What is known of a finished run: task.json."""
    return {
        **settings(training),
        "parameters": run.model.num_parameters(),
        "metric": training.metric,
        training.metric: run.progress.curve[-1][training.metric],
        "curve": run.progress.curve,
        **({"extended": run.progress.extended} if run.progress.extended else {}),
        **({"half_rate": at_half_rate(run.model, training)} if training.task == "tones" else {}),
        "seconds": round(run.progress.seconds, 3),
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu",
        "machine": machine(("torch", "transformers")),
    }


def _publish(folder: TaskFolder, training: TaskTraining, model: PreTrainedModel, result: dict | None) -> None:
    """Put the model into its folder, and `result`; without one, no earlier result stays beside another model."""
    with folder.publish() as temporary:
        model.eval().save_pretrained(temporary)
        if result is not None:
            (temporary / RESULT).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if result is None:
        (folder.path / RESULT).unlink(missing_ok=True)
    folder.kept()
