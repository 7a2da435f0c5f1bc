"""What a report says: its sections, from the runs that were gathered."""

import json
import math
import shlex
from dataclasses import dataclass
from statistics import mean, stdev

from .. import __version__
from ..evaluation.tables import PAPER_TASKS, paper_cells
from ..hub.card import NAMES
from ..messages import counted, first_line
from ..tasks.settings import metric_of
from ..training.curves import DEFAULT
from . import papers, pictures
from .page import Code, Picture, Section, Table
from .runs import Measured, Runs, TaskRun, TextRun, is_number

TITLES = {
    "selective_copying": "Selective copying",
    "associative_recall": "Associative recall (MQAR)",
    "memory_horizon": "Memory Horizon",
    "induction_heads": "Induction heads",
    "listops": "ListOps",
    "pendulum": "Pendulum, seen at irregular times",
    "tones": "Tones, at two sampling rates",
    "pathfinder": "Pathfinder",
    "digits": "Digits, pixel by pixel",
}
NOT_SHOWN = ("folder",)  # of a task's sizes: where its data lies
WORDS = {"num_hidden_layers": "layers", "hidden_size": "width"}
QUANTITIES = ("length", "pairs", "hidden_size", "num_hidden_layers")  # a metric is drawn against each that varies
SHOWN_PER_CENT = 2  # decimals
LEFT_OUT = {"weight_decay": 0.0, "seed": 0}  # of a command: defaults that go without saying
DEVIATIONS = (
    "Where there are several seeds, ± is the sample standard deviation over the seeds, which pictures show as bars; "
    "the papers' ± is as they give it."
)


def deviation(values: list[float]) -> float | None:
    """Of the sample; None for one value."""
    return stdev(values) if len(values) > 1 else None


@dataclass
class Group:
    """Runs that differ in their seed alone."""

    runs: list[TaskRun]

    @property
    def first(self) -> dict:
        return self.runs[0].result

    @property
    def mean(self) -> float:
        return mean(run.value for run in self.runs)

    @property
    def deviation(self) -> float | None:
        return deviation([run.value for run in self.runs])

    def quantity(self, name: str) -> float | None:
        """What a picture is drawn over: of the task, or of the model."""
        value = (self.runs[0].config | self.runs[0].sizes).get(name)
        return value if is_number(value) else None


def sections(runs: Runs, with_papers: bool = False) -> list[Section]:
    """
    Args:
        with_papers: also list the papers' figures that no run stands beside.
    """
    tasks = [task for task in TITLES if any(run.result["task"] == task for run in runs.tasks)]
    if with_papers:
        tasks = [task for task in TITLES if task in tasks or any(figure.task == task for figure in papers.FIGURES)]
    found = [
        _task(task, [run for run in runs.tasks if run.result["task"] == task], runs, with_papers) for task in tasks
    ]
    found += [_texts(runs.texts)] if runs.texts else []
    found += [_extrapolation(runs)] if runs.perplexities else []
    found += [_evaluations(runs.evaluations)] if runs.evaluations else []
    if runs.tasks:
        # A run after the one whose weights it began with.
        ordered = dict.fromkeys(one for run in runs.tasks for one in reversed(run.chain))
        found.append(Section("Commands", [Code([line for run in ordered for line in commands(run)])]))
    if runs.passed_over:
        rows = [[name, why] for name, why in runs.passed_over]
        found.append(Section("Passed over", [Table(["folder", "why"], rows)]))
    number = sum(map(len, (runs.tasks, runs.texts, runs.perplexities, runs.evaluations)))
    first = Section("Runs", [f"{counted(number, 'result')}, gathered by hf_recurrent {__version__}."])
    if any(group.deviation is not None for group in groups(runs.tasks)):
        first.parts.append(DEVIATIONS)
    return [first, *found]


