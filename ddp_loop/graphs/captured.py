"""Which calls of a function are recorded, which are replays, and which run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map

from ddp_loop.batch_norm import is_synced
from ddp_loop.determinism import check_count
from ddp_loop.distributed import World
from ddp_loop.graphs.recorded import PLAIN, NotCapturableError, RecordedCall, RecordedLoss, RecordedUpdate, rehearse
from ddp_loop.graphs.state import Fact, JobState, first_difference

_OTHERS_SAID = 3  # other shapes until a line says that they run eagerly
_UNSETTLED = 10  # changes of the state, without a capture in between, until capturing is given up
_MOST_SHAPES = 64  # of inputs before one of them has come often enough


class CapturedFunction:
    """A function whose work a GPU does by one launch; made by `capture`.

    Attributes:
        reason: why all calls run eagerly, in sentences; None if they need not.
        replays: the number of calls that were replays.
        eager_calls: the number of others, with those of the warm-up.
    """

    def __init__(
        self, function: Callable[..., Any], world: World, state: Mapping[str, object], warm_up: int, graphs: int
    ) -> None:
        self._function, self._world, self._state = function, world, JobState(state)
        self._name = getattr(function, "__name__", type(function).__name__)
        self._warm_up, self._most = warm_up, graphs
        self.reason: str | None = None
        self.replays = self.eager_calls = 0
        self._updates: bool | None = None  # whether it makes gradients itself; unknown before the first call
        self._facts: list[Fact] = []
        self._unsettled = 0
        self._seen: dict[Any, int] = {}  # calls of each kind since the state changed
        self._recorded: dict[Any, RecordedCall] = {}
        self._others: set[Any] = set()
        self._recorder = world.accelerator.graph_recorder()
        if self._recorder is None:
            self._give_up(f"A device of the kind {world.accelerator.kind} has no graphs.")
        elif world.size > 1 and any(is_synced(module) for module in self._state.modules.values()):
            self._give_up("Synced batch norm communicates in the forward. Leave sync_batch_norm out to capture it.")

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """What the function returns for these inputs; each tensor is new."""
        if self._updates is None and torch.is_grad_enabled():
            return self._first(inputs, named)
        if self.reason is None and torch.is_grad_enabled():
            values, form = tree_flatten((inputs, named))
            if (kind := self._kind(values, form)) is not None:
                return self._call(kind, values, form, inputs, named)
        return self._eager(inputs, named)

    def _eager(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        self.eager_calls += 1
        found = self._function(*inputs, **named)
        return tree_map(_detached, found) if self._updates else found

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self._recorded.clear()
        self._world.say(f"{self._name} is not captured and runs eagerly. {reason}")

    # -- what kind of function it is -----------------------------------------------------------------------

    def _first(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """The first call, which shows whether the function makes gradients, and which optimizers it steps."""
        stepped: dict[Optimizer, None] = {}
        before = _gradients(self._state)
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: stepped.setdefault(optimizer))
        try:
            self.eager_calls += 1
            found = self._function(*inputs, **named)
        finally:
            hook.remove()
        self._updates = bool(stepped) or any(map(_differ, before, _gradients(self._state)))
        if self.reason is None and (reason := self._objection(list(stepped))):
            self._give_up(reason)
        return tree_map(_detached, found) if self._updates else found

    def _objection(self, stepped: Sequence[Optimizer]) -> str | None:
        """Why a function that steps these optimizers cannot be captured."""
        if stepped and self._world.size > 1:
            return (
                f"It updates parameters, and {self._world.size} ranks must do that together. Return the loss, and call "
                "step.backward, step.fold and optimizer.step outside of it."
            )
        known = set(self._state.optimizers.values())
        for optimizer in stepped:
            if optimizer not in known:
                return f"It steps an optimizer of type {type(optimizer).__name__} that is not in state=. Add it there."
            if not all(group.get("capturable", True) for group in optimizer.param_groups):
                name = type(optimizer).__name__
                return f"The optimizer is not capturable. Use {name}(capturable=True)."
        return None

    # -- one call ------------------------------------------------------------------------------------------

    def _kind(self, values: Sequence[Any], form: TreeSpec) -> Any:
        """What must be equal in two calls, beside the state, so that one graph serves both; None without graphs."""
        inputs: list[tuple[Any, ...]] = []
        for one in values:
            if isinstance(one, torch.Tensor):
                if one.device != self._world.device or one.requires_grad or one.is_sparse:
                    self._give_up(_bad_input(one, self._world.device))
                    return None
                inputs.append((one.shape, one.stride(), one.dtype))
            elif type(one) in PLAIN:
                inputs.append((one, type(one)))
            else:
                self._give_up(f"An input is of type {type(one).__name__}. Pass tensors and plain numbers.")
                return None
        statistics, device = self._state.statistics, self._world.accelerator.kind
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        in_shard = statistics is not None and statistics.captures is not None
        return form, tuple(inputs), autocast, in_shard, id(statistics), torch.are_deterministic_algorithms_enabled()

    def _call(
        self, kind: Any, values: Sequence[Any], form: TreeSpec, inputs: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Any:
        self._look_at_state()
        graph = self._recorded.get(kind)
        if graph is None and self.reason is None:
            if len(self._recorded) == self._most or (kind not in self._seen and len(self._seen) == _MOST_SHAPES):
                self._note_other(kind)
            else:
                self._seen[kind] = seen = self._seen.get(kind, 1) + 1
                if seen <= self._warm_up:
                    return self._warm(inputs, named, is_last=seen == self._warm_up)
                if not self._is_awaited():
                    graph = self._record(kind, values, form)
        if graph is None or self._is_awaited() or not graph.fits():
            return self._eager(inputs, named)
        self.replays += 1
        return graph.replay(values)

    def _look_at_state(self) -> None:
        """Forget what was recorded for another state."""
        if self._state.is_as_before():
            return
        facts = self._state.facts(updates=bool(self._updates))
        if facts == self._facts:
            return
        if self._recorded:
            self._recorded.clear()
            self._recorder = self._world.accelerator.graph_recorder()  # a memory pool must not outlive its graphs
        self._seen.clear()
        self._unsettled += 1
        if self._unsettled > _UNSETTLED:
            changed = first_difference(self._facts, facts)
            self._give_up(f"{changed} changes from call to call, and a graph keeps it. {_remedy(changed)}")
        self._facts = facts

    def _is_awaited(self) -> bool:
        """Whether a replay's loss has yet to be backpropagated, from memory which another one would overwrite."""
        return any(isinstance(one, RecordedLoss) and one.is_awaited() for one in self._recorded.values())

    def _note_other(self, kind: Any) -> None:
        """Say once that there are other shapes, or give up where nothing but others came."""
        if not self._recorded:
            self._give_up(
                f"Its inputs came in {_MOST_SHAPES} shapes, and in none of them {self._warm_up} times. Pad the inputs."
            )
        elif len(self._others) < _OTHERS_SAID and kind not in self._others:
            self._others.add(kind)
            if len(self._others) == _OTHERS_SAID:
                self._world.say(
                    f"{self._name} runs eagerly for inputs of other shapes than the captured ones, and got "
                    f"{_OTHERS_SAID} such shapes. Pad the inputs, or pass capture graphs=."
                )

    # -- warm-up and capture -------------------------------------------------------------------------------

    def _warm(self, inputs: tuple[Any, ...], named: Mapping[str, Any], *, is_last: bool) -> Any:
        """A real call, which sets up what a capture must not."""
        if not self._updates or self._recorder is None:
            return self._eager(inputs, named)
        with self._recorder.aside():  # so that backward's nodes belong to the stream of the capture
            if not is_last:
                return self._eager(inputs, named)
            with self._host_reads() as read:
                found = self._eager(inputs, named)
        if read:
            self._give_up(_reads(read[0]))
        return found

    @contextmanager
    def _host_reads(self) -> Iterator[list[str]]:
        found: list[str] = []
        with self._world.accelerator.host_reads(lambda file, line: found.append(f"{Path(file).name}, line {line}")):
            yield found

    def _record(self, kind: Any, values: Sequence[Any], form: TreeSpec) -> RecordedCall | None:
        """Record this call; None where that is impossible, and nothing has changed."""
        if self._recorder is None:
            return None
        parts = self._function, values, form, self._recorder, self._state
        try:
            with _own_autocast_cache(), self._state.restored_if_abandoned(self._world.device):
                if self._updates:
                    graph: RecordedCall = RecordedUpdate(*parts)
                else:
                    self._rehearse(values, form)
                    graph = RecordedLoss(*parts)
        except NotCapturableError as why:
            self._give_up(str(why))
            return None
        except Exception as error:
            self._give_up(f"Capturing it failed: {_first_line(error)}")
            return None
        self._recorded[kind], self._unsettled = graph, 0
        self._facts = self._state.facts(updates=bool(self._updates))  # of attributes that the call has set
        return graph

    def _rehearse(self, values: Sequence[Any], form: TreeSpec) -> None:
        """A forward and a backward where graphs are recorded, which leave no trace."""
        if self._recorder is not None:
            with self._state.untouched(self._world.device), self._recorder.aside(), self._host_reads() as read:
                rehearse(self._function, values, form, self._state)
            if read:
                raise NotCapturableError(_reads(read[0]))


