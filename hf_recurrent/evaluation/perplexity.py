"""Perplexity by position: how a model does further into a text than it was ever trained to read."""

import itertools
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from ..files import replacing, write_whole
from ..modeling import RecurrentCache, stream
from ..modeling.model import RecurrentForCausalLM

LARGEST_LOSS = 700.0  # nats per token whose perplexity a float holds


@dataclass
class Perplexity:
    """
    Sums of -log p(token | tokens before it in its window), in nats.

    Args:
        nats: by k, the sum over the tokens with 2^k to 2^(k+1) - 1 tokens before them.
        tokens: by k, their number.
        text_bytes: UTF-8 bytes of the whole text.
        read: tokens of the whole text, the first one of each window too, which is not predicted.
    """

    nats: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text_bytes: int = 0
    read: int = 0

    @property
    def loss(self) -> float:
        """Nats per token."""
        return sum(self.nats) / sum(self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Tokens that are not predicted count with the mean of the others: else short windows would look better."""
        return self.loss * self.read / math.log(2) / self.text_bytes

    def rows(self) -> list[dict]:
        """By position: tokens before (from, to), tokens, loss, perplexity (None where a float does not hold it)."""
        return [
            {"from": 2**k, "to": 2 ** (k + 1) - 1, "tokens": n, "loss": nats / n, "perplexity": _perplexity(nats / n)}
            for k, (nats, n) in enumerate(zip(self.nats, self.tokens, strict=True))
            if n
        ]

    def as_dict(self) -> dict:
        whole = {"loss": self.loss, "perplexity": _perplexity(self.loss), "bits_per_byte": self.bits_per_byte}
        return {**whole, "tokens": sum(self.tokens), "text_bytes": self.text_bytes, "by_position": self.rows()}

    def add(self, before: int, nats: torch.Tensor) -> None:
        """The losses (n,) of tokens in a row, the first of which has `before` tokens before it."""
        k = torch.frexp(torch.arange(before, before + len(nats), dtype=torch.float64)).exponent.long() - 1
        sums, counts = torch.bincount(k, nats.double().cpu()).tolist(), torch.bincount(k).tolist()
        missing = len(sums) - len(self.nats)
        self.nats += [0.0] * missing
        self.tokens += [0] * missing
        for place, (total, count) in enumerate(zip(sums, counts, strict=True)):
            self.nats[place] += total
            self.tokens[place] += count


def _perplexity(loss: float) -> float | None:
    return math.exp(loss) if loss <= LARGEST_LOSS else None


def shown(perplexity: float | None) -> str:
    """For tables."""
    if perplexity is None:
        return f"> e^{LARGEST_LOSS:.0f}"
    return f"{perplexity:,.3f}" if perplexity < 1e9 else f"{perplexity:.3e}"


def measure_perplexity(
    model: RecurrentForCausalLM,
    tokens: Iterable[int],
    text_bytes: int,
    window: int | None = None,
    chunk_size: int = 1024,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Perplexity:
    """
    Reads a text of any length in constant memory. A text's or window's first token is not predicted.

    Args:
        model: in evaluation mode.
        tokens: the ids of the text.
        text_bytes: its size, for the bits per byte.
        window: tokens after which the model starts again from nothing; None for one window, the whole text.
        chunk_size: tokens that are read at once.
        progress: is told the number of tokens read, chunk by chunk.

    Raises:
        ValueError: a window below 2; a text of fewer than two tokens.
        What `stream` raises.
    """
    if window is not None and window < 2:
        raise ValueError(f"window must be at least 2 tokens, got {window}")
    result = Perplexity(text_bytes=text_bytes)
    remaining = iter(tokens)
    # One token is asked for before each window, to see whether there is another.
    while first := list(itertools.islice(remaining, 1)):
        text = itertools.chain(first, itertools.islice(remaining, None if window is None else window - 1))
        cache, last = RecurrentCache(model.config), None
        for ids, logits in stream(model, text, cache, chunk_size):
            predictions = logits[:-1] if last is None else torch.cat([last, logits[:-1]])
            targets = ids[len(ids) - len(predictions) :]
            if len(targets):
                wide = predictions.to(torch.promote_types(predictions.dtype, torch.float32))
                nats = F.cross_entropy(wide, targets, reduction="none")
                result.add(cache.get_seq_length() - len(targets), nats)
            last = logits[-1:]
            result.read += len(ids)
            progress(len(ids))
    if not result.tokens:
        raise ValueError("the text has fewer than two tokens: there is nothing to predict")
    return result


def save(result: Perplexity, folder: Path, title: str, sequence_length: int | None = None) -> None:
    """Writes perplexity.json and perplexity.png into `folder`, which exists.

    Args:
        sequence_length: tokens in a row when the model was trained, where it is known: for `hf-recurrent report`.
    """
    content = result.as_dict() | ({} if sequence_length is None else {"sequence_length": sequence_length})
    write_whole(folder / "perplexity.json", json.dumps(content, indent=2) + "\n")
    with replacing(folder / "perplexity.png") as path:
        _plot(result, title, path)


def curve(rows: list[dict]) -> tuple[list[float], list[float]]:
    """Of `Perplexity.rows`, x and y: a point stands in the (geometric) middle of the positions that it is the mean
    of."""
    drawn = [row for row in rows if row["perplexity"] is not None]
    return [math.sqrt(row["from"] * row["to"]) for row in drawn], [row["perplexity"] for row in drawn]


def _plot(result: Perplexity, title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places, perplexities = curve(result.rows())
    axes.plot(places, perplexities, color="#4c78a8", marker="o", markersize=4)
    if (whole := _perplexity(result.loss)) is not None:
        axes.axhline(whole, color="0.35", linestyle="--", linewidth=1, label="over all positions")
    if places:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    else:
        axes.text(0.5, 0.5, f"all are {shown(None)}", transform=axes.transAxes, ha="center")
    axes.set(xlabel="tokens before the predicted one", ylabel="perplexity", title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150, format="png")
