"""MNIST's IDX files, singly and all four."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ddp_loop.datasets import holds_idx, idx_folder, read_idx
from tests.support.files import TYPES, idx_bytes, noise, write, write_mnist

pytestmark = pytest.mark.covers("A5")

# -- one file ----------------------------------------------------------------------------------------------

SIX = np.arange(6, dtype=np.uint8).reshape(2, 3)
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzipped"])


@PACKED
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", [(6,), (3, 1, 2), (2, 0, 3)], ids=str)
def test_idx_files_of_every_type_are_read(kind: str, shape: tuple[int, ...], packed: bool, tmp_path: Path) -> None:
    values = np.array([1, 2, 3, 100, 0, 77][: int(np.prod(shape))]).astype(kind).reshape(shape)
    if values.size:
        values.flat[0] = {"u1": 255, "i1": -128, "i2": -258, "i4": -16909060, "f4": -1.5, "f8": 1e300}[kind]
    name = "values" if packed else "values.gz"  # its content shows whether a file is gzipped
    read = read_idx(write(tmp_path / name, idx_bytes(values), packed))
    assert read.dtype == torch.from_numpy(values).dtype
    assert torch.equal(read, torch.from_numpy(values))
    read += 1  # it may be written to


@PACKED
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\1\x08\1\0\0\0\0", "must begin with 4 bytes: 00 00, a type of 08, .* with 4 bytes, 00 01 08 01. Pass an"),
        (b"\0\0\x0a\1\0\0\0\0", "with 4 bytes, 00 00 0a 01"),
        (b"\0\0\x08\0\0", "with 4 bytes, 00 00 08 00"),
        (b"", "with 0 bytes, "),
        (b"\0\0\x08\2\0\0\0\2\0\0", "of 2 dimensions must have a header of 12 bytes. .* has 10 bytes. Download"),
        (idx_bytes(SIX)[:-1], "must have 2x3 values of uint8 by its header, 6 bytes. It has 5. Download it again"),
        (idx_bytes(SIX) + b"\0", ", 6 bytes. It has 7"),
        (idx_bytes(SIX.astype(np.float64))[:-8], "2x3 values of float64 by its header, 48 bytes. It has 40"),
        (idx_bytes(SIX[:0], (0, 2**32 - 1, 2**32 - 1, 2**32 - 1)), "torch has no tensor of size .*4294967295"),
    ],
)
def test_a_damaged_idx_file_is_named_with_its_byte_counts(
    content: bytes, message: str, packed: bool, tmp_path: Path
) -> None:
    path = write(tmp_path / "values", content, packed)
    with pytest.raises(ValueError, match=message) as refused:
        read_idx(path)
    assert str(path) in str(refused.value)


def test_a_damaged_gzip_is_named_with_its_byte_counts(tmp_path: Path) -> None:
    content = idx_bytes(noise(40, 50))
    whole = gzip.compress(content)
    path = tmp_path / "values.gz"
    for size in (5, 10, 12):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"readable and complete\. Got {path}, {size} bytes \(.*\). Download it"):
            read_idx(path)
    damages = [whole[:-9], whole[:-8], whole[:-1], whole[:-8] + b"\1\2\3\4" + whole[-4:], whole + b"rest"]
    damages.append(whole[:1000] + bytes([whole[1000] ^ 255]) + whole[1001:])
    for damaged in damages:
        path.write_bytes(damaged)
        with pytest.raises(
            ValueError, match=rf"{path} .* 40x50 values of uint8 .*, 2000 bytes\. It has \d+ \(.+\). Down"
        ):
            read_idx(path)
    path.write_bytes(whole)
    assert read_idx(path).shape == (40, 50)


def test_a_missing_idx_file_or_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"must be readable .*Got {tmp_path}/none \(.*No such file"):
        read_idx(tmp_path / "none")
    with pytest.raises(ValueError, match=rf"must be readable .*Got {tmp_path} \(.*directory"):
        read_idx(tmp_path)


@PACKED
@pytest.mark.parametrize(
    ("content", "counts"),
    [
        (idx_bytes(SIX.astype(np.float64), (2**32 - 1,) * 3), f", {8 * (2**32 - 1) ** 3} bytes. It has 48"),
        (idx_bytes(SIX, (6,)) + bytes(2**25), f", 6 bytes. It has {6 + 2**25}"),
    ],
    ids=["more than is there", "less than is there"],
)
def test_a_wrong_header_takes_no_memory(content: bytes, counts: str, packed: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "values", content, packed)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=counts):
            read_idx(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # It reads pieces of 1 MiB, a few of which are in memory at once.
    assert peak < 8 * 2**20


# -- folders of IDX files ----------------------------------------------------------------------------------


@PACKED
@pytest.mark.parametrize("joint", ["-", "."])
def test_mnists_files_are_a_training_and_a_test_set(joint: str, packed: bool, tmp_path: Path) -> None:
    train, test = idx_folder(write_mnist(tmp_path, joint=joint, packed=packed))
    assert (train.images.shape, test.images.shape) == ((30, 1, 28, 28), (7, 1, 28, 28))
    for seed, data in enumerate((train, test)):
        expected = np.random.default_rng(seed).integers(0, 256, data.images.shape, dtype=np.uint8)
        assert torch.equal(data.images, torch.from_numpy(expected))
        assert data.class_names == tuple("0123456789")
    assert train.labels.tolist() == [*range(10)] * 3
    assert test.labels.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert holds_idx(tmp_path)


def test_a_plain_file_is_preferred_to_a_gzipped_one(tmp_path: Path) -> None:
    write_mnist(tmp_path, packed=True, sizes=(1, 1))
    write_mnist(tmp_path, joint=".")
    assert [len(data) for data in idx_folder(tmp_path)] == [30, 7]


@pytest.mark.covers("A4")
@pytest.mark.parametrize(("largest", "names"), [(10, ["00", "01", "10"]), (26, ["00", "01", "26"])])
def test_training_and_test_have_the_same_names_sorted_as_numbers(
    largest: int, names: list[str], tmp_path: Path
) -> None:
    train, test = idx_folder(write_mnist(tmp_path, largest=largest))
    assert train.class_names == test.class_names
    assert [*train.class_names[:2], train.class_names[-1]] == names
    assert [int(name) for name in train.class_names] == [*range(largest + 1)]


def test_sets_without_images_are_valid(tmp_path: Path) -> None:
    train, test = idx_folder(write_mnist(tmp_path, sizes=(0, 0)))
    assert (len(train), len(test), len(test.class_names)) == (0, 0, 10)


def test_a_missing_file_is_named_with_the_files_that_exist(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match=r"must have t10k-labels-idx1-ubyte, or .*\.gz\. .* has \['t10k-images-"):
        idx_folder(tmp_path)
    assert holds_idx(tmp_path)
    with pytest.raises(ValueError, match=f"must have train-images-idx3-ubyte.*{tmp_path}/none does not exist"):
        idx_folder(tmp_path / "none")
    assert not holds_idx(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=f"{tmp_path}/empty has no files. Add the file"):
        idx_folder(tmp_path / "empty")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "t10k-labels-idx1-ubyte",
            np.zeros(6, np.uint8),
            "Got 7 images in .*/t10k-images-.* and 6 labels in .*/t10k-l",
        ),
        ("train-images-idx3-ubyte", np.zeros((31, 28, 28), np.uint8), "Got 31 images in .* and 30 labels in .*/train-"),
        ("train-images-idx3-ubyte", np.zeros((30, 784), np.uint8), r"uint8 in 3 dimensions\. Got .* in 2, \(30, 784\)"),
        ("train-labels-idx1-ubyte", np.zeros((30, 1), np.uint8), r"labels.*\.uint8 in 1 dimensions\. Got .* in 2"),
        ("train-labels-idx1-ubyte", np.zeros(30, np.int32), "Got .*/train-labels-idx1-ubyte with torch.int32 in 1"),
        (
            "t10k-images-idx3-ubyte",
            np.zeros((7, 20, 20), np.uint8),
            r"the same size\. Got \(28, 28\) in .* and \(20, 20\) in",
        ),
    ],
)
def test_files_that_do_not_fit_together_are_refused(
    name: str, values: npt.NDArray[Any], message: str, tmp_path: Path
) -> None:
    write(write_mnist(tmp_path) / name, idx_bytes(values))
    with pytest.raises(ValueError, match=message):
        idx_folder(tmp_path)
