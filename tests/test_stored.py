"""Labelled images that lie in files: folders of images, IDX files, and the example that trains on either."""

from __future__ import annotations

import gzip
import pickle
import random
import re
import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image, ImageFile

import ddp_loop as dl
from ddp_loop.datasets import ImageFolder, LabelledImages, holds_idx, idx_folder, read_idx
from ddp_loop.folders import SUFFIXES
from ddp_loop.networks import digit_classifier
from tests.harness import FAULT_S, OnRanks, caught
from tests.test_examples import EXAMPLES, load, run

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


# -- what is in a folder -----------------------------------------------------------------------------------


@pytest.mark.covers("A2", "A4")
def test_sub_folders_are_the_classes_and_files_are_numbered_by_name_wherever_they_lie(tmp_path: Path) -> None:
    names = ["a/10.png", "a/2.png", "a/deep/er/1.jpg", "a/z.bmp", "b c/1.png", "ä/1.PNG"]
    shuffled = names[:]
    random.Random(1).shuffle(shuffled)
    for name in shuffled:
        save(tmp_path / name, noise())
    data = ImageFolder(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in data.paths] == names
    assert data.class_names == ("a", "b c", "ä")
    assert data.labels.dtype == torch.int64
    assert data.labels.tolist() == [0, 0, 0, 0, 1, 2]
    assert len(data) == 6
    assert [data[i][1] for i in range(6)] == data.labels.tolist()


@pytest.mark.covers("A2")
def test_hidden_names_and_other_suffixes_are_left_out(tmp_path: Path) -> None:
    save(tmp_path / "a" / "1.png", noise())
    for name in (".b/1.png", "a/.2.png", "a/.deep/3.png", ".4.png"):
        save(tmp_path / name, noise())
    (tmp_path / "a" / "labels.txt").write_text("a")
    (tmp_path / "read me.md").write_text("here")
    data = ImageFolder(tmp_path)
    assert data.paths == (tmp_path / "a" / "1.png",)
    assert data.class_names == ("a",)


@pytest.mark.covers("A2")
def test_the_suffixes_are_some_that_pillow_knows() -> None:
    Image.init()
    readable = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    assert set(SUFFIXES) <= readable | {".avif"}  # not every pillow has it
    assert {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"} <= set(SUFFIXES)


@pytest.mark.covers("A2")
def test_links_are_followed_and_a_link_upwards_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "elsewhere" / "1.png", noise())
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").symlink_to(tmp_path / "elsewhere")
    assert ImageFolder(tmp_path / "data").paths == (tmp_path / "data" / "a" / "1.png",)
    (tmp_path / "elsewhere" / "up").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"must come to an end; got .*/a/up, a link up to .*elsewhere: remove"):
        ImageFolder(tmp_path / "data")


@pytest.mark.covers("A2")
def test_a_folder_that_holds_no_classes_of_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"can be read; got {tmp_path}/none: No such file or directory: look at"):
        ImageFolder(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=rf"can be read; got {tmp_path}/file: Not a directory"):
        ImageFolder(tmp_path / "file")
    with pytest.raises(ValueError, match=rf"a sub-folder for each class; got {tmp_path} without one: make .*/cat"):
        ImageFolder(tmp_path)
    save(tmp_path / "a" / "1.png", noise())
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    with pytest.raises(ValueError, match=rf"every class must have an image; got {tmp_path}/empty without one"):
        ImageFolder(tmp_path)


@pytest.mark.covers("A2")
def test_images_beside_the_class_folders_are_refused_since_they_have_no_class(tmp_path: Path) -> None:
    for name in ("a/1.png", "x.png", "b.jpg"):
        save(tmp_path / name, noise())
    with pytest.raises(ValueError, match=rf"names their class; got 2 beside the class folders, as {tmp_path}/b.jpg"):
        ImageFolder(tmp_path)


@pytest.mark.covers("A2")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "RGBA"}, "mode must be .*got 'RGBA'"),
        ({"size": (28, 0)}, r"size must be \(height, width\).*got \(28, 0\)"),
        ({"size": 28}, "got 28: try"),
        ({"size": (28,)}, r"got \(28,\)"),
        ({"size": (1.5, 2)}, r"got \(1.5, 2\)"),
    ],
)
def test_another_mode_or_size_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(tmp_path / "a" / "1.png", noise())
    with pytest.raises(ValueError, match=message):
        ImageFolder(tmp_path, **options)


