"""Fingerprints: what data are, in a few words, so that ranks can say whether theirs are the same.

[Note: What is compared] Tensors side by side: all bytes up to 64 MiB, and 256 pieces of 64 KiB of larger ones, which
may lie in a file that is too large to read whole. A data set: three of its samples, read on the streams that are keyed
by their numbers, so that random augmentation is the same everywhere. A stream: each mini-batch's first sample.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from ddp_loop.accelerators import accelerator_of
from ddp_loop.determinism import checksum

Fingerprint = dict[str, tuple[str, str]]  # by the part's name: its type (dtype and shape, length), and its bits

_WHOLE = 64 * 2**20  # bytes
_PIECES, _PIECE = 256, 64 * 2**10  # and bytes
_PARTS = 32  # of a list; a sample may be one of a million words
_MOST_PARTS, _QUICK_PARTS = 500, 50  # of a sample: its parts may lead back to it
_QUICK = 4096  # bytes of a part that `quick` looks at
REMEDY = (
    "give every rank the whole data, in the same order; Batches splits them. Samples that differ by design (a time, a "
    "path of the machine) are not compared with check_data=False"
)


def of(name: str, value: Any) -> Fingerprint:
    """What `value` and the parts of it are; what cannot be said is left out."""
    return {part: (_form(one), _bits(one)) for part, one in islice(_parts(name, value), _MOST_PARTS)}


def of_numbers(name: str, numbers: Sequence[int]) -> Fingerprint:
    """Of up to 100,000 of the numbers, evenly spread."""
    found = [numbers[at] for at in _spread(len(numbers), 100_000)]
    try:
        return {name: (f"{len(numbers)} numbers", _bits(torch.tensor([int(one) for one in found], dtype=torch.int64)))}
    except (TypeError, ValueError, RuntimeError):  # keys of another kind: the samples alone are compared
        return {name: (f"{len(numbers)} keys", "")}


def quick(value: Any) -> int:
    """32 bits that tell one sample from another in some microseconds; of what lies on a GPU the shape alone."""
    said = 0
    for name, part in islice(_parts("", value), _QUICK_PARTS):
        said = zlib.crc32(f"{name} {_form(part)}".encode(), said)
        if isinstance(part, torch.Tensor):
            there = accelerator_of(part.device).is_host and part.layout == torch.strided and not part.is_nested
            if there and part.numel():
                part = part.detach().reshape(-1)[: max(1, _QUICK // part.element_size())]
                part = part.resolve_conj().resolve_neg().contiguous()
                said = zlib.crc32(part.view(torch.uint8).numpy().data, said)
        elif isinstance(part, bytes):
            said = zlib.crc32(part[:_QUICK], said)
        elif isinstance(part, float | int | str):
            said = zlib.crc32(repr(part)[:_QUICK].encode(), said)
    return said


def difference(prints: Sequence[Fingerprint]) -> str | None:
    """Where the ranks' fingerprints differ first, and in what; None if they do not.

    A part that a rank left out is not compared with it.
    """
    for name in dict.fromkeys(name for one in prints for name in one):
        there = {rank: one[name] for rank, one in enumerate(prints) if name in one}
        first, (form, bits) = next(iter(there.items()))
        if others := [rank for rank, other in there.items() if other[0] != form]:
            return f"{name} is {form} on rank {first}, but {there[others[0]][0]} on {_ranks(others)}"
        if others := [rank for rank, other in there.items() if other[1] != bits]:
            return f"{name}, {form}, has other values on {_ranks(others)} than on rank {first}"
    return None


def unlike(one: Fingerprint, other: Fingerprint) -> set[str]:
    """The names of the parts that are not the same in both."""
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a nest, each container before what is in it; arrays, and what can be one, as tensors."""
    if isinstance(value, torch.Tensor | str | bytes | float | int) or value is None:
        yield name, value
    elif isinstance(value, Mapping):
        yield name, value
        for key, one in islice(value.items(), _PARTS):
            yield from _parts(f"{name}[{key!r}]", one)
    elif isinstance(value, list | tuple):
        yield name, value
        for key, one in enumerate(value[:_PARTS]):
            yield from _parts(f"{name}[{key}]", one)
    elif is_dataclass(value) and not isinstance(value, type):
        yield name, value
        for field in fields(value):
            yield from _parts(f"{name}.{field.name}", getattr(value, field.name, None))
    elif hasattr(value, "__array__") or hasattr(value, "__array_interface__"):  # a picture of pillow's, say
        yield from _parts_of_array(name, np.asarray(value))
    else:
        yield name, value


def _parts_of_array(name: str, array: np.ndarray[Any, Any]) -> Iterator[tuple[str, Any]]:
    kind = array.dtype.kind if array.dtype.char not in "gG" else ""  # torch has no long doubles
    if kind in ("M", "m"):
        array = array.view(np.int64)
    if kind and kind in "biufcMm":
        yield name, torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    elif kind:  # no repr of the array: that of an object may be where it lies in memory
        yield from _parts(name, [str(array.shape), *array.reshape(-1)[:_PARTS].tolist()])
    else:
        yield name, repr(array)


def _form(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.is_nested:
        return f"nested {str(value.dtype).removeprefix('torch.')} of {value.size(0)}"
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping | list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__


def _bits(value: Any) -> str:
    """A checksum of the bits; "" where there are none to be had."""
    if isinstance(value, torch.Tensor):
        try:
            return f"{int(checksum(_sampled(value.detach()))):x}"
        except (RuntimeError, NotImplementedError, TypeError):
            return ""  # sparse, quantized: its shape has to do
    if isinstance(value, bytes | str | float | int):
        return f"{zlib.crc32(value if isinstance(value, bytes) else repr(value).encode()):x}"
    return ""


def _spread(length: int, most: int) -> list[int]:
    """Up to `most` of 0 .. length - 1, evenly spread, the first and the last among them."""
    if length <= most:
        return list(range(length))
    return [number * (length - 1) // (most - 1) for number in range(most)]


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.nbytes <= _WHOLE:
        return tensor
    if tensor.is_contiguous():
        flat, length = tensor.reshape(-1), _PIECE // tensor.element_size()
        return torch.cat([flat[at : at + length] for at in _spread(len(flat) - length + 1, _PIECES)])
    rows = max(3, min(_PIECES, _PIECES * _PIECE * len(tensor) // tensor.nbytes))
    return tensor[torch.tensor(_spread(len(tensor), rows), device=tensor.device)]
