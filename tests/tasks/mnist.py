"""Files as MNIST's are, of small images."""

import gzip
import struct

import numpy as np


def write_idx(file, values):
    """Compressed where the name ends in .gz."""
    data = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}i", *values.shape) + values.tobytes()
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)


def write_digits(folder, part, number, ending=".gz", seed=0):
    """The images, (number, 4, 4): the higher its digit, the brighter."""
    classes = np.arange(number) % 10
    noise = np.random.default_rng(seed).integers(40, size=(number, 4, 4))
    images = (20 * classes[:, None, None] + noise).astype(np.uint8)
    write_idx(folder / f"{part}-images-idx3-ubyte{ending}", images)
    write_idx(folder / f"{part}-labels-idx1-ubyte{ending}", classes.astype(np.uint8))
    return images
