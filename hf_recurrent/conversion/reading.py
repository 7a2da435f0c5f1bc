"""Checkpoints from strangers: which tensors a file or folder holds, without running any of it.

PyTorch files are read with `weights_only=True` and mapped into memory, safetensors are mapped too, NumPy archives are
read without pickle and one array at a time, flax's msgpack within limits. So a tensor takes memory when it is used.
"""

import contextlib
import json
import math
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..messages import counted, first_line

MAX_JSON_BYTES = 64 << 20  # the index of a checkpoint of a million tensors
MAX_KEYS = 1 << 20
MAX_MEMBERS = 1 << 20  # of a zip archive
MAX_INFLATION = 64  # bytes of an array for one of the archive: weights hardly compress
MAX_DEPTH = 64  # of nested dicts
MAX_MSGPACK_BYTES = 4 << 30
WRAPPERS = ("model", "state_dict", "model_state_dict")  # where training scripts put the weights
PREFIXES = ("_orig_mod.", "module.", "transformer.")  # of torch.compile, DistributedDataParallel, Longhorn's training


class Refused(ValueError):
    """A checkpoint that cannot be converted; the message is one line."""


@dataclass
class Checkpoint:
    """
    What a file or folder holds.

    Attributes:
        path: its name.
        tensors: name -> a function that reads the tensor.
        shapes, dtypes: of the tensors.
        config: the configuration that lies beside the weights or among them, {} without one.
        prefix: what was taken off all names, as "_orig_mod.".
        left_out: what else the file holds, as an optimiser's state.
    """

    path: Path
    tensors: dict[str, Callable[[], Tensor]]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    config: dict = field(default_factory=dict)
    prefix: str = ""
    left_out: list[str] = field(default_factory=list)

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def shape(self, name: str, ndim: int) -> tuple[int, ...]:
        """The shape of a tensor that must be there.

        Raises:
            Refused: it is not, or has another number of dimensions.
        """
        if name not in self.shapes:
            raise Refused(f"{self.path}: half a checkpoint: it lacks {name}")
        if len(self.shapes[name]) != ndim:
            raise Refused(f"{self.path}: {name} must have {counted(ndim, 'dimension')}, got {self.shapes[name]}")
        return self.shapes[name]

    def layers(self, prefix: str) -> int:
        """How many layers there are under `prefix`0, `prefix`1 and so on.

        Raises:
            Refused: there is none, or a number is missing.
        """
        rest = (name.removeprefix(prefix) for name in self.shapes if name.startswith(prefix))
        numbers = {int(number) for name in rest if (number := name.split(".")[0].split("/")[0]).isdecimal()}
        if not numbers or numbers != set(range(len(numbers))):
            missing = next(i for i in range(len(numbers) + 1) if i not in numbers)
            raise Refused(f"{self.path}: half a checkpoint: it lacks {prefix}{missing}")
        return len(numbers)


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
    parts = [_read_file(file) for file in files]
    checkpoint = parts[0]
    for part in parts[1:]:
        if twice := part.shapes.keys() & checkpoint.shapes.keys():
            raise Refused(f"{path}: two files hold {listed(twice)}")
        for mine, other in zip(_tables(checkpoint), _tables(part), strict=True):
            mine.update(other)
    _check_index(path, checkpoint)
    checkpoint.path, checkpoint.config = path, config or checkpoint.config
    _strip(checkpoint)
    _check(checkpoint)
    return checkpoint


def _tables(checkpoint: Checkpoint) -> tuple[dict, dict, dict]:
    return checkpoint.tensors, checkpoint.shapes, checkpoint.dtypes


