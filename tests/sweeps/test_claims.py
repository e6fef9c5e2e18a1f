"""Several workers that take trials of one sweep at the same time."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from ddp_loop.sweeps.space import make_space
from ddp_loop.sweeps.trial_queue import TrialQueue

pytest.importorskip("optuna", reason="needs the extra sweep")


def test_a_worker_that_comes_too_late_leaves_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would later mistake the other worker's trial for one of its own that it lost."""
    url, space = f"sqlite:///{tmp_path / 'study.db'}", make_space({"rate": [0.1]}, None, None, 0)
    with (
        closing(TrialQueue(url, "one", beat_s=60, grace_s=180, direction="minimize")) as first,
        closing(TrialQueue(url, "one", beat_s=60, grace_s=180)) as second,
    ):
        first.add_trials(space)
        waiting = second._frozen("WAITING")
        assert first.claim("first", space, lambda trial: None) is not None  # type: ignore[arg-type, return-value]
        with monkeypatch.context() as late:
            late.setattr(second, "_frozen", lambda *states: waiting)
            assert second.claim("second", space, lambda trial: None) is None  # type: ignore[arg-type, return-value]
        assert first.newest()[0].worker == "first"
        second.take_over("second", lambda name: None)
        assert first.newest()[0].state == "running"
