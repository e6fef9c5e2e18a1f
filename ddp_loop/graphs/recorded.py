"""Recorded work: a loss with its backward, as two graphs, or a whole update, as one.

[Note: Static tensors] A graph reads and writes fixed addresses. Inputs are copied into tensors of its own before each
replay, and its outputs are copied out of it, since the next replay overwrites them.

[Note: The gradients of a loss] Autograd sees one node whose backward replays the second graph, so `step.backward`,
hooks on parameters and several shards work as ever. The node's gradients are the graph's own memory, without a copy:
the fold takes them out after each shard. Where a `.grad` still lies there at the next replay, it moves to memory of its
own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ddp_loop.accelerators import GraphRecorder
from ddp_loop.batch_norm import BatchNormStatistics, Captures
from ddp_loop.graphs.state import JobState

Function = Callable[..., Any]
PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))  # equal where they are the same
_ANY = torch.empty(0, device="cpu")  # a gradient that the function replaces, whatever it was


class NotCapturableError(Exception):
    """Why a function cannot be captured, and the remedy, in sentences."""


class RecordedCall:
    """What both kinds of graph have: static inputs and outputs, and the tensors that a replay writes.

    Args:
        function: of the user.
        values, form: its inputs, flat, and their structure.
        recorder: of the device.
        state: the job's.
    """

    def __init__(
        self, function: Function, values: Sequence[Any], form: TreeSpec, recorder: GraphRecorder, state: JobState
    ) -> None:
        self._function, self._form, self._recorder, self._state = function, form, recorder, state
        self._values = copies_of(values)
        self._inputs = [one for one in self._values if isinstance(one, torch.Tensor)]
        self._outputs: list[Any] = []
        self._shape = form
        self._written: list[torch.Tensor] = []
        self._versions = [(one, one._version) for one in (*self._inputs, *self._tensors())]

    def _tensors(self) -> list[torch.Tensor]:
        """The job's tensors that a replay may write."""
        return [*self._state.parameters, *self._state.buffers]

    def _call(self) -> Any:
        inputs, named = tree_unflatten(self._values, self._form)
        return self._function(*inputs, **named)

    def _keep(self, found: Any) -> None:
        """Keep what the recorded call returned, and note which tensors it wrote."""
        self._outputs, self._shape = outputs_of(found)
        self._written = [one for one, version in self._versions if one._version != version]
        self._versions = []
        if any(one is other for one in self._inputs for other in self._written):
            raise NotCapturableError("It writes an input, and a graph reads copies. Write a clone.")

    @torch.no_grad()
    def _fill(self, values: Sequence[Any]) -> None:
        if self._inputs:
            torch._foreach_copy_(self._inputs, [one for one in values if isinstance(one, torch.Tensor)])

    def _copies(self) -> list[Any]:
        """Of the outputs, after a replay."""
        if self._written:
            increment_version(self._written)  # a replay writes past torch's version counter
        return copies_of(self._outputs)

    def fits(self) -> bool:
        """Whether a replay does now what the function would do."""
        return True

    def replay(self, values: Sequence[Any]) -> Any:
        """Do the recorded work with other inputs; returns what the function returns."""
        raise NotImplementedError


