"""Pictures as PNG files: pairs of images, differences of weights."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAIRS_ACROSS = 4


def pairs(
    noisy: torch.Tensor, clean: torch.Tensor, path: str | os.PathLike[str], names: tuple[str, str] = ("Noisy", "Clean")
) -> Path:
    """Draw pairs of grey pictures, four pairs in a row, the noisy one on the left, and write them as PNG.

    Args:
        noisy, clean: (n, 1, H, W) in [0, 1], or uint8; n of 1 or more.
        path: of the file; its folder is made.
        names: what stands above the left and the right pictures.

    Returns:
        The path.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: pictures of other shapes.
    """
    if noisy.shape != clean.shape or noisy.dim() != 4 or noisy.shape[1] != 1 or not len(noisy):
        raise ValueError(
            "pairs are drawn of two sets of grey pictures, (n, 1, H, W) with n of 1 or more; got "
            f"{tuple(noisy.shape)} and {tuple(clean.shape)}: take the first ones of both, such as noisy[:8], clean[:8]"
        )
    across = min(_PAIRS_ACROSS, len(noisy))
    down = -(-len(noisy) // across)
    figure = _make_figure(width=3 * across, height=1.5 * down + 0.3)
    for number, picture in enumerate(_side_by_side(noisy, clean), 1):
        axes = figure.add_subplot(down, across, number)
        axes.imshow(picture.numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set_axis_off()
        for place, name in zip((0.25, 0.75), names if number <= across else (), strict=False):
            axes.text(place, 1.03, name, transform=axes.transAxes, horizontalalignment="center")
    return _write(figure, path)


def _side_by_side(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(n, 1, H, W) twice -> (n, H, 2 W + 1), between them a column of NaN, which is not drawn."""
    pictures = [part.detach().cpu() for part in (left, right)]
    pictures = [part / 255 if part.dtype == torch.uint8 else part.float() for part in pictures]
    return torch.cat([pictures[0], torch.full_like(pictures[0][..., :1], math.nan), pictures[1]], dim=3).squeeze(1)


def differences(
    values: torch.Tensor, path: str | os.PathLike[str], *, title: str = "", reach: float | None = None
) -> Path:
    """Draw a bar for each difference between the weights of two networks, and write the picture as PNG.

    Args:
        values: of any shape, drawn in order, numbered from 1.
        path: of the file; its folder is made.
        title: stands above.
        reach: the picture goes from -reach to reach, for two that are to be compared; by default as far as needed.

    Returns:
        The path.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no values.
    """
    if not values.numel():
        raise ValueError(
            "differences are drawn of one value or more; got none: give one network's weights less another's"
        )
    figure = _make_figure(width=8, height=4)
    axes = figure.add_subplot()
    axes.bar(range(1, values.numel() + 1), values.detach().flatten().cpu().double().numpy())
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlabel("Learnable Parameter Number")
    axes.set_ylabel("Difference in Weight Value")
    axes.set_title(title)
    axes.set_xlim(0, values.numel() + 1)
    if reach is not None:
        axes.set_ylim(-reach, reach)
    return _write(figure, path)


def _make_figure(width: float, height: float) -> Figure:
    """A figure of this size in inches, of Agg alone: pyplot would keep it, and may want a screen."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'pictures are drawn by matplotlib, which is missing: pip install "ddp_loop[digits]"'
        ) from error
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _write(figure: Figure, path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path
