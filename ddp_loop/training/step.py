"""One step: this rank's shards of a mini-batch, a backward for each, and the fold that makes them one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch

from ddp_loop.batch_norm import ENDS_LOOP, CallMismatch
from ddp_loop.data import Batches, LoadedBatch, MiniBatch, check_end
from ddp_loop.determinism import Leaf, seed_shard
from ddp_loop.distributed import PeerFailed, World
from ddp_loop.tracing import Tracer
from ddp_loop.training.control import FoldEvents
from ddp_loop.training.fold import Fold
from ddp_loop.training.gather import BatchGather, HeldOutputs, check_outputs
from ddp_loop.training.payload import ShardRecord, StepResult, as_metric, loss_factor
from ddp_loop.training.share_measurement import ShareMeasurement
from ddp_loop.training.validation import (
    RESERVED_NAMES,
    Reduction,
    Value,
    Weight,
    bad_loss,
    check_weight,
    explain,
    reserved_names,
)


class _LeftLoop(RuntimeError):
    """This rank makes no further step."""


def _end_channels(fold: Fold, why: Exception) -> None:
    """Tell the synced layers of all ranks that this one leaves, and `why`. Every rank must call this or `end_pass`.

    Raises:
        CallMismatch: all leave, and ran synced layers in different orders before.
    """
    try:
        for channel in fold.sync_channels:
            channel.send_control(ENDS_LOOP)
    except RuntimeError as error:
        raise error if isinstance(error, CallMismatch) else why from None  # the other ranks know


class StepEvents(FoldEvents, Protocol):
    """What happens around a fold: implemented by `Loop`, given to each `Fold` and `Step`."""

    def before_pass(self, passes: int) -> Fold:
        """A pass over a step's shards begins, after so many others; returns its fold. Every rank must call this."""

    def after_fold(self, result: StepResult, mini_batch: MiniBatch, passes: int) -> None:
        """A pass was folded, after so many others of its step. Every rank must call this."""


