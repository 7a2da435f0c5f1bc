"""Evaluate a model from Python: perplexity of a text by position, and lm-eval's tasks.

`hf-recurrent evaluate perplexity` and `hf-recurrent evaluate lm` do the same from the command line.
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_recurrent.evaluation import measure_perplexity

EPILOG = """\
examples:
  python examples/evaluate.py runs/demo --text long.txt
  python examples/evaluate.py runs/demo --text long.txt --tasks piqa arc_easy --limit 100
  python examples/evaluate.py runs/demo --text long.txt --tasks my_task --include-path my_tasks
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="DIR", help="folder of a language model, or its name on the Hub")
    parser.add_argument("--text", type=Path, required=True, help="file of text, of any length")
    parser.add_argument("--tasks", nargs="+", default=[], help="names of lm-eval's tasks")
    parser.add_argument("--include-path", help="folder of task files of your own")
    parser.add_argument("--limit", type=int, help="documents of each task (all)")
    args = parser.parse_args()

    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        parser.error(f"--text {args.text}: {error}")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()

    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    result = measure_perplexity(model, tokens, text_bytes=len(text.encode()))
    print("tokens before    perplexity")
    for row in result.rows():
        print(f"{row['from']:>7,} - {row['to']:<7,} {row['perplexity']:>8.2f}")
    print(f"{result.bits_per_byte:.3f} bits per byte over the whole text")

    if args.tasks:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table

        from hf_recurrent.evaluation.lm import RecurrentLM

        manager = TaskManager(include_path=args.include_path)
        lm = RecurrentLM(model, tokenizer=tokenizer, batch_size="auto")  # in place of lm-eval's own "hf"
        print(make_table(simple_evaluate(lm, tasks=args.tasks, task_manager=manager, limit=args.limit)))


if __name__ == "__main__":
    main()
