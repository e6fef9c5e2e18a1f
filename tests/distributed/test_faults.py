"""An exception in one rank's loop that meets something special: sums in backward, a callback, a fresh process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ddp_loop as dl
from tests.support.harness import FAULT_S
from tests.support.refusals import Caught, Refused, loop_over, loss_of, network, on_this_rank

pytestmark = pytest.mark.covers("D10")

SAID = "a fault at the third step"


def fail(world: dl.World, folder: str, place: str, culprit: int, bucket_cap_mib: float = 8.0) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail_here(here: str, iteration: int) -> None:
        if (here, world.rank, iteration) == (place, culprit, 3):
            raise LookupError(SAID)

    def on_row(row: dict[str, Any]) -> None:  # usually while a later step is iterated
        fail_here("the row", row["iteration"])

    for step in loop_over(world, folder, model, optimizer, on_row=on_row, bucket_cap_mib=bucket_cap_mib):
        for rows in step:
            fail_here("forward", step.iteration)
            step.backward(loss_of(model, rows))
        fail_here("backward", step.iteration)
        step.fold()
        optimizer.step()


@pytest.mark.parametrize(("place", "culprit"), [("forward", 2), ("backward", 1)])
def test_an_exception_ends_all_also_where_sums_of_the_others_are_under_way(
    place: str, culprit: int, refused: Refused
) -> None:
    """A sum for each parameter, begun in backward."""
    results = refused(3, fail, place, culprit, 1e-5, kind="LookupError", said=SAID, by=culprit)
    first = f"rank {culprit} failed in {place} of step 3: LookupError: {SAID}"
    assert [one.text.splitlines()[0] for rank, one in enumerate(results) if rank != culprit] == [first] * 2


@pytest.mark.slow
def test_an_exception_ends_all_also_where_the_first_optimizer_was_made_since_joining(tmp_path: Path) -> None:
    # It imports torch._dynamo, which keeps references to the process group, and with them the connections.
    first, second = dl.launch(fail_in_a_new_process, 2, str(tmp_path))
    assert (first.kind, second.kind) == ("PeerFailed", "LookupError")
    assert abs(first.took_s - second.took_s) < FAULT_S


def fail_in_a_new_process(folder: str) -> Caught:
    return on_this_rank(fail, folder, ("forward", 1), warm=False)


def test_an_exception_in_the_callback_of_rank_0_ends_all(refused: Refused) -> None:
    refused(3, fail, "the row", 0, kind="LookupError", said=SAID, by=0)
