"""What the page reads: files that grow and are truncated, and downsampled columns."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import product
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp_loop.monitor.series import MOST_COLUMNS, MetricSeries, end_of, extremes, places_of, thin_out
from ddp_loop.reporting import JsonlTail
from ddp_loop.reporting.jsonl import CHUNK
from ddp_loop.smoothing import smooth
from tests.support.harness import count_calls
from tests.support.logged_files import append_lines
from tests.support.serving import row, write_lines


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def iterations(tail: JsonlTail) -> tuple[bool, list[int]]:
    news = tail.poll()
    return news.restarted, [one["iteration"] for one in news.rows]


# -- files -------------------------------------------------------------------------------------------------


def test_a_file_is_read_as_it_grows_and_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    tail = JsonlTail(tmp_path / "rows.jsonl")
    assert iterations(tail) == (False, [])
    append(tail.path, '{"iteration": 1}\n{"itera')
    assert (iterations(tail), tail.half) == ((False, [1]), 7)
    append(tail.path, 'tion": 2}\n')
    assert (iterations(tail), tail.half, tail.lines) == ((False, [2]), 0, 2)
    assert iterations(tail) == (False, [])


@pytest.mark.parametrize("again", [0, 1, 2, 5])
def test_a_truncated_file_is_read_again_also_if_it_has_grown_as_long_since(tmp_path: Path, again: int) -> None:
    tail = JsonlTail(tmp_path / "rows.jsonl")
    write_lines(tail.path, [row(k) for k in range(1, 8)])
    assert iterations(tail) == (False, list(range(1, 8)))
    size = len("".join(json.dumps(row(k)) + "\n" for k in range(1, 6)))
    os.truncate(tail.path, size)
    append_lines(tail.path, [row(k, elapsed_s=0.08) for k in range(6, 6 + again)])
    assert iterations(tail) == (True, list(range(1, 6 + again)))
    assert tail.lines == 5 + again


def test_another_file_of_the_name_is_read_from_its_start_and_one_that_is_gone_has_no_lines(tmp_path: Path) -> None:
    tail = JsonlTail(tmp_path / "rows.jsonl")
    write_lines(tail.path, [row(1), row(2)])
    tail.poll()
    write_lines(tmp_path / "other", [row(1), row(2), row(3)])
    (tmp_path / "other").rename(tail.path)
    assert iterations(tail) == (True, [1, 2, 3])
    tail.path.unlink()
    assert (iterations(tail), tail.lines) == ((True, []), 0)
    assert iterations(tail) == (False, [])
    tail.path.mkdir()
    assert iterations(tail) == (False, [])


def test_a_line_that_cannot_be_read_is_counted_and_the_others_are_read(tmp_path: Path) -> None:
    long = b" " * CHUNK + b'{"iteration": 9}'
    number = b'{"loss": ' + b"9" * 5000 + b"}"
    for at, bad in enumerate((b"{]", b"", b"[1]", b"3", b"[" * 100_000, b"\xff\xfe", number, long)):
        tail = JsonlTail(tmp_path / f"{at}.jsonl")
        tail.path.write_bytes(b'{"iteration": 1}\n' + bad + b'\n{"iteration": 2}\n')
        found, more = list[int](), True
        while more:
            news = tail.poll()
            found, more = found + [one["iteration"] for one in news.rows], news.more
        assert (found, tail.unreadable, tail.first_unreadable, tail.half) == ([1, 2], 1, 2, 0), bad[:9]


# -- columns -----------------------------------------------------------------------------------------------


def columns_of(*rows: Mapping[str, object]) -> MetricSeries:
    columns = MetricSeries()
    for one in rows:
        columns.extend([one])
    return columns


def test_values_that_are_not_finite_are_missing_and_a_column_may_begin_late() -> None:
    columns = columns_of(
        {"iteration": 1, "epoch": 1, "loss": 2.5, "word": "x", "list": [1]},
        {"iteration": 2, "epoch": "one", "loss": None, "right": True, "huge": 10**400},
        {"iteration": 3, "epoch": -1, "loss": float("inf"), "late": 7},
    )
    assert columns.names == ["loss", "right", "huge", "late"]
    assert columns.iterations.tolist() == [1, 2, 3]
    assert columns.epochs.tolist() == [1, 0, 0]
    np.testing.assert_equal(columns.values("loss"), [2.5, nan, nan])
    np.testing.assert_equal(columns.values("right"), [nan, 1, nan])
    np.testing.assert_equal(columns.values("huge"), [nan, nan, nan])
    assert columns.last() == {"iteration": 3, "epoch": 0, "loss": None, "right": None, "huge": None, "late": 7.0}


def test_a_row_of_an_earlier_iteration_replaces_those_after_it_and_one_of_the_same_is_added_to_it() -> None:
    columns = columns_of(*[{"iteration": k, "loss": k} for k in (1, 2, 3, 4)], {"iteration": 3, "loss": 30})
    columns.extend([{"iteration": 3, "accuracy": 0.5}])
    assert columns.iterations.tolist() == [1, 2, 3]
    assert columns.last() == {"iteration": 3, "epoch": 0, "loss": 30.0, "accuracy": 0.5}
    columns.extend([{"iteration": 2, "epoch": 1, "accuracy": 0.25}])
    assert columns.last() == {"iteration": 2, "epoch": 1, "loss": None, "accuracy": 0.25}  # nothing of the earlier one


def test_a_row_without_an_iteration_is_counted_and_left_out() -> None:
    for iteration in (None, "1", 1.0, True, -1, 10**13):
        columns = columns_of({"iteration": iteration, "loss": 1})
        assert (len(columns), columns.refused, columns.names, columns.last()) == (0, 1, [], {}), iteration


ODD: tuple[dict[str, Any], ...] = (
    {}, {"loss": None}, {"loss": float("inf"), "right": True}, {"loss": 10**400}, {"loss": 10**19}, {"loss": "1.5"},
    {"loss": [1]}, {"epoch": 1.0}, {"epoch": -1}, {"iteration": "7"}, {"late": 2.0},
)  # fmt: skip


@pytest.mark.parametrize("after", [None, 60, 25])
def test_many_rows_at_once_become_the_columns_of_row_by_row(after: int | None) -> None:
    again = [] if after is None else [{"epoch": 9, "iteration": after + k, "loss": -1.0} for k in range(12)]
    for odd, place in product(ODD, (0, 30, 59)):
        rows = [{"epoch": 1 + k // 20, "iteration": k + 1, "loss": 1 / (k + 1), "accuracy": k} for k in range(60)]
        rows[place] = rows[place] | odd
        one, other = columns_of(*rows, *again), MetricSeries()
        for part in (rows[:10], rows[10:], again):
            other.extend(part)
        assert (other.names, other.refused, len(other), other.last()) == (one.names, one.refused, len(one), one.last())
        for name in one.names:
            np.testing.assert_array_equal(other.values(name), one.values(name))
        np.testing.assert_array_equal(other.iterations, one.iterations)
        np.testing.assert_array_equal(other.epochs, one.epochs)


def test_more_columns_than_a_page_can_show_are_counted() -> None:
    both = MetricSeries()
    both.extend([{"iteration": at, "epoch": 1} | {f"m{k}": k for k in range(MOST_COLUMNS + 3)} for at in range(20)])
    assert (len(both.names), len(both.left_out), len(both)) == (MOST_COLUMNS, 3, 20)
    columns = columns_of({"iteration": 1} | {f"m{k}": k for k in range(MOST_COLUMNS + 3)})
    assert (len(columns.names), len(columns.left_out)) == (MOST_COLUMNS, 3)


@pytest.mark.parametrize("points", [50, 401, 1600])
def test_a_thinned_curve_keeps_its_extremes_and_its_last_row_and_has_no_more_points_than_asked(points: int) -> None:
    for count in (0, 1, 2, 3, 9, 10, 11, 53, 400, 401, 402, 403, 1001, 99_999, 100_000):
        values = np.random.default_rng(count).normal(size=count)
        starts = thin_out(count, points)
        places, curve = places_of(starts, count), extremes(values, starts)
        assert len(places) == len(curve) <= points
        assert (np.diff(places) > 0).all()
        if count:
            assert places[0] == 0
            assert (curve.min(), curve.max()) == (values.min(), values.max())
            assert (places[-1], curve[-1]) == (count - 1, values[-1])


def test_a_column_ends_where_its_rows_without_a_value_are_more_than_usual() -> None:
    for values, row_of_the_end in (
        ("", None), ("1111", None), ("11..", 2), ("111.", 3), ("....", 0), ("1.11", None), ("1.1..", 3),
        ("..1..1..", None), ("..1..1...", 6), ("1..1.", None),  # a value in every third row
    ):  # fmt: skip
        assert end_of(np.array([nan if value == "." else 1.0 for value in values])) == row_of_the_end, values


def test_each_bucket_has_its_least_and_greatest_in_the_order_in_which_they_came() -> None:
    values = np.array([1.0, 5.0, 3.0, 0.0, 9.0, 2.0, 7.0, nan, 4.0, nan, nan, nan, 6.0])
    starts = np.array([0, 3, 6, 9])
    np.testing.assert_equal(places_of(starts, 13), [0, 2, 3, 5, 6, 8, 9, 11, 12])
    np.testing.assert_equal(extremes(values, starts), [1, 5, 0, 9, 7, 4, nan, nan, 6])


def test_rows_are_thinned_out_without_work_in_python_for_each() -> None:
    """So a hundred thousand take 7 ms."""

    def calls(count: int) -> int:
        values = np.random.default_rng(0).normal(size=count)
        return count_calls(lambda: extremes(smooth(values, np.arange(count), 100), thin_out(count, 1600))).total()

    assert calls(100_000) < 2 * calls(10_000)
