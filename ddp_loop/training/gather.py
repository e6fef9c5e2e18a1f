"""Outputs of all shards side by side, on every rank: for losses that need the whole mini-batch.

[Note: Gradients through a gather] Every rank has the same rows and computes the same loss, so each has the loss's
gradient with respect to the rows of its own shards, and backward needs no collective. A gather whose backward sums the
ranks' gradients would need one, in an order that empty shards and several shards per rank do not have, and would count
the loss once for each rank.

[Note: One word a pass] Once a loop has gathered, the ranks end each pass with a word, whether they gather or fold
without. So a rank that does the other thing raises, instead of joining a sum of another size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ddp_loop.data import MiniBatch, Shard
from ddp_loop.distributed import World, sendable
from ddp_loop.training.fold import Fold
from ddp_loop.training.payload import GATHER_EVERYWHERE


@sendable
@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of an output's rows, and whether they have a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool


TensorSpecs = tuple[TensorSpec, ...]


@dataclass(slots=True)
class HeldOutputs:
    """A shard's outputs with their graphs."""

    shard: Shard
    outputs: tuple[torch.Tensor, ...]

    @property
    def specs(self) -> TensorSpecs:
        return tuple(TensorSpec(tuple(one.shape[1:]), one.dtype, one.requires_grad) for one in self.outputs)

    def rows_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This shard's rows of a tensor with a row for each sample of the mini-batch."""
        return whole[self.shard.start : self.shard.start + self.shard.samples]


