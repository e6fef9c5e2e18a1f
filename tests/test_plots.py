"""Pictures: what is drawn, where the file lies, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from ddp_loop import plots
from ddp_loop.plots import TrialCurve


def read(path: Path) -> np.ndarray:
    """A PNG as grey values in [0, 1], from 0 for black."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("L"), dtype=np.float32) / 255


@pytest.mark.covers("A15")
def test_eight_pairs_are_drawn_noisy_left_and_clean_right(tmp_path: Path) -> None:
    # The k-th pair is grey k / 10 on the left and white on the right.
    noisy = (torch.arange(8) / 10).view(8, 1, 1, 1).expand(8, 1, 32, 32)
    path = plots.pairs(noisy, torch.ones(8, 1, 32, 32), tmp_path / "new" / "pairs.png")
    assert path == tmp_path / "new" / "pairs.png"
    picture = read(path)
    height, width = picture.shape
    for number in range(8):
        row, column = divmod(number, 4)
        at = int(height * (0.3 + 0.45 * row)), int(width * (column + 0.25) / 4)
        assert abs(picture[at] - number / 10) < 0.01
        assert picture[at[0], int(width * (column + 0.75) / 4)] == 1.0


@pytest.mark.parametrize("count", [1, 3, 5])
def test_other_numbers_of_pairs_are_drawn_too_and_bytes_as_well(count: int, tmp_path: Path) -> None:
    images = torch.full((count, 1, 28, 28), 51, dtype=torch.uint8)
    picture = read(plots.pairs(images, images, tmp_path / "pairs.png", names=("Noisy", "Cleaned")))
    share = float((abs(picture - 0.2) < 0.01).mean())
    assert 0.6 * count / (4 * -(-count // 4) if count > 4 else count) < share < 1


@pytest.mark.covers("H4")
def test_the_72_differences_are_drawn_as_bars(tmp_path: Path) -> None:
    values = torch.zeros(8, 1, 3, 3)
    values[0, 0, 0, 0], values[-1, 0, 2, 2] = 1.0, -1.0
    picture = read(plots.differences(values, tmp_path / "bars.png"))
    empty = read(plots.differences(0 * values, tmp_path / "empty.png", reach=1.05))
    same_scale = read(plots.differences(values, tmp_path / "scaled.png", reach=10.0))
    inked = picture != read(plots.differences(torch.zeros(72), tmp_path / "none.png", reach=1.1))
    bars = np.argwhere(inked & (picture < 0.6) & (picture > 0.3))
    height, width = picture.shape
    left, right = bars[bars[:, 1] < width / 2], bars[bars[:, 1] > width / 2]
    assert left[:, 0].mean() < height / 2 < right[:, 0].mean()  # the first one up, the last one down
    assert empty.shape == same_scale.shape == picture.shape
    assert (same_scale != picture).any()


def test_the_words_beside_the_bars_are_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def note(figure: Figure, *arguments: object, **keywords: object) -> None:
        written.append(figure)

    monkeypatch.setattr(Figure, "savefig", note)
    plots.differences(torch.arange(-2.0, 3.0), tmp_path / "bars.png", title="One less another", reach=4.0)
    (axes,) = written[0].axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Learnable Parameter Number", "Difference in Weight Value")
    assert axes.get_title() == "One less another"
    bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
    assert [bar.get_height() for bar in bars] == [-2, -1, 0, 1, 2]
    assert [round(bar.get_x() + bar.get_width() / 2) for bar in bars] == [1, 2, 3, 4, 5]
    assert axes.get_ylim() == (-4.0, 4.0)


def test_drawing_leaves_pyplot_alone(tmp_path: Path) -> None:
    loaded, settings = "matplotlib.pyplot" in sys.modules, matplotlib.rcParams.copy()
    plots.differences(torch.ones(3), tmp_path / "bars.png")
    plots.pairs(torch.ones(2, 1, 4, 4), torch.ones(2, 1, 4, 4), tmp_path / "pairs.png")
    assert ("matplotlib.pyplot" in sys.modules) == loaded
    assert matplotlib.rcParams.copy() == settings


@pytest.mark.parametrize(
    ("noisy", "clean"),
    [((8, 1, 4, 4), (7, 1, 4, 4)), ((8, 3, 4, 4), (8, 3, 4, 4)), ((8, 4, 4),) * 2, ((0, 1, 4, 4),) * 2],
)
def test_what_are_no_pairs_is_refused(noisy: tuple[int, ...], clean: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"noisy and clean must have one shape, \(n, 1, H, W\) with n of .*\. Got"):
        plots.pairs(torch.zeros(noisy), torch.zeros(clean), tmp_path / "pairs.png")
    with pytest.raises(ValueError, match="There are no differences to draw"):
        plots.differences(torch.zeros(0), tmp_path / "bars.png")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'Pictures need matplotlib\. Run pip install "ddp_loop\[plots\]"'):
        plots.differences(torch.ones(3), tmp_path / "bars.png")


# -- surfaces ----------------------------------------------------------------------------------------------


@pytest.mark.covers("I7")
def test_surfaces_are_drawn_side_by_side_on_the_same_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    high = torch.arange(12.0).view(3, 4)
    path = plots.surfaces({"High": high, "Low": high - 20, "None": "left out"}, tmp_path / "new" / "surfaces.png")
    picture = read(path)
    third = picture.shape[1] // 3
    left, right = (float((abs(part - 0.5) < 0.3).mean()) for part in (picture[:, :third], picture[:, -third:]))
    assert left > 2 * right

    written: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: written.append(figure))
    plots.surfaces({"High": high, "Low": high - 20, "None": "left out"}, path, reach=(-3.0, 3.0))
    panels = written[0].axes
    assert [panel.get_title() for panel in panels] == ["High", "Low", "None"]
    assert {tuple(round(float(end)) for end in panel.get_xlim()) for panel in panels} == {(-3, 3)}
    assert len({panel.get_zlim() for panel in panels}) == 1  # type: ignore[attr-defined]
    assert [len(panel.collections) for panel in panels] == [1, 1, 0]
    assert [text.get_text() for text in panels[2].texts] == ["left out"]