def said(metric: str, value: float, deviation: float | None = None) -> str:
    if metric == "accuracy":
        spread = "" if deviation is None else f" ± {100 * deviation:.{SHOWN_PER_CENT}f}"
        return f"{100 * value:.{SHOWN_PER_CENT}f}{spread} %"
    return f"{value:.3g}" if deviation is None else f"{value:.3g} ± {deviation:.2g}"


def _word(name: str) -> str:
    return WORDS.get(name, name.replace("_", " "))


def _items(fields: dict) -> str:
    return ", ".join(f"{_word(name)} {value}" for name, value in fields.items())


def _name(model_type: str) -> str:
    return NAMES.get(model_type, "Transformers' Mamba" if model_type == "mamba" else model_type)


def _sizes(result: dict) -> dict:
    sizes = result["sizes"] | {"division": result.get("division")}
    return {name: value for name, value in sizes.items() if name not in NOT_SHOWN and value is not None}


def _after(group: Group) -> str | None:
    """The names of the runs whose weights those of a group began with: a, b and c."""
    names = list(dict.fromkeys(run.start for run in group.runs if run.start is not None))
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]])) or None


def _steps(group: Group) -> str:
    result, after, extended = group.first, _after(group), _extended(group.runs[0])
    steps = f"{result['max_steps']:,} × {result['batch_size']:,}"
    return steps + (f", extended at {extended}" if extended else "") + (f", after {after}" if after else "")


def _extended(run: TaskRun) -> str | None:
    """At which steps: 1,000 and 2,000 of 2,500, where it had not come to their end."""
    ends = [(part["step"], part["max_steps"]) for part in run.extended]
    return " and ".join(f"{at:,}" if at == end else f"{at:,} of {end:,}" for at, end in ends) or None


def _rate(result: dict) -> str:
    decay = result["weight_decay"]
    return f"{result['learning_rate']:g}" + (f", weight decay {decay:g}" if decay else "")


def groups(runs: list[TaskRun]) -> list[Group]:
    """In the order of the families, the models' sizes and the tasks'."""
    found: dict[str, list[TaskRun]] = {}
    for run in runs:
        found.setdefault(run.training, []).append(run)
    keyed = [Group(sorted(runs, key=lambda run: run.result["seed"])) for runs in found.values()]

    def place(group: Group) -> tuple:
        sizes = [size if is_number(size) else math.inf for size in group.runs[0].sizes.values()]
        return group.first["model_type"], group.first["parameters"], sizes

    return sorted(keyed, key=place)


def _task(task: str, runs: list[TaskRun], gathered: Runs, with_papers: bool) -> Section:
    found, section = groups(runs), Section(TITLES[task])
    columns = ["model", "parameters", "model's sizes", "task's sizes", "steps × batch", "learning rate", "seeds"]
    metric = metric_of(task)
    columns += ["mean squared error" if metric == "mse" else "accuracy", "the paper's", "its setting", "minutes"]
    rows, stood_beside = [], []
    for group in found:
        first, figure = group.first, papers.beside(group.runs[0])
        stood_beside.append(figure)
        minutes = [run.result["seconds"] / 60 for run in group.runs if is_number(run.result.get("seconds"))]
        rows.append([
            _name(first["model_type"]), f"{first['parameters']:,}", _items(first["config"]), _items(_sizes(first)),
            _steps(group), _rate(first), str(len(group.runs)),
            said(metric, group.mean, group.deviation), figure.value if figure else "–",
            f"{figure.setting} ({figure.source})" if figure else "–", f"{mean(minutes):.1f}" if minutes else "–",
        ])  # fmt: skip
    for figure in papers.FIGURES if with_papers else ():
        if figure.task == task and figure not in stood_beside:
            place = f"{figure.setting} ({figure.source})"
            blank = [_name(figure.model_type), "–", _items(figure.config), "–", "–", "–", "0"]
            rows.append([*blank, "not run", figure.value, place, "–"])
    section.parts.append(Table(columns, rows))
    section.parts += _at_half_rate(found)
    section.parts += [f"On {machine}." for machine in _machines(runs)]
    section.parts += _sweeps(task, found)
    if found:
        curves = {label: [run.result["curve"] for run in group.runs] for label, group in _labelled(found).items()}
        draw, size = pictures.learning(curves, metric), pictures.learning_size(curves)
        section.parts.append(Picture(f"{task}-learning", f"{TITLES[task]}: learning", draw, size))
    if task == "memory_horizon":
        section.parts += _transitions(found, gathered)
    return section


