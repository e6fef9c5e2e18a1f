"""`optuna-dashboard` opens a sweep's storage."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from ddp_loop.sweeps.jobs import FunctionJob
from ddp_loop.sweeps.plan import make_plan
from ddp_loop.sweeps.results import begun
from tests.support.harness import TASK_S, held_ports, until
from tests.support.sweep_jobs import train

PROGRAM = shutil.which("optuna-dashboard", path=str(Path(sys.executable).parent))


def answer(url: str) -> Any:
    """The JSON that a server answers with; None while it does not listen."""
    with suppress(URLError, ConnectionError), urllib.request.urlopen(url, timeout=TASK_S) as response:
        return json.loads(response.read())
    return None


@pytest.mark.slow
def test_the_dashboard_lists_the_trials_of_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="needs the extra sweep")
    if PROGRAM is None:
        pytest.skip("needs optuna-dashboard, which is not installed")
    folder = tmp_path / "digits"
    with begun(make_plan(FunctionJob(train), {"rate": [0.1, 0.05, 0.01]}, {}), folder, None):
        pass
    command = [PROGRAM, f"sqlite:///{folder}/study.db"]
    with (
        held_ports(1) as [port],
        subprocess.Popen([*command, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process,
    ):
        try:
            page = f"http://127.0.0.1:{port}/api/studies"
            listed = until(lambda: answer(page), "the dashboard answers", TASK_S)
            [study] = listed["study_summaries"]
            assert study["study_name"] == "digits"
            trials = answer(f"{page}/{study['study_id']}")["trials"]
        finally:
            process.terminate()
    assert [one["params"][0]["param_external_value"] for one in trials] == ["0.1", "0.05", "0.01"]
