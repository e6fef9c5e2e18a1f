"""Labelled images in a folder for each class."""

from __future__ import annotations

import copy
import os
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from ddp_loop.datasets.images import LabelledImages, cut_by_class

# A fixed list, not what the pillow of a machine happens to read: all machines must number the images alike.
SUFFIXES = (
    *(".avif", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tga"),
    *(".tif", ".tiff", ".webp"),
)
CHANNELS = {"L": 1, "RGB": 3}
_DEEP = ("I", "F")  # how pillow's modes of more than 8 bits begin; convert("L") makes 255 of all above it


class ImageFolder:
    """The images below a folder, its sub-folders the class names; a data set that decodes when it is read.

    Sample i is (image (C, H, W) uint8, label int): upright as its EXIF orientation says, without
    transparency, of several frames the first. `images()` reads all into memory, as floats for `Batches`.

    Images lie in a class's folder or anywhere below it. They are numbered by class name, then by path, so alike
    on every machine. Names that begin with a dot are left out, and so are files with none of the suffixes
    `SUFFIXES`, in capitals or not. An image beside the class folders has no class, and is refused.

    Args:
        folder: of the class folders.
        mode: "L" for grey, C = 1; "RGB" for colour, C = 3.
        size: (H, W) in pixels to which every image is resized, bilinearly; by default each keeps its own.

    Attributes:
        class_names: sorted.
        labels: (N,) int64, positions in `class_names`.
        paths: the N files.

    Raises:
        ImportError: pillow is missing.
        ValueError: a folder that is not there or cannot be read, without a class, with a class without images,
            or with images beside the classes; another mode or size. When an image is read: a file that cannot be,
            is no image, is damaged or cut short, or has more than 8 bits a channel. A JPEG has no checksum, so
            not every flipped bit in it is found.
    """

    def __init__(self, folder: str | os.PathLike[str], *, mode: str = "L", size: tuple[int, int] | None = None) -> None:
        _check_form(mode, size)
        _require_pillow()
        self.mode, self.size = mode, size
        files = _images_of_classes(Path(folder))
        self.class_names = tuple(files)
        self.paths = tuple(path for paths in files.values() for path in paths)
        self.labels = torch.repeat_interleave(
            torch.arange(len(files)), torch.tensor([len(paths) for paths in files.values()])
        )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return _decode(self.paths[i], self.mode, self.size), int(self.labels[i])

    def images(self) -> LabelledImages:
        """All images, read into memory.

        Raises:
            ValueError: two images of different sizes, or one that cannot be read.
        """
        height, width = self.size or (self[0][0].shape[1:] if len(self) else (0, 0))
        images = torch.empty((len(self), CHANNELS[self.mode], height, width), dtype=torch.uint8)
        for i, path in enumerate(self.paths):
            image, _ = self[i]
            if image.shape != images.shape[1:]:
                raise ValueError(
                    f"images in memory must have one size; got {self.paths[0]} of {height}x{width} and {path} of "
                    f"{image.shape[1]}x{image.shape[2]} pixels: try ImageFolder(..., size=({height}, {width}))"
                )
            images[i] = image
        return LabelledImages(images, self.labels, self.class_names)

    def split(self, *fractions: float, seed: int = 0) -> tuple[ImageFolder, ...]:
        """Cut every class alike, as `LabelledImages.split` does; nothing is read.

        Raises:
            ValueError: no fraction, one outside (0, 1), or fractions that leave nothing for the last part.
        """
        parts = cut_by_class(self.labels, len(self.class_names), fractions, seed)
        return tuple(self._part(indices) for indices in parts)

    def _part(self, indices: torch.Tensor) -> ImageFolder:
        part = copy.copy(self)
        part.paths = tuple(self.paths[i] for i in indices.tolist())
        part.labels = self.labels[indices]
        return part


def _check_form(mode: str, size: tuple[int, int] | None) -> None:
    if mode not in CHANNELS:
        raise ValueError(f'mode must be "L" (grey) or "RGB" (colour); got {mode!r}: try mode="RGB"')
    whole = isinstance(size, tuple | list) and len(size) == 2 and all(isinstance(side, int) for side in size)
    if size is not None and not (whole and min(size) > 0):
        raise ValueError(f"size must be (height, width) in pixels, each 1 or more; got {size!r}: try size=(28, 28)")


def _require_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ImportError('images are read by pillow, which is missing: pip install "ddp_loop[digits]"') from error


def _images_of_classes(folder: Path) -> dict[str, list[Path]]:
    """The image files of each class, both sorted."""
    classes, beside = _listed(folder)
    if beside:
        raise ValueError(
            f"images must lie in a sub-folder that names their class; got {len(beside)} beside the class folders, as "
            f"{min(beside)}: move them into one, or out of {folder}"
        )
    if not classes:
        raise ValueError(
            f"a folder of images must have a sub-folder for each class; got {folder} without one: make "
            f"{folder / 'cat'} and {folder / 'dog'}, say, with the images in them"
        )
    found = {path.name: sorted(_images_below(path), key=Path.as_posix) for path in sorted(classes, key=Path.as_posix)}
    for name, paths in found.items():
        if not paths:
            raise ValueError(
                f"every class must have an image; got {folder / name} without one that ends in {', '.join(SUFFIXES)}: "
                "put images there, or remove the folder"
            )
    return found


def _images_below(folder: Path, above: tuple[str, ...] = ()) -> list[Path]:
    real = os.path.realpath(folder)
    if real in above:
        raise ValueError(f"folders of images must come to an end; got {folder}, a link up to {real}: remove the link")
    folders, images = _listed(folder)
    return [*images, *(path for deeper in folders for path in _images_below(deeper, (*above, real)))]


def _listed(folder: Path) -> tuple[list[Path], list[Path]]:
    """The sub-folders and the images of a folder, links followed, in no order."""
    folders, images = [], []
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
            f"a folder of images must be one that can be read; got {error.filename or folder}: {error.strerror}: look "
            "at its name and its permissions"
        ) from error
    return folders, images


