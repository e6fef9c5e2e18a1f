"""The profile of one loop on this rank: which steps are measured, and where the times of all ranks go.

[Note: Without a collective] Each rank puts its times into the store once, as it does with its timings, and rank 0 reads
them. So a run that fails, or that stops in the middle, has a profile too, and a profiled step makes no collective that
others do not make.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch

from ddp_loop.checkpoint import write_atomic
from ddp_loop.data import MiniBatch
from ddp_loop.distributed import World
from ddp_loop.profiling.clock import PhaseClock
from ddp_loop.profiling.hints import hints_of
from ddp_loop.profiling.times import Profile, RankTimes, Surroundings

WARM_UP = 5  # steps; in the first ones layouts are agreed on and memory is allocated
TRACED = 2  # steps in a Chrome trace, after the measured ones
_PATIENCE_S = 0.5  # for the times of other ranks, once the loop has ended
_LOOK_S = 0.01


class StepProfile:
    """Measures the steps of one loop on this rank; rank 0 reports them.

    Args:
        world: of the loop.
        steps: the number of steps to measure, after `WARM_UP` others.
        workers: of the DataLoader; None without one.
        path: where rank 0 writes the profile; None for no file.
        traces: the folder of the Chrome traces; None for none.
        prints: whether rank 0 prints it.

    Attributes:
        clock: with the phases of the steps.
    """

    def __init__(
        self, world: World, steps: int, workers: int | None, path: Path | None, traces: Path | None, *, prints: bool
    ) -> None:
        self._world = world
        self._path = path
        self._traces = traces
        self._prints = prints
        self._where = Surroundings.of(world, workers, WARM_UP, steps)
        self.clock = PhaseClock(world.accelerator)
        self._key = f"profile/{world.store.number()}"
        self._began = self._ended = 0  # steps
        self._sizes: list[list[int]] = []  # the samples of each shard, for each measured step
        self._reads: Counter[str] = Counter()
        self._observers = ExitStack()  # of reads on the host, and then of the Chrome trace
        self._is_put = self._is_reported = False
        world.on_leaving(self.close)

    # -- steps ---------------------------------------------------------------------------------------------

    def begin(self, mini_batch: MiniBatch) -> None:
        """A step begins, with this mini-batch."""
        self._began += 1
        if self._began > WARM_UP and not self._is_put:
            self._sizes.append([shard.samples for shard in mini_batch.shards])

    def end(self) -> None:
        """The step that began last has ended, if any has; its time goes on until the next cut."""
        if self._ended == self._began:
            return
        self._ended = self._began
        self.clock.end_step()
        asked = self._where.asked
        if self._ended == WARM_UP:
            self._observers.enter_context(self._world.accelerator.host_reads(self._see_read))
            self.clock.start()
        elif self._ended == WARM_UP + asked and not self._is_put:
            self._put()
            if self._traces is not None:
                self._observers.enter_context(self._chrome_trace(self._traces))
        elif self._ended == WARM_UP + asked + TRACED:
            self._observers.close()
        if self._is_put:
            self._report(patience_s=0.0)

    def _see_read(self, file: str, line: int) -> None:
        self._reads[f"{Path(file).name}:{line}"] += 1

    def close(self) -> None:
        """Report the steps measured so far, and measure no more."""
        self._world.forget(self.close)
        if not self._began:
            return  # the loop made no step
        self._observers.close()
        if not self._is_put:
            self._put()
        self._report(patience_s=_PATIENCE_S)

    # -- the times of all ranks ----------------------------------------------------------------------------

    def _put(self) -> None:
        """End measuring, and put this rank's times into the store. See [Note: Without a collective]."""
        self._is_put = True
        self._observers.close()
        self.clock.stop()
        steps = max(self._ended - WARM_UP, 0)
        times = RankTimes.of(
            self._world.rank,
            steps,
            self.clock.spent,
            samples=sum(map(sum, self._sizes)) / max(steps, 1),
            shards=max(map(len, self._sizes), default=0),
            reads={place: number / max(steps, 1) for place, number in self._reads.most_common(3)},
            can_fuse=self.clock.has_unfused,
        )
        with suppress(RuntimeError):  # the launcher, and its store, have ended
            self._world.store.put(f"{self._key}/{self._world.rank}", json.dumps(asdict(times)))

    def _report(self, patience_s: float) -> None:
        """On rank 0, print and write the times of all ranks, once they have come or after so many seconds."""
        if self._world.rank or self._is_reported:
            return
        keys = [f"{self._key}/{rank}" for rank in range(self._world.size)]
        until = time.monotonic() + patience_s
        words: list[str] = []
        with suppress(RuntimeError):  # the launcher, and its store, have ended
            while len(words := self._world.store.get_all(keys)) < len(keys) and time.monotonic() < until:
                time.sleep(_LOOK_S)
        if len(words) < len(keys) and not patience_s:
            return
        self._is_reported = True
        ranks = [RankTimes(**json.loads(word)) for word in words]
        measured = tuple(one for one in ranks if one.steps)
        profile = Profile(self._where, measured, hints_of(measured, self._where))
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(self._path, profile.as_json())
            except OSError as error:
                self._world.say(f"{self._path} cannot be written ({error.strerror or error}). Training continues.")
        if self._prints:
            self._world.print("\n".join(profile.lines()))

    @contextmanager
    def _chrome_trace(self, folder: Path) -> Iterator[None]:
        """Write a Chrome trace of the block into the folder."""
        if torch.autograd._profiler_enabled():  # a second one would end it without a result
            self._world.say("No Chrome trace is written, since the script runs torch's profiler itself.")
            yield
            return
        tracer = torch.profiler.profile(acc_events=True)  # of the CPU, and of the device where torch supports it
        tracer.start()
        self.clock.annotate()
        yield
        self.clock.stop_annotating()
        tracer.stop()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tracer.export_chrome_trace(str(folder / f"trace-rank-{self._world.rank}.json"))
        except (OSError, RuntimeError) as error:
            self._world.say(f"No Chrome trace is written into {folder} ({error}). Training continues.")
