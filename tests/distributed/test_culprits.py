"""Whatever a rank does, it is named on the others with its stage and step, and all have ended in time.

The cases are those of `python -m tests.faults.culprits`, which goes through all of them on each rank.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import ddp_loop as dl
from ddp_loop.distributed.failures import RankReport, RankStatus, find_culprit
from tests.faults.culprits import (
    BUSY,
    DEAD,
    DESERTERS,
    LONE_CALL,
    OTHERS,
    OWN_WORKER,
    PLACES,
    ROWS,
    SLEEPER,
    outcome_of,
    wrong,
)
from tests.faults.training import RANKS, Case
from tests.faults.under_torchrun import kill_torchrun
from tests.support.harness import OnRanks
from tests.support.refusals import loop_over, network
from tests.support.training import take

pytestmark = pytest.mark.covers("D10")


def name_of(case: Case) -> str:
    return f"{case.how}, {case.where}, rank {case.culprit}, {case.peers}"


@pytest.mark.parametrize("culprit", range(RANKS))
@pytest.mark.parametrize("where", PLACES)
def test_an_exception_in_any_stage_of_any_rank_is_named(
    where: str, culprit: int, on_ranks: OnRanks, tmp_path: Path
) -> None:
    case = Case("raises", where, culprit)
    outcome = outcome_of(on_ranks, case, tmp_path)
    assert wrong(case, outcome) == []
    assert len(outcome.seen) == RANKS
    kinds = {"making Loop": "ValueError", "fold": "RuntimeError"}  # of a wrong argument, and a wrong call
    assert outcome.seen[culprit].kind == kinds.get(where, "LookupError")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*(one for one in BUSY if one.culprit == 1 and "matrix" not in one.peers), OWN_WORKER, ROWS], ids=name_of
)
def test_peers_that_are_busy_elsewhere_end_too(case: Case, on_ranks: OnRanks, tmp_path: Path) -> None:
    assert wrong(case, outcome_of(on_ranks, case, tmp_path)) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", [*DESERTERS, SLEEPER, LONE_CALL, *OTHERS, *DEAD[:2]], ids=name_of)
@pytest.mark.both_exchanges
def test_a_rank_that_leaves_or_sleeps_or_goes_elsewhere_or_dies_is_named(
    case: Case, on_ranks: OnRanks, tmp_path: Path
) -> None:
    assert wrong(case, outcome_of(on_ranks, case, tmp_path)) == []


def go_apart(how: str) -> tuple[str, str, int | None]:
    """Rank 0 makes a collective of its own after step 3, and rank 1 folds step 4."""
    try:
        with dl.join_world(timeout_s=20) as world:
            for step in loop_over(world, "", model := network()):
                take(step, model)
                if (world.rank, step.iteration) == (0, 3):
                    world.gather("a word") if how == "gathers" else world.sum(torch.ones(2))
    except RuntimeError as error:
        return type(error).__name__, str(error), getattr(error, "rank", None)
    return "", "", None


@pytest.mark.slow
@pytest.mark.both_exchanges
@pytest.mark.parametrize("how", ["gathers", "sums"])
def test_of_two_ranks_that_part_neither_is_blamed_and_both_places_are_named(
    how: str, exchange: str, on_ranks: OnRanks
) -> None:
    for kind, text, blamed in on_ranks(2, go_apart, how):
        assert (kind, blamed) == ({"memory": "Parted", "gloo": "PeerFailed"}[exchange], None)
        places = "rank 0 .* in optimizer of step 3, rank 1 .* a step's sum in fold of step 4"
        assert re.search(places, text), text


@pytest.mark.slow
def test_a_killed_torchrun_leaves_no_rank(tmp_path: Path) -> None:
    assert kill_torchrun(tmp_path).problems == []


def test_ranks_that_all_wait_in_one_collective_point_to_the_network() -> None:
    here = {rank: RankReport(RankStatus("fold", 3, waits="a sum"), "") for rank in range(2)}
    assert find_culprit(here, {}, set(), ["rank 0", "rank 1"], 30.0) == (
        None,
        "All ranks wait in a sum, and it does not end. Check the network between the machines.",
    )
