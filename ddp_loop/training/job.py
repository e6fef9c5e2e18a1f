"""What a loop trains: the parts of its state, folds made for them, and what the script does with them between steps.

[Note: Left accumulation] Each fold gives the gradient of its own mini-batch. A script that still steps its optimizer
every k-th time, as it did to accumulate, trains on one mini-batch of k. An optimizer writes its parameters in place,
and their version counters show it at no cost. Until they have shown it once, checksums tell an optimizer that writes
past them (`parameter.data`, torch's fused kernels) from one that did not step. So does the optimizer's state of a
parameter, such as its count of steps, where a learning rate of 0 moves nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, methodcaller

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ddp_loop.data import Batches
from ddp_loop.determinism import checksum_all
from ddp_loop.distributed import (
    World,
    check_layout,
    check_structure,
    each_module,
    find_modules,
    find_parameters,
    find_tensors,
    make_equal,
    under_all_names,
)
from ddp_loop.training.buffers import BufferReduction
from ddp_loop.training.control import FoldEvents
from ddp_loop.training.fold import Fold
from ddp_loop.training.nonfinite import NonFiniteGuard
from ddp_loop.training.payload import StepResult
from ddp_loop.training.validation import check_state, check_synced, check_trainable

_values = methodcaller("values")
_version = attrgetter("_version")
_MOST_LOOKS = 8  # by checksums, then it is given up
ACCUMULATION_LEFT = (
    "Two steps were folded, and no parameter moved in between (after step {step}). Each fold gives the gradient of "
    "its own mini-batch and replaces the one before, which is lost. Call optimizer.step() after each fold. To "
    "accumulate, give Batches a larger mini-batch and more shards: Batches(data, 4 * n, world, shards=4 * world.size)."
)

WEIGHTLESS = (
    "All weights of a mini-batch are 0 (first in step {step}), so nothing in it counts: its loss is reported as 0, and "
    "its gradients are 0 or None. Pass step.backward a weight above 0 for shards that count, or leave such samples out "
    "of the data."
)


class ModuleStructure:
    """Notices, by identity, that a script replaced, added or removed modules or parameters.

    It compares the entries of the modules' own tables, at 0.05 microseconds a parameter.

    Args:
        state: what the job is made of, by name.

    Attributes:
        modules: all modules in the state, by name, as of the last call of `has_changed`.
    """

    modules: dict[str, nn.Module]

    def __init__(self, state: Mapping[str, object]) -> None:
        self._state = state
        self._optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
        self._before: list[torch.Tensor] = []
        self._snapshot()

    def _snapshot(self) -> None:
        self.modules = each_module(find_modules(self._state))
        modules = list(self.modules.values())
        self._tables = [table for module in modules for table in (module._parameters, module._modules)]
        self._filled = [table for table in self._tables if table]  # most modules have no parameters
        self._entries = list(self._current(self._groups()))
        tensors = find_tensors(self._state)
        self._owners = [module for module in modules if module._buffers]
        self._parameters = list(find_parameters(self._state).values())
        self._known = list(tensors.values())  # kept alive, so that no other tensor gets the same id

    def _groups(self) -> list[list[object]]:
        """The parameters of each group of the optimizers."""
        return [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]

    def _current(self, groups: list[list[object]]) -> Iterator[object]:
        """All entries of the tables that had some, and of the optimizers."""
        return chain(chain.from_iterable(map(_values, self._filled)), *groups)

    def has_changed(self) -> bool:
        """Whether parameters, or modules with buffers, are others than at the last call."""
        groups = self._groups()
        count = sum(map(len, self._tables)) + sum(map(len, groups))
        if count == len(self._entries) and all(map(is_, self._current(groups), self._entries)):
            return False
        parameters = self._parameters
        owners = self._owners
        self._before = self._known
        self._snapshot()
        # A forward may create its activation modules in each call; modules without tensors change nothing.
        return not (_same(parameters, self._parameters) and _same(owners, self._owners))

    def changed_in_step(self) -> RuntimeError:
        """The error of a change that `has_changed` found at a fold.

        Between steps all ranks get rank 0's new values. In a step it is too late: the shards have used their own.
        """
        known = set(map(id, self._before))
        new = [name for name, one in find_tensors(self._state).items() if id(one) not in known]
        return RuntimeError(
            "The parameters and buffers of state must stay the same ones from a step's first shard to its fold. "
            + (f"{new[0]} is new or was replaced in between" if new else "One was removed in between")
            + ", perhaps in a forward. Make it before the Loop, by one forward on a sample, or between two steps."
        )

    def make_new_equal(self, world: World) -> None:
        """Give every rank rank 0's values of new parameters and buffers. Every rank must call this.

        Raises:
            ValueError: the structure differs between ranks.
        """
        tensors = find_tensors(self._state)
        check_structure(tensors, world, "modules and parameters that are new in state")
        known = set(map(id, self._before))
        self._before = []
        make_equal({name: one for name, one in tensors.items() if id(one) not in known}, world)


def _same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


class UnmovedParametersCheck:
    """Warns once when no parameter moved between two steps. See [Note: Left accumulation].

    Args:
        parameters: of the job.
        scalers: a step that one of them skips moves nothing.
        optimizers: their steps move nothing where the learning rate is 0.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], scalers: Sequence[GradScaler], optimizers: Sequence[Optimizer]
    ) -> None:
        self._parameters = parameters
        self._scalers = scalers
        self._optimizers = optimizers
        self._before: tuple[list[int], list[object]] = [], []
        self._sums: torch.Tensor | None = None
        self._counts_writes = self._is_over = False
        self._looks = 0

    def check(self, step: int, *, had_gradients: bool) -> None:
        """Compare the parameters with what they were when the last step opened; call this when one opens.

        Args:
            step: its iteration.
            had_gradients: whether the last fold left any.
        """
        if self._is_over:
            return
        versions_before, states_before = self._before
        versions, states = self._now()
        self._before = versions, states
        if versions_before != versions:
            self._counts_writes = bool(versions_before)
            self._sums = None
        elif states_before != states:
            self._sums = None
        elif had_gradients:
            self._suspect(step)

    def _now(self) -> tuple[list[int], list[object]]:
        """The versions of parameters and scales, and what a step changes in the state of a first parameter."""
        versions = list(map(_version, self._parameters))
        states = list[object]()
        for scaler in self._scalers:
            versions += [one._version for one in (scaler._scale, scaler._growth_tracker) if one is not None]
        for optimizer in self._optimizers:
            kept = next(iter(optimizer.state.values()), None)
            for one in kept.values() if isinstance(kept, dict) else ():
                if isinstance(one, torch.Tensor | int):
                    states.append(one._version if isinstance(one, torch.Tensor) else one)
        return versions, states

    def _suspect(self, step: int) -> None:
        if not self._counts_writes:
            before = self._sums
            self._sums = checksum_all([parameter.detach() for parameter in self._parameters])
            self._looks += 1
            if before is None or not torch.equal(before, self._sums):
                self._is_over = self._looks == _MOST_LOOKS
                return
        self._is_over = True
        warnings.warn(ACCUMULATION_LEFT.format(step=step - 1), stacklevel=2)


