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
        self, segments: Sequence[Segment], wanted: np.ndarray | None = None, use: Callable[[int, Tensor], None] = None
    ) -> RecurrentCache:
        """
        Args:
            segments: their parents have been read.
            wanted: (segments, length of the longest) bool, where the logits are wanted; nowhere by default.
            use: is called for each piece of the length with its first column, and the logits (n, vocab_size) of the
                places in it that are wanted, row by row.

        Returns:
            The states after the segments, a row for each.
        """
        device, longest = self.model.device, max(map(len, segments))
        ids = np.zeros((len(segments), longest), np.int64)
        mask = np.zeros((len(segments), longest), bool)
        for row, segment in enumerate(segments):
            ids[row, : len(segment)], mask[row, : len(segment)] = segment.own_tokens, True
        wanted = np.zeros_like(mask) if wanted is None else wanted
        ids, mask, keep = (torch.from_numpy(array).to(device) for array in (ids, mask, wanted))
        cache = self.gather([segment.parent.state for segment in segments])
        width = self.width(len(segments))
        for first in range(0, longest, width):
            piece = slice(first, first + width)
            with self.autocast():
                logits = self.model(
                    ids[:, piece],
                    attention_mask=mask[:, piece],
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=keep[:, piece],
                ).logits
            if len(logits):
                use(first, logits)
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
    texts = [np.array([*context, *continuation], np.int32) for context, continuation in requests]
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
        sizes = [len(tokens) for *_, tokens in places]
        rows, numbers = (np.repeat([place[kind] for place in places], sizes).astype(int) for kind in range(2))
        columns = np.concatenate([np.arange(column, column + len(tokens)) for _, _, column, tokens in places] or [[]])
        columns, tokens = columns.astype(int), np.concatenate([place[3] for place in places] or [[]]).astype(int)
        wanted = np.zeros((len(batch), max(map(len, batch))), bool)
        wanted[rows, columns] = True

        def use(first: int, logits: Tensor) -> None:
            piece = wanted[:, first : first + reader.width(len(batch))]
            here = (columns >= first) & (columns < first + piece.shape[1])
            index = (piece.cumsum() - 1).reshape(piece.shape)[rows[here], columns[here] - first]
            index, expected = (torch.from_numpy(array).to(logits.device) for array in (index, tokens[here]))
            log_probs = F.log_softmax(logits, dim=-1, dtype=softmax_dtype)
            values, best = log_probs[index, expected].double(), log_probs.argmax(dim=-1)[index] == expected
            np.add.at(sums, numbers[here], values.cpu().numpy())
            np.logical_and.at(greedy, numbers[here], best.cpu().numpy())

        reader.read(batch, wanted, use)
        for number, size in zip((place[1] for place in places), sizes, strict=True):
            missing[number] -= size
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
