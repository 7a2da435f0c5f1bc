"""Requests that join and leave a running batch."""

import collections
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .cache import RecurrentCache
from .model import RecurrentForCausalLM


@dataclass(eq=False)
class Request:
    """
    One text to be continued.

    Args:
        id: its number, from 0 in the order of `ContinuousBatcher.submit`.
        input_ids: what it continues.
        max_new_tokens: tokens after which it ends.
        eos_token_ids: tokens that end it, themselves included in `tokens`.
        tokens: what was generated so far.
        finished: whether that is all.
        cancelled: whether `ContinuousBatcher.cancel` has ended it.
    """

    id: int
    input_ids: list[int]
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    cancelled: bool = False


class ContinuousBatcher:
    """
    Greedy decoding of requests that come at any time, each with the tokens of its own `generate(do_sample=False)`: in
    float32, for in 16 bits the rounding, which differs with the rows of a batch, can decide between two tokens.

    A state has the same size whatever the length of its text: a request that joins is a row concatenated to the cache,
    one that leaves is a row left out. Between two steps of decoding a piece of one waiting prompt is read, so that a
    long prompt does not hold up the others.

        batcher = ContinuousBatcher(model)
        requests = [batcher.submit(ids, max_new_tokens=50) for ids in prompts]
        for request, token in batcher:  # as they come; `submit` and `cancel` can be called inside
            print(request.id, token, request.finished)

    Args:
        model: a language model, in evaluation mode.
        max_rows: requests that are decoded together; further ones wait.
        prefill_chunk_size: tokens of a prompt that are read at once.

    Raises:
        ValueError: max_rows or prefill_chunk_size below 1.
    """

    def __init__(self, model: RecurrentForCausalLM, max_rows: int = 16, prefill_chunk_size: int = 1024):
        for name, value in (("max_rows", max_rows), ("prefill_chunk_size", prefill_chunk_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.model, self.max_rows, self.prefill_chunk_size = model, max_rows, prefill_chunk_size
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: list[Request] = []  # in the order of the cache's rows
        self.cache: RecurrentCache | None = None
        self.numbers = itertools.count()
        # What has been decoded and not been told: where an iteration is left, or reading a prompt fails.
        self.news: collections.deque[tuple[Request, int]] = collections.deque()
        self._start_reading()

    def submit(
        self,
        input_ids: Sequence[int] | Tensor,
        max_new_tokens: int = 20,
        eos_token_id: int | Sequence[int] | None = None,
    ) -> Request:
        """
        Adds a request to those that wait.

        Args:
            input_ids: (L,) token ids, one or more.
            max_new_tokens: tokens after which it ends.
            eos_token_id: a token, or several, that end it before; those of the model's `generation_config` by default.

        Raises:
            ValueError: input_ids of another shape, or none; max_new_tokens below 1.
            IndexError: an id outside the vocabulary.
        """
        ids = torch.as_tensor(input_ids)
        if ids.ndim != 1 or not len(ids) or ids.is_floating_point():
            raise ValueError(
                f"input_ids must be integers of the shape (length,), at least one, got {ids.dtype} of the shape "
                f"{tuple(ids.shape)}"
            )
        ids, size = ids.tolist(), self.model.config.vocab_size
        outside = next((token for token in ids if not 0 <= token < size), None)
        if outside is not None:
            raise IndexError(f"input_ids holds the token id {outside}, outside the vocabulary of {size} tokens")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        if eos_token_id is None:
            eos_token_id = self.model.generation_config.eos_token_id
        ends = [] if eos_token_id is None else torch.as_tensor(eos_token_id).reshape(-1).tolist()
        request = Request(next(self.numbers), ids, max_new_tokens, frozenset(ends))
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request, wherever it is; one that has ended already stays as it is."""
        if request in self.waiting:
            if self.waiting[0] is request:
                self._start_reading()
            self.waiting.remove(request)
        if not request.finished:
            request.finished = request.cancelled = True
        self._let_go()

    def __iter__(self) -> Iterator[tuple[Request, int]]:
        """Steps until no request is left. Yields each token with its request as it comes, none after `cancel`. What an
        iteration that is left early has not yielded, the next one does, or `step`."""
        while self.news or self.waiting or self.running:
            if not self.news:
                self._advance()
                continue
            request, token = self.news.popleft()
            if not request.cancelled:
                yield request, token

    def step(self) -> list[tuple[Request, int]]:
        """Reads a piece of the prompt that waits longest, if there is room, and decodes one token of each request that
        runs.

        Returns:
            The requests that have a new token, each with it.
        """
        self._advance()
        news = [(request, token) for request, token in self.news if not request.cancelled]
        self.news.clear()
        return news

    @torch.no_grad()
    def _advance(self) -> None:
        self._let_go()  # whom a failure has kept
        if self.running:
            last = torch.tensor([[request.tokens[-1]] for request in self.running], device=self.model.device)
            logits = self.model(last, past_key_values=self.cache, use_cache=True).logits[:, -1]
            self._take(self.running, logits)
            self._let_go()
        if self.waiting and len(self.running) < self.max_rows:
            self._read()

    def _start_reading(self) -> None:
        self.prompt_cache, self.read = RecurrentCache(self.model.config), 0

    def _read(self) -> None:
        """A piece of the first prompt; after the last one the request joins with its first token."""
        request = self.waiting[0]
        piece = request.input_ids[self.read : self.read + self.prefill_chunk_size]
        ids = torch.tensor([piece], device=self.model.device)
        try:
            logits = self.model(ids, past_key_values=self.prompt_cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            self.read += len(piece)
            if self.read < len(request.input_ids):
                return
            caches = [self.prompt_cache] if self.cache is None else [self.cache, self.prompt_cache]
            joined = RecurrentCache.concatenate(caches)
        except BaseException:  # no room, say: the request goes on waiting, and is read anew
            self._start_reading()
            raise
        self.waiting.popleft()
        self._take([request], logits)
        if not request.finished:
            self.cache = joined
            self.running.append(request)
        self._start_reading()

    def _take(self, requests: list[Request], logits: Tensor) -> None:
        """The likeliest tokens, (rows, vocab_size) -> one for each request, which they may end."""
        tokens = logits.argmax(-1).tolist()
        for request, token in zip(requests, tokens, strict=True):
            request.tokens.append(token)
            request.finished = token in request.eos_token_ids or len(request.tokens) >= request.max_new_tokens
        self.news.extend(zip(requests, tokens, strict=True))

    def _let_go(self) -> None:
        """Leaves out the rows of requests that have ended: all of them, or none where there is no room for the others'
        copies."""
        rows = [row for row, request in enumerate(self.running) if not request.finished]
        if len(rows) == len(self.running):
            return
        cache = self.cache[rows] if rows else None
        self.running, self.cache = [self.running[row] for row in rows], cache
