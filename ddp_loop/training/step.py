"""One step: this rank's shards of a mini-batch, a backward for each, and the fold that makes them one.

To be read from top to bottom: `Step`, which a script calls; `Fold`, one reduction over shards and ranks;
`ControlWord`, on whose sum all ranks decide in it; `Job`, which the steps of a loop share.

The control word is a few integers of each rank. On the CPU it rides in the sum of the gradients, and is read with it.
The extras of the last bucket are, in this order:

    has a problem | has something new | its stream ends | stop | save | batch | batch^2 | ran | modes | modes^2 |
    announced values | for each planned parameter whether it got a gradient | the rows of all shards

On a GPU the extras are the rows alone, and the word, without them, is a sum of its own.

[Note: Late words] On a GPU the word travels beside the gradients, over the CPU, and a host that read it in its own fold
would wait until every other host has come there. So before the backward of its last shard, a rank sends a flag: whether
all ranks must read the word of this pass in its fold. It is set where the rank has a problem, a request or something
that the layout has no room for, since then the update depends on it. Otherwise the word can only contain an error, and
is read before the next pass sends anything, or before any other collective. So the fold waits only for ranks whose last
backward has not begun, and a rank is never more than one fold ahead of another one. Three ranks read the word in the
fold without the others: one with an error, one whose stream ends, and one whose shards left a parameter without a
gradient, which does not know whether other ranks gave it one.

The first pass of a `Fold` has no flag: all ranks read its word in the fold, and before its sums they ask each other for
problems. So a rank that folds there meets one that gathers in the same collective. Passes after a hold, and with synced
batch norm, have none either, since their ranks wait for each other anyway.

No rank starts anything between a pass's word and its reading. So the ranks stay in one order of collectives, whichever
of them reads early.
"""

from __future__ import annotations

import math
import reprlib
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial, reduce
from itertools import chain, compress, repeat
from numbers import Real
from operator import attrgetter, is_, itemgetter, methodcaller, not_
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import Node
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ddp_loop.accelerators import is_asynchronous
from ddp_loop.batch_norm import (
    ENDS_LOOP,
    BatchNormStatistics,
    CallMismatch,
    RunningStatsSnapshot,
    batch_norm_layers,
    custom_norms,
    find_sync_channels,
    is_synced,
    other_norm_layers,
)
from ddp_loop.data import (
    Announcement,
    Batches,
    LoadedBatch,
    LoopPosition,
    MiniBatch,
    ReadAhead,
    Shard,
    check_end,
    check_first,
)
from ddp_loop.determinism import Leaf, restore_streams, same_bits, seed_shard, seed_step, streams
from ddp_loop.distributed import (
    IDENTITY,
    PeerFailed,
    Work,
    World,
    check_layout,
    check_structure,
    each_module,
    find_modules,
    find_parameters,
    find_tensors,
    listed,
    version_of,
)
from ddp_loop.training.buckets import Bucketing, bucket_sizes
from ddp_loop.training.buffers import BufferReduction, Buffers, find_buffers
from ddp_loop.training.checks import NEVER, NonFiniteGuard, StepChecks
from ddp_loop.training.gather import BatchGather, GatherAgreement
from ddp_loop.training.gradients import Gradients
from ddp_loop.training.ordered_sum import rank_order, tree_order
from ddp_loop.training.recorder import RunRecorder
from ddp_loop.training.rows import (
    Modes,
    RowLayout,
    Rows,
    ShardRecord,
    StepResult,
    agreed,
    layout_of,
    now_evaluated,
    require_alike,
    use_moments,
)
from ddp_loop.training.validation import (
    MEAN,
    REFUSED_NAMES,
    Reduction,
    Sum,
    Value,
    Weight,
    bad_loss,
    check_mean,
    check_synced,
    check_tables,
    check_trainable,
    check_weight,
    enabled_scalers,
    explain,
    find_scale,
    parts_of,
    refuse_added_mean,
    refuse_other_means,
    refuse_wrapped,
    reserved_names,
    warn,
)

SendNothing = Callable[[int | None, AbstractContextManager[object]], None]  # see `Gradients.leaving`
PROBLEM = 0  # its position in the word
CONTROL_LENGTH = 10  # without announced values and parameters
EVALUATED = (
    "Steps should train a model in training mode. From step {step} on {names} is in evaluation mode, after steps in "
    "training mode: dropout is off, and batch norm uses its running statistics. Call train() after an evaluation."
)
_OPEN = (
    "Between a step's first shard and its fold the ranks are not at the same place. Run this collective after "
    "step.fold()."
)
_VALUES = methodcaller("values")  # a scripted module's tables are no dicts
_PARAMS = itemgetter("params")
_DONE = attrgetter("done")
_TRAINING = attrgetter("training")
_REQUIRES_GRAD = attrgetter("requires_grad")
_NUMBER = attrgetter("number")
_AFTER_GATHER = -1  # in place of a shard's number
_SHARD_NUMBER = attrgetter("shard.number")
_CAPTURES = attrgetter("captures")


class _LeftLoop(RuntimeError):
    """This rank makes no further step."""


def _misplaced(record: ShardRecord | None) -> RuntimeError:
    """The error of a backward outside of a shard, or after its last one, or after one that raised."""
    if record is not None and record.failed and not record.done:
        return RuntimeError(
            f"A shard's backward cannot be repeated. That of shard {record.shard.number} raised, and may have left "
            "parts of its gradients. Leave the loop, or use smaller shards."
        )
    if record is None:
        why = "outside of `for ... in step`, or again after step.gather. Add the loss to one that it is called with"
    elif record.held:
        why = "after step.hold, which takes its place. Call it once after step.gather, or leave step.hold out"
    else:
        why = "a second time. Pass more_losses=True in the first call"
    return RuntimeError(f"step.backward must be called once for each shard. It was called {why}.")


@dataclass(eq=False, repr=False)
class Epoch:
    """An epoch of a `Loop`, iterated once and to its end for its steps; made by `Loop.epochs`.

    Attributes:
        number: counted from 1, also in a run that resumes.
    """

    number: int
    _steps: Callable[[int], Iterator[Step]]
    _batches: Batches

    def __len__(self) -> int:
        """The number of steps of the whole epoch, even the steps before a resume; as `len(batches)`.

        Raises:
            TypeError: it is unknown, as for a stream.
        """
        return len(self._batches)

    def __iter__(self) -> Iterator[Step]:
        """Its remaining steps. Every rank must call this.

        Raises:
            RuntimeError: it is not the current epoch, or was left.
            Stopped: the ranks were asked to stop. It ends the script after a checkpoint.
        """
        return self._steps(self.number)