class RecordedUpdate(RecordedCall):
    """A function that makes gradients, and perhaps updates parameters by them."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._parameters = self._state.parameters
        before, known = [one.grad for one in self._parameters], set(map(id, self._state.optimizer_tensors))
        found, self._replay = self._recorder.record(self._call)
        self._keep(found)
        after = [one.grad for one in self._parameters]
        expected = (old if old is None or old is new else _ANY for old, new in zip(before, after, strict=True))
        self._gradients = list(zip(self._parameters, expected, after, strict=True))
        for parameter, gradient in zip(self._parameters, before, strict=True):
            parameter.grad = gradient  # as at the call, of which the first replay makes what comes after it
        if not {id(one) for one in self._state.optimizer_tensors} <= known:
            raise NotCapturableError(
                "An optimizer made new state while it was captured, which each replay would make anew. Give all "
                "parameters gradients from the first step on."
            )

    def _tensors(self) -> list[torch.Tensor]:
        return [*super()._tensors(), *self._state.optimizer_tensors]

    def fits(self) -> bool:
        """Whether the gradients are those that the function found when it was recorded, where it starts from them."""
        return all(expected is _ANY or parameter.grad is expected for parameter, expected, _ in self._gradients)

    def replay(self, values: Sequence[Any]) -> Any:
        self._fill(values)
        self._replay()
        for parameter, _, after in self._gradients:
            if parameter.grad is not after:
                parameter.grad = after
        return tree_unflatten(self._copies(), self._shape)


class RecordedLoss(RecordedCall):
    """A function that returns one tensor with a graph, its loss, and others without."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.forwards = 0  # replays
        self._captures: Captures | None = None
        self._last: Callable[[], Any] = lambda: None  # the node of the last replay, while something holds it
        self._leaves: list[Parameter] = []
        self._seed = torch.empty(0, device="cpu")
        self._statistics = statistics_of(self._state)
        with ExitStack() as ending:
            self._record(ending)

    def _record(self, ending: ExitStack) -> None:
        def forward() -> Any:
            if self._statistics is not None:
                self._captures = ending.enter_context(self._statistics.apart())  # whose zeros belong to the graph
            return self._call()

        found, self._forward = self._recorder.record(forward)
        self._keep(found)
        self._place = loss_of(self._outputs)
        loss = self._outputs[self._place]
        self._leaves = leaves_of(loss, self._state)
        self._seed = torch.ones_like(loss)
        versions = [one._version for one in self._state.buffers]
        with in_backward(self._statistics, self._captures):
            found, self._backward = self._recorder.record(lambda: gradients_of(loss, self._leaves, self._seed))
        self._gradients: list[torch.Tensor | None] = found
        if versions != [one._version for one in self._state.buffers]:
            raise NotCapturableError(
                "The backward writes buffers: it repeats a forward (activation checkpointing). Leave the checkpointing "
                "out."
            )
        self._loss, self._outputs[self._place] = loss.detach(), None

    def is_awaited(self) -> bool:
        """Whether the last replay's loss has yet to be backpropagated, from memory that a further replay overwrites."""
        node = self._last()
        return node is not None and not node.is_done

    def replay(self, values: Sequence[Any]) -> Any:
        self._fill(values)
        self._forward()
        self.forwards += 1
        shard = None if self._statistics is None else self._statistics.captures
        if shard is not None and self._captures is not None:
            shard.repeat(self._captures)
        loss: Any = _Loss.apply(self, self._loss, *self._leaves)  # type: ignore[no-untyped-call]
        self._last = weakref.ref(loss.grad_fn)
        outputs = self._copies()
        outputs[self._place] = loss
        return tree_unflatten(outputs, self._shape)

    def backward(self, gradient: torch.Tensor) -> list[torch.Tensor | None]:
        """The parameters' gradients, in memory that the next backward overwrites."""
        for leaf, static in zip(self._leaves, self._gradients, strict=True):
            if leaf.grad is not None and static is not None and leaf.grad.data_ptr() == static.data_ptr():
                leaf.grad.data = leaf.grad.data.clone()
        self._seed.copy_(gradient)
        self._backward()
        return [None if one is None else one.detach() for one in self._gradients]


class _Loss(torch.autograd.Function):
    """The loss of a replay; see [Note: The gradients of a loss]."""

    @staticmethod
    def forward(ctx: Any, graph: RecordedLoss, loss: torch.Tensor, *leaves: Parameter) -> torch.Tensor:
        ctx.graph, ctx.number, ctx.is_done = graph, graph.forwards, False
        ctx.set_materialize_grads(False)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        graph: RecordedLoss = ctx.graph
        if ctx.is_done or ctx.number != graph.forwards:
            raise RuntimeError(
                "The loss of a captured function can be backpropagated once, before its function is replayed. This one "
                f"{'was backpropagated' if ctx.is_done else 'came before another replay'}. Add losses up before one "
                "backward, or call the function itself instead of the captured one."
            )
        ctx.is_done = True
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        return (None, None, *graph.backward(gradient))


