"""What a run says about itself: bits per byte beside two baselines, a table, and the loss curve."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .validation import ValidationRows


@dataclass
class Baselines:
    """What compressing the validation text costs without a model of order, in bits per UTF-8 byte.

    Args:
        unigram: each target token coded by how often it was a target in training:
            -Σ log2 p(token) / bytes with p(t) = (count(t) + 1) / (Σ count + V), so that no token is impossible.
            It has the model's own tokenizer, so that what the model gains over it is context.
        gzip: 8 × bytes of `gzip -9` / bytes, over the documents one after the other.
        bytes_per_token: text bytes per target token, to turn nats per token into bits per byte.
    """

    unigram: float
    gzip: float
    bytes_per_token: float

    def bits_per_byte(self, nats_per_token: float) -> float:
        return nats_per_token / (math.log(2) * self.bytes_per_token)

    def nats_per_token(self, bits_per_byte: float) -> float:
        return bits_per_byte * math.log(2) * self.bytes_per_token


def baselines(validation: "ValidationRows", train_counts: np.ndarray) -> Baselines:
    """The baselines of a validation text.

    Args:
        train_counts: (V,) how often each token was a target in training.
    """
    log2_p = np.log2(train_counts + 1) - math.log2(train_counts.sum() + len(train_counts))
    return Baselines(
        unigram=float(-(validation.target_counts * log2_p).sum() / validation.text_bytes),
        gzip=8 * validation.gzip_bytes / validation.text_bytes,
        bytes_per_token=validation.text_bytes / validation.targets,
    )


def perplexity(nats_per_token: float) -> float:
    try:
        return math.exp(nats_per_token)
    except OverflowError:
        return math.inf


def readable(number: float) -> str:
    """Two decimals while it is short, then three digits: 12.34, 1.23e+08, inf."""
    return f"{number:.2f}" if number < 1e6 else f"{number:.3g}"


def table(rows: list[tuple[str, str]]) -> str:
    """Two columns, the second one aligned to the right."""
    left, right = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"  {name:<{left}}  {value:>{right}}" for name, value in rows)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """A running mean over `window` values centred on each, over fewer at both ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    low = np.maximum(places - window // 2, 0)
    high = np.minimum(places + (window + 1) // 2, len(values))
    return (sums[high] - sums[low]) / (high - low)


def plot_loss(metrics: list[dict], references: Baselines | None, title: str, path: Path) -> None:
    """Draw training and validation loss over steps, with the baselines as lines. Bits per byte stand on the right.

    Args:
        metrics: the lines of `metrics.jsonl`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # A figure of its own, away from pyplot's global state and whatever backend the user has chosen.
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    train = np.array([(line["step"], line["loss"]) for line in metrics if "loss" in line]).reshape(-1, 2)
    validation = np.array([(m["step"], m["validation_loss"]) for m in metrics if "validation_loss" in m]).reshape(-1, 2)

    if len(train):
        axes.plot(*train.T, color="#4c78a8", alpha=0.3, linewidth=0.8)
        smoothed = smooth(train[:, 1], max(1, len(train) // 25))
        # One point makes no line.
        marker = "o" if len(train) == 1 else None
        axes.plot(train[:, 0], smoothed, color="#4c78a8", marker=marker, markersize=3.5, label="training (smoothed)")
    if len(validation):
        label = f"validation: {validation[-1, 1]:.2f}"
        if references is not None:
            label += f" nats, {references.bits_per_byte(validation[-1, 1]):.2f} bits per byte at the end"
        axes.plot(*validation.T, color="#e4572e", marker="o", markersize=3.5, label=label)
    if references is not None:
        for name, bits, style in (("unigram", references.unigram, "--"), ("gzip -9", references.gzip, ":")):
            axes.axhline(
                references.nats_per_token(bits),
                color="0.35",
                linestyle=style,
                linewidth=1.2,
                label=f"{name}: {bits:.2f} bits per byte",
            )
        right = axes.secondary_yaxis("right", functions=(references.bits_per_byte, references.nats_per_token))
        right.set_ylabel("bits per byte")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
    axes.grid(alpha=0.25)
    axes.spines["top"].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150, format="png")
