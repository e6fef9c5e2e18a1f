"""Labelled images from every source: digits drawn from a seed, real handwriting, and what is stored in files."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ddp_loop.datasets import drawing
from ddp_loop.datasets.images import LabelledImages

DIGIT_NAMES = tuple("0123456789")

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
