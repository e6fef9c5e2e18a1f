"""Gradients of parameters without a planned bucket: unfrozen ones, and those that got no gradient so far.

[Note: Left out] A copy of the model, such as a moving average, gets no gradient. In the plan it would double the bytes
of the sums, and no bucket would be complete before backward ends. So after the first fold, what no shard of any rank
gave a gradient is left out of the plan. When a shard gives it one, the control word says so. All ranks then agree on
these parameters, sum them apart in that step, and plan them from the next one on. The parameters of an `AveragedModel`
that no optimizer has stay out: a gradient that they get updates nothing, and becomes None.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch.nn import Parameter

from ddp_loop.distributed import World
from ddp_loop.training.buckets import Bucket, BucketSizes, grouped
from ddp_loop.training.flat_all_reduce import finish_all


class UnplannedGradients:
    """The buckets of a pass that are not planned; see [Note: Left out].

    Args:
        names: of all parameters.
        averaged: those that stay left out.
        sizes: of the buckets.
        make: makes a bucket of parameters.

    Attributes:
        buckets: of this pass.
        names: of the left-out parameters that this rank's shards gave a gradient in this pass.
        left_out: the parameters that the next plan is without.
    """

    def __init__(
        self,
        names: Mapping[Parameter, str],
        averaged: Collection[Parameter],
        sizes: BucketSizes,
        make: Callable[[list[Parameter]], Bucket],
    ) -> None:
        self._names = names
        self._averaged = list(averaged)
        self._sizes = sizes
        self._make = make
        self.buckets: list[Bucket] = []
        self.names: frozenset[str] = frozenset()
        self._unfrozen = 0  # so many buckets are of unfrozen parameters; the others have one parameter each
        self.left_out: set[Parameter] = set(averaged)
        self._awaited: list[Parameter] = []  # left out until they get a gradient

    def open(self, planned: Collection[Parameter]) -> None:
        """Begin a pass; make buckets for unfrozen parameters, which are sent once all ranks agree."""
        del self.buckets[self._unfrozen :]
        self.names = frozenset()
        known = {*planned, *self.left_out}
        unfrozen = [parameter for parameter in self._names if parameter.requires_grad and parameter not in known]
        if unfrozen != [parameter for bucket in self.buckets for parameter in bucket.parameters]:
            self.buckets = [self._make(group) for group in grouped(unfrozen, self._sizes)]
            self._unfrozen = len(self.buckets)

    def adopt(self, shards: int) -> None:
        """Make a bucket for each left-out parameter that the backward of shard `shards`, counted from 0, gave one."""
        found = self.foreign()
        for parameter in found:
            gradient = parameter.grad
            parameter.grad = None
            bucket = self._make([parameter])
            bucket.open()
            for number in range(shards):
                bucket.finish_shard(number + 1)
            bucket.begin_backward()
            parameter.grad = gradient
            self.buckets.append(bucket)
        self.names = self.names.union(map(self._names.__getitem__, found))

    @property
    def is_awaited(self) -> bool:
        """Whether a left-out parameter may still get a gradient, as all ranks know alike."""
        return bool(self._awaited)

    def foreign(self) -> list[Parameter]:
        """The left-out parameters that have a gradient and no bucket."""
        found = [parameter for parameter in self._awaited if parameter.grad is not None]
        known = self._found() if found else ()
        return [parameter for parameter in found if parameter not in known]

    def _found(self) -> dict[Parameter, Bucket]:
        return {bucket.parameters[0]: bucket for bucket in self.buckets[self._unfrozen :]}

    def finish_shards(self) -> None:
        """Finish this rank's shards; drop what became of averaged parameters."""
        for parameter in self._averaged:
            parameter.grad = None
        for bucket in self.buckets:
            bucket.finish_shards()

    def sum(self, names: Collection[str], world: World) -> None:
        """Sum the gradients of unfrozen parameters, and of left-out ones with these names. Every rank must call this.

        Args:
            names: those with a gradient on any rank.
            world: from `join_world`.
        """
        found = self._found()
        buckets = self.buckets[: self._unfrozen]
        for parameter, name in self._names.items():
            if name in names:
                bucket = found.get(parameter)
                if bucket is None:
                    bucket = self._make([parameter])
                    bucket.open()
                    bucket.finish_shards()
                buckets.append(bucket)
        self.buckets = buckets
        for bucket in buckets:
            given = torch.tensor(bucket.given, dtype=torch.int32, device="cpu")
            world.sum(given)
            bucket.start()
            if world.size > 1:
                finish_all([bucket.summing], world)
            bucket.assign_grads([count > 0 for count in given.tolist()])

    def leave_out(self, planned: Collection[Parameter]) -> bool:
        """Leave what has no gradient after a fold out of the next plan, but for those of `planned`; whether one is."""
        known = {*planned, *self._averaged}
        without = [parameter for parameter in self._names if parameter.requires_grad and parameter.grad is None]
        self._awaited = [parameter for parameter in without if parameter not in known]
        self.left_out = {*self._averaged, *self._awaited}
        return bool(self._awaited)

    def release(self) -> None:
        """Drop the buckets; assigned gradients stay."""
        self.buckets = []
        self.names = frozenset()
        self._unfrozen = 0