def test_without_pillow_the_install_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a" / "1.png", noise())
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r'pillow, which is missing: pip install "ddp_loop\[digits\]"'):
        ImageFolder(tmp_path)


# -- an image ----------------------------------------------------------------------------------------------


@pytest.mark.covers("A2")
def test_grey_and_colour_images_come_with_their_channels_in_front(tmp_path: Path) -> None:
    grey, colour = noise(8, 6), noise(8, 6, 3)
    save(tmp_path / "grey" / "a" / "1.png", grey)
    save(tmp_path / "colour" / "a" / "1.png", colour)
    assert torch.equal(only_image(tmp_path / "grey"), torch.from_numpy(grey)[None])
    assert torch.equal(only_image(tmp_path / "grey", mode="RGB"), torch.from_numpy(grey).expand(3, 8, 6))
    image = only_image(tmp_path / "colour", mode="RGB")
    assert torch.equal(image, torch.from_numpy(colour).permute(2, 0, 1))
    assert image.is_contiguous()
    # ITU-R 601: 0.299, 0.587, 0.114; pillow rounds.
    weights = np.array([0.299, 0.587, 0.114])
    assert np.abs(only_image(tmp_path / "colour")[0].numpy() - colour @ weights).max() <= 1


@pytest.mark.covers("A2")
@pytest.mark.parametrize("suffix", ["png", "tiff", "jpg"])
def test_an_image_is_upright_as_its_camera_says(suffix: str, tmp_path: Path) -> None:
    left_half_light = np.zeros((8, 16), dtype=np.uint8)
    left_half_light[:, :8] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # shown right, it is turned a quarter clockwise: what is left comes to the top
    save(tmp_path / "a" / f"1.{suffix}", left_half_light, exif=exif)
    image = only_image(tmp_path)
    assert image.shape == (1, 16, 8)
    assert image[0, :8].min() > 250
    assert image[0, 8:].max() < 5


@pytest.mark.covers("A2")
def test_an_image_is_resized_to_height_and_width(tmp_path: Path) -> None:
    save(tmp_path / "a" / "1.png", np.repeat(np.array([[0, 200]], dtype=np.uint8), 40, axis=1).repeat(20, axis=0))
    image = only_image(tmp_path, size=(10, 28))
    assert image.shape == (1, 10, 28)
    assert image[0, :, :12].max() == 0
    assert image[0, :, 16:].min() == 200


@pytest.mark.covers("A2")
def test_a_palette_and_transparency_become_plain_colours(tmp_path: Path) -> None:
    palette = Image.fromarray(np.array([[0, 1], [2, 1]], dtype=np.uint8), mode=None).convert("P")
    palette.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    (tmp_path / "a").mkdir()
    palette.save(tmp_path / "a" / "1.png", transparency=b"\x00\x80\xff")
    expected = torch.tensor([[[10, 40], [70, 40]], [[20, 50], [80, 50]], [[30, 60], [90, 60]]], dtype=torch.uint8)
    assert torch.equal(only_image(tmp_path, mode="RGB"), expected)


