"""Images in memory: labelled ones, cut class by class, and noisy ones beside the clean ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
import torch
from torch.nn.functional import interpolate

from ddp_loop.data import Draws


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Images with the number of a class each.

    Args:
        images: (N, C, H, W) uint8.
        labels: (N,) int64, positions in `class_names`.
        class_names: sorted; their number is the number of classes.
        angles: (N,) float32, degrees that each image is turned counter-clockwise, or None if not known.

    Raises:
        ValueError: shapes or types other than these, names that are not sorted, a label without a name.
    """

    images: torch.Tensor
    labels: torch.Tensor
    class_names: tuple[str, ...]
    angles: torch.Tensor | None = None

    def __post_init__(self) -> None:
        n = len(self.images)
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            remedy = "images.to(torch.uint8), with [:, None] behind it where there is no channel"
            _refuse("images must be uint8 (N, C, H, W)", self.images, remedy)
        if self.labels.dtype != torch.int64 or self.labels.shape != (n,):
            _refuse(f"the labels of {n} images must be int64 ({n},)", self.labels, "labels.long().flatten()")
        if self.angles is not None and (self.angles.dtype != torch.float32 or self.angles.shape != (n,)):
            _refuse(f"the angles of {n} images must be float32 ({n},)", self.angles, "angles.float().flatten()")
        if list(self.class_names) != sorted(set(self.class_names)):
            raise ValueError(
                f"class names must be sorted, each there once, for ranks and runs to number them alike; got "
                f"{self.class_names}: sort them and number the labels by that order"
            )
        if n and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.class_names):
            raise ValueError(
                f"labels are positions in the {len(self.class_names)} class names, from 0; got "
                f"{int(self.labels.min())} to {int(self.labels.max())}: name every class, number them from 0"
            )

    def __len__(self) -> int:
        return len(self.images)

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(images (N, C, H, W) float32 in [0, 1], labels (N,) int64), made once; what `Batches` reads."""
        return self.images / 255, self.labels

    def one_hot(self) -> torch.Tensor:
        """The labels as rows with a single 1: (N, classes) float32."""
        return torch.nn.functional.one_hot(self.labels, len(self.class_names)).float()

    def split(self, *fractions: float, seed: int = 0) -> tuple[LabelledImages, ...]:
        """Cut every class alike: part p gets floor(fractions[p] * n) of n, and one more part what is left.

        Which ones is drawn by lot from `seed`; inside a part they keep their order. The parts are disjoint,
        and together they are the whole. Of 1,000 a class `split(0.9)` gives 900 and 100, and
        `split(0.95, 0.025)` gives 950, 25 and 25.

        Raises:
            ValueError: no fraction, one outside (0, 1), or fractions that leave nothing for the last part.
        """
        parts = cut_by_class(self.labels, len(self.class_names), fractions, seed)
        return tuple(self._part(indices) for indices in parts)

    def _part(self, indices: torch.Tensor) -> LabelledImages:
        angles = None if self.angles is None else self.angles[indices]
        return LabelledImages(self.images[indices], self.labels[indices], self.class_names, angles)


def cut_by_class(
    labels: torch.Tensor, classes: int, fractions: tuple[float, ...], seed: int
) -> tuple[torch.Tensor, ...]:
    """The parts of a split as positions in `labels`, int64 and rising: one for each fraction, and what is left.

    Args:
        labels: (N,) int64, 0 .. classes-1.

    Raises:
        ValueError: no fraction, one outside (0, 1), or fractions that leave nothing for the last part.
    """
    if not fractions or not all(0 < fraction < 1 for fraction in fractions):
        raise ValueError(
            f"split takes one fraction or more, each above 0 and below 1; got {fractions}: "
            "split(0.9) gives two parts, nine tenths and the rest"
        )
    # As floats 0.29 * 100 is 28.999999999999996, a floor of 28.
    shares = [Fraction(fraction).limit_denominator(1_000_000) for fraction in fractions]
    if sum(shares) >= 1:
        raise ValueError(
            "the fractions of split must add to less than 1, as the last part is what is left; got "
            f"{fractions}, together {float(sum(shares)):g}: leave the last one out"
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
    raise ValueError(f"{rule}; got {came.dtype} {tuple(came.shape)}: try {remedy}")


SIDE = 32  # pixels of a picture that comes out


def noisy_pairs(
    images: torch.Tensor, draws: Draws, *, density: float = 0.05, turned: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of a noisy and a clean picture, for `Batches(images, ..., transform=noisy_pairs)`.

    A share `density` of the pixels, by lot, is black or white, half of them each ("salt and pepper"). Then both of a
    pair are resized to 32x32 (bicubic, a = -1/2), each is stretched over [0, 1], x -> (x - min) / (max - min), one of a
    single grey becoming 0, and both make the same 0, 1, 2 or 3 quarter-turns. What is drawn follows the sample,
    on any number of ranks and workers; in validation, `functools.partial(noisy_pairs, turned=False)`, it is the same
    each time.

    Args:
        images: (n, C, H, W) uint8.
        draws: as `Batches` gives them.
        density: share of the pixels that are changed, 0 .. 1.
        turned: whether to turn them.

    Returns:
        Noisy and clean, (n, C, 32, 32) float32 each.

    Raises:
        ValueError: images of another kind, or a density that is no share.
    """
    if images.dtype != torch.uint8 or images.dim() != 4:
        raise ValueError(
            f"noisy pairs are made of images, uint8 (N, C, H, W); got {images.dtype} {tuple(images.shape)}: give "
            "Batches the images alone, such as datasets.digits().images"
        )
    if not 0 <= density <= 1:
        raise ValueError(f"density is the share of the pixels that are changed, 0 .. 1; got {density}")
    clean = images / 255
    pictures = _stretched(_resized(torch.cat([_salted(clean, draws, density), clean])))
    if turned:
        pictures = _turned(pictures, draws.integers(0, 4).repeat(2))
    return pictures[: len(images)], pictures[len(images) :]


def _salted(images: torch.Tensor, draws: Draws, density: float) -> torch.Tensor:
    lots = draws.uniform(*images.shape[1:])
    return images.masked_fill(lots < density, 1.0).masked_fill(lots < density / 2, 0.0)


def _resized(pictures: torch.Tensor) -> torch.Tensor:
    # With antialias=True torch's cubic has a = -1/2, MATLAB's and pillow's, without it -3/4; where pictures grow it
    # changes nothing else.
    return interpolate(pictures, (SIDE, SIDE), mode="bicubic", antialias=True)


def _stretched(pictures: torch.Tensor) -> torch.Tensor:
    least, most = pictures.amin((1, 2, 3), keepdim=True), pictures.amax((1, 2, 3), keepdim=True)
    span = most - least  # of a single grey about 1e-7, by rounding; of two neighbouring greys 1 / 255
    return torch.where(span > 1e-4, (pictures - least) / span, 0.0)


def _turned(pictures: torch.Tensor, quarters: torch.Tensor) -> torch.Tensor:
    """Each picture turned by its own number of quarters, counter-clockwise."""
    quarters = quarters.view(-1, 1, 1, 1)
    pictures = torch.where(quarters % 2 == 1, pictures.rot90(1, (2, 3)), pictures)
    return torch.where(quarters >= 2, pictures.flip(2, 3), pictures)
