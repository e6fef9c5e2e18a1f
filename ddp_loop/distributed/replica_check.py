"""Comparison of replicas: checksums of all ranks' parameters, buffers and optimizers.

[Note: When] A rank that does something alone mostly does it in every step. So a loop compares after its first step,
after the tenth, then at intervals, and once more when it ends, since a short run has no hundredth step. An evaluation
compares its model, since several models would otherwise share a result.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ddp_loop.accelerators import HostCopy
from ddp_loop.determinism import Leaf, checksum_all, leaves
from ddp_loop.distributed.failures import PeerFailed
from ddp_loop.distributed.replicas import each_module, find_modules, find_parameters
from ddp_loop.distributed.world import World

Value = TypeVar("Value")
_MOST_NAMES = 3
_FIRST = (1, 10)  # the steps of this process after which a loop always compares
_WHAT = "a comparison of replicas"
_REMEDY = (
    "Look for what one rank does alone (an `if world.rank`, a value of its own shard, random numbers drawn between the "
    "shards and step.fold, a step that an error left out, a buffer that forward changes in evaluation mode too)"
)


class ReplicaMismatch(RuntimeError):
    """The parameters, buffers or optimizer states differ between ranks."""


def kept_by(prefix: str, value: object, names: Mapping[torch.Tensor, str]) -> Iterator[tuple[str, Leaf]]:
    """The leaves of a value of the state that is no module, by name; an optimizer's by its parameters' names."""
    if isinstance(value, nn.Module):
        return
    if not isinstance(value, Optimizer):
        yield from leaves(prefix, value.state_dict() if hasattr(value, "state_dict") else value)
        return
    yield from _group_settings(prefix, value)
    for parameter, kept in value.state.items():
        owner = names.get(parameter, "a parameter")
        for name, leaf in leaves("", kept):
            yield f"{prefix}, {name.removeprefix('.')} of {owner}", leaf


def _group_settings(prefix: str, optimizer: Optimizer) -> Iterator[tuple[str, Leaf]]:
    for number, group in enumerate(optimizer.param_groups):
        yield from leaves(f"{prefix}, group {number}", {key: one for key, one in group.items() if key != "params"})


def named_tensors(state: Mapping[str, object], without: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """All tensors of a job that must be the same on every rank: parameters, buffers, states of optimizers and others.

    Args:
        state: of the job, by name.
        without: names of buffers that may differ between ranks.
    """
    names: dict[torch.Tensor, str] = {one: name for name, one in find_parameters(state).items()}
    found: dict[str, torch.Tensor] = {f"parameter {name}": one for one, name in names.items()}
    for prefix, module in find_modules(state).items():
        for name, buffer in module.named_buffers(prefix=prefix):
            if name not in without:
                found[f"buffer {name}"] = buffer
    copies = ends_of_copies(state, without)
    for prefix, value in state.items():
        if not isinstance(value, torch.amp.GradScaler):  # its numbers would make the host wait for a GPU
            for name, leaf in kept_by(prefix, value, names):
                if isinstance(leaf, torch.Tensor) and not name.endswith(copies):
                    found[name] = leaf
    return found


def own_names(state: Mapping[str, object], without: Collection[str]) -> set[str]:
    """The names of the buffers `without`, and of their copies: buffers of the same class and name in other modules."""
    modules = find_modules(state)
    named = [
        (prefix, f"{name}.{key}", (type(owner), key))
        for prefix, module in modules.items()
        for name, owner in module.named_modules(prefix=prefix)
        for key, _ in owner._buffers.items()  # a scripted module's have no other iterator
    ]
    kinds = {kind for _, name, kind in named if name in without}
    strict = {prefix for prefix, name, _ in named if name in without}
    return {*without, *(name for prefix, name, kind in named if kind in kinds and prefix not in strict)}


def ends_of_copies(state: Mapping[str, object], without: Collection[str]) -> tuple[str, ...]:
    """The ends of the names under which others, such as early stopping, keep copies of the buffers `without`.

    They keep a module's state dict, in which the buffer model.0.level is called 0.level.
    """
    return tuple(
        name.removeprefix(prefix) for prefix in find_modules(state) for name in without if name.startswith(f"{prefix}.")
    )


def settings_of(state: Mapping[str, object]) -> dict[str, str]:
    """The optimizers' settings that are no tensors, such as each group's learning rate, as text by name."""
    return {
        name: repr(leaf)
        for prefix, value in state.items()
        if isinstance(value, Optimizer)
        for name, leaf in _group_settings(prefix, value)
        if not isinstance(leaf, torch.Tensor)
    }


def describe_difference(rows: Iterable[Iterable[int]], names: Sequence[str]) -> str | None:
    """Which ranks differ from the others, and in which tensors; None if all are equal.

    Args:
        rows: T checksums of each rank.
        names: of the T tensors.
    """
    values = list(map(tuple, rows))
    if len(set(values)) <= 1:
        return None
    places = [number for number, column in enumerate(zip(*values, strict=True)) if len(set(column)) > 1]
    said = ", ".join(names[number] for number in places[:_MOST_NAMES])
    if more := len(places[_MOST_NAMES:]):
        said += f", and {more} more tensor{'s' if more > 1 else ''}"
    return f"{_sides(values)} in {said}"


def _sides(values: Sequence[object]) -> str:
    """The ranks that differ from the majority; without a majority, the groups of equal ranks."""
    groups = _ranks_by(values).values()
    most = max(groups, key=len)
    if len(most) > len(values) / 2:
        few = [rank for rank in range(len(values)) if rank not in most]
        verb = "differs" if len(few) == 1 else "differ"
        return f"{ranks_in_words(few)} of {len(values)} {verb} from the others"
    return f"{' and '.join(map(ranks_in_words, groups))} of {len(values)} differ from each other"


def _ranks_by(values: Sequence[Value]) -> dict[Value, list[int]]:
    """The ranks that have each value."""
    return {one: [rank for rank, value in enumerate(values) if value == one] for one in dict.fromkeys(values)}


def ranks_in_words(ranks: list[int]) -> str:
    """Numbers of ranks, such as "rank 0" or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@dataclass(frozen=True)
