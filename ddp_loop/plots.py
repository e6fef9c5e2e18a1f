"""Pictures in files: pairs of images, differences of weights, surfaces, curves of a run, trials of a sweep."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ddp_loop.smoothing import smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values = npt.NDArray[np.float64]

_PAIRS_ACROSS = 4
_POINTS = 300  # of a curve; more are drawn as means with their range
_TICKS = 6  # values of a parameter that are all named on its axis
_FEW_RUNS = 10  # for which ten colors are enough
_LEGEND_DOWN = 8  # runs in a column of the legend
_MOST_LETTERS = 60  # of a name or a title
_WIDE = 100.0  # largest / smallest value above which the scale is logarithmic


def pairs(
    noisy: torch.Tensor, clean: torch.Tensor, path: str | os.PathLike[str], names: tuple[str, str] = ("Noisy", "Clean")
) -> Path:
    """Draw pairs of gray images as PNG, four pairs in a row, each with the noisy image on the left.

    Args:
        noisy, clean: shape (n, 1, H, W) with n of 1 or more, in [0, 1] or uint8.
        path: of the file; its folder is created.
        names: the titles of the left and the right images.

    Returns:
        The path.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: the images have other shapes.
    """
    if noisy.shape != clean.shape or noisy.dim() != 4 or noisy.shape[1] != 1 or not len(noisy):
        raise ValueError(
            "noisy and clean must have one shape, (n, 1, H, W) with n of 1 or more. Got "
            f"{tuple(noisy.shape)} and {tuple(clean.shape)}. Pass as many of each, such as noisy[:8] and clean[:8]."
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
    """Join images, (n, 1, H, W) each, to (n, H, 2 W + 1), with a column of NaN between them, which is not drawn."""
    pictures = [part.detach().cpu() for part in (left, right)]
    pictures = [part / 255 if part.dtype == torch.uint8 else part.float() for part in pictures]
    return torch.cat([pictures[0], torch.full_like(pictures[0][..., :1], math.nan), pictures[1]], dim=3).squeeze(1)


def differences(
    values: torch.Tensor, path: str | os.PathLike[str], *, title: str = "", reach: float | None = None
) -> Path:
    """Draw a bar for each difference between the weights of two networks, as PNG.

    Args:
        values: of any shape, drawn in order and numbered from 1.
        path: of the file; its folder is created.
        title: of the picture.
        reach: the axis goes from -reach to reach, to compare pictures; by default it fits the values.

    Returns:
        The path.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: there are no values.
    """
    if not values.numel():
        raise ValueError("There are no differences to draw. Pass one network's weights minus another's.")
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


def surfaces(
    panels: Mapping[str, torch.Tensor | str], path: str | os.PathLike[str], *, reach: tuple[float, float] = (-1.0, 1.0)
) -> Path:
    """Draw surfaces z(x, y) side by side on the same axes, as PNG.

    Args:
        panels: by title, heights of shape (H, W), of which column j is at the j-th x and row i at the i-th y; or a
            text in place of a surface, such as "left out".
        path: of the file; its folder is created.
        reach: the smallest and the largest value of both x and y.

    Returns:
        The path.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: there is no surface, or heights have another number of dimensions than two.
    """
    heights = {name: panel.detach().cpu() for name, panel in panels.items() if isinstance(panel, torch.Tensor)}
    if not heights or any(each.dim() != 2 for each in heights.values()):
        got = [tuple(each.shape) for each in heights.values()]
        raise ValueError(f"Surfaces must have two dimensions, (H, W). Got {got}. Pass at least one of that shape.")
    low = min(float(each.min()) for each in heights.values())
    high = max(float(each.max()) for each in heights.values())
    figure = _make_figure(width=4.5 * len(panels), height=4.2)
    for number, (name, panel) in enumerate(panels.items(), 1):
        axes: Any = figure.add_subplot(1, len(panels), number, projection="3d")
        axes.set(title=name, xlabel="x", ylabel="y", xlim=reach, ylim=reach, zlim=(low, high))
        if isinstance(panel, torch.Tensor):
            y, x = np.meshgrid(*(np.linspace(*reach, size) for size in panel.shape), indexing="ij")
            rows, columns = panel.shape
            axes.plot_surface(
                x, y, heights[name].numpy(), cmap="viridis", vmin=low, vmax=high, rcount=rows, ccount=columns
            )
        else:
            axes.text2D(0.5, 0.5, panel, transform=axes.transAxes, horizontalalignment="center")
    return _write(figure, path)


@dataclass(frozen=True)
class Panel:
    """One value over the steps of a run.

    Attributes:
        iterations, values: of the rows, in order.
        evaluated_at, evaluated: iterations and values of the evaluations.
    """

    iterations: Sequence[float]
    values: Sequence[float]
    evaluated_at: Sequence[float] = ()
    evaluated: Sequence[float] = ()


def curves(
    panels: Mapping[str, Panel | Mapping[str, Panel]],
    path: str | os.PathLike[str],
    *,
    title: str = "",
    smoothing: float = 0.0,
    log: bool | None = None,
) -> Path:
    """Draw each value of a run, or of several runs, in a panel of its own, one below the other.

    Of more than 300 rows or evaluations, neighbors are averaged, and a band shows the rows' range. With `smoothing`
    the curve is the mean of the steps i up to s with weights (1 - 1 / smoothing)^(s - i), and the rows are pale.

    Args:
        panels: by name; of several runs by the names of the runs, which have the same color in all panels.
        path: of the file, .svg or .png; its folder is created.
        title: of the picture.
        smoothing: in steps; 0 for none.
        log: whether values are on a logarithmic scale; by default if they span more than a factor of 100.

    Returns:
        The path.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: there are no panels, or the smoothing is negative.
    """
    if not panels:
        raise ValueError("There are no curves to draw. Pass {name: Panel(iterations, values)}.")
    if not smoothing >= 0:
        raise ValueError(f"The smoothing must be a number of steps, 0 or more. Got {smoothing}.")
    figure = _make_figure(width=8, height=3.2 * len(panels) + 0.3)
    figure.suptitle(_plain(title))
    several = {name: {"": panel} if isinstance(panel, Panel) else dict(panel) for name, panel in panels.items()}
    colors = _run_colors([run for runs in several.values() for run in runs])
    for number, (name, runs) in enumerate(several.items(), 1):
        axes = figure.add_subplot(len(panels), 1, number)
        for run, panel in runs.items():
            _draw_panel(axes, panel, run, colors[run], smoothing)
        _scale(axes, [one for panel in runs.values() for one in (*panel.values, *panel.evaluated)], log)
        axes.set_ylabel(_plain(name.replace("_", " ")))
        axes.grid(visible=True, alpha=0.3)
        if len(axes.get_legend_handles_labels()[1]) > 1 or any(runs):
            ncols = 1 + (len(runs) > _LEGEND_DOWN)
            axes.legend(loc="best", fontsize="small", framealpha=0.8, ncols=ncols)  # by default it may warn of its time
    axes.set_xlabel("step")
    return _write(figure, path)


def _plain(text: str) -> str:
    """A text that matplotlib does not take for a formula; a long one is cut."""
    return (text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}\N{HORIZONTAL ELLIPSIS}").replace(
        "$", r"\$"
    )


def _run_colors(runs: Sequence[str]) -> dict[str, Any]:
    """A color for each run; of more than 20 the colors repeat."""
    from matplotlib import colormaps

    names = list(dict.fromkeys(runs))
    table = colormaps["tab10" if len(names) <= _FEW_RUNS else "tab20"]
    return {name: table(place % table.N) for place, name in enumerate(names)}


def _draw_panel(axes: Axes, panel: Panel, run: str, color: Any, smoothing: float) -> None:
    training, evaluated = (run, f"{run}, evaluated") if run else ("training", "evaluated")
    if len(panel.values):
        values = np.asarray(panel.values, dtype=np.float64)
        places, means, least, most = _thinned(panel.iterations, values)
        known = np.isfinite(values)
        if smoothing and known.any():
            axes.plot(places, means, linewidth=0.8, alpha=0.3, color=color)
            at = np.asarray(panel.iterations)[known]
            places, means, _, _ = _thinned(at, smooth(values[known], at, smoothing))
        elif len(places) < len(values):
            axes.fill_between(places, least, most, alpha=0.25, linewidth=0, color=color)
        is_alone = len(places) == 1
        axes.plot(places, means, "o" if is_alone else "-", linewidth=1.2, label=_plain(training), color=color)
    if len(panel.evaluated):
        shade = color if run else "tab:orange"
        places, means, _, _ = _thinned(panel.evaluated_at, panel.evaluated)
        axes.plot(places, means, "o--", markersize=4, linewidth=1, label=_plain(evaluated), color=shade)


def _scale(axes: Axes, values: Sequence[float], log: bool | None) -> None:
    known = [value for value in values if math.isfinite(value)]
    is_wide = bool(known) and min(known) > 0 and max(known) > _WIDE * min(known)
    if log or (log is None and is_wide):
        axes.set_yscale("log", nonpositive="mask")


@dataclass(frozen=True)
class TrialCurve:
    """A trial of a sweep, as it is drawn.

    Attributes:
        parameters: by name.
        value: by which trials are compared; None is drawn by its curve alone.
        iterations, values: its curve.
        is_pruned: whether it was stopped early, which is drawn as a cross.
    """

    parameters: Mapping[str, bool | int | float | str | None]
    value: float | None
    iterations: Sequence[float]
    values: Sequence[float]
    is_pruned: bool = False


def trials(
    shown: Sequence[TrialCurve],
    path: str | os.PathLike[str],
    *,
    value: str = "loss",
    curve: str = "loss",
    maximize: bool = False,
    title: str = "",
) -> Path:
    """Draw the trials of a sweep: the value against each parameter, and the curves of all over each other.

    The best trial is red, the others have a color by their value.

    Args:
        shown: at least one, all with the same parameters.
        path: of the file, .svg or .png; its folder is created.
        value, curve: names for the values and the curves.
        maximize: whether the largest value is the best.
        title: of the picture.

    Returns:
        The path.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no trial has a value.
    """
    known = [one for one in shown if one.value is not None and math.isfinite(one.value)]
    ended = [one for one in known if not one.is_pruned] or known
    if not ended:
        raise ValueError("There are no trials to draw. Pass at least one with a finite value.")
    best = (max if maximize else min)(ended, key=lambda one: one.value or 0.0)
    names = list(best.parameters)
    figure = _make_figure(width=max(9.0, 3.2 * len(names)), height=7.2)
    figure.suptitle(title)
    colors = _trial_colors(known, best)
    spread = [one.value for one in known if one.value is not None]
    is_wide = min(spread) > 0 and max(spread) > _WIDE / 10 * min(spread)
    places = figure.add_gridspec(2, len(names))
    first = None
    for number, name in enumerate(names):
        first = axes = figure.add_subplot(places[0, number], sharey=first)
        axes.set_yscale("log" if is_wide else "linear")
        _draw_parameter(axes, name, known, colors)
        axes.set_ylabel("" if number else value)
        axes.tick_params(labelleft=number == 0, which="both")
    axes = figure.add_subplot(places[1, :])
    for one in [*(each for each in shown if each is not best), best]:
        if len(one.values):
            at, means, _, _ = _thinned(one.iterations, one.values)
            label = ", ".join(f"{name} {_short(of)}" for name, of in one.parameters.items()) if one is best else None
            axes.plot(at, means, color=colors.get(id(one), "lightgray"), linewidth=2 if one is best else 1, label=label)
            if one.is_pruned:
                axes.plot(at[-1:], means[-1:], "x", color=colors.get(id(one), "lightgray"))
    drawn = [point for one in shown for point in one.values if math.isfinite(point)]
    axes.set_yscale("log" if drawn and min(drawn) > 0 else "linear")
    axes.set(xlabel="step", ylabel=curve)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(title="best trial", loc="best")
    return _write(figure, path)


def _trial_colors(known: Sequence[TrialCurve], best: TrialCurve) -> dict[int, Any]:
    """The color of each trial by its rank among the values, so that one bad trial does not take all colors."""
    from matplotlib import colormaps

    order = sorted(known, key=lambda one: one.value or 0.0)
    scale = colormaps["viridis"]
    colors: dict[int, Any] = {id(one): scale(0.9 * place / len(order)) for place, one in enumerate(order)}
    return {**colors, id(best): "tab:red"}


def _draw_parameter(axes: Axes, name: str, known: Sequence[TrialCurve], colors: Mapping[int, Any]) -> None:
    """Draw each trial's value at its parameter; a parameter that is no number has a place for each of its values."""
    given = [one.parameters[name] for one in known]
    numbers = [one for one in given if isinstance(one, int | float) and not isinstance(one, bool)]
    places = list(dict.fromkeys(map(_short, given)))
    is_number = len(numbers) == len(given)
    for one in known:
        at: Any = one.parameters[name] if is_number else places.index(_short(one.parameters[name]))
        axes.plot([at], [one.value or 0.0], "x" if one.is_pruned else "o", color=colors[id(one)], markersize=6)
    if not is_number:
        axes.set_xticks(range(len(places)), places)
        axes.set_xlim(-0.5, len(places) - 0.5)
    else:
        axes.set_xscale("log" if _is_logarithmic(numbers) else "linear")
        if len(ticks := sorted(set(numbers))) <= _TICKS:
            axes.set_xticks(ticks, map(_short, ticks))
            axes.set_xticks([], minor=True)
    axes.set_xlabel(name)
    axes.grid(visible=True, alpha=0.3)


