"""Outputs of all shards side by side, on every rank: for losses that need the whole mini-batch.

[Note: Gradients through a gather] Every rank has the same rows and computes the same loss, so each knows already what
the loss's gradient is with respect to the rows of its own shards: backward needs no collective. A gather whose backward
sums the ranks' gradients would need one, in an order that empty shards and several shards per rank do not have, and
would count the loss once for each rank.

[Note: One word a pass] Once a loop has gathered, the ranks begin the end of each pass with a word, whether they gather
or fold without: so a rank that does the other thing is told, and does not meet a sum of another size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ddp_loop.data import MiniBatch, Shard
from ddp_loop.distributed import World
from ddp_loop.training.payload import GATHER_EVERYWHERE


@dataclass(frozen=True)
class TensorSpec:
    """What rows of an output are: their shape, dtype, and whether a gradient goes back to them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool


TensorSpecs = tuple[TensorSpec, ...]


class BackwardFunction(Protocol):
    """Backpropagates a tensor: of a shard that has another one (`more`), of the rank's last shard (`last`)."""

    def __call__(self, one: torch.Tensor, /, *, more: bool, last: bool) -> None: ...


@dataclass(slots=True)
class HeldOutputs:
    """A shard's outputs, with their graph."""

    shard: Shard
    outputs: tuple[torch.Tensor, ...]

    @property
    def forms(self) -> TensorSpecs:
        return tuple(TensorSpec(tuple(one.shape[1:]), one.dtype, one.requires_grad) for one in self.outputs)

    def rows_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This shard's rows of something that has a row for each sample of the mini-batch."""
        return whole[self.shard.start : self.shard.start + self.shard.samples]


