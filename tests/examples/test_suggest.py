"""The benchmark of samplers and pruners counts and compares what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import suggest
from benchmarks.suggest import Found


def found(errors: list[float], updates: int, pruned: int = 0) -> list[Found]:
    return [Found(error, updates, pruned, 0) for error in errors]


def test_the_table_of_pruning_has_each_seed_median_and_quartiles(capsys: pytest.CaptureFixture[str]) -> None:
    alone, pruned = found([1, 2, 3, 4, 5], 1000), found([1, 2, 3, 4, 6], 600, 9)
    pairs = {
        seed: {"random": one, "pruned": other} for seed, (one, other) in enumerate(zip(alone, pruned, strict=True))
    }
    suggest.print_part("pruning", pairs)
    printed = capsys.readouterr().out
    assert "30 trials of 800 updates on 40x40 points" in printed
    assert "| 4 | 5.0000 | 6.0000 | 40.0% | 9 |" in printed
    assert "| median | 3.0000 | 3.0000 | 40.0% |" in printed
    assert "| quartiles | 2.0000 to 4.0000 | 2.0000 to 4.0000 | 40.0% to 40.0% |" in printed
    assert "pruned: less error than random in 0 of 5 seeds, more in 1. 0 trials failed." in printed


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_pruned_sweep_makes_fewer_updates_and_the_others_all(tmp_path: Path) -> None:
    for way in suggest.WAYS:
        one = suggest.search(way, 0, tmp_path / way, 5, trials=3, steps=20)
        assert one.failed == 0
        assert 0 < one.best < 100
        assert one.updates <= 60 if way == "pruned" else one.updates == 60