def check_outputs(outputs: tuple[object, ...], samples: int) -> tuple[torch.Tensor, ...]:
    """A shard's outputs.

    Raises:
        ValueError: no output, or one without a row per sample.
    """
    if not outputs:
        raise ValueError(
            "step.hold takes the outputs that the loss of the whole mini-batch needs. Got none. Pass at least one."
        )
    taken: list[torch.Tensor] = []
    for one in outputs:
        if not isinstance(one, torch.Tensor) or one.shape[:1] != (samples,):
            what = tuple(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__
            raise ValueError(f"A held output must have a row per sample, shape ({samples}, ...). Got {what}.")
        taken.append(one)
    return tuple(taken)


@dataclass
class BatchGather:
    """Gathers held outputs, one object for each loop: the ranks agree on the outputs' specs once."""

    world: World
    _specs: TensorSpecs | None = None
    held: list[HeldOutputs] = field(default_factory=list)
    whole: tuple[torch.Tensor, ...] | None = None
    is_used: bool = False  # since the loop's first hold or gather
    _said: bool = False  # whether this pass had its word

    def open(self) -> None:
        """Begin a pass over a mini-batch's shards."""
        self.release()
        self._said = False

    def hold(self, outputs: HeldOutputs) -> None:
        """Keep a shard's outputs."""
        self.is_used = True
        self.held.append(outputs)

    def release(self) -> None:
        """Drop the held outputs and their graphs."""
        self.held = []
        self.whole = None

    def holds(self, shard: Shard) -> bool:
        """Whether there are outputs of this shard."""
        return any(held.shard is shard for held in self.held)

    def gather(
        self, mini_batch: MiniBatch, problem: Exception | None, check_end: Callable[[int, MiniBatch], None]
    ) -> tuple[torch.Tensor, ...]:
        """The held outputs of all shards, (R, ...) each, in the mini-batch's order. Every rank must call this.

        They are leaves, which want a gradient where the outputs have one.

        Args:
            mini_batch: of the shards.
            problem: this rank's, if any.
            check_end: called with the number of ranks whose stream ends here.

        Raises:
            ValueError: outputs that differ between shards in number, shape or dtype, or in having a gradient.
            RuntimeError: other ranks fold without a gather.
            PeerFailed: another rank has a problem.
        """
        seen = self.held[0].specs if self.held else None
        if problem is None and any(one.specs != seen for one in self.held):
            problem = ValueError(_differ([one.specs for one in self.held]))
        new = self._specs is None
        if not new:
            unlike = seen is not None and seen != self._specs
            news, ends = self._say(problem, new=unlike, ends=mini_batch.ends_stream)
            new = news > 0
            if ends:
                check_end(ends, mini_batch)
        if new:
            self.world.raise_if_any_failed(problem)
            self._agree(seen)
            self.world.require_equal("the samples of a mini-batch", mini_batch.samples)
        whole = self._rows(mini_batch)
        works = [self.world.start_sum(rows.view(torch.uint8)) for rows in whole]
        for work in works:
            self.world.finish(work)
        for rows, spec in zip(whole, self._specs or (), strict=True):
            rows.requires_grad_(spec.has_gradient)
        self.whole = whole
        self._said = True
        return whole

    def send_no_gather(self, problem: Exception | None = None) -> None:
        """Tell the ranks, at the end of a pass, that this one does not gather. Every rank must call this.

        Raises:
            RuntimeError: other ranks gather.
        """
        if self._specs is not None and not self._said:
            self._say(problem, without=True)

    def _say(
        self, problem: Exception | None, *, without: bool = False, new: bool = False, ends: bool = False
    ) -> tuple[int, int]:
        """A word of all ranks; returns the numbers of those with new specs and of those at their stream's end."""
        # On the CPU, where reading it does not hold up a GPU's host.
        said = torch.tensor([problem is not None, without, new, ends], dtype=torch.int32, device="cpu")
        self.world.finish(self.world.start_sum(said))
        problems, withouts, news, all_ends = said.tolist()
        if problems:  # a rank's own problem comes first, such as that it leaves the loop
            self.world.raise_if_any_failed(problem)
        if 0 < withouts < self.world.size:
            raise RuntimeError(GATHER_EVERYWHERE)
        return news, all_ends

    def _agree(self, seen: TensorSpecs | None) -> None:
        told = [specs for specs in self.world.gather(seen) if specs is not None]
        if not all(isinstance(specs, tuple) for specs in told):
            raise RuntimeError(GATHER_EVERYWHERE)
        if len(set(told)) > 1:
            raise ValueError(_differ(told))
        self._specs = told[0]

    def _rows(self, mini_batch: MiniBatch) -> tuple[torch.Tensor, ...]:
        """Zeros for all samples, and this rank's rows; a sum of bytes leaves every bit as it is."""
        device = self.world.device
        whole = tuple(
            torch.zeros(mini_batch.samples, *spec.shape, dtype=spec.dtype, device=device) for spec in self._specs or ()
        )
        for held in self.held:
            for rows, output in zip(whole, held.outputs, strict=True):
                held.rows_of(rows).copy_(output.detach())
        return whole

    def backward(self, loss: torch.Tensor, fold: Fold) -> None:
        """Backpropagate a loss of the whole mini-batch: into its own parameters once, into each held shard's outputs.

        Args:
            loss: shape (), the same on every rank.
            fold: of this pass.
        """
        leaves = [rows for rows in self.whole or () if rows.requires_grad]
        gradients: list[torch.Tensor | None] = []
        if self.world.rank == 0:  # the loss's own parameters count on one rank alone; rank 0 has the first shard
            fold.backward_held(loss, more=True, last=False)
            gradients = [leaf.grad for leaf in leaves]
        elif leaves:
            gradients = list(torch.autograd.grad(loss, leaves, allow_unused=True))
        for held in self.held:
            ends = [output for output in held.outputs if output.requires_grad]
            pairs = zip(ends, gradients, strict=True)
            parts = [_with_gradient(end, held.rows_of(g)) for end, g in pairs if g is not None]
            if not held.shard.samples:
                for part in parts:
                    fold.backward_empty(part, more=True)
            else:
                whole = torch.stack(parts).sum() if len(parts) > 1 else parts[0] if parts else None
                fold.backward_held(whole, last=held is self.held[-1])


def _with_gradient(output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A value of shape () whose gradient with respect to `output` is `gradient`, to the bit."""
    if output.is_complex():
        return (output * gradient.conj()).real.sum()
    return (output * gradient).sum()


def _differ(specs: list[TensorSpecs]) -> str:
    said = " and ".join(
        str([(one.shape, str(one.dtype).removeprefix("torch."), one.has_gradient) for one in each])
        for each in dict.fromkeys(specs)
    )
    return (
        "All shards must hold outputs of the same row shapes and dtypes, all with a gradient or all without. Got "
        f"(shape, dtype, gradient) {said}. Pad them to one shape."
    )
