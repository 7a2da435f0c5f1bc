"""What folders hold: runs on tasks and on text, perplexities by position, lm-eval's results."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import yaml

from ..files import UNFINISHED
from ..messages import first_line
from ..tasks import defaults
from ..tasks.checkpoints import SETTINGS
from ..tasks.settings import PEERS, TRAINABLE, metric_of
from ..training.curves import short_names
from ..training.folder import ARGUMENTS, METRICS, WEIGHTS, RunFolder
from ..training.model import families

TASK, PERPLEXITY, LM_EVAL = "task.json", "perplexity.json", "lm-eval.json"
MARKS = (TASK, SETTINGS, ARGUMENTS, METRICS, PERPLEXITY, LM_EVAL)
LARGEST = 1 << 26  # bytes of a file of results
LARGEST_NUMBER = 10**18  # no step, size or measurement comes near; what lies far beyond overflows in a table or picture
LEAST_PERPLEXITY = 0.99  # it is 1 at the least, but for rounding
# Of task.json, what every version has written; of numbers the kind and the least.
FIELDS = {"task": str, "sizes": dict, "model_type": str, "config": dict, "curve": list}
NUMBERS = {
    "max_steps": (int, 1), "batch_size": (int, 1), "eval_examples": (int, 1), "seed": (int, 0), "parameters": (int, 1),
    "learning_rate": ((int, float), 0), "weight_decay": ((int, float), 0),
}  # fmt: skip

# What makes two runs the same but for their seed, beside the sizes, the configuration and what they started from.
ALIKE = ("task", "model_type", "max_steps", "batch_size", "learning_rate", "weight_decay", "eval_examples")
DEFAULT_CONFIG = {"hidden_size": 64, "num_hidden_layers": 2}


class Unreadable(ValueError):
    """A file is not what its name says; the message is one line."""


@dataclass(eq=False)
class TaskRun:
    """A run of `hf-recurrent train --task`: `result` is its task.json, `earlier` the gathered run whose weights it
    began with."""

    folder: Path
    name: str
    result: dict
    earlier: "TaskRun | None" = None

    @property
    def metric(self) -> str:
        return metric_of(self.result["task"])

    @property
    def value(self) -> float:
        return self.result[self.metric]

    @property
    def chain(self) -> list["TaskRun"]:
        """The run, the one that it began with, the one that that began with, and so on."""
        found = [self]
        while found[-1].earlier is not None:
            found.append(found[-1].earlier)
        return found

    @property
    def start(self) -> str | None:
        """Whose weights it began with: the name of a gathered run, else the folder as it was given."""
        return _given(self) if self.earlier is None else self.earlier.name

    @cached_property
    def sizes(self) -> dict:
        """The arguments of the task's function, those that were not given too."""
        return defaults(self.result["task"]) | self.result["sizes"]

    @cached_property
    def config(self) -> dict:
        return DEFAULT_CONFIG | self.result["config"]

    @property
    def extended(self) -> list[dict]:
        """Where it went on with another number of steps: the "step", and the "max_steps" until then."""
        return self.result.get("extended", [])

    @property
    def training(self) -> str:
        """Equal for runs that differ in their seeds alone: their own, and those of the runs that they began with."""
        return _training(self.chain)

    def alike_but_for(self, quantity: str) -> str:
        """Equal for runs that differ in their seeds, and in this size or field alone, wherever it occurs."""
        return _training(self.chain, quantity)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.result["seed"] for run in self.chain)


def _training(chain: list[TaskRun], without: str | None = None) -> str:
    of_each = [
        [
            [*(run.result[name] for name in ALIKE), run.result.get("division"), run.extended],
            run.result["parameters"] if without is None else None,
            *({name: value for name, value in kind.items() if name != without} for kind in (run.sizes, run.config)),
        ]
        for run in chain
    ]
    return json.dumps([of_each, _given(chain[-1])], sort_keys=True)


def _given(run: TaskRun) -> str | None:
    start = run.result.get("start_from")
    return None if start is None else str(Path(start))


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
        name = _text_of(name)
        for mark, read in ((TASK, _task), (LM_EVAL, _evaluation), (PERPLEXITY, _perplexity), (METRICS, _text)):
            wanted = {METRICS: (METRICS, ARGUMENTS), TASK: (TASK, SETTINGS)}.get(mark, (mark,))
            if not any((folder / file).is_file() for file in wanted):
                continue
            try:
                read(runs, folder, name)
            except (Unreadable, OSError) as error:
                runs.passed_over.append((name, _text_of(first_line(error))))
    _link(runs.tasks)
    _drop_copies(runs)
    if runs.empty:
        told = "; ".join(f"{name}: {why}" for name, why in runs.passed_over[:3])
        raise ValueError(f"there is nothing to report: {told}")
    return runs


