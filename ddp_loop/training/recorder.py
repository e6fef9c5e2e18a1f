"""The records of a loop: rows, values that the script logs beside them, a trace, checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_loop.accelerators import is_asynchronous
from ddp_loop.checkpoint import (
    REPAIR,
    STATUS,
    Checkpointer,
    Config,
    Snapshot,
    explained,
    is_running,
    read_json,
    warm_start,
    words_to_go_on,
)
from ddp_loop.data import Batches, LoopPosition, MiniBatch
from ddp_loop.distributed import World, end_unsaved, format_error
from ddp_loop.reporting import (
    NORM,
    RATE,
    UNUSED,
    UNUSED_AT_LEAST,
    Labels,
    LoggedValues,
    Receivers,
    Reporter,
    all_of,
    as_logged,
    as_pixels,
    make_table,
    pass_weights,
    sums_in,
    without_sinks,
    write_table,
)
from ddp_loop.tracing import TRACE as FOLDER
from ddp_loop.tracing import Tracer, TraceRequest
from ddp_loop.training.rows import StepResult
from ddp_loop.training.validation import parts_of

RESERVED = frozenset({"epoch", "iteration", "samples", "weight", "skipped", "elapsed_s"})  # a line's own columns
_MOST_LETTERS = 100


def _nothing() -> None:
    """Nothing waits for the world's end."""


def open_trace(
    run: Path | None,
    batches: Batches,
    state: Mapping[str, object],
    watch: TraceRequest | None,
    *,
    trace: bool,
    ordered: bool,
) -> Tracer | None:
    """The trace that the user or a trace request asks for; None without one.

    Raises:
        ValueError: there is no folder for it.
    """
    if trace and run is None:
        raise ValueError("A trace is written into the run folder. Got trace=True without one. Pass run_dir=.")
    if watch is not None and watch.profile is None:
        watch.loops += 1
        folder = watch.folder / f"loop-{watch.loops:03}"
    elif watch is None and trace and run is not None:
        folder = run / FOLDER
    else:
        return None
    return Tracer(folder, batches, state, ordered=ordered, request=watch)


def check_name(name: object, *, is_column: bool = False) -> str:
    """Return the name of something that is logged.

    Args:
        name: of the number, the text or the image.
        is_column: it names a value of a line of `logged.jsonl`, which has columns of its own.

    Raises:
        ValueError: it is no name, or such a column has it.
    """
    if not (isinstance(name, str) and 0 < len(name) <= _MOST_LETTERS and name.isprintable()):
        what = f"{name!r:.60}" if isinstance(name, str) else type(name).__name__
        raise ValueError(f"The name of what is logged has 1 to {_MOST_LETTERS} printable letters. Got {what}.")
    if is_column and name in RESERVED:
        raise ValueError(
            f"loop.log cannot take the name {name!r}. {', '.join(sorted(RESERVED))} are columns of each line of "
            "logged.jsonl. Take another name."
        )
    return name


def _parts_within(state: Mapping[str, object]) -> list[object]:
    """The parts of a state, and the values in each: a part may be a dict, or an object of the script's own."""
    values = [part if isinstance(part, Mapping) else getattr(part, "__dict__", {}) for part in state.values()]
    return [*state.values(), *chain.from_iterable(one.values() for one in values)]


def _without_module(state: Mapping[str, object]) -> str | None:
    """The name of an optimizer that trains a parameter which no other part of the state is or has."""
    parts = _parts_within(state)
    saved = {part for part in parts if isinstance(part, torch.Tensor)}
    saved.update(*(part.parameters() for part in parts if isinstance(part, nn.Module)))
    for name, part in state.items():
        if isinstance(part, Optimizer) and any(not saved.issuperset(group["params"]) for group in part.param_groups):
            return name
    return None


def _without_schedule(state: Mapping[str, object]) -> str | None:
    """The name of an optimizer that one of torch's schedulers drives, where no part of the state is or has it."""
    driven = [getattr(part, "optimizer", None) for part in _parts_within(state) if isinstance(part, LRScheduler)]
    if None in driven:  # a scheduler of the script's own, which may drive any
        return None
    for name, part in state.items():
        is_driven = isinstance(part, Optimizer) and getattr(part.step, "_wrapped_by_lr_sched", False)  # set by torch
        if is_driven and all(part is not one for one in driven):
            return name
    return None


