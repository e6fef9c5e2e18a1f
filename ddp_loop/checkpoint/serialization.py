"""A nested state as JSON and tensors, and back, without pickle or classes looked up by name. See [Note: Tags]."""

from __future__ import annotations

import base64
import json
import math
import re
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
JSON_LEVELS = 4 * LEVELS + 10  # a level of the state takes up to 4 of JSON
NAME_LETTERS = 200

# The dtypes that every version of safetensors knows; tensors of other dtypes are stored as bytes.
NATIVE = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
DTYPES = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}

_TOO_DEEP = f"has more than {LEVELS} levels"

REMEDY = "Give the object a state_dict of plain values (numbers, strings, lists, dicts, tensors), or leave it out"


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
    try:
        structure = serializer.pack(state, "state", 0)
    except RecursionError as error:
        raise _too_deep("The state") from error
    return SerializedState(structure, serializer.tensors)


def from_tree(packed: SerializedState) -> Any:
    """Restore a state; its tensors are on the CPU and share memory with those of `packed`.

    Raises:
        ValueError: `packed` is not a result of `to_tree`.
    """
    deserializer = _Deserializer(packed.tensors)
    try:
        state = deserializer.unpack(packed.structure, 0)
        deserializer.check_all_used()
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"is malformed ({type(error).__name__}: {error})") from error
    return state