class Step:
    """One step of a `Loop`: iterate over it for this rank's shards, call `backward` for each, then `fold`.

    Iterating again after `fold` is another pass over the same shards, for a closure or a second network. A graph may
    cross a fold, as in DCGAN: one forward of the generator serves the passes of both networks.

    Attributes:
        epoch, iteration: counted from 1; the iteration counts on from epoch to epoch.
        samples: R, of the mini-batch over all ranks.
        is_last_of_epoch: whether it is the epoch's last.
        passes: the number of folded passes.
        is_open: whether a pass of this step is between its first shard and its fold.
        is_broken: whether a fold raised, so that the ranks may be at different places.
    """

    def __init__(self, job: Job, loaded: LoadedBatch, iteration: int) -> None:
        mini_batch = loaded.mini_batch
        self.epoch = mini_batch.epoch
        self.iteration = iteration
        self.samples = mini_batch.samples
        self.is_last_of_epoch = mini_batch.is_last or mini_batch.ends_stream
        self._job = job
        self._loaded = loaded
        self._gather = BatchGather(job.world, job.gathering)  # of the next pass, or the one that is open
        self._record: ShardRecord | None = None  # of the shard at hand
        self.passes = 0
        self.is_open = False
        self.is_broken = False
        self._shards_read = 0  # of a pass
        self._is_read = False  # whether all of them are
        self._has_begun = False  # whether a backward or a hold came

    def __iter__(self) -> Iterator[Any]:
        if self.is_open:
            raise RuntimeError(
                f"Each pass over the shards must end with fold(). Step {self.iteration} was iterated again before it. "
                "Call step.fold() first."
            )
        self._begin()
        fold = self._job.fold
        world = self._job.world
        tracer = self._job.recorder.tracer
        mini_batch = self._loaded.mini_batch
        for number, shard in enumerate(mini_batch.shards or ((None,) if fold.sync_channels else ())):
            world.stage = "data"
            if shard is None:
                data = self._loaded.nothing()
            else:
                data = self._loaded.data(number)
                self._shards_read = number + 1
                if tracer is not None:
                    tracer.data(shard.number, data)
                seed_shard(self._job.seed, self.iteration, shard.number, world.device, self.passes)
            record = self._record = fold.begin_shard(shard)
            world.stage = "forward"
            try:
                yield data
            finally:
                self._record = None
                fold.end_shard(record)
        self._is_read = True
        shares = self._job.checks.shares
        if shares.due != NEVER and self.passes == 0:
            shares.end_shards(mini_batch)

    def _begin(self) -> None:
        """Begin a pass, with a new fold if modules or parameters were replaced. Every rank must call this."""
        job = self._job
        mini_batch = self._loaded.mini_batch
        if (new := job.structure.changes()) is not None:
            job.replace(new)
        fold = job.fold
        fold.modules = job.structure.modules
        for buffer in job.structure.late.values():
            buffer.note()  # the script's changes since the last fold are no forward's
        job.announces = mini_batch.announcement is not None and mini_batch.announcement.is_new
        job.passes = self.passes
        if fold.current.opened_by not in (None, self):
            raise RuntimeError(
                f"Only the newest step of a loop can be iterated and folded. Step {self.iteration} is over, and a pass "
                "of another one is open. Use the step that the loop gave last."
            )
        torch.clear_autocast_cache()  # a forward of the script's between fold and update kept the weights before it
        had_gradients = fold.current.had_gradients
        try:
            fold.open(self, gathers=job.gathering.is_used)
        finally:
            self.is_open = fold.current.opened_by is self
        if job.recorder.tracer is not None:
            job.recorder.tracer.begin(mini_batch, self.passes)
        for check in job.checks.each if self.passes == 0 else ():
            if self.iteration >= check.due:
                check.before(self.iteration, had_gradients=had_gradients)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        weight: Weight | None = None,
        reduction: Reduction = "mean",
        more_losses: bool = False,
        **metrics: Value,
    ) -> None:
        """Backpropagate the current shard's loss by its share of the mini-batch; after `gather`, the loss of all.

        A mean loss gives the mini-batch's gradient sum_s(w_s g_s) / sum_s(w_s), with shard s's gradient g_s. Its loss
        is scaled by w_s / R before backward, R the mini-batch's samples: exactly 1 for one shard. A sum gives
        sum_s(g_s), as in torch. If each sample came twice, a mean would stay the same and a sum would double.

        Args:
            loss: shape (); of the current shard.
            weight: w_s, the number of terms in the mean: by default the shard's samples; for instance its tokens. A
                mean of weight 0 adds exactly 0, for any loss. With a sum it weights the metrics alone.
            reduction: "mean", or "sum" for a loss that is a sum over the shard.
            more_losses: whether another `backward` of the same shard follows; the losses add up.
            metrics: by name, each one value, the shard's mean, or one per sample, shape (n,), which are averaged. Over
                the shards they are weighted like a mean loss: with your own weight pass the shard's weighted mean. A
                `Sum` is added up instead.

        Raises:
            RuntimeError: outside of a shard, or after its last backward.
            ValueError: a loss that is no scalar or needs no gradient; torch's sum, a count, class weights or ignored
                labels in a mean over samples; torch's mean in a sum; a bad weight or metric; further losses unlike it.
        """
        job = self._job
        record = self._record
        job.world.stage = "backward"
        self._has_begun = True
        is_whole = record is None and self._gather.whole is not None
        if (record is None or record.done or record.failed or record.held) and not is_whole:
            raise _misplaced(record)
        if not (isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.requires_grad):
            raise bad_loss(loss)
        if record is None:
            self._backward_whole(loss, metrics, plain=weight is None and reduction == "mean" and not more_losses)
            return
        if not (mini_batch := self._loaded.mini_batch).shards:
            job.fold.backward_empty(record, loss, more=more_losses)
            return
        value, made_by = job.fold.unscaled(loss) if job.fold.scalers else (loss.detach().clone(), loss.grad_fn)
        reads = not job.fold.control.is_late
        alone = len(mini_batch.sizes) == 1
        size = _add_loss(record, value, weight, reduction, metrics, made_by, more=more_losses, reads=reads, alone=alone)
        if job.recorder.tracer is not None:
            values: dict[str, Leaf] = {"loss": record.losses[-1], "weight": float(size), **record.metrics}
            job.recorder.tracer.forward(record.shard.number, values, record.summed)
        last = not more_losses and record.shard is mini_batch.shards[-1]
        if reduction == "sum":
            factor: Weight = 1.0
        elif isinstance(size, torch.Tensor):
            factor = torch.where(size > 0, torch.ones_like(size) if alone else size / self.samples, 0.0)
        else:
            factor = 0.0 if size == 0 else 1.0 if alone else size / self.samples
        job.fold.backward(record, loss, factor, last=last, more=more_losses)

    def hold(self, *outputs: torch.Tensor) -> None:
        """Keep outputs of the current shard for a loss of the whole mini-batch, instead of `backward`.

            for images, labels in step:
                step.hold(model(images), labels)
            embeddings, labels = step.gather()  # of the whole mini-batch, on every rank
            step.backward(contrastive(embeddings, labels))
            result = step.fold()

        Args:
            outputs: each with a row per sample, (n, ...); their graphs are kept until the backward.

        Raises:
            RuntimeError: outside of a shard, or after its `hold` or `backward`.
            ValueError: an output without one row per sample.
        """
        record = self._record
        if record is None or record.done or record.losses or record.held:
            raise RuntimeError(
                "step.hold must be called once for each shard, instead of step.backward. This call "
                + ("is outside of `for ... in step`." if record is None else "comes after another one.")
            )
        self._has_begun = True
        self._gather.hold(record.shard, outputs)
        record.held = True
        record.modes = self._job.fold.modes()
        if (tracer := self._job.recorder.tracer) is not None:
            tracer.forward(record.shard.number, {f"output {n}": output for n, output in enumerate(outputs)})

    def gather(self) -> Any:
        """The held outputs of all shards in the mini-batch's order, on every rank. Every rank must call this.

        A loss computed from them alone is the same on every rank; `backward` takes it as the loss of the whole
        mini-batch. Random numbers drawn after `gather` are the same on every rank.

        Returns:
            (R, ...) for each output of `hold`: a tensor, or a tuple of several.

        Raises:
            RuntimeError: a shard held nothing.
            ValueError: outputs that differ between shards in number, shape or dtype.
            PeerFailed: another rank has such a problem, or failed.
        """
        job = self._job
        world = job.world
        mini_batch = self._loaded.mini_batch
        if self._record is not None or self._gather.whole is not None or (mini_batch.shards and not self.is_open):
            raise RuntimeError(
                "step.gather must be called once, between the shards and the fold. Call it after `for ... in step`, "
                "not inside of it."
            )
        problem = None
        held = {outputs.shard.number for outputs in self._gather.held}
        if without := [shard.number for shard in mini_batch.shards if shard.number not in held]:
            problem = RuntimeError(
                f"step.gather needs held outputs of every shard. Step {self.iteration} has none of {without} of its "
                f"{len(mini_batch.sizes)} shards. Call step.hold for each, and step.backward only after step.gather."
            )
        if not self.is_open:
            self._begin()
        job.gathering.is_used = True  # of later passes: ranks with shards opened this one before
        with job.fold.between_shards():
            world.stage = "gather"
            whole = self._gather.gather(mini_batch, problem)
        seed_shard(job.seed, self.iteration, _AFTER_GATHER, world.device, self.passes)
        return whole if len(whole) > 1 else whole[0]

    def _backward_whole(self, loss: torch.Tensor, metrics: dict[str, Value], *, plain: bool) -> None:
        if not plain:
            raise ValueError(
                "The loss after step.gather is that of the whole mini-batch, passed once. It takes no weight, no "
                "reduction and no more_losses=. Put them into the loss itself."
            )
        if not REFUSED_NAMES.isdisjoint(metrics):
            raise reserved_names(metrics)
        fold = self._job.fold
        value, _ = fold.unscaled(loss)
        values = {name: as_metric(name, metric, self.samples, loss.device) for name, metric in metrics.items()}
        fold.backward_whole(loss, self._gather)
        fold.finish_held(value, values)

    def fold(self) -> StepResult:
        """Make `.grad`, statistics, buffers, loss and metrics the whole mini-batch's. Every rank must call this.

        A `.grad` that the script keeps stays as it is, as in a plain loop. The next pass overwrites views of it, so
        copy them:

            kept = [parameter.grad.flatten().clone() for parameter in model.parameters()]

        Returns:
            The step's result; its values are on the device and the same on every rank.

        Raises:
            RuntimeError: a shard had no backward, there was no pass over the shards since the last fold, or a
                parameter was written in between.
            ValueError: shards that differ in metrics, or in how they changed a buffer of the rule "same".
            FloatingPointError: the mini-batch's loss or a gradient is not finite; on every rank, on a GPU one step
                later.
            ReplicaMismatch: the ranks' parameters, buffers or optimizer states differ; on every rank, on a GPU one
                step later.
            PeerFailed: another rank has such a problem, or failed; on a GPU perhaps in this rank's next backward.
        """
        return self._fold_pass()

    def explainer(self) -> Callable[[BaseException], None]:
        """Adds the remedy to an error by which the script leaves this step; see `explain`."""
        guard = self._job.checks.guard
        taken_for_data = not self._has_begun and (self._is_read or self._shards_read != 1)
        skips = guard.skips and not guard.is_scaled
        return partial(explain, taken_for_data=taken_for_data, all_read=self._is_read, skips=skips)

    def leave(self, why: str) -> bool:
        """Schedule a message to the other ranks that this one has left the loop; True if it will be sent.

        Where all ranks leave together, nothing happens; those that fold instead raise PeerFailed. The message is
        deferred, since the loop may be left by an exception, which comes first.
        """
        world = self._job.world
        if self.is_broken or self._job.fold.control.has_raised or world.is_left:
            return False
        left = _LeftLoop(why)
        end = self._left_pass(left)
        where = world.stage, world.step

        def tell() -> None:
            before = world.stage, world.step
            world.stage, world.step = where  # the message names them
            world.blocked_because = None
            with suppress(_LeftLoop, PeerFailed):
                end()
            world.stage, world.step = before
            left.__traceback__ = None  # its frames keep the model, and `left` itself

        world.defer(tell)
        return True

    def meet(self) -> None:
        """Find a peer that left this step, before the next one has another fold. Every rank must call this, or `leave`.

        Raises:
            PeerFailed: another rank left the loop.
        """
        self._left_pass(None)()

    def _left_pass(self, why: Exception | None) -> Callable[[], None]:
        """Join the other ranks' collectives of a pass without shards, and report that this rank leaves.

        The returned function holds no reference to the step or the model.

        Raises:
            CallMismatch: all leave, and ran synced layers in different orders before.
            PeerFailed: another rank leaves.
        """
        fold = self._job.fold
        world = self._job.world
        gather = self._gather
        channels = fold.sync_channels
        send_nothing = fold.leaving(len(self._loaded.mini_batch.sizes), gathers=gather.agreement.is_used)

        def end() -> None:
            try:
                for channel in channels:
                    channel.send_control(ENDS_LOOP)
            except RuntimeError as error:
                raise error if why is None or isinstance(error, CallMismatch) else why from None  # the others know
            gather.send_no_gather(why)
            send_nothing()
            world.raise_if_any_failed(why)

        return end

    def refuse_unfolded(self) -> None:
        """Raise on every rank that this one has not folded the step. Every rank must call this or `fold`."""
        self._fold_pass(
            RuntimeError(
                f"Every step must end with step.fold(), before the next one begins. Step {self.iteration} was left "
                "without it. Call it after the shards, on every rank."
            )
        )

    def _incomplete(self, without: list[int]) -> Exception | None:
        """The error of a fold that comes too early, or of another one; None on a rank without shards.

        Args:
            without: the shards of an open pass without a last backward.
        """
        shards = self._loaded.mini_batch.shards
        if not self.is_open:
            if not shards and not self.passes:
                return None
            return RuntimeError(
                f"fold() must come after a pass over the shards. Step {self.iteration} had none since its last fold. "
                "Iterate over it first, `for ... in step`."
            )
        if not shards:
            return RuntimeError(
                "With synced batch norm step.backward must also be called for the tensors without rows that a rank "
                f"without samples receives. Step {self.iteration} left it out. Call it whatever their length."
            )
        if not self._has_begun and self._job.fold.named_gradients():
            return RuntimeError(
                "step.backward(loss) must be called for every shard, since it weights the shard's loss. Step "
                f"{self.iteration} has gradients of another backward alone. Replace loss.backward() by "
                "step.backward(loss)."
            )
        if self._gather.held:
            return RuntimeError(
                f"Held outputs need a loss of the whole mini-batch. Step {self.iteration} held outputs, and has no "
                "loss of them. After the shards call step.gather(), and step.backward(loss) with a loss of its result."
            )
        return RuntimeError(
            f"step.backward must be called for every shard. Step {self.iteration} left out {without} of its "
            f"{len(self._loaded.mini_batch.sizes)} shards (a `continue`, a `break`, an error that was caught?). "
            "Call it for each. Where one is not to count, give it weight=0 and the others weight= their number of "
            'samples, or with reduction="sum" multiply its loss by 0.'
        )

    def _fold_pass(self, problem: Exception | None = None) -> StepResult:
        job = self._job
        world = job.world
        recorder = job.recorder
        mini_batch = self._loaded.mini_batch
        without = job.fold.unfinished(mini_batch.shards) if self.is_open else []
        if problem is None and (without or not self.is_open):
            problem = self._incomplete(without)
        if not self.is_open:
            self._begin()
        fold = job.fold
        self.is_broken = True
        self.is_open = False
        world.stage = "fold"
        if job.gathering.is_used:
            fold.end_pass()
            self._gather.send_no_gather()
            problem = problem or fold.changed_twice()
        result = fold.close(mini_batch, self.iteration, problem)
        self.is_broken = False
        if recorder.tracer is not None:
            recorder.tracer.folded(result.names, result.values, fold.named_gradients())
        torch.clear_autocast_cache()  # an update follows, and autocast around the loop would keep the weights before it
        self._gather = BatchGather(world, job.gathering)
        job.where.is_folded = True
        is_first = self.passes == 0
        self.passes += 1
        if recorder.has_rows and is_first:
            waited_s = fold.control.waited.seconds
            skips = job.checks.guard.skips
            recorder.begin_row(mini_batch, result, job.batches, fold.gradient_norm, waited_s=waited_s, skips=skips)
        elif recorder.has_rows:
            recorder.extend_row(result, self.passes)
        for check in job.checks.each if is_first else (job.checks.guard,):
            if self.iteration >= check.due:
                check.after(result, mini_batch)
        world.stage = "optimizer"
        return result


