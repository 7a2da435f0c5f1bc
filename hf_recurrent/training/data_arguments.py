"""What `hf-recurrent train` can be told about its corpus: one source, or several with weights."""

import dataclasses
from dataclasses import dataclass
from typing import get_args, get_origin

import yaml

from ..cli.parser import LARGEST
from ..messages import nearest
from .options import flag, option, require, type_name

DEFAULT_VOCAB_SIZE = 4096
LARGEST_VOCAB_SIZE = 1 << 24  # the BPE's trainer takes memory for all of it beforehand


@dataclass
class SourceArguments:
    """Where documents come from: files, or a dataset. Neither stands for Python's standard library."""

    _argument_group_name = "data"

    data_files: list[str] = option(
        [],
        "Files or globs: .jsonl, .json, .parquet, .csv and .tsv by --text-column, any other file as one document of "
        "text; .gz, .bz2 and .xz are decompressed. (default: the source of Python's standard library)",
    )
    dataset: str | None = option(None, "Dataset to load by `datasets`: a name on the Hub or a folder.")
    dataset_config: str | None = option(None, "Configuration of --dataset.")
    dataset_split: str = option("train", "Split of --dataset to train on.")
    validation_split: str | None = option(
        None,
        "Split of --dataset to validate on, none that is trained on (default: 'validation' where there is such a one, "
        "else a share of the documents).",
    )
    text_column: str = option("text", "Column that holds the text.")
    streaming: bool = option(False, "Read --dataset while training instead of loading it.")
    max_documents: int | None = option(None, "Use only the first so many documents.")

    def __post_init__(self):
        if self.dataset and self.data_files:
            raise ValueError("--dataset and --data-files cannot both be given")
        for name in ("dataset_config", "validation_split"):
            if getattr(self, name) is not None and not self.dataset:
                raise ValueError(f"{flag(name)} belongs to --dataset, which is not given")
        if self.streaming and not self.dataset:
            raise ValueError("--streaming belongs to --dataset, which is not given")
        require(self, "max_documents", at_least=1)


@dataclass
class Source(SourceArguments):
    """One of several sources.

    Args:
        weight: its share of the training rows, in parts of the sum of all weights. Rows have the same number of tokens,
            so it is its share of the tokens too. A source that ends before the others begins anew.
    """

    weight: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        if not (self.dataset or self.data_files):
            raise ValueError("it names neither data_files nor dataset")
        if not 0 < self.weight <= LARGEST:
            raise ValueError(f"weight must be above 0 and finite, got {self.weight}")

    @classmethod
    def parse(cls, given: dict | str) -> "Source":
        """A source as a recipe or the command line gives it: `{data_files: [a.txt], weight: 2}`.

        Raises:
            ValueError: no such field, with the nearest valid one; or a value of another type.
        """
        if isinstance(given, str):
            try:
                given = yaml.safe_load(given)
            except yaml.YAMLError as error:
                raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(given, dict):
            raise ValueError(f"got {given!r}, expected {{field: value, ...}}, as in {{data_files: [a.txt], weight: 2}}")
        fields, values = {field.name: field for field in dataclasses.fields(cls)}, {}
        for key, value in given.items():
            name = str(key).replace("-", "_")
            if name not in fields:
                raise ValueError(f"unknown field {key!r}{nearest(name, fields)}")
            values[name] = _fitting(value, fields[name])
        return cls(**values)


def _fitting(value: object, field: dataclasses.Field) -> object:
    """A value from YAML as the type of its field."""
    if get_origin(field.type) is list:
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            return value
        raise ValueError(f"{field.name}: got {value!r}, expected a list of texts")
    kinds = get_args(field.type) or (field.type,)
    if float in kinds and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 takes 1e-5 for text
        except (TypeError, ValueError):
            pass
    elif isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)):
        return value
    raise ValueError(f"{field.name}: got {value!r}, expected {type_name(field)}")


