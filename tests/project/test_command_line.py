"""`python -m ddp_loop`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddp_loop.cli import main
from ddp_loop.distributed import describe_devices

START_S = 60.0  # importing torch takes 2 s on an idle core


@pytest.mark.covers("C1")
@pytest.mark.slow
def test_devices_says_what_is_there_and_how_to_use_it() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "ddp_loop", "devices"], capture_output=True, text=True, timeout=START_S, check=False
    )
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout == describe_devices() + "\n"
    ranks = torch.cuda.device_count() or 2
    assert f"python -m ddp_loop run --ranks {ranks} train.py" in said.stdout


@pytest.mark.covers("C1")
def test_the_same_from_python(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == 0
    assert capsys.readouterr().out == describe_devices() + "\n"


@pytest.mark.parametrize("arguments", [[], ["device"], ["devices", "--gpus"]])
def test_what_is_no_command_is_refused_with_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert "usage: python -m ddp_loop" in capsys.readouterr().err


@pytest.mark.slow
def test_the_exit_code_of_a_command_is_that_of_its_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ddp_loop", "checkpoints", str(tmp_path / "none")],
        capture_output=True, text=True, timeout=START_S, check=False,
    )  # fmt: skip
    assert (done.returncode, main(["checkpoints", str(tmp_path / "none")])) == (2, 2)
