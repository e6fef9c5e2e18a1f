"""Containers of tensors: a function applied to each tensor, and each part on its device.

[Note: Placement] How much memory a device has left is known only after a step: a network's activations, gradients and
optimizer may need most of it. So data for a device with limited memory stay on the host at first, and their shards are
copied from pinned memory. They move once, after the first step of a loop that had a whole mini-batch, or at the start
of a second pass of another kind, such as an evaluation. A single pass gains nothing from a move, and one before
training knows nothing of a step. Data move that take less than half of the memory that the peak left, so that a larger
evaluation has room. The memory of freed tensors is given back first: else the data would lie in the midst of memory
that the next step needs in one piece. The host waits for this move, and for no other copy. Each rank decides by its own
device, since values and bits do not depend on where data lie; so there is no collective.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from ddp_loop.accelerators import Accelerator, accelerator_of

Places = Any  # a torch.device, or a tuple or dict of Places
_TEXTS = (str, bytes, PurePath)


@dataclass(frozen=True)
class EncodedTensors:
    """Tensors with one row per sample in a compact form, which a shard keeps until it is on its device.

    Attributes:
        tensors: one, or a tuple or dict of them.
        decode: makes a shard's data from its rows of the tensors, sample by sample.
    """

    tensors: Any
    decode: Callable[[Any], Any]


def map_tensors(change: Callable[[Any], Any], data: Any, kind: type = torch.Tensor) -> Any:
    """Apply `change` to every tensor in nested tuples (named ones too), lists and dicts.

    An object with a method `to`, such as a `PackedSequence`, counts as one tensor, and so does one of another `kind`.
    Classes of dicts stay as they are.
    """
    if callable(getattr(type(data), "to", None)) or isinstance(data, kind):
        return change(data)
    return with_parts(data, lambda key, part: map_tensors(change, part, kind))


def with_parts(data: Any, change: Callable[[Any, Any], Any]) -> Any:
    """A list, tuple or mapping with `change(key, part)` in place of each part; any other value as it is.

    It stays of its own class; a mapping, with its attributes, if that is a dict.
    """
    if isinstance(data, tuple | list):
        parts = [change(number, part) for number, part in enumerate(data)]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    if not isinstance(data, Mapping):
        return data
    values = {key: change(key, part) for key, part in data.items()}
    if type(data) is dict or not isinstance(data, dict | UserDict):
        return values
    changed = copy.copy(data)
    for key, value in values.items():
        changed[key] = value
    return changed


def tensors_in(data: Any) -> list[torch.Tensor]:
    """The tensors in `data`, in order; of an object with `tensors`, those."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, getattr(data, "tensors", data))
    return found


def parse_devices(devices: Any, device: torch.device) -> Places:
    """The argument `devices` of `Batches` with a torch.device in each place; None becomes `device`.

    Raises:
        ValueError: this machine has no such device, or it is not a device.
    """
    if devices is None:
        return device
    if isinstance(devices, Mapping):
        return {key: parse_devices(value, device) for key, value in devices.items()}
    if isinstance(devices, tuple | list):
        return tuple(parse_devices(value, device) for value in devices)
    try:
        return torch.empty(0, device=devices).device  # with its index; raises if there is no such device
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ValueError(
            f"devices must be a device of this machine, or a tuple or dict of them. Got {devices!r} ({error}). Pass "
            '"cpu", or None for the device of the world.'
        ) from error


def at_places(change: Callable[[Any, torch.device], Any], data: Any, places: Places) -> Any:
    """Apply `change(part, device)` to each part of the data that has a device in `places`.

    Raises:
        ValueError: `places` is a tuple or a dict, and the data have another structure.
    """
    if isinstance(places, torch.device):
        return change(data, places)
    is_named = isinstance(places, dict) and isinstance(data, Mapping) and places.keys() == data.keys()
    if is_named or (isinstance(places, tuple) and isinstance(data, tuple | list) and len(places) == len(data)):
        return with_parts(data, lambda key, part: at_places(change, part, places[key]))
    raise ValueError(
        f"devices must be one device, or a tuple or dict with the structure of the data. Got {places} for "
        f"{_shape(data)}."
    )


def _shape(data: Any) -> str:
    if isinstance(data, Mapping):
        return f"a dict of {list(data)}"
    return f"{len(data)} parts" if isinstance(data, tuple | list) else type(data).__name__


def devices_in(places: Places) -> list[torch.device]:
    """The devices in `places`, each once."""
    if isinstance(places, torch.device):
        return [places]
    values = places.values() if isinstance(places, dict) else places
    return list(dict.fromkeys(device for value in values for device in devices_in(value)))


def gpu_in(places: Places) -> torch.device | None:
    """The first GPU in `places`; None without one."""
    return next((device for device in devices_in(places) if accelerator_of(device).is_gpu), None)


