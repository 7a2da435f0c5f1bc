"""`hf-recurrent evaluate lm`: lm-eval's tasks."""

import argparse
import logging
import sys
import warnings
from pathlib import Path

from .parser import (
    Parser,
    add_model_flags,
    add_output_folder,
    check_output_folder,
    in_one_process,
    load_model_and_tokenizer,
    number,
)


def _rows(text: str) -> int | str:
    return text if text == "auto" else number(int, 1)(text)


_rows.__name__ = "int"  # argparse names it: "invalid int value"


def _limit(text: str) -> float | int:
    value = number(float, 0)(text)
    if value <= 0 or value >= 1 and not value.is_integer():
        raise argparse.ArgumentTypeError(
            f"must be a number of documents, or a part of them between 0 and 1; got {text}"
        )
    return value if value < 1 else int(value)


_limit.__name__ = "float"


def _parser() -> Parser:
    parser = Parser(
        prog="hf-recurrent evaluate lm",
        usage="hf-recurrent evaluate lm --model DIR --tasks TASK[,TASK ...] [--flags]",
        description="""\
Runs tasks of lm-eval (https://github.com/EleutherAI/lm-evaluation-harness). What several requests begin with, a
few-shot prompt or the context of several choices, is read once; the results are those of lm-eval's own model "hf". It
takes the last 2048 tokens of a longer text, as --max-length 2048 does here; without, all are read.""",
        epilog="""\
The group longhorn_paper holds the eight tasks of the Longhorn paper, and perplexities of WikiText-2 and LAMBADA.
With --output an interrupted evaluation is taken up again by the same command.

examples:
  hf-recurrent evaluate lm --model runs/books --tasks piqa,hellaswag --batch-size 64 --output runs/books-lm
  hf-recurrent evaluate lm --model runs/books --tasks longhorn_paper
  hf-recurrent evaluate lm --model runs/books --tasks mmlu --num-fewshot 5 --limit 100
  hf-recurrent evaluate lm --model runs/books --tasks "my_task,other_*" --include-path my_tasks
""",
    )
    add = parser.add_argument
    add_model_flags(parser, "compute")
    add("--tasks", required=True, metavar="TASK[,TASK ...]", help="names of tasks, groups or tags, also with * and ?")
    add("--num-fewshot", type=number(int, 0), metavar="N", help="examples before each question (default: the task's)")
    add(
        "--limit",
        type=_limit,
        metavar="N",
        help="only the first N documents of each task, or below 1 that part of them",
    )
    add("--batch-size", type=_rows, default="auto", metavar="N", help="texts that are read at once; auto is 64")
    add("--max-length", type=number(int, 1), metavar="N", help="read only the last N tokens of a text (default: all)")
    add(
        "--include-path",
        nargs="+",
        default=[],
        metavar="DIR",
        help="folders of task files of your own; they may run code",
    )
    add_output_folder(parser, "also write lm-eval.json there, and keep there what an interrupted run has done")
    return parser


def run(argv: list[str]) -> int:
    args = _parser().parse(argv)
    several = "python -m hf_recurrent.evaluation --model hf_recurrent"
    in_one_process("evaluate lm runs", f"; lm-eval's own command line runs in several: {several}")
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError:
        raise ImportError("evaluate lm needs lm-eval: pip install 'hf-recurrent[eval]'") from None

    from lm_eval.utils import make_table

    from ..evaluation.harness import evaluate, find_tasks, load_tasks
    from ..evaluation.lm import RecurrentLM
    from ..evaluation.tables import PAPER_TASKS, paper_table

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of what is meant to be so
    output = None if args.output is None else Path(args.output)
    if output is not None:
        check_output_folder(args, "lm-eval.json")
    names = list(dict.fromkeys(filter(None, map(str.strip, args.tasks.split(",")))))
    manager = find_tasks(names, args.include_path, lambda: print("Reading lm-eval's list of tasks", file=sys.stderr))
    tasks = load_tasks(manager, names)
    model, tokenizer = load_model_and_tokenizer(args, ends=True)  # by which lm-eval begins texts
    lm = RecurrentLM(model, tokenizer=tokenizer, batch_size=args.batch_size, max_length=args.max_length)
    try:
        results = evaluate(lm, tasks, args.num_fewshot, args.limit, output, Path(args.model).resolve().name)
    except KeyboardInterrupt:
        if output is not None:
            print(f"What is done is kept in {output}; the same command goes on from there", file=sys.stderr)
        raise
    if args.num_fewshot:
        fixed = [task for task in results["configs"] if results["n-shot"].get(task) == 0]
        if fixed:  # lm-eval's rule: who writes a task without examples has meant it
            warnings.warn(f"--num-fewshot: the files of {', '.join(fixed)} say 0, which stays", stacklevel=1)
    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    if any(task in results["results"] for _, task, _ in PAPER_TASKS):
        print(paper_table(results))
    if output is not None:
        print(f"Written: lm-eval.json in {output}")
    return 0