@pytest.mark.covers("A2")
@pytest.mark.parametrize(("suffix", "tail"), [("jpg", 0), ("png", 4)])  # a PNG's last 4 bytes are the end mark's sum
def test_an_image_that_is_cut_short_is_an_error_and_never_grey(suffix: str, tail: int, tmp_path: Path) -> None:
    path = save(tmp_path / "a" / f"1.{suffix}", noise(64, 64))
    whole = path.read_bytes()
    data = ImageFolder(tmp_path)
    data[0]
    last = len(whole) - tail - 1
    for size in [*range(0, last, len(whole) // 12), last - 1, last]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"must be a whole file.*got {path}: .*: get it anew, or remove it"):
            data[0]


@pytest.mark.covers("A2")
def test_an_image_that_is_damaged_or_none_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "a" / "1.png", noise(64, 64))
    data = ImageFolder(tmp_path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    checksum = bytearray(path.read_bytes())
    checksum[-13] ^= 4  # the last byte before the end mark of 12
    for ruin, message in ((content, ""), (checksum, ""), (b"hello" * 100, "no image that pillow knows: get it anew")):
        path.write_bytes(ruin)
        with pytest.raises(ValueError, match=f"got {path}: {message}"):
            data[0]


@pytest.mark.covers("A2")
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "a" / "2.png").symlink_to("/dev/null")  # not a pipe, whose reading would have no end
    data = ImageFolder(tmp_path)
    for i in (0, 1):
        with pytest.raises(ValueError, match=f"got {data.paths[i]}: no file, or a link to none"):
            data[i]


@pytest.mark.covers("A2")
def test_more_than_8_bits_a_channel_are_refused_and_not_cut_off(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    deep = np.array([[0, 256, 65535]], dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / "a" / "1.png")
    with pytest.raises(ValueError, match=f"got {tmp_path}/a/1.png: its mode I;16 has more than 8 bits a channel"):
        only_image(tmp_path)


@pytest.mark.covers("A2")
def test_pillows_setting_that_makes_up_what_is_missing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a" / "1.png", noise())
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(ValueError, match=r"must not be made up; got PIL.ImageFile.LOAD_TRUNCATED_IMAGES = True"):
        only_image(tmp_path)


# -- all of them -------------------------------------------------------------------------------------------


@pytest.mark.covers("A2")
@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
def test_all_images_in_memory_are_a_labelled_data_set(mode: str, channels: int, tmp_path: Path) -> None:
    for k, name in enumerate(["a/1.png", "b/1.png", "b/2.png"]):
        save(tmp_path / name, noise(8, 6, 3, seed=k))
    folder = ImageFolder(tmp_path, mode=mode)
    data = folder.images()
    assert data.images.shape == (3, channels, 8, 6)
    assert data.class_names == folder.class_names
    for i in range(3):
        assert torch.equal(data.images[i], folder[i][0])
    images, labels = data.tensors
    assert torch.equal(images, data.images / 255)
    assert labels.tolist() == [0, 1, 1]


@pytest.mark.covers("A2")
def test_images_of_different_sizes_are_refused_in_memory_unless_they_are_resized(tmp_path: Path) -> None:
    save(tmp_path / "a" / "1.png", noise(8, 6))
    save(tmp_path / "b" / "2.png", noise(6, 8))
    message = r"must have one size; got .*/a/1.png of 8x6 and .*/b/2.png of 6x8 pixels: try .*size=\(8, 6\)"
    with pytest.raises(ValueError, match=message):
        ImageFolder(tmp_path).images()
    assert ImageFolder(tmp_path, size=(5, 4)).images().images.shape == (2, 1, 5, 4)


@pytest.mark.covers("A2", "A3")
def test_a_folder_is_split_like_its_images_in_memory(tmp_path: Path) -> None:
    folder = ImageFolder(numbered_folder(tmp_path, 10, 7))
    for seed in (0, 1):
        parts = folder.split(0.5, 0.2, seed=seed)
        assert [torch.bincount(part.labels).tolist() for part in parts] == [[5, 3], [2, 1], [3, 3]]
        for part, expected in zip(parts, folder.images().split(0.5, 0.2, seed=seed), strict=True):
            assert torch.equal(part.images().images, expected.images)
            assert torch.equal(part.labels, expected.labels)
            assert part.class_names == expected.class_names
    assert len(folder) == 17
    with pytest.raises(ValueError, match="together 1: leave the last one out"):
        folder.split(0.9, 0.1)


@pytest.mark.covers("A2")
def test_a_folder_can_be_sent_to_another_process(tmp_path: Path) -> None:
    folder = ImageFolder(numbered_folder(tmp_path, 2, 1), mode="RGB", size=(3, 2))
    sent = pickle.loads(pickle.dumps(folder))
    assert torch.equal(sent.images().images, folder.images().images)


def read_by_workers(folder: Path) -> tuple[list[tuple[int, int]], tuple[str, str, float]]:
    """The values and labels that this rank is given, and what is raised; a sum behind each mini-batch."""
    found: list[tuple[int, int]] = []

    def work() -> None:
        with dl.join_world() as world:
            # A rank is a spawned process, whose workers would be spawned, too, and import torch: 3 s on two cores.
            options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
            for loaded in dl.Batches(ImageFolder(folder), 4, world, **options).epoch(0):
                if loaded.mini_batch.shards:
                    images, labels = loaded.data(0)
                    found.extend(zip(images[:, 0, 0, 0].tolist(), labels.tolist(), strict=True))
                world.sum(torch.ones(()))

    return found, caught(work)


@pytest.mark.covers("A2")
def test_workers_of_two_ranks_read_each_image_once(tmp_path: Path, on_ranks: OnRanks) -> None:
    results = on_ranks(2, read_by_workers, numbered_folder(tmp_path, 6, 5))
    assert [raised[:2] for _, raised in results] == [("", "")] * 2
    assert sorted(pair for found, _ in results for pair in found) == [(k, int(k > 5)) for k in range(11)]
    assert {len(found) for found, _ in results} == {5, 6}


@pytest.mark.covers("A2", "D10")
def test_a_corrupt_image_in_a_worker_ends_all_ranks_and_is_named(tmp_path: Path, on_ranks: OnRanks) -> None:
    corrupt = numbered_folder(tmp_path, 6, 5) / "b" / "003.png"
    corrupt.write_bytes(corrupt.read_bytes()[:-20])
    results = [raised for _, raised in on_ranks(2, read_by_workers, tmp_path)]
    assert sorted(kind for kind, _, _ in results) == ["PeerFailed", "ValueError"]
    for _, text, took_s in results:
        assert f"got {corrupt}: " in text
        assert took_s < FAULT_S


# -- IDX files ---------------------------------------------------------------------------------------------

TYPES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


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


SIX = np.arange(6, dtype=np.uint8).reshape(2, 3)
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzipped"])


@pytest.mark.covers("A5")
@PACKED
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", [(6,), (2, 3), (3, 1, 2), (1, 2, 3, 1), (0,), (2, 0, 3)], ids=str)
def test_idx_files_of_every_type_are_read(kind: str, shape: tuple[int, ...], packed: bool, tmp_path: Path) -> None:
    values = np.array([1, 2, 3, 100, 0, 77][: int(np.prod(shape))]).astype(kind).reshape(shape)
    if values.size:
        values.flat[0] = {"u1": 255, "i1": -128, "i2": -258, "i4": -16909060, "f4": -1.5, "f8": 1e300}[kind]
    read = read_idx(write(tmp_path / "values", idx_bytes(values), packed))
    assert read.dtype == torch.from_numpy(values).dtype
    assert torch.equal(read, torch.from_numpy(values))
    read += 1  # it may be written to


@pytest.mark.covers("A5")
def test_whether_an_idx_file_is_gzipped_is_seen_from_its_content(tmp_path: Path) -> None:
    assert torch.equal(read_idx(write(tmp_path / "six.gz", idx_bytes(SIX))), torch.from_numpy(SIX))
    assert torch.equal(read_idx(write(tmp_path / "six", idx_bytes(SIX), packed=True)), torch.from_numpy(SIX))


@pytest.mark.covers("A5")
@PACKED
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\1\x08\1\0\0\0\0", "must begin with 4 bytes: 00 00, a type of 08, .* with 4: 00 01 08 01: is it another"),
        (b"\x89PNG\r\n", "with 4: 89 50 4e 47"),
        (b"\0\0\x0a\1\0\0\0\0", "with 4: 00 00 0a 01"),
        (b"\0\0\x08\0\0", "with 4: 00 00 08 00"),
        (b"\0\0\x08", "with 3: 00 00 08"),
        (b"", "with 0: "),
        (b"\0\0\x08\2\0\0\0\2\0\0", "of 2 dimensions must begin with 12 bytes; got .* with 10: get it anew"),
        (idx_bytes(SIX)[:-1], "values that its header says; got .*: 2x3 of uint8 are 6 bytes, it has 5: get it anew"),
        (idx_bytes(SIX)[:12], "are 6 bytes, it has 0"),
        (idx_bytes(SIX) + b"\0", "are 6 bytes, it has 7"),
        (idx_bytes(SIX.astype(np.float64))[:-8], "2x3 of float64 are 48 bytes, it has 40"),
        (idx_bytes(SIX[:0], (0, 2**32 - 1, 2**32 - 1, 2**32 - 1)), "must hold a tensor; got .* of .*4294967295"),
    ],
)
def test_a_damaged_idx_file_is_named_with_its_byte_counts(
    content: bytes, message: str, packed: bool, tmp_path: Path
) -> None:
    path = write(tmp_path / "values", content, packed)
    with pytest.raises(ValueError, match=message) as refused:
        read_idx(path)
    assert str(path) in str(refused.value)


