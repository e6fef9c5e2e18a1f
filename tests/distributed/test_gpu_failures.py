"""One rank of two fails while the other waits for it over the device's backend: it is named there, within FAULT_S.

On fake GPUs over NCCL, and on devices that only an extension of torch has, over theirs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from ddp_loop.distributed import RankFailed
from tests.support.harness import FAULT_S, OnRanks, caught, let_ranks_meet

pytestmark = [pytest.mark.covers("D10"), pytest.mark.covers("J18")]

CULPRIT, STEP = 1, 3
BEGAN = "began"  # the file in which the culprit notes when
SHORT_S = 3.0  # the timeout of a world whose rank hangs


def act(how: str, rows: torch.Tensor, folder: str) -> torch.Tensor:
    """What rank 1 does in the forward of step 3; it notes when."""
    Path(folder, BEGAN).write_text(str(time.monotonic()))
    match how:
        case "runs out of memory":
            torch.empty(2**46, dtype=torch.uint8, device=rows.device)
        case "has a NaN":
            return rows * float("nan")
        case "hangs":
            time.sleep(600)  # the watchdog interrupts it
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
    return rows


def train(how: str, folder: str) -> None:
    let_ranks_meet(device="gpu")
    with dl.join_world(device="gpu", seed=0, timeout_s=SHORT_S if how == "hangs" else 60.0) as world:
        model = nn.Linear(8, 4).to(world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=world.device.type == "cuda")
        batches = dl.Batches((torch.ones(32, 8), torch.zeros(32, dtype=torch.long)), 4, world)
        state = {"model": model, "optimizer": optimizer}
        for step in dl.Loop(batches, 1, state=state, progress=False):
            fails = (world.rank, step.iteration) == (CULPRIT, STEP)
            if fails and how == "leaves the loop":
                act(how, torch.empty(0), folder)
                break
            for rows, labels in step:
                step.backward(cross_entropy(model(act(how, rows, folder) if fails else rows), labels))
            step.fold()
            optimizer.step()


def fail(how: str, folder: str) -> tuple[str, str, float]:
    """What this rank raises, and when, for the test and, where the other one dies, in a file."""
    kind, text, _ = caught(train, how, folder)
    found = kind, text, time.monotonic()
    Path(folder, f"rank-{os.environ['RANK']}").write_text(json.dumps(found))
    return found


@pytest.fixture(params=["gpus", "npus"])
def on_devices(request: pytest.FixtureRequest) -> OnRanks:
    chosen: OnRanks = request.getfixturevalue(f"on_fake_{request.param}")
    return chosen


def seconds_until(named: float, folder: Path) -> float:
    return named - float((folder / BEGAN).read_text())


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        (
            "runs out of memory",
            "PeerFailed",
            "rank 1 failed in forward of step 3: torch.OutOfMemoryError: .* out of memory",
        ),
        ("leaves the loop", "PeerFailed", "rank 1 failed in data of step 3: it left the loop in step 3"),
        ("has a NaN", "FloatingPointError", "The loss of step 3 is nan, from shard 1 of 2"),
        pytest.param("hangs", "PeerFailed", "Rank 1 is still in forward of step 3", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_on_a_gpu_is_named_by_the_other_one(
    on_devices: OnRanks, tmp_path: Path, how: str, kind: str, said: str
) -> None:
    raised, text, at = on_devices(2, fail, how, str(tmp_path))[0]
    assert raised == kind
    assert re.search(said, text), text
    assert seconds_until(at, tmp_path) < FAULT_S + SHORT_S * (how == "hangs")


@pytest.mark.slow
def test_a_rank_that_is_killed_on_a_gpu_is_named_by_the_other_one(on_devices: OnRanks, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 "):
        on_devices(2, fail, "is killed", str(tmp_path))
    kind, text, at = json.loads((tmp_path / "rank-0").read_text())
    assert kind == "PeerFailed"
    assert "Rank 1 does not answer (killed" in text
    assert seconds_until(at, tmp_path) < FAULT_S