@pytest.mark.parametrize("panels", [{}, {"None": "left out"}, {"One": torch.zeros(3)}, {"One": torch.zeros(1, 3, 3)}])
def test_surfaces_of_another_shape_are_refused(panels: dict[str, torch.Tensor | str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two dimensions"):
        plots.surfaces(panels, tmp_path / "surfaces.png")


def trial(number: int, value: float | None, *pruned: bool, **parameters: bool | float | str | None) -> TrialCurve:
    return TrialCurve({"rate": 0.1**number, **parameters}, value, [1, 2, 3], [3.0, 2.0, 1.0 / (1 + number)], *pruned)


def test_trials_are_drawn_against_each_parameter_and_by_their_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []

    def write(figure: Figure, path: str | Path) -> Path:
        figures.append(figure)
        return Path(path)

    monkeypatch.setattr(plots, "_write", write)
    shown = [
        trial(1, 0.5, kind="a", on=True),
        trial(2, 0.25, kind="b", on=False),
        trial(3, 0.1, True, kind="a", on=None),  # the least value, but it did not end
        trial(4, None, kind="b", on=True),
    ]
    plots.trials(shown, "trials.png", value="error", curve="training loss")
    rate, kind, on, curves = figures[0].axes
    assert [axes.get_xlabel() for axes in figures[0].axes] == ["rate", "kind", "on", "step"]
    assert (rate.get_ylabel(), curves.get_ylabel()) == ("error", "training loss")
    assert rate.get_xscale() == "log"
    assert [len(axes.lines) for axes in (rate, kind, on)] == [3, 3, 3]
    assert [text.get_text() for text in kind.get_xticklabels()] == ["a", "b"]
    assert [text.get_text() for text in on.get_xticklabels()] == ["True", "False", "None"]
    red = [line.get_label() for line in curves.lines if line.get_color() == "tab:red"]
    assert red == ["rate 0.01, kind b, on False"]
    assert len(curves.lines) == 5  # a cross ends the pruned one

    plots.trials(shown, "trials.png", maximize=True)
    assert [one.get_label() for one in figures[1].axes[-1].lines if one.get_color() == "tab:red"] == [
        "rate 0.1, kind a, on True"
    ]


def test_a_picture_of_one_trial_is_written_and_none_without_a_value(tmp_path: Path) -> None:
    assert read(plots.trials([trial(1, 0.5)], tmp_path / "trials.png")).size
    with pytest.raises(ValueError, match="no trials to draw"):
        plots.trials([trial(1, None), trial(2, float("nan"))], tmp_path / "none.png")


@pytest.mark.parametrize(
    ("numbers", "scale"),
    [([0.003, 0.01, 0.03], "log"), ([0.05, 0.3, 0.4, 0.9], "linear"), ([0.0, 0.9], "linear"), ([4, 8, 16], "linear")],
)
def test_an_axis_is_logarithmic_where_its_parameter_is_spread_so(numbers: list[float], scale: str) -> None:
    assert plots._is_logarithmic(numbers) == (scale == "log")
