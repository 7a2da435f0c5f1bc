"""Tasks on tokens: each function makes examples as arrays, input_ids (n, L) and labels (n, L), int64.

Labels stand where they are to be predicted: labels[t] is the answer after reading input_ids[: t + 1], -100 where there
is none. A language model shifts its `labels` itself: give it these as `shift_labels`.
"""

import numpy as np

IGNORED = -100


def selective_copying(
    rng: np.random.Generator, number: int, length: int = 4096, data_tokens: int = 16, vocab_size: int = 16
) -> dict[str, np.ndarray]:
    """
    Copy what is scattered in noise (Gu and Dao 2023, Mamba, https://arxiv.org/abs/2312.00752, section 4.1.1).

    `data_tokens` random tokens lie in their order at random places among `length`; the rest is noise, token 0. Then
    `data_tokens` markers (the last token of the vocabulary) follow, and at the i-th of them the i-th data token is the
    label. Rows have `length` + `data_tokens` columns.

    Raises:
        ValueError: more data tokens than places, a vocabulary without a data token.
    """
    if not 1 <= data_tokens <= length:
        raise ValueError(f"data_tokens must be between 1 and length = {length}, got {data_tokens}")
    if vocab_size < 3:
        raise ValueError(f"vocab_size must be at least 3 (noise, marker and data), got {vocab_size}")
    places = np.sort(np.argpartition(rng.random((number, length)), data_tokens - 1, axis=1)[:, :data_tokens], axis=1)
    data = rng.integers(1, vocab_size - 1, size=(number, data_tokens))
    input_ids = np.zeros((number, length + data_tokens), np.int64)
    np.put_along_axis(input_ids, places, data, axis=1)
    input_ids[:, length:] = vocab_size - 1
    labels = np.full_like(input_ids, IGNORED)
    labels[:, length:] = data
    return {"input_ids": input_ids, "labels": labels}


