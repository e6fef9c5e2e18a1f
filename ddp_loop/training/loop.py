"""The loop: which step comes next, what it folds, and what it tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ddp_loop.checkpoint import Checkpointer, CheckpointPolicy, OnSaveError, Stateful
from ddp_loop.data import Batches, LoadedBatch, LoopPosition, MiniBatch
from ddp_loop.distributed import (
    FrozenParameters,
    ReplicaCheck,
    check_layout,
    check_structure,
    find_modules,
    find_parameters,
    find_tensors,
    make_equal,
    under_all_names,
)
from ddp_loop.reporting import Receivers
from ddp_loop.tracing import TraceRequest, current_trace_request
from ddp_loop.training.buffers import BufferReduction
from ddp_loop.training.fold import Fold
from ddp_loop.training.gather import BatchGather
from ddp_loop.training.nonfinite import NonFiniteGuard, OnNonFinite
from ddp_loop.training.payload import Folded
from ddp_loop.training.recorder import RunRecorder, open_trace
from ddp_loop.training.state_check import NonFiniteStateCheck
from ddp_loop.training.step import Step
from ddp_loop.training.structure import ModuleStructure
from ddp_loop.training.validation import check_extent, check_interval, check_rows, check_rule, check_state, check_synced

MIB = 2**20
_SAME = "epochs, steps, bucket_cap_mib, check_replicas_every, on_nonfinite, ordered, run_dir, resume, save_every"


class Loop:
    """The steps of a training run over `batches`, on every rank at once. Every rank must call this.

        for step in loop:
            for images, labels in step:
                step.backward(cross_entropy(model(images), labels))
            result = step.fold()
            optimizer.step()

    A script that goes by epochs says `for step in loop.epoch():` in each of them. The model stays the user's own and is
    not wrapped. Rank 0's parameters and buffers are given to all.

    Args:
        batches: the mini-batches.
        epochs: how often to go through the data; or
        steps: how many updates to make, at most.
        state: what the job is made of, by name: modules and optimizers (what they hold is folded).
        run_dir: a folder for what the run leaves behind: checkpoints, from the newest of which it goes on when it is
            started again, on any number of ranks; a line per update in rows.jsonl; how it ended in status.json.
        resume: whether to go on with a run that is in the folder: None if its script, arguments and data are the same,
            else refuse; True in any case; False to begin anew, what is there being moved to `before/`.
        save_every: a checkpoint after so many steps; by default after each epoch. Always when asked to stop and at the
            end; and where
        save_every_s: so many seconds have passed since the last one.
        keep_last: how many of the last checkpoints stay, beside the best (see `save`).
        on_save_error: "raise" on all ranks where a checkpoint cannot be written, or "warn" and go on.
        on_row: called on rank 0 with each update's row, a dict of numbers, while training goes on; or several such
            callables (see `sinks`). Where a step has several passes, its row is that of the first one.
        progress: show in the terminal how the run goes on, from rank 0, and draw its curves in the run folder when it
            ends; False prints nothing.
        monitor: serve a page of the run, by a process beside it, and print the link; it needs a run folder, and
            `pip install 'ddp_loop[monitor]'`.
        buffer_reduction: rules for single buffers, by name (such as "model.0.counter"): "mean", "same", "first",
            "local".
        bucket_cap_mib: size of the buckets in which gradients are summed, in MiB.
        allow_single_sample_shards: take shards of one sample also if the model has BatchNorm1d layers, which
            cannot normalise one value (but can, if their inputs have positions).
        ordered: whether gradients are added up in an order that follows from the shards alone, so that a fixed number
            of shards gives the same bits on any number of ranks; by default where `batches` was given `shards`.
        trace: leave a digest of every tensor of every step in the run folder, for `python -m ddp_loop diff`; some
            milliseconds a step for a small network, seconds for a large one.
        on_nonfinite: where a mini-batch's loss or gradients are NaN or infinite, on all ranks: "raise"; "skip" the
            step, which leaves parameters, buffers and optimizers as they were, but not 100 times in a row; or "allow"
            it. With a GradScaler in `state` the gradients are its business, and only the loss is looked at. Parameters,
            buffers and optimizer states that became NaN raise too, or are said once; infinity in a buffer does not.
        check_replicas_every: after how many steps all ranks' parameters, buffers and optimizers, settings among them,
            are compared, by checksums; also after the first step and the tenth, and at the end. 0 for never, nor before
            an evaluation. One rank has nothing to compare.

    Attributes:
        batches, world, epochs: as they were given; the world is that of the batches.
        fold: what reduces this loop's steps over the ranks; another one once parameters are replaced.

    Raises:
        ValueError: neither or no sensible epochs and steps, a state without parameters, one-sample shards under
            BatchNorm1d, or structures that differ between ranks.
        PeerFailed: another rank has such a problem.
        ReplicaMismatch: while it is gone through: a rank's parameters, buffers or optimizers became others.
    """

    def __init__(
        self,
        batches: Batches,
        epochs: int | None = None,
        *,
        state: Mapping[str, object],
        steps: int | None = None,
        run_dir: str | Path | None = None,
        resume: bool | None = None,
        save_every: int | None = None,
        save_every_s: float = 600.0,
        keep_last: int = 3,
        on_save_error: OnSaveError = "raise",
        on_row: Receivers = None,
        progress: bool = True,
        monitor: bool = False,
        buffer_reduction: Mapping[str, BufferReduction] | None = None,
        bucket_cap_mib: float = 8.0,
        allow_single_sample_shards: bool = False,
        on_nonfinite: OnNonFinite = "raise",
        check_replicas_every: int = 100,
        ordered: bool | None = None,
        trace: bool = False,
    ) -> None:
        self.batches, self.world, self.epochs = batches, batches.world, epochs
        self._where, self._cut_short = LoopPosition(batches, epochs, steps), False
        self._state = check_state(state)
        self._begun: str | None = None  # the epoch that is gone through now, or was left
        watch, folder = current_trace_request(), None if run_dir is None else Path(run_dir)
        keeping = CheckpointPolicy(save_every, save_every_s, keep_last, on_save_error)
        self._buffer_reduction, self._bucket_cap_mib, self._ordered = buffer_reduction or {}, bucket_cap_mib, ordered
        self._rules = under_all_names(find_modules(self._state), self._buffer_reduction)
        self._recorder = self._make_recorder(folder if watch is None else None, keeping, on_nonfinite)
        self._gathering = BatchGather(self.world)
        self._stream: Iterator[LoadedBatch] = iter(())
        self._ahead: list[LoadedBatch | Exception | None] = []  # the next mini-batch, if it was looked for already
        self.world.on_leaving(self._leave)
        self.world.stage = "start"
        problem: Exception | None = None
        try:
            check_extent(batches, epochs, steps, bucket_cap_mib)
            check_rule(on_nonfinite)
            check_interval(check_replicas_every)
            if not allow_single_sample_shards:
                check_rows(batches, self._state)
            self._make_fold()
            self._replicas = ReplicaCheck(self._state, self.world, check_replicas_every, self._rules)
            check_synced(self.batches, self.fold.sync_channels)
            self._open_trace(folder, trace, watch)
        except (ValueError, OSError) as error:
            problem = error
        try:
            self.world.raise_if_any_failed(problem)
            facts = epochs, steps, bucket_cap_mib, check_replicas_every, on_nonfinite, ordered, run_dir is None
            self.world.require_equal(_SAME, (*facts, resume, save_every))
            self._begin(resume, on_row, progress, monitor and watch is None)
        except BaseException:
            self._leave()
            raise
        self.world.stage = ""

    def _make_recorder(self, folder: Path | None, keeping: CheckpointPolicy, rule: OnNonFinite) -> RunRecorder:
        """And what looks at the values of steps and state."""
        local = [name for name, policy in self._rules.items() if policy == "local"]
        self._state_check = NonFiniteStateCheck(self._state, self.world, rule, local)
        self._guard = NonFiniteGuard(rule, self.batches.indices, self._state, blame=self._state_check.blame)
        checkpointer = None
        if folder is not None:
            parts: dict[str, Stateful] = {"guard": self._guard, "trained": FrozenParameters(self._state)}
            checkpointer = Checkpointer(folder, self.world, self._state, keeping, local, parts, self._state_check.check)
        return RunRecorder(self.world, self._where, checkpointer, self._state, self._state_check)

    def _begin(self, resume: bool | None, on_row: Receivers, progress: bool, monitor: bool) -> None:
        """Make the replicas equal, and go on where the run folder stands."""
        for scaler in self._scalers:  # else it has no scale on a rank that has no shard in the first step
            if scaler._scale is None:
                scaler.scale(torch.zeros((), device=self.world.device))
        self._structure = ModuleStructure(self._state)
        tensors = find_tensors(self._state)
        check_structure(tensors, self.world)
        make_equal(tensors, self.world)
        if (there := self._recorder.open(self.batches.facts, resume)) is not None:
            self.load_state_dict(there)
        self._recorder.open_rows(on_row, progress=progress, monitor=monitor)

    def _make_fold(self) -> None:
        parameters = find_parameters(self._state)
        self._scalers = [one for one in self._state.values() if isinstance(one, GradScaler) and one.is_enabled()]
        if not any(parameter.requires_grad for parameter in parameters.values()):
            raise ValueError(
                f"state must hold a module or an optimizer with parameters to train; got {sorted(self._state)} "
                "without any: state=dict(model=model, optimizer=optimizer)"
            )
        check_layout(find_tensors(self._state), self.world)
        self.fold = Fold(
            find_modules(self._state),
            parameters,
            self.world,
            bucket_bytes=int(self._bucket_cap_mib * MIB),
            buffer_reduction=self._buffer_reduction,
            shards=self.batches.shards,
            ordered=self.batches.fixed_shards if self._ordered is None else self._ordered,
            guard=self._guard,
            scalers=self._scalers,
            optimizers=[one for one in self._state.values() if isinstance(one, Optimizer)],
        )

    def _open_trace(self, run: Path | None, trace: bool, watch: TraceRequest | None) -> None:
        tracer = open_trace(run, self.batches, self._state, watch, trace=trace, ordered=self.fold.is_ordered)
        if watch is not None:
            self._where.most_steps, self._cut_short = min(watch.steps, self._where.most_steps or watch.steps), True
        if tracer is not None:
            self._recorder.tracer = tracer
            self.fold.gradients.watch, self.fold.gradients.overlaps = tracer.backward, False

    # -- going through it ----------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """Of the step at hand, counted from 1."""
        return self._where.iteration

    @property
    def epochs_completed(self) -> int:
        """How many epochs were made, also before it went on: `for epoch in range(loop.epochs_completed, epochs)`."""
        return self._where.epochs

    @property
    def stopped(self) -> str | None:
        """Why the loop was asked to stop, and did; None if it was not."""
        return self._recorder.stopped

    def stop(self) -> None:
        """Ask all ranks to end the loop, with a checkpoint: after the step at hand. One rank may call this.

        Called behind the step's fold it is heard in the next one, and the loop ends after that.
        """
        self._recorder.asks_stop = True

    def save(self, score: float | None = None) -> None:
        """Ask for a checkpoint: after the step at hand; behind an epoch, of its last step. Every rank must call this.

        A run that goes on from an epoch's last step does again what the script does behind that epoch.

        Args:
            score: the lower the better, such as a validation loss; the checkpoint with the lowest one stays.
        """
        self._recorder.save(None if score is None else float(score))

    def __iter__(self) -> Iterator[Step]:
        """The steps of all epochs that are still to be made. Every rank must call this."""
        self._recorder.holds = False
        yield from self.epoch()
        while not self._is_over:
            yield from self.epoch()

    def epoch(self) -> Iterator[Step]:
        """The steps of the epoch that comes next. Every rank must call this.

            for epoch in range(loop.epochs_completed, epochs):
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
        if where.is_done and not self._begun and (self._cut_short or self.iteration == where.resumed_at):
            self._leave()
            return  # there was nothing left to do where it went on, or a watch lets it make no more
        if self._begun or where.is_done:
            why = f"has made its {self.iteration} steps" if where.is_done else f"began {self._begun} before"
            raise RuntimeError(f"a Loop is gone through once, each epoch to its end; this one {why}: make another")
        self._begun, self.world.step = f"epoch {where.epochs + 1}", self.iteration
        self._state_check.begin()
        self.fold.requests = self._recorder.requests
        self._recorder.install_stop_handlers()
        if (tracer := self._recorder.tracer) is not None and tracer.is_new:
            tracer.start(self.iteration)
        try:
            with closing(self.batches.epoch(where.epochs, where.at, held=False)) as self._stream:
                while (loaded := self._take_next()) is not None:
                    yield from self._one_step(loaded)
                    if where.has_made_all or self.stopped is not None:
                        break
            self._check_pending()
            if self.stopped is None and (loaded is None or where.is_last_of_epoch(loaded.mini_batch)):
                where.end_epoch()
            self._look_at_the_end()
            self._begun, self.world.stage = None, ""
            self.world.step = 0 if self._is_over else self.world.step
        finally:
            if self._begun or self._is_over:
                self.close()
            if self._is_over and not self._begun:
                self._recorder.end()  # else why it was left is known when the world is

    def _check_pending(self) -> None:
        """Look at what a GPU was still to say."""
        self._guard.check_pending()
        self._replicas.check_pending()

    def _look_at_the_end(self) -> None:
        if self._is_over:
            self._state_check.finish(self.iteration)

    def _one_step(self, loaded: LoadedBatch) -> Iterator[Step]:
        self._where.begin(loaded.mini_batch)
        self.world.step = self.iteration
        step = Step(
            self.fold,
            self._gathering,
            self.world,
            loaded,
            self.iteration,
            self._where.is_last_of_epoch(loaded.mini_batch),
            begin=self._renew_fold,
            meanwhile=self._use_the_wait,
            report=self._report,
            tracer=self._recorder.tracer,
        )
        try:
            yield step
        except GeneratorExit:
            self._end_trace_of(step)
            if step.leave(f"it left the loop in step {self.iteration}, by a break or an error that was caught"):
                self._replicas.leave(self.iteration, folded=self._where.is_folded)
            raise
        step.require_folded()
        self._end_trace_of(step)
        stops = self.fold.decision is not None and self.fold.decision.stop
        if stops or self._where.ends_all(loaded.mini_batch):
            step.leave(f"it ended the loop after step {self.iteration}")  # a peer that left it before is found out
            self._replicas.end(self.iteration)
        self._recorder.end_step(loaded.mini_batch, self.fold.decision)
        self.world.stage = "data"

    def _end_trace_of(self, step: Step) -> None:
        if step.passes:
            self._recorder.end_trace(step.iteration)

    def _use_the_wait(self) -> None:
        """While the sums are under way: the rows before this one, and the data of the next mini-batch."""
        self._recorder.flush_ready()
        if not self._ahead and not self._where.has_made_all:
            try:
                loaded = next(self._stream, None)
            except Exception as error:  # of the next step's data, not of this one's
                self._ahead.append(error)
                return
            if loaded is not None:
                loaded.read_ahead()
            self._ahead.append(loaded)

    def _take_next(self) -> LoadedBatch | None:
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
        if self._begun or self.iteration != self._where.resumed_at:
            problem = RuntimeError(
                "a Loop is told where to go on before its first step; this one has begun: make another"
            )
        elif (why := self._where.validate(state)) is not None:
            problem = ValueError(why)
        self.world.raise_if_any_failed(problem)
        self.world.require_equal("where the loop goes on", dict(state))
        self._where.resume_from(state)

    def _renew_fold(self) -> Fold:
        """The fold of the next pass: another one if modules or parameters took others' places. Every rank alike."""
        if self._structure.has_changed():
            self._structure.make_new_equal(self.world)
            former = self.fold
            former.release()
            self._make_fold()
            check_synced(self.batches, self.fold.sync_channels)
            self.fold.follow(former)
        return self.fold

    def _report(self, step: Step, mini_batch: MiniBatch, folded: Folded) -> None:
        self._where.is_folded = True
        if step.passes == 1:
            self._recorder.add_row(mini_batch, folded, self.fold, skips=self._guard.skips)
        self._guard.raise_or_count(step.iteration, mini_batch, folded.values[0], folded.losses, folded.share)
        if step.passes == 1:
            self._state_check.check_if_due(step.iteration)
            self._replicas.check(step.iteration)

    def close(self) -> None:
        """Hand the last rows on, close the run's files and take all hooks off the model."""
        self._guard.release()
        if hasattr(self, "fold"):
            self.fold.release()
        self._recorder.close()

    def _leave(self) -> None:
        self.close()
        self._recorder.end()