def _decode(path: Path, mode: str, size: tuple[int, int] | None) -> torch.Tensor:
    """An image, (C, H, W) uint8."""
    from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise ValueError(
            "what is missing of an image must not be made up; got PIL.ImageFile.LOAD_TRUNCATED_IMAGES = True, which "
            f"would make it grey, before {path} was read: leave it False"
        )
    try:
        if not path.is_file():  # a pipe has no end
            raise OSError("no file, or a link to none")
        content = path.read_bytes()
        with Image.open(BytesIO(content)) as opened:
            opened.verify()  # a PNG's checksums and its end, which reading the pixels leaves out; it takes 25 us
        # Not from the file: pillow 13.0 maps a plain TIFF into memory as if it were turned already: rows mixed up.
        with Image.open(BytesIO(content)) as opened:
            if opened.mode.startswith(_DEEP):
                raise TypeError(f"its mode {opened.mode} has more than 8 bits a channel, to be scaled to 0 .. 255")
            image = ImageOps.exif_transpose(opened)
            if "transparency" in image.info:  # of a palette it can be of a kind that pillow warns of
                image = image.convert("RGBA")
            image = image.convert(mode)
    except MemoryError:
        raise
    except Exception as error:  # each of pillow's formats has errors of its own: SyntaxError, struct.error, ...
        reason = "no image that pillow knows" if isinstance(error, UnidentifiedImageError) else error
        raise ValueError(
            f"every image must be a whole file of 8 bits a channel that pillow can read; got {path}: {reason}: get it "
            "anew, or remove it"
        ) from error
    if size is not None:
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image))
    return pixels[None] if mode == "L" else pixels.permute(2, 0, 1).contiguous()
