"""Pictures as files: pairs of images, differences of weights, curves of a run."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PAIRS_ACROSS = 4
_POINTS = 300  # of a curve; more are drawn as means, and the range about them
_WIDE = 100.0  # the range of values from which on they are drawn on a logarithmic scale


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


@dataclass(frozen=True)
class Panel:
    """One value over the steps of a run.

    Attributes:
        iterations, values: of the rows, in order.
        evaluated_at, evaluated: of the evaluations.
    """

    iterations: Sequence[float]
    values: Sequence[float]
    evaluated_at: Sequence[float] = ()
    evaluated: Sequence[float] = ()


def curves(panels: Mapping[str, Panel], path: str | os.PathLike[str], *, title: str = "") -> Path:
    """Draw a curve in a panel of its own for each value of a run, the panels below each other.

    Of more than 300 rows the curve has the means of neighbours, and lies in the band of their least and largest.

    Args:
        panels: by name.
        path: of the file, .svg or .png; its folder is made.
        title: stands above.

    Returns:
        The path.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no panels.
    """
    if not panels:
        raise ValueError("curves are drawn of one value or more; got none: give {name: Panel(iterations, values)}")
    figure = _make_figure(width=8, height=3.2 * len(panels) + 0.3)
    figure.suptitle(title)
    for number, (name, panel) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(len(panels), 1, number)
        _draw_panel(axes, panel)
        axes.set_ylabel(name.replace("_", " "))
        axes.grid(visible=True, alpha=0.3)
    axes.set_xlabel("step")
    return _write(figure, path)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    if len(panel.values):
        at, means, least, most = _thinned(np.asarray(panel.iterations), np.asarray(panel.values, dtype=np.float64))
        if len(at) < len(panel.values):
            axes.fill_between(at, least, most, alpha=0.25, linewidth=0)
        axes.plot(at, means, linewidth=1.2, label="training")
    if len(panel.evaluated):
        axes.plot(panel.evaluated_at, panel.evaluated, "o", markersize=4, label="evaluated")
        axes.legend()
    known = [value for value in (*panel.values, *panel.evaluated) if math.isfinite(value)]
    if known and min(known) > 0 and max(known) > _WIDE * min(known):
        axes.set_yscale("log")


Values = npt.NDArray[np.float64]


def _thinned(at: Values, values: Values) -> tuple[Values, Values, Values, Values]:
    """Neighbours put together, so that at most `_POINTS` are left: where, their mean, the least, the largest."""
    each = -(-len(values) // _POINTS)
    starts = np.arange(0, len(values), each)
    counts = np.diff([*starts, len(values)])
    means = np.add.reduceat(values, starts) / counts
    where = np.add.reduceat(at, starts) / counts
    return where, means, np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)


def close_fonts() -> None:
    """Close the files of the fonts that matplotlib keeps open for the next picture."""
    from matplotlib import font_manager, mathtext

    with suppress(AttributeError):  # these have no public names
        font_manager._get_font.cache_clear()  # type: ignore[attr-defined]
        mathtext.MathTextParser._parse_cached.cache_clear()  # type: ignore[attr-defined]
    gc.collect()  # a figure holds itself, and the fonts


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
    if path.suffix == ".svg":
        figure.savefig(path, format="svg", metadata={"Date": None})
    else:
        figure.savefig(path, format="png")
    return path