def _labelled(found: list[Group], without: tuple[str, ...] = ()) -> dict[str, Group]:
    """By labels that say what tells groups apart."""
    facts = []
    for group in found:
        first = group.first
        fact = {"model": _name(first["model_type"]), **_sizes(first), **first["config"]}
        # The pendulum has "steps" of its own.
        training = {"training steps": first["max_steps"], "batch": first["batch_size"], "lr": first["learning_rate"]}
        training |= {"decay": first["weight_decay"], "examples": first["eval_examples"], "after": _after(group)}
        training["extended at"] = _extended(group.runs[0])
        fact |= training
        facts.append({name: value for name, value in fact.items() if name not in without})
    names = list(dict.fromkeys(name for fact in facts for name in fact))
    varies = [name for name in names if name != "model" and len({str(fact.get(name)) for fact in facts}) > 1]
    labels = [
        ", ".join([fact["model"], *(f"{_word(name)} {fact[name]}" for name in varies if fact.get(name) is not None)])
        for fact in facts
    ]
    # What is told apart by nothing that is said here, as by the version of the code, by a number.
    labels = [f"{x} ({labels[:i].count(x) + 1})" if labels.count(x) > 1 else x for i, x in enumerate(labels)]
    return dict(zip(labels, found, strict=True))


def _sweeps(task: str, found: list[Group]) -> list[Picture]:
    """The metric against each quantity in which groups differ that are alike in all else."""
    panels, beside = {}, {}
    for quantity in QUANTITIES:
        lines: dict[str, dict[Group, None]] = {}
        for group in found:
            if group.quantity(quantity) is None:
                continue
            lines.setdefault(group.runs[0].alike_but_for(quantity), []).append(group)
        kept = [line for line in lines.values() if len({group.quantity(quantity) for group in line}) > 1]
        if not kept:
            continue
        # What lines began with was of several lengths or widths, too.
        heads = _labelled([line[0] for line in kept], (quantity, "after"))
        panels[quantity] = {
            label: [(group.quantity(quantity), group.mean, group.deviation) for group in line]
            for label, line in zip(heads, kept, strict=True)
        }
        if quantity == "num_hidden_layers":
            beside[_word(quantity)] = _papers_by_layers(
                task, {group.first["model_type"] for line in kept for group in line}
            )
    if not panels:
        return []
    name = " and ".join(map(_word, panels))
    title = f"{TITLES[task]} against {name}"
    panels = {_word(quantity): lines for quantity, lines in panels.items()}
    draw, size = pictures.sweep(panels, metric_of(task), beside), pictures.sweep_size(panels, beside)
    return [Picture(f"{task}-sizes", title, draw, size)]


def _papers_by_layers(task: str, families: set[str]) -> dict[str, list[tuple[float, float, float | None]]]:
    lines: dict[str, list[tuple[float, float, float | None]]] = {}
    for figure in papers.FIGURES:
        layers = figure.config.get("num_hidden_layers")
        if figure.task == task and figure.model_type in families and layers and figure.number is not None:
            label = f"{_name(figure.model_type)}, the paper's: {figure.setting}"
            lines.setdefault(label, []).append((layers, figure.number, figure.spread))
    return lines