def as_metric(name: str, value: Value, samples: int, device: torch.device) -> torch.Tensor:
    """A shard's metric as a new float64 tensor, shape (): the mean over its samples, or their sum.

    Args:
        name: of the metric.
        value: one value for the shard, or one per sample, shape (n,).
        samples: n, of the shard.
        device: of the loss.

    Raises:
        ValueError: another shape.
    """
    what = "sum" if isinstance(value, Sum) else "mean"
    if isinstance(value, Sum) and value.over is not None:
        raise ValueError(f"step.backward takes no dl.Sum with over=. {name} is one. Pass its mean, and weight=.")
    number = value.value if isinstance(value, Sum) else value
    if not isinstance(number, torch.Tensor):
        if not isinstance(number, Real):
            remedy = "Convert it with torch.as_tensor."
            if isinstance(number, Mapping):
                remedy = f"Pass each metric by its name, as in step.backward(loss, **{name})."
            raise ValueError(f"A metric must be a number or a tensor. {name} is {reprlib.repr(number)}. {remedy}")
        if what == "mean":
            check_mean(name, number, samples)
        return torch.full((), float(number), dtype=torch.float64, device=device)
    if what == "mean" and number.dim() == 0 and not number.is_floating_point():
        check_mean(name, number, samples)
    if number.is_complex():
        raise ValueError(f"A metric must be real. {name} is {number.dtype}. Take its .abs() or .real.")
    number = number.detach()
    if number.dim() and number.shape != (samples,):
        raise ValueError(
            f"A metric must be one value, the shard's {what}, or one per sample, shape ({samples},). "
            f"{name} has shape {tuple(number.shape)}. Take its {what}."
        )
    reduced = number.sum(dtype=torch.float64) if what == "sum" else number.mean(dtype=torch.float64)
    if reduced.device != device and not is_asynchronous(reduced):  # a copy from the host would hold it up
        return torch.full((), reduced.item(), dtype=torch.float64, device=device)
    return reduced.to(device)


def _is_plain_mean(loss: Any, samples: int, *, reads: bool) -> bool:
    """Whether a loss is torch's cross-entropy over all labels of a shard: each step asks, and most are."""
    if not hasattr(loss, "_saved_ignore_index") or loss._saved_reduction != MEAN:
        return False
    labels = loss._raw_saved_target.data
    divisor = loss._raw_saved_total_weight.data  # a hook for saved tensors packs another type
    if loss._raw_saved_weight.data is not None or type(labels) is not torch.Tensor or type(divisor) is not torch.Tensor:
        return False
    is_over_all = labels.dim() > 0 and len(labels) % samples == 0 and divisor.dim() == 0
    return is_over_all and (not reads or divisor.item() == labels.numel())


def _add_loss(
    record: ShardRecord,
    value: torch.Tensor,
    weight: Weight | None,
    reduction: str,
    metrics: dict[str, Value],
    made_by: Node | None,
    *,
    more: bool,
    reads: bool,
    alone: bool,
) -> Weight:
    """Record a shard's loss and its metrics; returns the shard's weight.

    Args:
        record: of the shard.
        value: of the loss, shape (), a tensor of the record's own.
        weight, reduction, metrics: as given to `Step.backward`.
        made_by: the operation whose result the loss is.
        more: whether another loss of the shard follows.
        reads: whether values may be read; on a GPU the host would wait.
        alone: whether the mini-batch has no other shard.

    Raises:
        ValueError: an unknown reduction, torch's sum over samples as their mean, its mean over something else without
            a weight, its mean as a sum, a reserved metric name, or another weight or reduction than the first loss had.
    """
    weight = None if weight is None else check_weight(weight)
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum". Got {reduction!r}.')
    if not REFUSED_NAMES.isdisjoint(metrics):
        raise reserved_names(metrics)
    if reduction == "mean" and not _is_plain_mean(made_by, record.shard.samples, reads=reads):
        is_only = not more and not record.losses
        refuse_other_means(made_by, record.shard.samples, is_only=is_only, has_weight=weight is not None, reads=reads)
    elif reduction == "sum" and not alone:
        refuse_added_mean(made_by, record.shard.samples)
    former = record.weight
    if record.losses and isinstance(weight, torch.Tensor) and isinstance(former, torch.Tensor):
        weight = weight.where(weight == former, math.nan)  # the guard finds it one step later
    elif record.losses and (isinstance(weight, torch.Tensor) or isinstance(former, torch.Tensor) or weight != former):
        raise ValueError(
            f"All losses of a shard must have the same weight. Got {weight} after {former}. Multiply the loss "
            "itself by a factor. For means over different things, as images and boxes, step.hold the sums and counts, "
            "and divide after step.gather()."
        )
    if record.losses and ("loss" in record.summed) != (reduction == "sum"):
        raise ValueError(
            f"All losses of a shard must have the same reduction. Got {reduction!r} after another one. Divide the "
            "sum by what it is over, or multiply the mean by it."
        )
    summed = record.summed
    samples = record.shard.samples
    for name, metric in metrics.items():
        record.metrics[name] = as_metric(name, metric, samples, value.device)
        summed = summed | {name} if isinstance(metric, Sum) else summed - {name}
    record.losses.append(value)
    record.weight = weight
    record.summed = summed | {"loss"} if reduction == "sum" else summed
    return samples if weight is None else weight