class RunRecorder:
    """Writes a loop's rows, its logged values, its trace and its checkpoints.

    A logged value belongs to the current step, after the loop to its last one. It goes to the run folder, the
    terminal, the page, the pictures and the sinks of `on_row`; without any of them it goes nowhere.

    Args:
        world: from `join_world`.
        where: the loop's position.
        checkpointer: of the run folder; None without one.
        state: of the job.

    Attributes:
        tracer: of the trace; None without one.
        stopped: why the loop stopped on request.
        holds: whether the script may do something between two epochs, which a stop can cut off.
        has_rows: whether rows are made.
    """

    def __init__(
        self, world: World, where: LoopPosition, checkpointer: Checkpointer | None, state: Mapping[str, object]
    ) -> None:
        self._world = world
        self._where = where
        self.checkpointer = checkpointer
        self._report = Reporter(world, where, checkpointer)
        self._optimizer = next(iter(parts_of(state, Optimizer)), None)
        self._extent: dict[str, object] = {}  # in status.json
        self._row: tuple[MiniBatch, tuple[str, ...], torch.Tensor, dict[str, float]] | None = None
        self.tracer: Tracer | None = None
        self.stopped: str | None = None
        self.holds = True
        self.has_rows = False
        self._saved = -1  # the iteration of the last checkpoint
        self._held: Snapshot | None = None  # a copy of the last step's state, which could become one
        self._ending: Callable[[], None] = _nothing  # called when the world is left

    @property
    def on_evaluated(self) -> Callable[[Mapping[str, float]], None]:
        """Records an evaluation of this loop."""
        return self._report.on_evaluated

    @property
    def advice(self) -> Callable[..., str] | None:
        """On how to go on with this loop's run; see `World.in_loop`."""
        return None if self.checkpointer is None else self.checkpointer.advice

    def open(
        self,
        batches: Batches,
        state: Mapping[str, object],
        source: str | Path | None,
        resume: bool | None,
        config: Config | None,
    ) -> dict[str, int] | None:
        """Take the run folder, and restore the newest checkpoint's state. Every rank must call this.

        Args:
            batches, state: of the loop; of its job.
            source: another run, with whose weights this one begins unless it resumes.
            resume, config: as `Checkpointer.open`.

        Returns:
            The position to resume from; None for a new run.
        """
        checkpointer = self.checkpointer
        folder = None if checkpointer is None else checkpointer.folder
        origin = None if source is None else warm_start(source, self._world, state, folder, resume=resume)
        if checkpointer is None:
            return None
        self._extent |= self._where.extent
        if batches.shares is not None:
            self._extent["shares"] = list(batches.shares)
        if origin is not None:
            self._extent["resumed_from"] = origin
        sums = sums_in(read_json(checkpointer.folder / STATUS))
        there = checkpointer.open(batches.facts, resume, self._extent, config, self._where.has_no_step_left_at)
        self._report.open_console(checkpointer.folder)
        if there is not None and sums:
            self._add_sums(sums, there["iteration"])
        others = [part for part in state.values() if not isinstance(part, nn.Module | LRScheduler)]
        if not any(hasattr(part, "step") for part in others):  # an optimizer, torch's or another one
            checkpointer.say(
                "state has no optimizer, so checkpoints keep none and a resumed run begins with a new one. Pass "
                "state=dict(model=model, optimizer=optimizer)."
            )
        if (name := _without_module(state)) is not None:
            checkpointer.say(
                f"{name!r} trains parameters that no module in state has. Checkpoints do not keep them, so a resumed "
                "run would begin with new ones. Pass their module too: state=dict(..., model=model)."
            )
        if there is not None:
            self._saved = there["iteration"]
            begun = there["epoch"] + bool(there["position"])
            for name, made in (("steps", there["iteration"]), ("epochs", begun)):  # perhaps more than is asked for now
                if (asked := self._where.extent[name]) is not None:
                    self._extent[name] = max(asked, made)
        return there

    def say_schedule_is_missing(self, state: Mapping[str, object]) -> None:
        """Say before the first step which scheduler checkpoints would not have; a script may make it after the loop."""
        if self.checkpointer is None or (name := _without_schedule(state)) is None:
            return
        self.checkpointer.say(
            f"The scheduler of {name!r} is not in state, so a resumed run would start it again. Make it before the "
            "Loop and pass state=dict(..., schedule=schedule)."
        )

    def record_shares(self, shares: Sequence[float]) -> None:
        """Write the ranks' shares into status.json."""
        if self.checkpointer is not None:
            self._extent["shares"] = list(shares)
            self.checkpointer.write_status("running", iteration=self._where.iteration)

    def open_rows(
        self,
        receivers: Receivers,
        config: Config | None,
        *,
        progress: bool,
        monitor: bool,
        watched: TraceRequest | None,
    ) -> None:
        """Start to take and show rows, appended to those already in the file. Every rank must call this.

        Args:
            receivers: of the rows.
            config: the script's hyper-parameters, flat.
            progress, monitor: whether the terminal and a page show the run.
            watched: a trace request, under which there are no sinks and no page; None without one.

        Raises:
            ImportError, OSError, TypeError, ValueError: on rank 0, where a file cannot be written, a receiver not be
                called, or no page be shown.
            PeerFailed: then on the others.
        """
        where = self._where
        checkpointer = self.checkpointer
        if checkpointer is not None and where.iteration:  # it resumes
            if where.has_no_step_left:
                bound = "steps" if where.has_made_all else "epochs"
                made = f"the {where.iteration} steps of {bound}={where.extent[bound]}"
                if where.length is not None and where.iteration > where.length:
                    made = f"{where.iteration} steps, and {bound}={where.extent[bound]} asks for {where.length}"
                checkpointer.say(
                    f"{checkpointer.folder} is finished: it has made {made}. Raise {bound}= to train further, or pass "
                    "resume=False to start over (its files move to before/)."
                )
            elif progress:
                checkpointer.say(f"{checkpointer.folder} resumes after step {where.iteration}")

        def begin() -> str | None:
            opened = all_of(receivers)
            if watched is not None:
                opened = without_sinks(opened)
            elif monitor:
                if checkpointer is None:
                    raise ValueError("A page shows a run folder. Got monitor=True without one. Pass run_dir=.")
                from ddp_loop.monitor import start_page  # 20 ms that others need not spend

                start_page(checkpointer.folder, self._world.print)
            return self._report.begin(opened, config or {}, progress=progress)

        key = self._world.on_rank_zero(begin)
        self._report.open(key)
        self.has_rows = key is not None

    # -- a step --------------------------------------------------------------------------------------------

    def flush_ready(self) -> None:
        """Hand on the rows that have arrived, while the ranks wait for each other."""
        rows = self._report.rows
        if rows is not None and rows.is_due:
            with self._world.in_stage("rows"):
                rows.flush_ready()

    def begin_row(
        self,
        mini_batch: MiniBatch,
        result: StepResult,
        batches: Batches,
        gradient_norm: Callable[[int], torch.Tensor | None],
        *,
        waited_s: float,
        skips: bool,
    ) -> None:
        """Begin the row of a step whose first pass was folded.

        Args:
            mini_batch, result, batches: of the step, and of the loop.
            gradient_norm: called with the iteration, `Fold.gradient_norm`.
            waited_s: for how long this rank has waited for others in all folds.
            skips: whether steps that are not finite are skipped.
        """
        if not self._report.record_wait(waited_s):
            return
        names = ["loss", *result.names]
        values = [result.values]
        if result.total is not None:
            names.insert(0, "weight")
            values.insert(0, result.total.reshape(1))
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        beside = {f"{RATE}_{n}" if n else RATE: group["lr"] for n, group in enumerate(groups) if "lr" in group}
        if (norm := gradient_norm(self._where.iteration)) is not None:
            beside[NORM] = norm
        if skips:
            beside["skipped"] = result.is_bad
        known: dict[str, float] = {}
        for name, value in beside.items():
            if isinstance(value, torch.Tensor) and is_asynchronous(value):  # reading it would hold up the host
                names.append(name)
                values.append(value.to(result.values).reshape(1))
            else:
                known[name] = float(value)
        if mini_batch.is_last and batches.partition != "global" and (unused := batches.unused) is not None:
            known[UNUSED if unused.is_exact else UNUSED_AT_LEAST] = unused.samples
        if not result.summed <= self._report.epoch.sums:
            self._add_sums(result.summed, self._where.iteration)
        # A copy: a script may add to the loss that it got, `total += step.fold().loss`.
        self._row = mini_batch, tuple(names), torch.cat(values), known

    def extend_row(self, result: StepResult, number: int) -> None:
        """Add the loss and the metrics of the step's pass `number`, counted from 1: as `loss_2` if `loss` is there.

        If this pass or an earlier one has a weight, this pass's total comes first, as `loss_2_weight`.
        """
        if self._row is None:
            return
        mini_batch, names, values, known = self._row
        own = ("loss", *result.names)
        new = [f"{name}_{number}" if name in names else name for name in own]
        sums = {one for one, name in zip(new, own, strict=True) if name in result.summed}
        if not sums <= self._report.epoch.sums:
            self._add_sums(sums, self._where.iteration)
        parts = [values, result.values]
        if result.total is not None or "weight" in names or pass_weights(names):
            new.insert(0, f"{new[0]}_weight")
            parts.insert(1, result.weight.reshape(1))
        self._row = mini_batch, (*names, *new), torch.cat(parts), known

    def _add_sums(self, names: Collection[str], iteration: int) -> None:
        """Say in status.json, before rows have them, which columns are sums."""
        sums = self._report.epoch.sums
        sums.update(names)
        if self.checkpointer is not None:
            self._extent["sums"] = sorted(sums)
            self.checkpointer.write_status("running", iteration=iteration)

    def end_row(self) -> None:
        """Hand on the row of a step that is over."""
        if self._row is not None:
            row = self._row
            self._row = None
            with self._world.in_stage("rows"):
                self._report.add(*row)

    def open_trace_files(self) -> None:
        """Open the files of the trace, where there is one. Every rank must call this.

        Raises:
            OSError: one cannot be written.
            PeerFailed: then on the other ranks.
        """
        if self.tracer is not None:
            with self._world.failing_together(OSError):
                self.tracer.open(self._where.iteration)

    def end_step(self, *, stops: bool, ends: bool, saves: bool, is_last_of_epoch: bool) -> None:
        """Write a checkpoint where one is due, and stop where all ranks do. Every rank must call this.

        Args:
            stops, saves: all ranks' decisions in the step's fold.
            ends: whether the loop ends with the step.
            is_last_of_epoch: whether its epoch does.
        """
        world = self._world
        position = self._where.state_dict()
        if (checkpointer := self.checkpointer) is not None:
            if self._held is not None:  # of an earlier step
                checkpointer.drop(self._held)
                self._held = None
            iteration = position["iteration"]
            if stops or ends or saves or checkpointer.is_due_after(iteration, is_last_of_epoch=is_last_of_epoch):
                if iteration != self._saved:
                    world.require_collectives_allowed()  # a word that was not read yet may end the step with an error
                    with world.in_stage("save"):
                        self._saved = iteration
                        self._flush_all()
                        checkpointer.save(position)
            elif is_last_of_epoch and self.holds:
                world.require_collectives_allowed()
                # A resumed run repeats the script's lines before the next step.
                with world.in_stage("save"):
                    self._held = checkpointer.hold(position)
            if stops or ends:
                with world.in_stage("save"):
                    checkpointer.finish()
        if stops:
            self.stopped = world.stops.follow(self)

    def save(self, score: float | None) -> None:
        """Ask for a checkpoint after the current step, or of the epoch's end. Every rank must call this."""
        checkpointer = self.checkpointer
        if checkpointer is None:
            return
        # Inside of a step the ranks are at different places, so they compare it before the next collective.
        self._world.defer(partial(self._world.require_equal, "score of loop.save", repr(score)))
        if self._holds_last_step:
            self._save_held(score)
        elif self._saved != self._where.iteration:
            checkpointer.asked = True
            if score is not None:
                checkpointer.score = score
        elif score is not None:
            checkpointer.give_score(score, is_last=self._where.is_done)

    @property
    def _holds_last_step(self) -> bool:
        return self._held is not None and self._held.position["iteration"] == self._where.iteration

    def _save_held(self, score: float | None = None) -> None:
        held = self._held
        self._held = None
        if self.checkpointer is not None and held is not None:
            self._saved = self._where.iteration
            self._flush_all()
            self.checkpointer.save_held(held, score)

    def _flush_all(self) -> None:
        self.end_row()
        if self._report.rows is not None:
            with self._world.in_stage("rows"):
                self._report.rows.flush_all()

    # -- logging by the script: methods of `Loop` ------------------------------------------------------------

    def log(
        self, values: Mapping[str, Any] | None = None, /, *, over: Literal["ranks"] | None = None, **more: Any
    ) -> None:
        """Log numbers of the current step, such as a validation score or a second loss.

            loop.log(f1=score)
            loop.log({"generator/loss": loss}, over="ranks")

        A later value of the same name and step replaces an earlier one. Values on a GPU are not waited for. Without
        `over` every rank may call this, and rank 0's values count.

        Args:
            values: by name, for names that are no Python names; numbers, or tensors and arrays of one element.
            over: "ranks" logs the mean over all ranks, (1/N) sum_r(value_r). Every rank must call this then.
            more: further values by name.

        Raises:
            ValueError: a name or a value of another kind, or names that differ between ranks; nothing is logged.
            PeerFailed: over ranks, another rank has such a problem.
        """
        if values is not None:
            if not isinstance(values, Mapping):
                raise ValueError(
                    f"loop.log takes values by name. Got {type(values).__name__} without one. Call "
                    "loop.log(name=value), or loop.log({name: value})."
                )
            more = {**values, **more}
        world = self._world
        if over is None and world.rank != 0:
            return
        with nullcontext() if over is None else world.failing_together(ValueError):
            if over not in (None, "ranks"):
                raise ValueError(f'over must be "ranks", or None for the value of rank 0. Got {over!r}.')
            logged = {check_name(name, is_column=True): as_logged(name, value) for name, value in more.items()}
        if over is not None:
            world.require_equal("the names in loop.log(over=...)", list(logged))
            numbers = [value if isinstance(value, float) else value.wait().item() for value in logged.values()]
            total = world.sum(torch.tensor(numbers, dtype=torch.float64)) / world.size
            logged = dict(zip(logged, total.tolist(), strict=True))
        if (target := self._target()) is not None and logged:
            target.add(self._where.epoch, self._where.iteration, logged)
            if self._report.rows is None:  # after the loop nothing hands it on
                target.flush_all()

    def _target(self) -> LoggedValues | None:
        """The taker of logged values, on rank 0; None after the loop if another process runs in the folder."""
        target = self._report.logged
        has_ended = target is not None and self._ending is not _nothing
        if has_ended and self.checkpointer is not None and is_running(self.checkpointer.folder):
            return None
        return target

    def log_text(self, name: str, text: str) -> None:
        """Log a text of the current step, such as a generated sentence. Every rank may call this, rank 0's counts.

        Args:
            name: 1 to 100 printable letters.
            text: cut after 65,536 letters, with a warning.

        Raises:
            ValueError: another name, or no text; nothing is logged.
        """
        check_name(name)
        if not isinstance(text, str):
            raise ValueError(f"loop.log_text takes a text. Got {type(text).__name__} for {name!r}. Pass str(...).")
        if (target := self._target()) is not None:
            target.add_text(self._where.epoch, self._where.iteration, name, text)

    def log_image(self, name: str, image: Any) -> None:
        """Log an image of the current step, as a PNG. Every rank may call this, rank 0's counts.

        Args:
            name: 1 to 100 printable letters.
            image: a tensor, an array or a picture of Pillow, of shape (height, width), (height, width, 1, 3 or 4) or
                (1 or 3, height, width): whole numbers of 0 .. 255, or fractions of 0 .. 1.

        Raises:
            ValueError: another name or shape; nothing is logged.
        """
        check_name(name)
        if (target := self._target()) is not None:
            target.add_image(self._where.epoch, self._where.iteration, name, as_pixels(name, image))

    def log_table(self, name: str, values: Any, rows: Labels = None, columns: Labels = None) -> None:
        """Write a table of numbers to tables/NAME.json of the run folder, if there is one. Every rank may call this.

        Args:
            name: a plain word, such as "confusion"; a later table of the same name replaces it.
            values: shape (rows, columns): nested sequences, an array or a tensor.
            rows, columns: a label for each; by default they are numbered from 0.

        Raises:
            ValueError: another name, other values, or other numbers of labels; nothing is written.
        """
        table = make_table(name, values, rows, columns, self._where.iteration)
        if (target := self._target()) is None:
            return
        if (checkpointer := self.checkpointer) is not None:
            try:
                with explained(f"The table {name} in {checkpointer.folder} cannot be written"):
                    write_table(checkpointer.folder, table)
            except OSError as error:
                if not checkpointer.continues:
                    raise
                checkpointer.say(f"{format_error(error)} Training continues.")
        target.add_table(table)

    # -- a stop that is not decided in a fold of this loop: `Stoppable` ----------------------------------------

    def asked_to_stop(self) -> str | None:
        """Why a file in the run folder asks for a stop; None without one."""
        return None if self.checkpointer is None else self.checkpointer.asked_to_stop()

    def is_inside_step(self) -> bool:
        """Whether a resumed run would not repeat the script's work now: it has no checkpoint of this moment."""
        return self.checkpointer is not None and self._where.iteration != self._saved and not self._holds_last_step

    def stop_here(self, why: str) -> None:
        """Save where a resumed run can begin, and make no further step. Every rank must call this."""
        self.stopped = why
        if self.checkpointer is not None:
            if self._holds_last_step:
                self._save_held()
            self.checkpointer.finish()

    # -- the end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Hand on the last rows, close the files, restore the signal handlers."""
        self._world.stops.restore_handlers(self)
        tracer = self.tracer
        self.tracer = None
        with ExitStack() as ending:  # each one even if the other raises
            if tracer is not None:
                ending.callback(tracer.close)
            ending.callback(self._report.close, self._last_words())
            self.end_row()

    def end(self, *, later: bool = False) -> None:
        """Write how the run ended, and release its folder; if `later`, when the world is left, which gives the reason.

        A newer Loop in the folder does not wait for that. The waiting call keeps neither the state nor a copy alive.
        """
        world = self._world
        where = self._where
        checkpointer = self.checkpointer
        report = self._report
        stopped = self.stopped

        def ending() -> None:
            world.forget(ending)
            if checkpointer is not None:
                status = "stopped" if stopped is not None else "done" if where.is_done else "left"
                checkpointer.end(status, world.ended_by, where.state_dict()["iteration"], stopped)
            report.end()
            if checkpointer is None or not checkpointer.continues or world.ended_by is not None:
                return
            missing = [f"{report.lost_rows} of the rows"] if report.lost_rows else []
            missing += checkpointer.missing.values()
            if missing:
                kept = f"its checkpoint {checkpointer.newest}" if checkpointer.newest else "no checkpoint of this start"
                end_unsaved(
                    f"ddp_loop: {checkpointer.folder} was not saved whole. It lacks {', '.join(missing)}, "
                    f"and has {kept}. {REPAIR} Then start the script again."
                )

        world.forget(self._ending)
        self._ending = ending
        if later and checkpointer is not None:
            checkpointer.release_state()
            world.on_leaving(ending)
            checkpointer.give_up = ending
        else:
            self._held = None
            ending()

    def _last_words(self) -> str | None:
        """The terminal's line about a loop that stopped on request."""
        if self.stopped is None:
            return None
        newest = "" if self.checkpointer is None else self.checkpointer.newest
        kept = f"checkpoint {newest}" if newest else "no checkpoint"
        words = f"stopped after step {self._where.iteration}, {kept}: {self.stopped}"
        has_command = not sys.is_finalizing()  # Python drops sys.argv at its end
        return f"{words}\n{words_to_go_on()}" if newest and has_command else words
