"""Checkpoints from strangers: which tensors a file or folder holds, without running any of it.

PyTorch files are read with `weights_only=True` and mapped into memory, safetensors are mapped too, NumPy archives are
read without pickle and one array at a time, flax's msgpack within limits. So a tensor takes memory when it is used.
"""

import json
from pathlib import Path

import torch

from ..messages import first_line
from .checkpoint import Checkpoint, Refused, listed, repeated
from .weight_files import read_file

MAX_JSON_BYTES = 64 << 20  # the index of a checkpoint of a million tensors
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # or complex numbers of them
PREFIXES = ("_orig_mod.", "module.", "transformer.")  # of torch.compile, DistributedDataParallel, Longhorn's training


def read(path: Path) -> Checkpoint:
    """The checkpoint in a file, or in a folder beside its config.json.

    Raises:
        Refused: there is none, it is damaged, or it holds what no checkpoint needs.
        OSError: it cannot be read.
    """
    if not path.exists():
        raise Refused(f"{path}: no such file or folder")
    config = {}
    if path.is_dir():
        files = _weight_files(path)
        if (path / "config.json").is_file():
            config = read_json(path / "config.json")
    else:
        files = [path]
    parts = [read_file(file) for file in files]
    checkpoint = parts[0]
    for part in parts[1:]:
        if twice := part.shapes.keys() & checkpoint.shapes.keys():
            raise Refused(f"{path}: two files hold {listed(twice)}")
        for mine, other in zip(checkpoint.tables(), part.tables(), strict=True):
            mine.update(other)
    _check_index(path, checkpoint)
    checkpoint.path, checkpoint.config = path, config or checkpoint.config
    _strip(checkpoint)
    _check(checkpoint)
    return checkpoint


def read_json(path: Path) -> dict:
    """A JSON object from a file.

    Raises:
        Refused: it is none, names something twice, or is far too long.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict:
        if (twice := repeated(name for name, _ in pairs)) is not None:
            raise Refused(f"{path}: names {twice!r} twice")
        return dict(pairs)

    if path.stat().st_size > MAX_JSON_BYTES:
        raise Refused(f"{path}: {path.stat().st_size:,} bytes, expected at most {MAX_JSON_BYTES:,}")
    try:
        found = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=unique)
    except Refused:
        raise
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or a number of thousands of digits
        raise Refused(f"{path}: not JSON: {first_line(error)}") from None
    if not isinstance(found, dict):
        raise Refused(f"{path}: must hold an object, got a {type(found).__name__}")
    return found


def _weight_files(folder: Path) -> list[Path]:
    for stem in ("model.safetensors", "pytorch_model.bin"):
        if (folder / f"{stem}.index.json").is_file():
            return sorted({folder / file for file in _index(folder / f"{stem}.index.json").values()})
        if (folder / stem).is_file():
            return [folder / stem]
    suffixes = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".msgpack")
    files = sorted(file for file in folder.iterdir() if file.suffix in suffixes and file.is_file())
    if len(files) != 1:
        found = ", ".join(file.name for file in files[:5]) or "none"
        raise Refused(f"{folder}: expected one checkpoint, found {found}: name the file")
    return files


def _index(path: Path) -> dict[str, str]:
    """The shard of each tensor, by an index file's weight_map."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise Refused(f"{path}: has no weight_map")
    for file in set(map(str, weight_map.values())):
        # Any path would do for reading another file of this machine into what is then published.
        if not file or Path(file).name != file or file.startswith(".") or "\\" in file or "\0" in file:
            raise Refused(f"{path}: leads to {file!r}, expected the plain name of a file beside it")
        if not (path.parent / file).is_file():
            raise Refused(f"{path.parent}: half a checkpoint: it lacks {file}, which {path.name} names")
    return weight_map


def _check_index(path: Path, checkpoint: Checkpoint) -> None:
    """The index and its shards must name the same tensors."""
    indices = [path / f"{stem}.index.json" for stem in ("model.safetensors", "pytorch_model.bin")]
    index = next((file for file in indices if path.is_dir() and file.is_file()), None)
    if index is None:
        return
    named, found = _index(index).keys(), checkpoint.shapes.keys()
    if named - found:
        raise Refused(f"{path}: half a checkpoint: its shards lack {listed(named - found)}")
    if found - named:
        raise Refused(f"{path}: its shards hold what {index.name} does not name: {listed(found - named)}")


def _strip(checkpoint: Checkpoint) -> None:
    """Take off what wrappers put before all names."""
    while checkpoint.shapes:
        prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in checkpoint.shapes)), None)
        if prefix is None:
            return
        names = {name: name.removeprefix(prefix) for name in checkpoint.shapes}
        if len(set(names.values())) < len(names):
            twice = [name for name, bare in names.items() if name != bare and bare in checkpoint.shapes]
            raise Refused(f"{checkpoint.path}: names tensors twice, with and without {prefix}: {listed(twice)}")
        checkpoint.tensors, checkpoint.shapes, checkpoint.dtypes = (
            {names[name]: x for name, x in table.items()} for table in checkpoint.tables()
        )
        checkpoint.prefix += prefix


def _check(checkpoint: Checkpoint) -> None:
    path = checkpoint.path
    if not checkpoint.shapes:
        raise Refused(f"{path}: holds no tensors")
    for name, shape in checkpoint.shapes.items():
        if 0 in shape:
            raise Refused(f"{path}: {name} has the shape {shape}, with nothing in it")
        dtype = checkpoint.dtypes[name]
        if dtype.to_real() not in FLOATS:
            kind = str(dtype).removeprefix("torch.")
            raise Refused(f"{path}: {name} must hold floats of 16, 32 or 64 bits, got {kind}")