class FoldEvents(Protocol):
    """The questions of a fold to the loop, and its calls while it waits."""

    def take_requests(self) -> ControlRequest:
        """This rank's requests to all, at a fold; once."""

    def while_reducing(self) -> None:
        """The sums over the ranks have started. Do other work: rows, the next data, the next seeds."""


class _NoEvents:
    """A fold without a loop."""

    def take_requests(self) -> ControlRequest:
        return NO_REQUEST

    def while_reducing(self) -> None:
        pass


@dataclass(slots=True)
class FoldPass:
    """One pass over a mini-batch's shards, but for its gradients; a new object for each.

    Attributes:
        opened_by: its step, between its first shard and its fold.
        gathers: whether an earlier pass had held outputs.
        decision: of all ranks at its fold.
        had_gradients: whether its fold left any.
        records, empty: of its shards, and of a rank without a shard, under synced batch norm.
        loss_scale: of a GradScaler.
        raw: the collectives of the script as the first shard began.
        request: of this rank, where its flag was sent.
        gathered: the statistics before calls after a gather, where a bad step is skipped.
    """

    opened_by: object = None
    gathers: bool = False
    decision: ControlDecision | None = None
    had_gradients: bool = False
    records: list[ShardRecord] = field(default_factory=list)
    empty: ShardRecord | None = None
    loss_scale: torch.Tensor | None = None
    raw: int = 0
    request: ControlRequest | None = None
    gathered: RunningStatsSnapshot | None = None