def parse(data: bytes) -> Any:
    """Parse strict JSON: UTF-8, no repeated key, no NaN, at most JSON_LEVELS deep.

    Raises:
        ValueError: the data is anything else.
    """
    text = data.decode("utf-8")
    if _nesting(text) > JSON_LEVELS:
        raise ValueError(_TOO_DEEP)
    try:
        return json.loads(text, object_pairs_hook=_without_doubles, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error


class _Serializer:
    """Converts values to JSON, and collects their tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._known: dict[tuple[Any, ...], Any] = {}
        self._held: list[torch.Tensor] = []  # as long as a tensor lives, no other has its address

    def pack(self, value: Any, path: str, level: int) -> Any:
        """Convert a value to JSON."""
        if level > LEVELS:
            raise _too_deep(f"{path[:NAME_LETTERS]}...")
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if kind is list:
            return self._each(value, path, level)
        writer = self.WRITERS.get(kind)
        if writer is not None:
            return writer(self, value, path, level)
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return {"number": [value.dtype.str, value.tobytes().hex()]}
        if isinstance(value, torch.Tensor):
            raise _unknown(
                value, path, "Only dense tensors of torch's own classes can be stored. Store its dense values"
            )
        raise _unknown(value, path, REMEDY)

    def _each(self, values: Iterable[Any], path: str, level: int) -> list[Any]:
        return [self.pack(one, f"{path}.{number}", level + 1) for number, one in enumerate(values)]

    def _pairs(self, value: dict[Any, Any], path: str, level: int) -> list[Any]:
        pairs = []
        for key, one in value.items():
            if isinstance(key, torch.Tensor):
                raise _unknown(key, f"{path} (a key)", "Use numbers or strings as keys")
            where = f"{path}.{key if type(key) is str else repr(key)}"
            pairs.append([self.pack(key, f"{where} (the key)", level + 1), self.pack(one, where, level + 1)])
        return pairs

    def _ordered(self, value: OrderedDict[Any, Any], path: str, level: int) -> Any:
        # A module's state_dict has the versions of its parts in this attribute; load_state_dict needs it.
        extra = getattr(value, "_metadata", None)
        return {"ordered": [self._pairs(value, path, level), self.pack(extra, f"{path}._metadata", level + 1)]}

    def _tensor(self, value: torch.Tensor, path: str, level: int) -> Any:
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise _unknown(value, path, "Only dense tensors with values can be stored. Store its values")
        tensor = value.detach()
        place = (tensor.device, tensor.data_ptr() or path, tensor.is_conj(), tensor.is_neg())
        form = (*place, tensor.dtype, tensor.shape, tensor.stride())
        if form not in self._known:
            self._held.append(tensor)
            try:
                self._known[form] = self._stored(tensor.resolve_conj().resolve_neg(), path)
            except RuntimeError as error:  # torch cannot copy types smaller than a byte
                raise _unknown(value, path, f"Its values cannot be read ({error})") from error
        return {"tensor": self._known[form]}

    def _stored(self, tensor: torch.Tensor, path: str) -> list[Any]:
        stored = tensor if tensor.is_contiguous() else tensor.permute(_order(tensor.shape, tensor.stride()))
        if not stored.is_contiguous():
            stored = tensor = tensor.contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.dtype not in NATIVE:
            stored = stored.reshape(-1).view(torch.uint8)
        return [self._name(path, stored), dtype, list(tensor.shape), list(tensor.stride())]

    def _array(self, value: np.ndarray[Any, Any], path: str, level: int) -> Any:
        if value.dtype.kind not in "biufc":
            raise _unknown(value, path, f"Its elements, {value.dtype}, are not numbers. {REMEDY}")
        by_columns = value.flags.f_contiguous and not value.flags.c_contiguous
        lines = np.array(value.T if by_columns else value, order="C").reshape(-1).view(np.uint8)
        name = self._name(path, torch.from_numpy(lines))
        return {"array": [name, value.dtype.str, list(value.shape), "F" if by_columns else "C"]}

    def _name(self, path: str, stored: torch.Tensor) -> str:
        """Store a tensor under a unique name: its path, in characters that a file can have."""
        base = path.removeprefix("state.")[:NAME_LETTERS].encode("utf-8", "replace").decode()
        name = base
        number = 1
        while name in self.tensors or name == "__metadata__":  # reserved by safetensors
            number += 1
            name = f"{base}#{number}"
        self.tensors[name] = stored
        return name

    WRITERS: ClassVar[dict[type, Callable[[_Serializer, Any, str, int], Any]]] = {
        dict: lambda self, value, path, level: {"dict": self._pairs(value, path, level)},
        defaultdict: lambda self, value, path, level: {"dict": self._pairs(value, path, level)},
        Counter: lambda self, value, path, level: {"counter": self._pairs(value, path, level)},
        OrderedDict: _ordered,
        tuple: lambda self, value, path, level: {"tuple": self._each(value, path, level)},
        set: lambda self, value, path, level: {"set": self._each(value, path, level)},
        frozenset: lambda self, value, path, level: {"frozenset": self._each(value, path, level)},
        complex: lambda self, value, path, level: {"complex": struct.pack(">dd", value.real, value.imag).hex()},
        bytes: lambda self, value, path, level: {"bytes": base64.b64encode(value).decode()},
        np.ndarray: _array,
        torch.Tensor: _tensor,
        torch.nn.Parameter: _tensor,
        torch.dtype: lambda self, value, path, level: {"dtype": str(value).removeprefix("torch.")},
        torch.device: lambda self, value, path, level: {"device": str(value)},
        torch.Size: lambda self, value, path, level: {"size": list(value)},
    }


class _Deserializer:
    """Restores values from JSON and tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._used: set[str] = set()
        self._made: dict[str, torch.Tensor] = {}

    def unpack(self, value: Any, level: int) -> Any:
        """Restore a value from JSON."""
        if level > LEVELS:
            raise ValueError(_TOO_DEEP)
        if isinstance(value, list):
            return [self.unpack(one, level + 1) for one in value]
        if not isinstance(value, dict):
            return value
        ((tag, inside),) = value.items() if len(value) == 1 else (("", None),)
        reader = self.READERS.get(tag)
        if reader is None:
            raise ValueError(f"has a value with none of the tags {', '.join(self.READERS)}: {str(value)[:60]}")
        return reader(self, inside, level)

    def check_all_used(self) -> None:
        """Raise ValueError if the structure leaves out a tensor."""
        if more := set(self._tensors) - self._used:
            raise ValueError(f"has no place for the tensor {sorted(more)[0][:NAME_LETTERS]}")

    def _pairs(self, value: Any, level: int) -> dict[Any, Any]:
        made = {self.unpack(key, level + 1): self.unpack(one, level + 1) for key, one in _a_list(value)}
        if len(made) != len(value):
            raise ValueError("has a dict with a key twice")
        return made

    def _each(self, value: Any, level: int) -> list[Any]:
        return [self.unpack(one, level + 1) for one in _a_list(value)]

    def _ordered(self, value: Any, level: int) -> Any:
        pairs, extra = value
        made = OrderedDict(self._pairs(pairs, level))
        extra = self.unpack(extra, level + 1)
        if isinstance(extra, dict):
            made._metadata = extra  # type: ignore[attr-defined]
        elif extra is not None:
            raise ValueError("has metadata of a state_dict that are not a dict")
        return made

    def _taken(self, name: Any) -> torch.Tensor:
        if name not in self._tensors:
            raise ValueError(f"names a missing tensor, {str(name)[:NAME_LETTERS]}")
        self._used.add(name)
        return self._tensors[name].detach().to("cpu")

    def _tensor(self, value: Any, level: int) -> torch.Tensor:
        name, word, shape, strides = value
        key = json.dumps(value)
        if key in self._made:
            return self._made[key]
        stored = self._taken(name)
        dtype = DTYPES[word]
        if dtype not in NATIVE:
            stored = stored.reshape(-1).view(dtype)
        shape = [*map(_size, shape)]
        strides = [*map(_size, strides)]
        if stored.dtype != dtype or math.prod(shape) != stored.numel() or not _is_dense(shape, strides):
            form = f"{word} of shape {shape} and strides {strides}"
            raise ValueError(f"has {name[:NAME_LETTERS]} as {form} instead of {tuple(stored.shape)} {stored.dtype}")
        made = self._made[key] = stored.reshape(-1).as_strided(shape, strides)
        return made

    def _array(self, value: Any, level: int) -> Any:
        name, word, shape, order = value
        if order not in ("C", "F"):
            raise ValueError(f"has an array of order {order} instead of C or F")
        flat = self._taken(name).numpy().view(_number_type(word))
        shape = [*map(_size, shape)]
        return flat.reshape(shape) if order == "C" else flat.reshape(shape[::-1]).T

    def _number(self, value: Any, level: int) -> Any:
        word, bits = value
        (number,) = np.frombuffer(bytes.fromhex(bits), _number_type(word))
        return number

    READERS: ClassVar[dict[str, Callable[[_Deserializer, Any, int], Any]]] = {
        "dict": _pairs,
        "ordered": _ordered,
        "counter": lambda self, value, level: Counter(self._pairs(value, level)),
        "tuple": lambda self, value, level: tuple(self._each(value, level)),
        "set": lambda self, value, level: set(self._each(value, level)),
        "frozenset": lambda self, value, level: frozenset(self._each(value, level)),
        "int": lambda self, value, level: int(value, 16),
        "float": lambda self, value, level: struct.unpack(">d", bytes.fromhex(value))[0],
        "complex": lambda self, value, level: complex(*struct.unpack(">dd", bytes.fromhex(value))),
        "bytes": lambda self, value, level: base64.b64decode(value, validate=True),
        "number": _number,
        "array": _array,
        "tensor": _tensor,
        "dtype": lambda self, value, level: DTYPES[value],
        "device": lambda self, value, level: torch.device(f"{value}"),
        "size": lambda self, value, level: torch.Size(map(_size, value)),
    }


def _order(shape: Iterable[int], strides: Iterable[int]) -> list[int]:
    """Sort the dimensions by falling stride; those of one element, whose strides mean nothing, come first."""
    forms = list(zip(shape, strides, strict=True))
    return sorted(range(len(forms)), key=lambda one: (forms[one][0] != 1, -forms[one][1]))


def _is_dense(shape: list[int], strides: list[int]) -> bool:
    """Whether elements neither overlap nor leave gaps."""
    expected = 1
    for one in reversed(_order(shape, strides)):
        if shape[one] != 1 and strides[one] != expected and 0 not in shape:
            return False
        expected *= shape[one]
    return True


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"has a size that is not a whole number of at least 0: {str(value)[:60]}")
    return value


def _a_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"has {str(value)[:60]} instead of a list")
    return value


def _number_type(word: Any) -> np.dtype[Any]:
    if not re.fullmatch(r"[<>|][biufc][0-9]{1,2}", word):
        raise ValueError(f"has an array of {word[:60]} instead of numbers")
    number: np.dtype[Any] = np.dtype(word)
    return number


def _unknown(value: object, path: str, remedy: str) -> TypeError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return TypeError(f"{path} is a {kind}, which a checkpoint cannot store. {remedy}.")


def _too_deep(what: str) -> ValueError:
    return ValueError(f"{what} {_TOO_DEEP}, or contains itself. Make it flatter.")


def _nesting(text: str) -> int:
    """Return how deep brackets nest, in linear time also if the text is not JSON."""
    level = deepest = 0
    for found in re.finditer(r'"(?:[^"\\]++|\\.)*+"?|[][{}]', text, re.DOTALL):
        mark = found[0]
        if mark in "[{":
            level += 1
            deepest = max(deepest, level)
        elif mark in "]}":
            level -= 1
    return deepest


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("has an object with a key twice")
    return made


def _no_constant(word: str) -> Any:
    raise ValueError(f"has {word}, which is not JSON")
