"""Any order of a step's calls is either that of the plain loop or one clear error: drawn by hypothesis.

The machine calls in any order; a model of a few lines says what is allowed, and with which words the rest is refused.
After each fold the gradients are those of the mini-batch, however it came to it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch.nn.functional import mse_loss

import ddp_loop as dl
from tests.support.comparing import gradients_of, is_close
from tests.support.refusals import loop_over, loss_of, network, samples

SHARDS, BATCH, STEPS = 2, 6, 3
FIRST = "step.backward must be called once for each shard"
UNFOLDED = r"Every step must end with step\.fold\(\)"
TWICE = r"Each pass over the shards must end with fold\(\)"
NO_PASS = r"fold\(\) must come after a pass over the shards"
LEFT_OUT = "step.backward must be called for every shard"
NO_LOSS = "Held outputs need a loss of the whole mini-batch"
HELD_ONCE = "step.hold must be called once for each shard"
GATHERED_ONCE = "step.gather must be called once, between the shards and the fold"
AT_ONCE = "A Loop can be iterated once, .* Create a new Loop"
BEGUN = "This one has begun. Create a new Loop"
OLD = r"Only the newest step of a loop can be iterated and folded\. Step \d is over"
NOT_HELD = "step.gather needs held outputs of every shard"


def loss_of_outputs(outputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """As `loss_of`, of held outputs."""
    return mse_loss(outputs, rows.sum(1, keepdim=True))


class Calls(RuleBasedStateMachine):
    """A loop of one rank with two shards, and what a script may do with it next."""

    @initialize()
    def begin(self) -> None:
        """Begin a loop."""
        self._joined = ExitStack()
        world = self._joined.enter_context(dl.join_world(device="cpu"))
        self._model = network()
        options: dict[str, Any] = {"check_replicas_every": 0}
        self._loop = loop_over(world, "", self._model, count=BATCH * STEPS, shards=SHARDS, **options)
        self._steps: Iterator[dl.Step] = iter(self._loop)
        self._is_over = False
        self._old: dl.Step | None = None
        self._take_step()

    def _take_step(self) -> None:
        self._step = next(self._steps)
        self._is_folded = False
        self._shards: Generator[torch.Tensor, None, None] | None = None
        self._end_pass()

    def _end_pass(self) -> None:
        self._is_open = False
        self._rows: torch.Tensor | None = None  # of the shard at hand
        self._number = -1  # of that shard
        self._done: set[int] = set()  # shards with a last backward
        self._held: set[int] = set()
        self._is_gathered = False
        self._whole: tuple[torch.Tensor, ...] | None = None  # gathered, before its backward
        self._half = False  # whether the shard at hand has one of two losses

    def teardown(self) -> None:
        """Leave the world."""
        self._joined.close()

    def _refuse(self, words: str, call: object, *arguments: object, over: bool = True) -> None:
        """Ask for an error; after most of them the loop is over."""
        with pytest.raises(RuntimeError, match=words):
            call(*arguments)  # type: ignore[operator]
        self._is_over |= over

    @precondition(lambda self: self._is_over)
    @rule()
    def begin_again(self) -> None:
        """Begin another loop in another world, as this one cannot begin again."""
        self._refuse(AT_ONCE, next, iter(self._loop))
        self.teardown()
        self.begin()

    goes_on = precondition(lambda self: not self._is_over)

    @goes_on
    @rule()
    def take_the_next_step(self) -> None:
        """Go on to the next step."""
        if not self._is_folded:
            self._refuse(UNFOLDED, next, self._steps)
        elif self._step.iteration == STEPS:
            assert next(self._steps, None) is None
            self._is_over = True
        else:
            self._old = self._step
            self._take_step()

    @goes_on
    @rule()
    def go_elsewhere(self) -> None:
        """Load a place after the loop has begun."""
        words = "the ranks are not at the same place" if self._is_open else BEGUN
        self._refuse(words, self._loop.load_state_dict, {"iteration": 1, "epoch": 0, "position": 1}, over=False)

    @precondition(lambda self: not self._is_over and not self._is_open)
    @rule()
    def make_a_step(self) -> None:
        """A pass, as it should be, and on to the next step."""
        self.begin_a_pass()
        while self._rows is not None:
            self.go_backward(more=False)
            self.take_the_next_shard()
        self.fold()
        self.take_the_next_step()

    @precondition(lambda self: not self._is_over and self._old is not None and self._is_open)
    @rule(folds=st.booleans())
    def use_an_old_step(self, folds: bool) -> None:
        """Fold or iterate the step before."""
        assert self._old is not None
        if folds:
            self._refuse(OLD, self._old.fold)
        else:
            self._refuse(OLD, next, iter(self._old))

    @goes_on
    @rule()
    def begin_a_pass(self) -> None:
        """Iterate over the step."""
        shards = iter(self._step)
        if self._is_open:
            self._refuse(TWICE, next, shards, over=False)
            return
        self._shards = shards  # type: ignore[assignment]
        self._end_pass()
        self._is_open = True
        self._is_folded = False
        self.take_the_next_shard()

    @precondition(lambda self: not self._is_over and self._shards is not None)
    @rule()
    def take_the_next_shard(self) -> None:
        """Go on in the pass."""
        assert self._shards is not None
        self._rows = next(self._shards, None)
        self._half = False
        self._number += 1

    @precondition(lambda self: not self._is_over and self._shards is not None)
    @rule()
    def leave_the_pass(self) -> None:
        """Break."""
        assert self._shards is not None
        self._shards.close()
        self._rows = None

    @goes_on
    @rule(more=st.booleans())
    def go_backward(self, more: bool) -> None:
        """Backpropagate a loss of the shard at hand, or of all."""
        rows = self._rows
        if rows is None and self._whole is not None:
            self._step.backward(loss_of_outputs(*self._whole))
            self._whole = None
            self._done = set(range(SHARDS))
            return
        if rows is None or self._number in self._done or self._number in self._held:
            loss = loss_of(self._model, samples(3))
            self._refuse(FIRST, self._step.backward, loss, over=False)
            return
        loss = loss_of(self._model, rows) / (2 if more or self._half else 1)
        self._step.backward(loss, more_losses=more and not self._half)
        if more and not self._half:
            self._half = True
        else:
            self._done.add(self._number)

    @goes_on
    @rule()
    def hold(self) -> None:
        """Keep the outputs of the shard at hand."""
        rows = self._rows
        if rows is None or self._half or self._number in self._done or self._number in self._held:
            self._refuse(HELD_ONCE, self._step.hold, torch.ones(3), over=False)
            return
        self._step.hold(self._model(rows), rows)
        self._held.add(self._number)

    @goes_on
    @rule()
    def gather(self) -> None:
        """Get the held outputs of all shards."""
        if self._rows is not None or self._is_gathered or not self._is_open:
            self._refuse(GATHERED_ONCE, self._step.gather, over=False)
        elif self._held != set(range(SHARDS)):
            self._refuse(NOT_HELD, self._step.gather)
        else:
            self._whole = self._step.gather()
            self._is_gathered = True

    @goes_on
    @rule()
    def fold(self) -> None:
        """End the pass."""
        if not self._is_open:
            self._refuse(NO_PASS, self._step.fold)
        elif self._done != set(range(SHARDS)):
            self._refuse(NO_LOSS if self._held else LEFT_OUT, self._step.fold)
        else:
            expected = network()
            loss_of(expected, samples(BATCH * STEPS).split(BATCH)[self._step.iteration - 1]).backward()
            assert self._step.fold().samples == BATCH
            assert is_close(gradients_of(self._model), gradients_of(expected))
            self._is_folded = True
            self._end_pass()


Calls.TestCase.settings = settings(settings.get_profile("fixed"), max_examples=150, stateful_step_count=25)
TestCalls = Calls.TestCase
