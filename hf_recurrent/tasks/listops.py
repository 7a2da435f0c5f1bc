"""ListOps: nested lists of operators and digits, to be evaluated (Long Range Arena)."""

import functools
from operator import or_

import numpy as np

VOCABULARY = ("<pad>", *map(str, range(10)), "[MIN", "[MAX", "[MED", "[SM", "]")
PAD, CLOSE = 0, VOCABULARY.index("]")
OPERATORS = {VOCABULARY.index(name): name for name in VOCABULARY[11:15]}
DIGIT_PROBABILITY = 0.75
TRIES = 100_000  # for each example


def evaluate(operator: str, values: list[int]) -> int:
    """MIN, MAX, MED (the integer part of the median) or SM (the sum modulo 10)."""
    if operator == "[MIN":
        return min(values)
    if operator == "[MAX":
        return max(values)
    if operator == "[MED":
        ordered, middle = sorted(values), len(values) // 2
        return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) // 2
    return sum(values) % 10


def _expression(
    rng: np.random.Generator, max_depth: int, max_arguments: int, longest: int
) -> tuple[list[int], int] | None:
    """The tokens of a random expression and its value; None where it gets longer than `longest`."""
    tokens: list[int] = []
    open_lists: list[tuple[int, int, list[int]]] = []  # operator, arguments to come, values so far
    while True:
        if len(open_lists) < max_depth - 1 and (not open_lists or rng.random() > DIGIT_PROBABILITY):
            operator = int(rng.integers(11, 15))
            open_lists.append((operator, int(rng.integers(2, max_arguments + 1)), []))
            tokens.append(operator)
        else:
            value = int(rng.integers(10))
            tokens.append(1 + value)
            open_lists[-1][2].append(value)
        while open_lists and len(open_lists[-1][2]) == open_lists[-1][1]:
            operator, _, values = open_lists.pop()
            tokens.append(CLOSE)
            value = evaluate(OPERATORS[operator], values)
            if not open_lists:
                return tokens, value
            open_lists[-1][2].append(value)
        if len(tokens) > longest:
            return None


def _some_length(shortest: int, longest: int, max_depth: int, max_arguments: int) -> bool:
    """Whether an expression has from `shortest` to `longest` tokens."""
    wanted = (2 << longest) - (1 << shortest)  # sets of lengths, as bits
    arguments = 1 << 1  # a digit
    for _ in range(max_depth - 1):
        lengths = [length for length in range(longest) if arguments >> length & 1]
        sums, expressions = 1, 0
        for number in range(1, max_arguments + 1):
            sums = functools.reduce(or_, (sums << length for length in lengths)) & ((2 << longest) - 1)
            if number > 1:
                expressions |= sums << 2
        if expressions & wanted:
            return True
        arguments |= expressions
    return False


def listops(
    rng: np.random.Generator,
    number: int,
    shortest: int = 500,
    longest: int = 2000,
    max_depth: int = 10,
    max_arguments: int = 10,
) -> dict[str, np.ndarray]:
    """
    The grammar of Long Range Arena (Tay et al. 2020, https://arxiv.org/abs/2011.04006, after Nangia and Bowman 2018).

    An expression is an operator with 2 to `max_arguments` arguments and a closing bracket. An argument is a digit with
    the probability 3/4, else an expression; at the depth `max_depth` always a digit. Expressions of `shortest` to
    `longest` tokens are kept. The paper has 96,000 for training, and 2,000 each for validation and test.

    Returns:
        input_ids (n, longest), padded on the right with 0; attention_mask, 0 at padding; labels (n,), the values.

    Raises:
        ValueError: lengths that no expression has; a depth or a number of arguments below 2.
    """  # fmt: skip
    if not 4 <= shortest <= longest:
        raise ValueError(f"shortest must be between 4 and longest = {longest}, got {shortest}")
    if max_depth < 2 or max_arguments < 2:
        raise ValueError(f"max_depth and max_arguments must be at least 2, got {max_depth} and {max_arguments}")
    if not _some_length(shortest, longest, max_depth, max_arguments):
        given = f"max_depth = {max_depth} and max_arguments = {max_arguments}"
        raise ValueError(f"no expression has from shortest = {shortest} to longest = {longest} tokens for {given}")
    input_ids, labels = np.full((number, longest), PAD, np.int64), np.zeros(number, np.int64)
    row = tries = 0
    while row < number:
        if tries == TRIES:
            raise ValueError(
                f"none of {TRIES:,} random expressions had from shortest = {shortest} to longest = {longest} tokens; "
                f"max_depth is {max_depth}, max_arguments {max_arguments}"
            )
        tries += 1
        made = _expression(rng, max_depth, max_arguments, longest)
        if made is None or len(made[0]) < shortest or len(made[0]) > longest:
            continue
        input_ids[row, : len(made[0])], labels[row] = made
        row, tries = row + 1, 0
    return {"input_ids": input_ids, "attention_mask": (input_ids != PAD).astype(np.int64), "labels": labels}
