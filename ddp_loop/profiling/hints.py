"""Hints from the times of a profile: three at most, each with the figure that it follows from."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ddp_loop.profiling.clock import BACKWARD, COMMUNICATION, DATA, FOLD, FORWARD, OPTIMIZER, OTHER, PHASES
from ddp_loop.profiling.times import RankTimes, Surroundings, mean_of, mean_step, percent
from ddp_loop.reporting import slowest

MOST_HINTS = 3
_LEAST = {DATA: 0.1, COMMUNICATION: 0.15, FOLD: 0.2, OPTIMIZER: 0.2, OTHER: 0.15}  # shares of a step worth a hint
_COMPUTES = 0.6  # the share of forward and backward from which idle cores are worth a hint
_MOST_WORKERS = 8  # suggested on fewer cores, since many data sets wait for a disk
_UNEQUAL = 1.1  # the ratio of samples from which a rank has more work


class Hint(NamedTuple):
    """A line of text, and the share of a step that following it can win at most."""

    share: float
    text: str


def hints_of(ranks: Sequence[RankTimes], where: Surroundings) -> tuple[str, ...]:
    """The hints that can win most, the largest first; one line where no phase stands out."""
    if not ranks:
        return ()
    found = sorted(_each(ranks, where), key=lambda hint: -hint.share)[:MOST_HINTS]
    if found:
        return tuple(hint.text for hint in found)
    share = (mean_of(ranks, FORWARD) + mean_of(ranks, BACKWARD)) / mean_step(ranks)
    return (f"No phase stands out. Forward and backward take {percent(share)} of the step.",)


def _each(ranks: Sequence[RankTimes], where: Surroundings) -> Iterator[Hint]:
    late = slowest([vars(one) for one in ranks])
    slow = next((one for one in ranks if one.rank == late), None)
    if slow is not None:
        yield _slow_rank(slow, ranks, where)
    yield from _host_reads(ranks)
    if slow is None or _excess(slow, ranks)[0] != DATA:
        yield from _of_phase(ranks, DATA, "waits for data", f". {_workers(ranks, where)}")
    if slow is None and len(ranks) > 1:
        what = "waits for sums over the ranks that backward does not hide"
        remedy = (
            ". A larger mini-batch, or more shards in it, makes fewer sums per sample; bucket_cap_mib= sets their size."
        )
        yield from _of_phase(ranks, COMMUNICATION, what, remedy)
    yield from _idle_cores(ranks, where)
    yield from _own_work(ranks)


def _of_phase(ranks: Sequence[RankTimes], phase: str, what: str, remedy: str) -> Iterator[Hint]:
    """The hint of a phase that takes much of the step."""
    spent = mean_of(ranks, phase)
    step = mean_step(ranks)
    share = spent / step
    if share >= _LEAST[phase]:
        figure = f"({1000 * spent:.3g} of {1000 * step:.3g} ms)"
        yield Hint(share, f"{percent(share)} of the step {what} {figure}{remedy}")


# -- the rank that the others wait for ---------------------------------------------------------------------


def _excess(slow: RankTimes, ranks: Sequence[RankTimes]) -> tuple[str, float]:
    """The phase in which a rank takes longer than the others, and its time on the others, in seconds."""
    others = {
        phase: statistics.median(one.phases[phase] for one in ranks if one is not slow)
        for phase in PHASES
        if phase != COMMUNICATION
    }
    phase = max(others, key=lambda name: slow.phases[name] - others[name])
    return phase, others[phase]


def _slow_rank(slow: RankTimes, ranks: Sequence[RankTimes], where: Surroundings) -> Hint:
    waits = min(one.wait_s for one in ranks if one is not slow) - slow.wait_s
    share = waits / mean_step(ranks)
    phase, others = _excess(slow, ranks)
    samples = statistics.median(one.samples for one in ranks if one is not slow)
    if slow.samples > _UNEQUAL * samples:
        remedy = (
            f"It gets {slow.samples:.4g} samples a step, the others {samples:.4g}. Choose a number of shards that the "
            "ranks divide."
        )
    elif phase == DATA:
        remedy = f"Its data come later. {_workers(ranks, where)}"
    else:
        remedy = f"Look for lines that rank {slow.rank} alone runs, and for other work on its device and its cores."
    return Hint(
        share,
        f"The other ranks wait for rank {slow.rank} for {percent(share)} of the step ({1000 * waits:.3g} of "
        f"{1000 * mean_step(ranks):.3g} ms). Its phase {phase!r} takes {1000 * slow.phases[phase]:.3g} ms, "
        f"{1000 * others:.3g} on the others. {remedy}",
    )


# -- data --------------------------------------------------------------------------------------------------


def _workers(ranks: Sequence[RankTimes], where: Surroundings) -> str:
    """How to read faster."""
    if where.workers is None:
        return (
            "This process reads and transforms them itself. Do less for each sample, or pass Batches a map-style data "
            "set and num_workers=2."
        )
    slow = max(ranks, key=lambda one: one.phases[DATA])
    rest = max(slow.step_s - slow.phases[DATA] - slow.wait_s, 1e-6)
    if where.workers:
        return (
            f"{where.workers} {'worker is' if where.workers == 1 else 'workers are'} too slow. Try num_workers="
            f"{2 * where.workers}, or do less for each sample."
        )
    # So many workers read a step's data in the time of the rest of the step; one more for the ends of epochs.
    number = min(math.ceil(slow.phases[DATA] / rest) + 1, max(where.cores, _MOST_WORKERS))
    return f"Read them in other processes: dl.Batches(..., num_workers={number})."


# -- the rest ----------------------------------------------------------------------------------------------


def _host_reads(ranks: Sequence[RankTimes]) -> Iterator[Hint]:
    most = max(ranks, key=lambda one: sum(one.reads.values()))
    if (number := sum(most.reads.values())) < 0.5:
        return
    place = max(most.reads, key=lambda name: most.reads[name])
    share = most.phases[OTHER] / most.step_s  # the work after a read waits in no other phase
    yield Hint(
        max(share, 0.5),
        f"The script makes the host wait for the device {number:.3g} times a step, at {place}"
        f"{' and elsewhere' if len(most.reads) > 1 else ''}. Read values one step late, or pass them to step.backward "
        "as metrics, which on_row gets.",
    )


def _idle_cores(ranks: Sequence[RankTimes], where: Surroundings) -> Iterator[Hint]:
    share = (mean_of(ranks, FORWARD) + mean_of(ranks, BACKWARD)) / mean_step(ranks)
    if where.device == "cpu" and share >= _COMPUTES and where.cores >= 2 * where.threads:
        won = share * (1 - where.threads / where.cores)
        yield Hint(
            won,
            f"{percent(share)} of the step is forward and backward, on {where.threads} of the {where.cores} cores that "
            f"each rank could have: join_world(threads={where.cores}), or more ranks.",
        )


def _own_work(ranks: Sequence[RankTimes]) -> Iterator[Hint]:
    if any(one.can_fuse for one in ranks):
        yield from _of_phase(ranks, OPTIMIZER, "is the optimizer", ". Pass it fused=True where it takes that.")
    shards = max(one.shards for one in ranks)
    if shards > 1:
        rest = f", on up to {shards} shards per rank. Fewer, larger shards cost less."
        yield from _of_phase(ranks, FOLD, "is the fold's own work", rest)
    yield from _of_phase(
        ranks,
        OTHER,
        "is outside of its phases",
        ": the script's own lines, checkpoints, or an optimizer that is not torch's. Move what not every step needs "
        "out of the loop.",
    )
