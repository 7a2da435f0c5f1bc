"""Where documents come from: the standard library, files, datasets."""

import bz2
import collections
import csv
import glob
import gzip
import itertools
import lzma
import os
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..hub import access
from ..messages import counted, first_line
from .data_arguments import DataArguments, SourceArguments
from .documents import Corpus, Documents, Part, chained, in_random_order, split
from .progress import progress_bar

# Folders of the standard library that hold tests or other people's packages.
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
COMPRESSIONS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
LOADERS = {
    ".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "tsv"
}  # fmt: skip
DELIMITERS = {"csv": ",", "tsv": "\t"}
STREAMED_VALIDATION = 500  # documents held out of a stream, unless --max-validation-documents says otherwise


def stdlib_documents(root: Path | None = None) -> Documents:
    """The source files of the running interpreter's standard library, sorted by relative path, which is also their key.

    Tests and site-packages are left out, and so are files that are not UTF-8.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}

    def read(_):
        for name in sorted(paths):
            if NOT_LIBRARY.isdisjoint(name.split("/")):
                try:
                    yield name, paths[name].read_bytes().decode("utf-8")
                except UnicodeDecodeError:
                    continue

    return Documents(read)


def expand(patterns: list[str], flag: str) -> list[str]:
    """The files that patterns name, sorted within each pattern.

    Raises:
        FileNotFoundError: a pattern names no file.
    """
    files = []
    for pattern in patterns:
        # A name that exists is taken as it is, even with brackets in it.
        found = [pattern] if Path(pattern).is_file() else sorted(filter(_is_file, glob.glob(pattern, recursive=True)))
        if not found:
            reason = "is a folder: name its files, for example by a glob" if Path(pattern).is_dir() else "no such file"
            raise FileNotFoundError(f"{flag} {pattern}: {reason}")
        files += found
    return files


def check_apart(validation_files: list[str], training_files: list[str]) -> None:
    """
    Raises:
        ValueError: a file is among both, by whatever names.
    """
    trained = {_identity(file): file for file in training_files}
    for file in validation_files:
        if (other := trained.get(_identity(file))) is not None:
            raise ValueError(f"--validation-files {file}: --data-files {other} trains on it: expected another file")


def _tell_repeated(files: list[str], flag: str) -> None:
    """A warning where a file is named several times, by overlapping globs, say. It may be meant so."""
    counts = collections.Counter(map(_identity, files))
    names = {_identity(file): file for file in reversed(files)}
    repeated = [(names[one], number) for one, number in counts.items() if number > 1]
    if repeated:
        (file, number), others = repeated[0], len(repeated) - 1
        more = f", and {counted(others, 'other file')} more than once" if others else ""
        warnings.warn(f"{flag} {file}: given {number} times{more}: each time, its documents are read", stacklevel=3)


def _identity(file: str) -> tuple[int, int]:
    """The same for all names of a file, as for `os.path.samefile`."""
    about = os.stat(file)
    return about.st_dev, about.st_ino


def _is_file(name: str) -> bool:
    return Path(name).is_file()


class UnreadableFile(ValueError):
    """A file that is damaged or holds no text; the message names it."""


def file_documents(files: list[str], text_column: str) -> Documents:
    """Documents of local files: the records of .jsonl, .json, .parquet, .csv and .tsv; others as a whole.

    Files ending in .gz, .bz2 or .xz are decompressed. A document's key is its text.

    Raises (while iterating):
        UnreadableFile: a file that cannot be read to its end, or holds no text.
        ValueError: a file without text in `text_column`; the message names it.
    """

    def read(_):
        for file in files:
            yield from ((text, text) for text in _texts(file, text_column))

    return Documents(read)


def readable_files(files: list[str], text_column: str) -> list[str]:
    """Those of the files that can be read to their end and hold text. A warning names each of the others.

    Raises:
        ValueError: a file that can be read has no text in `text_column`.
    """
    readable = []
    for file in progress_bar(files, "checking files", unit="file", delay=2, leave=False):
        try:
            for _ in _texts(file, text_column):
                pass
            readable.append(file)
        except UnreadableFile as error:
            warnings.warn(f"{error}; left out", stacklevel=2)
    return readable


def _texts(file: str, text_column: str) -> Iterator[str]:
    endings = [ending for ending in Path(file).suffixes if ending not in COMPRESSIONS]
    loader = LOADERS.get(endings[-1].lower() if endings else "")
    if Path(file).stat().st_size == 0:
        raise UnreadableFile(f"{file}: the file is empty")
    any_text = False
    for text in [_read_text(file)] if loader is None else _read_records(loader, file, text_column):
        any_text = any_text or bool(text)
        yield text
    if not any_text:
        raise UnreadableFile(f"{file}: there is no text in it")


def _read_text(file: str) -> str:
    try:
        with COMPRESSIONS.get(Path(file).suffix, open)(file, "rb") as stream:
            return stream.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"{file}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except Exception as error:  # what a broken archive raises differs by its kind
        raise UnreadableFile(f"{file}: cannot be read: {first_line(error)}") from error


def _read_records(loader: str, file: str, text_column: str) -> Iterator[str]:
    from datasets import load_dataset

    try:
        if file.endswith(".parquet") and _parquet_rows(file) == 0:
            return  # datasets cannot read it
        if loader in DELIMITERS:
            records = _csv_records(file, DELIMITERS[loader])
        else:
            # Streaming reads the file itself; otherwise a copy of it would stay in the datasets cache.
            records = iter(load_dataset(loader, data_files=[glob.escape(file)], split="train", streaming=True))
        first = list(itertools.islice(records, 1))
        yield from _column(itertools.chain(first, records), text_column, file)
    except _NoText:
        raise
    except Exception as error:  # datasets, pyarrow and the decompressors each raise their own
        raise UnreadableFile(f"{file}: cannot be read as {loader}: {access.reason(error, file)}") from error


def _csv_records(file: str, delimiter: str) -> Iterator[dict]:
    """Every value as the text that it is; `datasets` would make numbers of some and nothing of others ("NA")."""
    csv.field_size_limit(2**31 - 1)  # of the process; a document may be longer than the 128 KiB of the default
    with COMPRESSIONS.get(Path(file).suffix, open)(file, "rt", encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, delimiter=delimiter, strict=True)
        rows = filter(None, reader)  # empty lines are no records
        try:
            columns = next(rows, [])
            for row in rows:
                if len(row) != len(columns):
                    raise csv.Error(f"got {counted(len(row), 'value')}, expected {len(columns)}")
                yield dict(zip(columns, row, strict=True))
        except csv.Error as error:
            raise ValueError(f"line {reader.line_num}: {error}") from None


def _parquet_rows(file: str) -> int:
    import pyarrow.parquet

    return pyarrow.parquet.read_metadata(file).num_rows


class _NoText(ValueError):
    """A record without text; the message already names the file."""


def _column(records: Iterable[dict], column: str, source: str) -> Iterator[str]:
    for number, record in enumerate(records):
        if column not in record:
            raise _NoText(
                f"{source}: no column {column!r}; it has {', '.join(map(repr, record))}: choose one by --text-column"
            )
        if not isinstance(record[column], str):
            raise _NoText(f"{source}: record {number}: column {column!r} holds {record[column]!r}, expected text")
        yield record[column]


def dataset_documents(
    name: str,
    config: str | None,
    split: str,
    text_column: str,
    *,
    streaming: bool = False,
    max_documents: int | None = None,
    seed: int = 0,
) -> Documents:
    """Documents of a dataset on the Hub or in a folder, by `datasets.load_dataset`. A document's key is its text.

    With `streaming`, `epoch(n)` iterates in the order of `in_random_order`; `max_documents` are one shard then.

    Raises:
        ValueError: there is no such dataset, configuration, split or column.
    """
    from datasets import load_dataset

    access.prepare(name)
    where = name if config is None else f"{name} --dataset-config {config}"
    check_shards(name, config, split)
    try:
        dataset = load_dataset(name, config, split=split, streaming=streaming)
    except Exception as error:  # datasets raises a dozen kinds, network errors among them
        reason = _damage(error, name, config, split, text_column)
        reason = reason or f"split {split!r} cannot be loaded: {access.reason(error, name)}"
        raise ValueError(f"--dataset {where}: {reason}") from error
    if max_documents is not None:
        dataset = dataset.take(max_documents if streaming else min(max_documents, len(dataset)))

    def texts(records):
        try:
            yield from _column(records, text_column, name)
        except _NoText:
            raise
        except Exception as error:
            reason = _damage(error, name, config, split, text_column)
            reason = reason or f"cannot be read: {access.reason(error, name)}"
            raise ValueError(f"--dataset {where}: {reason}") from error

    def read(epoch):
        return ((text, text) for text in texts(dataset))

    if not streaming:
        return Documents(read)
    shards = 1 if max_documents is not None else dataset.num_shards

    def shard(number, count):
        one = dataset if shards == 1 else dataset.shard(shards, number)
        return texts(one.skip(count) if count else one)

    return Documents(read, lambda epoch, start: in_random_order(shard, shards, seed, epoch, start))


def check_shards(name: str, config: str | None, split: str) -> None:
    """Look at the files of a dataset in a folder, before any of it is loaded: `datasets` passes over empty ones, and
    where it reads while training it finds a damaged one late. Of Parquet files the footer is read, which comes last.

    Raises:
        ValueError: one is damaged or empty; the message names it.
    """
    for file in _local_files(name, config, split):
        if os.path.getsize(file) == 0:
            raise ValueError(f"--dataset {name}: {file}: the file is empty")
        if file.endswith(".parquet"):
            try:
                rows = _parquet_rows(file)
            except Exception as error:  # pyarrow's own kinds
                raise ValueError(f"--dataset {name}: {file}: cannot be read as parquet: {first_line(error)}") from error
            if rows == 0:
                raise ValueError(f"--dataset {name}: {file}: there is no text in it")


def _damage(error: Exception, name: str, config: str | None, split: str, text_column: str) -> str | None:
    """Which file of a dataset in a folder is damaged, which `datasets` does not say; None where none is found."""
    if getattr(error.__cause__ or error, "errno", None) is not None:
        return None  # the system's fault: a full disk, no permission
    for file in _local_files(name, config, split):
        if not LOADERS.keys() & set(Path(file).suffixes):
            continue
        try:
            for _ in _texts(file, text_column):
                pass
        except UnreadableFile as damage:
            return str(damage)
        except _NoText:
            pass
    return None


def _local_files(name: str, config: str | None, split: str) -> list[str]:
    """The data files of a dataset in a folder; none where it is elsewhere, or cannot be loaded, which says why."""
    from datasets import load_dataset_builder

    if not Path(name).is_dir():
        return []
    try:
        files = load_dataset_builder(name, config).config.data_files
    except Exception:
        return []
    return [str(file) for file in (files or {}).get(split.split("[")[0], []) if Path(file).is_file()]


def load_corpus(args: DataArguments, seed: int) -> Corpus:
    """The corpus that the arguments ask for.

    Raises:
        ValueError, FileNotFoundError: what is asked for is not there, is empty, or cannot be read; a file is to be
            trained on and validated on.
    """
    given, parts, held_out = None, [], []
    if args.validation_files:
        files = expand(args.validation_files, "--validation-files")
        check_apart(files, [file for part in args.parts() for file in expand(part.data_files, "--data-files")])
        _tell_repeated(files, "--validation-files")
        given = file_documents(files, args.text_column)
        held_out.append(given.sample(_validation_limit(args, args)))
    for number, source in enumerate(args.parts()):
        # Streams that are shuffled alike would be in step with each other.
        description, train, validation = _load_source(source, args, seed + number)
        if next(iter(train), None) is None:
            raise ValueError(f"the corpus is empty: there is no text in {description}")
        if given is None and validation is None:
            train, validation = split(train, args.validation_share)
        if given is None and validation is not None:
            limit = _validation_limit(source, args)
            # The first ones would all be of one kind where the order is that of names. A stream is not read to its end.
            held_out.append(validation.head(limit) if source.streaming else validation.sample(limit))
        parts.append(Part(description, train, source.streaming, getattr(source, "weight", 1.0)))
    return Corpus(parts, chained(held_out) if held_out else None)


def _validation_limit(source: SourceArguments, args: DataArguments) -> int | None:
    limit = args.max_validation_documents
    return STREAMED_VALIDATION if limit is None and source.streaming else limit


def _load_source(source: SourceArguments, args: DataArguments, seed: int) -> tuple[str, Documents, Documents | None]:
    """What a source is, its documents, and those that it has for validation."""
    if source.dataset:
        return _load_dataset(source, args, seed)
    if not source.data_files:
        return "Python's standard library", stdlib_documents().head(source.max_documents), None
    files = expand(source.data_files, "--data-files")
    _tell_repeated(files, "--data-files")
    description = files[0] if len(files) == 1 else f"{len(files)} files"
    if args.skip_unreadable_files:
        files = readable_files(files, source.text_column)
    return description, file_documents(files, source.text_column).head(source.max_documents), None


def _load_dataset(source: SourceArguments, args: DataArguments, seed: int) -> tuple[str, Documents, Documents | None]:
    from datasets import get_dataset_split_names

    common = (source.dataset, source.dataset_config)
    documents = dataset_documents(
        *common,
        source.dataset_split,
        source.text_column,
        streaming=source.streaming,
        max_documents=source.max_documents,
        seed=seed,
    )
    validation, name = None, source.validation_split
    if name is None and not args.trained_on(source, "validation"):
        name = "validation" if "validation" in get_dataset_split_names(*common) else None
    if name is not None and not args.validation_files and args.validation_share > 0:
        validation = dataset_documents(*common, name, source.text_column, streaming=source.streaming)
    return f"{source.dataset} ({source.dataset_split})", documents, validation