@pytest.mark.covers("A5")
def test_a_damaged_gzip_is_named_with_its_byte_counts(tmp_path: Path) -> None:
    content = idx_bytes(noise(40, 50))
    whole = gzip.compress(content)
    path = tmp_path / "values.gz"
    for size in (5, 10, 12):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"must be whole.*got {path}, {size} bytes: .*: get it anew"):
            read_idx(path)
    damages = [whole[:-9], whole[:-8], whole[:-1], whole[:-8] + b"\1\2\3\4" + whole[-4:], whole + b"rest"]
    damages.append(whole[:1000] + bytes([whole[1000] ^ 255]) + whole[1001:])
    for damaged in damages:
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"got {path}: 40x50 of uint8 are 2000 bytes, it has \d+ \(.+\): get"):
            read_idx(path)
    path.write_bytes(whole)
    assert read_idx(path).shape == (40, 50)


@pytest.mark.covers("A5")
def test_an_idx_file_that_is_not_there_or_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"can be read; got {tmp_path}/none: .*No such file"):
        read_idx(tmp_path / "none")
    with pytest.raises(ValueError, match=rf"can be read; got {tmp_path}: .*directory"):
        read_idx(tmp_path)


@pytest.mark.covers("A5")
@PACKED
@pytest.mark.parametrize(
    ("content", "counts"),
    [
        (idx_bytes(SIX.astype(np.float64), (2**32 - 1,) * 3), f"are {8 * (2**32 - 1) ** 3} bytes, it has 48"),
        (idx_bytes(SIX, (6,)) + bytes(2**25), f"are 6 bytes, it has {6 + 2**25}"),
    ],
    ids=["more than is there", "less than is there"],
)
def test_a_header_that_lies_takes_no_memory(content: bytes, counts: str, packed: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "values", content, packed)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=counts):
            read_idx(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The pieces that it reads are of 1 MiB, and a few of them are there at once.
    assert peak < 8 * 2**20


# -- folders of IDX files ----------------------------------------------------------------------------------


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


@pytest.mark.covers("A5")
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


@pytest.mark.covers("A5")
def test_of_a_plain_and_a_gzipped_file_the_plain_one_is_read(tmp_path: Path) -> None:
    write_mnist(tmp_path, packed=True, sizes=(1, 1))
    write_mnist(tmp_path, joint=".")
    assert [len(data) for data in idx_folder(tmp_path)] == [30, 7]


@pytest.mark.covers("A4", "A5")
@pytest.mark.parametrize(("largest", "names"), [(10, ["00", "01", "10"]), (26, ["00", "01", "26"])])
def test_training_and_test_have_the_same_names_sorted_as_numbers(
    largest: int, names: list[str], tmp_path: Path
) -> None:
    train, test = idx_folder(write_mnist(tmp_path, largest=largest))
    assert train.class_names == test.class_names
    assert [*train.class_names[:2], train.class_names[-1]] == names
    assert [int(name) for name in train.class_names] == [*range(largest + 1)]


@pytest.mark.covers("A5")
def test_sets_without_an_image_are_sets_too(tmp_path: Path) -> None:
    train, test = idx_folder(write_mnist(tmp_path, sizes=(0, 0)))
    assert (len(train), len(test), len(test.class_names)) == (0, 0, 10)


@pytest.mark.covers("A5")
def test_a_missing_file_is_named_with_what_is_there(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match=r"must hold t10k-labels-idx1-ubyte, or .*\.gz; got .* with \['t10k-images-"):
        idx_folder(tmp_path)
    assert holds_idx(tmp_path)
    with pytest.raises(ValueError, match=f"must hold train-images-idx3-ubyte.*got {tmp_path}/none with no such folder"):
        idx_folder(tmp_path / "none")
    assert not holds_idx(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=f"got {tmp_path}/empty with nothing in it: put the file there"):
        idx_folder(tmp_path / "empty")


@pytest.mark.covers("A5")
@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "t10k-labels-idx1-ubyte",
            np.zeros(6, np.uint8),
            "got 7 images in .*/t10k-images-.* and 6 labels in .*/t10k-l",
        ),
        ("train-images-idx3-ubyte", np.zeros((31, 28, 28), np.uint8), "got 31 images in .* and 30 labels in .*/train-"),
        ("train-images-idx3-ubyte", np.zeros((30, 784), np.uint8), r"uint8 in 3 dimensions; got .* in 2, \(30, 784\)"),
        ("train-labels-idx1-ubyte", np.zeros((30, 1), np.uint8), r"train-labels.*\.uint8 in 1 dimensions; got .* in 2"),
        ("train-labels-idx1-ubyte", np.zeros(30, np.int32), "got .*/train-labels-idx1-ubyte with torch.int32 in 1"),
        (
            "t10k-images-idx3-ubyte",
            np.zeros((7, 20, 20), np.uint8),
            r"one size; got \(28, 28\) in .* and \(20, 20\) in",
        ),
    ],
)
def test_files_that_do_not_fit_together_are_refused(
    name: str, values: npt.NDArray[Any], message: str, tmp_path: Path
) -> None:
    write(write_mnist(tmp_path) / name, idx_bytes(values))
    with pytest.raises(ValueError, match=message):
        idx_folder(tmp_path)


