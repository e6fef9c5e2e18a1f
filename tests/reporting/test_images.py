"""Images as 8-bit pixels, and their PNG files as Pillow reads them."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ddp_loop.reporting import as_pixels
from ddp_loop.reporting.images import png

RED, GRAY = [255, 0, 0], [51, 51, 51]


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (np.full((4, 5), 0.2), GRAY),
        (np.full((4, 5, 1), 51, dtype=np.uint8), GRAY),
        (torch.tensor([1, 0, 0], dtype=torch.bfloat16).expand(4, 5, 3), RED),
        (torch.full((1, 4, 5), 0.2, requires_grad=True), GRAY),
        (np.full((4, 5), True), [255] * 3),
        (np.array([[300, -1]]), [[[255] * 3, [0] * 3]]),
        (np.array([[np.inf, np.nan]], dtype=np.float16), [[[255] * 3, [0] * 3]]),
        (np.full((4, 5, 4), [1.0, 0, 0, 0.2]), [255, 204, 204]),
        (Image.new("RGB", (5, 4), (255, 0, 0)), RED),
        (Image.new("L", (5, 4), 51), GRAY),
    ],
)
def test_an_image_becomes_bytes_of_three_channels(image: Any, expected: list[Any]) -> None:
    pixels = as_pixels("one", image)
    assert pixels.dtype == np.uint8
    assert pixels.shape in ((4, 5, 3), (1, 2, 3))
    assert (pixels == expected).all()


def test_channels_first_are_taken_for_channels() -> None:
    image = torch.arange(2 * 3 * 3).reshape(3, 2, 3)
    assert (as_pixels("one", image) == image.permute(1, 2, 0).numpy()).all()
    array = np.arange(3 * 2 * 3).reshape(3, 2, 3)  # of an array the last axis is, where both may be
    assert (as_pixels("one", array) == array).all()


def test_an_image_with_too_many_pixels_is_refused() -> None:
    image = np.broadcast_to(np.uint8(0), (1 << 14, (1 << 12) + 1))
    with pytest.raises(ValueError, match="Got 16384 x 4097 pixels for 'large'"):
        as_pixels("large", image)


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (300, 200)])
def test_pillow_reads_the_same_pixels(shape: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    with Image.open(io.BytesIO(png(pixels))) as picture:
        picture.verify()
    with Image.open(io.BytesIO(png(pixels))) as picture:
        assert (picture.format, picture.mode) == ("PNG", "RGB")
        assert (np.asarray(picture) == pixels).all()