def _folders(path: Path) -> Iterator[Path]:
    for parent, inner, files in os.walk(path):
        inner[:] = sorted(name for name in inner if name != "checkpoints" and not name.startswith((".", UNFINISHED)))
        if any(mark in files for mark in MARKS):
            yield Path(parent)


def _text_of(name: str) -> str:
    """A file's name need not be text that a page can hold."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _link(found: list[TaskRun]) -> None:
    """Set `earlier` of each run, where that is among them."""
    by_folder = {run.folder.resolve(): run for run in found}
    for run in found:
        earlier = _earlier(run, by_folder)
        if earlier is not None and run not in earlier.chain:  # no run began with itself, whatever the files say
            run.earlier = earlier


def _earlier(run: TaskRun, by_folder: dict[Path, TaskRun]) -> TaskRun | None:
    """The run in the folder that `run` began with. Where none was gathered from there, as after copying, the one that
    the end of the path tells from all others, unless what lies there is another run."""
    if run.result.get("start_from") is None:
        return None
    start = Path(run.result["start_from"])
    try:
        if start.resolve() in by_folder:
            return by_folder[start.resolve()]
        original = (start / TASK).read_bytes() if (start / TASK).is_file() else None
    except (OSError, RuntimeError):  # a name that is too long, links in a circle
        return None
    others = [folder for folder, other in by_folder.items() if other is not run]
    for depth in range(1, len(start.parts) + 1):
        others = [folder for folder in others if folder.parts[-depth:] == start.parts[-depth:]]
        if len(others) == 1:
            copied = original in (None, (others[0] / TASK).read_bytes())
            return by_folder[others[0]] if copied else None
    return None


def _drop_copies(runs: Runs) -> None:
    """Move to `passed_over` what is the same as another run, seeds and all."""
    first: dict[tuple, TaskRun] = {}
    kept = {run: first.setdefault((run.training, run.seeds), run) for run in runs.tasks}
    for run, other in kept.items():
        if run is not other:
            why = f"the same training with the same seed as {other.name}, which counts once"
            runs.passed_over.append((run.name, why))
        run.earlier = kept.get(run.earlier)
    runs.tasks = list(first.values())


def _read(path: Path) -> dict:
    if path.stat().st_size > LARGEST:
        raise Unreadable(f"{path.name} is larger than {LARGEST >> 20} MiB")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(content, ensure_ascii=False).encode("utf-8")  # "\ud800" is no character, and in no page
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path.name} is not JSON ({first_line(error)})") from None
    if not isinstance(content, dict):
        raise Unreadable(f"{path.name} holds no object")
    return content


def is_number(value: object, kind: type | tuple = (int, float), least: float = -LARGEST_NUMBER) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and least <= value <= LARGEST_NUMBER


def _task(runs: Runs, folder: Path, name: str) -> None:
    if not (folder / TASK).is_file():
        raise Unreadable("its training has not finished: the same command with --resume goes on")
    result = _read(folder / TASK)
    for key, kind in FIELDS.items():
        if not isinstance(result.get(key), kind):
            raise Unreadable(f"{TASK} has no {key} as `hf-recurrent train --task` writes it")
    for key, (kind, least) in NUMBERS.items():
        if not is_number(result.get(key), kind, least):
            raise Unreadable(f"{TASK} has no {key} that is {'an integer' if kind is int else 'a number'} from {least}")
    start = result.get("start_from")
    if start is not None and not (isinstance(start, str) and start and "\0" not in start):
        raise Unreadable(f"{TASK} has a start_from that is no path")
    extended = result.get("extended", [])
    whole = isinstance(extended, list) and all(isinstance(part, dict) for part in extended)
    if not whole or not all(is_number(part.get(key), int, 1) for part in extended for key in ("step", "max_steps")):
        raise Unreadable(f"{TASK} does not say at which steps it was extended")
    if not isinstance(result.get("division"), str | None):
        raise Unreadable(f"{TASK} has a division that is no name")
    if result["task"] not in TRAINABLE:
        raise Unreadable(f"{TASK} is of no task that is known here: {result['task']}")
    if result["model_type"] not in families() | PEERS:
        raise Unreadable(f"{TASK} is of no family that is known here: {result['model_type']}")
    _check_sizes(result)
    _check_measured(result)
    runs.tasks.append(TaskRun(folder, name, result))


def _check_sizes(result: dict) -> None:
    """
    Raises:
        Unreadable: one is not of the kind of its default.
    """
    usual = defaults(result["task"])
    for name, value in result["sizes"].items():
        if not is_number(value) and (is_number(usual.get(name)) or not (value is None or isinstance(value, str))):
            raise Unreadable(f"{TASK} has a {name} among the sizes that is no number")


def _check_measured(result: dict) -> None:
    """
    Raises:
        Unreadable: the metric is missing or impossible, of the whole training or of a point of the curve.
    """
    metric, points = metric_of(result["task"]), result["curve"]
    if result.get("metric", "accuracy") != metric:  # the first versions had this one alone, and did not write it
        raise Unreadable(f"{TASK} has another metric than the task's, {metric}")
    highest = 1 if metric == "accuracy" else LARGEST_NUMBER
    if not all(isinstance(p, dict) and is_number(p.get(metric), least=0) for p in (result, *points)):
        raise Unreadable(f"{TASK} has no result that is a finite number")
    if any(point[metric] > highest for point in (result, *points)):
        raise Unreadable(f"{TASK} has an {metric} above {highest}")
    if not all(is_number(point.get("step"), least=0) for point in points):
        raise Unreadable(f"{TASK} has a curve without steps")
    if not all(is_number(point.get("loss", 0)) for point in points):
        raise Unreadable(f"{TASK} has a loss that is no finite number")


def _text(runs: Runs, folder: Path, name: str) -> None:
    try:
        read = RunFolder(str(folder)).metrics()
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{METRICS} is not lines of JSON ({first_line(error)})") from None
    # What is no number in a line is left out, as half a line is.
    lines = [{name: value for name, value in line.items() if is_number(value)} for line in read if type(line) is dict]
    metrics = [line for line in lines if "step" in line]
    if not metrics:
        raise Unreadable(f"its training has no {METRICS} yet")
    settings = {}
    if (folder / ARGUMENTS).is_file():
        try:
            settings = yaml.safe_load((folder / ARGUMENTS).read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise Unreadable(f"{ARGUMENTS} is not YAML ({first_line(error)})") from None
        if not isinstance(settings, dict):
            raise Unreadable(f"{ARGUMENTS} holds no settings")
        model_type = settings.get("model_type")
        if model_type is not None and not (isinstance(model_type, str) and model_type.isprintable()):
            raise Unreadable(f"{ARGUMENTS} has a model_type that is no name")
    finished = any(folder.glob(WEIGHTS.replace(".", "*.")))
    runs.texts.append(TextRun(folder, name, settings, metrics, finished))


def _perplexity(runs: Runs, folder: Path, name: str) -> None:
    result = _read(folder / PERPLEXITY)
    rows, length = result.get("by_position"), result.get("sequence_length")
    whole = isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)
    whole = whole and all(is_number(row.get(key), least=0) for row in rows for key in ("from", "to"))
    if whole and any(_is_beyond_tables(one.get("perplexity", 0)) for one in (result, *rows)):
        raise Unreadable(f"{PERPLEXITY} has a perplexity above {LARGEST_NUMBER:.0e}: the model has diverged")
    whole = whole and all(is_number(one.get("perplexity"), least=LEAST_PERPLEXITY) for one in (result, *rows))
    if not whole or not (length is None or is_number(length, least=1)):
        raise Unreadable(f"{PERPLEXITY} is not what `hf-recurrent evaluate perplexity` writes")
    runs.perplexities.append(Measured(folder, name, result))


def _is_beyond_tables(perplexity: object) -> bool:
    """None is written where no float holds it."""
    return perplexity is None or isinstance(perplexity, int | float) and perplexity > LARGEST_NUMBER


def _evaluation(runs: Runs, folder: Path, name: str) -> None:
    result = _read(folder / LM_EVAL)
    tables, shots = [result.get("results"), result.get("configs")], result.get("n-shot")
    whole = all(isinstance(table, dict) and all(isinstance(row, dict) for row in table.values()) for table in tables)
    if not whole or not isinstance(shots, dict | None):
        raise Unreadable(f"{LM_EVAL} is not the results of lm-eval")
    numbers = [value for row in tables[0].values() for value in row.values() if isinstance(value, int)]
    if any(abs(value) > LARGEST_NUMBER for value in numbers):
        raise Unreadable(f"{LM_EVAL} has a number above {LARGEST_NUMBER}")
    runs.evaluations.append(Measured(folder, name, result))
