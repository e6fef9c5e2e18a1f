"""Images in memory: labelled images with a split by class, and pairs of noisy and clean images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
import torch
from torch.nn.functional import interpolate

from ddp_loop.data import Draws, EncodedTensors


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Images in memory, each with the number of its class.

    For example::

        train, test = dl.datasets.LabelledImages(images, labels, ("cat", "dog")).split(0.9)
        batches = dl.Batches(train, 128, world)

    Args:
        images: (N, C, H, W) uint8.
        labels: (N,) int64, positions in `class_names`.
        class_names: one for each class, sorted.
        angles: (N,) float32, the counter-clockwise rotation of each image in degrees; None if unknown.

    Raises:
        ValueError: a tensor has another shape or dtype, the names are not sorted, or a label has no name.
    """

    images: torch.Tensor
    labels: torch.Tensor
    class_names: tuple[str, ...]
    angles: torch.Tensor | None = None

    def __post_init__(self) -> None:
        n = len(self.images)
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            remedy = "images.to(torch.uint8), followed by [:, None] if there is no channel"
            _refuse("images must be uint8 (N, C, H, W)", self.images, remedy)
        if self.labels.dtype != torch.int64 or self.labels.shape != (n,):
            _refuse(f"The labels of {n} images must be int64 ({n},)", self.labels, "labels.long().flatten()")
        if self.angles is not None and (self.angles.dtype != torch.float32 or self.angles.shape != (n,)):
            _refuse(f"The angles of {n} images must be float32 ({n},)", self.angles, "angles.float().flatten()")
        if list(self.class_names) != sorted(set(self.class_names)):
            raise ValueError(
                "class_names must be sorted and unique, so that ranks and runs number them alike. Got "
                f"{self.class_names}. Sort them, and number the labels in that order."
            )
        if n and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.class_names):
            raise ValueError(
                f"labels must be positions in the {len(self.class_names)} class names, from 0. Got "
                f"{int(self.labels.min())} to {int(self.labels.max())}. Name every class, and count from 0."
            )

    def __len__(self) -> int:
        return len(self.images)

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Images (N, C, H, W) float32 in [0, 1], made once, and labels (N,) int64.

        `Batches` gives these rows, but keeps the images as uint8, and makes floats of a shard's images on its device.
        For images as uint8 pass it `(data.images, data.labels)`.
        """
        return _as_floats((self.images, self.labels))

    @property
    def encoded(self) -> EncodedTensors:
        """The data as `Batches` reads them: `images` and `labels`, and how they become rows of `tensors`."""
        return EncodedTensors((self.images, self.labels), _as_floats)

    def one_hot(self) -> torch.Tensor:
        """The labels as one-hot rows, (N, classes) float32."""
        return torch.nn.functional.one_hot(self.labels, len(self.class_names)).float()

    def split(self, *fractions: float, seed: int = 0) -> tuple[LabelledImages, ...]:
        """Split every class by the same fractions, into disjoint parts that together are the whole.

        Of a class with n images, part p gets floor(fractions[p] * n), and the last part gets the rest. The images are
        chosen at random and keep their order. With 1,000 images per class, `split(0.9)` gives 900 and 100, and
        `split(0.95, 0.025)` gives 950, 25 and 25.

        Args:
            fractions: of the parts but the last, each in (0, 1), with a sum below 1.
            seed: of the random choice.

        Returns:
            One set for each fraction, and one for the rest.

        Raises:
            ValueError: there is no fraction, one is outside (0, 1), or their sum is 1 or more.
        """
        found = []
        for part in cut_by_class(self.labels, len(self.class_names), fractions, seed):
            angles = None if self.angles is None else self.angles[part]
            found.append(LabelledImages(self.images[part], self.labels[part], self.class_names, angles))
        return tuple(found)


def _as_floats(rows: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = rows
    # A GPU divides by a number as it multiplies by its inverse, which differs in the last bit.
    return images.float().div_(torch.full((), 255.0, device=images.device)), labels


def cut_by_class(
    labels: torch.Tensor, classes: int, fractions: tuple[float, ...], seed: int
) -> tuple[torch.Tensor, ...]:
    """The parts of `LabelledImages.split` as ascending positions in `labels`, (N,) int64 in 0 .. classes - 1."""
    if not fractions or not all(0 < fraction < 1 for fraction in fractions):
        raise ValueError(
            f"split takes one or more fractions, each above 0 and below 1. Got {fractions}. For example, split(0.9) "
            "gives two parts, nine tenths and the rest."
        )
    # In floats 0.29 * 100 is 28.999999999999996, whose floor is 28.
    shares = [Fraction(fraction).limit_denominator(1_000_000) for fraction in fractions]
    if sum(shares) >= 1:
        raise ValueError(
            "The sum of the fractions must be less than 1, since the last part is the rest. Got "
            f"{fractions} with a sum of {float(sum(shares)):g}. Leave out the last one."
        )
    parts: list[list[torch.Tensor]] = [[] for _ in range(len(shares) + 1)]
    for number in range(classes):
        members = torch.nonzero(labels == number).flatten()
        lots = np.random.default_rng([seed, number]).random(len(members))
        members = members[torch.from_numpy(np.argsort(lots, kind="stable"))]
        sizes = [math.floor(share * len(members)) for share in shares]
        for part, piece in zip(parts, torch.split(members, [*sizes, len(members) - sum(sizes)]), strict=True):
            part.append(piece)
    return tuple(torch.cat(part).sort().values for part in parts)


def _refuse(rule: str, came: torch.Tensor, remedy: str) -> None:
    raise ValueError(f"{rule}. Got {came.dtype} {tuple(came.shape)}. Try {remedy}.")


SIDE = 32  # pixels of a noisy or clean picture


def noisy_pairs(
    images: torch.Tensor, draws: Draws, *, density: float = 0.05, turned: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of a noisy and a clean picture, as a transform for `Batches`::

        batches = dl.Batches(datasets.digits().images, 500, world, transform=datasets.noisy_pairs)

    A random share `density` of the pixels becomes black or white, half of it each ("salt and pepper"). Then both
    pictures of a pair are resized to 32x32 (bicubic, a = -1/2), each is rescaled to [0, 1] by
    (x - min) / (max - min), where a uniform picture becomes 0, and both are rotated by the same random number of
    quarter-turns. The random numbers depend on the sample, not on ranks or workers. For validation without rotation
    pass `functools.partial(noisy_pairs, turned=False)`.

    Source of the bicubic kernel: Keys: Cubic convolution interpolation for digital image processing, 1981.

    Args:
        images: (n, C, H, W) uint8.
        draws: from `Batches`.
        density: the share of pixels to change, in [0, 1].
        turned: whether to rotate the pairs.

    Returns:
        The noisy and the clean pictures, (n, C, 32, 32) float32 each.

    Raises:
        ValueError: `images` has another shape or dtype, or `density` is outside [0, 1].
    """
    if images.dtype != torch.uint8 or images.dim() != 4:
        raise ValueError(
            f"noisy_pairs needs images, uint8 (N, C, H, W). Got {images.dtype} {tuple(images.shape)}. Give Batches the "
            "images only, such as datasets.digits().images."
        )
    if not 0 <= density <= 1:
        raise ValueError(f"density must be a share of the pixels, 0 .. 1. Got {density}.")
    clean = images / 255
    lots = draws.uniform(*images.shape[1:])
    noisy = clean.masked_fill(lots < density, 1.0).masked_fill(lots < density / 2, 0.0)
    # With antialias=True torch's bicubic kernel has a = -1/2, as MATLAB's and pillow's, otherwise -3/4. It changes
    # nothing else where pictures grow.
    pictures = interpolate(torch.cat([noisy, clean]), (SIDE, SIDE), mode="bicubic", antialias=True)
    pictures = _stretched(pictures)
    if turned:
        pictures = _turned(pictures, draws.integers(0, 4).repeat(2))
    return pictures[: len(images)], pictures[len(images) :]


def _stretched(pictures: torch.Tensor) -> torch.Tensor:
    least = pictures.amin((1, 2, 3), keepdim=True)
    most = pictures.amax((1, 2, 3), keepdim=True)
    span = most - least  # about 1e-7, by rounding, for a uniform picture; 1 / 255 for two adjacent greys
    return torch.where(span > 1e-4, (pictures - least) / span, 0.0)


def _turned(pictures: torch.Tensor, quarters: torch.Tensor) -> torch.Tensor:
    """Each picture rotated counter-clockwise by its own number of quarter-turns."""
    quarters = quarters.view(-1, 1, 1, 1)
    pictures = torch.where(quarters % 2 == 1, pictures.rot90(1, (2, 3)), pictures)
    return torch.where(quarters >= 2, pictures.flip(2, 3), pictures)
