"""The use of the machine by each rank, as the page reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_loop.monitor import run_files
from ddp_loop.monitor.run_files import MOST_POINTS, MOST_RANKS, UsageView
from tests.support.logged_files import add_usage, append_lines


@pytest.mark.covers("E4")
def test_each_rank_has_its_points_and_only_the_measures_that_it_has(tmp_path: Path) -> None:
    add_usage(tmp_path, 1, [(5.0, 90.0, 300.0)], gpu_percent=70.0, gpu_memory_mib=1000.0)
    add_usage(tmp_path, 0, [(5.0, 100.0, 200.0), (10.0, 150.5, 210.0)])
    view = UsageView(tmp_path)
    measures = {"elapsed_s": [5.0, 10.0], "processor_percent": [100.0, 150.5], "memory_mib": [200.0, 210.0]}
    one = {"elapsed_s": [5.0], "processor_percent": [90.0], "memory_mib": [300.0]}
    assert view.look() == {
        "is_behind": False,
        "ranks": [{"rank": 0} | measures, {"rank": 1} | one | {"gpu_percent": [70.0], "gpu_memory_mib": [1000.0]}],
    }
    add_usage(tmp_path, 0, [(15.0, 0.0, 1.0)])
    assert view.look()["ranks"][0]["elapsed_s"] == [5.0, 10.0, 15.0]


def test_a_resumed_run_continues_its_points(tmp_path: Path) -> None:
    path = add_usage(tmp_path, 0, [(float(at), 1.0, 1.0) for at in range(1, 11)])
    view = UsageView(tmp_path)
    view.look()
    add_usage(tmp_path, 0, [(6.5, 2.0, 2.0)])  # the time of steps that are repeated
    assert view.look()["ranks"][0]["elapsed_s"] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 6.5]
    add_usage(tmp_path, 0, [(6.5, 4.0, 4.0)])
    (rank,) = view.look()["ranks"]
    assert (rank["elapsed_s"][-2:], rank["memory_mib"][-2:]) == ([6.0, 6.5], [1.0, 4.0])
    path.write_text("")
    add_usage(tmp_path, 0, [(1.0, 3.0, 3.0)])
    assert view.look()["ranks"][0]["memory_mib"] == [3.0]


def test_a_week_of_lines_is_a_bounded_number_of_means(tmp_path: Path) -> None:
    many = 20 * MOST_POINTS
    add_usage(tmp_path, 0, [(5.0 * at, float(at % 2) * 100, 7.0) for at in range(many)])
    view = UsageView(tmp_path)
    while (found := view.look())["is_behind"]:
        pass
    (rank,) = found["ranks"]
    assert MOST_POINTS // 2 <= len(rank["elapsed_s"]) < MOST_POINTS
    assert rank["elapsed_s"][:2] == [5.0 * 31, 5.0 * 63]  # of each 32 lines, the last one's
    assert rank["elapsed_s"][-1] > 5.0 * (many - 100)
    assert sorted(rank["elapsed_s"]) == rank["elapsed_s"]
    assert set(rank["memory_mib"]) == {7.0}
    assert set(rank["processor_percent"]) == {50.0}


def test_damaged_lines_and_other_files_are_left_out(tmp_path: Path) -> None:
    path = add_usage(tmp_path, 0, [(1.0, 1.0, 1.0)])
    with path.open("a") as file:
        file.write('no line\n{"elapsed_s": NaN, "memory_mib": 3}\n{"elapsed_s": "2"}\n{"elapsed_s": 1e999}\n')
        file.write('{"elapsed_s": 2, "memory_mib": "<b>", "processor_percent": NaN}\n{"elapsed_s": 3, "memory')
    (path.parent / "rank-x.jsonl").write_text("{}\n")
    (path.parent / "rank-2.jsonl").mkdir()
    assert UsageView(tmp_path).look()["ranks"] == [
        {"rank": 0, "elapsed_s": [1.0, 2.0], "processor_percent": [1.0, None], "memory_mib": [1.0, None]}
    ]


def test_of_very_many_ranks_the_first_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "usage").mkdir()
    for rank in range(MOST_RANKS + 5):
        append_lines(tmp_path / "usage" / f"rank-{rank}.jsonl", [{"elapsed_s": 1.0, "memory_mib": 1.0}])
    view = UsageView(tmp_path)
    assert [one["rank"] for one in view.look()["ranks"]] == list(range(MOST_RANKS))
    monkeypatch.setattr(run_files, "READ_S", 0.0)
    assert len(view.look()["ranks"]) == MOST_RANKS