def _detached(one: Any) -> Any:
    return one.detach() if isinstance(one, torch.Tensor) else one


def _gradients(state: JobState) -> list[tuple[torch.Tensor | None, int]]:
    found = (one.grad for one in state.parameters)
    return [(one, 0 if one is None else one._version) for one in found]


def _differ(one: tuple[torch.Tensor | None, int], other: tuple[torch.Tensor | None, int]) -> bool:
    return one[0] is not other[0] or one[1] != other[1]


@contextmanager
def _own_autocast_cache() -> Iterator[None]:
    """Cast weights inside of the graph: a cached cast would hold the weights of the time of the capture."""
    cached = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def _bad_input(one: torch.Tensor, device: torch.device) -> str:
    if one.device != device:
        return f"An input is on {one.device}, and a graph reads {device}. Move it before the call."
    if one.is_sparse:
        return "An input is sparse. Pass dense tensors."
    return "An input needs a gradient, and only parameters get one. Pass it detached."


def _reads(place: str) -> str:
    return (
        f"The host waits for the device in it ({place}), to read a value or to copy one. Keep values on the device, "
        "and read them after the call."
    )


def _remedy(changed: str) -> str:
    if changed.endswith(".lr"):
        return "Pass lr=torch.tensor(...) on the device, which schedulers write in place."
    return "Keep it constant, or in a tensor that is written in place."


