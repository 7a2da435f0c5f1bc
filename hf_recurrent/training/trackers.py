"""Metrics sent to the trackers that Accelerate knows: TensorBoard, Weights & Biases, Trackio and others."""

import uuid
import warnings
from pathlib import Path

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from ..files import write_whole
from ..messages import first_line, nearest
from .folder import TRACKERS

PACKAGES = {"comet_ml": "comet-ml"}  # where a tracker's package is not called as the tracker is


def check_names(names: list[str]) -> None:
    """
    Raises:
        ValueError: no such tracker.
    """
    for name in names:
        if name != "all" and name not in LOGGER_TYPE_TO_CLASS:
            raise ValueError(f"--log-with {name}: no such tracker{nearest(name, sorted(LOGGER_TYPE_TO_CLASS))}")


def check_trackers(names: list[str]) -> list[str]:
    """The trackers to use; for "all" those that are installed.

    Raises:
        ValueError: no such tracker, or its package is not installed.
    """
    check_names(names)
    installed = [str(name) for name in get_available_trackers()]
    for name in names:
        if name != "all" and name not in installed:
            raise ValueError(f"--log-with {name}: it is not installed: pip install {PACKAGES.get(name, name)}")
    if "all" not in names:
        return list(dict.fromkeys(names))
    if not installed:
        raise ValueError(f"--log-with all: none is installed of {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}")
    return sorted(installed)


def _identity(file: Path) -> str:
    """A name that no other run has, which a resumed one finds in the file again."""
    if not file.is_file():
        write_whole(file, uuid.uuid4().hex)
    return file.read_text(encoding="utf-8")


def start_trackers(accelerator: Accelerator, folder: Path, settings: dict, step: int) -> None:
    """Begin a run named as the folder is, with its settings; or, where W&B and Trackio have it already, go on with it.

    Args:
        folder: of the run.
        step: where it goes on from; what a killed run has sent of later steps is dropped where that is possible.

    Raises:
        ValueError: a tracker cannot be started (no network, no account).
    """
    # Trackio knows a run by its name alone, so that a new one must say that it is new.
    own = folder / TRACKERS
    options = {
        "tensorboard": {"purge_step": step + 1 if step else None},
        "wandb": {"name": folder.name, "dir": str(own), "resume": "allow"},
        "trackio": {"name": folder.name, "resume": "allow" if step else "never"},
    }
    names = [str(tracker) for tracker in accelerator.log_with]  # which are no strings
    if "wandb" in names and accelerator.is_main_process:
        own.mkdir(exist_ok=True)  # W&B would choose another place
        options["wandb"]["id"] = _identity(own / "wandb_id")
    simple = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in settings.items()}
    try:
        accelerator.init_trackers("hf_recurrent", simple, {name: options.get(name, {}) for name in names})
    except Exception as error:  # each tracker has its own kinds
        accelerator.trackers = []  # one that has not begun cannot be finished
        raise ValueError(f"--log-with: {', '.join(names)} cannot be started: {first_line(error)}") from error


def send(accelerator: Accelerator, values: dict, step: int) -> None:
    """Send metrics to every tracker. One that fails is left out from then on, with a warning: metrics.jsonl has them
    all, and a training does not end because a server far away does not answer."""
    for tracker in list(getattr(accelerator, "trackers", [])):
        try:
            tracker.log(values, step=step)
        except Exception as error:  # each tracker has its own kinds
            accelerator.trackers.remove(tracker)
            warnings.warn(
                f"--log-with {tracker.name}: gets nothing after step {step}: {first_line(error)}", stacklevel=2
            )


def finish_trackers(accelerator: Accelerator) -> None:
    """Warns of one that cannot be finished, which is no reason to call a training failed."""
    for tracker in getattr(accelerator, "trackers", []):
        try:
            tracker.finish()
        except Exception as error:  # each tracker has its own kinds
            warnings.warn(f"--log-with {tracker.name}: cannot be finished: {first_line(error)}", stacklevel=2)