class Fold:
    """Reduces the results of a step's shards over shards and ranks, in the same order on every rank.

    A pass is `open`; `begin_shard`, `backward` and `end_shard` for each shard; then `close`.

    Args:
        modules: by name, with the job's batch-norm layers and buffers.
        parameters: by name, of the modules and of the optimizers.
        world: from `join_world`.
        announced: the number of values that a rank announces in the control word; see `Announcement`.
        shards: S, of each mini-batch. With one, torch's own running statistics already cover the whole mini-batch, and
            travel as ordinary buffers.
        carried: the number of shards of each rank; by default `split_sizes(S, ranks)`.
        ordered: add gradients up in an order that follows from S alone, for the same bits on any number of ranks.
        bucket_cap_mib: the size of the gradient buckets; None as in `Loop`.
        buffer_reduction: rules for single buffers, by name.
        guard: judges steps that are not finite; None allows them.
        scalers: by which losses may be multiplied; results and rows are without their factor.
        events: called around each fold.
        former: the fold that this one replaces, released; its control word is taken over.
        averaged: parameters of averaged copies, which never need a gradient.
        watch: called with each shard's number on this rank and its gradients by name.
        reduce_dtype: the dtype in which gradients of a lower precision are added up, over shards and ranks; then they
            are rounded to the parameters' dtype. None for the parameters' dtype.

    Raises:
        ValueError: a model that torch shares between ranks, a hook on a parameter, a table that divides by counts in a
            shard, or a rule for an unknown buffer.

    Attributes:
        current: the pass that is open, or the last one.
        control: on whose sum all ranks decide.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        parameters: Mapping[str, Parameter],
        world: World,
        *,
        shards: int,
        announced: int = 0,
        carried: tuple[int, ...] | None = None,
        ordered: bool = False,
        bucket_cap_mib: float | None = None,
        buffer_reduction: Mapping[str, BufferReduction] | None = None,
        guard: NonFiniteGuard | None = None,
        scalers: Sequence[GradScaler] = (),
        events: FoldEvents | None = None,
        averaged: Collection[Parameter] = (),
        watch: Callable[[int, dict[str, torch.Tensor]], None] | None = None,
        former: Fold | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        refuse_wrapped(modules)
        layers = batch_norm_layers(modules) if shards > 1 else {}
        self.modules = each_module(modules)  # whose modes must be the same in all shards
        if shards > 1:
            check_tables(self.modules)
        custom = custom_norms(self.modules.values())
        others = [*other_norm_layers(modules, layers), *(norm.module for norm in custom if shards == 1)]
        order = (tree_order if ordered or world.adds_in_order else rank_order)(shards, world.size, world.rank, carried)
        self._world = world
        self._events = _NoEvents() if events is None else events
        self._guard = guard
        self.scalers = scalers
        self.sync_channels = [channel for channel in find_sync_channels(modules.values()) if channel.size > 1]
        synced = {layer for layer in self.modules.values() if is_synced(layer)}  # these move their statistics
        doubles = any(parameter.dtype in (torch.float64, torch.complex128) for parameter in parameters.values())
        dtype = torch.float64 if doubles else torch.float32  # of statistics, losses and metrics
        sizes = bucket_sizes(bucket_cap_mib, world.device)
        self.gradients = Gradients(
            parameters,
            Bucketing(world, order, sizes, dtype, reduce_dtype),
            averaged=averaged,
            synced=bool(self.sync_channels),
            takes_hooks=shards == 1,
            watch=watch,
        )
        self._statistics = BatchNormStatistics(layers, custom if shards > 1 else [], others)
        self._snapshot = RunningStatsSnapshot(synced if guard is not None and guard.skips else [])
        found = find_buffers(modules, {*layers.values(), *synced}, buffer_reduction or {})
        self._buffers = Buffers(found, is_whole=shards == world.size == 1)
        as_moments = use_moments(self._statistics, shards, set(parameters.values()).difference(averaged), dtype)
        self._make_rows = partial(Rows, self._statistics, self._buffers, world, order, dtype, as_moments)
        self._rows: Rows | None = None  # of the layout that the ranks have agreed on
        self.current = FoldPass()
        self.control: ControlWord = ControlWord(world, announced) if former is None else former.control

    def check_pending(self) -> None:
        """Raise the error in the last step's buffers that a GPU reports late; the same on every rank.

        Raises:
            ValueError: shards changed a buffer of the rule "same" differently.
        """
        self._buffers.settle()

    def release(self) -> None:
        """Remove all hooks."""
        self.gradients.release()
        self._statistics.release()
        self._use_whole(False)
        self._events = _NoEvents()  # the loop's job, which holds this fold: both would wait for the garbage collector

    # -- a pass over the shards ----------------------------------------------------------------------------

    def open(self, step: object = None, *, gathers: bool = False) -> None:
        """Begin a pass over the shards of a mini-batch.

        Args:
            step: whose pass it is; None without a `Step`.
            gathers: whether an earlier pass had held outputs.
        """
        has_flags = self._rows is not None and not gathers and not self.sync_channels  # as all ranks know alike
        self.control.open(has_flags=has_flags)
        self._world.blocked_because = _OPEN
        former = self.current
        self.current = FoldPass(step or self, gathers)
        self.gradients.open()
        if self._buffers.found:
            self._buffers.open()
        self._statistics.open(map(_CAPTURES, former.records))
        if self._snapshot.layers:
            self._snapshot.record()

    def begin_shard(self, shard: Shard | None) -> ShardRecord:
        """Begin a shard's forward, with the buffers of the pass's start; its backward comes before `end_shard`.

        Args:
            shard: None on a rank without one, which takes part in synced batch norm.

        Raises:
            RuntimeError: an earlier shard of this rank called torch.distributed itself.
        """
        current = self.current
        if self._world.size > 1 and len(self.gradients.bucketing.order.mine) > 1:
            # The package's own sums begin in the last backward.
            made = self._world.count_raw_collectives()
            if not current.records:
                current.raw = made
            elif made != current.raw:
                raise RuntimeError(
                    "A shard must not call torch.distributed where a rank has several shards. Such a collective "
                    "combines one shard of each rank, not the whole mini-batch, and waits for ranks with fewer shards. "
                    f"This step's earlier shards made {made - current.raw}. Use step.hold and step.gather, or a rule "
                    "for the buffer (docs/buffers.md), or one shard per rank."
                )
        record = ShardRecord(shard or Shard(0, 0, 0), self._statistics.recording())
        if shard is None:
            current.empty = record
        else:
            current.records.append(record)
        return record

    def end_shard(self, record: ShardRecord) -> None:
        """End a shard, even if it raised: take the buffers that it changed. Held outputs have their backward later.

        Args:
            record: of the shard.
        """
        self._statistics.stop()
        if self.gradients.current.looks and len(self.current.records) <= 2:
            self.gradients.look_at_values()
        if self._buffers.found:
            is_done = record.done or record.held
            record.changed_buffers = self._buffers.take(graph_goes_on=record.held, is_done=is_done)

    def modes(self) -> Modes:
        """The modules in evaluation mode now, by name."""
        return tuple(compress(self.modules, map(not_, map(_TRAINING, self.modules.values()))))

    def unscaled(self, loss: torch.Tensor) -> tuple[torch.Tensor, Node | None]:
        """A loss's value without a GradScaler's factor, a new tensor of shape (), and the operation that made it."""
        value = loss.detach()
        made_by = loss.grad_fn
        scale, product = find_scale(loss, self.scalers)
        if scale is None:
            return value.clone(), made_by  # the script may reuse the tensor for the next shard
        self.current.loss_scale = scale = scale.clone()  # the scaler writes it in place
        if product is made_by and product is not None:
            made_by = next((below for below, _ in product.next_functions if below is not None), None)
        return value.to(torch.promote_types(value.dtype, torch.float32)) / scale, made_by

    def backward(
        self, record: ShardRecord, loss: torch.Tensor, factor: Weight, *, last: bool, more: bool = False
    ) -> None:
        """Backpropagate `factor` times a shard's loss; a factor of 0 adds exactly 0.

        Args:
            record, loss, factor: of the shard; shape (); its share of the mini-batch.
            last, more: whether the rank has no further shard; whether the shard has another loss.

        Raises:
            RuntimeError: the gradients of an earlier shard are gone, or a second gradient came too late.
        """
        record.failed = True  # stays True if backward raises
        record.modes = () if all(map(_TRAINING, self.modules.values())) else self.modes()
        self._statistics.discard()
        if self.current.gathers:
            last = False  # no sum begins before the ranks' word: [Note: One word a pass] in `gather`
        if last and self.control.owes_flag:
            self._send_flag(None)
        if not isinstance(factor, torch.Tensor) and factor != 0:
            self.gradients.backward(loss, factor, last=last, more=more)
        else:
            with ExitStack() as ending:
                if not isinstance(factor, torch.Tensor):
                    factor = torch.zeros((), device=loss.device)  # its parameters get gradients of 0, not None
                    ending.enter_context(torch.autograd.set_detect_anomaly(False))  # its loss may be 0 / 0
                for channel in self.sync_channels:
                    ending.enter_context(channel.masking(factor == 0))
                self.gradients.backward(loss, factor, last=last, more=more)
        record.done = not more
        record.failed = False
        self._statistics.captures = record.captures
        if self._statistics.others.layers:
            self._statistics.others.restore()

    def backward_empty(self, record: ShardRecord, loss: torch.Tensor, *, more: bool) -> None:
        """Backpropagate on a rank without samples, only to join the collectives in it; its gradients are discarded."""
        self._statistics.discard()
        self.gradients.backward_empty(loss, more=more)
        record.done = not more
        self._statistics.captures = record.captures
        if self._statistics.others.layers:
            self._statistics.others.restore()

    def backward_whole(self, loss: torch.Tensor, gather: BatchGather) -> None:
        """Backpropagate a loss of the whole mini-batch: into its own parameters once, into each held shard's outputs.

        The held outputs and their graphs are dropped.

        Args:
            loss: shape (), the same on every rank.
            gather: of this pass.

        Raises:
            ValueError: a loss of neither the gathered outputs nor parameters of the state.
        """
        self._statistics.accept()
        specs = zip(gather.whole or (), gather.agreement.specs or (), strict=True)
        leaves = [rows for rows, spec in specs if spec.has_gradient]
        gradients: list[torch.Tensor | None] = []
        # The loss's own parameters count on one rank alone. The first row's rank has a shard; rank 0 may have none.
        if any(held.shard.samples and held.rows.start == 0 for held in gather.held):
            self._backward_held(loss, more=True, last=False)
            gradients = [leaf.grad for leaf in leaves]
            if all(one is None for one in gradients) and not self.named_gradients():
                raise ValueError(
                    "The loss after step.gather must depend on the gathered outputs, or on a parameter in state. Got "
                    "one that depends on neither, so the model would not be trained. Hold the model's outputs with "
                    "their graph, and compute the loss from the tensors that step.gather() returned, not from copies."
                )
        elif leaves:
            with self._in_backward():
                gradients = list(torch.autograd.grad(loss, leaves, allow_unused=True))
        self._use_whole(False)
        for held in gather.held:
            ends = [output for output in held.outputs if output.requires_grad]
            pairs = zip(ends, gradients, strict=True)
            # Values of shape () whose gradients with respect to the outputs are these, to the bit.
            parts = [(end * g[held.rows].conj()).real.sum() for end, g in pairs if g is not None]
            is_empty = not held.shard.samples
            if parts:
                self._backward_held(reduce(torch.add, parts), last=held is gather.held[-1], is_empty=is_empty)
            elif not is_empty:
                self.gradients.finish_shard()
        self._use_whole(True)
        gather.held = []
        gather.whole = None

    def _backward_held(self, loss: torch.Tensor, *, last: bool, more: bool = False, is_empty: bool = False) -> None:
        """Backpropagate into a shard's held outputs; of an empty one as in `backward_empty`."""
        if last and self.control.owes_flag:
            self.control.flag()
        with self._in_backward():
            if is_empty:
                self.gradients.backward_empty(loss, more=more)
            else:
                self.gradients.backward(loss, 1.0, last=last, more=more)

    @contextmanager
    def _in_backward(self) -> Iterator[None]:
        """Keep buffers and running statistics as they are while a backward inside runs forwards again."""
        self._statistics.recording()
        self._statistics.discard()
        try:
            with self._buffers.untouched():
                yield
        finally:
            self._statistics.stop()

    def finish_held(self, value: torch.Tensor, metrics: dict[str, torch.Tensor]) -> None:
        """Give all shards the values of the loss of the whole mini-batch, after its last backward."""
        for record in filter(None, (*self.current.records, self.current.empty)):
            record.losses = [value]
            record.metrics = metrics
            record.done = True

    def unfinished(self, shards: Sequence[Shard]) -> list[int]:
        """The numbers of the shards without a last backward in this pass, or of the empty one."""
        if (empty := self.current.empty) is not None and not empty.done:
            return [empty.shard.number]
        done = map(_SHARD_NUMBER, filter(_DONE, self.current.records))
        return sorted(set(map(_NUMBER, shards)).difference(done))

    @contextmanager
    def between_shards(self) -> Iterator[None]:
        """Allow collectives after the last shard's forward, for a gather. Every rank must call this.

        From then on each rank has the whole mini-batch.
        """
        for channel in self.sync_channels:
            channel.send_control()
        self._world.blocked_because = None
        self.control.read_last()
        try:
            yield
        finally:
            self._world.blocked_because = _OPEN
        self._use_whole(True)
        self._statistics.close([record.captures for record in self.current.records])
        if self._guard is not None and self._guard.skips:
            self.current.gathered = RunningStatsSnapshot(layer.norm.module for layer in self._statistics.layers)
            self.current.gathered.record()

    def _use_whole(self, is_gathered: bool) -> None:
        """Say whether synced layers that are called now have the whole mini-batch."""
        for channel in self.sync_channels:
            channel.is_gathered = is_gathered

    # -- the fold ------------------------------------------------------------------------------------------

    def end_pass(self) -> None:
        """Allow collectives again; raises where synced layers ran in different orders. Every rank must call this."""
        self.current.opened_by = None
        self._world.blocked_because = None
        for channel in self.sync_channels:
            channel.is_gathered = False
            channel.send_control()

    def changed_twice(self) -> RuntimeError | None:
        """The error of a buffer that changed in the shards, and again after a gather."""
        if (name := self._buffers.changed_twice()) is None:
            return None
        return RuntimeError(
            "A buffer must change in the shards, or between step.gather() and step.fold(), not in both. "
            f"{name} changed in both. Change it after step.fold(), or use another module after the gather."
        )

    def close(self, mini_batch: MiniBatch, iteration: int, problem: Exception | None = None) -> StepResult:
        """Make `.grad`, statistics and buffers the whole mini-batch's. Every rank must call this.

        Args:
            mini_batch, iteration: of the step.
            problem: raised here, where the other ranks raise PeerFailed.

        Raises:
            ValueError: shards that differ in metrics or in the change of a buffer; a sparse gradient.
            PeerFailed: another rank has a problem.
        """
        shards = len(mini_batch.sizes)
        gradients = self.gradients
        control = self.control
        rows, table, local_layout, problem = self._pack(mini_batch, problem)

        # Sum.
        if self._world.size > 1:
            gradients.start_sums()
            if rows.moments is not None:
                rows.moments.start()
        if control.is_late:
            control.send((mini_batch, local_layout))
        self._events.while_reducing()
        since = control.waited.clock()
        if self._world.size > 1:
            gradients.finish_sums(rows.extra_sums)
        decision, has_gradient = control.read(mini_batch.announcement)
        control.waited.seconds += control.waited.clock() - since

        # Decide.
        self.current.decision = decision
        if decision.is_unusual:
            act_on(decision, mini_batch, problem, local_layout, self._world)
        if decision.new:
            rows = self._extend(rows.layout, local_layout, iteration)
            table = rows.sum_now(self.current.records, shards)

        return self._finish(rows, table, mini_batch, iteration, has_gradient)

    def _pack(
        self, mini_batch: MiniBatch, problem: Exception | None
    ) -> tuple[Rows, torch.Tensor, RowLayout, Exception | None]:
        """Collect the shards' records, and pack them beside the gradients.

        Returns:
            The `Rows` of the layout that the ranks agreed on; the table of all shards' rows, (S, width), in which this
            rank's own stay empty with a problem or something new; the layout that this rank's shards need; and the
            error, or None.
        """
        if self.current.opened_by is not None:
            self.end_pass()
        control = self.control
        if control.owes_flag:
            self._send_flag(problem)
        request = self.current.request or self._events.take_requests()
        gradients = self.gradients
        records = self.current.records
        layers = len(self._statistics.layers)
        find_layout = partial(layout_of, records, layers, gradients.trainable, gradients.unplanned.names)
        problem = problem or request.problem or self._statistics.problem
        if problem is None and (name := gradients.changed_since_opened()) is not None:
            problem = RuntimeError(
                f"Parameters must stay as they are from a step's first shard to its fold. {name} was written in "
                "between, perhaps by an Embedding with max_norm, an optimizer's step, or a forward through .data. "
                "Write it after step.fold()."
            )
        if self._rows is None:
            local_layout, differing = find_layout()
            self._world.raise_if_any_failed(problem or differing)
            self._rows = self._make_rows(agreed(self._world.gather(local_layout), None))
        rows = self._rows
        shards = len(mini_batch.sizes)
        has_gradient, extras, lost = gradients.collect(control.room + shards * rows.width, control.room_each)
        local_layout, differing = find_layout()
        problem = problem or differing or lost
        is_new = problem is None and not rows.layout.covers(local_layout)
        if is_new and not control.waits:
            problem = came_late(rows.layout, local_layout)
            is_new = False
        is_usual = problem is None and not is_new
        table = extras.fill_(IDENTITY)[control.room + control.room_each * len(has_gradient) :].view(shards, -1)
        rows.fill(table, records if is_usual else ())
        modes = rows.layout.modes.index(local_layout.modes[0]) if is_usual and local_layout.modes else None
        control.write(
            extras, mini_batch, has_gradient, request, has_problem=problem is not None, is_new=is_new, modes=modes
        )
        return rows, table, local_layout, problem

    def _send_flag(self, problem: Exception | None) -> None:
        """Tell all ranks whether they must read this pass's word in its fold. See [Note: Late words]."""
        if problem is None:
            self.current.request = self._events.take_requests()
        self.control.flag(waits=problem is not None or self._has_news())

    def _has_news(self) -> bool:
        """Whether this rank has a request or a problem, or something that the rows have no room for."""
        records = self.current.records
        local_layout, differing = layout_of(records, len(self._statistics.layers), self.gradients.trainable)
        return (
            self.current.request is not NO_REQUEST
            or self._rows is None
            or any(map(_REQUIRES_GRAD, self.gradients.unplanned.waiting))
            or (differing or self._statistics.problem or self.gradients.changed_since_opened()) is not None
            or not (all(map(_DONE, records[:-1])) and self._rows.layout.covers(local_layout))
            or not self._buffers.changed() <= self._rows.layout.buffers
        )

    def _extend(self, former: RowLayout, local_layout: RowLayout, iteration: int) -> Rows:
        """The `Rows` with room for all that is new on any rank. Every rank must call this."""
        rows = self._make_rows(agreed(self._world.gather(local_layout), former))
        names = now_evaluated(rows.layout, former)
        if names and iteration > 1 and self._world.rank == 0:
            warn(EVALUATED.format(names=listed(names), step=iteration))
        return rows

    def _finish(
        self,
        rows: Rows,
        table: torch.Tensor,
        mini_batch: MiniBatch,
        iteration: int,
        has_gradient: list[bool],
    ) -> StepResult:
        """Assign `.grad`, merge the rows, and move statistics and buffers, unless the step is not finite.

        Every rank must call this.

        Args:
            rows, table: of all shards, summed.
            mini_batch, iteration: of the step.
            has_gradient: for each planned parameter whether a shard gave it a gradient.
        """
        sizes = mini_batch.sizes
        layout = rows.layout
        gradients = self.gradients
        guard = self._guard
        total, fractions, losses, values = rows.merge(table, sizes)
        self.current.had_gradients = any(has_gradient)
        replans = gradients.assign(has_gradient, None if rows is self._rows else layout.unplanned)
        if total is not None and len(sizes) > 1 and "loss" not in layout.summed:
            gradients.scale(torch.where(total == 0, 0.0, mini_batch.samples / total))  # backward used w / R
        if gradients.rounds:
            gradients.round()
        judged = values[0]
        if total is not None and "loss" in layout.summed:
            judged = judged + 0.0 * total  # a GPU's bad weight is NaN, and no part of a sum
        is_bad: torch.Tensor | bool = False
        is_quick = not self._world.accelerator.is_asynchronous  # to read a value
        if guard is not None and not (
            is_quick and math.isfinite(judged.item()) and (guard.is_scaled or gradients.are_finite())
        ):
            is_bad = guard.check(judged, gradients)
        if is_bad is not False:
            self._snapshot.restore(is_bad)
            if self.current.gathered is not None:
                self.current.gathered.restore(is_bad)
                self._buffers.undo(is_bad, layout.buffers)
            self.current.had_gradients = False
        rows.apply(table, sizes, self.current.records, is_bad)
        if replans:  # as each new layout does; now, since by the next pass one rank may have unfrozen something
            self._rows = rows
            gradients.release()
            gradients.plan(self.control.room + len(sizes) * rows.width, self.control.room_each)
        place = mini_batch.epoch, iteration, mini_batch.samples
        return StepResult(*place, layout.metrics, values, total, losses, fractions, is_bad, gradients, layout.summed)

    # -- after the fold ------------------------------------------------------------------------------------

    def named_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients as they are now, by parameter name, without those that are None."""
        return self.gradients.named()

    def gradient_norm(self, iteration: int) -> torch.Tensor | None:
        """The norm of the whole mini-batch's gradients, shape (), without a GradScaler's factor; None if left out.

        Args:
            iteration: of the step.
        """
        norm = self.gradients.norm_if_due(iteration, thinned=not self._world.accelerator.is_asynchronous)
        scale = self.current.loss_scale
        return norm if norm is None or scale is None else norm / scale

    def leaving(self, shards: int, *, gathers: bool) -> Callable[[], None]:
        """The part of a pass that has not begun, as a collective that adds only a problem; even after `release`.

        Args:
            shards: of the mini-batch.
            gathers: as in `open`, for the next pass.
        """
        has_flags = False
        send = None
        if self._rows is not None:
            has_flags = self.current.opened_by is None and not gathers and not self.sync_channels
            room = self.control.room + shards * self._rows.width
            send = self.gradients.leaving(room, self.control.room_each, self._rows.extra_sums)
        return self.control.leaving(self.gradients.planned, send, has_flags=has_flags)


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """The requests of a rank to all in a fold.

    Attributes:
        stop: to end the loop after this step.
        save: to write a checkpoint after it.
        problem: an error to raise; the other ranks raise PeerFailed.
    """

    stop: bool = False
    save: bool = False
    problem: Exception | None = None


NO_REQUEST = ControlRequest()


@lru_cache(maxsize=1024)  # most words are one of 256
def control_tensor(word: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The word as a tensor, which must not be written."""
    return torch.tensor(word, dtype=dtype, device="cpu")


