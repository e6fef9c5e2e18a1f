"""Outputs of all shards side by side, on every rank: for losses that need the whole mini-batch.

[Note: Gradients through a gather] Every rank has the same rows and computes the same loss, so each has the loss's
gradient with respect to the rows of its own shards, and backward needs no collective. A gather whose backward sums the
ranks' gradients would need one, in an order that empty shards and several shards per rank do not have, and would count
the loss once for each rank.

[Note: One word a pass] Once a loop has gathered, the ranks end each pass with a word, whether they gather or fold
without. So a rank that does the other thing raises, instead of joining a sum of another size. No sum begins before the
word, in a backward either, since a rank without a shard has no backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ddp_loop.data import MiniBatch, Shard, check_end
from ddp_loop.distributed import World, sendable
from ddp_loop.training.rows import GATHER_EVERYWHERE


@sendable
@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of an output's rows, and whether they have a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool


TensorSpecs = tuple[TensorSpec, ...]


class HeldOutputs(NamedTuple):
    """A shard's outputs with their graphs."""

    shard: Shard
    outputs: tuple[torch.Tensor, ...]
    specs: TensorSpecs
    rows: slice  # of the mini-batch


@dataclass(slots=True)
class GatherAgreement:
    """The facts that a loop's passes share: the outputs' specs, agreed on once, and whether there were any."""

    specs: TensorSpecs | None = None
    is_used: bool = False  # since the loop's first hold or gather


@dataclass(slots=True)
class BatchGather:
    """Gathers the held outputs of one pass."""

    world: World
    agreement: GatherAgreement
    held: list[HeldOutputs] = field(default_factory=list)
    whole: tuple[torch.Tensor, ...] | None = None
    _has_reported: bool = False  # whether this pass had its word

    def hold(self, shard: Shard, outputs: tuple[torch.Tensor, ...]) -> None:
        """Keep a shard's outputs. Those without a graph are copied, since a script may reuse them.

        Raises:
            ValueError: no output, or one without a row per sample.
        """
        if not outputs:
            raise ValueError(
                "step.hold takes the outputs that the loss of the whole mini-batch needs. Got none. Pass at least one."
            )
        samples = shard.samples
        for output in outputs:
            if not isinstance(output, torch.Tensor) or output.shape[:1] != (samples,):
                what = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
                raise ValueError(f"A held output must have a row per sample, shape ({samples}, ...). Got {what}.")
        specs = tuple(TensorSpec(tuple(output.shape[1:]), output.dtype, output.requires_grad) for output in outputs)
        # Autograd refuses outputs that were written later.
        kept = tuple(output if output.requires_grad else output.detach().clone() for output in outputs)
        self.held.append(HeldOutputs(shard, kept, specs, slice(shard.start, shard.start + samples)))
        self.agreement.is_used = True

    def gather(self, mini_batch: MiniBatch, problem: Exception | None) -> tuple[torch.Tensor, ...]:
        """The held outputs of all shards, (R, ...) each, in the mini-batch's order. Every rank must call this.

        They are leaves, which want a gradient where the outputs have one.

        Args:
            mini_batch: of the shards.
            problem: this rank's, if any.

        Raises:
            ValueError: outputs that differ between shards in number, shape or dtype, or in having a gradient.
            RuntimeError: other ranks fold without a gather.
            PeerFailed: another rank has a problem.
        """
        local_specs = self.held[0].specs if self.held else None
        if problem is None and any(outputs.specs != local_specs for outputs in self.held):
            problem = _differ([outputs.specs for outputs in self.held])
        specs = self.agreement.specs
        if specs is not None:
            unlike = local_specs not in (None, specs)
            news, ends = self._say(problem, new=unlike, ends=mini_batch.ends_stream)
            if ends:
                check_end(ends, mini_batch, self.world)
            if news:
                specs = None
        if specs is None:
            self.world.raise_if_any_failed(problem)
            specs = self.agreement.specs = self._agreed(local_specs)
            self.world.require_equal("the samples of a mini-batch", mini_batch.samples)
        # Zeros for all samples, and this rank's rows; a sum of bytes leaves every bit as it is.
        samples = mini_batch.samples
        device = self.world.device
        whole = tuple(torch.zeros(samples, *spec.shape, dtype=spec.dtype, device=device) for spec in specs)
        for held in self.held:
            for gathered, output in zip(whole, held.outputs, strict=True):
                gathered[held.rows].copy_(output.detach())
        for work in [self.world.start_sum(gathered.view(torch.uint8)) for gathered in whole]:
            self.world.finish(work)
        for gathered, spec in zip(whole, specs, strict=True):
            gathered.requires_grad_(spec.has_gradient)
        self.whole = whole
        self._has_reported = True
        return whole

    def send_no_gather(self, problem: Exception | None = None) -> None:
        """Tell the ranks, at the end of a pass, that this one does not gather. Every rank must call this.

        Raises:
            RuntimeError: other ranks gather.
        """
        if self.agreement.specs is not None and not self._has_reported:
            self._say(problem, without=True)

    def _say(
        self, problem: Exception | None, *, without: bool = False, new: bool = False, ends: bool = False
    ) -> tuple[int, int]:
        """A word of all ranks; returns the numbers of those with new specs and of those at their stream's end."""
        # On the CPU, where reading it does not hold up a GPU's host.
        report = torch.tensor([problem is not None, without, new, ends], dtype=torch.int32, device="cpu")
        self.world.finish(self.world.start_sum(report))
        problems, withouts, news, all_ends = report.tolist()
        if problems:  # a rank's own problem comes first, such as that it leaves the loop
            self.world.raise_if_any_failed(problem)
        if 0 < withouts < self.world.size:
            raise RuntimeError(GATHER_EVERYWHERE)
        return news, all_ends

    def _agreed(self, local_specs: TensorSpecs | None) -> TensorSpecs:
        told = [specs for specs in self.world.gather(local_specs) if specs is not None]
        if not all(isinstance(specs, tuple) for specs in told):
            raise RuntimeError(GATHER_EVERYWHERE)
        if len(set(told)) > 1:
            raise _differ(told)
        return told[0]


def _differ(specs: list[TensorSpecs]) -> ValueError:
    forms = " and ".join(
        str([(spec.shape, str(spec.dtype).removeprefix("torch."), spec.has_gradient) for spec in each])
        for each in dict.fromkeys(specs)
    )
    return ValueError(
        "All shards must hold outputs of the same row shapes and dtypes, all with a gradient or all without. Got "
        f"(shape, dtype, gradient) {forms}. Pad them to one shape."
    )
