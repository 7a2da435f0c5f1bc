"""Tokenizers: byte-level BPE trained on the corpus, plain bytes, or one from a folder or the Hub."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..hub import access
from ..messages import first_line
from .data_arguments import DEFAULT_VOCAB_SIZE, DataArguments
from .tokens import largest_id

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # 256 bytes and the end-of-text token
# Tokenizers that recipes name, so that they can be counted where there is no network: tokens, and the last one's use.
KNOWN_TOKENIZERS = {"openai-community/gpt2": 50257, "EleutherAI/gpt-neox-20b": 50277}


def byte_symbols() -> list[str]:
    """The printable character that stands for each of the 256 bytes in byte-level vocabularies, in byte order.

    Printable Latin-1 characters stand for themselves; the other bytes take the characters from U+0100 on, in byte order
    (the alphabet of GPT-2, https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf,
    section 2.2).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    # One token marks both ends of a document. Padding is masked wherever it appears and needs no token of its own.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def check_vocab_size(vocab_size: int) -> None:
    """Raises what `train_bpe` does."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"--vocab-size {vocab_size} is smaller than the byte alphabet: "
            f"at least {MIN_VOCAB_SIZE} are needed (256 bytes and {END_OF_TEXT})"
        )


def train_bpe(texts: Iterable[str], vocab_size: int = DEFAULT_VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE. Any text is encoded without loss and there is no unknown token.

    The vocabulary has at most `vocab_size` tokens, fewer where the texts offer fewer merges.

    Raises:
        ValueError: `vocab_size` is smaller than the byte alphabet and the end-of-text token together.
    """
    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_TEXT],
        show_progress=False,  # its bars go to stderr from Rust, whatever the terminal
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer)


def byte_tokenizer(*, ends: bool = True) -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte, whose id is the byte's value; with `ends` the end-of-text token is 256, else there is
    none, nor another special token."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if not ends:
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return _wrap(tokenizer)


def load_tokenizer(name: str, flag: str = "--tokenizer", *, ends: bool = True) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the Hub.

    Args:
        flag: the argument that `name` was given as, for the messages.
        ends: whether it needs an end-of-sequence token.

    Raises:
        ValueError: there is none, or it has no such token to mark where documents end.
    """
    if not Path(name).exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ValueError(f"{flag} {name}: no such folder")
    if Path(name).is_dir() and not any(any(Path(name).glob(files)) for files in ("tokenizer*", "vocab*", "*.model")):
        raise ValueError(f"{flag} {name}: the folder holds no tokenizer")
    access.prepare(name)
    what = "" if flag == "--tokenizer" else "its tokenizer "
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # a broken file, an unknown class, no network: each library raises its own
        raise ValueError(f"{flag} {name}: {what}cannot be loaded: {_fault(error, name)}") from error
    if ends and tokenizer.eos_token_id is None:
        raise ValueError(f"{flag} {name}: {what or 'it '}has no end-of-sequence token to mark where documents end")
    return tokenizer


def _fault(error: Exception, name: str) -> str:
    """Why a tokenizer cannot be loaded; the libraries do not name a file that is damaged."""
    for file in sorted(Path(name).glob("*token*.json")) if Path(name).is_dir() else ():
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except ValueError as damage:
            return f"{file.name}: {first_line(damage)}"
    if Path(name).is_dir() and "backend tokenizer" in str(error):
        return "there is none in tokenizer.json, nor in files of another kind"
    return access.reason(error, name)


@dataclass
class TokenizerSize:
    """As much of a tokenizer as a configuration asks for.

    Args:
        size: embeddings that it needs: one more than its largest id, which may lie beyond the number of its tokens.
        bos_token_id, eos_token_id, pad_token_id: None where there is none, or where only the size is known.
    """

    size: int
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "TokenizerSize":
        size = max(len(tokenizer), largest_id(tokenizer) + 1)
        return cls(size, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)


def tokenizer_size(args: DataArguments) -> TokenizerSize:
    """The size of the tokenizer that the arguments ask for; a BPE's at most.

    Raises:
        ValueError: it is neither here nor known; a BPE would be too small.
    """
    if args.tokenizer == "bytes":
        return TokenizerSize.of(byte_tokenizer())
    if args.tokenizer == "bpe":
        size = args.vocab_size or DEFAULT_VOCAB_SIZE
        check_vocab_size(size)
        return TokenizerSize(size)
    if args.tokenizer in KNOWN_TOKENIZERS and not Path(args.tokenizer).exists():
        return TokenizerSize(KNOWN_TOKENIZERS[args.tokenizer])
    return TokenizerSize.of(load_tokenizer(args.tokenizer))
