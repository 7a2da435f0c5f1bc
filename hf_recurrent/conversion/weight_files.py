"""The formats of files: PyTorch's, safetensors, NumPy's archives, flax's msgpack. Nothing in a file is run, and no size
that it claims is believed before it is compared with the bytes that are there."""

import contextlib
import math
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..messages import first_line
from .checkpoint import Checkpoint, Refused, repeated
from .flax_msgpack import read_msgpack

MAX_MEMBERS = 1 << 20  # of a zip archive
MAX_INFLATION = 64  # bytes of an array for one of the archive: weights hardly compress
MAX_DEPTH = 64  # of nested dicts
MAX_NAMES = 1 << 17  # in them
MAX_MSGPACK_BYTES = 4 << 30
WRAPPERS = ("model", "state_dict", "model_state_dict")  # where training scripts put the weights


def read_file(path: Path) -> Checkpoint:
    """The tensors in a file. Raises Refused and OSError as `read`."""
    if not path.is_file():  # a pipe would be waited for
        raise Refused(f"{path}: not a file")
    with open(path, "rb") as file:
        start = file.read(16)
    if not start:
        raise Refused(f"{path}: an empty file")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if start[:4] == b"PK\x03\x04":
        return _read_zip(path)
    if path.suffix == ".msgpack":
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
            checkpoint.add(name, tensor)
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
    if (twice := repeated(names)) is not None:
        raise Refused(f"{path}: holds {twice} twice")
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
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        if wanted is None:
            raise Refused(f"{path}: damaged, or holds more than tensors and numbers") from None
        raise Refused(
            f"{path}: refused: it holds more than tensors and numbers, which could run code ({wanted[1]})"
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
        array = archive[name]
        array = np.ascontiguousarray(array).reshape(array.shape)  # a number would become a vector
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
    for number, (name, value) in enumerate(_flat(path, tree, "/" if flax else ".")):
        # Counted before anything is kept: dicts that hold another one twice double what there is with each step.
        if number == MAX_NAMES:
            raise Refused(f"{path}: holds more than {MAX_NAMES:,} names")
        if isinstance(value, Mapping):
            continue
        if not isinstance(value, Tensor):
            raise Refused(f"{path}: {name} must be a tensor, got a {type(value).__name__}")
        checkpoint.add(name, value)
    # Tied weights are there once. But thousands of tensors may be made of the same bytes, and would be written.
    total = sum(math.prod(shape) * checkpoint.dtypes[name].itemsize for name, shape in checkpoint.shapes.items())
    if total > MAX_INFLATION * max(size := path.stat().st_size, 4096):
        raise Refused(f"{path}: its tensors would take {total:,} bytes, of a file of {size:,}")
    return checkpoint


def _flat(path: Path, tree: Mapping, joint: str, depth: int = 0) -> Iterator[tuple[str, object]]:
    """All that nested dicts hold, the dicts themselves too, each with its path."""
    if depth > MAX_DEPTH:
        raise Refused(f"{path}: nested more than {MAX_DEPTH} deep")
    for name, value in tree.items():
        if not isinstance(name, str):
            raise Refused(f"{path}: names must be text, got a {type(name).__name__}")
        yield name, value
        if isinstance(value, Mapping):
            yield from ((f"{name}{joint}{rest}", x) for rest, x in _flat(path, value, joint, depth + 1))
