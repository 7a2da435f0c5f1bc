"""A corpus as the rows that a run reads."""

import warnings
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..messages import counted
from .checkpoints import reading
from .data_arguments import DataArguments
from .documents import Corpus, Document, Documents, Part
from .mixing import MixedRows
from .progress import progress_bar
from .rows import Place, ShuffledRows, StreamedRows
from .token_cache import prune, tokenised

PLACE = "stream-{}.npz"  # in a checkpoint, by the source's number
TOKENIZER_TRAINING_CHARACTERS = 100_000_000  # of the corpus's beginning; a BPE learns nothing more from more

Rows = ShuffledRows | StreamedRows | MixedRows


def build_rows(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    args: DataArguments,
    seed: int,
    visible: bool = True,
    checkpoint: Path | None = None,
) -> Rows:
    """Tokenise what is not streamed.

    Args:
        visible: whether to show progress, and warn where a document has the mark of a document's end in it.
        checkpoint: what to go on from.

    Raises:
        ValueError: a source is shorter than one row; the checkpoint cannot be read.
    """
    parts = []
    for number, part in enumerate(corpus.parts):
        start = None
        if part.streaming and checkpoint is not None:
            with reading(checkpoint):
                start = Place.load(checkpoint / PLACE.format(number))
        # Each source is shuffled in its own way.
        documents = _watched(part, tokenizer.eos_token) if visible else part.train
        parts.append(_part(part, documents, tokenizer, args, seed + number, visible, start))
    return parts[0] if len(parts) == 1 else MixedRows(parts, [part.weight for part in corpus.parts], seed)


def _watched(part: Part, mark: str) -> Documents:
    """The documents to train on of a source; the first one that has the end-of-text mark in it is warned of. (To look
    for it takes a thousandth of the time of tokenising.)"""
    found = False

    def look(document: Document) -> Document:
        nonlocal found
        if not found and mark in document.text:
            found = True
            warnings.warn(
                f"{part.description}: {mark} stands in a text, where it is read as characters and ends no document: "
                "only files and records are told apart",
                stacklevel=2,
            )
        return document

    return part.train.each(look)


def save_places(rows: Rows, checkpoint: Path) -> None:
    """Save where streams can be gone on from."""
    for number, part in enumerate(rows.parts if isinstance(rows, MixedRows) else [rows]):
        if isinstance(part, StreamedRows):
            part.place().save(checkpoint / PLACE.format(number))


def _part(
    part: Part,
    documents: Documents,
    tokenizer: PreTrainedTokenizerBase,
    args: DataArguments,
    seed: int,
    visible: bool,
    start: Place | None,
) -> ShuffledRows | StreamedRows:
    length, packing, name = args.sequence_length, args.packing, part.description
    if part.streaming:
        return StreamedRows(documents, tokenizer, length, packing, name, start)
    stream = tokenised(tokenizer, documents, "tokenising" if visible else None, cache=args.token_cache)
    return ShuffledRows(stream, length, seed, packing, name)


def prune_token_cache(rows: Rows, args: DataArguments) -> str:
    """Keep the token cache within its bound, and in it the tokens of `rows`; a line that tells what was removed, ""
    where nothing was."""
    if not args.token_cache:
        return ""
    parts = rows.parts if isinstance(rows, MixedRows) else [rows]
    used = [part.stream for part in parts if isinstance(part, ShuffledRows)]
    number, size = prune(args.token_cache_gb * 1e9, used)
    if not number:
        return ""
    gigabytes = f"{size / 1e9:.2f} GB: --token-cache-gb {args.token_cache_gb:g}"
    return f"token cache {counted(number, 'folder')} removed, {gigabytes}"


def first_texts(corpus: Corpus, visible: bool = True) -> Iterator[str]:
    """Texts to train a tokenizer on."""
    seen = 0
    with progress_bar(
        desc="reading for the tokenizer", unit="B", unit_scale=True, delay=2, leave=False, disable=not visible
    ) as bar:
        for text in corpus.train.texts():
            yield text
            bar.update(len(text))
            seen += len(text)
            if seen >= TOKENIZER_TRAINING_CHARACTERS:
                return


def summary(corpus: Corpus, rows: Rows) -> list[str]:
    """A line for each source."""
    parts = rows.parts if isinstance(rows, MixedRows) else [rows]
    shares = rows.shares.tolist() if isinstance(rows, MixedRows) else [1.0]
    return [
        part.description + _size(read) + (f", {share:.1%} of the rows" if len(parts) > 1 else "")
        for part, read, share in zip(corpus.parts, parts, shares, strict=True)
    ]


def _size(rows: ShuffledRows | StreamedRows) -> str:
    if isinstance(rows, StreamedRows):
        return ""
    stream, length = rows.stream, rows.sequence_length
    kept = stream.lengths if rows.packing else stream.lengths.clip(max=length)
    text = f": {counted(int(kept.sum()), 'token')} in {counted(len(kept), 'document')} to train on"
    if not rows.packing:
        cut, padding = (stream.lengths > length).sum(), 1 - kept.sum() / (length * len(kept))
        text += f", {counted(int(cut), 'document')} cut off, {padding:.1%} of the rows padding"
    return text
