"""The README's example on two ranks, and the README's commands on the run that it leaves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_loop.cli import main
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

TRAIN_S = 600.0
COMMANDS = {
    "checkpoints runs/digits": "step-00000071",
    "best runs": "eval loss",
    "plot runs/digits": "loss.png",
    "export runs/digits -o w.safetensors": "tensors of model",
}


def test_the_example_trains_and_the_commands_take_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "README.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "train.py").write_text(example.replace("dl.Loop(batches, 20,", "dl.Loop(batches, 1,"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = subprocess.run(
        [sys.executable, "-m", "ddp_loop", "run", "--ranks", "2", "train.py"],
        capture_output=True,
        text=True,
        timeout=TRAIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'accuracy': " in done.stdout
    for command, said in COMMANDS.items():
        assert command in text
        assert main(command.split()) == 0
        assert said in capsys.readouterr().out, command
