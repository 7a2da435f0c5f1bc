"""AdamW's step on the 125M Longhorn, in the three ways that PyTorch has it: fused (which training uses on CPUs and
GPUs), by operations on all parameters together (foreach), and one parameter after the other."""

import argparse
import json
from pathlib import Path

import torch

from decode import SIZES, SMALL, build, config
from hf_recurrent.files import write_whole
from hf_recurrent.measure import machine, make_folder, paired, positive

WAYS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "one by one": {"foreach": False}}


def steps(quick: bool) -> tuple[int, dict]:
    """The model's parameters, and each way's step; all have gradients, and moments of their own."""
    model = build(config("Longhorn", SMALL if quick else SIZES, preset=not quick))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizers = {name: torch.optim.AdamW(model.parameter_groups(1e-4, 0.1), **way) for name, way in WAYS.items()}
    return model.num_parameters(), {name: lambda _, o=o: o.step() for name, o in optimizers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog="example: python benchmarks/optimizer_step.py")
    parser.add_argument("--rounds", type=positive, default=9, help="steps of each that are timed (default 9)")
    parser.add_argument("--threads", type=positive, help="threads (default: PyTorch's)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it works")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"), help="folder of optimizer_step.json")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    make_folder(parser, arguments.output)
    parameters, candidates = steps(arguments.quick)
    timings = paired(candidates["fused"], candidates, arguments.rounds)
    found = {name: timing.summary() for name, timing in timings.items()}
    for name, summary in found.items():
        print(f"{name:<12}{summary['milliseconds']:>9.1f} ms{summary['ratio']:>8.2f} x fused")
    path = arguments.output / "optimizer_step.json"
    about = {"parameters": parameters, "machine": machine(("hf-recurrent", "torch"))}
    write_whole(path, json.dumps({**about, "ways": found}, indent=1) + "\n")
    print(f"Written: {path}")


if __name__ == "__main__":
    main()
