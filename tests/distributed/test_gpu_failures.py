"""One rank of two fails while the other waits for it over NCCL, on fake GPUs: it is named there."""

from __future__ import annotations

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
from tests.support.harness import OnRanks, caught

pytestmark = [pytest.mark.covers("D10"), pytest.mark.covers("J18")]

CULPRIT, STEP = 1, 3
SHORT_S = 3.0  # the timeout of a world whose rank hangs


def act(how: str, rows: torch.Tensor) -> torch.Tensor:
    """What rank 1 does in the forward of step 3."""
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


def train(how: str) -> None:
    with dl.join_world(device="gpu", seed=0, timeout_s=SHORT_S if how == "hangs" else 60.0) as world:
        model = nn.Linear(8, 4).to(world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        batches = dl.Batches((torch.ones(32, 8), torch.zeros(32, dtype=torch.long)), 4, world)
        state = {"model": model, "optimizer": optimizer}
        for step in dl.Loop(batches, 1, state=state, progress=False):
            fails = (world.rank, step.iteration) == (CULPRIT, STEP)
            if fails and how == "leaves the loop":
                break
            for rows, labels in step:
                step.backward(cross_entropy(model(act(how, rows) if fails else rows), labels))
            step.fold()
            optimizer.step()


def fail(how: str, folder: str) -> tuple[str, str]:
    """What this rank raises, for the test and, where the other one dies, in a file."""
    kind, text, _ = caught(train, how)
    Path(folder, f"rank-{os.environ['RANK']}").write_text(f"{kind}: {text}")
    return kind, text


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        (
            "runs out of memory",
            "PeerFailed",
            "rank 1 failed in forward of step 3: torch.OutOfMemoryError: CUDA out of memory",
        ),
        ("leaves the loop", "PeerFailed", "rank 1 failed in data of step 3: .* it left the loop in step 3"),
        ("has a NaN", "FloatingPointError", "The loss of step 3 is nan, from shard 1 of 2"),
        pytest.param("hangs", "PeerFailed", "Rank 1 is still in forward of step 3", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_on_a_gpu_is_named_by_the_other_one(
    on_fake_gpus: OnRanks, tmp_path: Path, how: str, kind: str, said: str
) -> None:
    raised, text = on_fake_gpus(2, fail, how, str(tmp_path))[0]
    assert raised == kind
    assert re.search(said, text), text


@pytest.mark.slow
def test_a_rank_that_is_killed_on_a_gpu_is_named_by_the_other_one(on_fake_gpus: OnRanks, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 "):
        on_fake_gpus(2, fail, "is killed", str(tmp_path))
    text = (tmp_path / "rank-0").read_text()
    assert text.startswith("PeerFailed: ")
    assert "Rank 1 does not answer (killed" in text
