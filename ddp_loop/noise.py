"""Noisy pictures beside the clean ones, made anew for every mini-batch, for a network that takes the noise out."""

from __future__ import annotations

import torch
from torch.nn.functional import interpolate

from ddp_loop.transforms import Draws

SIDE = 32  # pixels of a picture that comes out


def noisy_pairs(
    images: torch.Tensor, draws: Draws, *, density: float = 0.05, turned: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of a noisy and a clean picture, for `Batches(images, ..., transform=noisy_pairs)`.

    A share `density` of the pixels, by lot, is black or white, half of them each ("salt and pepper"). Then both of a
    pair are resized to 32x32 (bicubic, a = -1/2), each is stretched over [0, 1], x -> (x - min) / (max - min), one of a
    single grey becoming 0, and both make the same 0, 1, 2 or 3 quarter-turns. What is drawn follows the observation,
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
