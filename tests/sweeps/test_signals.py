"""Signals that reach all processes of a worker, as Slurm and terminals send them."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path

import pytest

from tests.support.harness import TASK_S, until
from tests.support.paths import ROOT
from tests.support.trials import sweeping, toml, trial


def stand(rate: float, run_dir: str) -> None:
    """A trial without a Loop yet, which a signal kills."""
    written = Path(run_dir, "written")
    written.write_text(str(os.getpid()))
    written.rename(Path(run_dir, "process"))
    signal.pause()


@pytest.mark.slow
def test_a_signal_that_reaches_the_ranks_first_interrupts_their_trial(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="needs the extra sweep")
    facts = {"function": f"{ROOT}/tests/sweeps/test_signals.py:stand", "folder": "sweep"}
    file = toml(tmp_path / "sweep.toml", **facts, space={"rate": [0.1]})
    process = tmp_path / "sweep/trials/0000/process"
    with sweeping(uuid.uuid4().hex, str(file)) as worker:
        until(process.exists, "the trial runs", TASK_S)
        rank = int(process.read_text())
        os.kill(rank, signal.SIGTERM)
        until(lambda: not Path(f"/proc/{rank}").exists(), "the rank has died", TASK_S)
        worker.send_signal(signal.SIGTERM)
        printed, _ = worker.communicate(timeout=TASK_S)
    assert "The sweep was stopped by SIGTERM" in printed
    assert trial(tmp_path / "sweep", 0)["status"] == "interrupted"