def _at_half_rate(found: list[Group]) -> list[Table]:
    rows = []
    for label, group in _labelled(found).items():
        tested = [run.result.get("half_rate") for run in group.runs]
        names = ("accuracy", "accuracy_without_rescaling")
        if all(isinstance(one, dict) and all(is_number(one.get(name)) for name in names) for one in tested):
            values = [[one[name] for one in tested] for name in names]
            rows.append([label, *(said("accuracy", mean(of_name), deviation(of_name)) for of_name in values)])
    return [Table(["untrained, at half the rate", "step_rescale doubled", "without"], rows)] if rows else []


def _machines(runs: list[TaskRun]) -> list[str]:
    """What the runs ran on, and when: a line for each machine."""
    days: dict[str, set[str]] = {}
    for run in runs:
        machine = run.result.get("machine")
        if not isinstance(machine, dict) or not is_number(machine.get("threads")):
            continue
        device = run.result.get("device")
        on = f"{machine.get('cpu')}, {counted(machine['threads'], 'thread')}" if device == "cpu" else str(device)
        packages = machine.get("packages") if isinstance(machine.get("packages"), dict) else {}
        on += "".join(f", {name} {version}" for name, version in packages.items())
        days.setdefault(on, set()).add(str(machine.get("date"))[:10])
    return [f"{on}; {', '.join(sorted(dates))}" for on, dates in days.items()]


def _transitions(found: list[Group], gathered: Runs) -> list[str | Picture]:
    parts = []
    for label, group in _labelled(found).items():
        first, run = group.first, group.runs[0]
        if first["model_type"] != "gateloop" or not first["config"].get("data_controlled", True):
            continue
        try:
            layers, resets = pictures.learned_transitions(run.folder, first["sizes"])
        except (ValueError, OSError, RuntimeError) as error:
            gathered.passed_over.append((run.name, f"its transitions are not shown: {first_line(error)}"))
            continue
        title = f"{label}: the magnitudes of its transitions, by position"
        draw = pictures.transitions(layers, resets)
        parts += [f"{title}.", Picture(f"transitions-{len(parts) // 2 + 1}", title, draw, (9, 1.2 + 1.3 * len(layers)))]
    return parts


def _texts(runs: list[TextRun]) -> Section:
    rows = []
    for run in runs:
        last = {name: line[name] for line in run.metrics for name in line if is_number(line[name])}
        steps = run.settings.get("max_steps")
        done = "" if run.finished else ", unfinished"
        rows.append([
            run.name, _name(str(run.settings.get("model_type") or "mingru")),
            f"{last['step']:,}{f' of {steps:,}' if is_number(steps) and steps != last['step'] else ''}{done}",
            f"{last['tokens']:,}" if "tokens" in last else "–",
            *(f"{last[name]:.4f}" if name in last else "–" for name in ("validation_loss", "validation_bits_per_byte")),
        ])  # fmt: skip
    columns = ["run", "model", "steps", "tokens", "validation loss (nats per token)", "bits per byte"]
    there = {name for run in runs for line in run.metrics for name in line}
    quantities = [name for name in DEFAULT if name in there]
    parts: list = [Table(columns, rows)]
    if quantities:
        draw = pictures.texts({run.name: run.metrics for run in runs}, quantities)
        parts.append(Picture("loss", "Loss curves", draw, (9, 1 + 3.0 * len(quantities))))
    return Section("Training on text", parts)


