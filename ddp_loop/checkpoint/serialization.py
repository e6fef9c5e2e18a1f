"""A nested state as JSON values beside tensors, and back: no pickle, no class looked up by name. See [Note: Tags]."""

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

from ddp_loop.accelerators import accelerator_of

# [Note: Tags] None, booleans, words, finite floats, integers of 64 bits and lists stand for themselves. All else is an
# object with one key, its tag: {"dict": [[key, value], ...]}, {"tensor": [name, dtype, shape, strides]}. Only the tags
# of `_Deserializer.READERS` are understood, so that reading makes values of a fixed set of types, whatever a file says.

LEVELS = 100  # of nesting; Python's own stack ends at 1,000 frames
JSON_LEVELS = 4 * LEVELS + 10  # a level of the state takes up to 4 of JSON
NAME_LETTERS = 200

# What tensors lie in a file as; others are bytes there. These are what every version of safetensors knows.
NATIVE = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
DTYPES = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}

REMEDY = "give the object a state_dict of plain values (numbers, words, lists, dicts, tensors), or leave it out"


@dataclass(frozen=True, eq=False)
class SerializedState:
    """A state taken apart.

    Attributes:
        structure: JSON values; see [Note: Tags].
        tensors: by name; each contiguous, of a dtype in NATIVE, where its values lie: it shares the state's memory.
    """

    structure: Any
    tensors: dict[str, torch.Tensor]


def to_tree(state: object) -> SerializedState:
    """Take a state apart, without a copy of its tensors where they are dense.

    A tensor that comes several times is taken once. One that is a slice or expanded is taken as its values. Parameters
    are taken as tensors.

    Raises:
        TypeError: something in it is of no type that can be packed; its path is named.
        ValueError: it is nested deeper than LEVELS.
    """
    packer = _Serializer()
    try:
        structure = packer.pack(state, "state", 0)
    except RecursionError as error:
        raise ValueError(_too_deep("the state")) from error
    return SerializedState(structure, packer.tensors)


def from_tree(packed: SerializedState) -> Any:
    """The state again, its tensors on the CPU, sharing memory with those of `packed`.

    Raises:
        ValueError: `packed` is not what `to_tree` makes.
    """
    unpacker = _Deserializer(packed.tensors)
    try:
        state = unpacker.unpack(packed.structure, 0)
        unpacker.check_all_used()
    except ValueError:
        raise
    except Exception as error:  # whatever a bad file leads to is one thing: a bad file
        raise ValueError(f"a packed state has the form that to_tree makes; {type(error).__name__}: {error}") from error
    return state


