"""Flax's msgpack bytes (`flax.serialization.to_bytes`): dicts whose arrays are extension type 1, each of which is the
msgpack of (shape, dtype's name, bytes)."""

import math
from pathlib import Path

import msgpack
import numpy as np
import torch
from torch import Tensor

from ..messages import first_line
from .checkpoint import Refused, repeated

ARRAY = 1  # flax's extension types: 2 is a complex number, 3 a NumPy scalar
COMPLEX, SCALAR = 2, 3
DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64", "int32", "int64", "uint32", "complex64")}
LIMITS = {"max_str_len": 4096, "max_array_len": 4096, "max_map_len": 1 << 20, "strict_map_key": True}


def read_msgpack(path: Path) -> dict:
    """The dicts in a file, with tensors for arrays. Raises Refused for anything else."""
    data = path.read_bytes()
    try:
        return msgpack.unpackb(
            data, ext_hook=_array, object_pairs_hook=_unique, max_bin_len=len(data), max_ext_len=len(data), **LIMITS
        )
    except Refused as error:
        raise Refused(f"{path}: {error}") from None
    except Exception as error:  # msgpack raises ValueErrors of its own, RecursionError, UnicodeDecodeError ...
        raise Refused(f"{path}: not msgpack: {first_line(error)}") from None


def _unique(pairs: list[tuple]) -> dict:
    if (twice := repeated(name for name, _ in pairs)) is not None:
        raise Refused(f"names {twice!r} twice")
    return dict(pairs)


def _array(code: int, data: bytes) -> Tensor:
    if code not in (ARRAY, SCALAR):
        raise Refused(f"an extension of type {code}, expected arrays")
    limits = LIMITS | {"max_array_len": 64}
    shape, name, values = msgpack.unpackb(data, max_bin_len=len(data), max_ext_len=0, **limits)
    if name == "bfloat16":
        dtype, kind = np.dtype("int16"), torch.bfloat16
    elif name in DTYPES:
        dtype, kind = DTYPES[name], None
    else:
        raise Refused(f"an array of dtype {str(name)[:40]}, expected one of {', '.join(DTYPES)}, bfloat16")
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise Refused(f"an array of the shape {shape}")
    if math.prod(shape) * dtype.itemsize != len(values):
        raise Refused(f"an array claims the shape {tuple(shape)}, its data has {len(values):,} bytes")
    tensor = torch.from_numpy(np.frombuffer(values, dtype).reshape(shape).copy())
    return tensor if kind is None else tensor.view(kind)


def write_msgpack(path: Path, tensors: dict[str, Tensor]) -> None:
    """`tensors`, whose names have slashes, as flax writes nested dicts."""
    tree: dict = {}
    for name, tensor in tensors.items():
        *folders, last = name.split("/")
        branch = tree
        for folder in folders:
            branch = branch.setdefault(folder, {})
        dtype = str(tensor.dtype).removeprefix("torch.")
        values = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy().tobytes()
        branch[last] = msgpack.ExtType(ARRAY, msgpack.packb((list(tensor.shape), dtype, values), use_bin_type=True))
    path.write_bytes(msgpack.packb(tree, strict_types=True))
