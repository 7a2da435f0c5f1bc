"""One long row beside a batch of as many bytes: with a single row, all threads have to share its positions."""

import argparse
import json
from pathlib import Path

import torch

from hf_recurrent.bench import CASES, DTYPES, backward_of, forward_of
from hf_recurrent.files import write_whole
from hf_recurrent.malloc import keep_freed_memory
from hf_recurrent.measure import machine, make_folder, paired, positive


def passes(shape: tuple[int, int, int], dtype: torch.dtype) -> dict:
    """Forward, and backward alone, of `linear_scan`."""
    scan = CASES[0]
    inputs = [scan.inputs(shape, dtype, torch.device("cpu"))]
    return {"forward": forward_of(scan.function, inputs), "backward": backward_of(scan.function, inputs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog="example: python benchmarks/one_row.py --threads 2")
    parser.add_argument("--length", type=positive, default=2**20, help="positions of the one row (default 1048576)")
    parser.add_argument("--channels", type=positive, default=256, help="(default 256)")
    parser.add_argument("--batch", type=positive, default=64, help="rows that share the positions (default 64)")
    parser.add_argument("--rounds", type=positive, default=9, help="pairs of which the median (default 9)")
    parser.add_argument("--threads", type=positive, help="threads (default: PyTorch's)")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"), help="folder of one_row.json")
    arguments = parser.parse_args()
    if arguments.length % arguments.batch:
        parser.error(f"--length {arguments.length} is no multiple of --batch {arguments.batch}")
    make_folder(parser, arguments.output)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    torch.manual_seed(0)
    shapes = [(arguments.batch, arguments.length // arguments.batch, arguments.channels)]
    shapes.append((1, arguments.length, arguments.channels))
    found = []
    for dtype in DTYPES:
        many, one = (passes(shape, dtype) for shape in shapes)
        name = str(dtype).removeprefix("torch.")
        for what in many:
            timing = paired(many[what], {"one": one[what]}, arguments.rounds, title=f"{name} {what}")["one"].summary()
            found.append({"dtype": name, "pass": what, **timing})
            print(f"{name:<10}{what:<10}{timing['milliseconds']:>9.1f} ms {timing['ratio']:>7.2f} x", flush=True)
    about = {"shapes": shapes, "machine": machine(("hf-recurrent", "torch"))}
    path = arguments.output / "one_row.json"
    write_whole(path, json.dumps({**about, "results": found}, indent=1) + "\n")
    print(f"Written: {path}")


if __name__ == "__main__":
    main()