@dataclass(frozen=True, slots=True)
class ControlDecision:
    """The sum of all ranks' control words.

    Attributes:
        problem, new, stop, save: whether any rank says so.
        ends: the number of ranks whose stream ends.
        at_different_batches: whether ranks are; n sum(b^2) = sum(b)^2 exactly if all tags b are the same.
        mixed: whether the modules of ranks with shards were in different modes.
        is_unusual: whether there is a problem, an end, or a difference between ranks; see `act_on`.
    """

    problem: bool
    new: bool
    ends: int
    stop: bool
    save: bool
    at_different_batches: bool
    mixed: bool
    is_unusual: bool


def act_on(
    decision: ControlDecision, mini_batch: MiniBatch, problem: Exception | None, local_layout: RowLayout, world: World
) -> None:
    """Raise on every rank the error that the word of a pass shows. Every rank must call this.

    Args:
        decision: of that pass.
        mini_batch, problem, local_layout: this rank's, in that pass.
        world: the ranks.
    """
    if decision.problem:
        world.raise_if_any_failed(problem)
    if decision.at_different_batches:
        world.require_equal("epoch and position of a step's mini-batch", (mini_batch.epoch, mini_batch.position))
        check_first(mini_batch, world)
    if decision.mixed:
        require_alike(world.gather(local_layout, "the modes of the modules"))
    if decision.ends:
        check_end(decision.ends, mini_batch, world)


def came_late(layout: RowLayout, local_layout: RowLayout) -> RuntimeError:
    """The error of a rank that finds something new when the other ranks no longer wait for it."""
    found = sorted({*local_layout.buffers} - layout.buffers) or ["a call of a batch-norm layer, a metric or a weight"]
    return RuntimeError(
        "On a GPU all that a step reduces must be known when the last shard's backward begins. After it came, for the "
        f"first time: {', '.join(found)}. Change buffers and call layers before step.backward(loss)."
    )


@dataclass(slots=True)
class WaitedTime:
    """For how long this rank has waited for others in its folds.

    Attributes:
        seconds: in all folds so far.
        clock: read as a wait begins and as it ends.
    """

    seconds: float = 0.0
    clock: Callable[[], float] = time.perf_counter


