"""Curves of several runs in one picture, from their `metrics.jsonl`."""

import warnings
from pathlib import Path

import numpy as np

from ..messages import nearest
from .folder import METRICS, RunFolder
from .report import smooth

# What is drawn unless something is asked for, each with its axis; a run without it has no line there.
DEFAULT = ("validation_loss", "loss")
X_AXES = ("step", "tokens", "elapsed")
LABELS = {
    "loss": "training loss (nats per token)",
    "validation_loss": "validation loss (nats per token)",
    "validation_bits_per_byte": "validation (bits per byte)",
    "validation_perplexity": "validation perplexity",
    "lr": "learning rate",
    "grad_norm": "gradient norm before clipping",
    "tokens_per_second": "tokens per second",
    "peak_share": "share of the machine's peak",
    "input_share": "share of the time waiting for input",
    "gates_closed": "share of |a| below 0.01",
    "gates_open": "share of |a| above 0.99",
    "elapsed": "seconds of training",
    "tokens": "tokens",
    "step": "step",
}
SMOOTHED = ("loss", "grad_norm", "tokens_per_second")


def label(name: str) -> str:
    """The axis of a quantity; of memory_16/layer_3: "share of a state left after 16 tokens, layer 3"."""
    whole, _, layer = name.partition("/")
    text = LABELS.get(whole, whole.replace("_", " "))
    if whole.startswith("memory_"):
        text = f"share of a state left after {whole.removeprefix('memory_')} tokens"
    return f"{text}, {layer.replace('_', ' ')}" if layer else text


def read_runs(paths: list[str]) -> dict[str, list[dict]]:
    """The metrics of each run, by the shortest names that tell the runs apart. What is there and has none is left out,
    with a warning, where something has some.

    Raises:
        FileNotFoundError: no such path, or none has metrics.
        ValueError: a run is given twice.
    """
    runs, others = {}, []
    for path in map(Path, paths):
        folder = path.parent if path.name == METRICS else path
        lines = RunFolder(str(folder)).metrics()
        if not lines:
            if not path.exists():
                raise FileNotFoundError(f"{path}: no such file or folder")
            others.append(path)
            continue
        if folder.resolve() in runs:
            raise ValueError(f"{path} is given twice")
        runs[folder.resolve()] = lines
    messages = [f"{path}: there is no run with metrics in {METRICS}" for path in others]
    if messages and not runs:
        raise FileNotFoundError(messages[0])
    for message in messages:
        warnings.warn(f"{message}; left out", stacklevel=2)
    names = short_names(list(runs))
    return {names[folder]: lines for folder, lines in runs.items()}


def short_names(folders: list[Path]) -> dict[Path, str]:
    """Different folders, each by the shortest end of its path that no other has."""
    parts = [folder.resolve().parts for folder in folders]

    def name(own: tuple[str, ...]) -> str:
        depth = next(n for n in range(1, len(own) + 1) if sum(part[-n:] == own[-n:] for part in parts) == 1)
        return "/".join(own[-depth:])

    return {folder: name(own) for folder, own in zip(folders, parts, strict=True)}


def points(lines: list[dict], x: str, y: str) -> np.ndarray:
    """(N, 2), of finite values. Lines of validations have no tokens, those of health no seconds either: what a line of
    metrics lacks is interpolated by the steps."""
    known = {0: 0} | {line["step"]: line[x] for line in lines if x in line}
    steps, values = np.array(sorted(known.items()), dtype=float).T
    found = [(line.get(x, np.interp(line["step"], steps, values)), line[y]) for line in lines if y in line]
    curve = np.array(found, dtype=float).reshape(-1, 2)
    return curve[np.isfinite(curve).all(axis=1)]


def plot_runs(runs: dict[str, list[dict]], quantities: list[str], x: str, *, logarithmic: bool = False):
    """A figure with each quantity of all runs over `x`, one below the other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1 + 3.4 * len(quantities)), layout="constrained")
    FigureCanvasAgg(figure)
    draw_runs(figure, runs, quantities, x, logarithmic=logarithmic)
    return figure


def save_plot(figure, path: Path) -> None:
    """The file's ending decides its format."""
    figure.savefig(path, dpi=150, format=path.suffix.lower().lstrip("."))


def draw_runs(figure, runs: dict[str, list[dict]], quantities: list[str], x: str, *, logarithmic: bool = False) -> None:
    """What `plot_runs` draws, on a figure of matplotlib."""
    rows = figure.subplots(len(quantities), sharex=True, squeeze=False)[:, 0]
    drawn = {}  # a line of each run: it need not have all quantities
    for axes, name in zip(rows, quantities, strict=True):
        for number, (run, lines) in enumerate(runs.items()):
            curve, color = points(lines, x, name), f"C{number % 10}"
            if not len(curve):
                continue
            marker = "o" if len(curve) < 40 and name not in SMOOTHED or len(curve) == 1 else None
            values = curve[:, 1]
            if name in SMOOTHED and len(curve) > 25:
                axes.plot(*curve.T, color=color, alpha=0.25, linewidth=0.8)
                values = smooth(values, len(values) // 25)
            style = ("-", "--", ":", "-.")[number // 10 % 4]
            (line,) = axes.plot(curve[:, 0], values, style, color=color, marker=marker, markersize=3.5, label=run)
            drawn.setdefault(run, line)
        axes.set_ylabel(label(name))
        axes.set_yscale("log" if logarithmic else "linear")
        axes.grid(alpha=0.25, which="both")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    rows[-1].set_xlabel(LABELS[x])
    rows[0].legend(handles=[drawn[run] for run in runs if run in drawn], frameon=False)


def check_quantities(runs: dict[str, list[dict]], quantities: list[str]) -> None:
    """
    Raises:
        ValueError: no run has one of them; the message names the nearest one that there is.
    """
    known = {
        name for lines in runs.values() for line in lines for name, value in line.items() if not isinstance(value, str)
    }
    for name in quantities:
        if name not in known:
            raise ValueError(f"--metric {name}: no run has it{nearest(name, sorted(known))}")
