"""Handwritten digits that are read one pixel at a time, in the order of rows or in a mixed one."""

import functools
import gzip
import math
import zlib
from pathlib import Path

import numpy as np

# Where each split begins and ends, as shares of the files that it is in; of the test digits as `mixed`.
OF_ALL = {"train": (0, 11 / 12), "validation": (11 / 12, 1), "test": (0, 1)}
OF_TEST_DIGITS = {"train": (0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1)}  # the training digits are not there


def mixed(number: int) -> np.ndarray:
    """(number,) The order, every time the same, in which the test digits are divided where they are all that there is:
    in that of MNIST's file the last fifth is easier than the rest."""
    return np.random.default_rng(0).permutation(number)


def digits(images: np.ndarray, classes: np.ndarray, permutation_seed: int | None = None) -> dict[str, np.ndarray]:
    """
    Images read one pixel at a time, row by row; or in an order that is random, and the same for all (Le et al. 2015,
    https://arxiv.org/abs/1504.00941).

    Args:
        images: (n, height, width) or (n, height, width, channels), uint8 or floats in [0, 1].
        classes: (n,) integers.
        permutation_seed: of the random order; None for the order of rows.

    Returns:
        input_features (n, height width, channels), float32 in [0, 1]; labels (n,), int64.

    Raises:
        ValueError: arrays of other shapes, without an image, or with other numbers.
    """
    if images.ndim not in (3, 4) or classes.shape != images.shape[:1] or not images.size:
        raise ValueError(
            f"images must be (n, height, width) or (n, height, width, channels) and classes (n,), got {images.shape} "
            f"and {classes.shape}"
        )
    if images.dtype != np.uint8 and not (images.dtype.kind == "f" and 0 <= images.min() <= images.max() <= 1):
        raise ValueError(f"images must be uint8, or floats in [0, 1], got {images.dtype} with other numbers")
    scale = 255 if images.dtype == np.uint8 else 1
    features = images.reshape(len(images), images.shape[1] * images.shape[2], -1).astype(np.float32) / scale
    if permutation_seed is not None:
        features = features[:, np.random.default_rng(permutation_seed).permutation(features.shape[1])]
    return {"input_features": features, "labels": classes.astype(np.int64)}


def digits_of_folder(
    rng: np.random.Generator, number: int, folder: str = "", permutation: int | None = None, *, split: str = "train"
) -> dict[str, np.ndarray]:
    """
    `digits`, from the files of MNIST (LeCun et al. 1998) or of another set of images in its format, such as Fashion
    MNIST.

    Of {train,t10k}-images-idx3-ubyte and -labels-idx1-ubyte in `folder`, as they are or with .gz, the t10k files are
    the test split, and the last twelfth of the others is the validation split. Where the train files are not there, the
    first 80 % of the t10k files in a random order, the same for all seeds (`mixed`), are the training split, the next
    10 % the validation split, and the rest the test split. Examples are drawn without putting any back; each call draws
    anew.

    Args:
        permutation: the seed of a random order of pixels, the same for all; None for the order of rows.

    Returns:
        input_features (n, height width, 1), float32 in [0, 1]; labels (n,), int64.

    Raises:
        FileNotFoundError: a file is not there; all that were looked for are named.
        ValueError: no folder; a file that is not in the format, or images without a label each; more examples than the
            split has; a permutation below 0.
    """
    if not folder:
        raise ValueError("digits needs folder=..., where MNIST's files are")
    if permutation is not None and permutation < 0:
        raise ValueError(f"permutation must be at least 0, got {permutation}")
    images, classes = _split(folder, split)
    if number > len(images):
        raise ValueError(f"number must be at most {len(images)}, the digits of the {split} split, got {number}")
    chosen = rng.permutation(len(images))[:number]
    return digits(images[chosen], classes[chosen], permutation)


def read_idx(file: str | Path) -> np.ndarray:
    """
    The array of bytes in a file of MNIST's format: two zeros, 8, the number of dimensions; sizes, big-endian; values.

    Args:
        file: its name; what ends in .gz is decompressed.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not in the format, or not whole.
    """
    file = Path(file)
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{file}: {error}") from None
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise ValueError(f"{file}: expected bytes in the format of MNIST, 0 0 8 first, got {[*data[:3]]}")
    begin = 4 + 4 * data[3]
    sizes = [int.from_bytes(data[place : place + 4], "big") for place in range(4, begin, 4)]
    if len(data) != begin + math.prod(sizes):
        raise ValueError(f"{file}: expected {begin + math.prod(sizes)} bytes for the sizes {sizes}, got {len(data)}")
    return np.frombuffer(data, np.uint8, offset=begin).reshape(sizes)


def division(folder: str) -> str | None:
    """How the digits of a folder are divided, where that was once otherwise: "mixed" for the test digits alone."""
    return None if _is_whole(folder) else "mixed"


def count(folder: str, split: str) -> int:
    """How many digits a split has. Raises what `digits_of_folder` does."""
    return len(_split(folder, split)[0])


def _is_whole(folder: str) -> bool:
    return _found(folder, "train-images") is not None


def _split(folder: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    whole = _is_whole(folder)
    part = "train" if whole and split != "test" else "t10k"
    images, classes = _read(str(Path(folder).resolve()), part, mix=not whole)
    first, last = (round(share * len(images)) for share in (OF_ALL if whole else OF_TEST_DIGITS)[split])
    return images[first:last], classes[first:last]


def _found(folder: str, kind: str) -> Path | None:
    name = f"{kind}-idx{3 if kind.endswith('images') else 1}-ubyte"
    files = [Path(folder) / f"{name}{ending}" for ending in ("", ".gz")]
    return next((file for file in files if file.is_file()), None)


def _names(part: str) -> str:
    return f"{part}-images-idx3-ubyte and {part}-labels-idx1-ubyte"


@functools.lru_cache(maxsize=4)
def _read(folder: str, part: str, *, mix: bool) -> tuple[np.ndarray, np.ndarray]:
    files = [_found(folder, f"{part}-{kind}") for kind in ("images", "labels")]
    if None in files:
        others = f", or {_names('train')}," if mix else ""
        raise FileNotFoundError(f"{folder}: expected {_names(part)}{others} there, as they are or with .gz")
    images, classes = map(read_idx, files)
    if images.ndim != 3 or classes.shape != images.shape[:1] or not images.size:
        raise ValueError(f"{folder}: expected images with a label each, got {images.shape} and {classes.shape}")
    if classes.max() > 9:
        raise ValueError(f"{folder}: expected labels from 0 to 9, got {classes.max()}")
    if not mix:
        return images, classes
    order = mixed(len(images))
    return images[order], classes[order]
