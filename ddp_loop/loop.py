"""The loop: which step comes next, what it folds, and what it tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from torch.optim import Optimizer

from ddp_loop.batches import Batches, Loaded
from ddp_loop.buffers import Policy
from ddp_loop.chronicle import Chronicle, open_trace
from ddp_loop.demands import check_extent, check_interval, check_rows, check_rule, check_state, check_synced
from ddp_loop.finite import Guard, NotFinite
from ddp_loop.folding import Fold
from ddp_loop.gathering import Gathering
from ddp_loop.keeping import Keeper, Keeping
from ddp_loop.positions import Position
from ddp_loop.records import Folded
from ddp_loop.replicas import Trained, check_structure, find_modules, find_parameters, find_tensors, make_equal
from ddp_loop.replication import Replicas
from ddp_loop.reporting import Receivers
from ddp_loop.saving import OnSaveError, Part
from ddp_loop.shards import MiniBatch
from ddp_loop.step import Step
from ddp_loop.tracing import Watch, current_watch

MIB = 2**20
_SAME = "epochs, steps, bucket_mib, check_replicas, not_finite, ordered, run, resume, save_every"


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
        run: a folder for what the run leaves behind: checkpoints, from the newest of which it goes on when it is
            started again, on any number of ranks; a line per update in rows.jsonl; how it ended in status.json.
        resume: whether to go on with a run that is in the folder: None if its script, arguments and data are the same,
            else refuse; True in any case; False to begin anew, what is there being moved to `before/`.
        save_every: a checkpoint after so many steps; by default after each epoch. Always when asked to stop and at the
            end; and where
        save_every_s: so many seconds have passed since the last one.
        keep: how many of the last checkpoints stay, beside the best (see `save`).
        on_save_error: "raise" on all ranks where a checkpoint cannot be written, or "warn" and go on.
        on_row: called on rank 0 with each update's row, a dict of numbers, while training goes on; or several such
            callables (see `sinks`). Where a step has several passes, its row is that of the first one.
        progress: show in the terminal how the run goes on, from rank 0, and draw its curves in the run folder when it
            ends; False prints nothing.
        page: serve a page of the run, by a process beside it, and print the link; it needs a run folder, and
            `pip install 'ddp_loop[monitor]'`.
        buffers: rules for single buffers, by name (such as "model.0.counter"): "mean", "same", "first", "local".
        bucket_mib: size of the buckets in which gradients are summed, in MiB.
        allow_one_row: take shards of one observation also if the model has BatchNorm1d layers, which cannot
            normalise one value (but can, if their inputs have positions).
        ordered: whether gradients are added up in an order that follows from the shards alone, so that a fixed number
            of shards gives the same bits on any number of ranks; by default where `batches` was given `shards`.
        trace: leave a digest of every tensor of every step in the run folder, for `python -m ddp_loop diff`; some
            milliseconds a step for a small network, seconds for a large one.
        not_finite: where a mini-batch's loss or gradients are NaN or infinite, on all ranks alike: "raise"; "skip" the
            step, which leaves parameters, buffers and optimizers as they were, but not 100 times in a row; or "allow"
            it. With a GradScaler in `state` the gradients are its business, and only the loss is looked at.
        check_replicas: after how many steps all ranks' parameters, buffers and optimizer states are compared, by
            checksums; 0 for never. One rank has nothing to compare.

    Raises:
        ValueError: neither or no sensible epochs and steps, a state without parameters, one-row shards under
            BatchNorm1d, or structures that differ between ranks.
        PeerFailed: another rank has such a problem.
        ReplicasDiffer: while it is gone through: a rank's parameters, buffers or optimizer states became others.
    """

    def __init__(
        self,
        batches: Batches,
        epochs: int | None = None,
        *,
        state: Mapping[str, object],
        steps: int | None = None,
        run: str | Path | None = None,
        resume: bool | None = None,
        save_every: int | None = None,
        save_every_s: float = 600.0,
        keep: int = 3,
        on_save_error: OnSaveError = "raise",
        on_row: Receivers = None,
        progress: bool = True,
        page: bool = False,
        buffers: Mapping[str, Policy] | None = None,
        bucket_mib: float = 8.0,
        allow_one_row: bool = False,
        not_finite: NotFinite = "raise",
        check_replicas: int = 100,
        ordered: bool | None = None,
        trace: bool = False,
    ) -> None:
        self.batches, self.world, self.epochs = batches, batches.world, epochs
        self._where, self._cut_short = Position(batches, epochs, steps), False
        self._state = check_state(state)
        self._begun: str | None = None  # the epoch that is gone through now, or was left
        watch = current_watch()
        folder = None if run is None else Path(run)
        keeping = Keeping(save_every, save_every_s, keep, on_save_error)
        self._guard = Guard(not_finite, batches.indices, self._state, late=self.world.device.type != "cpu")
        self._chronicle = self._make_chronicle(folder if watch is None else None, keeping, buffers or {})
        self._gathering = Gathering(self.world)
        self._stream: Iterator[Loaded] = iter(())
        self._ahead: list[Loaded | Exception | None] = []  # the next mini-batch, if it was looked for already
        self.world.on_leaving(self._leave)
        self.world.stage = "start"
        problem: Exception | None = None
        try:
            check_extent(batches, epochs, steps, bucket_mib)
            check_rule(not_finite)
            check_interval(check_replicas)
            if not allow_one_row:
                check_rows(batches, self._state)
            self._make_fold(bucket_mib, buffers or {}, ordered)
            self._replicas = Replicas(self._state, self.world, check_replicas, buffers or {})
            check_synced(self.batches, self.fold.talks)
            self._open_trace(folder, trace, watch)
        except (ValueError, OSError) as error:
            problem = error
        try:
            self.world.agree(problem)
            facts = (epochs, steps, bucket_mib, check_replicas, not_finite, ordered, run is None, resume, save_every)
            self.world.check_same(_SAME, facts)
            self._begin(resume, on_row, progress, page and watch is None)
        except BaseException:
            self._leave()
            raise
        self.world.stage = ""

    def _make_chronicle(self, folder: Path | None, keeping: Keeping, buffers: Mapping[str, Policy]) -> Chronicle:
        keeper = None
        if folder is not None:
            local = [name for name, policy in buffers.items() if policy == "local"]
            parts: dict[str, Part] = {"guard": self._guard, "trained": Trained(self._state)}
            keeper = Keeper(folder, self.world, self._state, keeping, local, parts)
        return Chronicle(self.world, self._where, keeper, self._state)

    def _begin(self, resume: bool | None, on_row: Receivers, progress: bool, page: bool) -> None:
        """Make the replicas equal, and go on where the run folder stands."""
        tensors = find_tensors(self._state)
        check_structure(tensors, self.world)
        make_equal(tensors, self.world)
        if (there := self._chronicle.open(self.batches.facts, resume)) is not None:
            self.load_state_dict(there)
        self._chronicle.open_rows(on_row, progress=progress, page=page)

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
            guard=self._guard,
        )

    def _open_trace(self, run: Path | None, trace: bool, watch: Watch | None) -> None:
        tracer = open_trace(run, self.batches, self._state, watch, trace=trace, ordered=self.fold.is_ordered)
        if watch is not None:
            self._where.most_steps, self._cut_short = min(watch.steps, self._where.most_steps or watch.steps), True
        if tracer is not None:
            self._chronicle.tracer = tracer
            self.fold.gradients.watch, self.fold.gradients.overlaps = tracer.backward, False

    # -- going through it ----------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """Of the step at hand, counted from 1."""
        return self._where.iteration

    @property
    def epochs_made(self) -> int:
        """How many epochs were gone through, also before it went on: `for epoch in range(loop.epochs_made, epochs)`."""
        return self._where.epochs

    @property
    def stopped(self) -> str | None:
        """Why the loop was asked to stop, and did; None if it was not."""
        return self._chronicle.stopped

    def stop(self) -> None:
        """Ask all ranks to end the loop, with a checkpoint: after the step at hand. One rank may call this.

        Called behind the step's fold it is heard in the next one, and the loop ends after that.
        """
        self._chronicle.asks_stop = True

    def save(self, score: float | None = None) -> None:
        """Ask for a checkpoint: after the step at hand; behind an epoch, of its last step. Every rank must call this.

        A run that goes on from an epoch's last step does again what the script does behind that epoch.

        Args:
            score: the lower the better, such as a validation loss; the checkpoint with the lowest one stays.
        """
        self._chronicle.save(None if score is None else float(score))

    def __iter__(self) -> Iterator[Step]:
        """The steps of all epochs that are still to be made. Every rank must call this."""
        self._chronicle.holds = False
        yield from self.epoch()
        while not self._is_over:
            yield from self.epoch()

    def epoch(self) -> Iterator[Step]:
        """The steps of the epoch that comes next. Every rank must call this.

            for epoch in range(loop.epochs_made, epochs):
                for step in loop.epoch():
                    ...
                print(dl.evaluate(model, test_batches, accuracy=hits))

        An epoch is gone through to its end: who leaves it, leaves the loop. After a stop there are no more steps.

        Raises:
            RuntimeError: all epochs were made, or the one before was left.
        """
        where = self._where
        if self.stopped is not None:
            return
        if where.is_done and not self._begun and (self._cut_short or self.iteration == where.went_on_at):
            self._leave()
            return  # there was nothing left to do where it went on, or a watch lets it make no more
        if self._begun or where.is_done:
            why = f"has made its {self.iteration} steps" if where.is_done else f"began {self._begun} before"
            raise RuntimeError(f"a Loop is gone through once, each epoch to its end; this one {why}: make another")
        self._begun = f"epoch {where.epochs + 1}"
        self.fold.requests = self._chronicle.requests
        self._chronicle.take_requests()
        if (tracer := self._chronicle.tracer) is not None and tracer.is_new:
            tracer.start(self.iteration)
        try:
            with closing(self.batches.epoch(where.epochs, where.at, held=False)) as self._stream:
                while (loaded := self._take_next()) is not None:
                    yield from self._one_step(loaded)
                    if where.has_made_all or self.stopped is not None:
                        break
            self._guard.settle()
            self._replicas.settle()
            if self.stopped is None and (loaded is None or where.ends_epoch(loaded.mini_batch)):
                where.end_epoch()
            self._begun, self.world.stage = None, ""
            self.world.step = 0 if self._is_over else self.world.step
        finally:
            if self._begun or self._is_over:
                self.close()
            if self._is_over and not self._begun:
                self._chronicle.end()  # else why it was left is known when the world is

    def _one_step(self, loaded: Loaded) -> Iterator[Step]:
        self._where.begin(loaded.mini_batch)
        self.world.step = self.iteration
        step = Step(
            self.fold,
            self._gathering,
            self.world,
            loaded,
            self.iteration,
            self._where.ends_epoch(loaded.mini_batch),
            begin=self._meet_new_parameters,
            meanwhile=self._use_the_wait,
            report=self._report,
            tracer=self._chronicle.tracer,
        )
        try:
            yield step
        except GeneratorExit:
            self._end_trace_of(step)
            step.leave(f"it left the loop in step {self.iteration}, by a break or an error that was caught")
            raise
        step.demand_fold()
        self._end_trace_of(step)
        self._chronicle.end_step(loaded.mini_batch, self.fold.said)
        if self._is_over or self._where.ends_all(loaded.mini_batch):
            step.leave(f"it ended the loop after step {self.iteration}")  # a peer that left it before is found out
        self.world.stage = "data"

    def _end_trace_of(self, step: Step) -> None:
        if step.passes:
            self._chronicle.end_trace(step.iteration)

    def _use_the_wait(self) -> None:
        """While the sums are under way: the rows before this one, and the data of the next mini-batch."""
        self._chronicle.hand_on()
        if not self._ahead and not self._where.has_made_all:
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

    @property
    def _is_over(self) -> bool:
        return self._where.is_done or self.stopped is not None

    # -- where it is ---------------------------------------------------------------------------------------

    @property
    def skipped(self) -> int:
        """How many steps were left out so far, since their loss or gradients were not finite; a GPU is waited for."""
        return self._guard.skipped

    def state_dict(self) -> dict[str, int]:
        """Where the loop is, to go on from there: in another process, on another number of ranks.

        From its fold on a step counts as made. What the job's state holds is not in it.
        """
        return self._where.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where another loop over the same batches was. Every rank must call this.

        With the same number of shards the steps to come are those that the other loop would have made, to the bit.

        Args:
            state: what `state_dict` gave: the updates made, the whole epochs, and the mini-batches of the one at hand.

        Raises:
            RuntimeError: this loop has begun.
            ValueError: other keys, or numbers that these batches cannot have made, or that differ between ranks.
        """
        problem: Exception | None = None
        if self._begun or self.iteration != self._where.went_on_at:
            problem = RuntimeError(
                "a Loop is told where to go on before its first step; this one has begun: make another"
            )
        elif (why := self._where.why_not(state)) is not None:
            problem = ValueError(why)
        self.world.agree(problem)
        self.world.check_same("where the loop goes on", dict(state))
        self._where.go_on_from(state)

    def _count(self) -> list[int]:
        return [len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups]

    def _meet_new_parameters(self) -> None:
        if (known := self._count()) != self._known:
            self._known = known
            self.fold.gradients.add(find_parameters(self._state))

    def _report(self, step: Step, mini_batch: MiniBatch, folded: Folded) -> None:
        self._where.is_folded = True
        if step.passes == 1:
            self._chronicle.add_row(mini_batch, folded, self.fold, skips=self._guard.skips)
        self._guard.look(step.iteration, mini_batch, folded.values[0], folded.losses, folded.share)
        if step.passes == 1:
            self._replicas.look(step.iteration)

    def close(self) -> None:
        """Hand the last rows on, close the run's files and take all hooks off the model."""
        self._guard.release()
        if hasattr(self, "fold"):
            self.fold.release()
        self._chronicle.close()

    def _leave(self) -> None:
        self.close()
        self._chronicle.end()