class _ReplicaDigest:
    """The replica of a rank at one moment.

    Attributes:
        where: that moment, in words.
        names: of the tensors, each once, with dtype and shape.
        sums: their checksums, (T,) int64.
        settings: the optimizers', by name.
    """

    where: str
    names: list[str]
    sums: HostCopy
    settings: dict[str, str]

    @property
    def number(self) -> int:
        """63 bits that are equal exactly if everything is; never 0."""
        words = "\n".join([*self.names, *(f"{name} = {value}" for name, value in self.settings.items())])
        digest = hashlib.sha256(words.encode() + self.sums.wait().numpy().tobytes()).digest()
        return int.from_bytes(digest[:8], "little") >> 1 | 1


def _take(where: str, tensors: Mapping[str, torch.Tensor], settings: dict[str, str]) -> _ReplicaDigest:
    """Take checksums of these tensors, without waiting for a GPU."""
    names = [f"{name} ({str(one.dtype).removeprefix('torch.')}, {tuple(one.shape)})" for name, one in tensors.items()]
    return _ReplicaDigest(where, names, HostCopy(checksum_all(list(tensors.values()))), settings)


def _difference(taken: _ReplicaDigest | None, world: World) -> str | None:
    """How the ranks' replicas differ; None if they do not, or a rank has none. Every rank must call this."""
    numbers = world.numbers(0 if taken is None else taken.number, _WHAT)  # 8 bytes, which nearly always are equal
    if taken is None or 0 in numbers or len(set(numbers)) == 1:
        return None
    own = dict(zip(taken.names, taken.sums.wait().tolist(), strict=True)), taken.settings
    sums, settings = zip(*world.gather(own), strict=True)
    sums = _without_late_buffers(sums)
    names = [tuple(each) for each in sums]
    if len(set(names)) > 1:
        return _describe_names(names)
    different = describe_difference([each.values() for each in sums], names[0])
    return ", and ".join(filter(None, [_describe_settings(settings), different])) or None


