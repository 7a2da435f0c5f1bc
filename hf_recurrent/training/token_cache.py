"""Tokens kept for later runs: `tokens` in the cache folder, one folder for each text and tokenizer.

A folder's name is a hash of every text, of the tokenizer's files, and of the versions that could read them differently.
It holds `tokens.bin`, which is mapped into memory, so that processes share it and a corpus may be larger than memory;
`starts.npy`; and `stream.json`, with their sizes and their digest. It appears whole or not at all.
"""

import hashlib
import json
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tokenizers
import transformers
from filelock import FileLock
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..files import replacing_folder
from ..messages import first_line
from ..scan.kernel_cache import cache_folder
from .documents import Documents
from .tokens import TokenStream, concatenate, encode

FORMAT = 1


def tokenised(
    tokenizer: PreTrainedTokenizerBase, documents: Documents, description: str | None = None, *, cache: bool = True
) -> TokenStream:
    """The tokens of all documents, from the cache if they are there.

    Args:
        description: of the progress bars; none without.
        cache: False neither reads nor writes it.
    """
    if cache:
        texts = _counted(documents.texts(), description and "reading")
        folder = cache_folder() / "tokens" / _key(tokenizer, texts)
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
            warnings.warn(f"tokens are not kept for later runs: {first_line(error)}", stacklevel=2)
    return concatenate(encode(tokenizer, documents.texts(), description))


def _counted(texts: Iterable[str], description: str | None) -> Iterator[str]:
    with tqdm(desc=description, unit="B", unit_scale=True, delay=2, leave=False, disable=description is None) as bar:
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
                stream.tokens.tofile(file)
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
            return stream
        reason = "it has changed"
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = first_line(error)
    warnings.warn(f"{folder} is damaged ({reason}): tokenising again", stacklevel=3)
    return None
