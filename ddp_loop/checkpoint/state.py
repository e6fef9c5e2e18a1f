"""The job's state as plain values, and its return to the live objects."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from itertools import islice, zip_longest
from math import isfinite
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ddp_loop.accelerators import accelerator_of
from ddp_loop.checkpoint.serialization import SerializedState, from_tree, is_dense, to_tree
from ddp_loop.determinism import checksum_all, leaves, restore_streams, streams
from ddp_loop.distributed import (
    ReplicaMismatch,
    World,
    each_module,
    ends_of_copies,
    find_modules,
    find_parameters,
    own_names,
)

JOB = "job"
_GENERATORS = "generators"
_PARTS = "parts"
_SAME = "same objects"  # by name of a part, the places in it whose object was never replaced by another
_MOST_SETTINGS = 200
_LETTERS = 80
Facts = TypeVar("Facts")


class Stateful(Protocol):
    """An object whose state can be saved and restored."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""


class OutsideStateDict:
    """The state of a job's modules that no `state_dict` contains, but a run may have changed.

    It is which parameters are frozen and, where they are not as the script made them, the modes of layers
    (`layer.eval()`), and the buffers with `persistent=False`. Sums of their bits show which buffers have changed: the
    fold, `.data` and NumPy write without a new version. An optimizer numbers its parameters; their names, in its order,
    tell whether a resumed run numbers them alike.

    Args:
        state: of the job.
        device: of a restored buffer that the script has made as None.
    """

    def __init__(self, state: Mapping[str, object], device: torch.device) -> None:
        self._state = state
        self._device = device
        self._modes: dict[str, bool] = {}
        self._began: dict[str, object] = {}

    def begin(self) -> None:
        """Take the modes and buffers as the script made them."""
        self._modes = {name: layer.training for name, layer in self._layers().items()}
        self._began = _bits_of(self._buffers())

    def state_dict(self) -> dict[str, Any]:
        """The names of the frozen and of the optimizers' parameters; the modes and buffers that have changed."""
        buffers = self._buffers()
        bits = _bits_of(buffers)
        return {
            "frozen": [name for name, one in find_parameters(self._state).items() if not one.requires_grad],
            "modes": {
                name: layer.training
                for name, layer in self._layers().items()
                if layer.training != self._modes.get(name, True)
            },
            "buffers": {name: one for name, one in buffers.items() if self._began.get(name) != bits[name]},
            "optimizers": numbered(self._state),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Freeze exactly these parameters, and restore these modes and buffers; older checkpoints have none.

        Raises:
            ValueError: an optimizer has its parameters in another order.
        """
        own = numbered(self._state)
        for name, saved in state.get("optimizers", {}).items():
            for number, (here, there) in enumerate(zip(own.get(name, saved), saved, strict=False), 1):
                if here != there:
                    raise ValueError(
                        f"The state of an optimizer belongs to its parameters by their order. In state[{name!r}] "
                        f"number {number} is {here}, in the checkpoint {there}. Give it its parameters in the same "
                        "order (a set has another one in each process), or pass resume=False to start over."
                    )
        for name, parameter in find_parameters(self._state).items():
            parameter.requires_grad_(name not in state["frozen"])
        modes = state.get("modes", {})
        layers = self._layers()
        for name, layer in layers.items():
            layer.training = modes.get(name, layer.training)
        buffers = self._buffers()
        restored: dict[int, torch.Tensor | None] = {}  # what was one tensor under several names stays one
        for name, kept in state.get("buffers", {}).items():
            if name in buffers:
                if id(kept) not in restored:
                    before = torch.empty(0, device=self._device) if buffers[name] is None else buffers[name]
                    restored[id(kept)] = _filled(before, kept, {name}, name)
                owner, _, key = name.rpartition(".")
                layers[owner]._buffers[key] = restored[id(kept)]

    def _layers(self) -> dict[str, nn.Module]:
        return each_module(find_modules(self._state))

    def _buffers(self) -> dict[str, torch.Tensor | None]:
        """The buffers with `persistent=False`, by name; None is one too, as `register_buffer` takes it."""
        return {
            f"{name}.{key}": one
            for name, layer in self._layers().items()
            for key, one in layer._buffers.items()
            if key in layer._non_persistent_buffers_set
        }


def numbered(state: Mapping[str, object]) -> dict[str, list[str]]:
    """For each optimizer of a job, the names of its parameters in its order."""
    names = {id(one): name for name, one in find_parameters(state).items()}
    return {
        name: [names[id(one)] for group in part.param_groups for one in group["params"]]
        for name, part in state.items()
        if isinstance(part, Optimizer)
    }


def numbered_in(kept: Mapping[str, Any]) -> dict[str, list[str]]:
    """The same of a checkpoint's state; older ones have none."""
    names: dict[str, list[str]] = kept[_PARTS].get("trained", {}).get("optimizers", {})
    return names


def _bits_of(buffers: Mapping[str, torch.Tensor | None]) -> dict[str, object]:
    """What tells, by name, whether a buffer has the same bits; a quantized one cannot be kept anyway."""
    found = {name: one for name, one in buffers.items() if one is not None and not one.is_quantized}
    sums = zip(found.items(), checksum_all([*found.values()]).tolist(), strict=True)
    return dict.fromkeys(buffers) | {name: (one.dtype, one.shape, number) for (name, one), number in sums}


class JobState:
    """The job's objects, the loop's own parts and the random generators, saved and restored together.

    Args:
        state: the job's objects by name.
        parts: the loop's own parts by name.
        local: names of buffers that differ between ranks; rank 0's values are saved.
        device: the device whose generator is saved too.
    """

    def __init__(
        self,
        state: Mapping[str, object],
        parts: Mapping[str, Stateful],
        local: Collection[str],
        device: torch.device,
    ) -> None:
        self._state = state
        self._outside = OutsideStateDict(state, device)
        self._parts = {**parts, "trained": self._outside}
        self._device = device
        self._local = own_names(state, local)
        self._local_endings = ends_of_copies(state, local)
        self._modules = set(find_modules(state))
        self._began: dict[str, dict[str, weakref.ref[Any]]] = {}

    def begin(self) -> None:
        """Take the script's state, before a checkpoint is restored, as unchanged by the run."""
        self._outside.begin()
        self._began = {
            name: {path: weakref.ref(one) for path, one in objects_in(value)} for name, value in self._state.items()
        }

    def check_restorable(self) -> None:
        """Raise TypeError unless every object of the state can be saved and restored."""
        for name, value in self._state.items():
            can = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
            if not can and not isinstance(value, MutableMapping):
                raise TypeError(
                    f"state[{name!r}] is of type {type(value).__name__}, which a checkpoint cannot keep. Give it "
                    "state_dict and load_state_dict, put its values into a dict, or remove run_dir=."
                )

    def settings(self) -> dict[str, object]:
        """The numbers and words that a script gave its optimizers, schedules and the like, by name; for JSON."""
        found = {
            leaf: one
            if isinstance(one, int | None) or (isinstance(one, float) and isfinite(one))
            else str(one)[:_LETTERS]
            for name, value in self._state.items()
            if hasattr(value, "state_dict") and not isinstance(value, nn.Module)
            for leaf, one in leaves(name, value.state_dict())
            if not isinstance(one, torch.Tensor) and "._" not in leaf and ".params." not in leaf
        }
        return dict(islice(found.items(), _MOST_SETTINGS))

    def serialize(self) -> SerializedState:
        """Serialize the current state; the tensors share its memory.

        Raises:
            TypeError, ValueError: a value cannot be serialized.
        """
        job = {name: _state_of(name, one) for name, one in self._state.items()}
        parts = {name: one.state_dict() for name, one in self._parts.items()}
        same = {
            name: [path for path, one in objects_in(self._state[name]) if path in began and began[path]() is one]
            for name, began in self._began.items()
        }
        return to_tree({JOB: job, _GENERATORS: random_state(self._device), _PARTS: parts, _SAME: same})

    def checksums(self, serialized: SerializedState) -> dict[str, int]:
        """Return the checksums of the tensors that must be equal on all ranks, by name."""
        names = [name for name in serialized.tensors if name.startswith(f"{JOB}.") and not self._is_local(name)]
        sums = checksum_all([serialized.tensors[name] for name in names])
        return dict(zip(names, sums.tolist(), strict=True))

    def checksums_of_values(self, serialized: SerializedState) -> dict[str, int]:
        """The checksum of each object's numbers, words and the like, all but its tensors, by name."""
        parts = dict(serialized.structure["dict"])[JOB]["dict"]
        return {name: zlib.crc32(_in_order(packed).encode()) for name, packed in parts}

    def _is_local(self, name: str) -> bool:
        """Whether a tensor is a buffer that differs between ranks, or a copy of one."""
        name = name.removeprefix(f"{JOB}.")
        is_in_module = name.partition(".")[0] in self._modules
        return name in self._local or (not is_in_module and name.endswith(self._local_endings))

    def release(self) -> None:
        """Forget the objects; `checksums` still knows which tensors are compared."""
        self._state = {}
        self._parts = {}
        self._outside = OutsideStateDict({}, self._device)
        self._began = {}

    def restore(self, serialized: SerializedState, checksums: Mapping[str, int]) -> None:
        """Restore a serialized state, and compare its checksums with the checkpoint's.

        Raises:
            ValueError: the state does not fit the job.
            ReplicaMismatch: an object changed the values that it restored.
        """
        kept = from_tree(serialized)
        restore(self._state, kept[JOB], kept.get(_SAME, {}))
        for name, part in self._parts.items():
            part.load_state_dict(kept[_PARTS][name])
        now = self.serialize()
        for name, value in self.checksums(now).items():
            if checksums.get(name, value) != value:
                here = _form_of(now, name)
                there = _form_of(serialized, name)
                if here != there:
                    raise ValueError(
                        f"{name} is {here}, in the checkpoint {there}. Build it with that dtype and memory format, or "
                        "begin a new run with these weights: another run_dir= and resume_from=."
                    )
                raise ReplicaMismatch(
                    f"{name} differs from the checkpoint after it was restored. Check whether its load_state_dict "
                    "changes values."
                )
        restore_random_state(kept[_GENERATORS], self._device)


def read_on_rank_zero(
    world: World, read: Callable[[], tuple[Facts, SerializedState] | None]
) -> tuple[Facts, SerializedState] | None:
    """Read a state and facts about it on rank 0, for all ranks. Every rank must call this.

    Raises:
        Exception: on rank 0, any that `read` raises.
        PeerFailed: on the others.
    """
    own: list[SerializedState] = []  # on rank 0

    def outline() -> tuple[Facts, Any, dict[str, tuple[tuple[int, ...], torch.dtype]]] | None:
        if (found := read()) is None:
            return None
        facts, packed = found
        own.append(packed)
        return facts, packed.structure, {key: (tuple(one.shape), one.dtype) for key, one in packed.tensors.items()}

    sent = world.on_rank_zero(outline)
    if sent is None:
        return None
    facts, structure, forms = sent
    if not own:
        empty = {key: torch.empty(shape, dtype=dtype, device="cpu") for key, (shape, dtype) in forms.items()}
        own.append(SerializedState(structure, empty))
    world.broadcast_all(list(own[0].tensors.values()))
    return facts, own[0]


def _form_of(packed: SerializedState, name: str) -> str:
    """The dtype and the strides of a tensor of the job in words; empty if it has no place of this name."""
    one = dict(leaves(JOB, from_tree(packed)[JOB])).get(name)
    return f"{one.dtype} with strides {one.stride()}" if isinstance(one, torch.Tensor) else ""


def _state_of(name: str, value: Any) -> Any:
    """The state dict of a part of the job, or the dict that it is."""
    try:
        return value.state_dict() if hasattr(value, "state_dict") else value
    except KeyError as error:
        if not isinstance(value, Optimizer):
            raise
        raise ValueError(
            f"An optimizer's state must be of parameters in its groups. state[{name!r}] has some of another one, as "
            "after a group was removed. Remove it too: optimizer.state.pop(parameter) for each."
        ) from error


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of the generators of Python, NumPy and torch."""
    (version, numbers, left), numpy, torch_, accelerator, own = streams(device)
    words = np.array(numbers, dtype=np.uint32)  # as JSON, the 625 values would take 0.5 ms
    state = {"python": [version, words, left], "numpy": numpy, "torch": torch_}
    return state if own is None else state | {accelerator.kind: own}


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the state of the generators."""
    version, numbers, left = state["python"]
    python = version, tuple(numbers.tolist()), left
    accelerator = accelerator_of(device)
    restore_streams((python, tuple(state["numpy"]), state["torch"], accelerator, state.get(accelerator.kind)))


def restore(state: Mapping[str, object], kept: Mapping[str, Any], same: Mapping[str, Collection[str]]) -> None:
    """Restore the live objects of `state` from `kept`, to the bit.

    Args:
        state, kept: by name.
        same: which places of `objects_in` had one object from the Loop on; it is filled in place.

    Raises:
        ValueError: names differ, or a value does not fit its object.
    """
    if state.keys() != kept.keys():
        raise ValueError(
            f"state= has the names {sorted(state)}, the checkpoint {sorted(kept)}. Pass the same names, or "
            "resume=False to start over."
        )
    for name, value in state.items():
        try:
            restore_part(value, kept[name], set(same.get(name, ())))
        except Exception as error:
            groups = "with all groups of add_param_group, " if isinstance(value, Optimizer) else ""
            raise ValueError(
                f"state[{name!r}] does not fit the checkpoint ({type(error).__name__}: {error}). Build it as before, "
                f"{groups}or pass resume=False to start over."
            ) from error


def restore_part(value: Any, kept: Any, same: Collection[str] = ()) -> None:
    """Restore one live object, to the bit; `same` as for `restore`."""
    if isinstance(value, Optimizer):
        needed = set(value.defaults)
        groups = [*value.param_groups]
        value.load_state_dict(kept)
        for number, group in enumerate(groups):
            _fill(group, {**value.param_groups[number]}, same, f"/{number}")
            value.param_groups[number] = group  # torch makes new ones, and the script may refer to these
            if missing := sorted(needed - group.keys()):
                raise ValueError(f"group {number} of this {type(value).__name__} needs {missing}")
        _keep_bits(value, kept)
        value._opt_called = True  # type: ignore[attr-defined]  # else torch warns of a scheduler that steps before it
    elif isinstance(value, nn.Module):
        value.load_state_dict(kept)
    elif hasattr(value, "load_state_dict"):  # it may keep the tensors that it gets
        value.load_state_dict(_placed(value.state_dict(), kept))
    else:
        _fill(value, kept, same)


def _placed(own: Any, kept: Any) -> Any:
    """The kept values, with each tensor on the device of the one in its place; dicts and lists are changed in place."""
    if isinstance(own, torch.Tensor) and isinstance(kept, torch.Tensor):
        return kept.to(own.device)
    if isinstance(own, Mapping) and isinstance(kept, MutableMapping):
        for key in own.keys() & kept.keys():
            kept[key] = _placed(own[key], kept[key])
    elif isinstance(own, list) and isinstance(kept, list):
        kept[: len(own)] = map(_placed, own, kept)
    elif type(own) is type(kept) is tuple and len(own) == len(kept):
        return tuple(map(_placed, own, kept))
    return kept


def _fill(own: MutableMapping[Any, Any], kept: Mapping[Any, Any], same: Collection[str], path: str = "") -> None:
    """Restore a dict in place, and the dicts and lists in it, which the script may refer to."""
    make = getattr(own, "default_factory", None) or (lambda: None)  # of a defaultdict in a defaultdict
    filled = {
        key: _filled(own[key] if key in own else make(), one, same, f"{path}/{key!r}") for key, one in kept.items()
    }
    own.clear()
    own.update(filled)


def _filled(own: Any, kept: Any, same: Collection[str], path: str) -> Any:
    if isinstance(own, MutableMapping) and isinstance(kept, Mapping):
        _fill(own, kept, same, path)
        return own
    if type(own) is list and type(kept) is list:
        pairs = enumerate(zip_longest(own[: len(kept)], kept))
        own[:] = [_filled(before, one, same, f"{path}/{number}") for number, (before, one) in pairs]
        return own
    if path in same and type(own) is set and type(kept) is set:
        own.clear()
        own.update(kept)
        return own
    if isinstance(own, torch.Tensor) and isinstance(kept, torch.Tensor):
        kept = kept.to(own.device)
        if path in same and _can_take(own, kept):
            with torch.no_grad():
                return own.copy_(kept)
    elif path in same and isinstance(own, np.ndarray) and isinstance(kept, np.ndarray):
        has_own_memory = own.flags.owndata and own.flags.writeable
        if has_own_memory and (own.shape, own.dtype, own.strides) == (kept.shape, kept.dtype, kept.strides):
            own[...] = kept
            return own
    return kept


def _can_take(own: torch.Tensor, kept: torch.Tensor) -> bool:
    """Whether a tensor can be given the bits of another one in its own memory, which is torch's: no mapped file."""
    if any(one.layout is not torch.strided or one.is_nested or one.is_inference() for one in (own, kept)):
        return False
    is_slice = not (is_dense(own) or 0 in own.stride())  # stored as its values; an expanded one cannot take any
    has_same_form = (own.shape, own.dtype) == (kept.shape, kept.dtype) and (is_slice or own.stride() == kept.stride())
    return has_same_form and own.untyped_storage().resizable()


def objects_in(part: object) -> Iterator[tuple[str, Any]]:
    """What a resume can fill in place in a part of the state, a dict or an optimizer's settings, with its places."""
    if isinstance(part, Optimizer):
        part = [{name: one for name, one in group.items() if name != "params"} for group in part.param_groups]
    elif hasattr(part, "state_dict"):
        return
    yield from _objects("", part)


def _objects(path: str, value: object) -> Iterator[tuple[str, Any]]:
    """The tensors, arrays and sets in nested dicts and lists, each with its place."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _objects(f"{path}/{key!r}", one)
    elif type(value) is list:
        for number, one in enumerate(value):
            yield from _objects(f"{path}/{number}", one)
    elif isinstance(value, torch.Tensor | np.ndarray | set):
        yield path, value


def _keep_bits(optimizer: Optimizer, kept: Mapping[str, Any]) -> None:
    """Undo the casts of `load_state_dict`: it gives an optimizer's float32 state the dtype of a bfloat16 parameter."""
    pairs = zip(optimizer.param_groups, kept["param_groups"], strict=True)
    numbers = {
        number: one for group, saved in pairs for one, number in zip(group["params"], saved["params"], strict=True)
    }
    for number, saved in kept["state"].items():
        place = numbers.get(number, number)  # a key that belongs to no parameter stays
        optimizer.state[place] = _with_bits(optimizer.state[place], saved)


def _with_bits(now: Any, saved: Any) -> Any:
    """Return `now` with the tensors of `saved` in place of its own, without sharing memory, which others may read."""
    if isinstance(now, torch.Tensor) and isinstance(saved, torch.Tensor):
        return saved.to(now.device, copy=True)
    if isinstance(now, dict) and isinstance(saved, Mapping):
        now.update({key: _with_bits(now[key], one) for key, one in saved.items() if key in now})
    elif type(now) in (list, tuple) and isinstance(saved, list | tuple) and len(now) == len(saved):
        return type(now)(_with_bits(*pair) for pair in zip(now, saved, strict=True))
    return now


_UNORDERED = {"dict", "counter", "set", "frozenset"}  # tags of values that are equal in any order


def _in_order(packed: Any) -> str:
    """A packed value in words, with those that have no order of their own sorted."""
    if isinstance(packed, dict):
        ((tag, content),) = packed.items()
        words = [_in_order(one) for one in content] if isinstance(content, list) else [str(content)]
        return f"{tag}({', '.join(sorted(words) if tag in _UNORDERED else words)})"
    return f"[{', '.join(map(_in_order, packed))}]" if isinstance(packed, list) else repr(packed)
