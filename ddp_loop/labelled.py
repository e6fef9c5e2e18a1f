"""Images with the number of a class each, in memory, and the cut of a set class by class."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
import torch


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