class Epoch:
    """An epoch of a `Loop`, iterated once and to its end for its steps; made by `Loop.epochs`.

    Attributes:
        number: counted from 1, also in a run that resumes.
    """

    def __init__(self, number: int, steps: Callable[[int], Iterator[Step]], batches: Batches) -> None:
        self.number = number
        self._steps = steps
        self._batches = batches

    def __len__(self) -> int:
        """The number of steps of the whole epoch, those before a resume too; as `len(batches)`.

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
        is_broken: whether a fold raised, so that the ranks may be at different places.
    """

    def __init__(
        self,
        events: StepEvents,
        fold: Fold,
        gathering: BatchGather,
        world: World,
        loaded: LoadedBatch,
        iteration: int,
        meter: ShareMeasurement | None = None,
        *,
        is_last_of_epoch: bool,
        tracer: Tracer | None = None,
    ) -> None:
        self.epoch = loaded.mini_batch.epoch
        self.iteration = iteration
        self.samples = loaded.mini_batch.samples
        self.is_last_of_epoch = is_last_of_epoch
        self._events = events
        self._fold = fold
        self._gathering = gathering
        self._world = world
        self._loaded = loaded
        self._tracer = tracer
        self._meter = meter
        self._record: ShardRecord | None = None  # of the shard at hand
        self.passes = 0
        self.is_broken = False
        self._shards_read = 0
        self._is_read = False  # of a pass, and whether all are
        self._has_begun = False  # a backward or a hold

    def __iter__(self) -> Iterator[Any]:
        if self.is_open:
            raise RuntimeError(
                f"Each pass over the shards must end with fold(). Step {self.iteration} was iterated again before it. "
                "Call step.fold() first."
            )
        self._begin()
        if self._meter is not None:
            self._meter.begin_shards()
        world = self._world
        shards = self._loaded.mini_batch.shards
        for number, shard in enumerate(shards):
            world.stage = "data"
            data = self._loaded.data(number)
            self._shards_read = number + 1
            if self._tracer is not None:
                self._tracer.data(shard.number, data)
            seed_shard(world.seed, self.iteration, shard.number, world.device, self.passes)
            with self._fold.shard(shard) as self._record:
                world.stage = "forward"
                try:
                    yield data
                finally:
                    self._record = None
        if self._fold.sync_channels and not shards:
            with self._fold.shard(None) as self._record:
                world.stage = "data"
                nothing = self._loaded.nothing()
                world.stage = "forward"
                try:
                    yield nothing
                finally:
                    self._record = None
        self._is_read = True
        if self._meter is not None and self.passes == 0:
            self._meter.end_shards(self._loaded.mini_batch)

    @property
    def is_open(self) -> bool:
        """Whether a pass of this step, and not of another one, is between its first shard and its fold."""
        return self._fold.opened_by is self

    def _begin(self) -> None:
        self._fold = self._events.before_pass(self.passes)
        if self._fold.opened_by not in (None, self):
            raise RuntimeError(
                f"Only the newest step of a loop can be iterated and folded. Step {self.iteration} is over, and a pass "
                "of another one is open. Use the step that the loop gave last."
            )
        torch.clear_autocast_cache()  # a forward of the script's between fold and update kept the weights before it
        self._fold.open(self, gathers=self._gathering.is_used)
        if self._gathering.is_used:
            self._gathering.open()
        if self._tracer is not None:
            self._tracer.begin(self._loaded.mini_batch, self.passes)

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

        A mean loss gives the mini-batch's gradient sum_s(w_s g_s) / sum_s(w_s), with g_s that of shard s. Its loss is
        scaled by w_s / R before backward, R the mini-batch's samples: exactly 1 for one shard. A sum gives sum_s(g_s)
        without any division, as in torch. If each sample came twice, a mean would stay the same and a sum would double.

        Args:
            loss: shape (); of the current shard.
            weight: w_s, what the mean is over: by default the shard's samples; for instance its tokens. With a sum
                it weights the metrics alone. A shard of weight 0 adds exactly 0, whatever its loss.
            reduction: "mean", or "sum" for a loss that is a sum over the shard.
            more_losses: whether another `backward` of the same shard follows; the losses add up.
            metrics: by name, each one value, the shard's mean, or one per sample, shape (n,), which are averaged. Over
                the shards they are weighted like a mean loss: with your own weight pass the shard's weighted mean. A
                `Sum` is added up instead.

        Raises:
            RuntimeError: outside of a shard, or after its last backward.
            ValueError: a loss that is no scalar or needs no gradient, a bad weight or metric, or losses of one shard
                with different weights or reductions.
        """
        record, self._world.stage, self._has_begun = self._record, "backward", True
        if record is None and self._gathering.whole is not None:
            self._backward_whole(loss, metrics, plain=weight is None and reduction == "mean" and not more_losses)
            return
        if record is None or record.done:
            again = "a second time. Pass more_losses=True in the first call"
            why = "outside of `for ... in step`" if record is None else again
            raise RuntimeError(f"step.backward must be called once for each shard. It was called {why}.")
        if record.failed:
            raise RuntimeError(
                f"A shard's backward cannot be repeated. That of shard {record.shard.number} raised, and may have left "
                "parts of its gradients. Leave the loop, or use smaller shards."
            )
        if not (isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.requires_grad):
            raise bad_loss(loss)
        if not (mini_batch := self._loaded.mini_batch).shards:
            self._fold.backward_empty(loss, more=more_losses)
            return
        if reduction not in ("mean", "sum"):
            raise ValueError(f'reduction must be "mean" or "sum". Got {reduction!r}.')
        weight = None if weight is None else check_weight(weight)
        value = self._fold.unscaled(loss) if self._fold.scalers else loss.detach().clone()
        size = record.add(value, weight, reduction, metrics)
        if self._tracer is not None:
            said: dict[str, Leaf] = {"loss": record.losses[-1], "weight": float(size), **record.metrics}
            self._tracer.forward(record.shard.number, said, record.sums)
        last = not more_losses and record.shard is mini_batch.shards[-1]
        factor = loss_factor(size, self.samples, alone=reduction == "sum" or len(mini_batch.sizes) == 1)
        self._fold.backward(record, loss, factor, last=last, more=more_losses)

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
        taken = check_outputs(outputs, record.shard.samples)
        # Autograd refuses outputs that were written later; those without a graph may be reused.
        taken = tuple(one if one.requires_grad else one.detach().clone() for one in taken)
        self._gathering.hold(HeldOutputs(record.shard, taken))
        record.held = True
        record.modes = self._fold.modes()
        if self._tracer is not None:
            self._tracer.forward(record.shard.number, {f"output {n}": one for n, one in enumerate(outputs)})

    def gather(self) -> Any:
        """The held outputs of all shards in the mini-batch's order, on every rank. Every rank must call this.

        A loss computed from them alone is the same on every rank; `backward` takes it as that of the whole mini-batch.
        Random numbers drawn after `gather` are the same on every rank.

        Returns:
            (R, ...) for each output of `hold`: a tensor, or a tuple of several.

        Raises:
            RuntimeError: a shard held nothing.
            ValueError: outputs that differ between shards in number, shape or dtype.
            PeerFailed: another rank has such a problem, or failed.
        """
        mini_batch = self._loaded.mini_batch
        is_open = self.is_open
        if self._record is not None or self._gathering.whole is not None or (mini_batch.shards and not is_open):
            raise RuntimeError(
                "step.gather must be called once, between the shards and the fold. Call it after `for ... in step`, "
                "not inside of it."
            )
        problem = None
        if without := [shard.number for shard in mini_batch.shards if not self._gathering.holds(shard)]:
            problem = RuntimeError(
                f"step.gather needs held outputs of every shard. Step {self.iteration} has none of {without} of its "
                f"{len(mini_batch.sizes)} shards. Call step.hold for each, and step.backward only after step.gather."
            )
        self._gathering.is_used = True
        if not is_open:
            self._begin()
        with self._fold.between_shards():
            self._world.stage = "gather"
            whole = self._gathering.gather(mini_batch, problem, partial(check_end, world=self._world))
        seed_shard(self._world.seed, self.iteration, len(mini_batch.sizes), self._world.device, self.passes)
        return whole if len(whole) > 1 else whole[0]

    def _backward_whole(self, loss: torch.Tensor, metrics: dict[str, Value], *, plain: bool) -> None:
        if not plain:
            raise ValueError(
                "The loss after step.gather is that of the whole mini-batch, passed once. It takes no weight, no "
                "reduction and no more_losses=. Put them into the loss itself."
            )
        if not (isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.requires_grad):
            raise bad_loss(loss)
        if not RESERVED_NAMES.isdisjoint(metrics):
            raise reserved_names(metrics)
        value = self._fold.unscaled(loss)
        values = {name: as_metric(name, metric, self.samples, loss.device) for name, metric in metrics.items()}
        self._gathering.backward(loss, self._fold)
        self._gathering.release()
        self._fold.finish_held(value, values)

    def fold(self) -> StepResult:
        """Make `.grad`, statistics, buffers, loss and metrics those of the whole mini-batch. Every rank must call this.

        A `.grad` that the script keeps stays as it is, as in a plain loop. A view of it is written by the next pass and
        must be copied:

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
        return self._close()

    def explainer(self, *, skips: bool) -> Callable[[BaseException], None]:
        """Adds the remedy to an error by which the script leaves this step; see `explain`.

        Args:
            skips: whether steps are skipped without a GradScaler.
        """
        taken_for_data = not self._has_begun and (self._is_read or self._shards_read != 1)
        return partial(explain, taken_for_data=taken_for_data, all_read=self._is_read, skips=skips)

    def leave(self, why: str, fold: Fold) -> bool:
        """Tell the peers, before this rank's next collective, that it makes no further step; returns whether it will.

        Where all ranks leave together, nothing happens; those that fold instead raise PeerFailed. The message is
        deferred, since the loop may be left by an exception, which comes first. `fold` is that of the next pass.
        """
        control = fold.control
        if self.is_broken or (control is not None and control.has_raised) or self._world.is_left:
            return False
        world = self._world
        send_no_gather = self._gathering.send_no_gather
        send_nothing = fold.leaving(len(self._loaded.mini_batch.sizes), gathers=self._gathering.is_used)
        if not self.is_open and self._gathering.is_used:
            self._gathering.open()  # the next pass has sent no word yet

        def tell() -> None:
            world.block_collectives(None)
            error = _LeftLoop(why)
            with suppress(_LeftLoop, PeerFailed):
                _end_channels(fold, error)
                send_no_gather(error)
                send_nothing()
                world.raise_if_any_failed(error)

        world.defer(tell)
        return True

    def meet(self, fold: Fold) -> None:
        """Find a peer that left this step, before the next one has another fold. Every rank must call this, or `leave`.

        Raises:
            PeerFailed: another rank left the loop.
        """
        if self._gathering.is_used:
            self._gathering.open()
            self._gathering.send_no_gather()
        fold.leaving(len(self._loaded.mini_batch.sizes), gathers=self._gathering.is_used)()
        self._world.raise_if_any_failed(None)

    def require_folded(self) -> None:
        """Raise on every rank if this one has not folded the step. Every rank must call this or `fold`."""
        if not self.is_broken and (self.is_open or not self.passes):
            self._close(
                RuntimeError(
                    f"Every step must end with step.fold(), before the next one begins. Step {self.iteration} was left "
                    "without it. Call it after the shards, on every rank."
                )
            )

    def _incomplete(self) -> Exception | None:
        shards = self._loaded.mini_batch.shards
        if not self.is_open:
            if not shards and not self.passes:
                return None
            return RuntimeError(
                f"fold() must come after a pass over the shards. Step {self.iteration} had none since its last fold. "
                "Iterate over it first, `for ... in step`."
            )
        without = self._fold.unfinished(shards)
        if not shards and without:
            return RuntimeError(
                "With synced batch norm step.backward must also be called for the tensors without rows that a rank "
                f"without samples receives. Step {self.iteration} left it out. Call it whatever their length."
            )
        if not without:
            return None
        if not self._has_begun and self._fold.named_gradients():
            return RuntimeError(
                "step.backward(loss) must be called for every shard, since it weights the shard's loss. Step "
                f"{self.iteration} has gradients of another backward alone. Replace loss.backward() by "
                "step.backward(loss)."
            )
        return RuntimeError(
            f"step.backward must be called for every shard. Step {self.iteration} left out {without} of its "
            f"{len(self._loaded.mini_batch.sizes)} shards (a `continue`, a `break`, an error that was caught?). "
            "Call it for each, with weight=0 for one that is not to count."
        )

    def _close(self, problem: Exception | None = None) -> StepResult:
        problem = problem or self._incomplete()
        if not self.is_open:
            self._begin()
        fold = self._fold
        mini_batch = self._loaded.mini_batch
        self.is_broken = True
        self._world.stage = "fold"
        if self._gathering.is_used:
            fold.end_pass()
            self._gathering.send_no_gather()
        result = fold.close(mini_batch, self.iteration, problem)
        self.is_broken = False
        if self._tracer is not None:
            self._tracer.folded(result.names, result.values, fold.named_gradients())
        torch.clear_autocast_cache()  # an update follows, and autocast around the loop would keep the weights before it
        self.passes += 1
        self._events.after_fold(result, mini_batch, self.passes - 1)
        self._world.stage = "optimizer"
        return result
