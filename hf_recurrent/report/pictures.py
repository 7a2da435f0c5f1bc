"""The pictures of a report, each drawn on a matplotlib figure."""

import math
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from .runs import Measured

LINES, MARKERS = ("-", "--", ":", "-."), ("o", "s", "^", "D", "v")
EXAMPLES = 64  # among which one with a reset is looked for
MOST_TICKS = 8  # at the values that were run; where there are more, at round ones
CHARACTERS = 13  # of a legend's type, that an inch holds beside the lines' samples
LEGEND_LINE = 0.2  # inches


def style(number: int) -> dict:
    """Of a line among many: ten colours, then other dashes and markers."""
    return {
        "color": f"C{number % 10}", "linestyle": LINES[number // 10 % 4], "marker": MARKERS[number // 10 % 5],
        "markersize": 4,
    }  # fmt: skip


def shown(label: str, inches: float = math.inf) -> str:
    """A label that a legend shows as it is, in lines that fit into its width."""
    label = label.replace("$", r"\$")  # a pair of them would be read as a formula
    label = f" {label}" if label.startswith("_") else label  # which legends leave out
    if math.isinf(inches):
        return label
    whole = re.sub(r"(?<!,) ", "\N{NO-BREAK SPACE}", label)  # lines end behind commas: "data tokens 16" is one thing
    return textwrap.fill(whole, int(CHARACTERS * inches)).replace("\N{NO-BREAK SPACE}", " ")


def legend_height(labels: Iterable[str], inches: float, columns: int = 1) -> float:
    """Inches that a legend takes under a picture of this width."""
    lines = sum(1 + shown(label, inches).count("\n") for label in labels)
    return LEGEND_LINE * math.ceil(lines / columns)


def legend_columns(labels: Iterable[str]) -> int:
    """Columns in which labels stand under a picture of 9 inches without being cut off."""
    return 2 if max(map(len, labels), default=0) <= 60 else 1


def plain_number(value: float, _=None) -> str:
    """For a tick: 20,000; 0.00002."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return np.format_float_positional(float(f"{value:.6g}"), trim="-")


def _tidy(axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _logarithmic(axes) -> None:
    """The vertical axis, after all has been drawn on it."""
    from matplotlib.ticker import AutoLocator, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    subs = (1, 2, 3, 4, 6, 8) if high < 20 * low else (1, 2, 5) if high < 500 * low else (1,)
    axes.yaxis.set_major_locator(AutoLocator() if high < 5 * low else LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(plain_number)
    axes.yaxis.set_minor_formatter(NullFormatter())


def _axis_of(metric: str, axes) -> None:
    if metric == "accuracy":
        axes.set_ylim(0, 1.03)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    else:
        _logarithmic(axes)
    axes.set_ylabel({"accuracy": "accuracy", "mse": "mean squared error"}[metric])


def _drawn(axes, points: list[tuple[float, float, float | None]], **options):
    """Points with their deviations; without these no bar, in the legend neither. Returns what a legend takes."""
    x, y, spread = np.array(sorted(points, key=lambda point: point[0]), dtype=float).T  # None becomes NaN
    if np.isnan(spread).all():
        return axes.plot(x, y, **options)[0]
    return axes.errorbar(x, y, spread, capsize=3, **options)


def sweep_size(panels: dict[str, dict[str, list]], papers: dict[str, dict[str, list]]) -> tuple[float, float]:
    """Inches, of what `sweep` draws."""
    width = max(6.0, 4.4 * len(panels))
    legends = (legend_height([*panels[name], *papers.get(name, {})], width / len(panels)) for name in panels)
    return width, 3.8 + max(legends)


def sweep(
    panels: dict[str, dict[str, list[tuple[float, float, float | None]]]],
    metric: str,
    papers: dict[str, dict[str, list[tuple[float, float, float | None]]]],
) -> Callable:
    """
    Panels side by side, each the metric against one quantity.

    Args:
        panels: by the quantity's name and the line's label the points: quantity, mean, standard deviation over seeds
            (None for one seed).
        papers: alike, the papers' points, with the deviations that they give.
    """

    def draw(figure) -> None:
        width, height = sweep_size(panels, papers)
        # The legends stand below: beside the lines there is seldom room for them.
        rows = figure.subplots(2, len(panels), squeeze=False, height_ratios=[3.8, height - 3.8])
        for above, below, (quantity, lines) in zip(*rows, panels.items(), strict=True):
            theirs, drawn = papers.get(quantity, {}), []
            for number, (label, points) in enumerate(lines.items()):
                drawn.append(_drawn(above, points, label=shown(label, width / len(panels)), **style(number)))
            for number, (label, points) in enumerate(theirs.items()):
                look = {"marker": MARKERS[1 + number % 4], "linestyle": ":", "color": "0.45"}
                label = shown(label, width / len(panels))
                drawn.append(_drawn(above, points, markersize=5, markerfacecolor="none", label=label, **look))
            values = sorted({x for points in (*lines.values(), *theirs.values()) for x, *_ in points})
            if values[-1] >= 8 * values[0] > 0:
                above.set_xscale("log", base=2)
            if len(values) <= MOST_TICKS:
                above.set_xticks(values)
            above.xaxis.set_major_formatter(plain_number)
            above.set_xlabel(quantity)
            _axis_of(metric, above)
            above.minorticks_off()
            _tidy(above)
            below.axis("off")
            below.legend(handles=drawn, loc="upper center", frameon=False, fontsize="small")

    return draw


def learning_size(labels: Iterable[str]) -> tuple[float, float]:
    """Inches, of what `learning` draws."""
    return 9, 3.6 + legend_height(labels, 9, legend_columns(labels))


def learning(curves: dict[str, list[list[dict]]], metric: str) -> Callable:
    """The metric and the training loss over steps: by label the curves of the runs that differ in their seed alone."""

    def draw(figure) -> None:
        left, right = figure.subplots(1, 2)
        for number, (label, runs) in enumerate(curves.items()):
            for run, curve in enumerate(runs):
                steps = [point["step"] for point in curve]
                left.plot(
                    steps, [point[metric] for point in curve], label=None if run else shown(label, 9), **style(number)
                )
                right.plot(steps, [point.get("loss", math.nan) for point in curve], **style(number))
        _axis_of(metric, left)
        right.set_ylabel("training loss")
        _logarithmic(right)
        for axes in (left, right):
            axes.xaxis.set_major_formatter(plain_number)
            axes.set_xlabel("step")
            _tidy(axes)
        figure.legend(loc="outside lower center", ncols=legend_columns(curves), frameon=False, fontsize="small")

    return draw


def transitions(layers: list[np.ndarray], resets: np.ndarray) -> Callable:
    """
    The magnitudes of a model's transitions over one example.

    Args:
        layers: of each layer |a_t|, (length, channels), in [0, 1].
        resets: (length,) bool.
    """

    def draw(figure) -> None:
        rows = figure.subplots(len(layers), 1, sharex=True, squeeze=False)[:, 0]
        for number, (axes, magnitudes) in enumerate(zip(rows, layers, strict=True)):
            order = np.argsort(magnitudes.mean(axis=0))
            image = axes.imshow(
                magnitudes[:, order].T, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=1
            )
            for place in np.flatnonzero(resets):
                axes.plot(place, 1.04, "v", color="#e4572e", transform=axes.get_xaxis_transform(), clip_on=False)
            axes.set_ylabel(f"layer {number + 1}")
            axes.set_yticks([])
        marked = "position (▼ a reset)" if resets.any() else "position"
        rows[-1].set_xlabel(f"{marked}; channels, sorted by their mean")
        figure.colorbar(image, ax=rows, label="|a|")

    return draw


def extrapolation(measured: list[Measured], trained: dict[str, int]) -> Callable:
    """Perplexity by position, and the lengths that the models were trained at, where they are known."""

    from ..evaluation.perplexity import curve

    def draw(figure) -> None:
        axes = figure.subplots()
        for number, one in enumerate(measured):
            line = style(number)
            x, y = curve(one.result["by_position"])
            axes.plot(x, y, label=shown(one.name, 9), **line)
            if one.name in trained:
                axes.axvline(trained[one.name], color=line["color"], linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(plain_number)
        _logarithmic(axes)
        axes.set(xlabel="tokens before the predicted one (dashed: the length of training)", ylabel="perplexity")
        _tidy(axes)
        names = [one.name for one in measured]
        figure.legend(loc="outside lower center", ncols=legend_columns(names), frameon=False, fontsize="small")

    return draw


def texts(runs: dict[str, list[dict]], quantities: list[str]) -> Callable:
    """Curves of runs on text, as `hf-recurrent plot` draws them."""
    from ..training.curves import draw_runs

    return lambda figure: draw_runs(figure, {shown(name): runs[name] for name in runs}, quantities, "step")


def learned_transitions(folder: Path, sizes: dict, length: int = 128) -> tuple[list[np.ndarray], np.ndarray]:
    """
    Of a GateLoop that was trained on Memory Horizon, for `transitions`: |a_t| of each layer, and the resets, over the
    first example of the test split with a reset; where there is none among them, over the first.

    Raises:
        ValueError: the model is not there, or cannot be used.
    """
    import torch

    from ..tasks import generate
    from ..training.model import load_model

    model = load_model(str(folder)).eval()
    sizes = sizes | {"length": min(length, sizes.get("length", 512))}
    examples = generate("memory_horizon", EXAMPLES, split="test", **sizes)["input_ids"]
    resets = examples == sizes.get("numbers", 5)
    number = resets.any(axis=1).argmax()  # 0 where there is none
    if examples.max() >= model.config.vocab_size:
        raise ValueError(f"its model knows {model.config.vocab_size} tokens, fewer than its task has")
    input_ids, seen, hooks = torch.from_numpy(examples[[number]]), [], []
    for layer in model.base_model.layers:
        if not hasattr(layer.mixer, "transitions") or layer.mixer.conv1d is not None:  # they follow the convolution
            raise ValueError("its transitions cannot be shown")
        hooks.append(layer.mixer.register_forward_pre_hook(lambda mixer, args: seen.append((mixer, args[0]))))
    try:
        with torch.inference_mode():
            model(input_ids, use_cache=False)
            magnitudes = [
                mixer.transitions(mixer.transition_inputs(x), torch.float32)[0].abs().flatten(1).numpy()
                for mixer, x in seen
            ]
    finally:
        for hook in hooks:
            hook.remove()
    return magnitudes, resets[number]