def associative_recall(
    rng: np.random.Generator,
    number: int,
    length: int = 512,
    pairs: int = 64,
    vocab_size: int = 8192,
    alpha: float = 0.01,
    noise: float = 0.0,
) -> dict[str, np.ndarray]:
    """
    Multi-query associative recall (Arora et al. 2023, Zoology, https://arxiv.org/abs/2312.04927, appendix).

    The first 2 `pairs` columns are keys, each followed by its value; keys are distinct tokens of the vocabulary's first
    half (0 excepted), values distinct tokens of the second. Behind them each key comes once more, at the even columns
    whose distances g = 1, 2, ... have a probability proportional to `alpha` g^(alpha - 1), and its value is the label
    there. All other columns are token 0, or with the probability `noise` a random token.

    The paper's experiments have no such noise. Random tokens repeat keys before other tokens than their values, the
    more often the smaller the vocabulary, so that `noise` of 1 and a small vocabulary are another, harder task.

    Raises:
        ValueError: `length` is odd or has no room for the keys twice and the values; a vocabulary that is too small; an
            `alpha` of 0 or less; a probability outside [0, 1].
    """
    if length % 2 or pairs < 1 or 4 * pairs > length:
        raise ValueError(f"length must be even and at least 4 pairs = {4 * pairs}, got {length}")
    if vocab_size // 2 - 1 < pairs:
        raise ValueError(f"vocab_size must be at least {2 * pairs + 2} for {pairs} pairs, got {vocab_size}")
    if alpha <= 0:
        raise ValueError(f"alpha must be above 0, got {alpha}")
    if not 0 <= noise <= 1:
        raise ValueError(f"noise must be a probability, got {noise}")
    half = vocab_size // 2
    keys = 1 + _distinct(rng, number, half - 1, pairs)
    values = half + _distinct(rng, number, vocab_size - half, pairs)
    gaps = np.arange(1, (length - 2 * pairs) // 2 + 1)
    # The largest of log p + Gumbel noise are a sample without replacement, in the order in which it is drawn.
    scores = (alpha - 1) * np.log(gaps) + rng.gumbel(size=(number, len(gaps)))
    places = 2 * pairs + 2 * np.argsort(-scores, axis=1)[:, :pairs]
    input_ids = rng.integers(1, vocab_size, size=(number, length))
    input_ids[rng.random((number, length)) >= noise] = 0
    input_ids[:, 0 : 2 * pairs : 2], input_ids[:, 1 : 2 * pairs : 2] = keys, values
    np.put_along_axis(input_ids, places, keys, axis=1)
    labels = np.full_like(input_ids, IGNORED)
    np.put_along_axis(labels, places, values, axis=1)
    return {"input_ids": input_ids, "labels": labels}


def _distinct(rng: np.random.Generator, number: int, values: int, taken: int) -> np.ndarray:
    """(number, taken): in each row different numbers below `values`, in random order."""
    return np.stack([rng.permutation(values)[:taken] for _ in range(number)]) if number else np.zeros((0, taken), int)


def memory_horizon(
    rng: np.random.Generator, number: int, length: int = 512, numbers: int = 5, modulo: int = 5, reset: float = 0.03
) -> dict[str, np.ndarray]:
    """
    Remember all since the last reset, and forget it there (Katsch 2023, GateLoop, https://arxiv.org/abs/2311.01927,
    appendix: "Memory Horizon").

    Each token is a number x below `numbers`, or with the probability `reset` the reset token, whose id is `numbers`.
    With x_0 ... x_(n-1) the numbers since the last reset, the label at every column is the alternating sum of the
    products of opposite ones, sum over i < ceil(n / 2) of (-1)^i x_i x_(n-1-i), modulo `modulo`; 0 at a reset. That
    each pair counts once is our reading of the paper, which says it in words.

    Raises:
        ValueError: a length below 1; a probability outside [0, 1]; fewer than two numbers, or a modulo below 2.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    if not 0 <= reset <= 1:
        raise ValueError(f"reset must be a probability, got {reset}")
    if numbers < 2 or modulo < 2:
        raise ValueError(f"numbers and modulo must be at least 2, got {numbers} and {modulo}")
    input_ids = rng.integers(numbers, size=(number, length))
    input_ids[rng.random((number, length)) < reset] = numbers
    columns = np.arange(length)
    # The column of the last reset up to each column, -1 where there was none.
    last = np.maximum.accumulate(np.where(input_ids == numbers, columns, -1), axis=1)
    sums = np.zeros((number, length), np.int64)
    for i in range((length + 1) // 2):
        first, opposite = last + 1 + i, columns - i
        pair = first <= opposite
        x = np.take_along_axis(input_ids, np.minimum(first, length - 1), axis=1)
        y = np.take_along_axis(input_ids, np.broadcast_to(np.maximum(opposite, 0), first.shape), axis=1)
        sums += np.where(pair, (-1) ** i * x * y, 0)
        if not pair.any():
            break
    return {"input_ids": input_ids, "labels": sums % modulo}


def induction_heads(
    rng: np.random.Generator, number: int, length: int = 256, vocab_size: int = 16
) -> dict[str, np.ndarray]:
    """
    What followed the special token last time? (Gu and Dao 2023, Mamba, https://arxiv.org/abs/2312.00752, section 4.1.2)

    Random tokens, among which the special one (the last of the vocabulary) comes once, not in the last three columns,
    and once more in the last column, where the token that followed it is the label.

    Raises:
        ValueError: a length below 4, a vocabulary of fewer than 3.
    """
    if length < 4 or vocab_size < 3:
        raise ValueError(f"length must be at least 4 and vocab_size at least 3, got {length} and {vocab_size}")
    input_ids = rng.integers(vocab_size - 1, size=(number, length))
    rows, place = np.arange(number), rng.integers(length - 3, size=number)
    input_ids[rows, place] = input_ids[:, -1] = vocab_size - 1
    labels = np.full_like(input_ids, IGNORED)
    labels[:, -1] = input_ids[rows, place + 1]
    return {"input_ids": input_ids, "labels": labels}
