"""The benchmark of the launchers, on one pair."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import launching


@pytest.mark.covers("J6")
def test_both_launchers_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def seconds_of(launcher: tuple[str, ...], script: Path) -> float:
        assert script.read_text() == ""
        order.append("run" if launcher is launching.RUN else "torchrun")
        return 1.0 if launcher is launching.RUN else 2.0

    monkeypatch.setattr(launching, "seconds_of", seconds_of)
    ours, noise = launching.rows(["nothing"], pairs=4)
    assert order[:8] == ["run", "torchrun", "torchrun", "run"] * 2
    assert ours[:3] == ("nothing", "run / torchrun", "0.500")
    assert noise[1:3] == ("torchrun / torchrun", "1.000")