def listed(names, most: int = 5) -> str:
    """Some names, and how many more there are."""
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def read_json(path: Path) -> dict:
    """A JSON object from a file.

    Raises:
        Refused: it is none, names something twice, or is far too long.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict:
        if len(pairs) != len(dict(pairs)):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise Refused(f"{path}: names {twice!r} twice")
        return dict(pairs)

    if path.stat().st_size > MAX_JSON_BYTES:
        raise Refused(f"{path}: {path.stat().st_size:,} bytes, expected at most {MAX_JSON_BYTES:,}")
    try:
        found = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise Refused(f"{path}: not JSON: {first_line(error)}") from None
    if not isinstance(found, dict):
        raise Refused(f"{path}: must hold an object, got a {type(found).__name__}")
    return found


# ---- folders ---------------------------------------------------------------------------------------------------------


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


# ---- files -----------------------------------------------------------------------------------------------------------


def _read_file(path: Path) -> Checkpoint:
    with open(path, "rb") as file:
        start = file.read(16)
    if not start:
        raise Refused(f"{path}: an empty file")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if start[:4] == b"PK\x03\x04":
        return _read_zip(path)
    if path.suffix == ".msgpack":
        from .flax_msgpack import read_msgpack

        if path.stat().st_size > MAX_MSGPACK_BYTES:
            raise Refused(f"{path}: {path.stat().st_size:,} bytes, expected at most {MAX_MSGPACK_BYTES:,}")
        return _from_tree(path, read_msgpack(path))
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        return _read_torch(path)
    raise Refused(f"{path}: neither a PyTorch file, safetensors, .npz nor .msgpack")


def _read_safetensors(path: Path) -> Checkpoint:
    try:
        file = safe_open(path, "pt")
        names = list(file.keys())
        checkpoint = Checkpoint(path, {}, {}, {})
        for name in names:
            tensor = file.get_tensor(name)  # mapped: nothing is read yet
            _add(checkpoint, name, tensor)
    except SafetensorError as error:
        raise Refused(f"{path}: damaged: {first_line(error)}") from None
    return checkpoint


def _read_zip(path: Path) -> Checkpoint:
    """A PyTorch file or a NumPy archive: both are zip archives."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise Refused(f"{path}: damaged: {first_line(error)}") from None
    if len(members) > MAX_MEMBERS:
        raise Refused(f"{path}: {len(members):,} members, expected at most {MAX_MEMBERS:,}")
    names = [member.filename for member in members]
    if len(set(names)) < len(names):
        raise Refused(f"{path}: holds {next(name for name in names if names.count(name) > 1)} twice")
    if names and all(name.endswith(".npy") for name in names):
        return _read_npz(path, members)
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise Refused(f"{path}: is compressed, which PyTorch never does")
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise Refused(f"{path}: claims more bytes than it has")
    return _read_torch(path)


def _read_torch(path: Path) -> Checkpoint:
    try:
        # Files of before PyTorch 1.6 are no archives and cannot be mapped.
        tree = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        text = " ".join(str(error).split())
        kind = next((word for word in text.split() if "." in word and "(" not in word and "/" not in word), "")
        _, _, after = text.partition("GLOBAL ")
        what = after.split(" ")[0] if after else kind
        raise Refused(
            f"{path}: refused: it holds more than tensors and numbers, which could run code"
            + (f" ({what.rstrip('.,`')})" if after else f" ({first_line(error)[:120]})")
        ) from None
    except MemoryError:
        raise
    except Exception as error:  # whatever bytes that are no such file make of the unpickler
        raise Refused(f"{path}: damaged, or no PyTorch file: {first_line(error)}") from None
    return _from_tree(path, tree)


def _read_npz(path: Path, members: list[zipfile.ZipInfo]) -> Checkpoint:
    """The headers are read first: an archive of kilobytes could claim an array of terabytes."""
    size = path.stat().st_size
    for member in members:
        if member.file_size > MAX_INFLATION * max(size, 4096):
            raise Refused(
                f"{path}: {member.filename} would inflate to {member.file_size:,} bytes, of an archive of {size:,}"
            )
    if sum(member.file_size for member in members) > MAX_INFLATION * max(size, 4096):
        raise Refused(f"{path}: would inflate to more than {MAX_INFLATION} times its {size:,} bytes")
    checkpoint = Checkpoint(path, {}, {}, {})
    for member in members:
        name = member.filename.removesuffix(".npy")
        with _damaged(path, name), zipfile.ZipFile(path) as archive, archive.open(member) as file:
            shape, dtype, header = _npy_header(file)
        if dtype.hasobject:
            raise Refused(f"{path}: refused: {name} holds Python objects, which could run code")
        if math.prod(shape) * dtype.itemsize != member.file_size - header:
            raise Refused(f"{path}: {name} claims the shape {shape}, its data has {member.file_size - header:,} bytes")
        checkpoint.shapes[name] = shape
        checkpoint.dtypes[name] = torch_dtype(path, name, dtype)
        checkpoint.tensors[name] = lambda name=name: _npy_tensor(path, name)
    return checkpoint


