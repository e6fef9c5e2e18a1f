"""A full run over 20 epochs that is short enough for a test, and the table of the long runs."""

from __future__ import annotations

import re
import statistics

import pytest
import torch

import ddp_loop as dl
from benchmarks.accuracy import EPOCHS, RANKS, SEEDS, shift, train
from tests.support.paths import DOCS

pytestmark = pytest.mark.covers("D8")

TABLE = DOCS / "benchmarks" / "accuracy.md"


@pytest.mark.slow
def test_twenty_epochs_of_handwriting_reach_the_accuracy_of_the_table() -> None:
    first, second = dl.launch(train, 2, "handwriting", 0)  # in other processes: sklearn sets environment variables
    assert first == second
    assert len(first) == EPOCHS
    assert first[0] < 0.9
    assert first[-1] > 0.97  # of 15 runs 0.978 to 0.995


def test_the_table_adds_up() -> None:
    lines = [
        line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if re.match(r"\| .* \| \d \|", line)
    ]
    assert {int(ranks) for _, ranks, *_ in lines} == set(RANKS)
    for _, _, first, mean, least, most, each in lines:
        accuracies = [float(accuracy) for accuracy in each.split(", ")]
        assert len(accuracies) == len(SEEDS)
        assert float(mean) == pytest.approx(statistics.mean(accuracies), abs=6e-5)
        assert (float(least), float(most)) == (min(accuracies), max(accuracies))
        average, lowest, highest = map(float, re.findall(r"\d\.\d+", first))
        assert lowest <= average <= highest < 0.98


def test_a_shift_moves_each_image_by_a_pixel_at_most() -> None:
    images = torch.zeros(200, 1, 28, 28)
    images[:, 0, 14, 10] = 1.0
    moved, labels = shift((images, torch.arange(200)), dl.Draws(0, 1, torch.arange(200), torch.device("cpu")))
    assert moved.shape == images.shape
    assert labels.tolist() == list(range(200))
    places = moved.flatten(1).argmax(1)
    steps = {(int(place) // 28 - 14, int(place) % 28 - 10) for place in places}
    assert steps == {(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)}