# -- the example -------------------------------------------------------------------------------------------


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Run the digit example in this process, on one epoch of data in a folder."""

    def train(data: Path) -> None:
        monkeypatch.setattr(sys, "argv", ["train.py", "--data", str(data), "--epochs", "1", "--device", "cpu"])
        load("digits/train").main()

    return train


@pytest.mark.covers("A2")
def test_the_digit_example_trains_on_a_folder_of_images(
    example: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example(numbered_folder(tmp_path, 20, 20, 20, side=9))
    out = capsys.readouterr().out
    assert "54 training and 6 test images" in out
    assert re.search(r"Epoch: 1, Loss: \d.*\nTest accuracy: [01]\.\d+ of 6 images", out)


@pytest.mark.covers("A5")
def test_the_digit_example_trains_on_idx_files_and_tests_on_their_own_test_set(
    example: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example(write_mnist(tmp_path, largest=11, packed=True))
    out = capsys.readouterr().out
    assert "30 training and 7 test images" in out
    assert re.search(r"Epoch: 1, Loss: \d.*\nTest accuracy: [01]\.\d+ of 7 images", out)


def end_of_example(data: str) -> tuple[str, str, float]:
    arguments, sys.argv = sys.argv, ["train.py", "--data", data, "--epochs", "1", "--device", "cpu"]
    try:
        return caught(load("digits/train").main)
    finally:
        sys.argv = arguments


@pytest.mark.covers("A2", "A5", "D10")
def test_the_digit_example_refuses_data_that_are_none_with_one_line_on_every_rank(
    tmp_path: Path, on_ranks: OnRanks
) -> None:
    write_mnist(tmp_path / "small", side=20)
    for data, message in [
        (tmp_path / "mnsit", f"got {tmp_path}/mnsit: No such file or directory: look at its name"),
        (tmp_path / "small", f"takes images of 28x28 pixels; got 20x20 in {tmp_path}/small: resize them"),
    ]:
        for kind, text, took_s in on_ranks(2, end_of_example, str(data)):
            assert kind == "SystemExit"
            assert text.startswith("--data takes digits, handwritten, or a folder: ")
            assert message in text
            assert "\n" not in text
            assert took_s < FAULT_S


@pytest.mark.covers("A2")
def test_the_digit_example_ends_with_one_line_and_an_exit_code(tmp_path: Path) -> None:
    done = run("train.py", "--data", "mnsit", folder=EXAMPLES / "digits", home=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "got mnsit: No such file or directory" in done.stderr


@pytest.mark.covers("A2")
def test_labelled_images_and_the_digit_network_take_other_numbers_of_channels_and_classes() -> None:
    colour = LabelledImages(torch.zeros(2, 3, 4, 5, dtype=torch.uint8), torch.tensor([0, 1]), ("a", "b"))
    assert colour.tensors[0].shape == (2, 3, 4, 5)
    assert [part.images.shape[1] for part in colour.split(0.5)] == [3, 3]
    assert digit_classifier(classes=3)(torch.zeros(2, 1, 28, 28)).shape == (2, 3)
