"""One step: this rank's shards of a mini-batch, a backward for each, and the fold that makes them one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any, Literal

import torch

from ddp_loop.batches import Loaded
from ddp_loop.determinism import seed_shard, seed_step
from ddp_loop.digests import Leaf
from ddp_loop.folding import Fold
from ddp_loop.gathering import Gathering, Held, check_outputs
from ddp_loop.records import Folded, Record
from ddp_loop.row import Row
from ddp_loop.shards import MiniBatch
from ddp_loop.tracing import Tracer
from ddp_loop.values import Value, Weight, as_mean, check_loss, check_names, check_weight
from ddp_loop.words import PeerFailed
from ddp_loop.world import World


class _Left(RuntimeError):
    """This rank makes no further step."""


def _same(one: Weight | None, other: Weight | None) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.device.type != "cpu" or bool(one == other)  # on a GPU asking would hold the host up
    return type(one) is type(other) and one == other


class Step:
    """One step of a `Loop`: go through it for this rank's shards, `backward` for each, then `fold`.

    Going through it again after `fold` is another pass over the same shards, for a closure or a second network.

    Attributes:
        epoch, iteration: counted from 1; the iteration goes on from epoch to epoch.
        observations: R, of the mini-batch over all ranks.
        ends_epoch: whether it is the epoch's last.
    """

    def __init__(
        self,
        fold: Fold,
        gathering: Gathering,
        world: World,
        loaded: Loaded,
        iteration: int,
        ends_epoch: bool,
        begin: Callable[[], None],
        meanwhile: Callable[[], None],
        report: Callable[[Step, MiniBatch, Folded], None],
        tracer: Tracer | None = None,
    ) -> None:
        self.epoch = loaded.mini_batch.epoch + 1
        self.iteration = iteration
        self.observations = loaded.mini_batch.observations
        self.ends_epoch = ends_epoch
        self._fold, self._gathering, self._world, self._loaded = fold, gathering, world, loaded
        self._call_begin, self._meanwhile, self._call_report = begin, meanwhile, report
        self._tracer = tracer
        self._record: Record | None = None
        self._empty: Record | None = None
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
        if self._fold.talks and not self._loaded.mini_batch.shards:
            yield from self._without_observations()

    def _without_observations(self) -> Iterator[Any]:
        """Tensors of no rows, since a rank without a shard takes part in synced batch norm; nothing of it counts."""
        self._empty = self._record = self._fold.open_without_observations()
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
        self._call_begin()
        self._fold.open()
        self._gathering.open()
        if self._tracer is not None:
            self._tracer.begin(self._loaded.mini_batch, self.passes)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        weight: Weight | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        more: bool = False,
        **metrics: Value,
    ) -> None:
        """Backpropagate the loss of the shard at hand, by its share of the mini-batch; after `gather`, that of all.

        The gradient of the mini-batch is sum_s(w_s g_s) / sum_s(w_s), g_s being that of shard s's mean loss.
        The loss is scaled by w_s / R before backward, R the mini-batch's observations: exactly 1 for one shard.

        Args:
            loss: shape (); the shard's mean, or with `reduction="sum"` its sum.
            weight: w_s, what the mean is over: by default the shard's observations; the number of tokens,
                say. A shard of weight 0 adds exactly 0, whatever its loss.
            reduction: "mean", or "sum" where `loss` is a sum over what `weight` counts.
            more: another loss of the same shard follows, in a further `backward`; the losses add up.
            metrics: by name, each one value (the shard's mean) or one per observation, shape (n,), whose plain mean
                is taken. Over the shards they are weighted as the loss is: with a weight of your own give the
                shard's weighted mean.

        Raises:
            RuntimeError: no shard is at hand, or it had its last backward.
            ValueError: a loss that is no scalar or needs no gradient, a bad weight or metric.
        """
        record = self._record
        self._world.stage = "backward"
        if record is None and self._gathering.whole is not None:
            self._backward_whole(loss, metrics, plain=weight is None and reduction == "mean" and not more)
            return
        if record is None or record.done:
            why = "is outside of `for ... in step`" if record is None else "is its second: say more=True in the first"
            raise RuntimeError(f"step.backward is called once for each shard; this call {why}")
        loss = self._check_first(record, loss)
        if record is self._empty:
            self._fold.statistics.discard()
            self._fold.gradients.backward_for_the_others(loss, more=more)
            record.done = not more
            return
        size = self._note(record, loss.detach(), check_weight(weight), reduction, metrics)
        record.failed = True  # until it has not
        last = not more and record.shard is self._loaded.mini_batch.shards[-1]
        self._fold.statistics.discard()
        if self._fold.talks and not isinstance(size, torch.Tensor) and size == 0:
            size = torch.zeros(())  # masked, not left out: in its backward ranks talk
        if isinstance(size, torch.Tensor) or size != 0:
            factor = self._factor(size, reduction)
            with self._fold.masking(factor) if self._fold.talks else nullcontext():
                self._fold.gradients.backward(loss, factor, last=last, more=more)
        elif not more:
            self._fold.gradients.leave_out()
        record.done, record.failed = not more, False
        if more:
            self._fold.statistics.go_on(record.captures)

    @staticmethod
    def _check_first(record: Record, loss: torch.Tensor) -> torch.Tensor:
        if record.failed:
            raise RuntimeError(
                f"a shard's backward is made once; that of shard {record.shard.number} raised, and may have left parts "
                "of its gradients: leave the loop, or take smaller shards"
            )
        return check_loss(loss)

    def _note(
        self, record: Record, value: torch.Tensor, weight: Weight | None, reduction: str, metrics: dict[str, Value]
    ) -> Weight:
        """Keep what a shard was given with; returns what its loss is a mean over, or a sum."""
        if reduction not in ("mean", "sum"):
            raise ValueError(f'reduction must be "mean" or "sum"; got {reduction!r}')
        check_names(metrics)
        if record.losses and not _same(weight, record.weight):
            raise ValueError(
                f"all losses of a shard have the same weight; got {weight} after {record.weight}: put a factor into "
                "the loss itself"
            )
        observations = record.shard.observations
        size = observations if weight is None else weight
        for name, metric in metrics.items():
            record.metrics[name] = as_mean(name, metric, observations, value)
        record.losses.append(value if reduction == "mean" else value / size)
        record.weight = weight
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
            row = step.fold()

        Args:
            outputs: with a row per observation each, (n, ...); their graphs are kept until the backward.

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
        self._gathering.held.append(Held(record.shard, check_outputs(outputs, record.shard.observations)))
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
        self._fold.meet()
        self._world.stage = "gather"
        with self._fold.among_the_shards():
            whole = self._gathering.gather(mini_batch, problem, self._fold.check_end)
        seed_shard(self._world.seed, self.iteration, len(mini_batch.sizes), self._world.device, self.passes)
        return whole if len(whole) > 1 else whole[0]

    def _backward_whole(self, loss: torch.Tensor, metrics: dict[str, Value], *, plain: bool) -> None:
        if not plain:
            raise ValueError(
                "the loss after step.gather is that of the whole mini-batch, given once; it takes no weight, no "
                "reduction and no more=: put them into the loss itself"
            )
        loss = check_loss(loss)
        check_names(metrics)
        value = loss.detach()
        means = {name: as_mean(name, metric, self.observations, value) for name, metric in metrics.items()}

        def go_back(one: torch.Tensor, *, more: bool, last: bool) -> None:
            with self._fold.recomputing():
                self._fold.gradients.backward(one, 1.0, last=last, more=more)

        def take_part(one: torch.Tensor) -> None:
            self._fold.gradients.backward_for_the_others(one, more=True)

        self._gathering.backward(loss, go_back, self._fold.gradients.leave_out, take_part)
        self._gathering.release()
        for record in (*self._fold.records, *([] if self._empty is None else [self._empty])):
            record.losses, record.metrics, record.done = [value], means, True

    def _factor(self, size: Weight, reduction: str) -> Weight:
        """What the loss is multiplied by: w_s / R of a mean, 1 / R of a sum; of an only shard 1, 1 / w_s."""
        whole = size if len(self._loaded.mini_batch.sizes) == 1 else self.observations
        if not isinstance(size, torch.Tensor):
            return (size if reduction == "mean" else 1) / whole
        factor = (size if reduction == "mean" else torch.ones_like(size)) / whole  # in the weight's float64
        return torch.where(size > 0, factor, 0.0)

    def fold(self) -> Row:
        """Make `.grad`, statistics, buffers, loss and metrics those of the whole mini-batch. Every rank must call this.

        Returns:
            The row; its values are on the device and the same on every rank.

        Raises:
            RuntimeError: a shard had no backward, there was no pass over the shards since the last fold, or a
                parameter was written in between.
            ValueError: shards that differ in metrics, or in how they changed a buffer of the rule "same".
            FloatingPointError: the mini-batch's loss or a gradient is not finite; on a GPU one step later. On every
                rank.
            ReplicasDiffer: a rank's parameters, buffers or optimizer states became others; on a GPU one step later.
                On every rank.
            PeerFailed: another rank has such a problem, or failed.
        """
        problem = self._incomplete()
        if not self._open:
            self._begin()
        return self._close(problem)

    def leave(self, why: str) -> None:
        """Say, before this rank's next collective, that it makes no further step.

        Where all ranks leave together, nothing happens; those that fold instead raise PeerFailed. Not at once: a
        loop is also left by an exception, which shall be told itself.
        """
        if self._broken or self._world.is_left:
            return
        tell = self._fold.leaving(len(self._loaded.mini_batch.sizes), _Left(why))
        if not self._open:
            self._gathering.open()  # the next pass had no word yet

        def tell_quietly() -> None:
            with suppress(_Left, PeerFailed):
                self._fold.leave(_Left(why))
                self._gathering.pass_over(_Left(why))
                tell()

        self._world.owe(tell_quietly)

    def demand_fold(self) -> None:
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
                f"observations is handed; step {self.iteration} left it out: call it whatever their length is"
            )
        if not self._open or not without:
            return None
        return RuntimeError(
            f"step.backward is called for every shard; step {self.iteration} left out {without} of its "
            f"{len(self._loaded.mini_batch.sizes)} shards (a `continue`, a `break`, an error that was caught?): "
            "call it for each, with weight=0 for one that is not to count"
        )

    def _close(self, problem: Exception | None) -> Row:
        self._open = False
        self._broken = True
        self._world.stage = "fold"
        self._world.set_busy(None)
        self._fold.meet()
        self._gathering.pass_over()
        folded = self._fold.close(self._loaded.mini_batch, problem, self._meanwhile, met=True)
        self._broken = False
        if self._tracer is not None:
            self._tracer.folded(folded, self._fold.gradients.named())
        self.passes += 1
        seed_step(self._world.seed, self.iteration, self._world.device)
        self._call_report(self, self._loaded.mini_batch, folded)
        self._world.stage = "optimizer"
        return Row(self.epoch, self.iteration, self.observations, folded, self._fold.gradients)
