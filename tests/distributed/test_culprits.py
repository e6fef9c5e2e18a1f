"""Whatever a rank does, it is named on the others with its stage and step, and all have ended in time.

The cases are those of `python -m tests.faults.culprits`, which goes through all of them on each rank.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.culprits import (
    BUSY,
    DEAD,
    DESERTERS,
    OTHERS,
    OWN_WORKER,
    PLACES,
    RAISES,
    ROWS,
    SLEEPER,
    outcome_of,
    wrong,
)
from tests.faults.training import RANKS, Case
from tests.faults.under_torchrun import kill_torchrun
from tests.support.harness import OnRanks


def name_of(case: Case) -> str:
    return f"{case.how}, {case.where}, rank {case.culprit}, {case.peers}"


@pytest.mark.covers("D10")
@pytest.mark.parametrize("case", [*RAISES, ROWS], ids=name_of)
def test_an_exception_in_any_stage_of_any_rank_is_named(case: Case, on_ranks: OnRanks, tmp_path: Path) -> None:
    outcome = outcome_of(on_ranks, case, tmp_path)
    assert wrong(case, outcome) == []
    assert len(outcome.seen) == RANKS
    assert outcome.seen[case.culprit].kind in ("LookupError", "ValueError", "RuntimeError")


def test_there_are_thirty_of_them_and_more() -> None:
    assert len({(case.where, case.culprit) for case in RAISES}) >= 30
    assert all(stage for place, (stage, _) in PLACES.items() if place not in ("making Batches", "end of the script"))


@pytest.mark.slow
@pytest.mark.covers("D10")
@pytest.mark.parametrize(
    "case", [*(one for one in BUSY if one.culprit == 1 and "matrix" not in one.peers), OWN_WORKER], ids=name_of
)
def test_peers_that_are_busy_elsewhere_end_too(case: Case, on_ranks: OnRanks, tmp_path: Path) -> None:
    assert wrong(case, outcome_of(on_ranks, case, tmp_path)) == []


@pytest.mark.slow
@pytest.mark.covers("D10")
@pytest.mark.parametrize("case", [*DESERTERS, SLEEPER, *OTHERS, *DEAD[:2]], ids=name_of)
def test_a_rank_that_leaves_or_sleeps_or_goes_elsewhere_or_dies_is_named(
    case: Case, on_ranks: OnRanks, tmp_path: Path
) -> None:
    assert wrong(case, outcome_of(on_ranks, case, tmp_path)) == []


@pytest.mark.slow
@pytest.mark.covers("D10")
def test_a_killed_torchrun_leaves_no_rank(tmp_path: Path) -> None:
    assert kill_torchrun(tmp_path).problems == []
