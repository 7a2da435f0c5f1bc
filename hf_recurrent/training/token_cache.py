"""Tokens kept for later runs: `tokens` in the cache folder, one folder for each text and tokenizer.

A folder's name is a hash of every text, of the tokenizer's files, and of the versions that could read them differently.
It holds `tokens.bin`, which is mapped into memory, so that processes share it and a corpus may be larger than memory;
`starts.npy`; and `stream.json`, with their sizes and their digest. It appears whole or not at all. Its time of
modification is when it was last used, by which `prune` chooses.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tokenizers
import transformers
from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from ..files import UNFINISHED, replacing_folder
from ..messages import first_line
from ..scan.kernel_cache import cache_folder
from .documents import Documents
from .progress import progress_bar
from .tokens import TokenStream, concatenate, encode

FORMAT = 1
ABANDONED = 24 * 3600  # seconds after which nobody is still writing what is unfinished


def tokens_folder() -> Path:
    return cache_folder() / "tokens"


def entries() -> dict[Path, int]:
    """The folders in the cache, unfinished ones too, and their bytes; those used longest ago come first."""
    found = []
    with contextlib.suppress(OSError):  # none yet, or one that may not be read
        for path in tokens_folder().iterdir():
            with contextlib.suppress(OSError):  # another process may be removing it
                if path.is_dir():
                    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                    found.append((path.stat().st_mtime, path, size))
    return {path: size for _, path, size in sorted(found)}


def prune(most_bytes: float, used: Iterable[TokenStream]) -> tuple[int, int]:
    """Remove what was used longest ago, until the cache takes at most so many bytes, and what interrupted processes
    have left in it for a day.

    Args:
        used: streams of this run, which stay, whatever they take. What another process reads or writes at this moment
            stays as well; what it has mapped into memory stays readable to it.

    Returns:
        How many entries have been removed, and their bytes.
    """
    found = entries()
    # By their names, which are hashes: the cache may be reached by other paths than the one that numpy has resolved.
    kept = {Path(stream.tokens.filename).parent.name for stream in used if isinstance(stream.tokens, np.memmap)}
    total, removed, freed = sum(found.values()), 0, 0
    for path, size in found.items():
        if path.name.startswith(UNFINISHED):
            gone = _last_change(path) < time.time() - ABANDONED and _remove(path)
        else:
            gone = total > most_bytes and path.name not in kept and _remove_unused(path)
        if gone:
            total, removed, freed = total - size, removed + 1, freed + size
    return removed, freed


def _last_change(folder: Path) -> float:
    """When something in it changed; now, where another process is changing it."""
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:
        return time.time()


def _remove_unused(folder: Path) -> bool:
    try:
        with FileLock(f"{folder}.lock", timeout=0):
            return _remove(folder)
    except (OSError, Timeout):
        return False


def _remove(folder: Path) -> bool:
    """Whether the folder is gone. `stream.json` goes first, without which what is left is known to be damaged."""
    try:
        (folder / "stream.json").unlink(missing_ok=True)
        shutil.rmtree(folder)
    except OSError:  # on some systems a mapped file cannot be removed
        return False
    return True


def tokenised(
    tokenizer: PreTrainedTokenizerBase, documents: Documents, description: str | None = None, *, cache: bool = True
) -> TokenStream:
    """The tokens of all documents, from the cache if they are there.

    Args:
        description: of the progress bars; none without.
        cache: False neither reads nor writes it.
    """
    if cache and next(documents.texts(), None) is not None:  # nothing cannot be mapped into memory
        texts = _counted(documents.texts(), description and "reading")
        folder = tokens_folder() / _key(tokenizer, texts)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):  # of several processes one tokenises, and the others wait for it
                stream = _read(folder)
                if stream is None:
                    _write(folder, tokenizer, documents, description)
                    stream = _read(folder)
                if stream is not None:
                    return stream
        except OSError as error:
            if (stream := _read(folder)) is not None:  # in a cache that may only be read
                return stream
            warnings.warn(f"tokens are not kept for later runs: {first_line(error)}", stacklevel=2)
    return concatenate(encode(tokenizer, documents.texts(), description))


def _counted(texts: Iterable[str], description: str | None) -> Iterator[str]:
    with progress_bar(
        desc=description, unit="B", unit_scale=True, delay=2, leave=False, disable=description is None
    ) as bar:
        for text in texts:
            yield text
            bar.update(len(text))


def _key(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> str:
    digest = hashlib.sha256(repr((FORMAT, transformers.__version__, tokenizers.__version__)).encode())
    digest.update(repr((type(tokenizer).__name__, tokenizer.bos_token_id, tokenizer.eos_token_id)).encode())
    with tempfile.TemporaryDirectory() as folder:
        for file in sorted(map(Path, tokenizer.save_pretrained(folder))):
            if file.is_file():
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()[:32]


def _write(folder: Path, tokenizer: PreTrainedTokenizerBase, documents: Documents, description: str | None) -> None:
    with replacing_folder(folder) as temporary:
        starts, count, dtype = [], 0, None
        with open(temporary / "tokens.bin", "wb") as file:
            for stream in encode(tokenizer, documents.texts(), description):
                file.write(stream.tokens)  # `tofile` does not say why it fails
                starts.append(stream.starts + count)
                count, dtype = count + len(stream.tokens), stream.tokens.dtype
        starts = np.concatenate(starts)
        np.save(temporary / "starts.npy", starts)
        digest = TokenStream(np.memmap(temporary / "tokens.bin", dtype, "r"), starts).digest
        about = {"tokens": count, "documents": len(starts), "dtype": dtype.str, "digest": digest}
        (temporary / "stream.json").write_text(json.dumps(about) + "\n", encoding="utf-8")


def _read(folder: Path) -> TokenStream | None:
    """None where there is nothing; nor where it is damaged, which is said."""
    if not folder.exists():
        return None
    try:
        about = json.loads((folder / "stream.json").read_text(encoding="utf-8"))
        tokens = np.memmap(folder / "tokens.bin", np.dtype(about["dtype"]), "r")
        stream = TokenStream(tokens, np.load(folder / "starts.npy", allow_pickle=False))
        if stream.digest == about["digest"]:
            with contextlib.suppress(OSError):  # a cache that may only be read
                os.utime(folder)
            return stream
        reason = "it has changed"
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = first_line(error)
    warnings.warn(f"{folder} is damaged ({reason}): tokenising again", stacklevel=3)
    return None
