"""The parts of a job: modules, parameters, optimizers and scalers in a loop's state, and the folds made for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ddp_loop.data import Batches
from ddp_loop.distributed import (
    check_layout,
    check_structure,
    find_modules,
    find_parameters,
    find_tensors,
    make_equal,
    under_all_names,
)
from ddp_loop.training.buffers import BufferReduction
from ddp_loop.training.fold import Fold, StepEvents
from ddp_loop.training.nonfinite import NonFiniteGuard
from ddp_loop.training.structure import ModuleStructure, UnmovedParametersCheck
from ddp_loop.training.validation import check_state, check_synced, check_trainable


@dataclass(frozen=True, slots=True)
class Reduction:
    """How the steps of a job are reduced, as `Loop` was given it."""

    ordered: bool
    bucket_cap_mib: float
    buffer_reduction: Mapping[str, BufferReduction]


class Job:
    """The state that a loop trains.

    Args:
        state: by name.
        batches: of the loop.
        how: its steps are reduced.

    Attributes:
        state: a copy of the mapping.
        rules: for buffers, under all their names.
        structure: notices replaced modules and parameters, once the replicas are equal.
        unmoved: notices that no parameter moves.
    """

    structure: ModuleStructure

    def __init__(self, state: object, batches: Batches, how: Reduction) -> None:
        self.state = check_state(state)
        self._batches, self._world, self._how = batches, batches.world, how
        self.rules = under_all_names(find_modules(self.state), how.buffer_reduction)

    def make_fold(
        self,
        events: StepEvents,
        guard: NonFiniteGuard,
        watch: Callable[[int, dict[str, torch.Tensor]], None] | None,
        former: Fold | None = None,
    ) -> Fold:
        """The fold of the modules and parameters in the state; see `Fold` for the arguments.

        Raises:
            ValueError: no parameter to train, tensors that cannot be folded, or shards that synced layers cannot have.
        """
        if former is not None:
            former.release()
        parameters, how, parts = find_parameters(self.state), self._how, self.state.values()
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
            ordered=how.ordered,
            bucket_bytes=int(how.bucket_cap_mib * 2**20),
            buffer_reduction=how.buffer_reduction,
            guard=None if guard.allows else guard,
            scalers=self._scalers,
            events=events,
            watch=watch,
            former=former,
        )
        check_synced(self._batches, fold.sync_channels)
        return fold

    def make_equal(self) -> None:
        """Give every rank rank 0's parameters and buffers. Every rank must call this.

        Raises:
            ValueError: the structure differs between ranks.
        """
        for scaler in self._scalers:  # else it has no scale on a rank without a shard in the first step
            if scaler._scale is None:
                scaler.scale(torch.zeros((), device=self._world.device))
        self.structure = ModuleStructure(self.state)
        tensors = find_tensors(self.state)
        check_structure(tensors, self._world)
        make_equal(tensors, self._world)
