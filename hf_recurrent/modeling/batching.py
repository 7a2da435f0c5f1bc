"""Requests that join and leave a running batch."""

import collections
import copy
import itertools
import operator
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
        error: why its prompt could not be read, if that has failed; it is tried again once, and then ended.
    """

    id: int
    input_ids: list[int]
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    cancelled: bool = False
    error: Exception | None = None


# Of a `generation_config`, what greedy decoding would do otherwise, and the values with which it does not.
NOT_DONE = {
    "num_beams": (1,), "repetition_penalty": (1.0,), "no_repeat_ngram_size": (0,), "min_length": (0,),
    "min_new_tokens": (0,), "guidance_scale": (1.0,), "bad_words_ids": ([],), "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],), "sequence_bias": ({}, []), "forced_bos_token_id": (), "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (), "stop_strings": ([],), "watermarking_config": (), "penalty_alpha": (0.0,),
    "dola_layers": (),
}  # fmt: skip


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

    One thread iterates or steps; `submit` and `cancel` can be called by others. A step that fails or is interrupted
    changes nothing, and the next one takes its place.

    Args:
        model: a language model, in evaluation mode. Of its `generation_config` the tokens that end a text count.
        max_rows: requests that are decoded together; further ones wait.
        prefill_chunk_size: tokens of a prompt that are read at once.

    Raises:
        ValueError: max_rows or prefill_chunk_size below 1; a `generation_config` that asks for what is not done here.
        TypeError: another kind of model; max_rows or prefill_chunk_size that is no whole number.
    """

    def __init__(self, model: RecurrentForCausalLM, max_rows: int = 16, prefill_chunk_size: int = 1024):
        if not isinstance(model, RecurrentForCausalLM):
            raise TypeError(f"model must be a recurrent language model, got a {type(model).__name__}")
        for name, value in (("max_rows", max_rows), ("prefill_chunk_size", prefill_chunk_size)):
            _check_count(name, value)
        for name, neutral in NOT_DONE.items():
            value = getattr(model.generation_config, name, None)
            if value is not None and value not in neutral:
                raise ValueError(f"the model's generation_config has {name} = {value!r}, which is not done here")
        self.model, self.max_rows, self.prefill_chunk_size = model, max_rows, prefill_chunk_size
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: list[Request] = []  # in the order of the cache's rows
        self.cache: RecurrentCache | None = None
        self.numbers = itertools.count()
        # What has been decoded and not been told: where an iteration is left, or reading a prompt fails.
        self.news: collections.deque[tuple[Request, int]] = collections.deque()
        self.decoded: tuple | None = None  # what is about to come into force: see `_settle`
        # The prompt that is being read, the state after a part of it, and the tokens of that part.
        self.reading: tuple[Request, RecurrentCache, int] | None = None

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
            TypeError: input_ids, max_new_tokens or eos_token_id that are no whole numbers.
            IndexError: an id outside the vocabulary.
        """
        ids = self._ids("input_ids", input_ids)
        if not ids:
            raise ValueError("input_ids must hold at least one token")
        _check_count("max_new_tokens", max_new_tokens)
        if eos_token_id is None:
            eos_token_id = self.model.generation_config.eos_token_id
        ends = [] if eos_token_id is None else self._ids("eos_token_id", torch.as_tensor(eos_token_id).reshape(-1))
        request = Request(next(self.numbers), ids, max_new_tokens, frozenset(ends))
        self.waiting.append(request)
        return request

    def _ids(self, name: str, ids: Sequence[int] | Tensor) -> list[int]:
        if isinstance(ids, str | None) or hasattr(ids, "keys"):
            raise TypeError(
                f"{name} must be token ids, got a {type(ids).__name__}: of what a tokenizer gives, its input_ids"
            )
        ids = torch.as_tensor(ids)
        if ids.ndim != 1 or len(ids) and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
            raise ValueError(
                f"{name} must be integers of the shape (length,), got {ids.dtype} of the shape {tuple(ids.shape)}"
            )
        ids, size = ids.tolist(), self.model.config.vocab_size
        outside = next((token for token in ids if not 0 <= token < size), None)
        if outside is not None:
            raise IndexError(f"{name} holds the token id {outside}, outside the vocabulary of {size} tokens")
        return ids

    def cancel(self, request: Request) -> None:
        """Ends a request, wherever it is; one that has ended already stays as it is. The next step leaves it out."""
        if not request.finished:
            request.cancelled = request.finished = True

    def __iter__(self) -> Iterator[tuple[Request, int]]:
        """Steps until no request is left. Yields each token with its request as it comes, none after `cancel`. What an
        iteration that is left early has not yielded, the next one does, or `step`."""
        while self.decoded or self.news or self.waiting or self.running:
            self._settle()
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
        self._settle()
        self._let_go()
        if self.running:
            last = torch.tensor([[request.tokens[-1]] for request in self.running], device=self.model.device)
            cache = _forked(self.cache)  # an interrupt may come before the tokens are there
            logits = self.model(last, past_key_values=cache, use_cache=True).logits[:, -1]
            self._take(self.running, logits, self.running, cache)
            self._let_go()
        if self.waiting and len(self.running) < self.max_rows:
            self._read()

    def _read(self) -> None:
        """A piece of the first prompt; after the last one the request joins with its first token. Where that fails, the
        request goes on waiting, and is read anew; where it fails again, and not for lack of room, it ends."""
        request, reading, self.reading = self.waiting[0], self.reading, None
        if reading is None or reading[0] is not request:
            reading = request, RecurrentCache(self.model.config), 0
        _, cache, start = reading
        end = start + self.prefill_chunk_size
        ids = torch.tensor([request.input_ids[start:end]], device=self.model.device)
        try:
            logits = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            if end < len(request.input_ids):
                self.reading = request, cache, end
                return
            request.error = None
            joined = RecurrentCache.concatenate([cache] if self.cache is None else [self.cache, cache])
            self._take([request], logits, [*self.running, request], joined)
        except Exception as error:
            if not isinstance(error, MemoryError | torch.OutOfMemoryError):
                # A second time: it would keep the others waiting for ever.
                request.finished = request.error is not None
                request.error = error
            raise
        self._let_go()

    def _take(self, requests: list[Request], logits: Tensor, running: list[Request], cache: RecurrentCache) -> None:
        """The likeliest tokens, (rows, vocab_size) -> one for each request, after which `running` are in `cache`."""
        tokens = logits.argmax(-1).tolist()
        given = [(request, len(request.tokens), token) for request, token in zip(requests, tokens, strict=True)]
        self.decoded = given, [*self.news, *zip(requests, tokens, strict=True)], running, cache
        self._settle()

    def _settle(self) -> None:
        """What was decoded comes into force. Where an interrupt comes between, doing all of it again is right."""
        if self.decoded is None:
            return
        given, news, running, cache = self.decoded
        for request, number, token in given:
            request.tokens[number:] = [token]
            ended = token in request.eos_token_ids or len(request.tokens) >= request.max_new_tokens
            request.finished = request.finished or ended
        self.news, self.running, self.cache = collections.deque(news), running, cache
        if self.waiting and any(request is self.waiting[0] for request in running):
            self.waiting.popleft()
        self.decoded = None

    def _let_go(self) -> None:
        """Leaves out the rows of requests that have ended: all of them, or none where there is no room for the others'
        copies; and those that have ended while they waited."""
        while self.waiting and self.waiting[0].finished:
            self.waiting.popleft()
        kept = [(row, request) for row, request in enumerate(self.running) if not request.finished]
        if len(kept) == len(self.running):
            return
        cache = self.cache[[row for row, _ in kept]] if kept else None
        # In one, for an interrupt between the two would give requests the rows of others.
        self.decoded = [], self.news, [request for _, request in kept], cache
        self._settle()


def _forked(cache: RecurrentCache) -> RecurrentCache:
    """One that goes its own way from the same states, which are replaced, never written into."""
    return cache._with([copy.copy(layer) for layer in cache.layers])


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if operator.index(value) < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
