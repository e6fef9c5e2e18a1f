"""Images in one folder per class: which files are read, each decoded, and all in memory."""

from __future__ import annotations

import pickle
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

import ddp_loop as dl
from ddp_loop.datasets import ImageFolder
from ddp_loop.datasets.image_folder import SUFFIXES
from tests.support.files import noise, numbered_folder, only_image, save
from tests.support.harness import FAULT_S, OnRanks, caught

pytestmark = pytest.mark.covers("A2")

# -- what is in a folder -----------------------------------------------------------------------------------


@pytest.mark.covers("A4")
def test_sub_folders_are_the_classes_and_files_are_numbered_by_path(tmp_path: Path) -> None:
    names = ["a/10.png", "a/2.png", "a/deep/er/1.jpg", "a/z.bmp", "b c/1.png", "ä/1.PNG"]
    shuffled = names[:]
    random.Random(1).shuffle(shuffled)
    for name in (*shuffled, ".b/1.png", "a/.2.png", "a/.deep/3.png", ".4.png"):  # hidden ones are ignored
        save(tmp_path / name, noise())
    for name in ("a/labels.txt", "read me.md"):  # and other suffixes
        (tmp_path / name).write_text("a")
    data = ImageFolder(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in data.paths] == names
    assert data.class_names == ("a", "b c", "ä")
    assert data.labels.dtype == torch.int64
    assert data.labels.tolist() == [0, 0, 0, 0, 1, 2]
    assert [data[i][1] for i in range(6)] == data.labels.tolist()


def test_pillow_reads_all_suffixes() -> None:
    Image.init()
    readable = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    assert set(SUFFIXES) <= readable | {".avif"}  # not every pillow has it
    assert {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"} <= set(SUFFIXES)


def test_links_are_followed_and_a_link_upwards_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "elsewhere" / "1.png", noise())
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").symlink_to(tmp_path / "elsewhere")
    assert ImageFolder(tmp_path / "data").paths == (tmp_path / "data" / "a" / "1.png",)
    (tmp_path / "elsewhere" / "up").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"must not form a cycle\. .*/a/up is a link up to .*elsewhere. Remove"):
        ImageFolder(tmp_path / "data")


def test_a_folder_without_classes_of_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, message in [("none", "No such file or directory"), ("file", "Not a directory")]:
        with pytest.raises(ValueError, match=rf"must be readable\. Got {tmp_path}/{name} \({message}\)"):
            ImageFolder(tmp_path / name)
    with pytest.raises(ValueError, match=rf"a sub-folder for each class\. {tmp_path} has none. Put .*/cat"):
        ImageFolder(tmp_path)
    save(tmp_path / "a" / "1.png", noise())
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    with pytest.raises(ValueError, match=rf"Every class must have an image\. {tmp_path}/empty has no file"):
        ImageFolder(tmp_path)
    for name in ("x.png", "b.jpg"):
        save(tmp_path / name, noise())
    with pytest.raises(ValueError, match=rf"name their class\. Got 2 beside .* such as {tmp_path}/b.jpg"):
        ImageFolder(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "RGBA"}, "mode must be .*Got 'RGBA'"),
        ({"size": (28, 0)}, r"size must be \(height, width\).*Got \(28, 0\)"),
        ({"size": 28}, "Got 28. Try"),
        ({"size": (1.5, 2)}, r"Got \(1.5, 2\)"),
    ],
)
def test_another_mode_or_size_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(tmp_path / "a" / "1.png", noise())
    with pytest.raises(ValueError, match=message):
        ImageFolder(tmp_path, **options)


def test_without_pillow_the_install_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a" / "1.png", noise())
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r'pillow, which is missing. Run pip install "ddp_loop\[digits\]"'):
        ImageFolder(tmp_path)


# -- an image ----------------------------------------------------------------------------------------------


