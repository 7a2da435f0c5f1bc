"""What it costs to go on from a checkpoint: the time until the first step of a run that is resumed, beside that of the
same run when it begins; for the 125M Longhorn of the paper, with AdamW's moments.

Beside it: how long a checkpoint takes to be written, and its bytes to be read as a file (which they are then from the
page cache, as in a resume soon after the interruption)."""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
from pathlib import Path

from decode import SIZES, SMALL, build, config
from hf_recurrent.files import write_whole
from hf_recurrent.measure import machine, make_folder, positive
from hf_recurrent.training import arguments
from hf_recurrent.training.loop import Run
from tokenising import seconds_of

GOAL_SECONDS = 5.0
PACKAGES = ("hf-recurrent", "torch", "transformers", "accelerate")


def new_run(flags: list[str]) -> Run:
    """A run as it is before its first step."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return Run(*arguments.parse(flags))


def trained(flags: list[str]) -> tuple[int, float]:
    """Train for a step; the model's parameters, and the seconds that the one checkpoint has taken."""
    run, seconds = new_run(flags), []
    save_checkpoint = run.save_checkpoint
    run.save_checkpoint = lambda: seconds.append(seconds_of(save_checkpoint)[0])
    run.train()
    return run.parameters, *seconds


def read(folder: Path) -> int:
    """Read every file of a folder; their bytes."""
    return sum(len(path.read_bytes()) for path in folder.rglob("*") if path.is_file())


def measure(model, folder: Path, rounds: int) -> dict:
    """
    Args:
        model: to train.
        folder: an empty one, for text, model and run.

    Returns:
        parameters, checkpoint_bytes; medians of seconds: begun and resumed (each until the first step), cost (the
        difference of the two in a round), saved, read.
    """
    model.save_pretrained(folder / "model")
    (folder / "text.txt").write_text("To be, or not to be, that is the question:\n" * 50)
    flags = f"--model {folder}/model --data-files {folder}/text.txt --tokenizer bytes --validation-share 0 --cpu"
    flags += " --sequence-length 16 --batch-size 1 --health-steps 0 --max-steps 1 --save-steps 1 --no-token-cache"
    parameters, saved = trained([*flags.split(), "--output-dir", f"{folder}/run"])
    [checkpoint] = (folder / "run" / "checkpoints").iterdir()
    seconds: dict[str, list[float]] = {"begun": [], "resumed": [], "cost": [], "saved": [saved], "read": []}
    for number in range(rounds):
        begun = seconds_of(lambda: new_run([*flags.split(), "--output-dir", f"{folder}/new-{number}"]))[0]  # noqa: B023
        resumed, run = seconds_of(lambda: new_run([*flags.split(), "--output-dir", f"{folder}/run", "--resume"]))
        if run.state.step != 1:
            raise RuntimeError(f"the run went on from step {run.state.step}, expected 1")
        del run
        reading, size = seconds_of(lambda: read(checkpoint))
        for name, value in {"begun": begun, "resumed": resumed, "cost": resumed - begun, "read": reading}.items():
            seconds[name].append(value)
    medians = {name: round(statistics.median(values), 3) for name, values in seconds.items()}
    return {"parameters": parameters, "checkpoint_bytes": size, "rounds": rounds, "seconds": medians}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog="example: python benchmarks/resuming.py")
    parser.add_argument("--rounds", type=positive, default=5, help="resumes that are timed (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it works")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"), help="folder of resuming.json")
    args = parser.parse_args(argv)
    make_folder(parser, args.output)
    model = build(config("Longhorn", SMALL | {"vocab_size": 512} if args.quick else SIZES, preset=not args.quick))
    with tempfile.TemporaryDirectory() as folder:
        found = {"goal_seconds": GOAL_SECONDS, **measure(model, Path(folder), args.rounds)}
    size = found["checkpoint_bytes"] / 2**20
    print(f"{found['parameters']:,} parameters, checkpoint of {size:,.0f} MiB; medians of {args.rounds}")
    for name, words in (
        ("begun", "until the first step of a new run"),
        ("resumed", "until the first step of a resumed run"),
        ("cost", f"what the resume costs (asked for: at most {GOAL_SECONDS:g})"),
        ("saved", "to write the checkpoint, once"),
        ("read", "to read its files"),
    ):
        print(f"{found['seconds'][name]:>8.2f} s  {words}")
    path = args.output / "resuming.json"
    write_whole(path, json.dumps({**found, "machine": machine(PACKAGES)}, indent=1) + "\n")
    print(f"Written: {path}")


if __name__ == "__main__":
    main()