def _averaged(state: Mapping[str, object], optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    """The parameters of the averaged models in a state that no optimizer has.

    A state without an optimizer does not tell what is trained, so there they may get gradients.
    """
    if not optimizers:
        return []
    trained = {one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
    models = [one for one in each_module(find_modules(state)).values() if isinstance(one, AveragedModel)]
    return [one for model in models for one in model.parameters() if one not in trained]


class WeightlessStepCheck:
    """Warns once of a mini-batch whose weights are all 0, on the host, where reading their sum costs nothing."""

    def __init__(self) -> None:
        self._is_over = False

    def check(self, result: StepResult) -> None:
        """Look at a step's sum of weights and its loss; a sum of losses need not be 0 with them."""
        if not self._is_over and result.total is not None and result.total.item() == 0 and result.loss.item() == 0:
            self._is_over = True
            warnings.warn(WEIGHTLESS.format(step=result.iteration), stacklevel=2)


@dataclass(frozen=True, slots=True)
class ReductionSettings:
    """How the steps of a job are reduced, as `Loop` was given it."""

    ordered: bool
    bucket_cap_mib: float | None
    buffer_reduction: Mapping[str, BufferReduction]
    reduce_dtype: torch.dtype | None

    @property
    def sums(self) -> tuple[float | None, torch.dtype | None]:
        """The size of the buckets and the dtype of the sums, which must be the same on all ranks."""
        return self.bucket_cap_mib, self.reduce_dtype


class Job:
    """The state that a loop trains, and what is made of it: rules for buffers, folds, checks between steps."""

    structure: ModuleStructure

    def __init__(self, state: object, batches: Batches, how: ReductionSettings) -> None:
        self.state = check_state(state)
        self._batches = batches
        self._world = batches.world
        self._how = how
        self.rules = under_all_names(find_modules(self.state), how.buffer_reduction)

    def make_fold(
        self,
        events: FoldEvents,
        guard: NonFiniteGuard,
        watch: Callable[[int, dict[str, torch.Tensor]], None] | None,
        former: Fold | None = None,
    ) -> Fold:
        """The fold of the modules and parameters in the state; see `Fold` for the arguments and what it raises."""
        if former is not None:
            former.release()
        parameters = find_parameters(self.state)
        how = self._how
        parts = self.state.values()
        check_trainable(parameters, self.state)
        check_layout(find_tensors(self.state), self._world)
        self._scalers = [one for one in parts if isinstance(one, GradScaler) and one.is_enabled()]
        optimizers = [one for one in parts if isinstance(one, Optimizer)]
        self.unmoved = UnmovedParametersCheck(list(parameters.values()), self._scalers, optimizers)
        fold = Fold(
            find_modules(self.state),
            parameters,
            self._world,
            shards=self._batches.shards,
            announced=self._batches.announced,
            carried=self._batches.division.carried,
            ordered=how.ordered,
            bucket_cap_mib=how.bucket_cap_mib,
            buffer_reduction=how.buffer_reduction,
            guard=None if guard.allows else guard,
            scalers=self._scalers,
            events=events,
            averaged=_averaged(self.state, optimizers),
            watch=watch,
            former=former,
            reduce_dtype=how.reduce_dtype,
        )
        check_synced(self._batches, fold.sync_channels)
        return fold

    def make_equal(self) -> None:
        """Give every rank rank 0's parameters and buffers, or raise where they differ. Every rank must call this."""
        for scaler in self._scalers:  # else it has no scale on a rank without a shard in the first step
            if scaler._scale is None:
                scaler.scale(torch.zeros((), device=self._world.device))
        self.structure = ModuleStructure(self.state)
        tensors = find_tensors(self.state)
        check_structure(tensors, self._world)
        make_equal(tensors, self._world)
