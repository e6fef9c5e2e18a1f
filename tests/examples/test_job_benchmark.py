"""The benchmark of the whole job, which resumes where the last call ended."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from benchmarks import job
from benchmarks.jobs import make_material
from ddp_loop import datasets

WAYS = list(job.WAYS)[:2]


class Runs:
    """Runs that take so many seconds of a clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0
        self.made: list[tuple[str, int]] = []

    def __call__(self, way: str, seed: int) -> job.Run:
        self.made.append((way, seed))
        self.now += self.seconds
        return {"seconds": self.seconds, "accuracy": 0.9}


def test_a_call_goes_on_after_the_runs_that_are_kept(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    while len(seen) < len(WAYS) * len(job.SEEDS):
        runs = Runs(200.0)
        found = job.complete(WAYS, tmp_path, runs, lambda runs=runs: runs.now)  # type: ignore[misc]
        assert len(runs.made) == 2  # a third one would end after 600 s
        seen += runs.made
        assert list(found) == seen
    assert seen[:4] == [(WAYS[0], 0), (WAYS[1], 0), (WAYS[1], 1), (WAYS[0], 1)]
    idle = Runs(200.0)
    assert list(job.complete(WAYS, tmp_path, idle, lambda: 0.0)) == seen
    assert not idle.made


def test_a_call_makes_one_run_however_long_it_takes(tmp_path: Path) -> None:
    runs = Runs(9999.0)
    job.complete(WAYS, tmp_path, runs, lambda: runs.now)
    assert len(runs.made) == 1


def test_times_and_accuracies_are_compared_seed_by_seed() -> None:
    runs = {
        ("DDP", 0): {"seconds": 100.0, "accuracy": 0.90},
        ("DDP", 1): {"seconds": 200.0, "accuracy": 0.80},
        ("ours", 0): {"seconds": 50.0, "accuracy": 0.92},
        ("ours", 1): {"seconds": 140.0, "accuracy": 0.82},
        ("ours", 2): {"seconds": 90.0, "accuracy": 0.84},
    }
    base, ours = job.rows(WAYS, runs)
    assert base[3:] == ("1.000 (1.000 to 1.000)", "0.8500 +- 0.0500", "0.8000 to 0.9000", "+0.0000 +- 0.0000")
    assert ours == (
        "ours",
        3,
        "90",
        "0.600 (0.500 to 0.700)",
        "0.8600 +- 0.0306",
        "0.8200 to 0.9200",
        "+0.0200 +- 0.0000",
    )


def test_the_seed_gives_the_start_weights() -> None:
    one, other, again = (next(make_material("digits", seed).model.parameters()) for seed in (0, 1, 0))
    assert (one == again).all()
    assert (one != other).any()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["DDP", "ours, bf16, channels_last"])
def test_each_way_trains_for_an_epoch(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "EPOCHS", 1)
    monkeypatch.setattr(datasets, "digits", partial(datasets.digits, size=5000))
    assert job.train(way, seed=1)["accuracy"] > 0.5
