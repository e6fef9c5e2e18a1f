"""The job's state as plain values, and its return to the live objects."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, MutableMapping
from itertools import islice, zip_longest
from math import isfinite
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ddp_loop.accelerators import accelerator_of
from ddp_loop.checkpoint.serialization import SerializedState, from_tree, to_tree
from ddp_loop.determinism import checksum_all, leaves, restore_streams, streams
from ddp_loop.distributed import ReplicaMismatch, World, ends_of_copies, find_modules, own_names

JOB = "job"
_GENERATORS = "generators"
_PARTS = "parts"
_MOST_SETTINGS = 200
_LETTERS = 80
Facts = TypeVar("Facts")


class Stateful(Protocol):
    """An object whose state can be saved and restored."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""


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
        self._parts = parts
        self._device = device
        self._local = own_names(state, local)
        self._local_endings = ends_of_copies(state, local)
        self._modules = set(find_modules(state))

    def check_restorable(self) -> None:
        """Raise TypeError unless every object of the state can be saved and restored."""
        for name, value in self._state.items():
            can = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
            if not can and not isinstance(value, MutableMapping):
                raise TypeError(
                    f"state[{name!r}] is of type {type(value).__name__}, which a checkpoint cannot keep. Give it "
                    "state_dict and load_state_dict, put it into a dict, or remove run_dir=."
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
        job = {name: one.state_dict() if hasattr(one, "state_dict") else one for name, one in self._state.items()}
        parts = {name: one.state_dict() for name, one in self._parts.items()}
        return to_tree({JOB: job, _GENERATORS: random_state(self._device), _PARTS: parts})

    def checksums(self, serialized: SerializedState) -> tuple[list[str], torch.Tensor]:
        """Return the names and the checksums of the tensors that must be equal on all ranks."""
        names = [name for name in serialized.tensors if name.startswith(f"{JOB}.") and not self._is_local(name)]
        return names, checksum_all([serialized.tensors[name] for name in names]).cpu()

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

    def restore(self, serialized: SerializedState, checksums: Mapping[str, int]) -> None:
        """Restore a serialized state, and compare its checksums with those of the checkpoint.

        Raises:
            ValueError: the state does not fit the job.
            ReplicaMismatch: an object changed the values that it restored.
        """
        kept = from_tree(serialized)
        restore(self._state, kept[JOB])
        for name, part in self._parts.items():
            part.load_state_dict(kept[_PARTS][name])
        names, sums = self.checksums(self.serialize())
        for name, value in zip(names, sums.tolist(), strict=True):
            if checksums.get(name, value) != value:
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
        Exception: on rank 0, whatever `read` raises.
        PeerFailed: on the others.
    """
    own: list[dict[str, torch.Tensor]] = []  # on rank 0

    def outline() -> tuple[Facts, Any, dict[str, tuple[tuple[int, ...], torch.dtype]]] | None:
        if (found := read()) is None:
            return None
        facts, packed = found
        own.append(packed.tensors)
        return facts, packed.structure, {key: (tuple(one.shape), one.dtype) for key, one in packed.tensors.items()}

    sent = world.on_rank_zero(outline)
    if sent is None:
        return None
    facts, structure, forms = sent
    empty = {key: torch.empty(shape, dtype=dtype, device="cpu") for key, (shape, dtype) in forms.items() if not own}
    (tensors,) = own or [empty]
    world.broadcast_all(list(tensors.values()))
    return facts, SerializedState(structure, tensors)


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


def restore(state: Mapping[str, object], kept: Mapping[str, Any]) -> None:
    """Restore the live objects of `state` from `kept`, to the bit.

    Raises:
        ValueError: names differ, or a value does not fit its object.
    """
    if state.keys() != kept.keys():
        raise ValueError(
            f"state= has the names {sorted(state)}, the checkpoint {sorted(kept)}. Pass the same names, or "
            "resume=False to start over."
        )
    shared = _shared_memory(state)
    for name, value in state.items():
        try:
            restore_part(value, kept[name], shared)
        except Exception as error:
            raise ValueError(
                f"state[{name!r}] does not fit the checkpoint ({type(error).__name__}: {error}). Build it as before, "
                "or pass resume=False to start over."
            ) from error


def restore_part(value: Any, kept: Any, shared: Collection[int] = ()) -> None:
    """Restore one live object, to the bit; tensors in a dict whose memory is not one of these addresses in place."""
    if isinstance(value, Optimizer):
        needed = set(value.defaults)
        value.load_state_dict(kept)
        for number, group in enumerate(value.param_groups):
            if missing := sorted(needed - group.keys()):
                raise ValueError(f"group {number} of this {type(value).__name__} needs {missing}")
        _keep_bits(value, kept)
    elif hasattr(value, "load_state_dict"):
        value.load_state_dict(kept)
    else:
        _fill(value, kept, shared)


def _fill(own: MutableMapping[Any, Any], kept: Mapping[Any, Any], shared: Collection[int]) -> None:
    """Restore a dict in place, and the dicts, lists, sets, tensors and arrays in it, which the script may refer to."""
    filled = {key: _filled(own.get(key), one, shared) for key, one in kept.items()}
    own.clear()
    own.update(filled)


def _filled(own: Any, kept: Any, shared: Collection[int]) -> Any:
    if isinstance(own, MutableMapping) and isinstance(kept, Mapping):
        _fill(own, kept, shared)
        return own
    if type(own) is list and type(kept) is list:
        own[:] = [_filled(before, one, shared) for before, one in zip_longest(own[: len(kept)], kept)]
        return own
    if type(own) is set and type(kept) is set:
        own.clear()
        own.update(kept)
        return own
    if isinstance(own, torch.Tensor) and isinstance(kept, torch.Tensor):
        return _filled_tensor(own, kept.to(own.device), shared)
    if isinstance(own, np.ndarray) and isinstance(kept, np.ndarray) and own.flags.owndata and own.flags.writeable:
        same_form = (own.shape, own.dtype, own.strides) == (kept.shape, kept.dtype, kept.strides)
        if same_form:
            own[...] = kept
        return own if same_form else kept
    return kept


def _filled_tensor(own: torch.Tensor, kept: torch.Tensor, shared: Collection[int]) -> torch.Tensor:
    """`own` with the bits of `kept`; `kept` itself where that is not possible, or would change another tensor too."""
    same_form = (own.shape, own.dtype, own.stride()) == (kept.shape, kept.dtype, kept.stride())
    if not same_form or own.is_inference() or own.untyped_storage().data_ptr() in shared:
        return kept
    with torch.no_grad():
        return own.copy_(kept)


def _shared_memory(state: Mapping[str, object]) -> set[int]:
    """The addresses of memory that several tensors of a job have; a dict may begin with the model's own weights."""
    counts: Counter[int] = Counter()
    for part in state.values():
        for _, leaf in leaves("", part.state_dict() if hasattr(part, "state_dict") else part):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                counts[leaf.untyped_storage().data_ptr()] += 1
    return {address for address, number in counts.items() if number > 1}


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
    """Return `now` with the dtypes and strides of `saved`, without sharing its memory."""
    if isinstance(now, torch.Tensor) and isinstance(saved, torch.Tensor):
        if (now.dtype, now.stride()) != (saved.dtype, saved.stride()):
            return saved.to(now.device, copy=True)
        shared = now.untyped_storage().data_ptr() == saved.untyped_storage().data_ptr()
        return saved.clone() if shared else now  # others may still read `saved`
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
