"""What a training step on the CPU gains where the C library keeps freed memory, as training has it keep.

The recipe of Shakespeare's characters with a smaller batch, and the demo's: steps of the same rows, each setting in
processes of its own, in turn. Seconds are the median of a process's later half of steps; memory is its largest
resident size.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from hf_recurrent import malloc
from hf_recurrent.files import write_whole
from hf_recurrent.measure import machine, make_folder, positive
from hf_recurrent.training.arguments import parse
from hf_recurrent.training.costs import peak_memory
from hf_recurrent.training.model import create_model
from hf_recurrent.training.optimizer import create_optimizer
from hf_recurrent.training.tokenizer import tokenizer_size

RECIPES = Path(__file__).parents[1] / "examples" / "recipes"
# recipe -> rows of a step
CASES = {"stdlib_mingru": 4, "shakespeare_char_mingru": 16}
SETTINGS = {"default": lambda: None, "kept": malloc.keep_freed_memory, "returned": malloc.return_freed_memory}


def steps(case: str, setting: str, number: int) -> dict:
    """Some training steps in this process."""
    SETTINGS[setting]()
    model_args, data_args, train_args = parse([str(RECIPES / f"{case}.yaml")])
    model = create_model(model_args, tokenizer_size(data_args)).train()
    optimizer = create_optimizer(model, train_args, model.device)
    ids = torch.randint(model.config.vocab_size, (CASES[case], data_args.sequence_length))
    seconds, faults = [], []
    for _ in range(number):
        faults_before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults_before)
    later = slice(number // 2, None)
    return {
        "seconds": statistics.median(seconds[later]),
        "page_faults": statistics.median(faults[later]),
        "peak_bytes": peak_memory(torch.device("cpu")),
    }


def summary(done: list[dict], default: list[dict]) -> dict:
    """Medians over processes; each one's time is divided by that of the default's just before it."""
    ratios = [one["seconds"] / limit["seconds"] for one, limit in zip(done, default, strict=True)]
    return {name: statistics.median(one[name] for one in done) for name in done[0]} | {
        "ratio": statistics.median(ratios)
    }


def table(cases: dict) -> str:
    lines = [f"{'':<27}{'':<10}{'ms':>9}{'of default':>12}{'page faults':>13}{'MiB':>8}"]
    for case, found in cases.items():
        for setting, one in found.items():
            lines.append(
                f"{case:<27}{setting:<10}{one['seconds'] * 1e3:>9.1f}{one['ratio']:>12.2f}{one['page_faults']:>13,.0f}"
                f"{one['peak_bytes'] / 2**20:>8,.0f}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/freed_memory.py --threads 2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="recipes (default: all)")
    parser.add_argument("--rounds", type=positive, default=3, help="processes of each setting (default 3)")
    parser.add_argument("--steps", type=positive, default=12, help="of a process (default 12)")
    parser.add_argument("--threads", type=positive, help="threads (default: PyTorch's)")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"), help="folder of freed_memory.json")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.part:
        print(json.dumps(steps(*arguments.part, arguments.steps)))
        return
    make_folder(parser, arguments.output)
    flags = ["--steps", str(arguments.steps)] + (["--threads", str(arguments.threads)] if arguments.threads else [])
    cases = {}
    with tqdm(total=len(arguments.cases) * len(SETTINGS) * arguments.rounds, disable=None) as bar:
        for case in arguments.cases:
            runs = {setting: [] for setting in SETTINGS}
            for _ in range(arguments.rounds):
                for setting, done in runs.items():
                    command = [sys.executable, __file__, "--part", case, setting, *flags]
                    done.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))
                    bar.update()
            cases[case] = {setting: summary(done, runs["default"]) for setting, done in runs.items()}
    print(table(cases))
    path = arguments.output / "freed_memory.json"
    about = {"command": "python benchmarks/freed_memory.py " + " ".join(["--rounds", str(arguments.rounds), *flags])}
    document = {**about, "machine": machine(("hf-recurrent", "torch", "transformers")), "cases": cases}
    write_whole(path, json.dumps(document, indent=1) + "\n")
    print(f"Written: {path}")


if __name__ == "__main__":
    main()
