"""The pictures of a report, each drawn on a matplotlib figure."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from .runs import Measured

BLUE = "#4c78a8"


def _tidy(axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _axis_of(metric: str, axes) -> None:
    if metric == "accuracy":
        axes.set_ylim(0, 1.03)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    else:
        axes.set_yscale("log")
    axes.set_ylabel({"accuracy": "accuracy", "mse": "mean squared error"}[metric])


def sweep(
    panels: dict[str, dict[str, list[tuple[float, float, float]]]],
    metric: str,
    papers: dict[str, dict[str, list[tuple[float, float]]]],
) -> Callable:
    """
    Panels side by side, each the metric against one quantity.

    Args:
        panels: by the quantity's name and the line's label the points: quantity, mean, standard deviation over seeds.
        papers: alike, the papers' points without deviations.
    """

    def draw(figure) -> None:
        for axes, (quantity, lines) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
        ):
            values = sorted({x for points in lines.values() for x, *_ in points})
            for number, (label, points) in enumerate(lines.items()):
                x, mean, spread = np.array(sorted(points)).T
                axes.errorbar(
                    x, mean, spread, marker="o", markersize=4, capsize=3, color=f"C{number % 10}", label=label
                )
            for number, (label, points) in enumerate(papers.get(quantity, {}).items()):
                x, y = np.array(sorted(points)).T
                style = {"marker": ("s", "^", "D", "v")[number % 4], "linestyle": ":", "color": "0.45"}
                axes.plot(x, y, markersize=5, markerfacecolor="none", label=label, **style)
            if values[-1] >= 8 * values[0] > 0:
                axes.set_xscale("log", base=2)
            axes.set_xticks(values, [f"{value:,g}" for value in values])
            axes.minorticks_off()
            axes.set_xlabel(quantity)
            _axis_of(metric, axes)
            _tidy(axes)
            axes.legend(frameon=False, fontsize="small")

    return draw


def legend_columns(labels: Iterable[str]) -> int:
    """Columns in which labels stand under a picture of 9 inches without being cut off."""
    return 2 if max(map(len, labels), default=0) <= 60 else 1


def learning(curves: dict[str, list[list[dict]]], metric: str) -> Callable:
    """The metric and the training loss over steps: by label the curves of the runs that differ in their seed alone."""

    def draw(figure) -> None:
        left, right = figure.subplots(1, 2)
        for number, (label, runs) in enumerate(curves.items()):
            for run, curve in enumerate(runs):
                steps = [point["step"] for point in curve]
                style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":", "-.")[number // 10 % 4]}
                shown = None if run else label
                left.plot(steps, [point[metric] for point in curve], marker="o", markersize=3, label=shown, **style)
                losses = [point.get("loss", math.nan) for point in curve]
                right.plot(steps, losses, marker="o", markersize=3, **style)
        _axis_of(metric, left)
        right.set_ylabel("training loss")
        right.set_yscale("log")
        for axes in (left, right):
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
        rows[-1].set_xlabel("position (▼ a reset); channels, sorted by their mean")
        figure.colorbar(image, ax=rows, label="|a|")

    return draw


def extrapolation(measured: list[Measured], trained: dict[str, int]) -> Callable:
    """Perplexity by position, and the lengths that the models were trained at, where they are known."""

    from ..evaluation.perplexity import curve

    def draw(figure) -> None:
        axes = figure.subplots()
        for number, one in enumerate(measured):
            color = f"C{number % 10}"
            x, y = curve(one.result["by_position"])
            axes.plot(x, y, marker="o", markersize=4, color=color, label=one.name)
            if one.name in trained:
                axes.axvline(trained[one.name], color=color, linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:,g}")
        axes.tick_params(axis="y", which="minor", labelsize="x-small")
        axes.set(xlabel="tokens before the predicted one (dashed: the length of training)", ylabel="perplexity")
        _tidy(axes)
        axes.legend(frameon=False)

    return draw


def texts(runs: dict[str, list[dict]], quantities: list[str]) -> Callable:
    """Curves of runs on text, as `hf-recurrent plot` draws them."""
    from ..training.curves import draw_runs

    return lambda figure: draw_runs(figure, runs, quantities, "step")


def learned_transitions(folder: Path, sizes: dict, length: int = 128) -> tuple[list[np.ndarray], np.ndarray]:
    """
    Of a GateLoop that was trained on Memory Horizon, for `transitions`: |a_t| of each layer, and the resets, over the
    first example of the test split.

    Raises:
        ValueError: the model is not there, or cannot be used.
    """
    import torch

    from ..tasks import generate
    from ..training.model import load_model

    model = load_model(str(folder)).eval()
    tokens = generate("memory_horizon", 1, split="test", **sizes | {"length": min(length, sizes.get("length", 512))})
    input_ids, seen, hooks = torch.from_numpy(tokens["input_ids"]), [], []
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
    return magnitudes, tokens["input_ids"][0] == sizes.get("numbers", 5)
