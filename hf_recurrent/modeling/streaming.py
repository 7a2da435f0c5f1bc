"""Streams of any length through a model, in constant memory."""

import itertools
import operator
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .cache import RecurrentCache
from .model import RecurrentForCausalLM


@torch.no_grad()
def stream(
    model: RecurrentForCausalLM,
    tokens: Iterable[int] | Tensor,
    cache: RecurrentCache | None = None,
    chunk_size: int = 1024,
) -> Iterator[tuple[Tensor, Tensor]]:
    """
    Reads a text of any length, also one without an end, in chunks.

        cache = RecurrentCache(model.config)
        for ids, logits in stream(model, tokens, cache):  # `cache` holds the state after ids[-1]
            ...

    Args:
        model: a language model, in the mode (`eval()`) that it is to run in.
        tokens: ids of one text; an iterator is asked for no more than the next chunk.
        cache: the state to go on from, empty for the beginning; it is kept up to date. A new one by default.
        chunk_size: tokens that are read at once. Results do not depend on it, but for rounding.

    Yields:
        ids, (n,) with n <= chunk_size, and their logits, (n, vocab_size): those of the token after each of them.

    Raises:
        ValueError: a chunk_size below 1; a cache of several rows.
        IndexError, TypeError: an id outside the vocabulary, or what is no integer; its place in the stream is named.
            The chunk that it is in is not read: the cache is that after the chunk before.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    cache = RecurrentCache(model.config) if cache is None else cache
    if cache.batch_size > 1:
        raise ValueError(f"cache holds the states of {cache.batch_size} rows, a stream is one")
    vocab_size, place = model.config.vocab_size, 0
    if isinstance(tokens, Tensor):  # whose iterator would make a tensor of each token first
        tokens = itertools.chain.from_iterable(piece.tolist() for piece in tokens.split(chunk_size))
    remaining = iter(tokens)
    while chunk := list(itertools.islice(remaining, chunk_size)):
        for index, token in enumerate(chunk):
            try:
                chunk[index] = operator.index(token)
            except TypeError:
                raise TypeError(f"token {place + index} of the stream is {token!r}, not an integer") from None
        outside = next((index for index, token in enumerate(chunk) if not 0 <= token < vocab_size), None)
        if outside is not None:
            raise IndexError(
                f"token {place + outside} of the stream is {chunk[outside]}, outside the vocabulary of {vocab_size}"
            )
        ids = torch.tensor(chunk, device=model.device)
        yield ids, model(ids[None], past_key_values=cache, use_cache=True).logits[0]
        place += len(chunk)
