"""Means of curves over steps."""

from __future__ import annotations

import math
from math import nan

import numpy as np
import pytest

from ddp_loop.smoothing import smooth


@pytest.mark.parametrize("every", [1, 3, 700])
@pytest.mark.parametrize("steps", [2, 10, 300, 100_000])
def test_smoothing_is_the_recursion_over_steps_and_skips_what_is_missing(steps: int, every: int) -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(size=5000)
    values[[0, 7, 8, 4999]] = nan
    values[3000] = 1e30  # is forgotten again
    iterations = np.cumsum(generator.integers(1, 2 * every, size=5000))
    mean = weight = 0.0
    before, expected = int(iterations[0]), []
    for at, value in zip(iterations.tolist(), values.tolist(), strict=True):
        kept = (1 - 1 / steps) ** (at - before)
        mean, weight, before = kept * mean, kept * weight, at
        if not np.isnan(value):
            mean, weight = mean + value, weight + 1
        expected.append(mean / weight if weight else nan)
    found = smooth(values, iterations, steps)
    # A value that is missing after all others were forgotten has no mean, or that of forgotten ones.
    there = ~np.isnan(values) | (every < 700)
    np.testing.assert_allclose(found[there], np.array(expected)[there], rtol=1e-9, atol=1e-9)


def test_a_mean_over_steps_does_not_depend_on_how_often_rows_were_written() -> None:
    every = np.arange(1, 3001)
    whole, seldom = smooth(np.sin(every / 500), every, 100), smooth(np.sin(every[::10] / 500), every[::10], 100)
    assert abs(whole[2990] - seldom[299]) < 0.02  # a mean over 100 rows of every tenth step is 0.9 away


@pytest.mark.parametrize("steps", [1.5, 7.5])
def test_a_mean_has_weights_that_fall_with_the_distance(steps: float) -> None:
    at = np.array([1.0, 2, 5, 6, 30])
    values = np.array([3.0, 1, math.nan, 2, 5])
    found = smooth(values, at, steps)
    for place in range(5):
        known = [n for n in range(place + 1) if math.isfinite(values[n])]
        weights = (1 - 1 / steps) ** (at[place] - at[known])
        assert found[place] == pytest.approx(float((weights * values[known]).sum() / weights.sum()))


@pytest.mark.parametrize("steps", [0, 1, 0.5])
def test_a_mean_over_one_step_is_the_step(steps: float) -> None:
    assert smooth(np.array([3.0, nan]), np.arange(2), steps).tolist()[:1] == [3.0]


def test_smoothing_by_more_steps_than_there_are_takes_no_more_room() -> None:
    assert smooth(np.array([1.0, 2.0, 6.0]), np.arange(3), 10**13) == pytest.approx([1.0, 1.5, 3.0])
