"""The example of sequences, run as a user runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.harness import OnRanks
from tests.support.scripts import run_here

SCRIPT = "sequences/train.py"
SHORT = ("--cell", "gru", "--epochs", "2", "--shards", "2")


def recalled(printed: str) -> float:
    found = re.search(r"^Recalled after the first chunk: (\d\.\d{4})$", printed, re.MULTILINE)
    assert found is not None, printed
    return float(found[1])


@pytest.mark.slow
@pytest.mark.covers("D9")
def test_the_carried_state_recalls_the_symbol_and_two_ranks_have_the_bits_of_one_process(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    losses = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        printed = on_ranks(ranks, run_here, SCRIPT, *SHORT, "--run-dir", str(folder))[0]
        assert recalled(printed) > 0.95
        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows])
    assert len(losses[0]) == 2 * 109
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.covers("D9")
def test_without_the_carried_state_the_symbol_is_guessed(on_ranks: OnRanks) -> None:
    (printed,) = on_ranks(1, run_here, SCRIPT, *SHORT, "--forget")
    assert abs(recalled(printed) - 0.25) < 0.05
