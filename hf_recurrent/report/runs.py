"""What folders hold: runs on tasks and on text, perplexities by position, lm-eval's results."""

import inspect
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from ..files import UNFINISHED
from ..messages import first_line
from ..tasks import TASKS
from ..tasks.checkpoints import SETTINGS
from ..tasks.settings import PEERS, TRAINABLE
from ..training.curves import short_names
from ..training.folder import ARGUMENTS, METRICS, WEIGHTS, RunFolder
from ..training.model import families

TASK, PERPLEXITY, LM_EVAL = "task.json", "perplexity.json", "lm-eval.json"
MARKS = (TASK, SETTINGS, ARGUMENTS, METRICS, PERPLEXITY, LM_EVAL)
LARGEST = 1 << 26  # bytes of a file of results
# Of task.json, what every version has written.
FIELDS = {
    "task": str, "sizes": dict, "model_type": str, "config": dict, "max_steps": int, "batch_size": int,
    "learning_rate": (int, float), "weight_decay": (int, float), "eval_examples": int, "seed": int, "parameters": int,
    "curve": list,
}  # fmt: skip

# What makes two runs the same but for their seed, beside the sizes, the configuration and what they started from.
ALIKE = ("task", "model_type", "max_steps", "batch_size", "learning_rate", "weight_decay", "eval_examples")
DEFAULT_CONFIG = {"hidden_size": 64, "num_hidden_layers": 2}


class Unreadable(ValueError):
    """A file is not what its name says; the message is one line."""


@dataclass
class TaskRun:
    """A run of `hf-recurrent train --task`: `result` is its task.json."""

    folder: Path
    name: str
    result: dict

    @property
    def metric(self) -> str:
        return self.result["metric"]

    @property
    def value(self) -> float:
        return self.result[self.metric]

    @property
    def start(self) -> str | None:
        """The name of the earlier run whose weights it began with."""
        start = self.result.get("start_from")
        return Path(start).name if isinstance(start, str) else None

    @property
    def sizes(self) -> dict:
        """The arguments of the task's function, those that were not given too."""
        arguments = list(inspect.signature(TASKS[self.result["task"]]).parameters.values())[2:]
        return {argument.name: argument.default for argument in arguments} | self.result["sizes"]

    @property
    def config(self) -> dict:
        return DEFAULT_CONFIG | self.result["config"]

    @property
    def training(self) -> str:
        """Equal for runs that differ in their seed alone."""
        settings = [*(self.result[name] for name in ALIKE), self.start, self.result["parameters"]]
        return json.dumps([settings, self.sizes, self.config], sort_keys=True)


@dataclass
class TextRun:
    """A run of `hf-recurrent train`: its settings and the lines of its metrics."""

    folder: Path
    name: str
    settings: dict
    metrics: list[dict]
    finished: bool


@dataclass
class Measured:
    """What `hf-recurrent evaluate` wrote."""

    folder: Path
    name: str
    result: dict


@dataclass
class Runs:
    tasks: list[TaskRun] = field(default_factory=list)
    texts: list[TextRun] = field(default_factory=list)
    perplexities: list[Measured] = field(default_factory=list)
    evaluations: list[Measured] = field(default_factory=list)
    passed_over: list[tuple[str, str]] = field(default_factory=list)  # folder, why

    @property
    def empty(self) -> bool:
        return not (self.tasks or self.texts or self.perplexities or self.evaluations)


def gather(paths: Iterable[str | Path]) -> Runs:
    """
    Reads runs. What cannot be used is named in `passed_over`, with the reason.

    Args:
        paths: folders of runs, or folders in which runs lie at any depth; checkpoints are left out.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: there is nothing to report in any of them.
    """
    runs, folders = Runs(), []
    for path in map(Path, paths):
        if not path.is_dir():
            raise FileNotFoundError(f"{path}: no such folder")
        found = list(_folders(path))
        folders += found
        if not found:
            runs.passed_over.append((str(path), f"holds no run: none of {', '.join(MARKS)}"))
    folders = list({folder.resolve(): folder for folder in folders}.values())
    for folder, name in short_names(folders).items():
        for mark, read in ((TASK, _task), (LM_EVAL, _evaluation), (PERPLEXITY, _perplexity), (METRICS, _text)):
            wanted = {METRICS: (METRICS, ARGUMENTS), TASK: (TASK, SETTINGS)}.get(mark, (mark,))
            if not any((folder / file).is_file() for file in wanted):
                continue
            try:
                read(runs, folder, name)
            except (Unreadable, OSError) as error:
                runs.passed_over.append((name, first_line(error)))
    if runs.empty:
        told = "; ".join(f"{name}: {why}" for name, why in runs.passed_over[:3])
        raise ValueError(f"there is nothing to report: {told}")
    return runs


