"""What starts a script of a test, and ends it with the test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT
from tests.support.scripts import SCRIPT_S, StartPython


@pytest.fixture
def start_python() -> Iterator[StartPython]:
    """Start an interpreter that finds the project, its stdout and stderr in pipes; it ends with the test."""
    started = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, *arguments],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=SCRIPT_S)
