"""lm-eval's results as tables, and as the `model-index` of a model card."""

import dataclasses
import math

from huggingface_hub import EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index

# Column, task, metric. The tasks are those of the Longhorn paper (https://arxiv.org/abs/2407.14207). Its authors' code
# (https://github.com/Cranial-XIX/longhorn) trains only, so the metrics are those that are usual for linear recurrences:
# per character (acc_norm) where the choices are phrases of different lengths and questions are hard, else acc, which is
# all that lm-eval has for WinoGrande, SIQA and BoolQ. Both are in lm-eval.json.
PAPER_TASKS = (
    ("PIQA acc", "piqa", "acc"),
    ("Hella acc_n", "hellaswag", "acc_norm"),
    ("Wino acc", "winogrande", "acc"),
    ("ARC-e acc", "arc_easy", "acc"),
    ("ARC-c acc_n", "arc_challenge", "acc_norm"),
    ("OBQA acc_n", "openbookqa", "acc_norm"),
    ("SIQA acc", "social_iqa", "acc"),
    ("BoolQ acc", "boolq", "acc"),
)
PERPLEXITIES = (("Wiki ppl", "wikitext", "word_perplexity"), ("LMB ppl", "lambada_openai", "perplexity"))
HARNESS = "https://github.com/EleutherAI/lm-evaluation-harness"


def measured(results: dict, task: str, metric: str) -> float | None:
    """A metric of a task, by the first of its filters; None where it was not measured."""
    for name, value in results["results"].get(task, {}).items():
        if name.partition(",")[0] == metric and isinstance(value, (int, float)):
            return float(value)
    return None


def paper_cells(results: dict) -> tuple[list[str], list[str]]:
    """The titles of the Longhorn paper's table and one row of it: accuracies in per cent, their mean where all were
    measured, and perplexities. What was not measured is a dash."""
    accuracies = [measured(results, task, metric) for _, task, metric in PAPER_TASKS]
    mean = None if None in accuracies else sum(accuracies) / len(accuracies)
    values = [None if value is None else 100 * value for value in (*accuracies, mean)]
    values += [measured(results, task, metric) for _, task, metric in PERPLEXITIES]
    titles = ["Model", *(title for title, *_ in PAPER_TASKS), "Avg.", *(title for title, *_ in PERPLEXITIES)]
    cells = [str(results["config"]["model"]), *("–" if value is None else f"{value:.2f}" for value in values)]
    return titles, cells


def paper_table(results: dict) -> str:
    """What `paper_cells` gives, in Markdown."""
    titles, cells = paper_cells(results)
    rows = (titles, ["---"] * len(titles), [cell.replace("|", "\\|") for cell in cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _entries(results: dict, task: str) -> list[EvalResult]:
    config, shots = results["configs"][task], results.get("n-shot", {}).get(task)
    entries = []
    for name, value in results["results"].get(task, {}).items():
        metric, comma, chosen = name.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)) or not math.isfinite(value):
            continue
        entries.append(
            EvalResult(
                task_type="text-generation",
                task_name="Text Generation",
                dataset_type=str(config.get("dataset_path") or task),
                dataset_name=task,
                dataset_config=config.get("dataset_name"),
                dataset_split=config.get("test_split") or config.get("validation_split"),
                dataset_args=None if shots is None else {"num_few_shot": shots},
                metric_type=metric,
                metric_name=metric if chosen == "none" else f"{metric} ({chosen})",
                metric_value=value,
                source_name=f"lm-evaluation-harness {results.get('lm_eval_version', '')}".strip(),
                source_url=HARNESS,
            )
        )
    return entries


def task_results(results: dict) -> list[EvalResult]:
    """What lm-eval found, for `huggingface_hub.ModelCardData`: one for each task and metric.

    Args:
        results: as for `model_index`.
    """
    # Tasks on the same data are told apart by their names, else they would be put under that of the first.
    return [
        dataclasses.replace(entry, dataset_config=entry.dataset_config or task)
        for task in results["configs"]
        for entry in _entries(results, task)
    ]


def model_index(results: dict, model_name: str) -> list[dict]:
    """The `model-index` of a model card's metadata.

    Args:
        results: lm-eval's, from `evaluate` or the file that it wrote. Metrics of single tasks that are finite numbers
            are taken; groups repeat their tasks.

    Returns:
        [{"name": model_name, "results": [...]}], an entry for each task.
    """
    entries = []
    for task in results["configs"]:
        # One by one: tasks on the same data would be put under the name of the first.
        for index in eval_results_to_model_index(model_name, _entries(results, task)):
            entries += index["results"]
    return [{"name": model_name, "results": entries}]
