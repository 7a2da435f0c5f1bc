"""`hf-recurrent evaluate EVALUATION`: each evaluation in a module of its name with a function `run(argv)`."""

import importlib

from ..messages import nearest
from .parser import CommandLineError

EVALUATIONS = {
    "perplexity": "of a text of any length, by position",
    "lm": "the tasks of lm-eval (PIQA, HellaSwag, MMLU, ...), or task files of your own",
}

HELP = """\
usage: hf-recurrent evaluate EVALUATION --model DIR [--flags]

evaluations:
{evaluations}

`hf-recurrent evaluate EVALUATION --help` explains one.

examples:
  hf-recurrent evaluate perplexity --model runs/books --data-files book.txt
  hf-recurrent evaluate lm --model runs/books --tasks piqa,hellaswag --output runs/books-lm
"""


def run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP.format(evaluations="\n".join(f"  {name:<12} {what}" for name, what in EVALUATIONS.items())), end="")
        return 0
    if argv[0].startswith("-"):
        raise CommandLineError(f"unknown flag {argv[0]}; evaluate is followed by {' or '.join(EVALUATIONS)}")
    if argv[0] not in EVALUATIONS:
        raise CommandLineError(f"unknown evaluation {argv[0]}{nearest(argv[0], EVALUATIONS)}")
    return importlib.import_module(f".evaluate_{argv[0]}", __package__).run(argv[1:])
