"""`convert`: what is asked for, whether it can be done, and which way."""

from collections.abc import Callable
from pathlib import Path

from .. import modeling
from ..messages import nearest
from .checkpoint import Refused
from .common import DTYPES, Report
from .formats import FORMATS
from .reading import read_json
from .rules import Answers
from .to_original import to_original
from .to_ours import to_ours

MAX_SHARD_SIZE = "5GB"  # Transformers' own has varied; one file up to here


def convert(
    source: str | Path,
    dest: str | Path,
    from_format: str | None = None,
    to_format: str | None = None,
    tokenizer: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    options: dict[str, str] | None = None,
    assume_defaults: bool = False,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """
    Convert a checkpoint of another code to a folder that `from_pretrained` loads, or with `to_format` one of our
    folders to the original's format. Nothing in a checkpoint is run.

    Args:
        source: file or folder.
        dest: folder; with `to_format` the file, or for "longhorn" the folder, to write.
        from_format, to_format: names in FORMATS; the first is found by the names of the tensors when None.
        tokenizer: "bytes", or a folder or name on the Hub, to be saved beside the model. That of bytes has an end of
            texts, too, unless the checkpoint's vocabulary is of 256.
        dtype: of the result, a name in DTYPES; the checkpoint's when None.
        overwrite: replace what `dest` holds, once the new one is whole.
        options: what the checkpoint does not say, by the options' names (`Format.options`).
        assume_defaults: take the original's defaults for options that are not given.
        max_shard_size: of one safetensors file, as `save_pretrained` takes it.
        seed: of what is initialised.
        progress: called with the bytes written and their total.

    Returns:
        What was done.

    Raises:
        ValueError: the checkpoint cannot be converted; nothing is written.
        OSError: something cannot be read or written; what `dest` held is untouched.
    """
    source, dest = Path(source), Path(dest)
    for flag, name in (("--from", from_format), ("--to", to_format)):
        if name is not None and name not in FORMATS:
            raise Refused(
                f"{flag} {name}: no such format{nearest(name, FORMATS, listed=False)}; known: {', '.join(FORMATS)}"
            )
    if dtype is not None and dtype not in DTYPES:
        raise Refused(f"--dtype {dtype}: no such dtype{nearest(dtype, DTYPES)}")
    ours = _is_ours(source)
    if to_format is None and ours:
        raise Refused(f"{source}: is a model of this package already: --to names the format to write")
    if to_format is not None and not ours:
        raise Refused(f"{source}: --to needs a folder with a model of this package")
    if to_format is not None:
        for flag, value in (("--from", from_format), ("--tokenizer", tokenizer)):
            if value is not None:
                raise Refused(f"{flag} cannot be combined with --to")
        if options or assume_defaults:
            raise Refused(f"--{next(iter(options or ()), 'assume-defaults')} cannot be combined with --to")
    suffixes = FORMATS[to_format].suffixes if to_format is not None else ()
    _check_dest(source, dest, suffixes, overwrite)
    if to_format is not None:
        return to_original(source, dest, FORMATS[to_format], dtype, progress)
    answers = Answers(dict(options or {}), assume_defaults)
    return to_ours(source, dest, from_format, answers, tokenizer, dtype, max_shard_size, seed, progress)


def _is_ours(source: Path) -> bool:
    file = source / "config.json"
    return file.is_file() and read_json(file).get("model_type") in [c.model_type for c in modeling.FAMILIES]


def _check_dest(source: Path, dest: Path, suffixes: tuple[str, ...], overwrite: bool) -> None:
    """Refuse a destination that cannot be used, before any work is done."""
    if suffixes and dest.suffix not in suffixes:
        raise Refused(f"DEST {dest}: must be a file named *{' or *'.join(suffixes)}")
    here, there = source.resolve(), dest.resolve()
    if here == there or there in here.parents or here in there.parents:
        raise Refused(f"DEST {dest}: must lie apart from SOURCE {source}")
    if dest.exists():
        if dest.is_dir() and suffixes:
            raise Refused(f"DEST {dest}: a folder of that name is in the way")
        if not dest.is_dir() and not suffixes:
            raise Refused(f"DEST {dest}: a file of that name is in the way")
        if dest.is_dir() and any(dest.iterdir()):
            if not (dest / "config.json").is_file() or any(entry.is_dir() for entry in dest.iterdir()):
                raise Refused(f"DEST {dest}: not empty, and no model's folder: choose another")
        if not overwrite and (suffixes or any(dest.iterdir())):
            raise Refused(f"DEST {dest}: exists: replace it by --overwrite, or choose another name")
    if not dest.parent.is_dir():
        raise Refused(f"DEST {dest}: there is no folder {dest.parent}")
