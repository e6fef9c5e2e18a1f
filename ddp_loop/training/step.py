"""One step: this rank's shards of a mini-batch, a backward for each, and the fold that makes them one.

Beside it what all steps of a loop have in common: what they train, what is asked in each fold, what checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ddp_loop.batch_norm import ENDS_LOOP, CallMismatch, find_sync_channels
from ddp_loop.data import Batches, LoadedBatch, LoopPosition, ReadAhead
from ddp_loop.determinism import Leaf, seed_shard, seed_step
from ddp_loop.distributed import (
    PeerFailed,
    check_layout,
    check_structure,
    each_module,
    find_modules,
    find_parameters,
    find_tensors,
)
from ddp_loop.training.checks import NEVER, StepChecks
from ddp_loop.training.control import NO_REQUEST, ControlRequest
from ddp_loop.training.fold import Fold
from ddp_loop.training.gather import BatchGather, GatherAgreement
from ddp_loop.training.recorder import RunRecorder
from ddp_loop.training.rows import ShardRecord, StepResult, as_metric
from ddp_loop.training.validation import (
    REFUSED_NAMES,
    Reduction,
    Value,
    Weight,
    bad_loss,
    check_synced,
    check_trainable,
    check_weight,
    enabled_scalers,
    explain,
    parts_of,
    reserved_names,
)

_VALUES = methodcaller("values")  # those of a scripted module are no dicts
_PARAMS = itemgetter("params")


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
        why = "outside of `for ... in step`"
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
                seed_shard(world.seed, self.iteration, shard.number, world.device, self.passes)
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
        job.announces = mini_batch.announcement is not None and mini_batch.announcement.is_new
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
            weight: w_s, the number of terms in the mean: by default the shard's samples; for instance its tokens. With
                a sum it weights the metrics alone. A shard of weight 0 adds exactly 0, for any loss.
            reduction: "mean", or "sum" for a loss that is a sum over the shard.
            more_losses: whether another `backward` of the same shard follows; the losses add up.
            metrics: by name, each one value, the shard's mean, or one per sample, shape (n,), which are averaged. Over
                the shards they are weighted like a mean loss: with your own weight pass the shard's weighted mean. A
                `Sum` is added up instead.

        Raises:
            RuntimeError: outside of a shard, or after its last backward.
            ValueError: a loss that is no scalar or needs no gradient; torch's `reduction="sum"`, a count, class weights
                or ignored labels in place of a mean over samples; a bad weight or metric; a further loss with others.
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
        if reduction not in ("mean", "sum"):
            raise ValueError(f'reduction must be "mean" or "sum". Got {reduction!r}.')
        weight = None if weight is None else check_weight(weight)
        value = job.fold.unscaled(loss) if job.fold.scalers else loss.detach().clone()
        size = record.add(value, weight, reduction, metrics, made_by=loss.grad_fn, iteration=self.iteration)
        if job.recorder.tracer is not None:
            values: dict[str, Leaf] = {"loss": record.losses[-1], "weight": float(size), **record.metrics}
            job.recorder.tracer.forward(record.shard.number, values, record.summed)
        last = not more_losses and record.shard is mini_batch.shards[-1]
        alone = reduction == "sum" or len(mini_batch.sizes) == 1
        if isinstance(size, torch.Tensor):
            factor: Weight = torch.where(size > 0, torch.ones_like(size) if alone else size / self.samples, 0.0)
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
        seed_shard(world.seed, self.iteration, len(mini_batch.sizes), world.device, self.passes)
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
        value = fold.unscaled(loss)
        values = {name: as_metric(name, metric, self.samples, loss.device) for name, metric in metrics.items()}
        self._gather.backward(loss, fold)
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

        def tell() -> None:
            world.blocked_because = None
            with suppress(_LeftLoop, PeerFailed):
                end()
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

        The returned function holds no reference to the step.

        Raises:
            CallMismatch: all leave, and ran synced layers in different orders before.
            PeerFailed: another rank leaves.
        """
        fold = self._job.fold
        world = self._job.world
        gather = self._gather
        send_nothing = fold.leaving(len(self._loaded.mini_batch.sizes), gathers=gather.agreement.is_used)

        def end() -> None:
            try:
                for channel in fold.sync_channels:
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
        return RuntimeError(
            f"step.backward must be called for every shard. Step {self.iteration} left out {without} of its "
            f"{len(self._loaded.mini_batch.sizes)} shards (a `continue`, a `break`, an error that was caught?). "
            "Call it for each, with weight=0 for one that is not to count."
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
            recorder.begin_row(mini_batch, result, fold, job.batches, skips=job.checks.guard.skips)
        elif recorder.has_rows:
            recorder.extend_row(result, self.passes)
        for check in job.checks.each if is_first else (job.checks.guard,):
            if self.iteration >= check.due:
                check.after(result, mini_batch)
        world.stage = "optimizer"
        return result


class ModuleStructure:
    """Notices, by identity, that a script replaced, added or removed modules or parameters.

    It compares the entries of the modules' own tables, at 0.05 microseconds a parameter.

    Args:
        state: what the job is made of, by name.

    Attributes:
        modules: all modules in the state, by name, as of the last call of `changes`.
    """

    def __init__(self, state: Mapping[str, object]) -> None:
        self._state = state
        self._optimizers = parts_of(state, Optimizer)
        self.modules: dict[str, nn.Module] = {}
        self._tables: list[dict[str, Any]] = []  # of the modules' parameters and modules
        self._filled: list[dict[str, Any]] = []  # most modules have no parameters
        self._entries: list[object] = [self]  # of all tables, and of the optimizers; at first what is in neither
        self._owners: list[object] = []  # all parameters, and the modules that have buffers
        self._known: list[torch.Tensor] = []  # kept alive, so that no other tensor gets the same id
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
        if count == len(self._entries) and all(map(is_, now, self._entries)):
            return None
        self.modules = each_module(find_modules(self._state))
        modules = self.modules.values()
        self._tables = [table for module in modules for table in (module._parameters, module._modules)]
        self._filled = [table for table in self._tables if table]
        self._entries = list(chain(chain.from_iterable(map(_VALUES, self._filled)), *groups))
        before = self._owners
        self._owners = [*find_parameters(self._state).values(), *(module for module in modules if module._buffers)]
        known = set(self._known)
        tensors = find_tensors(self._state)
        self._known = list(tensors.values())
        if len(before) == len(self._owners) and all(map(is_, before, self._owners)):
            return None
        return {name: tensor for name, tensor in tensors.items() if tensor not in known}


def _averaged(state: Mapping[str, object]) -> list[nn.Parameter]:
    """The parameters of the averaged models in a state that no optimizer has.

    A state without an optimizer does not tell what is trained, so there they may get gradients.
    """
    groups = [group["params"] for optimizer in parts_of(state, Optimizer) for group in optimizer.param_groups]
    trained = set(chain.from_iterable(groups))
    models = [model for model in each_module(find_modules(state)).values() if isinstance(model, AveragedModel)]
    return [parameter for model in models for parameter in model.parameters() if groups and parameter not in trained]


@dataclass(eq=False, repr=False)
class Job:
    """What the steps of a loop have in common. In each fold it is its `FoldEvents`.

    Args:
        state: what is trained, by name.
        batches: of the loop, which `ahead` reads.
        new_fold: makes a `Fold`, as the script wants gradients and buffers reduced.
        where: the loop's position.
        checks, recorder: what looks at the steps, and what records them.

    Attributes:
        fold: of the next pass, or the one that is open.
        structure: of the state's modules.
        gathering: what the passes with held outputs have in common.
        announces: whether the current mini-batch has news for the other ranks.
    """

    state: Mapping[str, object]
    batches: Batches
    new_fold: Callable[..., Fold]
    where: LoopPosition
    checks: StepChecks
    recorder: RunRecorder
    ahead: ReadAhead
    announces: bool = False
    gathering: GatherAgreement = field(default_factory=GatherAgreement)

    def __post_init__(self) -> None:
        self.world = self.batches.world
        self.fold = self._make_fold(None)
        self.structure = ModuleStructure(self.state)

    def _make_fold(self, former: Fold | None) -> Fold:
        """A fold of the modules and parameters that the state has now; see `Fold` for what it raises."""
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
        """What this rank asks of all in a fold; what was found since the last one is asked once."""
        new = self.structure.changes()
        stops = self.world.stops
        stop = stops.asked_here is not None or stops.watchdog.stop is not None
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
        if not (stop or save or self.announces) and problem is None:
            return NO_REQUEST
        return ControlRequest(stop, save, problem)

    def while_reducing(self) -> None:
        """Hand on earlier rows, read the next mini-batch's data, and start the streams of what follows the fold."""
        if self.recorder.has_rows:
            self.recorder.flush_ready()
        if self.where.iteration != self.where.most_steps:
            self.ahead.read()
        seed_step(self.world.seed, self.where.iteration, self.world.device)
