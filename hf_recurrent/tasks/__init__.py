"""The papers' own tasks, generated: as arrays, or as a `datasets.DatasetDict`.

    from hf_recurrent.tasks import build

    data = build("selective_copying", train=10_000, test=1000, length=1024)  # data["train"]["input_ids"], ["labels"]

What each is exactly is said by its function: `help(hf_recurrent.tasks.TASKS["selective_copying"])`.
"""

import inspect
import math
from collections.abc import Callable
from numbers import Integral, Real

import numpy as np

from ..messages import nearest
from .digits import digits, digits_of_folder
from .listops import listops
from .pathfinder import pathfinder
from .signals import pendulum, tones
from .symbols import associative_recall, induction_heads, memory_horizon, selective_copying

__all__ = ["TASKS", "build", "digits", "generate"]

TASKS: dict[str, Callable[..., dict[str, np.ndarray]]] = {
    "selective_copying": selective_copying,
    "associative_recall": associative_recall,
    "memory_horizon": memory_horizon,
    "induction_heads": induction_heads,
    "listops": listops,
    "pendulum": pendulum,
    "tones": tones,
    "pathfinder": pathfinder,
    "digits": digits_of_folder,
}
SPLITS = ("train", "validation", "test")
# What an argument's annotation stands for, and its name in messages.
KINDS = {
    int: (Integral, "an integer"),
    int | None: (Integral | None, "an integer"),
    float: (Real, "a number"),
    str: (str, "text"),
}


def arguments(name: str) -> dict[str, inspect.Parameter]:
    """The arguments of a task's function that say what the examples are."""
    parameters = inspect.signature(TASKS[name]).parameters.items()
    return {argument: p for argument, p in list(parameters)[2:] if p.kind is not p.KEYWORD_ONLY}


def defaults(name: str) -> dict[str, object]:
    """These arguments where they are not given."""
    return {argument: parameter.default for argument, parameter in arguments(name).items()}


def generate(name: str, number: int, seed: int = 0, split: str = "train", **sizes) -> dict[str, np.ndarray]:
    """
    Args:
        name: one of TASKS.
        number: of examples.
        seed: the same one gives the same examples.
        split: "train", "validation" or "test": no two draw the same random numbers.
        sizes: the arguments of the task's function.

    Returns:
        Arrays by name, with a row for each example.

    Raises:
        ValueError: an unknown task, split or argument; a number below 1, a seed below 0, an argument that is not
            finite; what the task's function raises.
        OSError: the digits' files are not there, or cannot be read.
    """
    if name not in TASKS:
        raise ValueError(f"no task {name!r}{nearest(name, TASKS)}")
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}: expected one of {', '.join(SPLITS)}")
    valid = arguments(name)
    for argument, value in sizes.items():
        if argument not in valid:
            raise ValueError(f"{name} has no argument {argument!r}{nearest(argument, valid)}")
        kind, said = KINDS[valid[argument].annotation]
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ValueError(f"{argument} must be {said}, got {value!r}")
        if isinstance(value, Real) and not math.isfinite(value):
            raise ValueError(f"{argument} must be finite, got {value!r}")
    for argument, value, least in (("number", number, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ValueError(f"{argument} must be an integer, got {value!r}")
        if value < least:
            raise ValueError(f"{argument} must be at least {least}, got {value}")
    # What is read from files is divided into splits; of what is made up there is enough for all.
    divided = {"split": split} if "split" in inspect.signature(TASKS[name]).parameters else {}
    return TASKS[name](np.random.default_rng([seed, SPLITS.index(split)]), number, **sizes, **divided)


def build(name: str, seed: int = 0, train: int = 0, validation: int = 0, test: int = 0, **sizes):
    """
    A `datasets.DatasetDict` with the splits that have examples, in the format of numpy.

    Args:
        train, validation, test: examples of each split.
        The others as in `generate`.

    Raises:
        ValueError: no examples at all; what `generate` raises.
    """
    from datasets import Dataset, DatasetDict

    numbers = {"train": train, "validation": validation, "test": test}
    if not any(numbers.values()):
        raise ValueError("one of train, validation and test must be at least 1")
    arrays = {split: generate(name, number, seed, split, **sizes) for split, number in numbers.items() if number}
    return DatasetDict({split: Dataset.from_dict(columns).with_format("numpy") for split, columns in arrays.items()})
