"""A rank that is killed at any moment costs the steps since the last checkpoint, and not a bit.

`python -m tests.faults.kill_workers --times 50` does this fifty times.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ddp_loop.distributed import Pool
from tests.faults.kill_workers import RANKS, Counts, in_the_pool, judge, make_job, under_torchrun


@pytest.mark.slow
@pytest.mark.covers("E5", "H7", "C4")
@pytest.mark.both_exchanges
def test_a_killed_rank_leaves_no_trace_in_the_end(pool: Pool, tmp_path: Path) -> None:
    counts, chance = Counts(), random.Random(1)
    (_, expected), *_ = pool.run(make_job(tmp_path, "undisturbed", epochs=2), RANKS)
    job = make_job(tmp_path, "in a pool", epochs=2)
    in_the_pool(pool, job, 1, 3, chance, counts)
    judge(job, expected, counts)
    job = make_job(tmp_path, "under torchrun", epochs=2)
    under_torchrun(job, 1, 5, chance, counts, tmp_path / "log")
    judge(job, expected, counts)
    assert (counts.broken, counts.kills, counts.equal) == ([], 2, 2)