def _without_late_buffers(sums: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """All ranks' checksums without buffers that some lack: forward makes them, and some ranks had no samples yet."""
    bare = [{name.partition(" (")[0] for name in each} for each in sums]
    missing = bare[0].union(*bare) - bare[0].intersection(*bare)
    late = {name for name in missing if name.startswith("buffer ")}
    return [{name: one for name, one in each.items() if name.partition(" (")[0] not in late} for each in sums]


def _compare(pending: _ReplicaDigest | None, world: World) -> None:
    """Raise ReplicaMismatch if the ranks' replicas differ. Every rank must call this."""
    said = _difference(pending, world)
    if pending is not None and said is not None:
        raise ReplicaMismatch(
            "Parameters, buffers and optimizers must be the same on every rank. "
            f"{pending.where}, {said}. {_REMEDY}. A tensor that may differ must not be in state, a buffer that may "
            'needs buffer_reduction={name: "local"}. check_replicas_every=0 turns the comparison off.'
        )


def _compare_left(pending: _ReplicaDigest | None, world: World) -> None:
    with suppress(PeerFailed):  # a break is no error on the rank that left
        _compare(pending, world)


class _Numbered(Protocol):
    @property
    def iteration(self) -> int:
        """Of the step."""


class ReplicaCheck:
    """Compares all ranks' tensors at intervals; on a GPU one step later, so that the host does not wait.

    See [Note: When].

    Args:
        state: of the job, by name.
        world: from `join_world`; it keeps which buffers may differ, and what is never compared.
        interval: the number of steps between two comparisons; with 0 there are none.
        rules: for single buffers, by name; buffers of the rule "local" may differ between ranks.

    Attributes:
        due: the next iteration that it looks at; infinity where it never does.
    """

    def __init__(self, state: Mapping[str, object], world: World, interval: int, rules: Mapping[str, str]) -> None:
        self._state = state
        self._world = world
        self._interval = interval if world.size > 1 else 0
        self._without = own_names(state, [name for name, rule in rules.items() if rule == "local"])
        self._pending: _ReplicaDigest | None = None
        self._folds = 0
        self.due: float = 0 if self._interval else math.inf
        for name, owner in each_module(find_modules(state)).items():
            own = [key for key, _ in owner._buffers.items() if f"{name}.{key}" in self._without]
            world.own_buffers.update((type(owner), key) for key in own)
            if interval == 0:
                world.uncompared.add(owner)

    def before(self, iteration: int, *, had_gradients: bool) -> None:
        """The first shard of a step is next."""

    def after(self, result: _Numbered, mini_batch: object) -> None:
        """Compare after the fold of a step, if a comparison is due. Every rank must call this.

        Raises:
            ReplicaMismatch: the tensors differ between ranks; on every rank, with the names of rank and tensor.
        """
        self.check_pending()
        made = self._folds
        self._folds += 1
        if result.iteration % self._interval == 0 or made in _FIRST:
            self._snapshot(f"At the fold of step {result.iteration}")
            if not self._world.accelerator.is_asynchronous:
                self.check_pending()

    def end(self, iteration: int) -> None:
        """Compare after the loop's last step. Every rank must call this."""
        self.check_pending()
        if self._interval:
            self._snapshot(f"After step {iteration}")
            self.check_pending()

    def leave(self, iteration: int, *, folded: bool) -> None:
        """Compare where the loop is left before its end.

        Checksums are taken now and compared before the next collective: afterwards a rank may change its model.

        Args:
            iteration: of the current step.
            folded: whether that step was folded; before the fold ranks are not at the same place.
        """
        self._pending = None
        if self._interval:
            if folded:
                with suppress(Exception):  # the loop may be left by an error, which must not be hidden
                    self._snapshot(f"Where the loop was left, in step {iteration}")
            self._world.defer(partial(_compare_left, self._take_pending(), self._world))  # keeps no state alive

    def check_pending(self) -> None:
        """Compare the checksums taken before. Every rank must call this."""
        if self._pending is not None:
            _compare(self._take_pending(), self._world)

    def _take_pending(self) -> _ReplicaDigest | None:
        pending = self._pending
        self._pending = None
        return pending

    def _snapshot(self, where: str) -> None:
        self._pending = _take(where, named_tensors(self._state, self._without), settings_of(self._state))


def require_one_model(model: nn.Module, world: World, what: str) -> None:
    """Raise ReplicaMismatch on every rank unless all have the same model. Every rank must call this.

    It compares parameters and persistent buffers, without those that may differ between ranks by a loop's rules.

    Args:
        model: to be compared.
        world: from `join_world`.
        what: the caller's name, for the error.
    """
    if world.size == 1 or any(module in world.uncompared for module in model.modules()):
        return
    taken = _take("", _tensors_of(model, world), {})
    if (said := _difference(taken, world)) is not None:
        raise ReplicaMismatch(
            f"{what} needs the same model on every rank, but {said}. {_REMEDY}, or first copy rank 0's model to all "
            "by world.broadcast_all([*model.parameters(), *model.buffers()])."
        )


def _tensors_of(model: nn.Module, world: World) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {f"parameter {name}": one for name, one in model.named_parameters()}
    for prefix, owner in model.named_modules():
        for key, buffer in owner._buffers.items():
            is_kept = key not in owner._non_persistent_buffers_set and (type(owner), key) not in world.own_buffers
            if buffer is not None and is_kept:
                found[f"buffer {prefix}.{key}".replace(" .", " ")] = buffer
    return {
        name: one
        for name, one in found.items()
        if not is_lazy(one) and one.layout == torch.strided and not one.is_meta  # its values lie in memory
    }


def _describe_settings(settings: Sequence[Mapping[str, str]]) -> str | None:
    """The first setting that differs, with each rank's value; None if none does."""
    names = list(dict.fromkeys(name for one in settings for name in one))
    differing = [name for name in names if len({one.get(name) for one in settings}) > 1]
    if not differing:
        return None
    values = [one.get(differing[0], "nothing") for one in settings]
    groups = _ranks_by(values).items()
    said = f"{differing[0]} is " + " and ".join(f"{value} on {ranks_in_words(ranks)}" for value, ranks in groups)
    return said + (f" ({len(differing) - 1} more settings differ)" if len(differing) > 1 else "")


def _describe_names(names: Sequence[tuple[str, ...]]) -> str:
    """Which ranks have different tensors, and the first tensor that some lack."""
    sets = list(map(set, names))
    everywhere = set.intersection(*sets)
    for name in [name for each in names for name in each]:
        if name not in everywhere:
            having = [rank for rank, one in enumerate(sets) if name in one]
            return f"{_sides(names)}: {name} is on {ranks_in_words(having)} alone"
    return f"{_sides(names)} in the order of their tensors"
