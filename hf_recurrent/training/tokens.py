"""Texts to tokens: a stream is the documents one after the other, each as `[bos] tokens [eos]`."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

PIECE = 1 << 20  # characters; longer documents are tokenised piece by piece, which bounds memory and uses every core
BATCH = 1 << 22  # characters tokenised in one call


@dataclass
class TokenStream:
    """Documents one after the other, each as `[bos] tokens [eos]`.

    Args:
        tokens: (N,) unsigned integers.
        starts: (documents,) where each document begins in `tokens`, ascending, the first one 0.
    """

    tokens: np.ndarray
    starts: np.ndarray

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


def _batches(texts: Iterable[str]) -> Iterator[list[list[str]]]:
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


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], description: str | None = None
) -> Iterator[TokenStream]:
    """Tokenise documents, as one stream for every few megabytes of text; `description` names the progress bar.

    Special tokens that occur in a text are tokenised as the characters they are, so that no text can end its document.
    """
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    eos = np.array([tokenizer.eos_token_id], dtype)
    bos = eos if tokenizer.bos_token_id is None else np.array([tokenizer.bos_token_id], dtype)
    # The bar appears only where tokenising takes longer than two seconds.
    with tqdm(desc=description, unit="B", unit_scale=True, delay=2, leave=False, disable=description is None) as bar:
        for batch in _batches(texts):
            encoded = tokenizer(
                [piece for document in batch for piece in document],
                add_special_tokens=False,
                split_special_tokens=True,
                return_attention_mask=False,
                verbose=False,
            )["input_ids"]
            encoded = iter(encoded)
            parts, starts, position = [], [], 0
            for document in batch:
                ids = [np.array(next(encoded), dtype) for _ in document]
                parts += [bos, *ids, eos]
                starts.append(position)
                position += sum(map(len, ids)) + 2
                bar.update(sum(map(len, document)))
            yield TokenStream(np.concatenate(parts), np.array(starts, np.int64))


def concatenate(streams: Iterable[TokenStream]) -> TokenStream:
    streams = list(streams)
    offsets = itertools.accumulate((len(stream.tokens) for stream in streams), initial=0)
    return TokenStream(
        np.concatenate([stream.tokens for stream in streams]),
        np.concatenate([stream.starts + offset for stream, offset in zip(streams, offsets, strict=False)]),
    )
