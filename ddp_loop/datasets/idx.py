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
_CHUNK = 2**20  # bytes


def read_idx(path: str | os.PathLike[str]) -> torch.Tensor:
    """Read the tensor that an IDX file holds, plain or gzipped, whatever its name.

    Two zero bytes, a byte for the type (8 uint8, 9 int8, 11 int16, 12 int32, 13 float32, 14 float64), a byte for
    the number of dimensions, each dimension as 4 bytes, then the values; all big-endian.

    Returns:
        The tensor, of the file's type and dimensions.

    Raises:
        ValueError: a file that cannot be read, is no IDX file, or has fewer or more bytes than its header says.
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
            f"an IDX file must be whole and one that can be read; got {path}{found}: {error}: get it anew"
        ) from error


def _read_tensor(path: Path, stream: BufferedIOBase) -> torch.Tensor:
    code, dimensions = _read_header(path, stream)
    kind = np.dtype(_TYPES[code])
    expected = math.prod(dimensions) * kind.itemsize
    values, found, torn = _read_values(stream, expected)
    if torn or found != expected:
        raise ValueError(
            f"an IDX file must have the values that its header says; got {path}: {'x'.join(map(str, dimensions))} of "
            f"{kind.newbyteorder('=')} are {expected} bytes, it has {found}{f' ({torn})' if torn else ''}: get it anew"
        )
    native = np.frombuffer(values, dtype=kind).astype(kind.newbyteorder("="), copy=False)
    try:
        return torch.from_numpy(native).reshape(dimensions)
    except RuntimeError as error:  # none of no values, times 4 billion, times 4 billion
        raise ValueError(f"an IDX file must hold a tensor; got {path} of {dimensions}: {error}: get it anew") from error


def _read_header(path: Path, stream: BufferedIOBase) -> tuple[int, tuple[int, ...]]:
    """The code of the type and the dimensions."""
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _TYPES or magic[3] == 0:
        raise ValueError(
            f"an IDX file must begin with 4 bytes: 00 00, a type of {', '.join(f'{code:02x}' for code in _TYPES)}, and "
            f"a number of dimensions; got {path} with {len(magic)}: {magic.hex(' ')}: is it another file?"
        )
    sizes = stream.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise ValueError(
            f"an IDX file of {magic[3]} dimensions must begin with {4 + 4 * magic[3]} bytes; got {path} with "
            f"{4 + len(sizes)}: get it anew"
        )
    return magic[2], struct.unpack(f">{magic[3]}I", sizes)


def _read_values(stream: BufferedIOBase, expected: int) -> tuple[bytearray, int, Exception | None]:
    """The first bytes, how many there are in all, and what ended them too early, if something did.

    Memory grows with what is there, not with what was expected; and what is too much is counted, not kept.
    """
    values, found = bytearray(), 0
    try:
        while chunk := stream.read1(_CHUNK):
            values += chunk[: max(0, expected - found)]
            found += len(chunk)
    except (OSError, EOFError, zlib.error) as error:
        return values, found, error
    return values, found, None


def idx_folder(folder: str | os.PathLike[str]) -> tuple[LabelledImages, LabelledImages]:
    """MNIST's training and test images, or others in files of the same names.

    The files are train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
    t10k-labels-idx1-ubyte, each also with a dot before `idx`, and with .gz at the end; of several the plain one.
    Images are (N, 1, H, W). Class names are "0" to "9", or to the largest label of both sets if that is larger,
    with zeros in front so that their order is that of the numbers.

    Raises:
        ValueError: a file that is missing or damaged, whose values are not uint8 in 3 dimensions (labels: 1);
            other numbers of images than of labels; images of other sizes in training than in the test.
    """
    folder = Path(folder)
    files = {(part, kind): _require_idx(folder, part, kind) for part in ("train", "t10k") for kind in _DIMENSIONS}
    values = {key: _read_bytes(path, _DIMENSIONS[key[1]]) for key, path in files.items()}
    for part in ("train", "t10k"):
        images, labels = values[part, "images"], values[part, "labels"]
        if len(images) != len(labels):
            raise ValueError(
                f"there must be a label for each image; got {len(images)} images in {files[part, 'images']} and "
                f"{len(labels)} labels in {files[part, 'labels']}: take both from one source"
            )
    sizes = [tuple(values[part, "images"].shape[1:]) for part in ("train", "t10k")]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"training and test images must have one size; got {sizes[0]} in {files['train', 'images']} and "
            f"{sizes[1]} in {files['t10k', 'images']}: take both from one source"
        )
    largest = max(
        values[part, "labels"].max().item() if len(values[part, "labels"]) else 0 for part in ("train", "t10k")
    )
    classes = max(10, int(largest) + 1)
    names = tuple(f"{number:0{len(str(classes - 1))}}" for number in range(classes))
    train, test = (
        LabelledImages(values[part, "images"][:, None], values[part, "labels"].long(), names)
        for part in ("train", "t10k")
    )
    return train, test


def holds_idx(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds one of the files that `idx_folder` reads."""
    return any(_find_idx(Path(folder), part, kind) for part in ("train", "t10k") for kind in _DIMENSIONS)


def _read_bytes(path: Path, dimensions: int) -> torch.Tensor:
    values = read_idx(path)
    if values.dtype != torch.uint8 or values.ndim != dimensions:
        raise ValueError(
            f"{path.name} must hold torch.uint8 in {dimensions} dimensions; got {path} with {values.dtype} in "
            f"{values.ndim}, {tuple(values.shape)}: is it another file?"
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
        there = sorted(path.name for path in folder.iterdir())[:12] if folder.is_dir() else "no such folder"
        raise ValueError(
            f"a folder of IDX files must hold {_names(part, kind)[0]}, or one of {', '.join(_names(part, kind)[1:])}; "
            f"got {folder} with {there or 'nothing in it'}: put the file there"
        )
    return found
