"""Texts to tokens: a stream is the documents one after the other, each as `[bos] tokens [eos]`."""

import collections
import functools
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from .progress import progress_bar

PIECE = 1 << 20  # characters; longer documents are tokenised piece by piece, which bounds memory and uses every core
BATCH = 1 << 22  # characters tokenised in one call
Batch = list[list[str]]  # documents, each in pieces


@dataclass
class TokenStream:
    """Documents one after the other, each as `[bos] tokens [eos]`.

    Args:
        tokens: (N,) unsigned integers.
        starts: (documents,) where each document begins in `tokens`, ascending, the first one 0.
    """

    tokens: np.ndarray
    starts: np.ndarray

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """(documents,) how many tokens each has."""
        return np.diff(self.starts, append=len(self.tokens))

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the whole stream, to tell whether a corpus has changed."""
        digest = hashlib.sha256(np.ascontiguousarray(self.tokens).view(np.uint8))
        digest.update(np.ascontiguousarray(self.starts).view(np.uint8))
        return digest.hexdigest()


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """Cut a text after the first line end behind every `size` characters; together the pieces are the text."""
    start = 0
    while len(text) - start > size:
        end = text.find("\n", start + size) + 1 or len(text)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _batches(texts: Iterable[str]) -> Iterator[Batch]:
    """Documents as lists of pieces, grouped to about BATCH characters."""
    batch, size = [], 0
    for text in texts:
        batch.append(list(pieces(text)))
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def largest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The largest token id, which may lie beyond the number of tokens."""
    return max(tokenizer.get_vocab().values())


def token_type(tokenizer: PreTrainedTokenizerBase) -> np.dtype:
    return np.dtype(np.uint16 if largest_id(tokenizer) < 1 << 16 else np.uint32)


def encode_batch(tokenizer: PreTrainedTokenizerBase, batch: Batch, dtype: np.dtype) -> TokenStream:
    """Tokenise documents that are lists of pieces.

    Special tokens that occur in a text are tokenised as the characters they are, so that no text can end its document.
    """
    texts = [piece for document in batch for piece in document]
    if tokenizer.is_fast:
        # Its threads share the batch. Called directly, it does not compute offsets and masks that nobody reads.
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        encoded = (encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False))
    else:
        encoded = tokenizer(
            texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
        )["input_ids"]
    encoded = iter(encoded)
    eos = np.array([tokenizer.eos_token_id], dtype)
    bos = eos if tokenizer.bos_token_id is None else np.array([tokenizer.bos_token_id], dtype)
    parts, starts, position = [], [], 0
    for document in batch:
        ids = [np.array(next(encoded), dtype) for _ in document]
        parts += [bos, *ids, eos]
        starts.append(position)
        position += sum(map(len, ids)) + 2
    return TokenStream(np.concatenate(parts), np.array(starts, np.int64))


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], description: str | None = None
) -> Iterator[TokenStream]:
    """Tokenise documents, as one stream for every few megabytes of text; `description` names the progress bar.

    A fast tokenizer uses all cores by threads of its own, a slow one by processes as soon as there is enough text for
    several of them.

    Raises:
        OSError: such a process has died.
    """
    # The bar appears only where tokenising takes longer than two seconds.
    with progress_bar(
        desc=description, unit="B", unit_scale=True, delay=2, leave=False, disable=description is None
    ) as bar:
        batches, dtype = _batches(texts), token_type(tokenizer)
        if tokenizer.is_fast:
            streams = ((batch, encode_batch(tokenizer, batch, dtype)) for batch in batches)
        else:
            streams = _in_processes(tokenizer, batches, dtype)
        for batch, stream in streams:
            bar.update(sum(len(piece) for document in batch for piece in document))
            yield stream


def _in_processes(
    tokenizer: PreTrainedTokenizerBase, batches: Iterator[Batch], dtype: np.dtype
) -> Iterator[tuple[Batch, TokenStream]]:
    """Each batch with its stream, in their order; the first batch here, the others by a process for each core."""
    for batch in itertools.islice(batches, 1):
        yield batch, encode_batch(tokenizer, batch, dtype)
    ahead = list(itertools.islice(batches, 1))
    if not ahead:
        return
    workers, waiting = os.cpu_count() or 1, collections.deque()
    try:
        with ProcessPoolExecutor(workers, initializer=_be_worker, initargs=(tokenizer, dtype)) as pool:
            for batch in itertools.chain(ahead, batches):
                waiting.append((batch, pool.submit(_encode_there, batch)))
                if len(waiting) > 2 * workers:
                    batch, future = waiting.popleft()
                    yield batch, future.result()
            for batch, future in waiting:
                yield batch, future.result()
    except BrokenProcessPool as error:
        raise OSError("a process that tokenises has died: is there enough memory for one on each core?") from error


_worker: tuple[PreTrainedTokenizerBase, np.dtype]  # what a process that tokenises has been given


def _be_worker(*given) -> None:
    global _worker
    _worker = given


def _encode_there(batch: Batch) -> TokenStream:
    tokenizer, dtype = _worker
    return encode_batch(tokenizer, batch, dtype)


def concatenate(streams: Iterable[TokenStream]) -> TokenStream:
    streams = list(streams)
    if not streams:
        return TokenStream(np.empty(0, np.uint16), np.empty(0, np.int64))
    offsets = itertools.accumulate((len(stream.tokens) for stream in streams), initial=0)
    return TokenStream(
        np.concatenate([stream.tokens for stream in streams]),
        np.concatenate([stream.starts + offset for stream, offset in zip(streams, offsets, strict=False)]),
    )
