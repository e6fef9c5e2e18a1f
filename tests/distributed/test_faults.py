"""An exception in one rank's loop, wherever it is raised, ends all ranks, named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ddp_loop as dl
from tests.support.harness import FAULT_S
from tests.support.paths import ROOT
from tests.support.refusals import (
    Caught,
    Refused,
    assert_whole_lines,
    loop_over,
    loss_of,
    network,
    on_this_rank,
    samples,
)

WHERE = {
    "before the step": " in data of step 3",
    "forward": " in forward of step 3",
    "before fold": " in backward of step 3",
    "after fold": " in optimizer of step 3",
    "evaluate": " in evaluate of step 3",
}
PLACES = list(WHERE)


def fail_at(
    world: dl.World, folder: str, place: str, culprit: int, error: type[BaseException], bucket_cap_mib: float = 8.0
) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail_here(here: str) -> None:
        if here == place and world.rank == culprit and (step is None or step.iteration == 3):
            raise error("a fault at the third step")

    def metric(output: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        fail_here("evaluate")
        return output.mean()

    def on_row(row: dict[str, Any]) -> None:  # usually while a later step is iterated
        if place == "the row" and world.rank == culprit and row["iteration"] == 3:
            raise error("a fault at the third step")

    step: dl.Step | None = None
    for step in loop_over(world, folder, model, optimizer, on_row=on_row, bucket_cap_mib=bucket_cap_mib):
        fail_here("before the step")
        for rows in step:
            fail_here("forward")
            step.backward(loss_of(model, rows))
        fail_here("before fold")
        step.fold()
        fail_here("after fold")
        optimizer.step()
        dl.evaluate(model, dl.Batches(samples(9), 4, world), mean=metric)


@pytest.mark.covers("D10")
@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("bucket_cap_mib", [8.0, 1e-5])  # one sum a step; a sum per parameter, begun in backward
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.slow
def test_an_exception_in_one_ranks_loop_ends_all(
    place: str, bucket_cap_mib: float, culprit: int, refused: Refused
) -> None:
    said = "a fault at the third step"
    arguments = place, culprit, LookupError, bucket_cap_mib
    results = refused(3, fail_at, *arguments, kind="LookupError", said=said, by=culprit)
    for rank, result in enumerate(results):
        if rank != culprit:
            said_first = result.text.splitlines()[0]
            assert said_first == f"rank {culprit} failed{WHERE[place]}: LookupError: a fault at the third step"
            assert re.search(r"Traceback \(most recent call last\):\n.*in fail_here\n", result.text, re.DOTALL)


def fail_in_a_new_process(folder: str) -> Caught:
    return on_this_rank(fail_at, folder, ("forward", 1, LookupError), warm=False)


@pytest.mark.covers("D10")
@pytest.mark.slow
def test_an_exception_ends_all_also_where_the_first_optimizer_was_made_since_joining(tmp_path: Path) -> None:
    # It imports torch._dynamo, which keeps references to the process group, and with them the connections.
    first, second = dl.launch(fail_in_a_new_process, 2, str(tmp_path))
    assert (first.kind, second.kind) == ("PeerFailed", "LookupError")
    assert abs(first.took_s - second.took_s) < FAULT_S


@pytest.mark.covers("D10")
def test_an_exception_in_the_callback_of_rank_0_ends_all(refused: Refused) -> None:
    refused(3, fail_at, "the row", 0, LookupError, kind="LookupError", said="a fault at the third step", by=0)


@pytest.mark.covers("D10")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_one_rank_that_is_interrupted_or_exits_ends_all(error: type[BaseException], refused: Refused) -> None:
    refused(2, fail_at, "forward", 1, error, kind=error.__name__, said="a fault at the third step", by=1)


class Unreadable(torch.utils.data.Dataset[torch.Tensor]):
    """Sample 13 cannot be read."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 13:
            raise OSError("sample 13 is on a bad sector")
        return samples(24)[index]


def read_badly(world: dl.World, folder: str) -> None:
    model = network()
    loop = dl.Loop(dl.Batches(Unreadable(), 6, world, shuffle=False), 1, state={"model": model}, progress=False)
    for step in loop:
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()


@pytest.mark.covers("D10")
def test_a_sample_that_cannot_be_read_ends_all(refused: Refused) -> None:
    refused(3, read_badly, kind="OSError", said="sample 13 is on a bad sector", by=0)


SCRIPT = """
import sys
import torch
import ddp_loop as dl

with dl.join_world(seed=0) as world:
    model = torch.nn.Linear(4, 1).to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = dl.Batches(torch.ones(64, 4), 8, world)
    for step in dl.Loop(batches, 2, state=dict(model=model, optimizer=optimizer), run_dir=sys.argv[2]):
        for rows in step:
            step.backward(model(rows).mean())
        if world.rank == 1 and step.iteration == 3:
            if sys.argv[1] == "raise":
                raise LookupError("the fault of rank 1 at step 3")
            sys.exit(0)
        step.fold()
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.covers("D10")
@pytest.mark.parametrize(
    ("how", "said"), [("raise", "LookupError: the fault of rank 1 at step 3"), ("exit", "SystemExit: 0")]
)
def test_torchrun_ends_with_a_code_that_is_not_0_and_shows_the_culprit(how: str, said: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script), how,
         str(tmp_path / "run")],
        capture_output=True, text=True, timeout=100, check=False, env={**os.environ, **variables},
    )  # fmt: skip
    assert ended.returncode != 0
    assert said in ended.stderr
    assert "rank 1 failed" in ended.stderr or how == "raise"
    assert_whole_lines(tmp_path / "run")
