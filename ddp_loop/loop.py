"""The loop: which step comes next, what it folds, and what it tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ddp_loop.batches import Batches, Loaded
from ddp_loop.buffers import Policy
from ddp_loop.demands import check_extent, check_rows, check_rule, check_state, check_synced, make_folder
from ddp_loop.finite import Guard, NotFinite
from ddp_loop.folding import Fold, Folded
from ddp_loop.gathering import Gathering
from ddp_loop.progress import Rows
from ddp_loop.replicas import check_structure, find_modules, find_parameters, find_tensors, make_equal
from ddp_loop.shards import MiniBatch
from ddp_loop.step import Step
from ddp_loop.traces import FOLDER
from ddp_loop.tracing import Tracer, Watch, current_watch

MIB = 2**20


class Loop:
    """The steps of a training run over `batches`, on every rank at once. Every rank must call this.

        for step in loop:
            for images, labels in step:
                step.backward(cross_entropy(model(images), labels))
            row = step.fold()
            optimizer.step()

    A script that goes by epochs says `for step in loop.epoch():` in each of them. The model stays the user's own and is
    not wrapped. Rank 0's parameters and buffers are given to all.

    Args:
        batches: the mini-batches.
        epochs: how often to go through the data; or
        steps: how many updates to make, at most.
        state: what the job is made of, by name: modules and optimizers (what they hold is folded).
        run: a folder for what the run leaves behind; rank 0 appends a line per update to its rows.jsonl.
        on_row: called on rank 0 with each update's row, a dict of numbers, while training goes on. Where a step has
            several passes, its row is that of the first one.
        progress: print a line per epoch, from rank 0.
        buffers: rules for single buffers, by name (such as "model.0.counter"): "mean", "same", "first", "local".
        bucket_mib: size of the buckets in which gradients are summed, in MiB.
        allow_one_row: take shards of one observation also if the model has BatchNorm1d layers, which cannot
            normalise one value (but can, if their inputs have positions).
        ordered: whether gradients are added up in an order that follows from the shards alone, so that a fixed number
            of shards gives the same bits on any number of ranks; by default where `batches` was given `shards`.
        trace: leave a digest of every tensor of every step in the run folder, for `python -m ddp_loop diff`; some
            milliseconds a step for a small network, seconds for a large one.
        not_finite: "raise" where a mini-batch's loss is NaN or infinite, on all ranks alike; or "allow" it.

    Raises:
        ValueError: neither or no sensible epochs and steps, a state without parameters, one-row shards under
            BatchNorm1d, or structures that differ between ranks.
        PeerFailed: another rank has such a problem.
    """

    def __init__(
        self,
        batches: Batches,
        epochs: int | None = None,
        *,
        state: Mapping[str, object],
        steps: int | None = None,
        run: str | Path | None = None,
        on_row: Callable[[dict[str, Any]], None] | None = None,
        progress: bool = True,
        buffers: Mapping[str, Policy] | None = None,
        bucket_mib: float = 8.0,
        allow_one_row: bool = False,
        not_finite: NotFinite = "raise",
        ordered: bool | None = None,
        trace: bool = False,
    ) -> None:
        self.batches, self.world = batches, batches.world
        self.epochs, self.steps = epochs, steps
        self.iteration = self._went_on_at = 0
        self._cut_short = False
        self._state = check_state(state)
        self._epochs_made = self._position = 0  # whole epochs, and mini-batches of the one at hand
        self._begun: str | None = None  # the epoch that is gone through now, or was left
        self._rows: Rows | None = None
        self._tracer: Tracer | None = None
        self._gathering = Gathering(self.world)
        self._guard = Guard(not_finite, batches.indices)
        self._stream: Iterator[Loaded] = iter(())
        self._ahead: list[Loaded | Exception | None] = []  # the next mini-batch, if it was looked for already
        self.world.on_leaving(self.close)
        problem: Exception | None = None
        try:
            check_extent(batches, epochs, steps, bucket_mib)
            check_rule(not_finite)
            if not allow_one_row:
                check_rows(batches, self._state)
            self._make_fold(bucket_mib, buffers or {}, ordered)
            watch = current_watch()
            check_synced(self.batches, self.fold.talks)
            self._open_rows(run if watch is None else None, on_row, progress)
            self._open_trace(run, trace, watch)
        except (ValueError, OSError) as error:
            problem = error
        try:
            self.world.agree(problem)
            facts = (epochs, steps, bucket_mib, not_finite, ordered)
            self.world.check_same("epochs, steps, bucket_mib, not_finite, ordered", facts)
            tensors = find_tensors(self._state)
            check_structure(tensors, self.world)
            make_equal(tensors, self.world)
        except BaseException:
            self.close()
            raise

    def _make_fold(self, bucket_mib: float, buffers: Mapping[str, Policy], ordered: bool | None) -> None:
        parameters = find_parameters(self._state)
        if not any(parameter.requires_grad for parameter in parameters.values()):
            raise ValueError(
                f"state must hold a module or an optimizer with parameters to train; got {sorted(self._state)} "
                "without any: state=dict(model=model, optimizer=optimizer)"
            )
        self._optimizers = [value for value in self._state.values() if isinstance(value, Optimizer)]
        self._known = self._count()
        self.fold = Fold(
            find_modules(self._state),
            parameters,
            self.world,
            bucket_bytes=int(bucket_mib * MIB),
            policies=buffers,
            shards=self.batches.shards,
            ordered=self.batches.fixed_shards if ordered is None else ordered,
        )

    def _open_rows(
        self, run: str | Path | None, on_row: Callable[[dict[str, Any]], None] | None, progress: bool
    ) -> None:
        if self.world.rank == 0 and (run is not None or on_row is not None or progress):
            folder = None if run is None else Path(run)
            if folder is not None:
                make_folder(folder)
            self._rows = Rows(folder, on_row, self.world.print if progress else None)

    def _open_trace(self, run: str | Path | None, trace: bool, watch: Watch | None) -> None:
        if trace and run is None:
            raise ValueError("a trace is left in the run folder; got trace=True without one: give run=")
        if watch is not None:
            watch.loops += 1
            folder = watch.folder / f"loop-{watch.loops:03}"
            self.steps, self._cut_short = min(watch.steps, self.steps or watch.steps), True
        elif trace and run is not None:
            folder = Path(run) / FOLDER
        else:
            return
        self._tracer = Tracer(folder, self.batches, self._state, ordered=self.fold.is_ordered, values=watch is not None)
        self.fold.gradients.watch, self.fold.gradients.overlaps = self._tracer.backward, False

    # -- going through it ----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        """The steps of all epochs that are still to be made. Every rank must call this."""
        yield from self.epoch()
        while not self._is_done:
            yield from self.epoch()

    def epoch(self) -> Iterator[Step]:
        """The steps of the epoch that comes next. Every rank must call this.

            for epoch in range(epochs):
                for step in loop.epoch():
                    ...
                print(dl.evaluate(model, test_batches, accuracy=hits))

        An epoch is gone through to its end: who leaves it, leaves the loop.

        Raises:
            RuntimeError: all epochs were made, or the one before was left.
        """
        if self._is_done and not self._begun and (self._cut_short or self.iteration == self._went_on_at):
            return  # there was nothing left to do where it went on, or a watch lets it make no more
        if self._begun or self._is_done:
            why = f"has made its {self.iteration} steps" if self._is_done else f"began {self._begun} before"
            raise RuntimeError(f"a Loop is gone through once, each epoch to its end; this one {why}: make another")
        self._begun = f"epoch {self._epochs_made + 1}"
        if self._tracer is not None and self._tracer.is_new:
            self._tracer.start(self.iteration)
        try:
            with closing(self.batches.epoch(self._epochs_made, self._position)) as self._stream:
                while (loaded := self._take_next()) is not None:
                    yield from self._one_step(loaded)
                    if self._has_made_all:
                        break
            self._guard.settle()
            if loaded is None or self._ends_epoch(loaded.mini_batch):
                self._epochs_made, self._position = self._epochs_made + 1, 0
            self._begun = None
        finally:
            if self._begun or self._is_done:
                self.close()

    def _one_step(self, loaded: Loaded) -> Iterator[Step]:
        self.iteration += 1
        self._position = loaded.mini_batch.position + 1
        ends_epoch = self._ends_epoch(loaded.mini_batch)
        step = Step(
            self.fold,
            self._gathering,
            self.world,
            loaded,
            self.iteration,
            ends_epoch,
            begin=self._meet_new_parameters,
            meanwhile=self._use_the_wait,
            report=self._report,
            tracer=self._tracer,
        )
        try:
            yield step
        except GeneratorExit:
            self._end_trace_of(step)
            step.leave(f"it left the loop in step {self.iteration}, by a break or an error that was caught")
            raise
        step.demand_fold()
        self._end_trace_of(step)
        if self._has_made_all or (ends_epoch and step.epoch == self.epochs):
            step.leave(f"it ended the loop after step {self.iteration}")  # a peer that left it before is found out

    def _end_trace_of(self, step: Step) -> None:
        if self._tracer is not None and step.passes:
            self._tracer.end(step.iteration)

    def _use_the_wait(self) -> None:
        """While the sums are under way: the rows before this one, and the data of the next mini-batch."""
        if self._rows is not None:
            self._rows.hand_on()
        if not self._ahead and not self._has_made_all:
            try:
                loaded = next(self._stream, None)
            except Exception as error:  # of the next step's data, not of this one's
                self._ahead.append(error)
                return
            if loaded is not None:
                loaded.read_ahead()
            self._ahead.append(loaded)

    def _take_next(self) -> Loaded | None:
        loaded = self._ahead.pop() if self._ahead else next(self._stream, None)
        if isinstance(loaded, Exception):
            raise loaded
        return loaded

    def _ends_epoch(self, mini_batch: MiniBatch) -> bool:
        return mini_batch.ends_stream or mini_batch.position + 1 == self.batches.steps

    @property
    def _has_made_all(self) -> bool:
        return self.steps is not None and self.iteration >= self.steps

    @property
    def _is_done(self) -> bool:
        return self._has_made_all or (self.epochs is not None and self._epochs_made >= self.epochs)

    # -- where it is ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, int]:
        """Where the loop is, to go on from there: in another process, on another number of ranks.

        After a step's fold that step counts as made. What the job's state holds is not in it.
        """
        return {"iteration": self.iteration, "epoch": self._epochs_made, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where another loop over the same batches was. Every rank must call this.

        With the same number of shards the steps to come are those that the other loop would have made, to the bit.

        Args:
            state: what `state_dict` gave: the updates made, the whole epochs, and the mini-batches of the one at hand.

        Raises:
            RuntimeError: this loop has begun.
            ValueError: other keys, or numbers that these batches cannot have made, or that differ between ranks.
        """
        problem = self._cannot_go_on(state)
        self.world.agree(problem)
        self.world.check_same("where the loop goes on", dict(state))
        self.iteration, self._epochs_made, self._position = state["iteration"], state["epoch"], state["position"]
        self._went_on_at = self.iteration
        if self._position and self._position == self.batches.steps:
            self._epochs_made, self._position = self._epochs_made + 1, 0

    def _cannot_go_on(self, state: Mapping[str, int]) -> Exception | None:
        if self._begun or self.iteration:
            return RuntimeError("a Loop is told where to go on before its first step; this one has begun: make another")
        if set(state) != {"iteration", "epoch", "position"}:
            return ValueError(
                "where a Loop goes on is what its state_dict() gave, iteration, epoch and position; got "
                f"{sorted(state)}: keep that"
            )
        steps, numbers = self.batches.steps, [state[name] for name in ("iteration", "epoch", "position")]
        whole = all(isinstance(number, int) and number >= 0 for number in numbers)
        iteration, epoch, position = numbers
        if not whole or (steps is not None and (position > steps or epoch * steps + position != iteration)):
            said = "an epoch of these has no end" if steps is None else f"an epoch of these has {steps}"
            return ValueError(
                "iteration is the mini-batches of the whole epochs and those of the one at hand, position; got "
                f"{dict(state)}, {said}: make Batches with the data and the batch_size that the other loop had"
            )
        return None

    def _count(self) -> list[int]:
        return [len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups]

    def _meet_new_parameters(self) -> None:
        if (known := self._count()) != self._known:
            self._known = known
            self.fold.gradients.add(find_parameters(self._state))

    def _report(self, step: Step, mini_batch: MiniBatch, folded: Folded) -> None:
        if self._rows is not None and step.passes == 1:
            ends = step.ends_epoch or self._has_made_all
            names, values = ("loss", *folded.metrics), folded.values
            if folded.weight is not None:
                names, values = ("weight", *names), torch.cat([folded.weight.reshape(1), values])
            self._rows.add(step.epoch, step.iteration, step.observations, ends, names, values)
        self._guard.look(step.iteration, mini_batch, folded.values[0], folded.losses, folded.share)

    def close(self) -> None:
        """Hand the last rows on, close the run's files and take all hooks off the model."""
        if hasattr(self, "fold"):
            self.fold.release()
        if self._rows is not None:
            self._rows.close()
            self._rows = None
        if self._tracer is not None:
            self._tracer.close()
            self._tracer = None
