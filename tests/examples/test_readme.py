"""The README's example on two ranks, and the README's commands on the run that it leaves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

TRAIN_S = 600.0
COMMANDS = {
    "checkpoints runs/digits": "step-00000071",
    "best runs": "eval loss",
    "plot runs/digits": "loss.png",
    "export runs/digits -o w.safetensors": "tensors of model",
}


def test_the_example_trains_and_the_commands_take_its_run(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "train.py").write_text(example.replace("dl.Loop(batches, 20,", "dl.Loop(batches, 1,"))
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "ddp_loop", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=TRAIN_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "'accuracy': " in run("run", "--ranks", "2", "train.py")
    for command, said in COMMANDS.items():
        assert command in text
        assert said in run(*command.split()), command