def check_outputs(outputs: tuple[object, ...], samples: int) -> tuple[torch.Tensor, ...]:
    """A shard's outputs, if each has a row per sample.

    Raises:
        ValueError: there are none, or one has no such rows.
    """
    if not outputs:
        raise ValueError("hold takes what the loss of the whole mini-batch needs of this shard; got nothing")
    taken: list[torch.Tensor] = []
    for one in outputs:
        if not isinstance(one, torch.Tensor) or one.shape[:1] != (samples,):
            what = tuple(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__
            raise ValueError(f"what is held has a row per sample of its shard, shape ({samples}, ...); got {what}")
        taken.append(one)
    return tuple(taken)


@dataclass
class BatchGather:
    """Brings held outputs together. One for each loop: what forms they have is agreed once, then only checked."""

    world: World
    _forms: TensorSpecs | None = None
    held: list[HeldOutputs] = field(default_factory=list)
    whole: tuple[torch.Tensor, ...] | None = None
    _said: bool = False  # whether this pass had its word

    def open(self) -> None:
        """Begin a pass over a mini-batch's shards."""
        self.release()
        self._said = False

    def release(self) -> None:
        """Give up what was held, and its graphs."""
        self.held, self.whole = [], None

    def holds(self, shard: Shard) -> bool:
        """Whether there are outputs of this shard."""
        return any(held.shard is shard for held in self.held)

    def gather(
        self, mini_batch: MiniBatch, problem: Exception | None, check_end: Callable[[int, MiniBatch], None]
    ) -> tuple[torch.Tensor, ...]:
        """The held outputs of all shards, (R, ...) each, in the mini-batch's order. Every rank must call this.

        They are leaves that want a gradient where the outputs have one.

        Args:
            mini_batch: of which the shards are.
            problem: what this rank found wrong.
            check_end: is given the number of ranks whose stream ends here.

        Raises:
            ValueError: outputs that differ between shards in number, shape or dtype, or in having a gradient.
            RuntimeError: other ranks fold without a gather.
            PeerFailed: another rank has a problem.
        """
        seen = self.held[0].forms if self.held else None
        if problem is None and any(one.forms != seen for one in self.held):
            problem = ValueError(_differ([one.forms for one in self.held]))
        new = self._forms is None
        if not new:
            unlike = seen is not None and seen != self._forms
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
        for rows, form in zip(whole, self._forms or (), strict=True):
            rows.requires_grad_(form.has_gradient)
        self.whole, self._said = whole, True
        return whole

    def pass_over(self, problem: Exception | None = None) -> None:
        """Say, at the end of a pass without a gather, that this rank does not gather. Every rank must call this.

        Raises:
            RuntimeError: other ranks do.
        """
        if self._forms is not None and not self._said:
            self._say(problem, without=True)

    def _say(
        self, problem: Exception | None, *, without: bool = False, new: bool = False, ends: bool = False
    ) -> tuple[int, int]:
        """A word of all ranks; returns how many have new forms, and how many are at their stream's end."""
        # On the CPU: reading it does not hold a GPU's host up.
        said = torch.tensor([problem is not None, without, new, ends], dtype=torch.int32)
        self.world.finish(self.world.start_sum(said))
        problems, withouts, news, all_ends = said.tolist()
        if problems:  # a rank's own problem comes first: that it leaves the loop, say
            self.world.raise_if_any_failed(problem)
        if 0 < withouts < self.world.size:
            raise RuntimeError(GATHER_EVERYWHERE)
        return news, all_ends

    def _agree(self, seen: TensorSpecs | None) -> None:
        told = [forms for forms in self.world.gather(seen) if forms is not None]
        if not all(isinstance(forms, tuple) for forms in told):
            raise RuntimeError(GATHER_EVERYWHERE)
        if len(set(told)) > 1:
            raise ValueError(_differ(told))
        self._forms = told[0]

    def _rows(self, mini_batch: MiniBatch) -> tuple[torch.Tensor, ...]:
        """Zeros for all samples, with this rank's rows among them; a sum of bytes leaves every bit as it is."""
        device = self.world.device
        whole = tuple(
            torch.zeros(mini_batch.samples, *form.shape, dtype=form.dtype, device=device) for form in self._forms or ()
        )
        for held in self.held:
            for rows, output in zip(whole, held.outputs, strict=True):
                held.rows_of(rows).copy_(output.detach())
        return whole

    def backward(
        self,
        loss: torch.Tensor,
        go_back: BackwardFunction,
        leave_out: Callable[[], None],
        take_part: Callable[[torch.Tensor], None],
    ) -> None:
        """Backpropagate a loss of the whole mini-batch: into its own parameters once, into each held shard's outputs.

        Args:
            loss: shape (), the same on every rank.
            go_back: backpropagates a tensor as it is.
            leave_out: ends a shard whose outputs got no gradient.
            take_part: goes back through what has no samples.
        """
        leaves = [rows for rows in self.whole or () if rows.requires_grad]
        gradients: list[torch.Tensor | None] = []
        if self.world.rank == 0:  # the loss's own parameters count once, not once a rank; rank 0 has the first shard
            go_back(loss, more=True, last=False)
            gradients = [leaf.grad for leaf in leaves]
        elif leaves:
            gradients = list(torch.autograd.grad(loss, leaves, allow_unused=True))
        for held in self.held:
            ends = [output for output in held.outputs if output.requires_grad]
            pairs = zip(ends, gradients, strict=True)
            parts = [_with_gradient(end, held.rows_of(g)) for end, g in pairs if g is not None]
            if not held.shard.samples:
                for part in parts:
                    take_part(part)
            elif parts:
                whole = torch.stack(parts).sum() if len(parts) > 1 else parts[0]
                go_back(whole, more=False, last=held is self.held[-1])
            else:
                leave_out()


def _with_gradient(output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Something of shape () whose gradient with respect to `output` is `gradient`, to the bit."""
    if output.is_complex():
        return (output * gradient.conj()).real.sum()
    return (output * gradient).sum()


def _differ(forms: list[TensorSpecs]) -> str:
    said = " and ".join(
        str([(one.shape, str(one.dtype).removeprefix("torch."), one.has_gradient) for one in each])
        for each in dict.fromkeys(forms)
    )
    return (
        "every shard holds outputs of the same row shapes and dtypes, with a gradient or all without; got "
        f"(shape, dtype, gradient) {said}: pad them to one shape"
    )
