"""Images with class labels, as pure functions of a seed: drawn digits, and real handwriting."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ddp_loop import drawing

DIGIT_NAMES = tuple("0123456789")


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Images with the number of a class each.

    Args:
        images: (N, 1, H, W) uint8.
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
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or self.images.shape[1] != 1:
            _refuse("images must be uint8 (N, 1, H, W)", self.images, "images.to(torch.uint8)[:, None]")
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
        """(images (N, 1, H, W) float32 in [0, 1], labels (N,) int64), made once; what `Batches` reads."""
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
        for number in range(len(self.class_names)):
            members = torch.nonzero(self.labels == number).flatten()
            lots = np.random.default_rng([seed, number]).random(len(members))
            members = members[torch.from_numpy(np.argsort(lots, kind="stable"))]
            sizes = [math.floor(share * len(members)) for share in shares]
            for part, piece in zip(parts, torch.split(members, [*sizes, len(members) - sum(sizes)]), strict=True):
                part.append(piece)
        return tuple(self._part(torch.cat(part).sort().values) for part in parts)

    def _part(self, indices: torch.Tensor) -> LabelledImages:
        angles = None if self.angles is None else self.angles[indices]
        return LabelledImages(self.images[indices], self.labels[indices], self.class_names, angles)


def _refuse(rule: str, came: torch.Tensor, remedy: str) -> None:
    raise ValueError(f"{rule}; got {came.dtype} {tuple(came.shape)}: try {remedy}")


# -- drawn digits ------------------------------------------------------------------------------------------


def digits(
    seed: int = 0,
    size: int = 10_000,
    fonts: str | Sequence[str] = "usual",
    *,
    cache: bool = True,
    folder: str | os.PathLike[str] = "~/.cache/ddp_loop",
) -> LabelledImages:
    """Draw `size` digits from fonts, a tenth of each class, 28x28, turned by up to 35 degrees either way.

    A pure function of `seed`, `size`, `fonts` and the versions of pillow and matplotlib; no download. Image k
    shows digit k mod 10, and a smaller set is the beginning of a larger one. 10,000 take 1 s on one core.

    Args:
        fonts: "usual"; "held_out", which has none of the usual ones; or names of matplotlib's own fonts.
        cache: keep the set in memory and in a file, and take it from there. What a file holds is checked
            (SHA-256); one that is damaged is made anew, and a folder that cannot be written to is no error.
        folder: of the cache's files.

    Raises:
        ImportError: pillow or matplotlib is missing.
        ValueError: a size that ten does not divide, a negative seed, or a font without digits.
    """
    if size < 10 or size % 10:
        raise ValueError(
            f"size must be a multiple of 10, a tenth for each digit; got {size}: try {10 * (size // 10 + 1)}"
        )
    if seed < 0:
        raise ValueError(f"seed must not be negative; got {seed}: try {-seed}")
    known: dict[str, Sequence[str]] = {"usual": drawing.FONTS, "held_out": drawing.HELD_OUT_FONTS}
    names = known.get(fonts) if isinstance(fonts, str) else fonts
    if not names:
        raise ValueError(f'fonts must be "usual", "held_out" or a sequence of names; got {fonts!r}: try ["DejaVuSans"]')
    drawn = _kept(seed, size, tuple(names), os.fspath(folder)) if cache else _draw(seed, size, tuple(names))
    # Copies, so that a change in place does not reach those who ask later: 1 ms.
    images, labels, angles = (drawn[name].clone() for name in ("images", "labels", "angles"))
    return LabelledImages(images, labels, DIGIT_NAMES, angles)


def _draw(seed: int, size: int, fonts: tuple[str, ...]) -> dict[str, torch.Tensor]:
    images, labels, angles = map(torch.from_numpy, drawing.draw_digits(seed, size, fonts))
    return {"images": images[:, None], "labels": labels, "angles": angles}


@lru_cache(maxsize=4)
def _kept(seed: int, size: int, fonts: tuple[str, ...], folder: str) -> dict[str, torch.Tensor]:
    """The drawn set from the cache's file, or drawn and written there."""
    key = repr((drawing.VERSION, seed, size, fonts, drawing.library_versions()))
    name = f"digits-{seed}-{size}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    path = Path(folder) / name
    tensors = _read(path)
    if tensors is None:
        tensors = _draw(seed, size, fonts)
        _write(path, tensors)
    return tensors


def _read(path: Path) -> dict[str, torch.Tensor] | None:
    from safetensors.torch import load

    try:
        content = path.expanduser().read_bytes()
    except (OSError, RuntimeError):  # the latter: no home folder
        return None
    # A digest in front: safetensors alone took 299 of 300 files with one flipped bit for whole ones.
    whole = hashlib.sha256(content[32:]).digest() == content[:32]
    return load(content[32:]) if whole else None


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a file that other processes see whole or not at all; do nothing where that is not possible."""
    from safetensors.torch import save

    payload = save(tensors)
    with suppress(OSError, RuntimeError):
        path = path.expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.name}-") as own:
            file = Path(own) / path.name
            file.write_bytes(hashlib.sha256(payload).digest() + payload)
            os.replace(file, path)


# -- real handwriting --------------------------------------------------------------------------------------


def handwritten() -> LabelledImages:
    """The 1,797 handwritten digits that scikit-learn brings along, as 28x28 images; no download.

    They are 8x8 with values from 0 to 16, made 28x28 by bilinear interpolation between the middles of the
    pixels (the outermost values continue to the edge) and scaled by 255 / 16. In whole numbers, so that every
    machine gives the same bytes.

    Raises:
        ImportError: scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            'the handwritten digits come from scikit-learn, which is missing: pip install "ddp_loop[handwritten]"'
        ) from error
    found = load_digits()
    weights = _bilinear_weights()
    sums = weights @ found.images.astype(np.int64) @ weights.T  # 16 * 14 * 14 stands for 255
    images = torch.from_numpy((sums * 255 + 1568) // 3136).to(torch.uint8)[:, None]
    labels = torch.from_numpy(found.target.astype(np.int64))
    return LabelledImages(images, labels, DIGIT_NAMES)


def _bilinear_weights() -> npt.NDArray[np.int64]:
    """(28, 8), rows of sum 14: pixel i of 28 lies at (i + 1/2) 8/28 - 1/2 = (4 i - 5) / 14 among the 8."""
    i = np.arange(28)
    left, parts = np.divmod(4 * i - 5, 14)
    weights = np.zeros((28, 8), dtype=np.int64)
    weights[i, left.clip(0, 7)] += 14 - parts
    weights[i, (left + 1).clip(0, 7)] += parts
    return weights
