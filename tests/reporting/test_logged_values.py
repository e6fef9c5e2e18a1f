"""What a script logs, as a resumed run finds it in its folder: nothing twice, nothing lost."""

from __future__ import annotations

from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ddp_loop.reporting.jsonl import RunFiles
from ddp_loop.reporting.logged_values import MOST_TEXT, LoggedValues
from ddp_loop.reporting.sink_calls import SinkCalls
from tests.support.runs import lines_of

LAST = 4  # the checkpoint's iteration


def opened(folder: Path, after: int = 0, warnings: list[str] | None = None, *sinks: Any) -> LoggedValues:
    files = RunFiles(folder, after, print if warnings is None else warnings.append)
    return LoggedValues(files, SinkCalls(sinks, print), 0.0)


@pytest.mark.covers("J7")
def test_a_value_that_differs_after_the_resume_is_kept_beside_the_earlier_one(tmp_path: Path) -> None:
    before = opened(tmp_path)
    before.add(1, LAST, {"score": 1.0, "same": 0.5, "none": nan})
    before.close()
    again = opened(tmp_path, LAST)
    again.add(1, LAST, {"score": 2.0, "same": 0.5, "none": nan})
    again.close()
    found = [{name: line.get(name) for name in ("score", "same")} for line in lines_of(tmp_path / "logged.jsonl")]
    assert found == [{"score": 1.0, "same": 0.5}, {"score": 2.0, "same": None}]


class Killed:
    """A sink that keeps what the run folder has of each line that it is given, as a killed process leaves it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.got = folder, list[tuple[float, str]]()

    def begin(self, run: Any) -> None:
        """Its name makes it a sink."""

    def __call__(self, row: dict[str, Any]) -> None:
        """It takes logged values alone."""

    def logged(self, line: dict[str, Any]) -> None:
        self.got.append((line["score"], (self._folder / "logged.jsonl").read_text()))


def test_what_a_sink_was_given_before_a_kill_is_known_when_the_run_resumes(tmp_path: Path) -> None:
    sink = Killed(tmp_path / "one")
    (tmp_path / "one").mkdir()
    values = opened(tmp_path / "one", 0, None, sink)
    for step in range(1, LAST + 1):
        values.add(1, step, {"score": float(step)})
        values.end_line()
        values.flush_ready()
    assert len(sink.got) == LAST
    for score, left in sink.got:
        folder = tmp_path / f"killed-{score:g}"
        folder.mkdir()
        (folder / "logged.jsonl").write_text(left)
        again = Killed(folder)
        resumed = opened(folder, int(score), None, again)
        resumed.add(1, int(score), {"score": score})
        resumed.close()
        assert again.got == []
    values.close()


def test_a_long_file_is_read_to_its_end_for_what_the_checkpoints_step_has(tmp_path: Path) -> None:
    before = opened(tmp_path)
    for step in range(1, LAST):
        before.add(1, step, {f"{n:05} {'long ' * 15}": float(n) for n in range(5000)})
    before.add(1, LAST, {"score": 1.0})
    before.close()
    path = tmp_path / "logged.jsonl"
    size = path.stat().st_size
    assert size > 1 << 20
    again = opened(tmp_path, LAST)
    again.add(1, LAST, {"score": 1.0})
    again.close()
    assert path.stat().st_size == size


def test_texts_and_images_of_the_checkpoints_step_stay(tmp_path: Path) -> None:
    before = opened(tmp_path)
    for step in (LAST, LAST + 1):
        before.add_text(1, step, "words", "one")
        for name, value in (("picture", 10), ("other", 20)):
            before.add_image(1, step, name, np.full((2, 3, 3), value, np.uint8))
    before.close()
    again = opened(tmp_path, LAST)
    for text in ("one", "two"):
        again.add_text(1, LAST, "words", text)
    again.close()
    assert [(one["iteration"], one["text"]) for one in lines_of(tmp_path / "texts.jsonl")] == [(4, "one"), (4, "two")]
    images = lines_of(tmp_path / "images.jsonl")
    assert [one["name"] for one in images] == ["picture", "other"]
    assert {one.name for one in (tmp_path / "images").iterdir()} == {Path(one["file"]).name for one in images}
    for one, value in zip(images, (10, 20), strict=True):
        with Image.open(tmp_path / one["file"]) as picture:
            assert picture.getpixel((0, 0)) == (value,) * 3


def test_a_text_is_cut_only_where_it_is_too_long(tmp_path: Path) -> None:
    warnings: list[str] = []
    logged = opened(tmp_path, warnings=warnings)
    for step in (1, 2):
        logged.add_text(1, step, "long", "a" * (MOST_TEXT + step - 1))
    logged.close()
    texts = [line["text"] for line in lines_of(tmp_path / "texts.jsonl")]
    assert texts == ["a" * MOST_TEXT, "a" * MOST_TEXT + "\n[cut: 65,537 characters]"]
    assert len(warnings) == 1


def test_a_line_waits_for_its_last_value(tmp_path: Path) -> None:
    late = SimpleNamespace(ready=lambda: False, wait=lambda: np.float32(0.25))  # on its way from a GPU
    logged = opened(tmp_path)
    logged.add(1, 1, {"here": 1.0, "late": late})  # type: ignore[dict-item]
    logged.add(1, 2, {"here": 2.0})
    logged.flush_ready()
    logged.write()
    path = tmp_path / "logged.jsonl"
    assert not path.exists() or path.read_text() == ""
    logged.close()
    assert [(one["here"], one.get("late")) for one in lines_of(path)] == [(1.0, 0.25), (2.0, None)]


def test_a_step_that_two_epochs_share_has_a_line_of_each(tmp_path: Path) -> None:
    logged = opened(tmp_path)
    logged.add(1, LAST, {"score": 1.0})
    logged.add(2, LAST, {"score": 2.0})
    logged.close()
    found = [(one["epoch"], one["iteration"], one["score"]) for one in lines_of(tmp_path / "logged.jsonl")]
    assert found == [(1, LAST, 1.0), (2, LAST, 2.0)]


def test_evaluations_of_an_iteration_with_other_results_are_all_written(tmp_path: Path) -> None:
    said: list[str] = []
    logged = opened(tmp_path, warnings=said)
    for value, samples in ((0.5, 10), (0.5, 10), (0.5, 11), (1e-7, 10), (5e-7, 10), (5e-7 + 1e-15, 10), (nan, 10)):
        logged.add_evaluation(1, 4, {"accuracy": value, "samples": samples})
    logged.add_evaluation(2, 5, {"iteration": 9.5, "epoch": 8.5, "loss": 0.25})
    logged.close()
    assert said == [
        "Several evaluations of step 4 have a metric accuracy. Tables, the page and sweeps take the last one's. "
        "Give the others names of their own, as evaluate(..., train_accuracy=...)."
    ]
    *lines, last = lines_of(tmp_path / "evaluations.jsonl")
    found = [(line["accuracy"], line["samples"]) for line in lines]
    assert found == [(0.5, 10), (0.5, 11), (1e-7, 10), (5e-7, 10), (None, 10)]
    assert (last["epoch"], last["iteration"], last["loss"]) == (2, 5, 0.25)  # metrics cannot replace the place
