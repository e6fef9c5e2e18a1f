"""The times of all ranks: as one rank sends them, as a table in a terminal, as a file in a run folder."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ddp_loop.distributed import World, aligned
from ddp_loop.profiling.clock import COMMUNICATION, PHASES

MOST_RANKS = 16  # in a table


@dataclass(frozen=True)
class RankTimes:
    """The measured steps of one rank; the times are means, in seconds per step.

    Attributes:
        rank: its number.
        steps: the number of measured steps.
        step_s: of a whole step, the sum of its phases.
        wait_s: of its phase "communication", as in a `RankTiming`.
        phases: by name.
        samples: per step, of this rank's shards.
        shards: the most in one step.
        reads: how often a step made the host wait for the device, by "file:line".
        can_fuse: whether an optimizer made a step without `fused=True`.
    """

    rank: int
    steps: int
    step_s: float
    wait_s: float
    phases: dict[str, float]
    samples: float
    shards: int
    reads: dict[str, float]
    can_fuse: bool

    @classmethod
    def of(cls, rank: int, steps: int, spent: Mapping[str, float], **others: Any) -> RankTimes:
        """The times of `steps` steps that spent so many seconds in each phase."""
        phases = {phase: seconds / max(steps, 1) for phase, seconds in spent.items()}
        return cls(rank, steps, sum(phases.values()), phases[COMMUNICATION], phases, **others)


@dataclass(frozen=True)
class Surroundings:
    """Where a profile was made.

    Attributes:
        device, ranks: the kind of device, such as "cpu", and the number of ranks.
        threads: of this process, for kernels on the CPU.
        cores: of this machine for each of its ranks.
        workers: of the DataLoader; None for tensors and for a stream, which this process reads.
        warm_up, asked: the steps before the measured ones, and the number of steps to measure.
    """

    device: str
    ranks: int
    threads: int
    cores: int
    workers: int | None
    warm_up: int
    asked: int

    @classmethod
    def of(cls, world: World, workers: int | None, warm_up: int, asked: int) -> Surroundings:
        """The surroundings of this process."""
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(
            world.accelerator.kind, world.size, torch.get_num_threads(), cores // max(here, 1), workers, warm_up, asked
        )


def mean_of(ranks: Sequence[RankTimes], phase: str) -> float:
    """The mean of a phase over the ranks, in seconds per step."""
    return statistics.fmean(one.phases[phase] for one in ranks)


def mean_step(ranks: Sequence[RankTimes]) -> float:
    """The mean step over the ranks, in seconds; never 0."""
    return max(statistics.fmean(one.step_s for one in ranks), 1e-12)


def percent(share: float) -> str:
    """A share as text, such as 42 %."""
    return f"{100 * share:.0f} %"


@dataclass(frozen=True)
class Profile:
    """The measured times of all ranks, and the hints that follow from them.

    Attributes:
        where: the surroundings.
        ranks: the times of each rank that sent them, in rank order.
        hints: three at most, each with the figure that it follows from.
    """

    where: Surroundings
    ranks: tuple[RankTimes, ...]
    hints: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The profile as JSON values, with the phases in order, and the heading and the lines as text."""
        return {
            "version": 1,
            "heading": self.heading(),
            "phases": list(PHASES),
            "lines": self.lines(),
            **asdict(self),
        }

    def heading(self) -> str:
        """How many steps, where, and which ranks are missing, in words."""
        where = self.where
        steps = min((one.steps for one in self.ranks), default=0)
        short = "" if steps == where.asked else f" of {where.asked}"
        missing = [rank for rank in range(where.ranks) if rank not in {one.rank for one in self.ranks}]
        without = f", without {_named(missing)}, which sent no times" if missing else ""
        return (
            f"{steps}{short} steps after {where.warm_up} of warm-up, {where.ranks} "
            f"rank{'' if where.ranks == 1 else 's'} on {where.device}{without}"
        )

    def lines(self) -> list[str]:
        """The profile as lines of text: the heading, a table, the hints."""
        if not self.ranks or not all(one.steps for one in self.ranks):
            first = self.where.warm_up + 1
            return [f"Profile: no step was measured, since the run ended within its first {first} steps."]
        step = mean_step(self.ranks)
        rows: list[tuple[str, ...]] = [("rank", "step", *PHASES)]
        rows += [
            (str(one.rank), *(f"{1000 * seconds:.2f}" for seconds in (one.step_s, *one.phases.values())))
            for one in _shown(self.ranks)
        ]
        rows.append(("share", "", *(percent(mean_of(self.ranks, phase) / step) for phase in PHASES)))
        some = f", {MOST_RANKS} of them below" if len(self.ranks) > MOST_RANKS else ""
        return [
            f"Profile: {self.heading()}{some}. Milliseconds per step:",
            *aligned(rows, str.rjust),
            *(f"* {hint}" for hint in self.hints),
        ]


def _shown(ranks: Sequence[RankTimes]) -> list[RankTimes]:
    """All ranks; of many those that wait least and most, in rank order."""
    if len(ranks) <= MOST_RANKS:
        return list(ranks)
    by_wait = sorted(ranks, key=lambda one: one.wait_s)
    half = MOST_RANKS // 2
    return sorted([*by_wait[:half], *by_wait[-half:]], key=lambda one: one.rank)


def _named(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {some}"