class ControlWord:
    """The control words of the ranks, pass after pass: `open`, `flag`, `write`, `send`, `read`.

    On the CPU each rides in the extras of the sum of the gradients, and is read with it. On asynchronous devices they
    are summed beside it, and read one pass late, see [Note: Late words].

    Args:
        world: from `join_world`.
        announced: the number of values that a rank announces; see `Announcement`.

    Attributes:
        is_late: whether they are summed beside the gradients.
        room: the extras that the word takes, and `room_each` more for each planned parameter.
        waited: the time of waits for other ranks.
        owes_flag: whether this rank has yet to send the flag of this pass.
        waits: whether this rank reads the word in the fold; where its flag says so, or the pass has none, all do.
        has_raised: whether a word was read late that raised.
    """

    def __init__(self, world: World, announced: int) -> None:
        self._world = world
        self._gradients_at = CONTROL_LENGTH + announced
        self.is_late = world.accelerator.is_asynchronous
        self.room = 0 if self.is_late else self._gradients_at
        self.room_each = 0 if self.is_late else 1
        self.waited = WaitedTime()
        self.owes_flag = False
        self.waits = True
        self.has_raised = False
        self._flag: tuple[torch.Tensor, Work | None] | None = None
        self._summed = torch.empty(0, device="cpu")  # of all words, once `_work` is done
        self._unsummed: list[int] = []  # the word of a rank that is alone
        self._work: Work | None = None
        self._unread: tuple[MiniBatch, RowLayout] | None = None  # of the pass whose word is still to be read

    def open(self, *, has_flags: bool) -> None:
        """Begin a pass; without flags the last word is read first. Every rank must call this."""
        unread = self._unread
        if has_flags:  # it is read before the flag is sent, not among the deferred collectives
            self._unread = None
        try:
            self._world.require_collectives_allowed()
        finally:
            if has_flags and unread is not None:
                self._unread = unread
                self._world.defer(self.read_last)
        self.owes_flag = has_flags and self.is_late and self._world.size > 1
        self.waits = not self.owes_flag

    def flag(self, *, waits: bool = True) -> None:
        """Send the flag that this rank owes. Every rank must call this.

        Args:
            waits: whether all ranks must read the word of this pass in its fold.
        """
        if self._unread is not None:
            since = self.waited.clock()
            self.read_last()
            self.waited.seconds += self.waited.clock() - since
        self.owes_flag = False
        self.waits = waits
        flag = torch.tensor([waits], dtype=torch.int32, device="cpu")
        self._flag = flag, self._world.start_sum(flag)

    def write(
        self,
        extras: torch.Tensor,
        mini_batch: MiniBatch,
        has_gradient: Sequence[bool],
        request: ControlRequest,
        *,
        has_problem: bool,
        is_new: bool,
        modes: int | None,
    ) -> None:
        """Write this rank's word, before the sums begin.

        Args:
            extras: of the last sum, where a word on the CPU rides.
            mini_batch: of this step; 8 bits of its checksum tell one from the next, and 256 squares add up in float32.
            has_gradient: for each parameter whether one of the rank's shards gave it a gradient.
            request: of this rank.
            has_problem, is_new: whether the rank has one, and something that the layout has no room for.
            modes: the number of its shards' modes among those agreed on; None without a shard, with a problem and with
                something new.
        """
        facts = mini_batch.epoch, mini_batch.position, mini_batch.samples, mini_batch.digest
        batch_tag = zlib.crc32(b"%d %d %d %d" % facts) & 0xFF
        ends = mini_batch.ends_stream
        news = () if mini_batch.announcement is None else mini_batch.announcement.values
        ran = (0, 0, 0) if modes is None else (1, modes, modes * modes)
        word = (
            has_problem,
            is_new,
            ends,
            request.stop,
            request.save,
            batch_tag,
            batch_tag**2,
            *ran,
            *news,
            *has_gradient,
        )
        if self.is_late:
            # It cannot be read late where this rank has an error, or does not know which parameters have gradients.
            self.waits = self.waits or has_problem or ends or not all(has_gradient)
            self._summed = control_tensor(word, torch.int32).clone()
        elif self._world.size == 1:
            self._unsummed = [*word]  # nothing is added to it
        else:
            self._summed = extras[: len(word)].copy_(control_tensor(word, extras.dtype))

    def send(self, of: tuple[MiniBatch, RowLayout] | None) -> None:
        """Start the sum of all late words, after all others: how many of these backward has begun differs by rank.

        Every rank whose word is late must call this.

        Args:
            of: the mini-batch of the pass, and the layout of this rank's shards; None where the rank leaves.
        """
        self._work = self._world.start_sum(self._summed)
        self._unread = of

    def read(self, announcement: Announcement | None = None) -> tuple[ControlDecision, list[bool]]:
        """The decision that the sum of all words is, and for each parameter whether a shard gave it a gradient.

        If they are read later, these are of words without request or error. Every rank must call this.

        Args:
            announcement: learns the values that were announced.
        """
        is_later = False
        if self._flag is not None:
            flags, work = self._flag
            self._flag = None
            self._world.finish(work)
            is_later = not self.waits and flags.tolist() == [0]
        if is_later:
            self._world.defer(self.read_last)
            # Nothing is asked, announced values add up to 1, and each parameter got a gradient.
            sums = [0] * CONTROL_LENGTH + [1] * (len(self._summed) - CONTROL_LENGTH)
        else:
            if self._work is not None:
                self._world.finish(self._work)
            self._unread = None
            sums = self._unsummed or self._summed.tolist()
        problem, new, ends, stop, save, batch_tag, square, ran, modes, modes_square = sums[:CONTROL_LENGTH]
        if announcement is not None:
            announcement.learn(sums[CONTROL_LENGTH : self._gradients_at])
        at_different_batches = self._world.size * square != batch_tag**2
        mixed = ran * modes_square != modes**2
        is_unusual = problem > 0 or ends > 0 or at_different_batches or mixed
        decision = ControlDecision(
            problem > 0, new > 0, int(ends), stop > 0, save > 0, at_different_batches, mixed, is_unusual
        )
        return decision, list(map(bool, sums[self._gradients_at :]))

    def read_last(self) -> None:
        """Read the last pass's word, if it was not read, and raise its error. Every rank must call this."""
        if self._unread is None:
            return
        mini_batch, local_layout = self._unread
        self._flag = None  # of a pass that broke off
        decision, _ = self.read()
        if decision.is_unusual:
            self.has_raised = True
            self._world.blocked_because = None
            act_on(decision, mini_batch, None, local_layout, self._world)
            self.has_raised = False

    def leaving(
        self,
        parameters: int,
        send_nothing: SendNothing | None,
        *,
        has_flags: bool,
    ) -> Callable[[], None]:
        """The flag and the word of a pass that this rank leaves, as a collective.

        Args:
            parameters: the number of planned ones.
            send_nothing: sends sums that add nothing, but a problem at a place of the extras, inside of a block; None
                without sums. See `Gradients.leaving`.
            has_flags: as in `open`, of a pass that has yet to begin; False of one that has begun.
        """
        length = self._gradients_at + parameters
        self.owes_flag = self.owes_flag or (has_flags and self.is_late and self._world.size > 1)

        @contextmanager
        def beside() -> Iterator[None]:
            self._summed = torch.tensor([1] + [0] * (length - 1), dtype=torch.int32, device="cpu")
            self.send(None)
            yield
            self.waits = True
            self.read()

        def leave() -> None:
            if self.owes_flag:
                self.flag()
            if send_nothing is not None and self.is_late:
                send_nothing(None, beside())
            elif send_nothing is not None:
                send_nothing(PROBLEM, nullcontext())

        return leave


class LateBuffer:
    """A buffer that a forward made, with its value when it was noticed.

    Args:
        module, key: its place.
    """

    def __init__(self, module: nn.Module, key: str) -> None:
        self._place = module, key
        self._tensor: torch.Tensor | None = None
        self._version = 0
        self._value: torch.Tensor | None = None
        self.note()

    def note(self) -> bool:
        """Note its value if it was written or replaced, and return whether it was."""
        now = getattr(*self._place, None)
        if now is self._tensor and version_of(now) == self._version:
            return False
        self._tensor = now
        self._version = version_of(now)
        self._value = None if now is None else now.detach().clone()
        return True

    def has_changed(self) -> bool:
        """Whether its values did, in the same shape: a larger table is new. Once it was written, a GPU's host waits."""
        before = self._value
        if not self.note() or before is None or self._value is None:
            return False
        return before.shape == self._value.shape and not same_bits(before, self._value)


