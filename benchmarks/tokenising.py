"""What feeding a training run costs: tokens per second from text to rows, and the loop's own time in a step.

    python benchmarks/tokenising.py --output benchmarks/results

1. Tokenising and packing Python's standard library, by a byte-level BPE trained on it and by plain bytes: from
   documents in memory to rows of 256 tokens, with the cache, and once more from the cache. Beside it the tokenizer
   alone, and how fast its ids become arrays: what of the whole is ours.
2. A training run whose steps take about 100 ms: the time of its loop outside forward, backward, clipping and optimiser
   step; and the time of clipping, which is counted for itself.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np

from hf_recurrent.files import write_whole
from hf_recurrent.measure import machine, make_folder, positive
from hf_recurrent.training import arguments, token_cache
from hf_recurrent.training.documents import Documents
from hf_recurrent.training.loop import Run
from hf_recurrent.training.rows import ShuffledRows
from hf_recurrent.training.sources import stdlib_documents
from hf_recurrent.training.tokenizer import byte_tokenizer, train_bpe
from hf_recurrent.training.tokens import pieces

PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "numpy")
GOALS = {"tokens_per_second": 1e6, "loop_share": 0.02}
LENGTH = 256


def seconds_of(function: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def input_rates(tokenizer, documents: Documents, rounds: int) -> dict:
    """Tokens per second: to rows, the median of some rounds; and of each part."""
    texts = [piece for text in documents.texts() for piece in pieces(text)]
    rates: dict[str, list[float]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, HF_RECURRENT_CACHE=folder):
            for name in ("to_rows", "to_rows_from_the_cache"):
                seconds, count = seconds_of(lambda: rows_of(tokenizer, documents))
                rates.setdefault(name, []).append(count / seconds)
        tokenizer.backend_tokenizer.encode_special_tokens = True
        seconds, encoded = seconds_of(
            lambda: tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        )
        converting, ids = seconds_of(lambda: [np.array(encoding.ids, np.uint16) for encoding in encoded])  # noqa: B023
        count = sum(map(len, ids))
        rates.setdefault("tokenizer_alone", []).append(count / seconds)
        rates.setdefault("ids_to_arrays_alone", []).append(count / converting)
    return {"tokens": count} | {name: round(statistics.median(values)) for name, values in rates.items()}


def rows_of(tokenizer, documents: Documents) -> int:
    """Make all rows of an epoch; the number of their tokens."""
    rows = ShuffledRows(token_cache.tokenised(tokenizer, documents), LENGTH, seed=0)
    for first in range(0, rows.per_epoch, 16):
        rows.take(first, min(16, rows.per_epoch - first))
    return rows.per_epoch * (LENGTH - 1)


class Timed:
    """A function whose calls' seconds are added up."""

    def __init__(self, function: Callable):
        self.function, self.seconds = function, 0.0

    def __call__(self, *args, **kwargs):
        start = time.perf_counter()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start


def loop_share(flags: list[str], steps: int) -> dict:
    """The loop's own share of steps of `hf-recurrent train FLAGS`, after a tenth of them to warm up."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(*arguments.parse([*flags, "--max-steps", str(steps), "--output-dir", f"{folder}/run", "--cpu"]))
        parts = {"forward": run.model, "backward": run.accelerator, "clip": run.accelerator, "step": run.optimizer}
        names = {"forward": "forward", "backward": "backward", "clip": "clip_grad_norm_", "step": "step"}
        timed = {}
        for part, owner in parts.items():
            timed[part] = Timed(getattr(owner, names[part]))
            setattr(owner, names[part], timed[part])
        begun, one_step = {}, run._step
        warm = steps // 10

        def step():
            if run.state.step == warm:
                begun.update({part: timer.seconds for part, timer in timed.items()}, start=time.perf_counter())
            return one_step()

        class Ended(Exception):
            pass

        def ended(*_):  # validation and the last save are no part of the steps
            raise Ended

        run._step = step
        run.save_model = ended
        try:
            run.train()
        except Ended:
            total = time.perf_counter() - begun["start"]
        parameters = sum(parameter.numel() for parameter in run.model.parameters())
    seconds = {part: timer.seconds - begun[part] for part, timer in timed.items()}
    counted = steps - warm
    return {
        "flags": " ".join(flags),
        "parameters": parameters,
        "steps": counted,
        "milliseconds_of_a_step": round(1e3 * total / counted, 2),
        **{f"{part}_share": round(value / total, 4) for part, value in seconds.items()},
        "loop_share": round(1 - sum(seconds.values()) / total, 4),
    }


def measure(args: argparse.Namespace) -> dict:
    documents = list(stdlib_documents())
    corpus = Documents(lambda epoch: documents)
    bpe = train_bpe([document.text for document in documents[:400]], 4096)
    tokenizers = {"BPE of 4096": bpe, "bytes": byte_tokenizer()}
    rates = {name: input_rates(tokenizer, corpus, args.rounds) for name, tokenizer in tokenizers.items()}
    flags = [*args.flags.split(), "--tokenizer", "bytes", "--max-documents", "100", "--validation-share", "0"]
    return {"machine": machine(PACKAGES), "goals": GOALS, "tokenising": rates, "loop": loop_share(flags, args.steps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for tokenising.json")
    parser.add_argument("--rounds", type=positive, default=3, help="default: 3")
    parser.add_argument("--steps", type=positive, default=200, help="of the training run (default: 200)")
    parser.add_argument(
        "--flags",
        default="--hidden-size 128 --num-hidden-layers 4 --sequence-length 256 --batch-size 8",
        help="of the training run (default: %(default)s)",
    )
    args = parser.parse_args()
    if args.output is not None:
        make_folder(parser, args.output)
    measured = measure(args)
    text = json.dumps(measured, indent=2)
    print(text)
    if args.output is not None:
        write_whole(args.output / "tokenising.json", text + "\n")
        print(f"Written: tokenising.json in {args.output}", file=sys.stderr)


if __name__ == "__main__":
    main()
