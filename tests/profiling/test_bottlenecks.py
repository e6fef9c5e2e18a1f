"""`profile` names the bottleneck that was planted in a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.harness import OnRanks
from tests.support.profiles import line_of, planted, profiled

pytestmark = pytest.mark.covers("J11")


def hints_in(lines: list[str]) -> list[str]:
    return [line[2:] for line in lines if line.startswith("* ")]


def milliseconds(hint: str, words: str) -> float:
    """The number that follows these words."""
    return float(hint.split(words)[1].split()[0])


@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
def test_a_slow_data_set_is_named_with_its_share_and_the_number_of_workers(on_ranks: OnRanks, tmp_path: Path) -> None:
    first, *others = hints_in(profiled(on_ranks, planted(tmp_path, "READ", "spend(0.003)")))
    assert "of the step waits for data (" in first
    assert "dl.Batches(..., num_workers=" in first
    assert len(others) <= 2


@pytest.mark.on_gpus_too
def test_the_rank_that_the_others_wait_for_is_named_with_the_phase_that_takes_longer(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    script = planted(tmp_path, "FORWARD", "spend(0.1 * (world.rank == 1))")
    first, *others = hints_in(profiled(on_ranks, script, ranks=3))
    assert first.startswith("The other ranks wait for rank 1 for ")
    assert milliseconds(first, "Its phase 'forward' takes ") >= 100
    assert len(others) <= 2


@pytest.mark.on_gpus_too
@pytest.mark.one_device("gpu", "a value of the CPU can be read at once")
def test_a_host_read_in_each_step_is_named_with_its_line(on_ranks: OnRanks, tmp_path: Path) -> None:
    script = planted(tmp_path, "AFTER", "result.loss.item()")
    hints = hints_in(profiled(on_ranks, script))
    said = f"The script makes the host wait for the device 1 times a step, at train.py:{line_of(script, 'AFTER')}."
    assert [hint for hint in hints if hint.startswith(said)]
    assert len(hints) <= 3


@pytest.mark.on_gpus_too
@pytest.mark.one_device("gpu", "a value of the CPU can be read at once")
def test_a_script_without_a_host_read_has_none_and_neither_has_the_package(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert "host" not in "\n".join(profiled(on_ranks, planted(tmp_path)))


def test_data_that_are_late_on_one_rank_alone_are_one_hint(on_ranks: OnRanks, tmp_path: Path) -> None:
    script = planted(tmp_path, "READ", "spend(0.005 * (os.environ['RANK'] == '1'))")
    hints = hints_in(profiled(on_ranks, script))
    assert hints[0].startswith("The other ranks wait for rank 1 for ")
    assert "Its phase 'data' takes" in hints[0]
    assert "num_workers=" in hints[0]
    assert not [hint for hint in hints if "waits for data" in hint]


@pytest.mark.parametrize("ranks", [1, 3])
def test_lines_of_the_script_after_the_step_are_outside_of_its_phases(
    ranks: int, on_ranks: OnRanks, tmp_path: Path
) -> None:
    words = "of the step is outside of its phases ("
    hints = hints_in(profiled(on_ranks, planted(tmp_path, "AFTER", "spend(0.03)"), ranks=ranks))
    assert milliseconds(hints[0], words) >= 30
