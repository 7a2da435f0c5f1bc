"""The time of lm-eval's requests with the model `hf_recurrent`, against lm-eval's own `hf` with the same weights.

    python benchmarks/evaluation.py --output runs/benchmarks

Two kinds of requests, made from the text of Python's own documentation (pydoc), so that nothing need be downloaded:

- HellaSwag-like: a context of about 65 words of text, and four continuations of about 20;
- MMLU-like: five questions with answers before each question, the same for all 246 questions of a subject (as many as
  MMLU's have on average), and four answers of one letter. lm-eval's `hf` reads a prompt once for all four letters, and
  again for each question.
"""

import argparse
import json
import pydoc_data.topics
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

import hf_recurrent
from hf_recurrent.evaluation.lm import RecurrentLM
from hf_recurrent.files import write_whole
from hf_recurrent.measure import machine
from hf_recurrent.training.tokenizer import train_bpe

PACKAGES = ("torch", "transformers", "lm-eval", "tokenizers")
GOALS = {"HellaSwag-like": 2.5, "MMLU-like, 5 shots": 8.0}
QUESTIONS = 246  # of a subject: MMLU has 14042 of 57 subjects


def passages(words: list[str], lengths: np.ndarray, rng: np.random.Generator) -> list[str]:
    starts = rng.integers(len(words) - lengths.max(), size=len(lengths))
    return [" ".join(words[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


def hellaswag_like(words: list[str], documents: int, rng: np.random.Generator) -> list[tuple[str, str]]:
    contexts = passages(words, rng.integers(40, 91, size=documents), rng)
    endings = passages(words, rng.integers(12, 29, size=4 * documents), rng)
    return [(context, f" {ending}") for i, context in enumerate(contexts) for ending in endings[4 * i : 4 * i + 4]]


def mmlu_like(words: list[str], documents: int, rng: np.random.Generator) -> list[tuple[str, str]]:
    def questions(number: int) -> list[str]:
        stems = passages(words, rng.integers(15, 46, size=number), rng)
        answers = passages(words, rng.integers(3, 11, size=4 * number), rng)
        return [
            f"{stem}\n" + "".join(f"{letter}. {answers[4 * i + j]}\n" for j, letter in enumerate("ABCD")) + "Answer:"
            for i, stem in enumerate(stems)
        ]

    title = "The following are multiple choice questions (with answers).\n\n"
    shots = "".join(f"{question} {'ABCD'[i % 4]}\n\n" for i, question in enumerate(questions(5)))
    return [(title + shots + question, f" {letter}") for question in questions(documents) for letter in "ABCD"]


def run(lm, pairs: list[tuple[str, str]]) -> tuple[float, list[tuple[float, bool]]]:
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0, metadata=("benchmark", i, 1))
        for i, pair in enumerate(pairs)
    ]
    start = time.perf_counter()
    results = lm.loglikelihood(requests, disable_tqdm=True)
    return time.perf_counter() - start, results


def measure(args: argparse.Namespace) -> dict:
    rng = np.random.default_rng(0)
    text = "\n".join(pydoc_data.topics.topics.values())
    tokenizer, words = train_bpe([text], args.vocab_size), text.split()
    torch.manual_seed(0)
    config = hf_recurrent.MinGRUConfig(
        hidden_size=args.hidden_size, num_hidden_layers=args.num_hidden_layers, vocab_size=len(tokenizer)
    )
    model = hf_recurrent.MinGRUForCausalLM(config).eval()
    ours = RecurrentLM(model, tokenizer=tokenizer, batch_size=args.batch_size)
    theirs = HFLM(model, tokenizer=tokenizer, batch_size=args.batch_size, max_length=1 << 20)
    rows = []
    makers = {"HellaSwag-like": hellaswag_like, "MMLU-like, 5 shots": mmlu_like}
    for (name, make), documents in zip(makers.items(), (args.documents, args.questions), strict=True):
        pairs = make(words, documents, rng)
        warm_up = pairs[:32]
        run(theirs, warm_up), run(ours, warm_up)
        seconds, ratios = {"hf": [], "hf_recurrent": []}, []
        for _ in range(args.rounds):
            hf, expected = run(theirs, pairs)
            mine, given = run(ours, pairs)
            seconds["hf"].append(hf)
            seconds["hf_recurrent"].append(mine)
            ratios.append(hf / mine)
        difference = max(abs(a[0] - b[0]) / abs(b[0]) for a, b in zip(given, expected, strict=True))
        same = np.mean([np.argmax([a[0] for a in given[i : i + 4]]) == np.argmax([b[0] for b in expected[i : i + 4]])
                        for i in range(0, len(pairs), 4)])  # fmt: skip
        rows.append(
            {
                "requests": name,
                "documents": len(pairs) // 4,
                "tokens_of_a_request": round(statistics.mean(len(tokenizer(a + b)["input_ids"]) for a, b in pairs), 1),
                "seconds": {which: round(statistics.median(values), 3) for which, values in seconds.items()},
                "times_faster": round(statistics.median(ratios), 2),
                "goal": GOALS[name],
                "largest_relative_difference": float(f"{difference:.2e}"),
                "same_answers": float(same),
                "rounds": args.rounds,
            }
        )
    return {
        "machine": machine(PACKAGES),
        "model": {"parameters": model.num_parameters(), **vars(args)},
        "results": rows,
    }


def table(measured: dict) -> str:
    lines = [
        "| requests | documents | tokens each | hf | hf_recurrent | faster | asked for | same answers |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in measured["results"]:
        lines.append(
            f"| {row['requests']} | {row['documents']} | {row['tokens_of_a_request']} | {row['seconds']['hf']:.2f} s | "
            f"{row['seconds']['hf_recurrent']:.2f} s | {row['times_faster']:.2f} × | ≥ {row['goal']} × | "
            f"{row['same_answers']:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="folder for evaluation.json")
    for name, value in (("documents", 100), ("questions", QUESTIONS), ("rounds", 3), ("batch-size", 32),
                        ("hidden-size", 256), ("num-hidden-layers", 4), ("vocab-size", 8192)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    args = parser.parse_args()
    output = args.output
    del args.output
    measured = measure(args)
    print(table(measured))
    if output is not None:
        Path(output).mkdir(parents=True, exist_ok=True)
        write_whole(Path(output, "evaluation.json"), json.dumps(measured, indent=2) + "\n")
        print(f"Written: evaluation.json in {output}", file=sys.stderr)


if __name__ == "__main__":
    main()
