"""Images that a script logs: as 8-bit pixels, and as PNG files without a library."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import torch

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
MOST_PIXELS = 1 << 26  # of an image, 8192 x 8192


def as_pixels(name: str, image: Any) -> Pixels:
    """Return an image as 8-bit pixels, shape (height, width, 3).

    Args:
        name: of the image, for messages.
        image: a tensor, an array or a picture of Pillow, of shape (height, width), (height, width, 1), (.., 3),
            (.., 4), (1, height, width) or (3, height, width), which is taken for channels first if it may be both;
            whole numbers of 0 .. 255, or fractions of 0 .. 1, of which others are clipped and NaN is 0. The fourth
            channel, transparency, is drawn over white.

    Raises:
        ValueError: another shape, or too many pixels.
    """
    values = image
    if isinstance(image, torch.Tensor):
        values = image.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
    try:
        array = np.asarray(values)
    except Exception:
        array = np.empty((), dtype=object)
    if array.dtype.kind not in "buif":
        raise _bad(name, f"{type(image).__name__} of {array.dtype}")
    leads = array.ndim == 3 and array.shape[0] in (1, 3)
    if leads and (isinstance(image, torch.Tensor) or array.shape[2] not in (1, 3, 4)):
        array = np.moveaxis(array, 0, 2)
    array = array[:, :, None] if array.ndim == 2 else array
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        raise _bad(name, f"shape {tuple(np.shape(values))}")
    if array.shape[0] * array.shape[1] > MOST_PIXELS:
        raise _bad(name, f"{array.shape[0]} x {array.shape[1]} pixels")
    array = _bytes(array)
    if array.shape[2] == 4:
        color = array[:, :, :3].astype(np.float32)
        share = array[:, :, 3:].astype(np.float32) / 255
        array = np.rint(color * share + 255 * (1 - share)).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)))


def _bad(name: str, what: str) -> ValueError:
    return ValueError(
        "An image has shape (height, width), (height, width, 1, 3 or 4) or (1 or 3, height, width), and "
        f"{MOST_PIXELS:,} pixels at most. Got {what} for {name!r}. Pass one image, of bytes or of fractions of 0 .. 1."
    )


def _bytes(array: np.ndarray[Any, Any]) -> Pixels:
    scaled: np.ndarray[Any, Any] = np.clip(array, 0, 255)
    if array.dtype.kind == "b":
        scaled = np.multiply(array, 255, dtype=np.uint8)
    elif array.dtype.kind == "f":
        finite = np.nan_to_num(array.astype(np.float32))
        scaled = np.rint(np.clip(finite, 0, 1) * 255)
    return scaled.astype(np.uint8)


def png(pixels: Pixels) -> bytes:
    """Return an image of shape (height, width, 3) as a PNG file: https://www.w3.org/TR/png-3/."""
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # each line starts with its filter: none
    lines[:, 1:] = pixels.reshape(height, 3 * width)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, red green blue
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
