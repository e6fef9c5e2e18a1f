"""`python -m ddp_loop verify` of the examples: correct scripts are equal on any number of ranks."""

from __future__ import annotations

import re

import pytest

from ddp_loop.distributed import Pool
from tests.support.paths import EXAMPLES
from tests.support.scripts import run, verdict_of

SMALL = ("--batch-size", "26", "--epochs", "1", "--device", "cpu")


@pytest.mark.slow
@pytest.mark.covers("H9")
def test_the_command_verifies_a_script_by_epochs_without_with() -> None:
    ended = run("-m", "ddp_loop", "verify", "examples/migrate/after/plain.py", "--steps", "2", "--ranks", "1,2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0].startswith(
        "examples/migrate/after/plain.py runs to its end, and each Loop ends early, without a run"
    )
    assert lines[-1].startswith("EQUAL on 1, 2 ranks: the same ")


@pytest.mark.slow
@pytest.mark.covers("H9")
def test_the_digit_example_gives_the_same_bits_on_1_2_and_3_ranks_with_fixed_shards(pool: Pool) -> None:
    equal, said = verdict_of(EXAMPLES / "digits" / "train.py", pool, arguments=("--shards", "6", *SMALL), steps=3)
    assert equal, said
    lines = said.splitlines()
    assert lines[-1] == "EQUAL on 1, 2, 3 ranks: the same bits, in the whole state after 3 steps."
    assert said.count("the same bits") == 3


@pytest.mark.covers("H9")
@pytest.mark.slow
def test_with_one_shard_per_rank_local_batch_norm_is_unequal_and_the_remedy_is_named(pool: Pool) -> None:
    equal, said = verdict_of(EXAMPLES / "digits" / "train.py", pool, (1, 2), arguments=SMALL, steps=3)
    assert not equal
    assert "UNEQUAL on 2 ranks. Step 1, fold: `gradient of model." in said
    assert "into 1 and 2 shards" in said
    assert re.search(r"largest difference of the gradients: .*, [\d,]+ times the tolerance for rounding$", said, re.M)
    assert "batch norm" in said
    assert "--shards" in said
