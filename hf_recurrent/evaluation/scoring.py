"""Log-likelihoods of many continuations, of which each shared beginning is read once."""

import contextlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..modeling import RecurrentCache
from ..modeling.model import RecurrentForCausalLM
from .prefixes import Segment, prefix_tree, read_in_batches

LEAST_SAVED = 16  # tokens that a shared beginning must save to be read in a call of its own
CALL_TOKENS = 1 << 14  # tokens in a call at most, padding included,
CALL_LOGITS = 1 << 28  # and logits, 1 GiB in float32: longer texts are read piece by piece


class Reader:
    """
    Reads batches of segments with a model, and keeps the states that their children start from.

    Args:
        model: in evaluation mode.
        autocast: makes the context that the model is called in, for mixed precision.
    """

    def __init__(
        self,
        model: RecurrentForCausalLM,
        autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        self.model, self.autocast = model, autocast
        self.call_tokens = max(1, min(CALL_TOKENS, CALL_LOGITS // model.config.vocab_size))

    def width(self, rows: int) -> int:
        """Tokens of each row that are read in one call."""
        return max(1, self.call_tokens // rows)

    @torch.no_grad()
    def read(
        self,
        segments: Sequence[Segment],
        wanted: Callable[[int, int], np.ndarray] | None = None,
        use: Callable[[Tensor], None] = None,
    ) -> RecurrentCache:
        """
        Args:
            segments: their parents have been read.
            wanted: is asked for each piece of the length, of the columns from one number to before another: (segments,
                columns) bool, where the logits are wanted; nowhere by default.
            use: is then given the logits (n, vocab_size) of these places, row by row, if there are any.

        Returns:
            The states after the segments, a row for each.
        """
        device, longest = self.model.device, max(map(len, segments))
        cache = self.gather([segment.parent.state for segment in segments])
        width = min(longest, self.width(len(segments)))
        for first in range(0, longest, width):
            last = min(first + width, longest)
            ids = np.zeros((len(segments), last - first), np.int64)
            mask = np.zeros(ids.shape, bool)
            for row, segment in enumerate(segments):
                tokens = segment.own_tokens[first:last]
                ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, True
            keep = np.zeros(ids.shape, bool) if wanted is None else wanted(first, last)
            ids, mask, keep = (torch.from_numpy(array).to(device) for array in (ids, mask, keep))
            with self.autocast():
                logits = self.model(
                    ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=keep
                ).logits
            if len(logits):
                use(logits)
        self._keep_states(segments, cache)
        return cache

    @torch.no_grad()
    def gather(self, states: Sequence[tuple[RecurrentCache, int] | None]) -> RecurrentCache:
        """A cache with a copy of each of these rows of other caches; None stands for the state that texts start from.
        If all of them are None, the cache is empty."""
        result = RecurrentCache(self.model.config)
        caches = list({id(state[0]): state[0] for state in states if state is not None}.values())
        if not caches:
            return result
        if None in states:
            caches.append(self._start(caches[0]))
        ends = np.cumsum([0, *(cache.batch_size for cache in caches)]).tolist()
        first_rows = dict(zip(map(id, caches), ends, strict=False))
        rows = torch.tensor([ends[-2] if state is None else first_rows[id(state[0])] + state[1] for state in states])
        for index, layer in enumerate(result.layers):
            for name, state in caches[0].layers[index].states.items():
                parts = [cache.layers[index].states[name] for cache in caches]
                layer.states[name] = (parts[0] if len(parts) == 1 else torch.cat(parts))[rows.to(state.device)]
        return result

    def _start(self, like: RecurrentCache) -> RecurrentCache:
        """One row with the state that texts start from."""
        if not self.model.config.learned_initial_state:
            start = like[:1]
            for layer in start.layers:
                for state in layer.states.values():
                    state.zero_()
            return start
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        with self.autocast():  # a token that is masked leaves the state as it is
            return self.model(ids, attention_mask=ids, use_cache=True).past_key_values

    def _keep_states(self, segments: Sequence[Segment], cache: RecurrentCache) -> None:
        rows = [row for row, segment in enumerate(segments) if segment.children]
        if rows:
            kept = cache[rows]
            for place, row in enumerate(rows):
                segments[row].state = (kept, place)
        for segment in segments:
            segment.parent.unread -= 1
            if segment.parent.unread == 0:
                segment.parent.state = None


def score(
    reader: Reader,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    batch_size: int,
    softmax_dtype: torch.dtype | None = None,
    finished: Callable[[int, float, bool], None] = lambda request, log_likelihood, is_greedy: None,
) -> list[tuple[float, bool]]:
    """
    Args:
        requests: token ids of a context and of its continuation, neither of which is empty.
        batch_size: rows of a call.
        softmax_dtype: of the log-probabilities; by default that of the logits.
        finished: is told the number of each request when it is done, and its result.

    Returns:
        For each request log p(continuation | context), in nats, and whether the continuation is what greedy decoding
        gives.

    Raises:
        ValueError: a batch_size below 1; a context or a continuation without tokens.
        IndexError: a token id outside the vocabulary.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    for index, (context, continuation) in enumerate(requests):
        for name, tokens in (("context", context), ("continuation", continuation)):
            if len(tokens) == 0:
                raise ValueError(f"the {name} of request {index} has no tokens")
    # The last token is predicted, and not read.
    texts = [np.concatenate([np.asarray(part, np.int32) for part in request]) for request in requests]
    vocab_size = reader.model.config.vocab_size
    for index, text in enumerate(texts):
        if text.min() < 0 or text.max() >= vocab_size:
            outside = text[(text < 0) | (text >= vocab_size)][0]
            raise IndexError(f"request {index} holds the token id {outside}, outside the vocabulary of {vocab_size}")
    root, ends = prefix_tree([text[:-1] for text in texts], LEAST_SAVED)
    runs = _runs(ends, [len(context) for context, _ in requests], texts)
    sums, greedy = np.zeros(len(requests)), np.ones(len(requests), bool)
    missing = np.array([len(continuation) for _, continuation in requests])

    def read(batch: list[Segment]) -> None:
        places = [(row, *run) for row, segment in enumerate(batch) for run in runs.pop(segment, [])]
        numbers, index, expected = (np.zeros(0, int) for _ in range(3))  # of what is predicted in the piece

        def wanted(first: int, last: int) -> np.ndarray:
            nonlocal numbers, index, expected
            # The part of each run that lies in these columns.
            cuts = [(max(first - column, 0), min(last - column, len(tokens))) for _, _, column, tokens in places]
            parts = [(*place, *cut) for place, cut in zip(places, cuts, strict=True) if cut[0] < cut[1]]
            rows, numbers = (
                np.repeat([part[kind] for part in parts], [part[5] - part[4] for part in parts]).astype(int)
                for kind in range(2)
            )
            columns = [np.arange(column + begin, column + end) for _, _, column, _, begin, end in parts]
            columns = np.concatenate(columns or [[]]).astype(int) - first
            expected = np.concatenate([tokens[begin:end] for *_, tokens, begin, end in parts] or [[]]).astype(int)
            keep = np.zeros((len(batch), last - first), bool)
            keep[rows, columns] = True
            index = (keep.cumsum() - 1).reshape(keep.shape)[rows, columns]
            return keep

        def use(logits: Tensor) -> None:
            place, token = (torch.from_numpy(array).to(logits.device) for array in (index, expected))
            log_probs = F.log_softmax(logits, dim=-1, dtype=softmax_dtype)
            values, best = log_probs[place, token].double(), log_probs.argmax(dim=-1)[place] == token
            np.add.at(sums, numbers, values.cpu().numpy())
            np.logical_and.at(greedy, numbers, best.cpu().numpy())

        reader.read(batch, wanted, use)
        for _, number, _, tokens in places:
            missing[number] -= len(tokens)
            if missing[number] == 0:
                finished(number, float(sums[number]), bool(greedy[number]))

    read_in_batches(root, read, batch_size)
    return list(zip(sums.tolist(), greedy.tolist(), strict=True))


def _runs(
    ends: Sequence[Segment], context_lengths: Sequence[int], texts: Sequence[np.ndarray]
) -> dict[Segment, list[tuple[int, int, np.ndarray]]]:
    """What is predicted in each segment: a request's number, the first column, and the tokens expected from it on."""
    runs: dict[Segment, list] = {}
    for number, (segment, length, text) in enumerate(zip(ends, context_lengths, texts, strict=True)):
        # A token is predicted where the one before it was read.
        while segment.end > length - 1:
            first, last = max(segment.start, length - 1), min(segment.end, len(text) - 1)
            runs.setdefault(segment, []).append((number, first - segment.start, text[first + 1 : last + 1]))
            segment = segment.parent
    return runs