def _npy_header(file) -> tuple[tuple[int, ...], np.dtype, int]:
    """Shape and dtype of an .npy file, and where its data begin."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"an .npy of version {version}")
    shape, _, dtype = readers[version](file)
    return tuple(shape), dtype, file.tell()


def _npy_tensor(path: Path, name: str) -> Tensor:
    with _damaged(path, name), np.load(path, allow_pickle=False) as archive:
        array = np.ascontiguousarray(archive[name]).reshape(archive[name].shape)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


@contextlib.contextmanager
def _damaged(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, EOFError, zipfile.BadZipFile, NotImplementedError, OSError) as error:
        raise Refused(f"{path}: {name} is damaged: {first_line(error)}") from None
    except Exception as error:  # zlib.error, SyntaxError of a header
        raise Refused(f"{path}: {name} is damaged: {type(error).__name__}: {first_line(error)}") from None


def torch_dtype(path: Path, name: str, dtype: np.dtype) -> torch.dtype:
    """The dtype of a NumPy array as PyTorch's; Refused where there is none."""
    try:
        return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError:
        raise Refused(f"{path}: {name} is of dtype {dtype}, expected floats") from None


# ---- what was read ---------------------------------------------------------------------------------------------------


def _from_tree(path: Path, tree: object) -> Checkpoint:
    """The tensors in nested dicts, their names joined by dots (flax: slashes)."""
    config, left_out = {}, []
    if not isinstance(tree, Mapping):
        raise Refused(f"{path}: must hold a dict of tensors, got a {type(tree).__name__}")
    flax = path.suffix == ".msgpack"
    if flax:
        left_out = [str(name) for name in tree if name not in ("params", "batch_stats")]
        tree = {name: tree[name] for name in tree if name not in left_out} if "params" in tree else tree
        left_out = left_out if "params" in tree else []
    for wrapper in WRAPPERS:
        if isinstance(tree.get(wrapper), Mapping):
            config = tree.get("model_config") or {}
            left_out = [str(name) for name in tree if name not in (wrapper, "model_config")]
            tree = tree[wrapper]
            break
    checkpoint = Checkpoint(path, {}, {}, {}, config=config if isinstance(config, dict) else {}, left_out=left_out)
    for name, value in _flat(path, tree, "/" if flax else ".", 0):
        if not isinstance(value, Tensor):
            raise Refused(f"{path}: {name} must be a tensor, got a {type(value).__name__}")
        _add(checkpoint, name, value)
    return checkpoint


def _flat(path: Path, tree: Mapping, joint: str, depth: int) -> Iterator[tuple[str, object]]:
    if depth > MAX_DEPTH:
        raise Refused(f"{path}: nested more than {MAX_DEPTH} deep")
    for name, value in tree.items():
        if not isinstance(name, str):
            raise Refused(f"{path}: names must be text, got {name!r}"[:200])
        if isinstance(value, Mapping):
            yield from ((f"{name}{joint}{rest}", x) for rest, x in _flat(path, value, joint, depth + 1))
        else:
            yield name, value


def _add(checkpoint: Checkpoint, name: str, tensor: Tensor) -> None:
    if name in checkpoint.shapes:
        raise Refused(f"{checkpoint.path}: holds {name} twice")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise Refused(f"{checkpoint.path}: {name} must be a dense tensor, got {tensor.layout} on {tensor.device}")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise Refused(f"{checkpoint.path}: {name} claims the shape {tuple(tensor.shape)}, far more than its data")
    checkpoint.shapes[name] = tuple(tensor.shape)
    checkpoint.dtypes[name] = tensor.dtype
    checkpoint.tensors[name] = lambda: tensor


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
            {names[name]: x for name, x in table.items()} for table in _tables(checkpoint)
        )
        checkpoint.prefix += prefix


def _check(checkpoint: Checkpoint) -> None:
    path = checkpoint.path
    if not checkpoint.shapes:
        raise Refused(f"{path}: holds no tensors")
    if len(checkpoint.shapes) > MAX_KEYS:
        raise Refused(f"{path}: {len(checkpoint.shapes):,} tensors, expected at most {MAX_KEYS:,}")
    for name, shape in checkpoint.shapes.items():
        if 0 in shape:
            raise Refused(f"{path}: {name} has the shape {shape}, with nothing in it")
        dtype = checkpoint.dtypes[name]
        if not (dtype.is_floating_point or dtype.is_complex):
            raise Refused(f"{path}: {name} must hold floats, got {str(dtype).removeprefix('torch.')}")
