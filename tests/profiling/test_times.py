"""The table of a profile, and the hints that follow from its times."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ddp_loop.profiling.clock import PHASES
from ddp_loop.profiling.hints import hints_of
from ddp_loop.profiling.times import Profile, RankTimes, Surroundings

CPU = Surroundings(device="cpu", ranks=2, threads=1, cores=1, workers=0, warm_up=5, asked=20)


def times(rank: int = 0, /, **milliseconds: float) -> RankTimes:
    """The times of 20 steps of a rank from the milliseconds in each phase."""
    steps = 20
    spent = {phase: steps * milliseconds.get(phase, 0.0) / 1000 for phase in PHASES}
    return RankTimes.of(rank, steps, spent, samples=64.0, shards=1, reads={}, can_fuse=True)


def of(where: Surroundings, *ranks: RankTimes) -> Profile:
    return Profile(where, ranks, hints_of(ranks, where))


def test_the_table_has_a_row_for_each_rank_and_the_share_of_each_phase() -> None:
    ranks = [
        times(0, data=4, forward=2, backward=3, communication=0.5, other=0.5),
        times(1, data=5, forward=2, backward=3),
    ]
    assert of(CPU, *ranks).lines() == [
        "Profile: 20 steps after 5 of warm-up, 2 ranks on cpu. Milliseconds per step:",
        " rank   step  data  forward  backward  communication  fold  optimizer  other",
        "    0  10.00  4.00     2.00      3.00           0.50  0.00       0.00   0.50",
        "    1  10.00  5.00     2.00      3.00           0.00  0.00       0.00   0.00",
        "share         45 %     20 %      30 %            2 %   0 %        0 %    2 %",
        "* 45 % of the step waits for data (4.5 of 10 ms). Read them in other processes: dl.Batches(..., "
        "num_workers=2).",
    ]


def test_a_profile_is_the_same_after_it_was_written_and_read() -> None:
    profile = of(CPU, times(0, data=4, forward=2), times(1, forward=9))
    written = json.loads(json.dumps(profile.as_json()))
    assert [RankTimes(**one) for one in written["ranks"]] == list(profile.ranks)
    assert written["lines"] == profile.lines()


def test_of_many_ranks_those_are_shown_that_wait_least_and_most() -> None:
    ranks = [times(rank, forward=100 - rank, communication=rank) for rank in range(40)]
    heading, *lines = of(replace(CPU, ranks=40), *ranks).lines()
    assert "40 ranks on cpu, 16 of them below" in heading
    assert [int(line.split()[0]) for line in lines[1:17]] == [*range(8), *range(32, 40)]


def test_ranks_without_times_and_steps_that_were_not_made_are_named() -> None:
    said = of(
        replace(CPU, ranks=4), replace(times(1, forward=1), steps=6), replace(times(3, forward=1), steps=7)
    ).lines()[0]
    assert said == (
        "Profile: 6 of 20 steps after 5 of warm-up, 4 ranks on cpu, without ranks 0, 2, which sent no times. "
        "Milliseconds per step:"
    )


BUSY = {"forward": 4.0, "backward": 5.0}

HINTS: dict[str, tuple[Surroundings, list[RankTimes], list[str]]] = {
    "nothing": (CPU, [times(**BUSY, fold=1)], ["No phase stands out. Forward and backward take 90 % of the step."]),
    "tensors that this process reads": (
        replace(CPU, workers=None),
        [times(**BUSY, data=9)],
        ["50 % of the step waits for data (9 of 18 ms). This process reads and transforms them itself."],
    ),
    "too few workers": (
        replace(CPU, workers=2),
        [times(**BUSY, data=9)],
        ["50 % of the step waits for data (9 of 18 ms). 2 workers are too slow. Try num_workers=4"],
    ),
    "a slow rank with more samples": (
        CPU,
        [replace(times(0, **BUSY), samples=128.0), times(1, forward=2, backward=2.5, communication=4.5)],
        [
            "The other ranks wait for rank 0 for 50 % of the step (4.5 of 9 ms). Its phase 'backward' takes 5 ms, 2.5 "
            "on the others. It gets 128 samples a step, the others 64."
        ],
    ),
    "sums that backward does not hide": (
        CPU,
        [times(rank, **BUSY, communication=9) for rank in range(2)],
        ["50 % of the step waits for sums over the ranks that backward does not hide (9 of 18 ms)."],
    ),
    "cores that nothing uses": (
        replace(CPU, cores=8),
        [times(**BUSY)],
        ["100 % of the step is forward and backward, on 1 of the 8 cores that each rank could have: join_world(thre"],
    ),
    "the optimizer": (
        CPU,
        [times(**BUSY, optimizer=9)],
        ["50 % of the step is the optimizer (9 of 18 ms). Pass it fused=True"],
    ),
    "many shards": (
        CPU,
        [replace(times(**BUSY, fold=9), shards=32)],
        ["50 % of the step is the fold's own work (9 of 18 ms), on up to 32 shards per rank."],
    ),
    "lines of the script": (
        replace(CPU, cores=8),  # which forward and backward could use, but they are half of the step
        [times(**BUSY, other=9)],
        ["50 % of the step is outside of its phases (9 of 18 ms)"],
    ),
    "host reads": (
        replace(CPU, device="cuda"),
        [replace(times(**BUSY), reads={"train.py:41": 2.0, "model.py:7": 0.5})],
        ["The script makes the host wait for the device 2.5 times a step, at train.py:41 and elsewhere. Read values"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("where", "ranks", "said"), HINTS.values(), ids=HINTS)
def test_a_hint_has_the_figure_that_it_follows_from(
    where: Surroundings, ranks: list[RankTimes], said: list[str]
) -> None:
    found = hints_of(ranks, where)
    assert len(found) == len(said)
    assert [hint[: len(text)] for hint, text in zip(found, said, strict=True)] == said


def test_there_are_three_hints_at_most_those_that_can_win_most() -> None:
    one = replace(times(data=3, forward=1, optimizer=4, fold=3.5, other=2.5), shards=4)
    shares = [hint.partition(" %")[0] for hint in hints_of([one], CPU)]
    assert shares == ["29", "25", "21"]
    assert hints_of([], CPU) == ()