class ModuleStructure:
    """Notices, by identity, that a script replaced, added or removed modules or parameters, or removed buffers.

    It compares the entries of the modules' own tables, at 0.05 microseconds a parameter. A forward may assign new
    tensors to buffers, and may make buffers, even on some ranks alone: a table that it keeps for the next ones. They
    are in no fold, so they must stay as they were made; see `changed_late_buffer`.

    Args:
        state: the parts of the job, by name.

    Attributes:
        modules: all modules in the state, by name, as of the last call of `changes`.
        late: the buffers that were made since the fold, by name.
    """

    def __init__(self, state: Mapping[str, object]) -> None:
        self._state = state
        self._optimizers = parts_of(state, Optimizer)
        self.modules: dict[str, nn.Module] = {}
        self._tables: list[dict[str, Any]] = []  # of the modules' parameters and modules
        self._buffers: list[dict[str, Any]] = []  # of their buffers
        self._buffer_counts = 0, 0  # all, and those that are None
        self._buffer_names: frozenset[str] = frozenset()  # of those that are not None
        self.late: dict[str, LateBuffer] = {}  # by name
        self._filled: list[dict[str, Any]] = []  # most modules have no parameters
        self._entries: list[object] = [self]  # of all tables, and of the optimizers; at first an object of neither
        self._parameters: list[Parameter] = []
        self._known: dict[str, torch.Tensor] = {}  # kept alive, so that no other tensor gets the same id
        self.changes()

    def changes(self) -> dict[str, torch.Tensor] | None:
        """The parameters and buffers that are new since the last call, by name; None if nothing has changed.

        A forward may create its activation modules in each call: modules without tensors change nothing.
        """
        groups: list[list[object]] = []
        for optimizer in self._optimizers:
            groups += map(_PARAMS, optimizer.param_groups)
        count = sum(map(len, self._tables)) + sum(map(len, groups))
        now = chain(chain.from_iterable(map(_VALUES, self._filled)), *groups)
        buffers = chain.from_iterable(map(_VALUES, self._buffers))
        buffer_counts = sum(map(len, self._buffers)), sum(map(is_, buffers, repeat(None)))
        is_same = count == len(self._entries) and all(map(is_, now, self._entries))
        if is_same and buffer_counts == self._buffer_counts:
            return None
        former = set(self.modules.values())
        self.modules = each_module(find_modules(self._state))
        modules = self.modules.values()
        self._tables = [table for module in modules for table in (module._parameters, module._modules)]
        self._filled = [table for table in self._tables if table]
        self._entries = list(chain(chain.from_iterable(map(_VALUES, self._filled)), *groups))
        self._buffers = [module._buffers for module in modules]
        values = list(chain.from_iterable(map(_VALUES, self._buffers)))
        self._buffer_counts = len(values), sum(map(is_, values, repeat(None)))
        before = self._parameters
        names = self._buffer_names
        self._parameters = list(find_parameters(self._state).values())
        places = {
            f"{name}.{key}": (module, key)
            for name, module in self.modules.items()
            for key, buffer in module._buffers.items()
            if buffer is not None
        }
        self._buffer_names = frozenset(places)
        known = self._known
        self._known = find_tensors(self._state)
        is_same = len(before) == len(self._parameters) and all(map(is_, before, self._parameters))
        is_same = is_same and former.issuperset(module for module in modules if module._buffers)
        if is_same and names <= self._buffer_names:
            self.late |= {name: LateBuffer(*places[name]) for name in self._buffer_names - names}
            return None
        self.late = {}  # the new fold has them
        tensors = set(known.values())
        return {name: tensor for name, tensor in self._known.items() if tensor not in tensors}

    def changed_late_buffer(self) -> str | None:
        """A buffer that was made after the fold and changed since, by name; None without one."""
        return next((name for name, buffer in self.late.items() if buffer.has_changed()), None)


def _averaged(state: Mapping[str, object]) -> list[nn.Parameter]:
    """The parameters of the averaged models in a state that no optimizer has.

    A state without an optimizer does not tell which parameters are trained, so there they may get gradients.
    """
    groups = [group["params"] for optimizer in parts_of(state, Optimizer) for group in optimizer.param_groups]
    trained = set(chain.from_iterable(groups))
    models = [model for model in each_module(find_modules(state)).values() if isinstance(model, AveragedModel)]
    return [parameter for model in models for parameter in model.parameters() if groups and parameter not in trained]


@dataclass(eq=False, repr=False)
class Job:
    """The objects that the steps of a loop share. In each fold it is its `FoldEvents`.

    Args:
        state: the job's objects, by name.
        batches: of the loop, which `ahead` reads.
        new_fold: makes a `Fold`, as the script wants gradients and buffers reduced.
        where: the loop's position.
        checks, recorder: they look at the steps, and record them.

    Attributes:
        fold: of the next pass, or the one that is open.
        structure: of the state's modules.
        gathering: shared by the passes with held outputs.
        announces: whether the current mini-batch has news for the other ranks.
        passes: the number of passes of the step before the one that is open.
        seed: of the loop's random streams.
        resumed_streams: the states of the generators in the checkpoint, until the first step after it; else None.
    """

    state: Mapping[str, object]
    batches: Batches
    new_fold: Callable[..., Fold]
    where: LoopPosition
    checks: StepChecks
    recorder: RunRecorder
    ahead: ReadAhead
    announces: bool = False
    passes: int = 0
    gathering: GatherAgreement = field(default_factory=GatherAgreement)
    resumed_streams: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        self.world = self.batches.world
        self.seed = self.world.seed
        self.fold = self._make_fold(None)
        self.structure = ModuleStructure(self.state)

    def _make_fold(self, former: Fold | None) -> Fold:
        """A fold of the modules and parameters that the state has now; see `Fold` for its errors."""
        if former is not None:
            former.check_pending()
            former.release()
        state = self.state
        batches = self.batches
        guard = self.checks.guard
        tracer = self.recorder.tracer
        parameters = find_parameters(state)
        check_trainable(parameters, state)
        check_layout(find_tensors(state), self.world)
        self.checks.no_effect.begin(parameters.values())
        modules = find_modules(state)
        fold = self.new_fold(
            modules,
            parameters,
            self.world,
            shards=batches.shards,
            announced=batches.announced,
            carried=batches.division.carried,
            guard=None if guard.allows else guard,
            scalers=enabled_scalers(state),
            events=self,
            averaged=_averaged(state),
            watch=None if tracer is None else tracer.backward,
            former=former,
        )
        check_synced(batches, find_sync_channels(modules.values()))
        return fold

    def release(self) -> None:
        """Remove all hooks from the model, and `found_inf` from the optimizers."""
        self.checks.guard.release()
        self.fold.release()

    def make_equal(self) -> None:
        """Give every rank rank 0's parameters and buffers, or raise where they differ. Every rank must call this."""
        for scaler in enabled_scalers(self.state):  # else it has no scale on a rank without a shard in the first step
            if scaler._scale is None:
                scaler.scale(torch.zeros((), device=self.world.device))
        tensors = find_tensors(self.state)
        check_structure(tensors, self.world)
        self.world.broadcast_all([*tensors.values()])

    def keep_streams(self, before: tuple[Any, ...]) -> None:
        """Keep the generators' restored states for a resumed run's first step, and set them as they were before.

        Until then lines of the script draw the numbers that they drew in the run's first process.
        """
        self.resumed_streams = streams(self.world.device)
        restore_streams(before)

    def begin_steps(self) -> None:
        """Give the generators the states that they had after the step from which a run resumes."""
        if self.resumed_streams is not None:
            restore_streams(self.resumed_streams)
            self.resumed_streams = None

    def replace(self, new: Mapping[str, torch.Tensor]) -> None:
        """Give every rank rank 0's values of new parameters and buffers, and fold them. Every rank must call this.

        Raises:
            ValueError: the structure differs between ranks.
        """
        check_structure(find_tensors(self.state), self.world, "modules and parameters that are new in state")
        self.world.broadcast_all([*new.values()])
        self.fold = self._make_fold(self.fold)

    def use_shares(self) -> None:
        """Read and fold as the mini-batches are divided now, if they have got shares. Every rank must call this."""
        shares = self.checks.shares
        if shares.found is not None:
            shares.division.give(shares.found)
            shares.found = None
        if shares.used != shares.division.shares:
            shares.used = shares.division.shares
            self.recorder.record_shares(self.batches.shares or ())
            self.ahead.restart(self.where.epochs + 1, self.where.at)
            self.fold = self._make_fold(self.fold)  # fixed shards have moved to other ranks

    # -- in a fold: `FoldEvents` ---------------------------------------------------------------------------

    def take_requests(self) -> ControlRequest:
        """This rank's requests to all in a fold; a problem found since the last one is reported once."""
        new = self.structure.changes()
        stops = self.world.stops
        stop = stops.asked_here is not None or stops.asked_outside is not None
        save = False
        problem: Exception | None = self.checks.state.found
        self.checks.state.found = None
        if (checkpointer := self.recorder.checkpointer) is not None:
            save = checkpointer.is_due
            problem = problem or checkpointer.problem()
        if new is not None:
            # Between steps all ranks get rank 0's new values. Now it is too late: the shards have used their own.
            what = f"{next(iter(new))} is new or was replaced in between" if new else "One was removed in between"
            problem = problem or RuntimeError(
                "The parameters and buffers of state must stay the same ones from a step's first shard to its fold. "
                f"{what}, perhaps in a forward. Make it before the Loop, by one forward on a sample, or between two "
                "steps."
            )
        elif self.structure.late and (name := self.structure.changed_late_buffer()) is not None:
            problem = problem or RuntimeError(
                "A buffer that a forward changes must be there before the Loop, which combines what the shards make of "
                f"it. {name} was made later. Register it with its first value, or run one forward on a sample before."
            )
        if not (stop or save or self.announces) and problem is None:
            return NO_REQUEST
        return ControlRequest(stop, save, problem)

    def while_reducing(self) -> None:
        """Hand on earlier rows, take the next mini-batch, and start the streams for the lines after the fold."""
        if self.recorder.has_rows:
            self.recorder.flush_ready()
        iteration = self.where.iteration
        world = self.world
        if iteration != self.where.most_steps:
            world.stage = "data"
            world.step = iteration + 1
            self.ahead.read()
            world.stage = "fold"
            world.step = iteration
        seed_step(self.seed, iteration, world.device, self.passes)