def _first_line(error: BaseException) -> str:
    """Of the first of the errors: the end of an invalid capture raises another one."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def capture(
    function: Callable[..., Any],
    world: World,
    *,
    state: Mapping[str, object],
    warm_up: int = 3,
    graphs: int = 1,
) -> CapturedFunction:
    """Capture a function's work on a GPU as a CUDA graph, so that each later call is one launch.

        def compute(images, labels):
            logits = model(images)
            return cross_entropy(logits, labels), (logits.argmax(1) == labels).float()

        compute = dl.capture(compute, world, state=state)
        for step in loop:
            for images, labels in step:
                loss, hits = compute(images, labels)
                step.backward(loss, accuracy=hits)
            step.fold()
            optimizer.step()

    A function that returns a loss is captured with its backward, on any number of ranks and shards; the fold and the
    optimizer stay eager. A function that calls backward itself, and perhaps an optimizer, is captured as a whole, on
    one rank, in a loop of your own; its outputs are detached. The results are those of the eager function.

    Where a capture is impossible, one line says why, once, and all calls run eagerly. Inputs of another shape, dtype or
    memory format than the captured ones run eagerly too, such as those of a partial mini-batch. If a parameter, buffer
    or optimizer state lies elsewhere than before (a checkpoint was loaded), or a setting of a module or optimizer has
    changed, the function is captured anew.

    A replay runs no Python: the function must not count, print or step a scheduler, and tensors that it reads beside
    its inputs and `state` must stay where they are.

    Args:
        function: takes tensors on the world's device, in any structure, and plain numbers; returns tensors.
        world: from `join_world`.
        state: the modules and optimizers that it uses, by name, as for `Loop`.
        warm_up: the number of eager calls before a capture, at least 2.
        graphs: the number of different shapes of inputs that are captured; 2 for shards whose sizes differ by one.

    Returns:
        To be called like the function. Its `reason` is why it runs eagerly, None if it does not; `replays` and
        `eager_calls` count calls.

    Raises:
        ValueError: a state without modules and optimizers, or a bad number.
    """
    least = check_count("warm_up", warm_up, 2, remedy="The first call shows what the function does.")
    return CapturedFunction(function, world, state, least, check_count("graphs", graphs))
