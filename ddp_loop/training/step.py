"""One step: this rank's shards of a mini-batch, a backward for each, and the fold that makes them one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch

from ddp_loop.accelerators import is_asynchronous
from ddp_loop.data import LoadedBatch, MiniBatch, check_end
from ddp_loop.determinism import Leaf, seed_shard, seed_step
from ddp_loop.distributed import PeerFailed, World
from ddp_loop.tracing import Tracer
from ddp_loop.training.fold import Fold
from ddp_loop.training.gather import BatchGather, HeldOutputs, check_outputs
from ddp_loop.training.payload import Folded, ShardRecord, StepResult
from ddp_loop.training.validation import Reduction, Sum, Value, Weight, as_metric, check_loss, check_names, check_weight


class _LeftLoop(RuntimeError):
    """This rank makes no further step."""


def _same(one: Weight | None, other: Weight | None) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return is_asynchronous(one) or bool(one == other)  # on a GPU asking would hold the host up
    return type(one) is type(other) and one == other


class Step:
    """One step of a `Loop`: go through it for this rank's shards, `backward` for each, then `fold`.

    Going through it again after `fold` is another pass over the same shards, for a closure or a second network.

    Attributes:
        epoch, iteration: counted from 1; the iteration goes on from epoch to epoch.
        samples: R, of the mini-batch over all ranks.
        is_last_of_epoch: whether it is the epoch's last.
    """

    def __init__(
        self,
        fold: Fold,
        gathering: BatchGather,
        world: World,
        loaded: LoadedBatch,
        iteration: int,
        is_last_of_epoch: bool,
        begin: Callable[[], Fold],
        meanwhile: Callable[[], None],
        report: Callable[[Step, MiniBatch, Folded], None],
        tracer: Tracer | None = None,
    ) -> None:
        self.epoch = loaded.mini_batch.epoch + 1
        self.iteration = iteration
        self.samples = loaded.mini_batch.samples
        self.is_last_of_epoch = is_last_of_epoch
        self._fold, self._gathering, self._world, self._loaded = fold, gathering, world, loaded
        self._call_begin, self._meanwhile, self._call_report = begin, meanwhile, report
        self._tracer = tracer
        self._record: ShardRecord | None = None
        self._empty: ShardRecord | None = None
        self._open = False
        self._broken = False  # a fold raised: the ranks may be at different places
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        if self._open:
            raise RuntimeError(
                f"each pass over the shards ends with fold(); step {self.iteration} was gone through again before it: "
                "call step.fold() first"
            )
        self._begin()
        for number, shard in enumerate(self._loaded.mini_batch.shards):
            self._world.stage = "data"
            data = self._loaded.data(number)
            if self._tracer is not None:
                self._tracer.data(shard.number, data)
            seed_shard(self._world.seed, self.iteration, shard.number, self._world.device, self.passes)
            record = self._fold.open_shard(shard)
            self._record = record
            self._world.stage = "forward"
            try:
                yield data
            finally:
                self._record = None
                self._fold.close_shard(record, graph_goes_on=self._gathering.holds(shard))
        if self._fold.sync_channels and not self._loaded.mini_batch.shards:
            yield from self._without_samples()

    def _without_samples(self) -> Iterator[Any]:
        """Tensors of no rows, since a rank without a shard takes part in synced batch norm; nothing of it counts."""
        self._empty = self._record = self._fold.open_without_samples()
        self._world.stage = "data"
        nothing = self._loaded.nothing()
        self._world.stage = "forward"
        try:
            yield nothing
        finally:
            self._record = None
            self._fold.close_shard(self._empty, graph_goes_on=self._gathering.holds(self._empty.shard))

    def _begin(self) -> None:
        self._open, self._empty = True, None
        self._fold = self._call_begin()
        self._fold.open(0 if self.passes else self.iteration)
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
        """Backpropagate the loss of the shard at hand, by its share of the mini-batch; after `gather`, that of all.

        Of a loss that is a mean, the mini-batch's gradient is sum_s(w_s g_s) / sum_s(w_s), g_s being that of shard s.
        Its loss is scaled by w_s / R before backward, R the mini-batch's samples: exactly 1 for one shard. Of a loss
        that is a sum, the gradient is sum_s(g_s), and nothing is divided, as in torch.

        A loss is a mean if it stays the same when each sample is there twice, and a sum if it doubles.

        Args:
            loss: shape (); of the shard at hand.
            weight: w_s, what the mean is over: by default the shard's samples; the number of tokens, say. Of a
                loss that is a sum it weighs the metrics alone. A shard of weight 0 adds exactly 0, whatever its loss.
            reduction: "mean", or "sum" for a loss that is a sum over the shard.
            more_losses: another loss of the same shard follows, in a further `backward`; the losses add up.
            metrics: by name, each one value (the shard's mean) or one per sample, shape (n,), whose plain mean
                is taken. Over the shards they are weighted as a mean loss is: with a weight of your own give the
                shard's weighted mean. A `Sum` is added up instead.

        Raises:
            RuntimeError: no shard is at hand, or it had its last backward.
            ValueError: a loss that is no scalar or needs no gradient, a bad weight or metric, or losses of one shard
                with different weights or reductions.
        """
        record = self._record
        self._world.stage = "backward"
        if record is None and self._gathering.whole is not None:
            self._backward_whole(loss, metrics, plain=weight is None and reduction == "mean" and not more_losses)
            return
        if record is None or record.done:
            why = (
                "is outside of `for ... in step`"
                if record is None
                else "is its second: say more_losses=True in the first"
            )
            raise RuntimeError(f"step.backward is called once for each shard; this call {why}")
        loss = self._check_first(record, loss)
        if record is self._empty:
            self._fold.statistics.discard()
            self._fold.gradients.backward_empty(loss, more=more_losses)
            record.done = not more_losses
            return
        size = self._record_values(record, loss, check_weight(weight), reduction, metrics)
        self._go_back(record, loss, size, reduction, more=more_losses)

    def _go_back(self, record: ShardRecord, loss: torch.Tensor, size: Weight, reduction: str, *, more: bool) -> None:
        """Backpropagate a loss of weight `size` by its share."""
        record.failed = True  # until it has not
        last = not more and record.shard is self._loaded.mini_batch.shards[-1]
        self._fold.statistics.discard()
        if self._fold.sync_channels and not isinstance(size, torch.Tensor) and size == 0:
            size = torch.zeros(())  # masked, not left out: in its backward ranks talk
        if isinstance(size, torch.Tensor) or size != 0:
            factor = self._factor(size, reduction)
            with self._fold.masking(factor) if self._fold.sync_channels else nullcontext():
                self._fold.gradients.backward(loss, factor, last=last, more=more)
        elif not more:
            self._fold.gradients.pass_by()
        record.done, record.failed = not more, False
        self._fold.statistics.go_on(record.captures)

    @staticmethod
    def _check_first(record: ShardRecord, loss: torch.Tensor) -> torch.Tensor:
        if record.failed:
            raise RuntimeError(
                f"a shard's backward is made once; that of shard {record.shard.number} raised, and may have left parts "
                "of its gradients: leave the loop, or take smaller shards"
            )
        return check_loss(loss)

    def _record_values(
        self, record: ShardRecord, loss: torch.Tensor, weight: Weight | None, reduction: str, metrics: dict[str, Value]
    ) -> Weight:
        """Keep what a shard was given with; returns its weight."""
        if reduction not in ("mean", "sum"):
            raise ValueError(f'reduction must be "mean" or "sum"; got {reduction!r}')
        check_names(metrics)
        if record.losses and not _same(weight, record.weight):
            raise ValueError(
                f"all losses of a shard have the same weight; got {weight} after {record.weight}: put a factor into "
                "the loss itself"
            )
        sums = record.sums
        if sums or any(isinstance(metric, Sum) for metric in metrics.values()):
            summed = {name for name, metric in metrics.items() if isinstance(metric, Sum)}
            sums = sums.difference(metrics) | summed
        if record.losses and ("loss" in record.sums) != (reduction == "sum"):
            raise ValueError(
                f"All losses of a shard must have the same reduction. Got {reduction!r} after another one. Divide the "
                "sum by what it is over, or multiply the mean by it."
            )
        samples = record.shard.samples
        size = samples if weight is None else weight
        for name, metric in metrics.items():
            record.metrics[name] = as_metric(name, metric, samples, loss.device)
        record.losses.append(self._fold.unscaled(loss))
        record.weight, record.sums = weight, sums | {"loss"} if reduction == "sum" else sums
        if self._tracer is not None:
            said: dict[str, Leaf] = {"loss": record.losses[-1], "weight": float(size), **record.metrics}
            self._tracer.forward(record.shard.number, said)
        return size

    def hold(self, *outputs: torch.Tensor) -> None:
        """Keep outputs of the shard at hand for a loss of the whole mini-batch; instead of `backward`.

            for images, labels in step:
                step.hold(model(images), labels)
            embeddings, labels = step.gather()  # of the whole mini-batch, on every rank
            step.backward(contrastive(embeddings, labels))
            result = step.fold()

        Args:
            outputs: with a row per sample each, (n, ...); their graphs are kept until the backward.

        Raises:
            RuntimeError: no shard is at hand, or it has held outputs or had its backward before.
            ValueError: something else than rows.
        """
        record = self._record
        if record is None or record.done or record.losses or self._gathering.holds(record.shard):
            raise RuntimeError(
                "step.hold is called once for each shard, instead of step.backward; this call "
                + ("is outside of `for ... in step`" if record is None else "comes after another one")
            )
        taken = check_outputs(outputs, record.shard.samples)
        # Autograd refuses to go back through what was written since; what has no graph may be written again.
        taken = tuple(one if one.requires_grad else one.detach().clone() for one in taken)
        self._gathering.held.append(HeldOutputs(record.shard, taken))
        if self._tracer is not None:
            self._tracer.forward(record.shard.number, {f"output {n}": one for n, one in enumerate(outputs)})

    def gather(self) -> Any:
        """What all shards held, side by side in the mini-batch's order, on every rank. Every rank must call this.

        The loss made of it must be the same on every rank, as it is if it follows from it alone; `backward` then takes
        it as that of the whole mini-batch. Random numbers drawn behind it are the same on every rank.

        Returns:
            (R, ...) for what each `hold` was given: a tensor, or a tuple of several.

        Raises:
            RuntimeError: a shard held nothing.
            ValueError: outputs that differ between shards in number, shape or dtype.
            PeerFailed: another rank has such a problem, or failed.
        """
        mini_batch = self._loaded.mini_batch
        if self._record is not None or self._gathering.whole is not None or (mini_batch.shards and not self._open):
            raise RuntimeError(
                "step.gather comes once, between the shards and the fold: after `for ... in step`, not inside of it"
            )
        problem = None
        if without := [shard.number for shard in mini_batch.shards if not self._gathering.holds(shard)]:
            problem = RuntimeError(
                f"step.gather needs what every shard holds; step {self.iteration} has nothing of {without} of its "
                f"{len(mini_batch.sizes)} shards: call step.hold for each, and step.backward only after step.gather"
            )
        if not self._open:
            self._begin()
        self._fold.check_alignment()
        self._world.stage = "gather"
        with self._fold.among_the_shards():
            whole = self._gathering.gather(mini_batch, problem, partial(check_end, world=self._world))
        seed_shard(self._world.seed, self.iteration, len(mini_batch.sizes), self._world.device, self.passes)
        return whole if len(whole) > 1 else whole[0]

    def _backward_whole(self, loss: torch.Tensor, metrics: dict[str, Value], *, plain: bool) -> None:
        if not plain:
            raise ValueError(
                "the loss after step.gather is that of the whole mini-batch, given once; it takes no weight, no "
                "reduction and no more_losses=: put them into the loss itself"
            )
        loss = check_loss(loss)
        check_names(metrics)
        value = self._fold.unscaled(loss)
        values = {name: as_metric(name, metric, self.samples, loss.device) for name, metric in metrics.items()}

        def go_back(one: torch.Tensor, *, more: bool, last: bool) -> None:
            with self._fold.recomputing():
                self._fold.gradients.backward(one, 1.0, last=last, more=more)

        def take_part(one: torch.Tensor) -> None:
            self._fold.gradients.backward_empty(one, more=True)

        self._gathering.backward(loss, go_back, self._fold.gradients.finish_shard, take_part)
        self._gathering.release()
        for record in (*self._fold.records, *([] if self._empty is None else [self._empty])):
            record.losses, record.metrics, record.done = [value], values, True

    def _factor(self, size: Weight, reduction: str) -> Weight:
        """What the loss is multiplied by: w_s / R of a mean, 1 of a sum and of an only shard; 0 where w_s is 0."""
        alone = reduction == "sum" or len(self._loaded.mini_batch.sizes) == 1
        if not isinstance(size, torch.Tensor):
            return 1.0 if alone else size / self.samples
        factor = torch.ones_like(size) if alone else size / self.samples  # in the weight's float64
        return torch.where(size > 0, factor, 0.0)

    def fold(self) -> StepResult:
        """Make `.grad`, statistics, buffers, loss and metrics those of the whole mini-batch. Every rank must call this.

        Returns:
            The step's result; its values are on the device and the same on every rank.

        Raises:
            RuntimeError: a shard had no backward, there was no pass over the shards since the last fold, or a
                parameter was written in between.
            ValueError: shards that differ in metrics, or in how they changed a buffer of the rule "same".
            FloatingPointError: the mini-batch's loss or a gradient is not finite; on a GPU one step later. On every
                rank.
            ReplicaMismatch: a rank's parameters, buffers or optimizer states became others; on a GPU one step later.
                On every rank.
            PeerFailed: another rank has such a problem, or failed.
        """
        problem = self._incomplete()
        if not self._open:
            self._begin()
        return self._close(problem)

    def leave(self, why: str) -> bool:
        """Say, before this rank's next collective, that it makes no further step; whether it will be said.

        Where all ranks leave together, nothing happens; those that fold instead raise PeerFailed. Not at once: a
        loop is also left by an exception, which shall be told itself.
        """
        if self._broken or self._world.is_left:
            return False
        tell = self._fold.leaving(len(self._loaded.mini_batch.sizes), _LeftLoop(why))
        if not self._open:
            self._gathering.open()  # the next pass had no word yet

        def tell_quietly() -> None:
            with suppress(_LeftLoop, PeerFailed):
                self._fold.leave(_LeftLoop(why))
                self._gathering.pass_over(_LeftLoop(why))
                tell()

        self._world.defer(tell_quietly)
        return True

    def require_folded(self) -> None:
        """Raise on every rank if this one is left without `fold`. Every rank must call this or `fold`."""
        if self._broken:
            return
        if self._open or not self.passes:
            if not self._open:
                self._begin()
            self._close(
                RuntimeError(
                    f"every step ends with step.fold(), before the next one begins; step {self.iteration} was left "
                    "without it: call it after the shards on every rank"
                )
            )

    def _incomplete(self) -> Exception | None:
        shards = self._loaded.mini_batch.shards
        if not self._open and (shards or self.passes):
            return RuntimeError(
                f"fold() comes after a pass over the shards; step {self.iteration} had none since its last fold: "
                "go through `for ... in step` first"
            )
        without = [shard.number for shard in shards[len(self._fold.records) :]] if self._open else []
        without = [record.shard.number for record in self._fold.records if not record.done] + without
        if self._empty is not None and not self._empty.done:
            return RuntimeError(
                "with synced batch norm step.backward is called also for the tensors of no rows that a rank without "
                f"samples is handed; step {self.iteration} left it out: call it whatever their length is"
            )
        if not self._open or not without:
            return None
        return RuntimeError(
            f"step.backward is called for every shard; step {self.iteration} left out {without} of its "
            f"{len(self._loaded.mini_batch.sizes)} shards (a `continue`, a `break`, an error that was caught?): "
            "call it for each, with weight=0 for one that is not to count"
        )

    def _use_the_wait(self) -> None:
        """While the sums are under way: whatever the loop has to do, then the streams of what follows the fold."""
        self._meanwhile()
        seed_step(self._world.seed, self.iteration, self._world.device)

    def _close(self, problem: Exception | None) -> StepResult:
        self._open = False
        self._broken = True
        self._world.stage = "fold"
        self._world.block_collectives(None)
        self._fold.check_alignment()
        self._gathering.pass_over()
        folded = self._fold.close(self._loaded.mini_batch, problem, self._use_the_wait, met=True)
        self._broken = False
        if self._tracer is not None:
            self._tracer.folded(folded.metrics, folded.values, self._fold.gradients.named())
        self.passes += 1
        self._call_report(self, self._loaded.mini_batch, folded)
        self._world.stage = "optimizer"
        return StepResult(self.epoch, self.iteration, self.samples, folded, self._fold.gradients)