def _folders(path: Path) -> Iterator[Path]:
    for parent, inner, files in os.walk(path):
        inner[:] = sorted(name for name in inner if name != "checkpoints" and not name.startswith((".", UNFINISHED)))
        if any(mark in files for mark in MARKS):
            yield Path(parent)


def _read(path: Path) -> dict:
    if path.stat().st_size > LARGEST:
        raise Unreadable(f"{path.name} is larger than {LARGEST >> 20} MiB")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path.name} is not JSON ({first_line(error)})") from None
    if not isinstance(content, dict):
        raise Unreadable(f"{path.name} holds no object")
    return content


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _task(runs: Runs, folder: Path, name: str) -> None:
    if not (folder / TASK).is_file():
        raise Unreadable("its training has not finished: the same command with --resume goes on")
    result = {"metric": "accuracy", **_read(folder / TASK)}
    for key, kind in FIELDS.items():
        if not isinstance(result.get(key), kind):
            raise Unreadable(f"{TASK} has no {key} as `hf-recurrent train --task` writes it")
    if result["task"] not in TRAINABLE:
        raise Unreadable(f"{TASK} is of no task that is known here: {result['task']}")
    if result["model_type"] not in families() | PEERS:
        raise Unreadable(f"{TASK} is of no family that is known here: {result['model_type']}")
    metric = result["metric"]
    points = [result, *result["curve"]]
    if metric not in ("accuracy", "mse") or not all(isinstance(p, dict) and is_number(p.get(metric)) for p in points):
        raise Unreadable(f"{TASK} has no result that is a finite number")
    if not all(is_number(p.get("step")) for p in result["curve"]):
        raise Unreadable(f"{TASK} has a curve without steps")
    run = TaskRun(folder, name, result)
    for other in runs.tasks:
        if (other.training, other.result["seed"]) == (run.training, result["seed"]):
            raise Unreadable(f"the same training with the same seed as {other.name}, which counts once")
    runs.tasks.append(run)


def _text(runs: Runs, folder: Path, name: str) -> None:
    metrics = [
        line for line in RunFolder(str(folder)).metrics() if isinstance(line, dict) and is_number(line.get("step"))
    ]
    if not metrics:
        raise Unreadable(f"its training has no {METRICS} yet")
    settings = {}
    if (folder / ARGUMENTS).is_file():
        try:
            settings = yaml.safe_load((folder / ARGUMENTS).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise Unreadable(f"{ARGUMENTS} is not YAML ({first_line(error)})") from None
        if not isinstance(settings, dict):
            raise Unreadable(f"{ARGUMENTS} holds no settings")
    finished = any(folder.glob(WEIGHTS.replace(".", "*.")))
    runs.texts.append(TextRun(folder, name, settings, metrics, finished))


def _perplexity(runs: Runs, folder: Path, name: str) -> None:
    result = _read(folder / PERPLEXITY)
    rows = result.get("by_position")
    keys = ("from", "to", "perplexity")
    whole = isinstance(rows, list) and rows and is_number(result.get("perplexity"))
    if not whole or not all(isinstance(row, dict) and all(is_number(row.get(key)) for key in keys) for row in rows):
        raise Unreadable(f"{PERPLEXITY} is not what `hf-recurrent evaluate perplexity` writes")
    runs.perplexities.append(Measured(folder, name, result))


def _evaluation(runs: Runs, folder: Path, name: str) -> None:
    result = _read(folder / LM_EVAL)
    tables = [result.get("results"), result.get("configs")]
    if not all(isinstance(table, dict) and all(isinstance(row, dict) for row in table.values()) for table in tables):
        raise Unreadable(f"{LM_EVAL} is not the results of lm-eval")
    runs.evaluations.append(Measured(folder, name, result))
