"""Signals that reach all processes of a worker, as Slurm and terminals send them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import TASK_S, until
from tests.support.paths import ROOT

SWEEP = f"""
function = "{ROOT}/tests/sweeps/test_signals.py:stand"
folder = "sweep"
[space]
rate = [0.1]
"""


def stand(rate: float, run_dir: str) -> None:
    """A trial without a Loop yet, which a signal kills."""
    written = Path(run_dir, "written")
    written.write_text(str(os.getpid()))
    written.rename(Path(run_dir, "process"))
    signal.pause()


@pytest.mark.slow
def test_a_signal_that_reaches_the_ranks_first_interrupts_their_trial(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="needs the extra sweep")
    (tmp_path / "sweep.toml").write_text(SWEEP)
    folder = tmp_path / "sweep/trials/0000"
    command = [sys.executable, "-m", "ddp_loop", "sweep", str(tmp_path / "sweep.toml"), "--slots=1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        try:
            until((folder / "process").exists, "the trial runs", TASK_S)
            rank = int((folder / "process").read_text())
            os.kill(rank, signal.SIGTERM)
            until(lambda: not Path(f"/proc/{rank}").exists(), "the rank has died", TASK_S)
            worker.send_signal(signal.SIGTERM)
            printed, _ = worker.communicate(timeout=TASK_S)
        finally:
            worker.kill()
    assert "The sweep was stopped by SIGTERM" in printed
    assert json.loads((folder / "trial.json").read_text())["status"] == "interrupted"