def _extrapolation(runs: Runs) -> Section:
    trained, rows = {}, []
    for one in runs.perplexities:
        length = one.result.get("sequence_length")
        by_position = one.result["by_position"]
        if is_number(length):
            trained[one.name] = int(length)
        inside = [row for row in by_position if is_number(length) and row["to"] < length]
        last = by_position[-1]
        rise = f"{100 * (last['perplexity'] / inside[-1]['perplexity'] - 1):+.1f} %" if inside else "–"
        rows.append([
            one.name, f"{trained[one.name]:,}" if one.name in trained else "–", f"{one.result['perplexity']:.3f}",
            f"{inside[-1]['perplexity']:.3f} ({inside[-1]['from']:,} to {inside[-1]['to']:,})" if inside else "–",
            f"{last['perplexity']:.3f} ({last['from']:,} to {last['to']:,})", rise,
        ])  # fmt: skip
    columns = ["run", "tokens in training", "perplexity", "at the end of these", "at the last positions", "rise"]
    draw = pictures.extrapolation(runs.perplexities, trained)
    names = [one.name for one in runs.perplexities]
    size = (9, 4.2 + pictures.legend_height(names, 9, pictures.legend_columns(names)))
    picture = Picture("extrapolation", "Perplexity by position", draw, size)
    return Section("Length extrapolation", [Table(columns, rows), picture])


def _evaluations(found: list[Measured]) -> Section:
    parts: list = []
    papers_own = [one for one in found if any(task in one.result["results"] for _, task, _ in PAPER_TASKS)]
    if papers_own:
        lines = []
        for one in papers_own:
            titles, row = paper_cells(one.result | {"config": {"model": one.name}})
            lines.append(row)
        parts.append(Table(titles, lines))
    rows = []
    for one in found:
        shots = one.result.get("n-shot") or {}
        for task, values in one.result["results"].items():
            for name, value in values.items():
                metric, comma, chosen = name.partition(",")
                if comma and not metric.endswith("_stderr") and is_number(value):
                    error = values.get(f"{metric}_stderr,{chosen}")
                    spread = f" ± {error:.4f}" if is_number(error) else ""
                    rows.append([one.name, task, metric, str(shots.get(task, "–")), f"{value:.4f}{spread}"])
    parts.append(Table(["run", "task", "metric", "shots", "value ± its standard error"], rows))
    return Section("lm-eval", parts)


def commands(run: TaskRun) -> list[str]:
    """What was typed, or as good as: a line for each number of steps."""
    lines = []
    for part in run.extended:
        stopped = "" if part["step"] == part["max_steps"] else f"  # stopped after step {part['step']:,}"
        lines.append(_command(run, part["max_steps"], go_on=bool(lines)) + stopped)
    return [*lines, _command(run, run.result["max_steps"], go_on=bool(lines))]


def _command(run: TaskRun, max_steps: int, *, go_on: bool) -> str:
    result, text = run.result, lambda value: json.dumps(value) if not isinstance(value, str) else value
    sizes = {name: value for name, value in result["sizes"].items() if value is not None}
    pairs = {"sizes": ",".join(f"{k}={text(v)}" for k, v in sizes.items())}
    config = dict(result["config"])
    own = {name: config.pop(name) for name in ("hidden_size", "num_hidden_layers") if name in config}
    pairs["config"] = ",".join(f"{k}={text(v)}" for k, v in config.items())
    flags = {
        "--task": result["task"], "--task-args": pairs["sizes"], "--model-type": result["model_type"],
        "--hidden-size": own.get("hidden_size"), "--num-hidden-layers": own.get("num_hidden_layers"),
        "--config-overrides": pairs["config"],
    }  # fmt: skip
    for name in ("max_steps", "batch_size", "learning_rate", "weight_decay", "eval_examples", "seed"):
        flags[f"--{name.replace('_', '-')}"] = None if LEFT_OUT.get(name) == result[name] else result[name]
    flags["--max-steps"] = max_steps
    flags["--start-from"] = run.start if run.earlier is None else _output(run.earlier)
    flags["--output-dir"] = _output(run)
    words = [word for flag, value in flags.items() if value not in (None, "") for word in (flag, str(value))]
    words += ["--cpu"] if result.get("device") == "cpu" else []
    return shlex.join(["hf-recurrent", "train", *words, *(["--resume"] if go_on else [])])


def _output(run: TaskRun) -> str:
    """The folder that a command of the report saves a run in."""
    return f"runs/{run.name}"
