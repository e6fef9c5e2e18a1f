"""Files that the tests of stored images write: pictures, IDX files, MNIST's four; and a digest of what is read."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from ddp_loop.datasets import ImageFolder, LabelledImages

TYPES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


Pixels = npt.NDArray[np.uint8]


def save(path: Path, pixels: Pixels, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


def noise(height: int = 8, width: int = 6, *channels: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, *channels), dtype=np.uint8)


def numbered_folder(folder: Path, *class_sizes: int, side: int = 4) -> Path:
    """Images of one value each, which is its number; the classes a, b, c, ... one after the other."""
    number = 0
    for name, size in zip("abcdefgh", class_sizes, strict=False):
        for k in range(size):
            save(folder / name / f"{k:03}.png", np.full((side, side), number, dtype=np.uint8))
            number += 1
    return folder


def only_image(folder: Path, **options: Any) -> torch.Tensor:
    return ImageFolder(folder, **options)[0][0]


def idx_bytes(values: npt.NDArray[Any], dimensions: tuple[int, ...] | None = None) -> bytes:
    """An IDX file's content; with other dimensions in its header if asked."""
    dimensions = values.shape if dimensions is None else dimensions
    header = bytes([0, 0, TYPES[values.dtype.str[1:]], len(dimensions)])
    return (
        header
        + struct.pack(f">{len(dimensions)}I", *dimensions)
        + values.astype(values.dtype.newbyteorder(">")).tobytes()
    )


def write(path: Path, content: bytes, packed: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, compresslevel=1) if packed else content)
    return path


def write_mnist(
    folder: Path, *, side: int = 28, largest: int = 9, joint: str = "-", packed: bool = False, sizes: Any = (30, 7)
) -> Path:
    """MNIST's four files, of noise; the training labels count up to the largest, those of the test up to 3."""
    for part, size, top, seed in (("train", sizes[0], largest, 0), ("t10k", sizes[1], 3, 1)):
        images = np.random.default_rng(seed).integers(0, 256, (size, side, side), dtype=np.uint8)
        labels = (np.arange(size) % (top + 1)).astype(np.uint8)
        end = ".gz" if packed else ""
        write(folder / f"{part}-images{joint}idx3-ubyte{end}", idx_bytes(images), packed)
        write(folder / f"{part}-labels{joint}idx1-ubyte{end}", idx_bytes(labels), packed)
    return folder


def digest_of(data: LabelledImages) -> str:
    tensors = (data.images, data.labels, data.angles)
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors if t is not None)).hexdigest()