def copies_of(values: Sequence[Any]) -> list[Any]:
    """New tensors, and what is no tensor."""
    return [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in values]


def outputs_of(found: Any) -> tuple[list[Any], TreeSpec]:
    """What a function returned, flat, and its structure.

    Raises:
        NotCapturableError: it has more than tensors and plain numbers.
    """
    outputs, shape = tree_flatten(found)
    for one in outputs:
        if not isinstance(one, torch.Tensor) and type(one) not in PLAIN:
            raise NotCapturableError(
                f"It returns a {type(one).__name__}. Return tensors and plain numbers, in tuples, lists or dicts."
            )
    return outputs, shape


def statistics_of(state: JobState) -> BatchNormStatistics | None:
    """What captures batch-norm statistics now; outside of a shard layers update their own, and it is None."""
    statistics = state.statistics
    return None if statistics is None or statistics.captures is None else statistics


@contextmanager
def in_backward(statistics: BatchNormStatistics | None, captures: Captures | None) -> Iterator[None]:
    """Calls of layers inside, which repeat a forward, are not captured."""
    if statistics is None or captures is None:
        yield
        return
    statistics.discard()
    try:
        yield
    finally:
        statistics.go_on(captures)


def rehearse(function: Function, values: Sequence[Any], form: TreeSpec, state: JobState) -> None:
    """A forward and a backward, whose gradients are discarded."""
    statistics = statistics_of(state)
    with nullcontext() if statistics is None else statistics.apart() as captures:
        inputs, named = tree_unflatten(copies_of(values), form)
        outputs, _ = outputs_of(function(*inputs, **named))
        loss = outputs[loss_of(outputs)]
        with in_backward(statistics, captures):
            gradients_of(loss, leaves_of(loss, state), torch.ones_like(loss))


def loss_of(outputs: Sequence[Any]) -> int:
    """The place of the one output with a graph.

    Raises:
        NotCapturableError: there is none, or another one too.
    """
    places = [place for place, one in enumerate(outputs) if isinstance(one, torch.Tensor) and one.requires_grad]
    if len(places) != 1:
        raise NotCapturableError(
            f"It returns {len(places)} tensors that need a gradient. Return one loss, and detach() the others."
        )
    return places[0]


def leaves_of(loss: torch.Tensor, state: JobState) -> list[Parameter]:
    """The parameters that a loss depends on, each once.

    Raises:
        NotCapturableError: one is not in the state, or has a hook, which would run twice, recorded and replayed.
    """
    found: dict[Any, None] = {}
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            found[variable] = None
        waiting += [following for following, _ in node.next_functions]
    if not found.keys() <= set(state.parameters):
        raise NotCapturableError("It uses parameters that are not in state=. Add their modules there.")
    if any(one._backward_hooks for one in found):
        raise NotCapturableError(
            "A parameter has a hook on its gradient, which would run twice. Register it by "
            "register_post_accumulate_grad_hook, or change the gradient after step.fold()."
        )
    return list(found)


def gradients_of(loss: torch.Tensor, leaves: list[Parameter], seed: torch.Tensor) -> list[torch.Tensor | None]:
    """The gradients of `seed` times the loss.

    Raises:
        NotCapturableError: one is sparse.
    """
    found: list[torch.Tensor | None] = list(torch.autograd.grad(loss, leaves, seed, allow_unused=True))
    if any(one is not None and one.is_sparse for one in found):
        raise NotCapturableError("A gradient is sparse. Make the embedding with sparse=False.")
    return found
