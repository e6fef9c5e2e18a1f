"""The example of sequences, run as a user runs it."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.support.harness import OnRanks
from tests.support.paths import EXAMPLES
from tests.support.scripts import load, run

FOLDER = EXAMPLES / "sequences"
SHORT = ("--cell", "gru", "--epochs", "2", "--shards", "2")


def run_here(*arguments: str) -> str:
    """What the example prints on this rank."""
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", ["train.py", *arguments]), contextlib.redirect_stdout(printed):
        load("sequences/train").main()
    return printed.getvalue()


def recalled(printed: str) -> float:
    found = re.search(r"^Recalled after the first chunk: (\d\.\d{4})$", printed, re.MULTILINE)
    assert found is not None, printed
    return float(found[1])


@pytest.mark.slow
@pytest.mark.covers("D9")
def test_the_carried_state_recalls_the_symbol_and_two_ranks_have_the_bits_of_one_process(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    alone, together = ([*SHORT, "--run-dir", str(tmp_path / name)] for name in ("alone", "together"))
    done = run(*torchrun, *together, folder=FOLDER)
    assert done.returncode == 0, done.stderr
    losses = []
    for name, printed in (("alone", on_ranks(1, run_here, *alone)[0]), ("together", done.stdout)):
        assert recalled(printed) > 0.95
        rows = [json.loads(line) for line in (tmp_path / name / "rows.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows])
    assert len(losses[0]) == 2 * 109
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.covers("D9")
def test_without_the_carried_state_the_symbol_is_guessed(on_ranks: OnRanks) -> None:
    (printed,) = on_ranks(1, run_here, *SHORT, "--forget")
    assert abs(recalled(printed) - 0.25) < 0.05
