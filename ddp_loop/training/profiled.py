"""The reading and the steps of a loop whose steps are profiled: the usual ones, with a cut at each end of a phase.

A loop without a profile has `ReadAhead` and `Step` themselves, so a profile that is off costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ddp_loop.checkpoint import PROFILE, PROFILE_FILE
from ddp_loop.data import Batches, LoadedBatch, LoopPosition, ReadAhead
from ddp_loop.determinism import check_count
from ddp_loop.profiling import BACKWARD, COMMUNICATION, DATA, FOLD, FORWARD, WARM_UP, PhaseClock, StepProfile
from ddp_loop.tracing import TraceRequest
from ddp_loop.training.rows import StepResult
from ddp_loop.training.step import Step


@contextmanager
def _phase(clock: PhaseClock, phase: str, then: str | None = None) -> Iterator[None]:
    """A phase in the block; then another one, or the time outside of a step's own parts."""
    clock.cut(phase)
    yield
    if then is None:
        clock.cut_outside()
    else:
        clock.cut(then)


class ProfiledBatch(LoadedBatch):
    """A mini-batch; reading shards that were not read ahead is the phase "data"."""

    def __init__(self, loaded: LoadedBatch, clock: PhaseClock) -> None:
        self.mini_batch = loaded.mini_batch
        self._loaded = loaded
        self._clock = clock

    def data(self, shard: int) -> Any:
        with _phase(self._clock, DATA, FOLD):
            return self._loaded.data(shard)

    def nothing(self) -> Any:
        with _phase(self._clock, DATA, FOLD):
            return self._loaded.nothing()


class ProfiledReadAhead(ReadAhead):
    """Reads mini-batches; its time is the phase "data".

    Args:
        batches: with the data.
        profile: of the loop.
    """

    def __init__(self, batches: Batches, profile: StepProfile) -> None:
        super().__init__(batches)
        self._profile = profile
        self._clock = profile.clock

    @contextmanager
    def epoch(self, number: int, start: int) -> Iterator[None]:
        with super().epoch(number, start):
            yield
            self._profile.end()
            self._clock.pause()

    def take(self) -> LoadedBatch | None:
        self._profile.end()
        self._clock.cut(DATA)
        loaded = super().take()
        if loaded is None:  # `epoch` ends, and pauses
            return None
        self._profile.begin(loaded.mini_batch)
        self._clock.cut_outside()
        return ProfiledBatch(loaded, self._clock)

    def read(self) -> None:
        with _phase(self._clock, DATA, FOLD):
            super().read()


class ProfiledStep(Step):
    """A step of a profiled loop.

    Args:
        clock: of the profile.
        parts: as `Step` takes them.
    """

    def __init__(self, clock: PhaseClock, *parts: Any) -> None:
        super().__init__(*parts)
        self._clock = clock

    def __iter__(self) -> Iterator[Any]:
        self._clock.cut(FOLD)
        with closing(super().__iter__()) as shards:  # type: ignore[type-var]
            for data in shards:
                self._clock.cut(FORWARD)
                yield data
                self._clock.cut(FOLD)
        self._clock.cut_outside()

    def _begin(self) -> None:
        super()._begin()
        self._job.fold.control.waited.clock = self._clock.wait

    def backward(self, loss: torch.Tensor, **how: Any) -> None:
        with _phase(self._clock, BACKWARD):
            super().backward(loss, **how)

    def gather(self) -> Any:
        with _phase(self._clock, COMMUNICATION, FORWARD):
            return super().gather()

    def _fold_pass(self, problem: Exception | None = None) -> StepResult:
        with _phase(self._clock, FOLD):
            return super()._fold_pass(problem)


def open_steps(
    steps: int | None, batches: Batches, where: LoopPosition, folder: Path | None, request: TraceRequest | None
) -> tuple[ReadAhead, Callable[..., Step]]:
    """The reader of a loop's mini-batches, and the maker of its steps; they measure where a profile is asked for.

    Args:
        steps: the number of steps to measure, as `Loop` was given it; None for no profile.
        batches, where: of the loop; its position.
        folder: of the run; None without one.
        request: whose profile comes before the script's; None without one.

    Raises:
        ValueError: the number is no count, or the run has too few steps.
    """
    path = traces = None if folder is None else folder / PROFILE
    if request is not None:
        steps = request.profile
        request.loops += steps is not None
        path = request.folder / f"loop-{request.loops:03}"
        traces = request.traces if request.loops == 1 else None
    if steps is None:
        return ReadAhead(batches), Step
    number = check_count("profile", steps, remedy="It is the number of steps to measure.")
    most = number if where.length is None else where.length - WARM_UP
    if most < number and (most > 0 or request is None):  # beside a command's other Loops a short one does no harm
        remedy = (
            f"Ask for {most} at most (profile={most}, --steps {most}), or" if most > 0 else "Give the run more steps:"
        )
        raise ValueError(
            f"A profile measures steps after the first {WARM_UP}. Got profile={number} and a run of {where.length} "
            f"steps. {remedy} train for more epochs."
        )
    file = None if path is None else path / PROFILE_FILE
    profile = StepProfile(batches.world, number, batches.num_workers, file, traces, prints=request is None)
    return ProfiledReadAhead(batches, profile), partial(ProfiledStep, profile.clock)