def _is_logarithmic(numbers: Sequence[float]) -> bool:
    """Whether the values of a parameter are spread over its logarithm: their median is nearer to the geometric mean."""
    low = min(numbers)
    high = max(numbers)
    middle = float(np.median(numbers))
    return low > 0 and high >= _WIDE / 10 * low and abs(middle - math.sqrt(low * high)) < abs(middle - (low + high) / 2)


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _thinned(at: npt.ArrayLike, given: npt.ArrayLike) -> tuple[Values, Values, Values, Values]:
    """Merge neighbors to at most `_POINTS` points: position, mean, smallest and largest value, without NaN."""
    values = np.asarray(given, dtype=np.float64)
    each = -(-len(values) // _POINTS)
    starts = np.arange(0, len(values), each)
    counts = np.diff([*starts, len(values)])
    where = np.add.reduceat(at, starts) / counts
    is_missing = np.isnan(values)
    with np.errstate(invalid="ignore"):  # all may be NaN
        known = counts - np.add.reduceat(is_missing, starts, dtype=np.int64)
        means = np.add.reduceat(np.where(is_missing, 0.0, values), starts) / known
        return where, means, np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)


def _make_figure(width: float, height: float) -> Figure:
    """Return a figure of this size in inches, drawn by Agg: pyplot would keep it, and may need a screen."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('Pictures need matplotlib. Run pip install "ddp_loop[plots]"') from error
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
