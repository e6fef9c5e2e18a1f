"""Replicas that became different: all ranks' parameters, buffers and optimizer states, compared by checksums."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ddp_loop.checksums import checksums
from ddp_loop.digests import Leaf, leaves
from ddp_loop.replicas import find_modules, find_parameters
from ddp_loop.world import World

_MOST_NAMES = 3


class ReplicasDiffer(RuntimeError):
    """The ranks' parameters, buffers or optimizer states are not the same any more."""


def kept_by(prefix: str, value: object, names: Mapping[torch.Tensor, str]) -> Iterator[tuple[str, Leaf]]:
    """What a value of the state that is no module keeps, by name; an optimizer under its parameters' names."""
    if isinstance(value, nn.Module):
        return
    if not isinstance(value, Optimizer):
        yield from leaves(prefix, value.state_dict() if hasattr(value, "state_dict") else value)
        return
    for number, group in enumerate(value.param_groups):
        settings = {name: setting for name, setting in group.items() if name != "params"}
        yield from leaves(f"{prefix}, group {number}", settings)
    for parameter, kept in value.state.items():
        owner = names.get(parameter, "a parameter")
        for name, leaf in leaves("", kept):
            yield f"{prefix}, {name.removeprefix('.')} of {owner}", leaf


def named_tensors(state: Mapping[str, object], without: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """All tensors of a job that must be the same on every rank: parameters, buffers, what optimizers and others keep.

    Args:
        state: what the job is made of, by name.
        without: the names of buffers that each rank has for itself.
    """
    names: dict[torch.Tensor, str] = {one: name for name, one in find_parameters(state).items()}
    found: dict[str, torch.Tensor] = {f"parameter {name}": one for one, name in names.items()}
    for prefix, module in find_modules(state).items():
        for name, buffer in module.named_buffers(prefix=prefix):
            if name not in without:
                found[f"buffer {name}"] = buffer
    for prefix, value in state.items():
        if not isinstance(value, torch.amp.GradScaler):  # numbers, and to ask for them would hold a GPU's host up
            for name, leaf in kept_by(prefix, value, names):
                if isinstance(leaf, torch.Tensor):
                    found[name] = leaf
    return found


def own(state: Mapping[str, object], without: Collection[str] = ()) -> tuple[list[str], torch.Tensor]:
    """This rank's tensors: names with dtype and shape, and their checksums, (T,) int64 on the host."""
    tensors = named_tensors(state, without)
    return _forms(tensors), checksums(list(tensors.values())).cpu()


def _forms(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return [f"{name} ({str(one.dtype).removeprefix('torch.')}, {tuple(one.shape)})" for name, one in tensors.items()]


def describe_difference(rows: Sequence[torch.Tensor], names: Sequence[str]) -> str | None:
    """Which ranks differ from the others, and in which tensors; None if all are the same.

    Args:
        rows: each rank's checksums, (T,) each.
        names: of the tensors, T.
    """
    values = [tuple(row.tolist()) for row in rows]
    if len(set(values)) <= 1:
        return None
    places = [number for number, column in enumerate(zip(*values, strict=True)) if len(set(column)) > 1]
    said = ", ".join(names[number] for number in places[:_MOST_NAMES])
    if more := len(places[_MOST_NAMES:]):
        said += f", and {more} more tensor{'s' if more > 1 else ''}"
    return f"{_sides(values)} in {said}"


def _sides(values: Sequence[object]) -> str:
    """Which ranks are few against most of them; where there are no such, which have the same."""
    usual, times = Counter(values).most_common(1)[0]
    if times > len(values) / 2:
        few = [rank for rank, value in enumerate(values) if value != usual]
        verb = "differs" if len(few) == 1 else "differ"
        return f"{_ranks(few)} of {len(values)} {verb} from the others"
    groups = [[rank for rank, value in enumerate(values) if value == one] for one in dict.fromkeys(values)]
    return f"{' and '.join(map(_ranks, groups))} of {len(values)} differ from each other"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Replicas:
    """Compares all ranks' tensors now and then: on a GPU with what was there one step before, so that nobody waits.

    Args:
        state: what the job is made of, by name.
        world: from `join_world`.
        interval: the number of steps between two looks; 0 never looks.
        rules: for single buffers, by name; those of the rule "local" are each rank's own.
        late: whether checksums stay on their device until the next step; by default on a GPU.
    """

    def __init__(
        self,
        state: Mapping[str, object],
        world: World,
        interval: int,
        rules: Mapping[str, str],
        *,
        late: bool | None = None,
    ) -> None:
        self._state, self._world = state, world
        self._interval = interval if world.size > 1 else 0
        self._without = [name for name, rule in rules.items() if rule == "local"]
        self.late = world.device.type != "cpu" if late is None else late
        self._pending: tuple[int, list[str], torch.Tensor, torch.cuda.Event | None] | None = None

    def look(self, iteration: int) -> None:
        """Compare, if it is time, behind the fold of this step. Every rank must call this.

        Raises:
            ReplicasDiffer: on every rank, if the tensors are not the same on all; which rank and tensor.
        """
        self.settle()
        if not self._interval or iteration % self._interval:
            return
        tensors = named_tensors(self._state, self._without)
        sums, event = checksums(list(tensors.values())), None
        if sums.device.type == "cuda":
            sums = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._pending = iteration, _forms(tensors), sums, event
        if not self.late:
            self.settle()

    def settle(self) -> None:
        """Compare what a GPU was still to say. Every rank must call this."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        iteration, names, sums, event = pending
        if event is not None:
            event.synchronize()
        if not self._is_same(names, sums):
            self._refuse(iteration, names, sums)

    def _is_same(self, names: list[str], sums: torch.Tensor) -> bool:
        """Whether all ranks have the same names and checksums: asked in 8 bytes, since they nearly always have."""
        digest = hashlib.sha256("\n".join(names).encode() + sums.numpy().tobytes()).digest()[:8]
        mine = torch.tensor([int.from_bytes(digest, "little", signed=True)])
        whole = mine.repeat(self._world.size)
        self._world.demand_free()
        self._world.finish(self._world.start_gather(whole, mine))
        return bool((whole == whole[0]).all())

    def _refuse(self, iteration: int, names: list[str], sums: torch.Tensor) -> None:
        all_names, all_sums = zip(*self._world.gather((names, sums.tolist())), strict=True)
        if len(set(map(tuple, all_names))) > 1:
            said = _describe_names(all_names)
        else:
            said = describe_difference([torch.tensor(row) for row in all_sums], names) or "all are the same now"
        raise ReplicasDiffer(
            f"parameters, buffers and optimizer states must be the same on every rank; at the fold of step {iteration} "
            f"{said}: look for what one rank does alone (an `if world.rank`, a value of its own shard, a step that an "
            "error left out); a tensor that is to be a rank's own is kept out of state, a buffer is given "
            'buffers={name: "local"}; check_replicas=0 compares nothing'
        )


def _describe_names(names: Sequence[Sequence[str]]) -> str:
    """Which ranks have other tensors, and the first one that not all have."""
    sets = list(map(set, names))
    everywhere = set.intersection(*sets)
    for name in [name for each in names for name in each]:
        if name not in everywhere:
            having = [rank for rank, one in enumerate(sets) if name in one]
            return f"{_sides([tuple(each) for each in names])}: {name} is on {_ranks(having)} alone"
    return f"{_sides([tuple(each) for each in names])} in the order of their tensors"
