"""A rank that is killed at any moment costs the steps since the last checkpoint, and not a bit.

`python -m tests.faults.kill_workers --times 50` does this fifty times.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_loop.distributed import Pool
from tests.faults.job import Mark
from tests.faults.kill_workers import RANKS, Counts, in_the_pool, judge, make_job, under_torchrun
from tests.support.harness import TASK_S
from tests.support.paths import ROOT


@pytest.mark.slow
@pytest.mark.covers("E5", "H7", "C4")
@pytest.mark.both_exchanges
def test_a_killed_rank_leaves_no_trace_in_the_end(pool: Pool, tmp_path: Path) -> None:
    counts, chance = Counts(), random.Random(1)
    (_, expected), *_ = pool.run(make_job(tmp_path, "undisturbed", epochs=3), RANKS)
    in_pool = make_job(tmp_path, "in a pool", epochs=3)
    in_the_pool(pool, in_pool, 1, 3, chance, counts, once_saved=True)
    judge(in_pool, expected, counts)
    restarted = make_job(tmp_path, "under torchrun", epochs=3)
    under_torchrun(restarted, 1, 5, chance, counts, tmp_path / "log", ranks=2, once_saved=True)
    judge(restarted, expected, counts)
    assert (counts.broken, counts.kills, counts.equal) == ([], 2, 2)
    first_steps = [Mark(Path(job.marks), 0)["first"] for job in (in_pool, restarted)]
    assert min(first_steps) > 1, "the last attempts started over instead of resuming from a checkpoint"


@pytest.mark.slow
@pytest.mark.covers("D10")
@pytest.mark.both_exchanges
def test_a_killed_rank_is_named_by_all_others_and_nothing_is_left_of_it(exchange: str) -> None:
    command = [sys.executable, "-m", "tests.faults.notice_kills", "--times=4", f"--exchange={exchange}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TASK_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 kills, 8 ranks raised PeerFailed" in ended.stdout
