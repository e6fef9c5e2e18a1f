"""Digits: drawn from fonts by a seed, with a cache, and scikit-learn's handwriting."""

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
    """Draw 28x28 images of digits from fonts, a tenth of each class, rotated by up to 35 degrees.

    The images depend on `seed`, `size`, `fonts` and the versions of pillow and matplotlib alone; nothing is downloaded.
    Image k shows digit k mod 10, and a smaller set is the start of a larger one. 10,000 images take 1 s on one core.
    For example::

        train, test = dl.datasets.digits(seed=0).split(0.9)

    Args:
        seed: of the drawing, 0 or more.
        size: the number of images N, a multiple of 10.
        fonts: "usual", or "held_out", which has other fonts, or names of matplotlib's own fonts.
        cache: whether to keep the set in memory and in a file, and to read it from there. A file is checked by
            SHA-256 and written again if it is damaged. It is no error if the folder cannot be written to.
        folder: of the cache files.

    Returns:
        LabelledImages: N images (N, 1, 28, 28) uint8, with the rotation of each in degrees as `angles`.

    Raises:
        ImportError: pillow or matplotlib is missing.
        ValueError: `size` is not a multiple of 10, `seed` is negative, or a font is unknown or has no digits.
    """
    if size < 10 or size % 10:
        raise ValueError(
            f"size must be a multiple of 10, a tenth for each digit. Got {size}. Try {10 * (size // 10 + 1)}."
        )
    if seed < 0:
        raise ValueError(f"seed must not be negative. Got {seed}. Try {-seed}.")
    known: dict[str, Sequence[str]] = {"usual": drawing.FONTS, "held_out": drawing.HELD_OUT_FONTS}
    names = known.get(fonts) if isinstance(fonts, str) else fonts
    if not names:
        raise ValueError(f'fonts must be "usual", "held_out" or a list of names. Got {fonts!r}. Try ["DejaVuSans"].')
    drawn = _kept(seed, size, tuple(names), os.fspath(folder)) if cache else _draw(seed, size, tuple(names))
    # Copies, in 1 ms: a change in place must not reach later callers.
    return LabelledImages(class_names=DIGIT_NAMES, **{name: one.clone() for name, one in drawn.items()})


def _draw(seed: int, size: int, fonts: tuple[str, ...]) -> dict[str, torch.Tensor]:
    images, labels, angles = map(torch.from_numpy, drawing.draw_digits(seed, size, fonts))
    return {"images": images[:, None], "labels": labels, "angles": angles}


@lru_cache(maxsize=4)
def _kept(seed: int, size: int, fonts: tuple[str, ...], folder: str) -> dict[str, torch.Tensor]:
    """The set from the cache file, or drawn and written to it."""
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
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None
    # The file starts with a digest: safetensors alone accepted 299 of 300 files with one flipped bit.
    whole = hashlib.sha256(content[32:]).digest() == content[:32]
    return load(content[32:]) if whole else None


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a file that other processes see whole or not at all; do nothing if the folder cannot be written to."""
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
    """The 1,797 handwritten digits of scikit-learn as 28x28 images; nothing is downloaded.

    The originals are 8x8 with values from 0 to 16. They are enlarged by bilinear interpolation between the centres of
    the pixels (the outermost values continue to the edge) and scaled by 255 / 16, in integers, so that every machine
    gives the same bytes.

    Returns:
        LabelledImages: images (1797, 1, 28, 28) uint8, without angles.

    Raises:
        ImportError: scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            'The handwritten digits need scikit-learn, which is missing. Run pip install "ddp_loop[handwritten]".'
        ) from error
    found = load_digits()
    weights = _bilinear_weights()
    sums = weights @ found.images.astype(np.int64) @ weights.T  # 16 * 14 * 14 is white, 255
    images = torch.from_numpy((sums * 255 + 1568) // 3136).to(torch.uint8)[:, None]
    labels = torch.from_numpy(found.target.astype(np.int64))
    return LabelledImages(images, labels, DIGIT_NAMES)


def _bilinear_weights() -> npt.NDArray[np.int64]:
    """(28, 8), with row sums of 14: pixel i of 28 is at (i + 1/2) 8/28 - 1/2 = (4 i - 5) / 14 of the 8 pixels."""
    i = np.arange(28)
    left, parts = np.divmod(4 * i - 5, 14)
    weights = np.zeros((28, 8), dtype=np.int64)
    weights[i, left.clip(0, 7)] += 14 - parts
    weights[i, (left + 1).clip(0, 7)] += parts
    return weights
