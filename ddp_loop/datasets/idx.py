"""Labelled images in MNIST's IDX files, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from contextlib import closing
from io import BufferedIOBase
from pathlib import Path

import numpy as np
import torch

from ddp_loop.datasets.images import LabelledImages

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_DIMENSIONS = {"images": 3, "labels": 1}
_PARTS = ("train", "t10k")
_CHUNK = 2**20  # bytes


def read_idx(path: str | os.PathLike[str]) -> torch.Tensor:
    """Read the tensor in an IDX file, plain or gzipped, under any name.

    The format, all big-endian: two zero bytes, a byte for the type (8 uint8, 9 int8, 11 int16, 12 int32, 13 float32,
    14 float64), a byte for the number of dimensions, 4 bytes for each dimension, then the values. For example::

        images = dl.datasets.read_idx("train-images-idx3-ubyte.gz")  # (60000, 28, 28) uint8

    Source: LeCun, Cortes, Burges: The MNIST database of handwritten digits, 1998.

    Args:
        path: of the file.

    Returns:
        The tensor, with the file's type and dimensions.

    Raises:
        ValueError: the file cannot be read, is not an IDX file, or has fewer or more bytes than its header says.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            packed = file.peek(2)[:2] == b"\x1f\x8b"
            with closing(gzip.GzipFile(fileobj=file)) if packed else file as stream:
                return _read_tensor(path, stream)
    except (OSError, EOFError, zlib.error) as error:
        found = f", {path.stat().st_size} bytes" if path.is_file() else ""
        raise ValueError(
            f"An IDX file must be readable and complete. Got {path}{found} ({error}). Download it again."
        ) from error


def _read_tensor(path: Path, stream: BufferedIOBase) -> torch.Tensor:
    code, dimensions = _read_header(path, stream)
    kind = np.dtype(_TYPES[code])
    expected = math.prod(dimensions) * kind.itemsize
    values, found, torn = _read_values(stream, expected)
    if torn or found != expected:
        raise ValueError(
            f"{path} must have {'x'.join(map(str, dimensions))} values of {kind.newbyteorder('=')} by its header, "
            f"{expected} bytes. It has {found}{f' ({torn})' if torn else ''}. Download it again."
        )
    native = np.frombuffer(values, dtype=kind).astype(kind.newbyteorder("="), copy=False)
    try:
        return torch.from_numpy(native).reshape(dimensions)
    except RuntimeError as error:  # such as 0 x 4 billion x 4 billion values
        raise ValueError(
            f"torch has no tensor of size {dimensions}, that of {path} ({error}). Use another file."
        ) from error


def _read_header(path: Path, stream: BufferedIOBase) -> tuple[int, tuple[int, ...]]:
    """The code of the type, and the dimensions."""
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _TYPES or magic[3] == 0:
        raise ValueError(
            f"An IDX file must begin with 4 bytes: 00 00, a type of {', '.join(f'{code:02x}' for code in _TYPES)}, and "
            f"a number of dimensions. Got {path} with {len(magic)} bytes, {magic.hex(' ')}. Pass an IDX file."
        )
    sizes = stream.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise ValueError(
            f"An IDX file of {magic[3]} dimensions must have a header of {4 + 4 * magic[3]} bytes. {path} has "
            f"{4 + len(sizes)} bytes. Download it again."
        )
    return magic[2], struct.unpack(f">{magic[3]}I", sizes)


def _read_values(stream: BufferedIOBase, expected: int) -> tuple[bytearray, int, Exception | None]:
    """The first `expected` bytes, the number of bytes in all, and the error that ended them early, if any.

    Memory grows with the bytes read, not with `expected`; excess bytes are counted, but not kept.
    """
    values = bytearray()
    found = 0
    try:
        while chunk := stream.read1(_CHUNK):
            values += chunk[: max(0, expected - found)]
            found += len(chunk)
    except (OSError, EOFError, zlib.error) as error:
        return values, found, error
    return values, found, None


def idx_folder(folder: str | os.PathLike[str]) -> tuple[LabelledImages, LabelledImages]:
    """MNIST's training and test images, or other images in files of the same names.

    The files are train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte.
    A name may have a dot before `idx` and may end in .gz; a plain file is preferred. The class names are "0" to "9", or
    to the largest label of both sets if that is larger, padded with zeros so that sorting keeps their order. For
    example::

        train, test = dl.datasets.idx_folder("mnist")

    Args:
        folder: of the four files.

    Returns:
        The training and the test set, each with images (N, 1, H, W) uint8.

    Raises:
        ValueError: a file is missing or damaged, or its values are not uint8 in 3 dimensions (labels: 1); the numbers
            of images and labels differ; training and test images have different sizes.
    """
    folder = Path(folder)
    files = {(part, kind): _require_idx(folder, part, kind) for part in _PARTS for kind in _DIMENSIONS}
    values = {key: _read_bytes(path, _DIMENSIONS[key[1]]) for key, path in files.items()}
    for part in _PARTS:
        images = values[part, "images"]
        labels = values[part, "labels"]
        if len(images) != len(labels):
            raise ValueError(
                f"Each image must have a label. Got {len(images)} images in {files[part, 'images']} and "
                f"{len(labels)} labels in {files[part, 'labels']}. Take both files from one source."
            )
    sizes = [tuple(values[part, "images"].shape[1:]) for part in _PARTS]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"Training and test images must have the same size. Got {sizes[0]} in {files['train', 'images']} and "
            f"{sizes[1]} in {files['t10k', 'images']}. Take both files from one source."
        )
    largest = max([9, *torch.cat([values[part, "labels"] for part in _PARTS]).tolist()])
    names = tuple(f"{number:0{len(str(largest))}}" for number in range(largest + 1))
    train, test = (
        LabelledImages(values[part, "images"][:, None], values[part, "labels"].long(), names) for part in _PARTS
    )
    return train, test


def holds_idx(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has one of the files that `idx_folder` reads.

    Args:
        folder: that may have them.
    """
    return any(_find_idx(Path(folder), part, kind) for part in _PARTS for kind in _DIMENSIONS)


def _read_bytes(path: Path, dimensions: int) -> torch.Tensor:
    values = read_idx(path)
    if values.dtype != torch.uint8 or values.ndim != dimensions:
        raise ValueError(
            f"{path.name} must have torch.uint8 in {dimensions} dimensions. Got {path} with {values.dtype} in "
            f"{values.ndim}, {tuple(values.shape)}. Pass the right file."
        )
    return values


def _names(part: str, kind: str) -> list[str]:
    end = f"idx{_DIMENSIONS[kind]}-ubyte"
    return [f"{part}-{kind}{joint}{end}{packed}" for packed in ("", ".gz") for joint in "-."]


def _find_idx(folder: Path, part: str, kind: str) -> Path | None:
    return next((folder / name for name in _names(part, kind) if (folder / name).is_file()), None)


def _require_idx(folder: Path, part: str, kind: str) -> Path:
    found = _find_idx(folder, part, kind)
    if found is None:
        there = "does not exist"
        if folder.is_dir():
            there = f"has {sorted(path.name for path in folder.iterdir())[:12] or 'no files'}"
        first, *others = _names(part, kind)
        raise ValueError(
            f"A folder of IDX files must have {first}, or one of {', '.join(others)}. {folder} {there}. Add the file."
        )
    return found
