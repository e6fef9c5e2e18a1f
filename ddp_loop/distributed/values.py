"""Values that ranks send each other, as JSON: nothing that comes from a peer is executed.

Whoever can reach a rank's port could send it a pickle, and with it any call. Here a value is a plain one, a container
of such, or a dataclass of the package marked `sendable`. No class is looked up by a name that was sent.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import fields
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np
import torch

Class = TypeVar("Class", bound=type)
_CONTAINERS: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
_SENDABLE: dict[str, Any] = {}


def sendable(kind: Class) -> Class:
    """Let instances of a dataclass of the package be sent; a decorator."""
    _SENDABLE[kind.__name__] = kind
    return kind


def to_bytes(value: object) -> bytes:
    """A value as JSON.

    Raises:
        TypeError: it is, or contains, something that cannot be sent.
    """
    return json.dumps(_tagged(value), separators=(",", ":")).encode()


def from_bytes(data: bytes) -> Any:
    """The value that `to_bytes` made JSON of.

    Raises:
        ValueError: it did not make this.
    """
    try:
        return _plain(json.loads(data))
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"A rank sent something that is no value ({error!r}).") from error


def _tagged(value: Any) -> Any:
    """Plain values as they are, and others as a list that begins with their kind."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return ["dict", *([_tagged(key), _tagged(one)] for key, one in value.items())]
    if (kind := next((name for name, kind in _CONTAINERS.items() if isinstance(value, kind)), None)) is not None:
        return [kind, *map(_tagged, value)]
    if isinstance(value, bytes):
        return ["bytes", b64encode(value).decode()]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        flat = value.detach().resolve_conj().cpu().contiguous().reshape(-1).view(torch.uint8)
        data = b64encode(flat.numpy().tobytes()).decode()
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), data]
    if isinstance(value, PurePath):
        return ["path", str(value)]
    if type(value) is _SENDABLE.get(type(value).__name__):
        return [type(value).__name__, *(_tagged(getattr(value, field.name)) for field in fields(value))]
    raise TypeError(
        "Ranks send each other None, booleans, numbers, strings, bytes, paths, dense tensors, torch dtypes, and lists, "
        f"tuples, sets and dicts of these. Got {type(value).__name__}. Send its parts."
    )


def _plain(word: Any) -> Any:
    if not isinstance(word, list):
        return word
    kind, *parts = word
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](map(_plain, parts))
    if kind == "dict":
        return {_plain(key): _plain(one) for key, one in parts}
    if kind == "bytes":
        return b64decode(parts[0])
    if kind == "path":
        return Path(parts[0])
    if kind == "dtype":
        return _dtype(parts[0])
    if kind == "tensor":
        name, shape, data = parts
        flat = torch.tensor(np.frombuffer(b64decode(data), np.uint8), device="cpu")
        return flat.view(_dtype(name)).reshape(shape)
    return _SENDABLE[kind](*map(_plain, parts))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch.{name} is no dtype.")
    return found