def to_devices(data: Any, places: Places) -> Any:
    """`data` with every tensor on its device, for use at once; the host does not wait for a copy from pinned memory."""
    return at_places(_all_on, data, places)


def _all_on(data: Any, device: torch.device) -> Any:
    arrives_late = not accelerator_of(device).is_host  # a copy to the host would be read before it is complete

    def moved(one: Any) -> Any:
        try:
            return one.to(device, non_blocking=arrives_late)
        except TypeError:  # a user's class may take the device alone
            return one.to(device)

    return map_tensors(moved, data)


def pinned(tensor: torch.Tensor, gpu: Accelerator | None) -> torch.Tensor:
    """A contiguous tensor of the host in pinned memory of the GPU, if there is one; any other as it is."""
    if gpu is None or not accelerator_of(tensor.device).is_host or not tensor.is_contiguous():
        return tensor
    return gpu.empty_on_host(tensor).copy_(tensor)


def is_limited(device: torch.device) -> bool:
    """Whether it is known how much of the device's memory is free."""
    return accelerator_of(device).memory_free() < math.inf


def at_first(parts: Any, device: torch.device) -> Any:
    """`parts` on the device, or on the host if its memory is limited; tensors there stay. See [Note: Placement]."""
    if not is_limited(device):
        return _all_on(parts, device)
    return map_tensors(lambda tensor: tensor if tensor.device == device else tensor.to("cpu"), parts)


def move_if_fits(parts: Any, device: torch.device) -> Any:
    """`parts` on the device, or as they are if they do not fit beside the steps so far."""
    elsewhere = [tensor for tensor in tensors_in(parts) if tensor.device != device]
    if not elsewhere:
        return parts
    accelerator = accelerator_of(device)
    accelerator.empty_cache()
    fits = 2 * sum(tensor.nbytes for tensor in elsewhere) < accelerator.memory_free()
    try:
        return _all_on(parts, device) if fits else parts
    except torch.OutOfMemoryError:  # other processes on this device move their data at the same time
        return parts


def without_rows(data: Any) -> Any:
    """The data with tensors and arrays without rows, (0, ...), in place of theirs; numbers and texts stay.

    Containers are searched as by `map_tensors`, and dataclasses too. A list or tuple of texts alone, and a list of
    tensors without dimensions, counts as one for each sample and becomes empty.

    Raises:
        TypeError: another object with tensors is among the data. Its samples would be counted as this rank's.
    """
    if _has_rows(data):
        return data[:0] if data.ndim else data
    if isinstance(data, tuple | list) and _has_one_per_sample(data):
        return type(data)([])
    if isinstance(data, Mapping | tuple | list) and not isinstance(data, PackedSequence):
        return with_parts(data, lambda key, part: without_rows(part))
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        emptied: Any = copy.copy(data)  # dataclasses.replace would call __post_init__, which may refuse no rows
        names = {field.name for field in dataclasses.fields(data) if hasattr(data, field.name)}
        for name in names | set(getattr(data, "__dict__", ())):  # a cached_property has rows too
            object.__setattr__(emptied, name, without_rows(getattr(data, name)))
        return emptied
    if not _has_samples(data):
        return data
    raise TypeError(
        "For synced batch norm a rank without samples calls the model too, with data without rows. Got a "
        f"{_kind(data)}, whose rows cannot be removed. Use larger mini-batches, so that every rank has samples, or let "
        "collate_fn and transform return tensors, arrays, or tuples, lists, dicts and dataclasses of them."
    )


def _has_rows(data: Any) -> bool:
    """Whether it can be sliced by rows, as arrays, tensors and containers of tensors that act as one."""
    if isinstance(data, torch.Tensor):
        return data.layout is torch.strided and not data.is_nested
    return hasattr(data, "ndim") and hasattr(data, "__getitem__") and not isinstance(data, np.generic)


def _has_samples(data: object) -> bool:
    """Whether an object that is no container has tensors or arrays."""
    if isinstance(data, torch.Tensor) or hasattr(data, "to"):
        return True
    return any(isinstance(value, torch.Tensor | np.ndarray) for value in getattr(data, "__dict__", {}).values())


def _kind(data: Any) -> str:
    if not isinstance(data, torch.Tensor):
        return type(data).__name__
    return "nested tensor" if data.is_nested else f"tensor of layout {data.layout}"


def _has_one_per_sample(items: tuple[Any, ...] | list[Any]) -> bool:
    if hasattr(items, "_fields"):
        return False
    if all(isinstance(item, _TEXTS) for item in items):
        return True
    scalars = [item for item in items if isinstance(item, torch.Tensor | np.ndarray) and item.ndim == 0]
    return type(items) is list and len(scalars) == len(items)  # a script unpacks a tuple of scalars
