"""The validation text as rows, with what its baselines need."""

import zlib
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..modeling.model import IGNORED
from .documents import Documents
from .rows import count_targets, pack
from .tokens import TokenStream, concatenate, encode


@dataclass
class ValidationRows:
    """The whole validation text as rows, the last one padded, with what its baselines need.

    Args:
        rows: `input_ids`, `position_ids`, `labels`, each (R, L).
        target_counts: (V,) how often each token is a target.
        text_bytes: UTF-8 bytes of the text.
        gzip_bytes: what `gzip -9` makes of the documents one after the other.
    """

    rows: dict[str, np.ndarray]
    documents: int
    target_counts: np.ndarray
    text_bytes: int
    gzip_bytes: int

    @property
    def targets(self) -> int:
        return int(self.target_counts.sum())


def validation_rows(
    documents: Documents, tokenizer: PreTrainedTokenizerBase, sequence_length: int, vocab_size: int
) -> ValidationRows:
    """Tokenise and pack validation documents. Every token but the documents' first is a target in exactly one row.

    Raises:
        ValueError: there is no text to validate on.
    """
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)  # 31: with gzip's header and checksum
    count = text_bytes = gzip_bytes = 0

    def measured():
        nonlocal count, text_bytes, gzip_bytes
        for text in documents.texts():
            content = text.encode("utf-8")
            count, text_bytes = count + 1, text_bytes + len(content)
            gzip_bytes += len(compressor.compress(content))
            yield text

    streams = list(encode(tokenizer, measured(), "tokenising validation text"))
    if not streams:
        raise ValueError("there is no validation text: give --validation-files, or --validation-share 0 to do without")
    gzip_bytes += len(compressor.flush())
    stream = concatenate(streams)
    rows = -(-(len(stream.tokens) - 1) // (sequence_length - 1))
    missing = rows * (sequence_length - 1) + 1 - len(stream.tokens)
    padding = np.full(missing, tokenizer.eos_token_id, stream.tokens.dtype)
    padded = TokenStream(np.concatenate([stream.tokens, padding]), stream.starts)
    packed = pack(padded, np.arange(rows), sequence_length)
    if missing:
        packed["labels"][-1, -missing:] = IGNORED
    return ValidationRows(packed, count, count_targets(stream, vocab_size), text_bytes, gzip_bytes)
