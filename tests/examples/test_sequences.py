"""The example of sequences, run as a user runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.paths import EXAMPLES
from tests.support.scripts import run

FOLDER = EXAMPLES / "sequences"
SHORT = ("--cell", "gru", "--epochs", "2", "--shards", "2")


def recalled(printed: str) -> float:
    found = re.search(r"^Recalled after the first chunk: (\d\.\d{4})$", printed, re.MULTILINE)
    assert found is not None, printed
    return float(found[1])


@pytest.mark.slow
@pytest.mark.covers("D9")
def test_the_carried_state_recalls_the_symbol_and_two_ranks_have_the_bits_of_one_process(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    losses = []
    for name, command in (("alone", ["train.py"]), ("together", [*torchrun, "train.py"])):
        done = run(*command, *SHORT, "--run-dir", str(tmp_path / name), folder=FOLDER)
        assert done.returncode == 0, done.stderr
        assert recalled(done.stdout) > 0.95
        rows = [json.loads(line) for line in (tmp_path / name / "rows.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows])
    assert len(losses[0]) == 2 * 109
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.covers("D9")
def test_without_the_carried_state_the_symbol_is_guessed() -> None:
    done = run("train.py", *SHORT, "--forget", folder=FOLDER)
    assert done.returncode == 0, done.stderr
    assert abs(recalled(done.stdout) - 0.25) < 0.05
