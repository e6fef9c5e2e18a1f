"""Every script of docs/tutorial.md, on one rank and on two: they run, and give the same weights."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import ddp_loop as dl
from ddp_loop.cli import main
from tests.support.harness import OnRanks
from tests.support.runs import lines_of, rows_of, status_of
from tests.support.snippets import blocks_of, run_python

PARTS, *SCRIPTS = (block.text for block in blocks_of("docs/tutorial.md"))
*LESSONS, WHOLE, AFTERWARDS = SCRIPTS
ALIKE = 1e-4  # float32, a shard per rank


def with_parts(folder: Path) -> str:
    """A folder with `parts.py`, which is whole before a rank imports it."""
    folder.mkdir(exist_ok=True)
    (folder / "parts.py").write_text(PARTS)
    return str(folder)


def run_lesson(folder: str, text: str) -> list[float]:
    """The weights at the end of a script in a folder with `parts.py`."""
    sys.path.insert(0, folder)
    try:
        return run_python(folder, text).weights[-1]
    finally:
        sys.path.remove(folder)
        sys.modules.pop("parts", None)


@pytest.mark.covers("J17")
@pytest.mark.parametrize("number", range(len(LESSONS)))
@pytest.mark.slow
def test_a_script_of_the_tutorial_gives_the_same_weights_on_one_and_two_ranks(
    number: int, on_ranks: OnRanks, tmp_path: Path
) -> None:
    script = LESSONS[number]
    (one,) = on_ranks(1, run_lesson, with_parts(tmp_path / "one"), script)
    two, other = on_ranks(2, run_lesson, with_parts(tmp_path / "two"), script)
    assert two == other
    assert len(one) == 2 * 32 + 32 + 32 * 2 + 2
    if "shards=" in script:
        assert one == two
    else:
        assert one == pytest.approx(two, abs=ALIKE, rel=ALIKE)


def said_by_lesson(folder: str, text: str) -> str:
    sys.path.insert(0, folder)
    try:
        return run_python(folder, text).printed
    finally:
        sys.path.remove(folder)
        sys.modules.pop("parts", None)


@pytest.mark.slow
@pytest.mark.covers("J17")
def test_the_validation_by_hand_is_that_of_evaluate(on_ranks: OnRanks, tmp_path: Path) -> None:
    said, _ = on_ranks(2, said_by_lesson, with_parts(tmp_path), LESSONS[1])
    by_hand = re.search(r"By hand: accuracy (0\.\d+)", said)
    assert by_hand is not None
    assert re.findall(r"Epoch \d: accuracy (0\.\d+)", said)[-1] == by_hand[1]


@pytest.mark.covers("J17")
@pytest.mark.slow
def test_the_whole_script_keeps_the_best_average_and_leaves_its_weights(on_ranks: OnRanks, tmp_path: Path) -> None:
    (first, second) = on_ranks(2, run_lesson, with_parts(tmp_path), WHOLE.replace('"__main__"', '"snippet"'))
    assert first == second
    folder = tmp_path / "runs" / "eight"
    assert rows_of(folder) == list(range(1, len(rows_of(folder)) + 1))
    assert status_of(folder)["status"] in ("left", "done")
    logged = lines_of(folder / "logged.jsonl")
    assert [one["iteration"] for one in logged] == rows_of(folder)
    assert lines_of(folder / "evaluations.jsonl")[-1]["accuracy"] > 0.9
    weights = dl.load(folder, "average", best=True)
    assert [float(x) for one in weights.values() for x in one.flatten()] == pytest.approx(first)
    run_python(str(tmp_path), AFTERWARDS)
    assert main(["export", str(folder), "-o", str(tmp_path / "average"), "--best", "--part", "average"]) == 0
    assert load_file(tmp_path / "average").keys() == weights.keys()


def test_each_lesson_of_the_tutorial_has_a_script() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
    heads = [line for line in text.splitlines() if line.startswith("## ")]
    assert [int(head.split()[1].rstrip(".")) for head in heads] == list(range(1, len(LESSONS) + 2))
