"""Labelled images in one folder per class."""

from __future__ import annotations

import copy
import os
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from ddp_loop.datasets.images import LabelledImages, cut_by_class

# A fixed list, not the formats of a machine's pillow, so that all machines number the images alike.
SUFFIXES = (
    *(".avif", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tga"),
    *(".tif", ".tiff", ".webp"),
)
CHANNELS = {"L": 1, "RGB": 3}
_DEEP = ("I", "F")  # first letters of pillow's modes with more than 8 bits; convert("L") clips them to 255


class ImageFolder:
    """A data set of the images in a folder with one sub-folder per class; an image is decoded when it is read.

    Sample i is (image (C, H, W) uint8, label int). The image is rotated by its EXIF orientation, has no transparency,
    and is the first frame of several. `images()` reads all images into memory, for `Batches`.

    Images may be in a class folder or anywhere below it. They are numbered by class name, then by path, so alike on
    every machine. Names that begin with a dot, and files without one of the `SUFFIXES` (in any case), are ignored. An
    image beside the class folders is an error. For example::

        train, test = dl.datasets.ImageFolder("flowers", mode="RGB", size=(64, 64)).split(0.9)
        batches = dl.Batches(train, 128, world, num_workers=4)

    Args:
        folder: of the class folders.
        mode: "L" for grey, C = 1; "RGB" for colour, C = 3.
        size: (H, W) in pixels, to which every image is resized bilinearly. The default keeps each image's size.

    Attributes:
        class_names: the names of the sub-folders, sorted.
        labels: (N,) int64, positions in `class_names`.
        paths: the N files.

    Raises:
        ImportError: pillow is missing.
        ValueError: the folder does not exist, cannot be read, has no class folder, a class folder without images, or
            images beside the class folders; or `mode` or `size` is invalid. When an image is read: the file cannot be
            read, is not an image, is damaged or truncated, or has more than 8 bits per channel. A JPEG has no
            checksum, so a flipped bit in it may go unnoticed.
    """

    def __init__(self, folder: str | os.PathLike[str], *, mode: str = "L", size: tuple[int, int] | None = None) -> None:
        _check_form(mode, size)
        try:
            import PIL.Image  # noqa: F401
        except ImportError as error:
            raise ImportError(
                'ImageFolder needs pillow, which is missing. Run pip install "ddp_loop[digits]".'
            ) from error
        self.mode = mode
        self.size = size
        files = _images_of_classes(Path(folder))
        self.class_names = tuple(files)
        self.paths = tuple(path for paths in files.values() for path in paths)
        labels = [number for number, paths in enumerate(files.values()) for _ in paths]
        self.labels = torch.tensor(labels, device="cpu")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return _decode(self.paths[i], self.mode, self.size), int(self.labels[i])

    def images(self) -> LabelledImages:
        """Read all images into memory.

        Returns:
            LabelledImages: images (N, C, H, W) uint8.

        Raises:
            ValueError: two images have different sizes, or one cannot be read.
        """
        height, width = self.size or (self[0][0].shape[1:] if len(self) else (0, 0))
        images = torch.empty((len(self), CHANNELS[self.mode], height, width), dtype=torch.uint8, device="cpu")
        for i, path in enumerate(self.paths):
            image, _ = self[i]
            if image.shape != images.shape[1:]:
                raise ValueError(
                    f"Images in memory must have the same size. Got {self.paths[0]} of {height}x{width} and {path} of "
                    f"{image.shape[1]}x{image.shape[2]} pixels. Try ImageFolder(..., size=({height}, {width}))."
                )
            images[i] = image
        return LabelledImages(images, self.labels, self.class_names)

    def split(self, *fractions: float, seed: int = 0) -> tuple[ImageFolder, ...]:
        """Split every class by the same fractions, as `LabelledImages.split` does; no image is read.

        Args:
            fractions: of the parts but the last, each in (0, 1), with a sum below 1.
            seed: of the random choice.

        Returns:
            One data set for each fraction, and one for the rest.

        Raises:
            ValueError: there is no fraction, one is outside (0, 1), or their sum is 1 or more.
        """
        found = []
        for indices in cut_by_class(self.labels, len(self.class_names), fractions, seed):
            part = copy.copy(self)
            part.paths = tuple(self.paths[i] for i in indices.tolist())
            part.labels = self.labels[indices]
            found.append(part)
        return tuple(found)


def _check_form(mode: str, size: tuple[int, int] | None) -> None:
    if mode not in CHANNELS:
        raise ValueError(f'mode must be "L" (grey) or "RGB" (colour). Got {mode!r}. Try mode="RGB".')
    pair = isinstance(size, tuple | list) and len(size) == 2
    if size is not None and not (pair and all(isinstance(side, int | np.integer) and side > 0 for side in size)):
        raise ValueError(f"size must be (height, width) in pixels, each 1 or more. Got {size!r}. Try size=(28, 28).")


def _images_of_classes(folder: Path) -> dict[str, list[Path]]:
    """The image files of each class, both sorted."""
    classes, beside = _listed(folder)
    if beside:
        raise ValueError(
            f"Images must be in sub-folders that name their class. Got {len(beside)} beside the class folders, such as "
            f"{min(beside)}. Move them into a class folder, or out of {folder}."
        )
    if not classes:
        raise ValueError(
            f"A folder of images must have a sub-folder for each class. {folder} has none. Put the images into, for "
            f"example, {folder / 'cat'} and {folder / 'dog'}."
        )
    found = {path.name: sorted(_images_below(path), key=Path.as_posix) for path in sorted(classes, key=Path.as_posix)}
    for name, paths in found.items():
        if not paths:
            raise ValueError(
                f"Every class must have an image. {folder / name} has no file that ends in {', '.join(SUFFIXES)}. Add "
                "images, or remove the folder."
            )
    return found


def _images_below(folder: Path, above: tuple[str, ...] = ()) -> list[Path]:
    real = os.path.realpath(folder)
    if real in above:
        raise ValueError(f"Folders of images must not form a cycle. {folder} is a link up to {real}. Remove the link.")
    folders, images = _listed(folder)
    return [*images, *(path for deeper in folders for path in _images_below(deeper, (*above, real)))]


def _listed(folder: Path) -> tuple[list[Path], list[Path]]:
    """The sub-folders and the images of a folder, in no order; links are followed."""
    folders = []
    images = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    folders.append(Path(entry.path))
                elif entry.name.lower().endswith(SUFFIXES):
                    images.append(Path(entry.path))
    except OSError as error:
        raise ValueError(
            f"A folder of images must be readable. Got {error.filename or folder} ({error.strerror}). Check its name "
            "and permissions."
        ) from error
    return folders, images


def _decode(path: Path, mode: str, size: tuple[int, int] | None) -> torch.Tensor:
    """An image, (C, H, W) uint8."""
    from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise ValueError(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES must be False, since pillow fills missing pixels with grey. Got True "
            f"when {path} was read. Set it to False."
        )
    try:
        if not path.is_file():  # a pipe has no end
            raise OSError("not a file, or a broken link")
        content = path.read_bytes()
        with Image.open(BytesIO(content)) as opened:
            opened.verify()  # in 25 us: a PNG's checksums and its end, which reading the pixels does not check
        # Not from the file: pillow 13.0 maps a plain TIFF into memory as if it were rotated already, and mixes up rows.
        with Image.open(BytesIO(content)) as opened:
            if opened.mode.startswith(_DEEP):
                raise TypeError(f"its mode {opened.mode} has more than 8 bits per channel; scale it to 0 .. 255")
            image = ImageOps.exif_transpose(opened)
            if "transparency" in image.info:  # pillow warns of some kinds in a palette
                image = image.convert("RGBA")
            image = image.convert(mode)
    except MemoryError:
        raise
    except Exception as error:  # pillow's formats have their own errors: SyntaxError, struct.error, ...
        reason = "not an image that pillow knows" if isinstance(error, UnidentifiedImageError) else error
        raise ValueError(
            f"An image must be a complete file with 8 bits per channel that pillow can read. Got {path} ({reason}). "
            "Replace the file or remove it."
        ) from error
    if size is not None:
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image))
    return pixels[None] if mode == "L" else pixels.permute(2, 0, 1).contiguous()
