"""A nested state as JSON and tensors, and back, without pickle or classes looked up by name. See [Note: Tags]."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

# [Note: Tags] None, booleans, strings, finite floats, 64-bit integers and lists stand for themselves. Other values are
# objects with one key, the tag: {"dict": [[key, value], ...]}, {"tensor": [name, dtype, shape, strides]}. Only the tags
# of `_Deserializer.READERS` are read, so a file can produce values of a fixed set of types only.

LEVELS = 100  # of nesting; Python's own stack ends at 1,000 frames
NAME_LETTERS = 200

# The dtypes that every version of safetensors knows, and its words for them; other tensors are stored as bytes.
NATIVE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


DTYPES = {_word(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}

REMEDY = "Give the object a state_dict of plain values (numbers, strings, lists, dicts, tensors), or leave it out"
_TOO_DEEP = f"has more than {LEVELS} levels"
_NUMBERS = "biufc"  # kinds of NumPy's dtypes
_SEVERAL: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_NAMED: dict[type, str] = {dict: "dict", defaultdict: "dict", Counter: "counter"}
is_dense = torch.ops.aten.is_non_overlapping_and_dense


@dataclass(frozen=True, eq=False)
class SerializedState:
    """A serialized state.

    Attributes:
        structure: JSON values; see [Note: Tags].
        tensors: by name, each contiguous and of a dtype in NATIVE; they share the state's memory.
    """

    structure: Any
    tensors: dict[str, torch.Tensor]


def to_tree(state: object) -> SerializedState:
    """Serialize a state; dense tensors are not copied.

    A tensor that occurs several times is stored once. Slices and expanded tensors are stored as their values,
    parameters as tensors.

    Raises:
        TypeError: a value's type cannot be serialized; the message has its path.
        ValueError: the state is nested deeper than LEVELS.
    """
    serializer = _Serializer()
    return SerializedState(serializer.pack(state, "state"), serializer.tensors)


def from_tree(packed: SerializedState) -> Any:
    """Restore a state; its tensors are on the CPU and share memory with the tensors of `packed`.

    Raises:
        ValueError: `packed` is not a result of `to_tree`.
    """
    deserializer = _Deserializer(packed.tensors)
    try:
        state = deserializer.unpack(packed.structure)
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"is malformed ({type(error).__name__}: {error})") from error
    for name in packed.tensors.keys() - deserializer.used:
        raise ValueError(f"has no place for the tensor {name[:NAME_LETTERS]}")
    return state


def parse(data: bytes) -> Any:
    """Parse JSON in UTF-8.

    Raises:
        ValueError: the data is anything else, or nested deeper than Python's stack.
    """
    try:
        return json.loads(data.decode())
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error


class _Serializer:
    """Converts values to JSON, and collects their tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._steps: list[str] = []  # from the state to the current value
        self._known: dict[tuple[Any, ...], Any] = {}
        self._held: list[torch.Tensor] = []  # as long as a tensor lives, no other has its address

    def pack(self, value: Any, step: str) -> Any:
        """Convert a value to JSON, to which a step leads from the value around it."""
        if len(self._steps) > LEVELS:
            raise ValueError(f"{self._path[:NAME_LETTERS]}... {_TOO_DEEP}, or contains itself. Make it flatter.")
        self._steps.append(step)
        packed = self._packed(value)
        self._steps.pop()
        return packed

    def _packed(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if kind is list:
            return self._each(value)
        if kind in _SEVERAL:
            return {_SEVERAL[kind]: self._each(value)}
        if kind in _NAMED:
            return {_NAMED[kind]: self._pairs(value)}
        writer = self.WRITERS.get(kind)
        if writer is not None:
            return writer(self, value)
        if isinstance(value, np.generic) and value.dtype.kind in _NUMBERS:
            return {"number": [value.dtype.str, value.tobytes().hex()]}
        if isinstance(value, torch.Tensor):
            raise self._unknown(
                value, "Only dense tensors of torch's own classes can be stored. Store its dense values"
            )
        raise self._unknown(value, REMEDY)

    @property
    def _path(self) -> str:
        return ".".join(self._steps)

    def _unknown(self, value: object, remedy: str, where: str = "") -> TypeError:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        return TypeError(f"{self._path}{where} is of type {kind}, which a checkpoint cannot store. {remedy}.")

    def _each(self, values: Iterable[Any]) -> list[Any]:
        return [self.pack(one, str(number)) for number, one in enumerate(values)]

    def _pairs(self, value: dict[Any, Any]) -> list[Any]:
        pairs = []
        for key, one in value.items():
            if isinstance(key, torch.Tensor):
                raise self._unknown(key, "Use numbers or strings as keys", " (a key)")
            step = key if type(key) is str else repr(key)
            pairs.append([self.pack(key, f"{step} (the key)"), self.pack(one, step)])
        return pairs

    def _ordered(self, value: OrderedDict[Any, Any]) -> Any:
        # A module's state_dict has the versions of its parts in this attribute; load_state_dict needs it.
        extra = getattr(value, "_metadata", None)
        return {"ordered": [self._pairs(value), self.pack(extra, "_metadata")]}

    def _tensor(self, value: torch.Tensor) -> Any:
        if value.layout is not torch.strided or value.is_nested or value.is_quantized or value.is_meta:
            raise self._unknown(value, "Only dense tensors with values can be stored. Store its values")
        tensor = value.detach()
        place = (tensor.device, tensor.data_ptr() or self._path, tensor.is_conj(), tensor.is_neg())
        form = (*place, tensor.dtype, tensor.shape, tensor.stride())
        if form not in self._known:
            self._held.append(tensor)
            try:
                self._known[form] = self._stored(tensor.resolve_conj().resolve_neg())
            except RuntimeError as error:  # torch cannot copy types smaller than a byte
                raise self._unknown(value, f"Its values cannot be read ({error})") from error
        return {"tensor": self._known[form]}

    def _stored(self, tensor: torch.Tensor) -> list[Any]:
        if not is_dense(tensor):
            tensor = tensor.contiguous()
        stored = tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
        if tensor.dtype not in NATIVE:
            stored = stored.reshape(-1).view(torch.uint8)
        return [self._name(stored), _word(tensor.dtype), list(tensor.shape), list(tensor.stride())]

    def _array(self, value: np.ndarray[Any, Any]) -> Any:
        if value.dtype.kind not in _NUMBERS:
            raise self._unknown(value, f"Its elements, {value.dtype}, are not numbers. {REMEDY}")
        by_columns = value.flags.f_contiguous and not value.flags.c_contiguous
        lines = np.array(value.T if by_columns else value, order="C").reshape(-1).view(np.uint8)
        name = self._name(torch.from_numpy(lines))
        return {"array": [name, value.dtype.str, list(value.shape), "F" if by_columns else "C"]}

    def _name(self, stored: torch.Tensor) -> str:
        """Store a tensor under a unique name: its path, in characters that a file can have."""
        base = self._path.removeprefix("state.")[:NAME_LETTERS].encode("utf-8", "replace").decode()
        name = base
        number = 1
        while name in self.tensors or name == "__metadata__":  # reserved by safetensors
            number += 1
            name = f"{base}#{number}"
        self.tensors[name] = stored
        return name

    WRITERS: ClassVar[dict[type, Callable[[_Serializer, Any], Any]]] = {
        OrderedDict: _ordered,
        complex: lambda self, value: {"complex": struct.pack(">dd", value.real, value.imag).hex()},
        bytes: lambda self, value: {"bytes": base64.b64encode(value).decode()},
        np.ndarray: _array,
        torch.Tensor: _tensor,
        torch.nn.Parameter: _tensor,
        torch.dtype: lambda self, value: {"dtype": _word(value)},
        torch.device: lambda self, value: {"device": str(value)},
        torch.Size: lambda self, value: {"size": list(value)},
    }


class _Deserializer:
    """Restores values from JSON and tensors.

    Attributes:
        used: the names of the tensors that have a place.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.used: set[str] = set()
        self._tensors = tensors
        self._level = 0
        self._made: dict[str, torch.Tensor] = {}

    def unpack(self, value: Any) -> Any:
        """Restore a value from JSON."""
        if isinstance(value, list):
            return self._each(value)
        if not isinstance(value, dict):
            return value
        ((tag, inside),) = value.items() if len(value) == 1 else (("", None),)
        reader = self.READERS.get(tag)
        if reader is None:
            raise ValueError(f"has a value with none of the tags {', '.join(self.READERS)}: {str(value)[:60]}")
        return reader(self, inside)

    def _each(self, values: Iterable[Any]) -> list[Any]:
        if self._level > LEVELS:
            raise ValueError(_TOO_DEEP)
        self._level += 1
        made = [self.unpack(one) for one in values]
        self._level -= 1
        return made

    def _pairs(self, value: Any) -> dict[Any, Any]:
        return dict(map(self._each, value))

    def _ordered(self, value: Any) -> Any:
        pairs, extra = value
        made = OrderedDict(self._pairs(pairs))
        if extra is not None:
            (made._metadata,) = self._each([extra])  # type: ignore[attr-defined]
        return made

    def _taken(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise ValueError(f"names a missing tensor, {name[:NAME_LETTERS]}")
        self.used.add(name)
        return self._tensors[name].detach().to("cpu")

    def _tensor(self, value: Any) -> torch.Tensor:
        name, word, shape, strides = value
        key = json.dumps(value)
        if key not in self._made:
            stored = self._taken(name).reshape(-1)
            dtype = DTYPES[word]
            if dtype not in NATIVE:
                stored = stored.view(dtype)
            made = stored.as_strided(shape, strides)
            if made.dtype != dtype or made.numel() != stored.numel() or not is_dense(made):
                form = f"{word} of shape {shape} and strides {strides}"
                raise ValueError(f"has {name[:NAME_LETTERS]} as {form} instead of {stored.numel()} {stored.dtype}")
            self._made[key] = made
        return self._made[key]

    def _array(self, value: Any) -> Any:
        name, word, shape, order = value
        return self._taken(name).numpy().view(_number_type(word)).reshape(shape, order=order)

    def _number(self, value: Any) -> Any:
        word, bits = value
        (number,) = np.frombuffer(bytes.fromhex(bits), _number_type(word))
        return number

    READERS: ClassVar[dict[str, Callable[[_Deserializer, Any], Any]]] = {
        "dict": _pairs,
        "ordered": _ordered,
        "counter": lambda self, value: Counter(self._pairs(value)),
        "tuple": lambda self, value: tuple(self._each(value)),
        "set": lambda self, value: set(self._each(value)),
        "frozenset": lambda self, value: frozenset(self._each(value)),
        "int": lambda self, value: int(value, 16),
        "float": lambda self, value: struct.unpack(">d", bytes.fromhex(value))[0],
        "complex": lambda self, value: complex(*struct.unpack(">dd", bytes.fromhex(value))),
        "bytes": lambda self, value: base64.b64decode(value, validate=True),
        "number": _number,
        "array": _array,
        "tensor": _tensor,
        "dtype": lambda self, value: DTYPES[value],
        "device": lambda self, value: torch.device(f"{value}"),
        "size": lambda self, value: torch.Size(value),
    }


def _number_type(word: str) -> np.dtype[Any]:
    number: np.dtype[Any] = np.dtype(word)
    if number.kind not in _NUMBERS:
        raise ValueError(f"has an array of {word[:60]} instead of numbers")
    return number
