"""What activation checkpointing saves of a training step's memory, and what it costs of its time.

Models of about 125M parameters (the paper's own where there is a preset), one row of 2048 tokens, float32, AdamW.
Memory is the largest resident size of two steps beyond that of a process that has only imported the package: weights,
gradients, AdamW's moments, activations and logits. With checkpointing, blocks are computed again in backward, the loss
is taken in pieces, and freed memory goes back to the system. Each figure has a process of its own. Time is that of
forward and backward with checkpointing divided by that of the same without, measured just before it; the optimiser's
step is in neither.
"""

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from decode import FAMILIES, SIZES, SMALL, build, config
from hf_recurrent import malloc
from hf_recurrent.files import write_whole
from hf_recurrent.measure import can_measure_peaks, machine, make_folder, paired, peak_bytes, positive
from hf_recurrent.training.model import checkpoint_activations

LENGTH = 2048


def loss_of(model: PreTrainedModel, length: int, options: dict[str, bool]) -> torch.Tensor:
    ids = torch.arange(length)[None] % model.config.vocab_size
    return model(input_ids=ids, labels=ids, use_cache=False, **options).loss


def new_model(family: str, quick: bool) -> PreTrainedModel:
    return build(config(family, SMALL if quick else SIZES, preset=not quick)).train()


def memory(family: str, checkpointing: bool, quick: bool) -> int:
    """Bytes at the peak of two steps; the optimiser has its moments in the second one."""

    def steps() -> None:
        model = new_model(family, quick)
        malloc.keep_freed_memory()  # as training does
        options = checkpoint_activations(model) if checkpointing else {}
        optimizer = torch.optim.AdamW(model.parameter_groups(1e-4, 0.1), fused=True)
        for _ in range(2):
            loss_of(model, LENGTH, options).backward()
            optimizer.step()
            optimizer.zero_grad()

    return peak_bytes(steps)


def time(family: str, rounds: int, quick: bool) -> dict:
    """The step with checkpointing, and its ratio to the step without."""
    model, checkpointed = new_model(family, quick), new_model(family, quick)
    checkpointed.load_state_dict(model.state_dict())
    options = checkpoint_activations(checkpointed)

    def step(chosen: PreTrainedModel, options: dict[str, bool]):
        def run(_) -> None:
            # Either holds for the whole process, and training chooses so.
            malloc.return_freed_memory() if options else malloc.keep_freed_memory()
            loss_of(chosen, LENGTH, options).backward()
            chosen.zero_grad()

        return run

    timings = paired(step(model, {}), {"checkpointing": step(checkpointed, options)}, rounds)
    return {"parameters": model.num_parameters(), **timings["checkpointing"].summary()}


def in_a_process(family: str, what: str, flags: list[str]):
    command = [sys.executable, __file__, "--part", family, what, *flags]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def measure_memory(family: str, flags: list[str]) -> dict:
    without, kept = (in_a_process(family, what, flags) for what in ("without", "with"))
    return {"bytes_without": without, "bytes_with": kept, "ratio": round(kept / without, 4)}


MEASURES = {"memory": measure_memory, "time": lambda family, flags: in_a_process(family, "time", flags)}


def before(path: Path) -> dict[str, dict]:
    """The figures of earlier runs: family -> section -> what was found."""
    try:
        return json.loads(path.read_text())["families"]
    except (OSError, ValueError, KeyError):
        return {}


def table(families: dict[str, dict]) -> str:
    lines = [f"{'':<10}{'MiB without':>13}{'MiB with':>11}{'memory':>9}{'time':>8}"]
    for family, found in families.items():
        line = f"{family:<10}"
        if memory := found.get("memory"):
            line += f"{memory['bytes_without'] / 2**20:>13,.0f}{memory['bytes_with'] / 2**20:>11,.0f}"
            line += f"{memory['ratio']:>9.0%}"
        if timing := found.get("time"):
            line = f"{line:<43}{timing['ratio']:>6.2f} ×"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="examples:\n  python benchmarks/activation_checkpointing.py --families Longhorn\n"
        "  python benchmarks/activation_checkpointing.py --only memory      # the other figures in the folder stay\n"
        "  python benchmarks/activation_checkpointing.py --quick",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="what to measure")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES), help="which figures of it")
    parser.add_argument("--rounds", type=positive, default=3, help="pairs of steps that are timed (default 3)")
    parser.add_argument("--threads", type=positive, help="threads of PyTorch and of the kernels (default: PyTorch's)")
    parser.add_argument("--quick", action="store_true", help="tiny models, to see that it works")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/benchmarks"), help="folder of activation_checkpointing.json"
    )
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.part:
        family, what = arguments.part
        quick = arguments.quick
        found = time(family, arguments.rounds, quick) if what == "time" else memory(family, what == "with", quick)
        print(json.dumps(found))
        return
    if "memory" in arguments.only and not can_measure_peaks():
        parser.error("peak memory is measured on Linux only: --only time")
    make_folder(parser, arguments.output)
    path = arguments.output / "activation_checkpointing.json"
    flags = ["--rounds", str(arguments.rounds), *(["--quick"] if arguments.quick else [])]
    flags += ["--threads", str(arguments.threads)] if arguments.threads else []
    families = before(path)
    for family, section in tqdm(list(itertools.product(arguments.families, arguments.only)), disable=None):
        families.setdefault(family, {})[section] = {
            "command": f"python benchmarks/activation_checkpointing.py --families {family} --only {section} "
            + " ".join(flags),
            "machine": machine(("hf-recurrent", "torch", "transformers")),
            "tokens": LENGTH,
            **MEASURES[section](family, flags),
        }
        write_whole(path, json.dumps({"families": families}, indent=1) + "\n")
    print(table(families))
    print(f"Written: {path}")


if __name__ == "__main__":
    main()
