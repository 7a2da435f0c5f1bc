"""Task files for lm-eval from BLiMP's own files, for a machine without a network.

    python examples/blimp_tasks.py BLIMP_FOLDER runs/blimp-tasks
    hf-recurrent evaluate lm --model runs/books --tasks blimp_local --include-path runs/blimp-tasks

BLiMP (https://github.com/alexwarstadt/blimp, https://arxiv.org/abs/1912.00582): 67 paradigms of 1000 pairs of sentences
that differ in one thing, one of them grammatical. Two groups are written:

- blimp_local: as in the paper, a model is right where it finds the grammatical sentence more likely;
- blimp_letters: the same pairs as questions with the answers A and B, to which the pair's number gives the order.
"""

import argparse
import sys
from pathlib import Path

import yaml

SHARED = {
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "validation_split": "train",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    "metadata": {"version": 1.0},
}
PAIRS = {
    "doc_to_text": "",
    "doc_to_target": 0,
    "doc_to_choice": "{{[sentence_good, sentence_bad]}}",
    "num_fewshot": 0,
}
ODD = "pairID|int % 2"
LETTERS = {
    "doc_to_text": "Which sentence is grammatical?\n"
    f"A. {{{{sentence_bad if {ODD} else sentence_good}}}}\n"
    f"B. {{{{sentence_good if {ODD} else sentence_bad}}}}\n"
    "Answer:",
    "doc_to_target": f"{{{{{ODD}}}}}",
    "doc_to_choice": ["A", "B"],
    "fewshot_split": "train",
    "fewshot_config": {"sampler": "first_n"},
}


def write_tasks(source: Path, folder: Path) -> list[str]:
    """Task files for each .jsonl of `source` and both groups. Returns the paradigms' names.

    Raises:
        ValueError: there are none.
    """
    files = sorted(source.glob("*.jsonl"))
    if not files:
        raise ValueError(f"{source}: there are no .jsonl files of BLiMP")
    folder.mkdir(parents=True, exist_ok=True)
    for group, fields in (("blimp_local", PAIRS), ("blimp_letters", LETTERS)):
        for file in files:
            task = {"task": f"{group}_{file.stem}", "dataset_kwargs": {"data_files": str(file.resolve())}}
            (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump({**task, **SHARED, **fields}))
        mean = {"metric": "acc", "weight_by_size": False}
        members = {"group": group, "task": [f"{group}_{file.stem}" for file in files], "aggregate_metric_list": [mean]}
        (folder / f"{group}.yaml").write_text(yaml.safe_dump(members))
    return [file.stem for file in files]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of BLiMP's .jsonl files")
    parser.add_argument("folder", type=Path, help="where the task files are to be written")
    arguments = parser.parse_args()
    try:
        names = write_tasks(arguments.source, arguments.folder)
    except (ValueError, OSError) as error:
        sys.exit(f"blimp_tasks.py: error: {error}")
    print(f"Written: blimp_local and blimp_letters, {len(names)} tasks each, in {arguments.folder}")
