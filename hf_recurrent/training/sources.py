"""Where documents come from: the standard library, files, datasets."""

import bz2
import glob
import gzip
import itertools
import lzma
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..hub import access
from ..messages import first_line
from .documents import Corpus, Documents, split

# Folders of the standard library that hold tests or other people's packages.
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
COMPRESSIONS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
LOADERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}
STREAMED_VALIDATION = 500  # documents held out of a stream, unless --max-validation-documents says otherwise
SHUFFLE_BUFFER = 10_000  # documents of a stream shuffled at a time


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


def _is_file(name: str) -> bool:
    return Path(name).is_file()


def file_documents(files: list[str], text_column: str) -> Documents:
    """Documents of local files: the records of .jsonl, .json and .parquet, and any other file as a whole.

    Files ending in .gz, .bz2 or .xz are decompressed. A document's key is its text.

    Raises (while iterating):
        ValueError: a file that cannot be read, or has no text in `text_column`; the message names it.
    """

    def read(_):
        for file in files:
            endings = [ending for ending in Path(file).suffixes if ending not in COMPRESSIONS]
            loader = LOADERS.get(endings[-1].lower() if endings else "")
            texts = [_read_text(file)] if loader is None else _read_records(loader, file, text_column)
            yield from ((text, text) for text in texts)

    return Documents(read)


def _read_text(file: str) -> str:
    try:
        with COMPRESSIONS.get(Path(file).suffix, open)(file, "rb") as stream:
            return stream.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except Exception as error:  # what a broken archive raises differs by its kind
        raise ValueError(f"{file}: cannot be read: {first_line(error)}") from error


def _read_records(loader: str, file: str, text_column: str) -> Iterator[str]:
    from datasets import load_dataset

    if Path(file).stat().st_size == 0:
        return
    try:
        # Streaming reads the file itself; otherwise a copy of it would stay in the datasets cache.
        records = iter(load_dataset(loader, data_files=[file], split="train", streaming=True))
        first = list(itertools.islice(records, 1))
        yield from _column(itertools.chain(first, records), text_column, file)
    except _Unreadable:
        raise
    except Exception as error:  # datasets, pyarrow and the decompressors each raise their own
        raise ValueError(f"{file}: cannot be read as {loader}: {access.reason(error, file)}") from error


class _Unreadable(ValueError):
    """A record without text; the message already names the file."""


def _column(records: Iterable[dict], column: str, source: str) -> Iterator[str]:
    for number, record in enumerate(records):
        if column not in record:
            raise _Unreadable(
                f"{source}: no column {column!r}; it has {', '.join(map(repr, record))}: choose one by --text-column"
            )
        if not isinstance(record[column], str):
            raise _Unreadable(f"{source}: record {number}: column {column!r} holds {record[column]!r}, expected text")
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

    With `streaming`, `epoch(n)` iterates in an order that is a function of the seed and n.

    Raises:
        ValueError: there is no such dataset, configuration, split or column.
    """
    from datasets import load_dataset

    access.prepare(name)
    try:
        dataset = load_dataset(name, config, split=split, streaming=streaming)
    except Exception as error:  # datasets raises a dozen kinds, network errors among them
        where = name if config is None else f"{name} --dataset-config {config}"
        reason = access.reason(error, name)
        raise ValueError(f"--dataset {where}: split {split!r} cannot be loaded: {reason}") from error
    if max_documents is not None:
        dataset = dataset.take(max_documents if streaming else min(max_documents, len(dataset)))

    def read(epoch):
        order = dataset
        if streaming and epoch is not None:
            order = dataset.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
            order.set_epoch(epoch)
        return ((text, text) for text in _column(order, text_column, name))

    return Documents(read)


def load_corpus(args, seed: int) -> Corpus:
    """The corpus that `DataArguments` ask for.

    Raises:
        ValueError, FileNotFoundError: what is asked for is not there or is empty.
    """
    validation = None
    if args.dataset:
        from datasets import get_dataset_split_names

        description = f"{args.dataset} ({args.dataset_split})"
        common = (args.dataset, args.dataset_config)
        documents = dataset_documents(
            *common,
            args.dataset_split,
            args.text_column,
            streaming=args.streaming,
            max_documents=args.max_documents,
            seed=seed,
        )
        validation_split = args.validation_split
        if validation_split is None and "validation" in get_dataset_split_names(*common):
            validation_split = "validation"
        if validation_split is not None and not args.validation_files and args.validation_share > 0:
            validation = dataset_documents(*common, validation_split, args.text_column, streaming=args.streaming)
    elif args.data_files:
        files = expand(args.data_files, "--data-files")
        description = files[0] if len(files) == 1 else f"{len(files)} files"
        documents = file_documents(files, args.text_column).head(args.max_documents)
    else:
        description = "Python's standard library"
        documents = stdlib_documents().head(args.max_documents)
    if args.validation_files:
        validation = file_documents(expand(args.validation_files, "--validation-files"), args.text_column)

    if next(iter(documents), None) is None:
        raise ValueError(f"the corpus is empty: there is no text in {description}")
    train = documents
    if validation is None:
        train, validation = split(documents, args.validation_share)
    if validation is not None:
        limit = args.max_validation_documents
        validation = validation.head(STREAMED_VALIDATION if limit is None and args.streaming else limit)
    return Corpus(description, train, validation, args.streaming)