def test_grey_and_colour_images_have_their_channels_first(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_an_image_is_rotated_by_its_exif_orientation(suffix: str, tmp_path: Path) -> None:
    left_half_light = np.zeros((8, 16), dtype=np.uint8)
    left_half_light[:, :8] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be rotated clockwise by a quarter-turn, so the left side becomes the top
    save(tmp_path / "a" / f"1.{suffix}", left_half_light, exif=exif)
    image = only_image(tmp_path)
    assert image.shape == (1, 16, 8)
    assert image[0, :8].min() > 250
    assert image[0, 8:].max() < 5


def test_an_image_is_resized_to_height_and_width(tmp_path: Path) -> None:
    save(tmp_path / "a" / "1.png", np.repeat(np.array([[0, 200]], dtype=np.uint8), 40, axis=1).repeat(20, axis=0))
    image = only_image(tmp_path, size=(10, 28))
    assert image.shape == (1, 10, 28)
    assert image[0, :, :12].max() == 0
    assert image[0, :, 16:].min() == 200


def test_a_palette_and_transparency_become_plain_colours(tmp_path: Path) -> None:
    palette = Image.fromarray(np.array([[0, 1], [2, 1]], dtype=np.uint8), mode=None).convert("P")
    palette.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    (tmp_path / "a").mkdir()
    palette.save(tmp_path / "a" / "1.png", transparency=b"\x00\x80\xff")
    expected = torch.tensor([[[10, 40], [70, 40]], [[20, 50], [80, 50]], [[30, 60], [90, 60]]], dtype=torch.uint8)
    assert torch.equal(only_image(tmp_path, mode="RGB"), expected)


@pytest.mark.parametrize(("suffix", "tail"), [("jpg", 0), ("png", 4)])  # a PNG ends with a checksum of 4 bytes
def test_a_truncated_image_is_an_error_and_never_grey(suffix: str, tail: int, tmp_path: Path) -> None:
    path = save(tmp_path / "a" / f"1.{suffix}", noise(64, 64))
    whole = path.read_bytes()
    data = ImageFolder(tmp_path)
    data[0]
    last = len(whole) - tail - 1
    for size in [*range(0, last, len(whole) // 12), last - 1, last]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"a complete file.*Got {path} \(.*\). Replace the file or remove it"):
            data[0]


def test_a_damaged_file_or_one_that_is_not_an_image_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "a" / "1.png", noise(64, 64))
    data = ImageFolder(tmp_path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    checksum = bytearray(path.read_bytes())
    checksum[-13] ^= 4  # the last byte before the end mark of 12
    unknown = r"not an image that pillow knows\). Replace the file"
    for ruin, message in ((content, ""), (checksum, ""), (b"hello" * 100, unknown)):
        path.write_bytes(ruin)
        with pytest.raises(ValueError, match=rf"Got {path} \({message}"):
            data[0]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "a" / "2.png").symlink_to("/dev/null")  # not a pipe, whose reading never ends
    data = ImageFolder(tmp_path)
    for i in (0, 1):
        with pytest.raises(ValueError, match=rf"Got {data.paths[i]} \(not a file, or a broken link"):
            data[i]


def test_more_than_8_bits_per_channel_and_pillows_setting_that_fills_missing_pixels_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a" / "1.png", np.array([[0, 256, 65535]], dtype=np.uint16))
    with pytest.raises(ValueError, match=rf"Got {tmp_path}/a/1.png \(its mode I;16 has more than 8 bits per channel"):
        only_image(tmp_path)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(ValueError, match=r"PIL.ImageFile.LOAD_TRUNCATED_IMAGES must be False.*Got True"):
        only_image(tmp_path)


# -- all of them -------------------------------------------------------------------------------------------


def test_all_images_in_memory_are_a_labelled_data_set(tmp_path: Path) -> None:
    for k, name in enumerate(["a/1.png", "b/1.png", "b/2.png"]):
        save(tmp_path / name, noise(8, 6, 3, seed=k))
    folder = ImageFolder(tmp_path, mode="RGB")
    data = folder.images()
    assert data.images.shape == (3, 3, 8, 6)
    assert data.class_names == folder.class_names
    for i in range(3):
        assert torch.equal(data.images[i], folder[i][0])
    images, labels = data.tensors
    assert torch.equal(images, data.images / 255)
    assert labels.tolist() == [0, 1, 1]


def test_images_of_different_sizes_are_refused_in_memory_unless_they_are_resized(tmp_path: Path) -> None:
    save(tmp_path / "a" / "1.png", noise(8, 6))
    save(tmp_path / "b" / "2.png", noise(6, 8))
    message = r"must have the same size\. Got .*/a/1.png of 8x6 and .*/b/2.png of 6x8 pixels. Try .*size=\(8, 6\)"
    with pytest.raises(ValueError, match=message):
        ImageFolder(tmp_path).images()
    resized = ImageFolder(tmp_path, mode="RGB", size=(5, 4))
    images = resized.images().images
    assert images.shape == (2, 3, 5, 4)
    assert torch.equal(pickle.loads(pickle.dumps(resized)).images().images, images)  # as it is sent to a worker


@pytest.mark.covers("A3")
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
    with pytest.raises(ValueError, match=r"with a sum of 1\. Leave out the last one"):
        folder.split(0.9, 0.1)


def read_by_workers(folder: Path) -> tuple[list[tuple[int, int]], tuple[str, str, float]]:
    """The values and labels that this rank reads, with a sum after each mini-batch, and the error."""
    found: list[tuple[int, int]] = []

    def work() -> None:
        with dl.join_world() as world:
            # A rank is a spawned process, whose workers would be spawned, too, and import torch: 3 s on two cores.
            options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
            for loaded in dl.Batches(ImageFolder(folder), 4, world, **options).epoch(1):
                if loaded.mini_batch.shards:
                    images, labels = loaded.data(0)
                    found.extend(zip(images[:, 0, 0, 0].tolist(), labels.tolist(), strict=True))
                world.sum(torch.ones(()))

    return found, caught(work)


@pytest.mark.covers("D10")
def test_workers_of_two_ranks_read_each_image_once_and_a_corrupt_one_ends_both_and_is_named(
    tmp_path: Path, on_ranks: OnRanks
) -> None:
    results = on_ranks(2, read_by_workers, numbered_folder(tmp_path, 6, 5))
    assert [raised[:2] for _, raised in results] == [("", "")] * 2
    assert sorted(pair for found, _ in results for pair in found) == [(k, int(k > 5)) for k in range(11)]
    assert {len(found) for found, _ in results} == {5, 6}
    corrupt = tmp_path / "b" / "003.png"
    corrupt.write_bytes(corrupt.read_bytes()[:-20])
    ends = [raised for _, raised in on_ranks(2, read_by_workers, tmp_path)]
    assert sorted(kind for kind, _, _ in ends) == ["PeerFailed", "ValueError"]
    for _, text, took_s in ends:
        assert f"Got {corrupt} (" in text
        assert took_s < FAULT_S