def parse(data: bytes) -> Any:
    """JSON read strictly: UTF-8, no key twice, no NaN, at most JSON_LEVELS deep.

    Raises:
        ValueError: it is something else.
    """
    text = data.decode("utf-8")
    if _nesting(text) > JSON_LEVELS:
        raise ValueError(_too_deep("the JSON"))
    try:
        return json.loads(text, object_pairs_hook=_without_doubles, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError(_too_deep("the JSON")) from error


class StagingBuffers:
    """Copies of packed states in memory that is used again: the pages of fresh memory cost more than the copy."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def copy(self, packed: SerializedState) -> SerializedState:
        """The same structure, the tensors copied to the CPU; what the last call returned is overwritten."""
        memory = {}
        pairs: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for name, tensor in packed.tensors.items():
            own = self._memory.get(name)
            if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
                own = accelerator_of(tensor.device).empty_on_host(tensor)
            memory[name] = own
            here, there = pairs.setdefault(tensor.device, ([], []))
            here.append(own)
            there.append(tensor)
        with torch.no_grad():
            events = [accelerator_of(device).start_copies(*copies) for device, copies in pairs.items()]
        for event in events:
            if event is not None:
                event.synchronize()
        self._memory = memory
        return SerializedState(packed.structure, dict(memory))


class _Serializer:
    """Packs values, and gathers their tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._known: dict[tuple[Any, ...], Any] = {}
        self._held: list[torch.Tensor] = []  # while a tensor lives, its address is its own

    def pack(self, value: Any, path: str, level: int) -> Any:
        """A value as JSON."""
        if level > LEVELS:
            raise ValueError(_too_deep(f"{path[:NAME_LETTERS]}..."))
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
            raise _unknown(value, path, "only dense tensors of torch's own class are known: keep its dense values")
        raise _unknown(value, path, REMEDY)

    def _each(self, values: Iterable[Any], path: str, level: int) -> list[Any]:
        return [self.pack(one, f"{path}.{number}", level + 1) for number, one in enumerate(values)]

    def _pairs(self, value: dict[Any, Any], path: str, level: int) -> list[Any]:
        pairs = []
        for key, one in value.items():
            if isinstance(key, torch.Tensor):
                raise _unknown(key, f"{path} (a key)", "let the keys be numbers or words")
            where = f"{path}.{key if type(key) is str else repr(key)}"
            pairs.append([self.pack(key, f"{where} (the key)", level + 1), self.pack(one, where, level + 1)])
        return pairs

    def _ordered(self, value: OrderedDict[Any, Any], path: str, level: int) -> Any:
        # A module's state_dict carries the versions of its parts in this attribute; load_state_dict asks for it.
        extra = getattr(value, "_metadata", None)
        return {"ordered": [self._pairs(value, path, level), self.pack(extra, f"{path}._metadata", level + 1)]}

    def _tensor(self, value: torch.Tensor, path: str, level: int) -> Any:
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise _unknown(value, path, "only dense tensors with values are known: keep its dense values")
        tensor = value.detach()
        place = (tensor.device, tensor.data_ptr() or path, tensor.is_conj(), tensor.is_neg())
        form = (*place, tensor.dtype, tensor.shape, tensor.stride())
        if form not in self._known:
            self._held.append(tensor)
            try:
                self._known[form] = self._stored(tensor.resolve_conj().resolve_neg(), path)
            except RuntimeError as error:  # of the types below a byte torch copies none
                raise _unknown(value, path, f"its values cannot be read ({error})") from error
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
            raise _unknown(value, path, f"of its elements, {value.dtype}, only numbers are known: {REMEDY}")
        by_columns = value.flags.f_contiguous and not value.flags.c_contiguous
        lines = np.array(value.T if by_columns else value, order="C").reshape(-1).view(np.uint8)
        name = self._name(path, torch.from_numpy(lines))
        return {"array": [name, value.dtype.str, list(value.shape), "F" if by_columns else "C"]}

    def _name(self, path: str, stored: torch.Tensor) -> str:
        """Keep a tensor under a name of its own: its path, in letters that a file can have."""
        base = path.removeprefix("state.")[:NAME_LETTERS].encode("utf-8", "replace").decode()
        name, number = base, 1
        while name in self.tensors or name == "__metadata__":  # safetensors' own word
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
    """Makes values of JSON and tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._used: set[str] = set()
        self._made: dict[str, torch.Tensor] = {}

    def unpack(self, value: Any, level: int) -> Any:
        """The value that JSON stands for."""
        if level > LEVELS:
            raise ValueError(_too_deep("the packed state"))
        if isinstance(value, list):
            return [self.unpack(one, level + 1) for one in value]
        if not isinstance(value, dict):
            return value
        ((tag, inside),) = value.items() if len(value) == 1 else (("", None),)
        reader = self.READERS.get(tag)
        if reader is None:
            raise ValueError(f"a packed value has one of the tags {', '.join(self.READERS)}; got {str(value)[:60]}")
        return reader(self, inside, level)

    def check_all_used(self) -> None:
        """Raise ValueError if there are tensors that the structure does not name."""
        if more := set(self._tensors) - self._used:
            raise ValueError(f"each tensor has a place in the structure; {sorted(more)[0][:NAME_LETTERS]} has none")

    def _pairs(self, value: Any, level: int) -> dict[Any, Any]:
        made = {self.unpack(key, level + 1): self.unpack(one, level + 1) for key, one in _a_list(value)}
        if len(made) != len(value):
            raise ValueError("a packed dict has each key once; one came twice")
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
            raise ValueError("the metadata of a state_dict are a dict")
        return made

    def _taken(self, name: Any) -> torch.Tensor:
        if name not in self._tensors:
            raise ValueError(f"a packed state names tensors that are there; {str(name)[:NAME_LETTERS]} is not")
        self._used.add(name)
        return self._tensors[name].detach().to("cpu")

    def _tensor(self, value: Any, level: int) -> torch.Tensor:
        name, word, shape, strides = value
        key = json.dumps(value)
        if key in self._made:
            return self._made[key]
        stored, dtype = self._taken(name), DTYPES[word]
        if dtype not in NATIVE:
            stored = stored.reshape(-1).view(dtype)
        shape, strides = [*map(_size, shape)], [*map(_size, strides)]
        if stored.dtype != dtype or math.prod(shape) != stored.numel() or not _is_dense(shape, strides):
            form = f"{word} of shape {shape} and strides {strides}"
            raise ValueError(f"{name[:NAME_LETTERS]} must be {form}; it is {tuple(stored.shape)} {stored.dtype}")
        made = self._made[key] = stored.reshape(-1).as_strided(shape, strides)
        return made

    def _array(self, value: Any, level: int) -> Any:
        name, word, shape, order = value
        if order not in ("C", "F"):
            raise ValueError(f"an array's order is C or F; got {order}")
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
    """The dimensions from the widest stride to the narrowest; those of one element first, as they say nothing."""
    forms = list(zip(shape, strides, strict=True))
    return sorted(range(len(forms)), key=lambda one: (forms[one][0] != 1, -forms[one][1]))


def _is_dense(shape: list[int], strides: list[int]) -> bool:
    """Whether each element has a place of its own, and no place is left out."""
    expected = 1
    for one in reversed(_order(shape, strides)):
        if shape[one] != 1 and strides[one] != expected and 0 not in shape:
            return False
        expected *= shape[one]
    return True


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"a size is a whole number, 0 or more; got {str(value)[:60]}")
    return value


def _a_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"a packed nest is a list; got {str(value)[:60]}")
    return value


def _number_type(word: Any) -> np.dtype[Any]:
    if not re.fullmatch(r"[<>|][biufc][0-9]{1,2}", word):
        raise ValueError(f"an array's elements are numbers; got {word[:60]}")
    number: np.dtype[Any] = np.dtype(word)
    return number


def _unknown(value: object, path: str, remedy: str) -> TypeError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return TypeError(f"a state is made of plain values and tensors; {path} is a {kind}: {remedy}")


def _too_deep(what: str) -> str:
    return f"a state has at most {LEVELS} levels; {what} has more, or contains itself: make it flatter"


def _nesting(text: str) -> int:
    """How deep brackets nest in JSON; linear in its length also where it is no JSON."""
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
        raise ValueError("an object of JSON has each key once; one came twice")
    return made


def _no_constant(word: str) -> Any:
    raise ValueError(f"JSON has no word {word}")
