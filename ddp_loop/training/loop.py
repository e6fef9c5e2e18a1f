"""The loop: which step comes next, what it folds, and what it records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from ddp_loop.checkpoint import Checkpointer, CheckpointPolicy, OnSaveError, Stateful, flatten_config
from ddp_loop.data import Batches, LoadedBatch, LoopPosition, MiniBatch
from ddp_loop.determinism import as_int, seed_step
from ddp_loop.distributed import FrozenParameters, ReplicaCheck
from ddp_loop.reporting import Receivers
from ddp_loop.tracing import trace_request_of
from ddp_loop.training.buffers import BufferReduction
from ddp_loop.training.control import NO_REQUEST, ControlRequest
from ddp_loop.training.fold import Fold
from ddp_loop.training.gather import BatchGather
from ddp_loop.training.job import Job, ReductionSettings, WeightlessStepCheck
from ddp_loop.training.nonfinite import NonFiniteGuard, OnNonFinite
from ddp_loop.training.payload import StepResult
from ddp_loop.training.profiled import open_steps
from ddp_loop.training.recorder import Reporting, RunRecorder, open_trace
from ddp_loop.training.share_measurement import ShareMeasurement
from ddp_loop.training.state_check import NonFiniteStateCheck
from ddp_loop.training.step import Epoch, Step
from ddp_loop.training.validation import SAME, check_arguments, check_batches


class Loop:
    """The steps of a training run over `batches`, on every rank at once. Every rank must call this.

        for step in loop:
            for images, labels in step:
                step.backward(cross_entropy(model(images), labels))
            result = step.fold()
            optimizer.step()

    A script that does something after each epoch iterates over `epochs`. The model stays the user's own and is not
    wrapped. All ranks start with rank 0's parameters and buffers. After a stop (Ctrl-C, SIGTERM, the page, `stop`) the
    loop raises `Stopped`, which ends the script.

    Args:
        batches: the mini-batches.
        epochs, steps: the number of passes over the data; or the most updates.
        state: the parts of the job by name: modules and optimizers, whose parameters are folded, and a GradScaler.
        run_dir: a folder for checkpoints, from the newest of which a restart resumes on any number of ranks, for
            rows.jsonl with a line per update, and for status.json.
        resume: whether to resume the run in the folder: None if its data, shards and seed are the same, else raise;
            True also with other shards or another seed; False to start over, which moves the old files to `before/`.
        resume_from: another run's folder, or a checkpoint in one, with whose weights and optimizer states a new run
            begins, at step 1; ignored where the run in `run_dir` resumes. See docs/checkpoints.md.
        save_every: checkpoint every N steps (default: every epoch), and always on stop and at the end.
        save_every_s: also checkpoint when this many seconds have passed since the last one.
        keep_last: the number of newest checkpoints that stay, beside the best (see `save`).
        on_save_error: "raise" on all ranks where a checkpoint cannot be written, or "warn" and continue.
        on_row: called on rank 0 with each update's row, a dict of numbers, or several such callables and sinks (see
            `sinks`). Further passes of a step add theirs: `loss_2`.
        progress: show progress in the terminal, from rank 0, and draw curves in the run folder at the end.
        monitor: serve a page of the run folder from another process; needs `pip install 'ddp_loop[monitor]'`.
        buffer_reduction: rules for single buffers, such as "model.0.level": "same" (all shards change it alike, the
            default), "mean" (over the samples), "first" (that of the first shard), "min" and "max" (for observers),
            "local" (each rank its own). See docs/buffers.md.
        bucket_cap_mib: size of the buckets in which gradients are summed, in MiB; by default 8 on the CPU, and on a
            GPU 25 after a first one of 1, as in DDP.
        reduce_dtype: torch.float32 or torch.float64, in which gradients of a lower precision are added up over shards
            and ranks, and rounded once; by default in their own dtype. See docs/migrate.md.
        allow_single_sample_shards: accept shards of one sample although the model has BatchNorm1d layers, which
            cannot normalise one value (but can, if their inputs have positions).
        ordered: add gradients up in an order that follows from the shards alone; by default where they are fixed.
        trace: write a digest of every tensor of every step into the run folder, for `python -m ddp_loop diff`; some
            milliseconds a step for a small network, seconds for a large one.
        profile: measure so many steps, and print where their time goes on each rank; see docs/profile.md.
        config: the script's hyper-parameters, kept in run.json and shown in tables of runs: a dict, the namespace of
            argparse or a dataclass instance, also nested. Without one, a resumed run keeps what it had.
        on_nonfinite: what all ranks do where a mini-batch's loss or gradients are not finite: "raise"; "skip" the step,
            which then changes nothing, at most 99 times in a row (with fused optimizers a GPU is not waited for); or
            "allow" it. With a GradScaler in `state` only the loss is checked. State that became NaN raises or warns.
        check_replicas_every: the steps between two comparisons of all ranks' parameters, buffers and optimizers, with
            settings, by checksums; also after steps 1 and 10 and at the end. 0 for none, nor before an evaluation.

    Attributes:
        batches, world: as given, and theirs. `len(loop)` counts the whole run's steps, `len(loop.batches)` an epoch's.
        log, log_text, log_image, log_table: log what belongs to the current step; see `RunLog`.
        fold: reduces this loop's steps over the ranks; a new one after parameters are replaced.

    Raises:
        ValueError: neither or no sensible epochs and steps, a state without parameters, one-sample shards under
            BatchNorm1d, a config of another kind, or structures or arguments that differ between ranks.
        PeerFailed: another rank has such a problem.
        ReplicaMismatch: during the loop: parameters, buffers or optimizers differ between ranks.
    """

    _begun: str | None  # where it is in its epochs, or was left
    _is_iterated = False  # whether an iterator of it goes on
    _compares: bool  # whether ranks compare their state
    _announces: bool  # whether the current mini-batch has news for the other ranks

    def __init__(
        self,
        batches: Batches,
        epochs: int | None = None,
        *,
        state: Mapping[str, object],
        steps: int | None = None,
        run_dir: str | Path | None = None,
        resume: bool | None = None,
        resume_from: str | Path | None = None,
        save_every: int | None = None,
        save_every_s: float = 600.0,
        keep_last: int = 3,
        on_save_error: OnSaveError = "raise",
        on_row: Receivers = None,
        progress: bool = True,
        monitor: bool = False,
        buffer_reduction: Mapping[str, BufferReduction] | None = None,
        bucket_cap_mib: float | None = None,
        reduce_dtype: torch.dtype | None = None,
        allow_single_sample_shards: bool = False,
        on_nonfinite: OnNonFinite = "raise",
        check_replicas_every: int = 100,
        ordered: bool | None = None,
        trace: bool = False,
        profile: int | None = None,
        config: object = None,
    ) -> None:
        check_batches(batches)
        self._begun, epochs, steps = None, as_int(epochs), as_int(steps)
        self.batches, self.world, self._compares = batches, batches.world, batches.world.size > 1
        self._where, self._gathering = LoopPosition(batches, epochs, steps), BatchGather(self.world)
        watched = trace_request_of(batches)
        folder = None if run_dir is None else Path(run_dir).absolute()
        policy = CheckpointPolicy(save_every, save_every_s, keep_last, on_save_error)
        is_ordered = batches.fixed_shards if ordered is None else ordered
        how = ReductionSettings(is_ordered, bucket_cap_mib, buffer_reduction or {}, reduce_dtype)
        self._job = Job(state, batches, how)
        self._recorder = self._make_recorder(folder if watched is None else None, policy, on_nonfinite)
        with self.world.in_stage("start"):
            problem: Exception | None = None
            try:
                flat = None if config is None else flatten_config(config)
                check_arguments(batches, epochs, steps, how.sums, on_nonfinite, check_replicas_every)
                if not allow_single_sample_shards:
                    self._shares.check_rows(self._job.state)
                self._ahead, self._step = open_steps(profile, batches, self._where, folder, watched)
                traced = folder, batches, self._job.state, watched
                self._recorder.tracer = open_trace(*traced, trace=trace, ordered=is_ordered)
                self.fold = self._make_fold()
                self._replicas = ReplicaCheck(self._job.state, self.world, check_replicas_every, self._job.rules)
                if watched is not None:
                    self._where.most_steps = min(watched.steps, steps or watched.steps)
            except ValueError as error:
                problem = error
            with self._leaving_on_error():
                self.world.raise_if_any_failed(problem)
                facts = epochs, steps, *how.sums, check_replicas_every, on_nonfinite, ordered, run_dir is None
                self.world.require_equal(SAME, (*facts, resume, str(resume_from), save_every, trace, profile, flat))
                self._begin(resume, resume_from, Reporting(on_row, progress, monitor and watched is None, flat))

    @contextmanager
    def _leaving_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._leave()
            raise

    def _make_recorder(self, folder: Path | None, policy: CheckpointPolicy, rule: OnNonFinite) -> RunRecorder:
        """The recorder, and the checks of the values of steps and state."""
        state = self._job.state
        local = [name for name, rule in self._job.rules.items() if rule == "local"]
        self._state_check = NonFiniteStateCheck(state, self.world, rule, local)
        self._weightless = WeightlessStepCheck()
        self._guard = NonFiniteGuard(rule, self.batches.indices, state, self._state_check.blame, self.world.print)
        self._shares = ShareMeasurement(self.batches)
        checkpointer = None
        parts: dict[str, Stateful] = {"guard": self._guard, "trained": FrozenParameters(state), "shares": self._shares}
        parts |= self.batches.checkpointed(skips=rule == "skip")
        if folder is not None:
            checkpointer = Checkpointer(folder, self.world, state, policy, local, parts, self._state_check.check)
            checkpointer.give_up = self._give_up
        recorder = RunRecorder(self.world, self._where, checkpointer, state)
        self.world.on_leaving(self._leave)
        log = recorder.run_log
        self.log = log.log
        self.log_text = log.log_text
        self.log_image = log.log_image
        self.log_table = log.log_table
        return recorder

    def _make_fold(self, former: Fold | None = None) -> Fold:
        if former is not None:
            former.check_pending()
        watch = None if self._recorder.tracer is None else self._recorder.tracer.backward
        return self._job.make_fold(self, self._guard, watch, former)

    def _begin(self, resume: bool | None, source: str | Path | None, reporting: Reporting) -> None:
        """Make the replicas equal, and resume the run in the folder, or begin with the weights of another one."""
        self._job.make_equal()
        origin = self._recorder.warm_start(source, self._job.state, resume)
        facts = self.batches.facts, resume, reporting.config, self.batches.shares, origin
        if (position := self._recorder.open(*facts)) is not None:
            self.load_state_dict(position)
        self._use_measured_shares()
        self._recorder.open_trace_files()
        self._recorder.open_rows(reporting)

    # -- the steps -----------------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """Of the current step, counted from 1."""
        return self._where.iteration

    @property
    def epochs_completed(self) -> int:
        """The number of completed epochs, those before a resume too."""
        return self._where.epochs

    @property
    def stopped(self) -> str | None:
        """Why the loop stopped on request; None if it did not."""
        return self._recorder.stopped

    def stop(self) -> None:
        """Ask all ranks to end the script, with a checkpoint, after the current step. One rank may call this.

        After `fold` (on a GPU: the last `backward`) it takes effect in the next fold, evaluation or end of a loop.
        To leave the loop alone, `break`.
        """
        self.world.stops.ask("loop.stop()")

    def save(self, score: float | None = None) -> None:
        """Ask for a checkpoint after the current step; after an epoch, of its last step. Every rank must call this.

        A run that resumes from an epoch's last step repeats what the script does after that epoch.

        Args:
            score: the lower the better, such as a validation loss; the checkpoint with the lowest one stays.
        """
        self._recorder.save(None if score is None else float(score))

    def __len__(self) -> int:
        """The number of steps of the whole run, those before a resume too: the last step's `iteration`.

        Raises:
            TypeError: it is unknown, as for a stream without `steps`.
        """
        return self._where.known_length()

    def __iter__(self) -> Iterator[Step]:
        """The remaining steps of all epochs. Every rank must call this.

        Raises:
            Stopped: the ranks were asked to stop. It ends the script after a checkpoint.
        """
        self._recorder.holds = False
        for epoch in self.epochs():
            yield from epoch

    def epochs(self) -> Iterator[Epoch]:
        """The remaining epochs, each iterated for its steps. Every rank must call this.

            for epoch in loop.epochs():
                for step in epoch:
                    ...
                score = dl.evaluate(model, test_batches, loss=losses)["loss"]
                world.print(f"Epoch {epoch.number}: {score:.4f}")

        A run that resumes from an epoch's last step gets that epoch without a step, and so repeats what follows it.

        Raises:
            RuntimeError: an epoch was not iterated to its end, or all epochs are completed.
            Stopped: the ranks were asked to stop. It ends the script after a checkpoint.
        """
        where = self._where
        again = where.is_done and where.at > 0  # it resumes after the last of `steps`
        if self.stopped is not None:
            raise self.world.stops.ended()
        if self._begun or (where.is_done and self.iteration != where.resumed_at):
            raise self._where.out_of_turn(self._begun, is_over=self._is_over)
        self._is_iterated = True
        try:
            while again or not self._is_over:
                again = False
                number = where.epochs + 1
                yield Epoch(number, self._steps_of, self.batches)
                if self._begun or not (self._is_over or where.epochs == number):
                    raise self._where.out_of_turn(self._begun, is_over=self._is_over)
            self.world.stops.agree()  # a request since the last fold
        finally:
            self._begun = self._begun or (None if self._is_over else f"before epoch {where.epochs + 1}")
            self._is_iterated = False
            self._leave(abandoned=True)
        self._recorder.end()
        if self.stopped is not None:
            raise self.world.stops.ended()

    def _steps_of(self, number: int) -> Iterator[Step]:
        where = self._where
        if self._begun or where.epochs + 1 != number or self.stopped is not None:
            raise self._where.out_of_turn(self._begun, is_over=self._is_over)
        if where.is_done:
            return
        self._begun = f"inside epoch {where.epochs + 1}"
        self.world.step = self.iteration
        self._state_check.begin(self.iteration)
        self._use_measured_shares()
        self._recorder.install_stop_handlers()
        if (tracer := self._recorder.tracer) is not None and tracer.is_new:
            tracer.start(self.iteration)
        try:
            with self._ahead.epoch(where.epochs + 1, where.at):
                while (loaded := self._ahead.take()) is not None:
                    yield from self._one_step(loaded)
                    if self.stopped is not None or where.iteration == where.most_steps:
                        break
            self._guard.check_pending()  # what a GPU has yet to give
            self._replicas.check_pending()
            if self.stopped is None and (loaded is None or where.is_last_of_epoch(loaded.mini_batch)):
                where.end_epoch()
            if self._is_over:
                self._state_check.finish(self.iteration)
                self.world.step = 0
            self._begun = None
            self.world.stage = ""
        finally:
            if self._begun:
                self._leave(abandoned=True)
        if self.stopped is not None:
            self._leave()
            raise self.world.stops.ended()

    def _one_step(self, loaded: LoadedBatch) -> Iterator[Step]:
        mini_batch = loaded.mini_batch
        where = self._where
        where.iteration = where.iteration + 1
        where.at = mini_batch.position + 1
        where.is_folded = False
        is_last_of_epoch = mini_batch.is_last or mini_batch.ends_stream
        self.world.step = iteration = where.iteration
        self._announces = mini_batch.announcement is not None and mini_batch.announcement.is_new
        parts = self, self.fold, self._gathering, self.world, loaded, iteration, self._shares.meter
        step = self._step(*parts, is_last_of_epoch=is_last_of_epoch, tracer=self._recorder.tracer)
        try:
            yield step
        except GeneratorExit:
            if step.passes:
                self._recorder.end_trace(iteration)
            self.world.explain = step.explainer(skips=self._guard.skips and not self._guard.is_scaled)
            if step.leave(f"it left the loop in step {iteration}, by a break or an error that was caught", self.fold):
                self._replicas.leave(iteration, folded=where.is_folded)
            raise
        if step.passes == 0 or self.fold.opened_by is not None:
            step.require_folded()
        if self._recorder.has_rows:
            self._recorder.end_row()
        if self._recorder.tracer is not None and step.passes:
            self._recorder.end_trace(iteration)
        decision = self.fold.decision
        stops, saves = (False, False) if decision is None else (decision.stop, decision.save)
        ends = iteration == where.most_steps or (is_last_of_epoch and where.ends_all(mini_batch))
        if stops or ends:
            self.fold.check_pending()
            step.leave(f"it ended the loop after step {iteration}", self.fold)  # finds a peer that left it before
            self._replicas.end(iteration)
        if stops or self._recorder.keeps:
            self._recorder.end_step(stops=stops, ends=ends, saves=saves, is_last_of_epoch=is_last_of_epoch)
        self._use_measured_shares(None if stops or ends else step)
        self.world.stage = "data"

    def _use_measured_shares(self, step: Step | None = None) -> None:
        """Read and fold as the mini-batches are divided now, if they have got shares; `step` was not the last one."""
        if step is not None and self._shares.found is not None:
            step.meet(self.fold)
        if self._shares.take():
            self._recorder.record_shares(self.batches.shares or ())
            self._ahead.restart(self._where.epochs + 1, self._where.at)
            self.fold = self._make_fold(self.fold)  # fixed shards have moved to other ranks

    @property
    def _is_over(self) -> bool:
        return self._where.is_done or self.stopped is not None

    # -- StepEvents: what happens around a fold ------------------------------------------------------------

    def before_pass(self, passes: int) -> Fold:
        """The fold of the next pass: a new one if modules or parameters were replaced. Every rank must call this.

        Args:
            passes: the number of folded passes of the step.
        """
        if self._job.structure.has_changed():
            self._job.structure.make_new_equal(self.world)
            self.fold = self._make_fold(self.fold)
        self.fold.modules = self._job.structure.modules
        if passes == 0 and self.world.rank == 0:
            self._job.unmoved.check(self._where.iteration, had_gradients=self.fold.had_gradients)
        return self.fold

    def requests(self) -> ControlRequest:
        """What this rank asks of all in a fold."""
        stop = self.world.stops.asked is not None
        save = False
        problem = None if self._state_check.found is None else self._state_check.take()
        if self._recorder.keeps:
            save, problem = self._recorder.save_requests(problem)
        if self._job.structure.has_changed():
            problem = problem or self._job.structure.changed_in_step()
        if not (stop or save or self._announces) and problem is None:
            return NO_REQUEST
        return ControlRequest(stop, save, problem)

    def while_reducing(self) -> None:
        """Hand on earlier rows, read the next mini-batch's data, and start the streams of what follows the fold."""
        if self._recorder.has_rows:
            self._recorder.flush_ready()
        if self._where.iteration != self._where.most_steps:
            self._ahead.read()
        seed_step(self.world.seed, self._where.iteration, self.world.device)

    def after_fold(self, result: StepResult, mini_batch: MiniBatch, passes: int) -> None:
        """Record the step, and check what the fold computed. Every rank must call this.

        Args:
            result, mini_batch, passes: of the step; the number of its folded passes before this one.
        """
        self._where.is_folded = True
        if passes and self._recorder.has_rows:
            self._recorder.extend_row(result, passes + 1)
        elif self._recorder.has_rows:
            unused = self.batches.unused if mini_batch.is_last and self.batches.partition != "global" else None
            self._recorder.begin_row(mini_batch, result, self.fold, skips=self._guard.skips, unused=unused)
        if self._guard.pending is not None or self._guard.bad is not False:
            self._guard.raise_or_count(result.iteration, mini_batch, result.values[0], result.losses, result.shares)
        if passes == 0:
            if result.total is not None and self.world.rank == 0 and not self.world.accelerator.is_asynchronous:
                self._weightless.check(result)
            if result.iteration >= self._state_check.due:
                self._state_check.look(result.iteration)
            if self._compares:
                self._replicas.check(result.iteration)
            if self._shares.is_measuring:
                self._shares.end_step(result.iteration)

    # -- its position --------------------------------------------------------------------------------------

    @property
    def skipped(self) -> int:
        """The number of steps skipped so far, since their loss or gradients were not finite; waits for a GPU."""
        return self._guard.skipped

    def state_dict(self) -> dict[str, int]:
        """The position, to resume from on any number of ranks; a step counts from its fold on. No part of `state`."""
        return self._where.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume at the position of another loop over the same batches. Every rank must call this.

        With the same number of shards the next steps are those that the other loop would have made, to the bit.

        Args:
            state: from `state_dict`: the updates, the completed epochs, and the mini-batches of the current one.

        Raises:
            RuntimeError: this loop has begun.
            ValueError: other keys, or numbers that do not fit these batches, or that differ between ranks.
        """
        has_begun = self._begun is not None or self.iteration != self._where.resumed_at
        self.world.raise_if_any_failed(self._where.problem_of(state, has_begun=has_begun))
        self.world.require_equal("the position to resume from", dict(state))
        self._where.resume_from(state)

    def close(self) -> None:
        """Hand on the last rows, close the run's files and remove all hooks from the model."""
        self._guard.release()
        if hasattr(self, "fold"):
            self.fold.release()
        self._recorder.close()

    def _give_up(self) -> None:
        """End, as a newer Loop wants the run folder, unless this one is being iterated."""
        if not self._is_iterated:
            self._begun = "when a newer Loop took over its run folder"
            self._leave()

    def _leave(self, *, abandoned: bool = False) -> None:
        self.close()
        self._recorder.end(later=abandoned)
        self.world.forget(self._leave)  # so that the loop can be freed, with model, optimizer and data
