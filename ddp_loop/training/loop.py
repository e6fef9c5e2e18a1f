"""The loop: which step comes next, its fold and its records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ddp_loop.checkpoint import Checkpointer, CheckpointPolicy, OnSaveError, Stateful, flatten_config
from ddp_loop.data import Batches, LoadedBatch, LoopPosition, MiniBatch
from ddp_loop.determinism import LOOP, as_int, seed_epoch, stream_key, streams
from ddp_loop.reporting import Receivers
from ddp_loop.tracing import trace_request_of
from ddp_loop.training.buffers import BufferReduction
from ddp_loop.training.checks import StepChecks
from ddp_loop.training.profiled import open_steps
from ddp_loop.training.recorder import RunRecorder, open_trace
from ddp_loop.training.step import Epoch, Fold, Job, Step
from ddp_loop.training.validation import OnNonFinite, check_arguments, check_batches, check_state, folder_of


class Loop:
    """The steps of a training run over `batches`, on every rank at once. Every rank must call this.

        for step in loop:
            for images, labels in step:
                step.backward(cross_entropy(model(images), labels))
            result = step.fold()
            optimizer.step()

    To run code after each epoch, iterate over `epochs`. The model stays yours, unwrapped. All ranks start with rank 0's
    parameters and buffers. After a stop (Ctrl-C, SIGTERM, the page, `stop`) the loop raises `Stopped`, which ends the
    script.

    Args:
        batches: the mini-batches.
        epochs, steps: the number of passes over the data; or the most updates.
        state: the parts of the job by name: modules and optimizers, whose parameters are folded, and a GradScaler.
        run_dir: a folder for checkpoints, for rows.jsonl with a line per update, and for status.json. A restart resumes
            from the newest checkpoint, on any number of ranks.
        resume: whether to resume the run in the folder: None if its data, shards and seed are the same, else raise;
            True also with other shards or another seed; False to start over, which moves the old files to `before/`.
        resume_from: another run's folder, or a checkpoint in it. A new run begins with its weights and optimizer
            states, at step 1. Ignored if the run in `run_dir` resumes. See docs/checkpoints.md.
        save_every: checkpoint every N steps (default: every epoch), and always on stop and at the end.
        save_every_s: also checkpoint when this many seconds have passed since the last one.
        keep_last: the number of newest checkpoints that stay, beside the best (see `save`).
        on_save_error: "raise" on all ranks where a checkpoint cannot be written, or "warn" and continue.
        on_row: called on rank 0 with each update's row, a dict of numbers, or several such callables and sinks (see
            `sinks`). Further passes of a step add theirs: `loss_2`.
        progress: show progress in the terminal, from rank 0, and draw curves in the run folder at the end.
        monitor: serve a page of the run folder from another process; needs `pip install 'ddp_loop[monitor]'`.
        buffer_reduction: rules for single buffers, such as "model.0.level": "same" (all shards change it alike, the
            default), "mean" (over the samples), "first" (the first shard's), "min" and "max" (for observers), "local"
            (each rank its own). See docs/buffers.md.
        bucket_cap_mib: size of the buckets in which gradients are summed, in MiB; by default 8 on the CPU, and on a
            GPU 25 after a first one of 1, as in DDP.
        reduce_dtype: torch.float32 or torch.float64, the dtype in which gradients of a lower precision are added up
            over shards and ranks, and rounded once; by default in their own dtype. See docs/migrate.md.
        allow_single_sample_shards: accept shards of one sample although the model has BatchNorm1d layers, which
            cannot normalise one value (but can, if a sample has several: positions, or nodes of a graph).
        ordered: add gradients up in an order that follows from the shards alone; by default where they are fixed.
        trace: write a digest of every tensor of every step into the run folder, for `ddp_loop diff`; some milliseconds
            a step for a small network, seconds for a large one.
        profile: measure so many steps, and print where their time goes on each rank; see docs/profile.md.
        config: the script's hyper-parameters, kept in run.json and shown in tables of runs: a dict, the namespace of
            argparse or a dataclass instance, even nested. Without it, a resumed run keeps the earlier config.
        on_nonfinite: what all ranks do where a mini-batch's loss or gradients are not finite: "raise"; "skip" the step,
            which then changes nothing, at most 99 times in a row (fused optimizers avoid a GPU sync here); or "allow"
            it. With a GradScaler in `state` only the loss is checked. State that became NaN raises or warns.
        check_replicas_every: the steps between two comparisons of all ranks' parameters, buffers and optimizers, with
            settings, by checksums; also after steps 1 and 10 and at the end. 0 for none, nor before an evaluation.

    Attributes:
        seed: of the random streams of shards and steps: the world's in a script's first Loop, and another in each one.
        batches, world: as given, and their world. `len(loop)` counts the whole run's steps, `len(loop.batches)` an
            epoch's.
        log, log_text, log_image, log_table: log values of the current step; see `RunRecorder`.

    Raises:
        ValueError: neither or no sensible epochs and steps, a state without parameters, one-sample shards under
            BatchNorm1d, a config of another kind, or structures or arguments that differ between ranks.
        PeerFailed: another rank has such a problem.
        ReplicaMismatch: during the loop: parameters, buffers or optimizers differ between ranks.
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
        self.batches = check_batches(batches)
        self.world = batches.world
        epochs, steps = map(as_int, (epochs, steps))
        watched = trace_request_of(batches)
        most_steps = steps if watched is None else min(watched.steps, steps or watched.steps)
        self._where = LoopPosition(batches, epochs, most_steps)
        folder = folder_of(run_dir)
        policy = CheckpointPolicy(save_every, save_every_s, keep_last, on_save_error)
        adds_in_order = batches.fixed_shards if ordered is None else ordered
        sums: dict[str, Any] = {"bucket_cap_mib": bucket_cap_mib, "reduce_dtype": reduce_dtype}
        new_fold = partial(Fold, ordered=adds_in_order, buffer_reduction=buffer_reduction, **sums)
        parts = check_state(state)
        checks = StepChecks(parts, batches, buffer_reduction, on_nonfinite, check_replicas_every)
        recorder = self._make_recorder(parts, checks, policy, folder if watched is None else None)
        flat: dict[str, Any] | None = None
        problem: Exception | None = None
        with self.world.in_stage("start") as stage:
            try:
                flat = None if config is None else flatten_config(config)
                check_arguments(batches, epochs, steps, resume, on_nonfinite, check_replicas_every, **sums)
                checks.shares.check_rows({} if allow_single_sample_shards else parts)
                self._ahead, self._step = open_steps(profile, batches, self._where, folder, watched)
                recorder.tracer = open_trace(folder, batches, parts, watched, trace=trace, ordered=adds_in_order)
                self._job = Job(parts, batches, new_fold, self._where, checks, recorder, self._ahead)
            except ValueError as error:
                problem = error
            same = {"epochs": epochs, "steps": steps, **sums, "trace": trace, "profile": profile, "config": flat}
            same |= {"check_replicas_every": check_replicas_every, "on_nonfinite": on_nonfinite, "ordered": ordered}
            same |= {"buffer_reduction": dict(buffer_reduction or {}), "resume_from": str(resume_from)}
            same |= {"a run_dir": run_dir is not None, "resume": resume, "save_every": save_every}
            show = partial(recorder.open_rows, on_row, flat, progress=progress, monitor=monitor, watched=watched)
            self._begin(problem, same, partial(recorder.open, batches, parts, resume_from, resume, flat), show, stage)

    def _make_recorder(
        self, state: dict[str, object], checks: StepChecks, policy: CheckpointPolicy, folder: Path | None
    ) -> RunRecorder:
        """Make the recorder, which keeps the position of these checks and of the data in checkpoints."""
        self._begun: str | None = None  # where it is in its epochs, or was left
        self._is_iterated = False  # whether an iterator of it goes on
        self._release: Callable[[], None] = lambda: None  # later its job's hooks
        checkpointer = None
        kept: dict[str, Stateful] = {"guard": checks.guard, "shares": checks.shares}
        kept |= self.batches.checkpointed(skips=checks.guard.skips)  # also tells sequences that steps may be skipped
        if folder is not None:
            checkpointer = Checkpointer(folder, self.world, state, policy, checks.local, kept, checks.state.check)
            checkpointer.give_up = self._give_up
        self._recorder = RunRecorder(self.world, self._where, checkpointer, state)
        self.world.on_leaving(self._leave)
        self.log = self._recorder.log
        self.log_text = self._recorder.log_text
        self.log_image = self._recorder.log_image
        self.log_table = self._recorder.log_table
        return self._recorder

    def _begin(
        self,
        problem: Exception | None,
        same: Mapping[str, object],
        restore: Callable[[], dict[str, int] | None],
        open_rows: Callable[[], None],
        stage: str,
    ) -> None:
        """Make the replicas equal, and resume the run in the folder, or begin with the weights of another one."""
        try:
            if problem is None:
                self._release = self._job.release
            self.world.raise_if_any_failed(problem)
            self.world.require_equal("Loop", {**same, "names of state": sorted(self._job.state)})
            self._job.make_equal()
            before = streams(self.world.device)
            self._take_loop(self.world.number_loop(stage))
            position = restore()
            if position is not None:
                self._job.keep_streams(before)
                self.load_state_dict(position)
            self._job.use_shares()
            self._recorder.open_trace_files()
            open_rows()
        except BaseException:
            self._leave()
            raise

    def _take_loop(self, number: int) -> None:
        """Take the random streams of a loop with this number."""
        self._where.loop = number
        self._job.seed = stream_key(self.world.seed, LOOP, number) if number else self.world.seed

    # -- the steps -----------------------------------------------------------------------------------------

    @property
    def fold(self) -> Fold:
        """Reduces this loop's steps over the ranks; a new one after parameters are replaced."""
        return self._job.fold

    @property
    def seed(self) -> int:
        """Of the random streams of shards and steps."""
        return self._job.seed

    @property
    def iteration(self) -> int:
        """Of the current step, counted from 1."""
        return self._where.iteration

    @property
    def epochs_completed(self) -> int:
        """The number of completed epochs, even before a resume."""
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

        It is written as the next step begins, so not where the loop is left in this one. A run that resumes from an
        epoch's last step repeats the lines after that epoch.

        Args:
            score: the lower the better, such as a validation loss; the checkpoint with the lowest score stays.

        Raises:
            ValueError: it is no number.
        """
        try:
            number = None if score is None else float(score)
        except (TypeError, ValueError):
            remedy = "Checkpoints are written into the folder run_dir=."
            raise ValueError(f"loop.save takes a score, which is a number, or none. Got {score!r}. {remedy}") from None
        self._recorder.save(number)

    def __len__(self) -> int:
        """The number of steps of the whole run, even before a resume: the last step's `iteration`.

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
        return chain.from_iterable(self.epochs())

    def epochs(self) -> Iterator[Epoch]:
        """The remaining epochs, each iterated for its steps. Every rank must call this.

            for epoch in loop.epochs():
                for step in epoch:
                    ...
                score = dl.evaluate(model, test_batches, loss=losses)["loss"]
                world.print(f"Epoch {epoch.number}: {score:.4f}")

        A run that resumes from an epoch's last step gets that epoch without a step, and so repeats the lines after it.

        Raises:
            RuntimeError: an epoch was not iterated to its end, or all epochs are completed.
            Stopped: the ranks were asked to stop. It ends the script after a checkpoint.
        """
        where = self._where
        again = where.at > 0 and where.iteration == where.length  # it resumes after the last step, not beyond it
        if self.stopped is not None:
            raise self.world.stops.ended()
        if self._begun or (where.is_done and self.iteration != where.resumed_at):
            raise where.out_of_turn(self._begun, is_over=self._is_over)
        self._is_iterated = True
        with self.world.in_loop(self._where.loop, self._recorder.on_evaluated, self._recorder.advice):
            try:
                while again or not self._is_over:
                    again = False
                    number = where.epochs + 1
                    if where.at == 0 or self._job.resumed_streams is not None:  # else a script restored them itself
                        seed_epoch(self.seed, number, self.world.device)
                    yield Epoch(number, self._steps_of, self.batches)
                    if self._begun or not (self._is_over or where.epochs == number):
                        raise where.out_of_turn(self._begun, is_over=self._is_over)
                self._job.begin_steps()  # of a finished run there are none
                self.world.stops.agree()  # a request since the last fold
            finally:
                self._begun = self._begun or (None if self._is_over else f"before epoch {where.epochs + 1}")
                self._is_iterated = False
                if self._is_over:  # after the lines that follow the last epoch
                    self.world.step = 0
                self._leave(abandoned=True)
        self._recorder.end()
        if self.stopped is not None:
            raise self.world.stops.ended()

    def _steps_of(self, number: int) -> Iterator[Step]:
        where = self._where
        recorder = self._recorder
        if self._begun or where.epochs + 1 != number or recorder.stopped is not None:
            raise where.out_of_turn(self._begun, is_over=self._is_over)
        self._job.begin_steps()
        self.world.step = where.iteration
        if where.is_done:
            return
        self._begun = f"inside epoch {where.epochs + 1}"
        self._job.checks.state.begin(where.iteration)
        self._job.use_shares()
        self.world.stops.install_handlers(recorder)
        if recorder.tracer is not None and recorder.tracer.is_new:
            recorder.tracer.start(where.iteration)
        try:
            with self._ahead.epoch(where.epochs + 1, where.at):
                self.world.step = where.iteration + 1
                with self.world.in_stage("data"):
                    loaded = self._ahead.take()
                if loaded is not None and where.iteration == where.resumed_at:  # in no epoch that a resume repeats
                    recorder.say_schedule_is_missing(self._job.state)
                while loaded is not None:
                    where.iteration += 1
                    where.at = loaded.mini_batch.position + 1
                    where.is_folded = False
                    step = self._step(self._job, loaded, where.iteration)
                    try:
                        yield step
                    except GeneratorExit:
                        self._leave_step(step)
                        raise
                    self._end_step(step, loaded.mini_batch)
                    if recorder.stopped is not None or where.iteration == where.most_steps:
                        break
                    loaded = self._ahead.take()
            self._end_epoch(loaded)
        finally:
            if self._begun:
                self._leave(abandoned=True)
        if self.stopped is not None:
            self._leave()
            raise self.world.stops.ended()

    def _leave_step(self, step: Step) -> None:
        """The script leaves the loop in a step, by a break or an error."""
        if self.world.is_forked:
            return
        if step.passes and self._recorder.tracer is not None:
            self._recorder.tracer.end(step.iteration)
        self.world.explain = step.explainer()
        if step.leave(f"it left the loop in step {step.iteration}, by a break or an error that was caught"):
            self._job.checks.replicas.leave(step.iteration, folded=self._where.is_folded)

    def _end_step(self, step: Step, mini_batch: MiniBatch) -> None:
        """Require the fold, hand on the row, write a checkpoint where one is due. Every rank must call this."""
        where = self._where
        recorder = self._recorder
        if (step.is_open or step.passes == 0) and not step.is_broken:
            step.refuse_unfolded()
        if recorder.has_rows:
            recorder.end_row()
        if recorder.tracer is not None and step.passes:
            recorder.tracer.end(step.iteration)
        fold = self._job.fold
        decision = fold.current.decision
        stops = decision is not None and decision.stop
        saves = decision is not None and decision.save
        ends = step.iteration == where.most_steps or (step.is_last_of_epoch and where.ends_all(mini_batch))
        if stops or ends:
            fold.check_pending()
            step.leave(f"it ended the loop after step {step.iteration}")  # finds a peer that left it before
            self._job.checks.replicas.end(step.iteration)
        if stops or recorder.checkpointer is not None:
            recorder.end_step(stops=stops, ends=ends, saves=saves, is_last_of_epoch=step.is_last_of_epoch)
        shares = self._job.checks.shares
        if shares.found is not None or shares.used != shares.division.shares:
            if shares.found is not None and not (stops or ends):
                step.meet()
            self._job.use_shares()
        self.world.stage = "data"
        self.world.step = where.iteration + 1

    def _end_epoch(self, loaded: LoadedBatch | None) -> None:
        """Check the values that a GPU has yet to give, and after the last step the state. Every rank must call this.

        Args:
            loaded: the last mini-batch; None if the data of the epoch have ended.
        """
        where = self._where
        checks = self._job.checks
        self.world.step = where.iteration
        checks.guard.check_pending()
        checks.replicas.check_pending()
        if self.stopped is None and (loaded is None or where.is_last_of_epoch(loaded.mini_batch)):
            where.end_epoch()
        if self._is_over:
            checks.state.finish(where.iteration)
        self._begun = None
        self.world.stage = ""

    @property
    def _is_over(self) -> bool:
        return self._where.is_done or self._recorder.stopped is not None

    # -- its position --------------------------------------------------------------------------------------

    @property
    def skipped(self) -> int:
        """The number of steps skipped so far, since their loss or gradients were not finite; waits for a GPU."""
        return self._job.checks.guard.skipped

    def state_dict(self) -> dict[str, int]:
        """The position, to resume from on any number of ranks; a step counts from its fold on. No part of `state`."""
        return self._where.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume at the position of another loop over the same batches. Every rank must call this.

        With the same number of shards the next steps are the other loop's, to the bit.

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
        self._take_loop(self._where.loop)

    def close(self) -> None:
        """Hand on the last rows, close the run's files and remove all hooks from the model."""
        self._release()
        self._recorder.close()

    def _give_up(self) -> None:
        """End, as a newer Loop wants the run folder, unless this one is being iterated."""
        if not self._is_iterated:
            self._begun = "when a newer Loop took over its run folder"
            self._leave()

    def _leave(self, *, abandoned: bool = False) -> None:
        if self.world.is_forked:
            return
        self.close()
        self._recorder.end(later=abandoned)
        self.world.forget(self._leave)  # so that the loop can be freed, with model, optimizer and data