@dataclass
class DataArguments(SourceArguments):
    """The corpus and how it becomes rows.

    Each of `sources` is a dict of `Source`'s fields, or such a dict as YAML text; it is left here as a dict. `parts`
    gives them as `Source`s.
    """

    sources: list[str] = option(
        [],
        "Several sources, instead of the flags above: each a mapping of their names and of a weight, its share of the "
        "rows (default: 1, and so the same for all), as in '{data_files: [a.txt], weight: 2}' '{dataset: b}'.",
        metavar="{...}",
    )
    skip_unreadable_files: bool = option(
        False, "Leave out --data-files that cannot be read or hold no text, with a warning that names each."
    )
    validation_files: list[str] = option(
        [], "Files or globs to validate on, by --text-column, instead of a share of the corpus."
    )
    validation_share: float = option(
        0.05,
        "Share of the documents to validate on, chosen by a hash (where that leaves nothing, the last share of each "
        "document); 0 for no validation.",
    )
    max_validation_documents: int | None = option(
        None,
        "Validate on at most so many documents of each source, chosen by a hash (default: all); of streams the first "
        "ones (default: 500).",
    )
    tokenizer: str = option(
        "bpe", "'bpe' (byte-level BPE trained on the corpus), 'bytes', or a tokenizer's folder or name on the Hub."
    )
    vocab_size: int | None = option(None, f"Vocabulary of the BPE (default: {DEFAULT_VOCAB_SIZE}).")
    token_cache: bool = option(
        True, "Keep tokens in the cache folder for later runs on the same documents with the same tokenizer."
    )
    token_cache_gb: float = option(
        50.0, "Gigabytes that these tokens may take: beyond, those used longest ago are removed, this run's never."
    )
    sequence_length: int = option(256, "Tokens in a row.")
    packing: bool = option(
        True,
        "Rows without padding, of as many documents as fit, none of which sees another; `--packing no`: a row for each "
        "document, truncated or padded to --sequence-length.",
    )

    def __post_init__(self):
        super().__post_init__()
        self.sources = [source if isinstance(source, dict) else _mapping(source) for source in self.sources]
        self._check_sources()
        if any(part.validation_split is not None for part in self.parts()):
            for other, given in (("-files", self.validation_files), ("-share 0", self.validation_share == 0)):
                if given:
                    raise ValueError(f"--validation-split and --validation{other} cannot both be given")
        for part in self.parts():
            if part.validation_split is not None and (trained := self.trained_on(part, part.validation_split)):
                raise ValueError(
                    f"--validation-split {part.validation_split}: --dataset-split {trained} trains on its documents: "
                    "expected another split, or another slice of it"
                )
        if self.skip_unreadable_files and not any(part.data_files for part in self.parts()):
            raise ValueError("--skip-unreadable-files belongs to --data-files, which are not given")
        if self.vocab_size is not None and self.tokenizer != "bpe":
            raise ValueError(f"--vocab-size belongs to --tokenizer bpe, which is {self.tokenizer}")
        if not self.token_cache and self.token_cache_gb != type(self).token_cache_gb:
            raise ValueError("--no-token-cache and --token-cache-gb cannot both be given")
        require(self, "max_validation_documents", at_least=1)
        require(self, "vocab_size", at_least=1, at_most=LARGEST_VOCAB_SIZE)
        require(self, "sequence_length", at_least=2)
        require(self, "token_cache_gb", at_least=0)
        require(self, "validation_share", at_least=0, below=1)

    def _check_sources(self) -> None:
        if not self.sources:
            return
        for field in dataclasses.fields(SourceArguments):
            if field.name == "text_column" and self.validation_files:
                continue  # it is theirs
            default = field.default_factory() if field.default is dataclasses.MISSING else field.default
            if getattr(self, field.name) != default:
                raise ValueError(f"{flag(field.name)} cannot be given beside --sources: it belongs into each of them")
        self.parts()

    def parts(self) -> list[SourceArguments]:
        """The sources, these arguments themselves where there is but one.

        Raises:
            ValueError: one of `sources` cannot be understood; the message says which.
        """
        parts = []
        for number, source in enumerate(self.sources, start=1):
            try:
                parts.append(Source.parse(source))
            except ValueError as error:
                raise ValueError(f"--sources, number {number}: {error}") from None
        return parts or [self]

    def trained_on(self, source: SourceArguments, split: str) -> str | None:
        """The `dataset_split`, of this source or of another with its dataset, that has documents of `split`, as far as
        names tell: different slices of a split are taken to be apart. None where there is none."""
        dataset = (source.dataset, source.dataset_config)
        splits = [part.dataset_split for part in self.parts() if (part.dataset, part.dataset_config) == dataset]
        return next((trained for trained in splits if _overlap(trained, split)), None)


def _overlap(split: str, other: str) -> bool:
    """Whether two splits, such as train[:90%]+test, have a part in common: all of a split, or the same slice of it."""

    def holds(part: str, inner: str) -> bool:
        return part in ("all", inner) or inner.startswith(f"{part}[")

    parts, others = ([part.strip() for part in each.split("+")] for each in (split, other))
    return any(holds(a, b) or holds(b, a) for a in parts for b in others)


def _mapping(text: str) -> object:
    """YAML text as what it stands for; `Source.parse` says what is wrong with it."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
