"""The model of lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) that reads shared beginnings once."""

import contextlib
from collections.abc import Sequence

import numpy as np
import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import has_bos_prefix
from torch import Tensor
from tqdm import tqdm

from ..modeling import FAMILIES, RecurrentCache
from .prefixes import Segment, prefix_tree
from .scoring import Reader, score

NO_LIMIT = 1 << 40  # tokens
TOKENIZED_AHEAD = 1024  # requests
# What prompts begin with is read in a call of its own, and its state kept until the last of them, if that saves so many
# tokens.
LEAST_SAVED_PROMPT = 64


@register_model("hf_recurrent")
class RecurrentLM(HFLM):
    """
    lm-eval's `hf` model for the models of this package: the same arguments, tokens and results, and faster. The texts
    of all requests form a tree. What several begin with, a few-shot prompt or the context of several choices, is read
    once, and its state copied for each; logits are computed for the continuations only.

        import hf_recurrent.evaluation.lm  # registers it
        lm_eval.simple_evaluate("hf_recurrent", {"pretrained": "runs/books"}, tasks=["piqa"], batch_size=64)

    Or with lm-eval's own command line: `python -m hf_recurrent.evaluation --model hf_recurrent --model_args
    pretrained=runs/books --tasks piqa`.

    Args:
        pretrained: a folder, a name on the Hub, or a model.
        batch_size: texts that are read at once; "auto" is `max_batch_size`, 64 by default. Long ones are read piece by
            piece, so that memory does not depend on their length.
        max_length: tokens of a text that are read, the last ones, as lm-eval's `hf` does; by default all of them,
            however many: these models have no limit, and `hf` takes 2048.
        kwargs: those of lm-eval's `HFLM`.

    Raises:
        ValueError: the model is not of this package.
    """

    def __init__(self, pretrained, batch_size: int | str = 1, max_length: int | None = None, **kwargs):
        self._prefixes: dict[bytes, Segment] = {}
        self._encodings: dict[tuple[str, bool | None], list[int]] = {}
        super().__init__(pretrained=pretrained, batch_size=batch_size, max_length=max_length, **kwargs)
        if not isinstance(self.config, tuple(FAMILIES)):
            raise ValueError(
                f"{pretrained} is of type {self.config.model_type!r}, which is none of this package: lm-eval's model "
                "for it is hf"
            )
        self._reader = Reader(self.model, self._autocast)

    @property
    def max_length(self) -> int:
        return self._max_length or NO_LIMIT

    @property
    def _rows(self) -> int:
        return self.max_batch_size if self.batch_size == "auto" else self.batch_size

    def _detect_batch_size(self, requests: Sequence | None = None, pos: int = 0) -> int:
        return self.max_batch_size

    def _autocast(self) -> contextlib.AbstractContextManager:
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **kwargs
    ) -> list[int]:
        known = self._encodings.get((string, add_special_tokens))
        if known is None or left_truncate_len or kwargs:
            return super().tok_encode(string, add_special_tokens, left_truncate_len, **kwargs)
        return known

    def _encode_ahead(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Tokenizes at once, on all cores, what `_encode_pair` and empty contexts will ask `tok_encode` for."""
        asked = {(continuation, False) for context, continuation in pairs if context == ""}
        asked |= {(text, None) for context, rest in pairs if context for text in (context + rest, context.rstrip())}
        prefix, groups = self.tokenizer.decode(self.prefix_token_id), {}
        for text, special in asked:
            if special is None:
                special = False if has_bos_prefix(text, prefix) else self.add_bos_token
                groups.setdefault(special, []).append((text, None))
            else:
                groups.setdefault(special, []).append((text, special))
        self._encodings = {}
        for special, keys in groups.items():
            options = {} if special is None else {"add_special_tokens": special}
            encodings = self.tokenizer([text for text, _ in keys], **options)["input_ids"]
            self._encodings.update(zip(keys, encodings, strict=True))

    def _encoded(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if context:
            return self._encode_pair(context, continuation)
        tokens = self.tok_encode(continuation, add_special_tokens=False)
        if tokens[:1] == [self.prefix_token_id]:
            return tokens[:1], tokens[1:]
        return [self.prefix_token_id], tokens

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As in lm-eval.

        Raises:
            ValueError: a continuation that is empty, has no token of its own, or more than `max_length`; its task and
                document are named.
        """
        if self.enable_thinking:
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)  # which refuses
        for request in requests:
            if request.args[1] == "":
                raise ValueError(f"{_where(request)}: choice {request.idx} is empty, there is nothing to predict")
        pairs, encoded = [request.args for request in requests], []
        with self._bar(len(pairs), "Tokenizing", disable_tqdm) as bar:
            for first in range(0, len(pairs), TOKENIZED_AHEAD):
                block = pairs[first : first + TOKENIZED_AHEAD]
                self._encode_ahead(block)
                encoded += [(pair, *self._encoded(*pair)) for pair in block]
                bar.update(len(block))
        self._encodings = {}
        for request, ((context, text), _, continuation) in zip(requests, encoded, strict=True):
            if not continuation:
                after = f"the continuation {text!r} has no token of its own after ...{context[-40:]!r}"
                raise ValueError(f"{_where(request)}: {after}: there is nothing to predict")
            if len(continuation) > self.max_length:
                size = f"{len(continuation)} tokens, max_length is {self.max_length}"
                raise ValueError(f"{_where(request)}: a continuation has {size}")
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        pairs = [self._fitting(context, continuation) for _, context, continuation in requests]
        with self._bar(len(requests), "Reading continuations", disable_tqdm) as bar:

            def finished(number: int, log_likelihood: float, is_greedy: bool) -> None:
                bar.update()
                if (strings := requests[number][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", strings, (log_likelihood, is_greedy))

            return score(self._reader, pairs, override_bs or self._rows, self.softmax_dtype, finished)

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """The tokens of a context and its continuation that are read: all, or the last `max_length` of them."""
        # A context of spaces alone: they have gone over to the continuation.
        context = context or [self.prefix_token_id]
        return context[-(self.max_length + 1 - len(continuation)) :], continuation

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """As in lm-eval; without `max_length`, each token of a text sees all of those before it."""
        # As numbers of four bytes each: a list of a long text has ten times that.
        texts = [np.array(self.tok_encode(request.args[0]), np.int32) for request in requests]
        windows = [self._windows(tokens) for tokens in texts]
        remaining = [len(of_text) for of_text in windows]
        owners = [number for number, of_text in enumerate(windows) for _ in of_text]
        results = [0.0] * len(texts)
        with self._bar(len(owners), "Reading texts", disable_tqdm) as bar:

            def finished(window: int, log_likelihood: float, is_greedy: bool) -> None:
                bar.update()
                owner = owners[window]
                results[owner] += log_likelihood
                remaining[owner] -= 1
                if remaining[owner] == 0:
                    self.cache_hook.add_partial("loglikelihood_rolling", requests[owner].args, results[owner])

            pairs = [pair for of_text in windows for pair in of_text]
            score(self._reader, pairs, self._rows, self.softmax_dtype, finished)
        return results

    def _windows(self, tokens: np.ndarray) -> list[tuple[Sequence[int], Sequence[int]]]:
        """A text's tokens as contexts and continuations, of `max_length` tokens that are read at most."""
        if len(tokens) <= self.max_length:
            return [([self.prefix_token_id], tokens)] if len(tokens) else []
        pairs = utils.get_rolling_token_windows(tokens.tolist(), self.prefix_token_id, self.max_length, context_len=1)
        return [utils.make_disjoint_window(pair) for pair in pairs]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """As in lm-eval.

        Raises:
            ValueError: a prompt without a token, whose task and document are named.
        """
        for request in requests:
            if not request.args[0] and not self.tok_encode(""):
                raise ValueError(f"{_where(request)}: its prompt is empty, there is nothing to go on from")
        self._prefixes = self._shared_prefixes([request.args[0] for request in requests])
        try:
            return super().generate_until(requests, disable_tqdm=disable_tqdm)
        finally:
            self._prefixes = {}

    def _shared_prefixes(self, prompts: Sequence[str]) -> dict[bytes, Segment]:
        """The last beginning of each prompt that others share, by the prompt's tokens but the last."""
        texts = [self.tok_batch_encode([prompt])[0][0, :-1].numpy().astype(np.int32) for prompt in prompts]
        texts = [text for text in texts if len(text)]
        root, ends = prefix_tree(texts, LEAST_SAVED_PROMPT)
        prefixes, forks, users = {}, {segment for segment in _below(root) if segment.children}, {}
        for text, segment in zip(texts, ends, strict=True):
            while segment is not root and (segment not in forks or segment.end >= len(text)):
                segment = segment.parent
            if segment is not root:
                prefixes[text.tobytes()] = segment
                users[segment] = users.get(segment, 0) + 1
        for fork in forks:
            fork.unread = users.get(fork, 0) + sum(child in forks for child in fork.children)
        return prefixes

    def _states_before_last(self, context: Tensor, attention_mask: Tensor) -> RecurrentCache:
        """The states after each of the prompts (B, L), padded on the left, but for its last token."""
        rows = [
            ids[real.bool()][:-1].cpu().numpy().astype(np.int32)
            for ids, real in zip(context, attention_mask, strict=True)
        ]
        root = Segment(np.zeros(0, np.int32), 0)
        leaves = [Segment(row, len(row), self._prefixes.get(row.tobytes(), root)) for row in rows]
        missing = {ancestor: None for leaf in leaves for ancestor in _unread_above(leaf)}
        while missing:
            now = [segment for segment in missing if segment.parent not in missing]
            for segment in now:
                del missing[segment]
            self._reader.read(now)
        read = [leaf for leaf in leaves if len(leaf)]  # a prompt of one token starts from nothing
        cache = self._reader.read(read) if read else None
        places = {leaf: (cache, row) for row, leaf in enumerate(read)}
        cache = self._reader.gather([places.get(leaf) for leaf in leaves])
        cache.seen_tokens = context.shape[1] - 1
        return cache

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **kwargs) -> Tensor:
        copies = kwargs.get("num_beams", 1) > 1 or kwargs.get("num_return_sequences", 1) > 1
        if context.shape[1] > 1 and not copies:  # with several sequences of each prompt, generate must read it itself
            with self._autocast():
                kwargs["past_key_values"] = self._states_before_last(context, kwargs["attention_mask"])
        return super()._model_generate(context, max_length=max_length, stop=stop, **kwargs)

    def _bar(self, total: int, what: str, disable: bool) -> tqdm:
        return tqdm(total=total, desc=what, disable=disable or self.rank != 0 or None)


def _where(request: Instance) -> str:
    return f"document {request.doc_id} of task {request.task_name}"


def _below(root: Segment) -> list[Segment]:
    segments, remaining = [], [root]
    while remaining:
        segments += remaining
        remaining = [child for segment in remaining for child in segment.children]
    return segments[1:]


def _unread_above(segment: Segment) -> list[Segment]:
    """The segments before this one whose states are needed and not there, the root left out."""
    above = []
    while (segment := segment.parent).parent is not None and segment.state is None:
        above.append(segment)
    return above
