"""What `hf-recurrent train` can be told about its corpus: one source, or several with weights."""

from dataclasses import dataclass

from .options import flag, option, require
from .tokenizer import DEFAULT_VOCAB_SIZE, LARGEST_VOCAB_SIZE


@dataclass
class DataArguments:
    _argument_group_name = "data"

    data_files: list[str] = option(
        [],
        "Files or globs: .jsonl, .json and .parquet by --text-column, any other file as one document of text; "
        ".gz, .bz2 and .xz are decompressed. (default: the source of Python's standard library)",
    )
    validation_files: list[str] = option([], "Files or globs to validate on, instead of a share of the corpus.")
    dataset: str | None = option(None, "Dataset to load by `datasets`: a name on the Hub or a folder.")
    dataset_config: str | None = option(None, "Configuration of --dataset.")
    dataset_split: str = option("train", "Split of --dataset to train on.")
    validation_split: str | None = option(
        None,
        "Split of --dataset to validate on (default: 'validation' where there is one, else a share of the documents).",
    )
    text_column: str = option("text", "Column that holds the text.")
    streaming: bool = option(False, "Read --dataset while training instead of loading it.")
    max_documents: int | None = option(None, "Use only the first so many documents.")
    validation_share: float = option(
        0.05,
        "Share of the documents to validate on, chosen by a hash (where that leaves nothing, the last share of each "
        "document); 0 for no validation.",
    )
    max_validation_documents: int | None = option(
        None, "Validate on at most so many documents (default: all; with --streaming 500)."
    )
    tokenizer: str = option(
        "bpe", "'bpe' (byte-level BPE trained on the corpus), 'bytes', or a tokenizer's folder or name on the Hub."
    )
    vocab_size: int | None = option(None, f"Vocabulary of the BPE (default: {DEFAULT_VOCAB_SIZE}).")
    sequence_length: int = option(256, "Tokens in a row.")

    def __post_init__(self):
        if self.dataset and self.data_files:
            raise ValueError("--dataset and --data-files cannot both be given")
        for name in ("dataset_config", "validation_split"):
            if getattr(self, name) is not None and not self.dataset:
                raise ValueError(f"{flag(name)} belongs to --dataset, which is not given")
        if self.streaming and not self.dataset:
            raise ValueError("--streaming belongs to --dataset, which is not given")
        if self.validation_split is not None and self.validation_files:
            raise ValueError("--validation-split and --validation-files cannot both be given")
        if self.vocab_size is not None and self.tokenizer != "bpe":
            raise ValueError(f"--vocab-size belongs to --tokenizer bpe, which is {self.tokenizer}")
        require(self, "max_documents", "max_validation_documents", at_least=1)
        require(self, "vocab_size", at_least=1, at_most=LARGEST_VOCAB_SIZE)
        require(self, "sequence_length", at_least=2)
        require(self, "validation_share", at_least=0, below=1)
