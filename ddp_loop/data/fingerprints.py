"""Fingerprints: short descriptions of data, by which the ranks find out whether theirs are the same.

[Note: What is compared] Of tensors all bytes up to 64 MiB, and 256 pieces of 64 KiB of a larger one, which may be
mapped from a file that is too large to read. Of a data set three samples, read with generators keyed by their
positions, so that random augmentation is the same on every rank. Of a stream the first sample of each mini-batch.
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

Fingerprint = dict[str, tuple[str, str]]  # the name of a part -> its type (with shape or length), and its bits

_WHOLE = 64 * 2**20  # bytes
_PIECES = 256
_PIECE = 64 * 2**10  # a number, and bytes
_PARTS = 32  # of a list; a sample may be a list of a million words
_MOST_PARTS = 500
_QUICK_PARTS = 50  # of a sample; the bound ends cycles
_QUICK = 4096  # bytes of a part that `quick` reads
REMEDY = (
    "Give every rank all data, in the same order; Batches splits them. Pass check_data=False if samples differ by "
    "design (a time, a path of the machine)."
)


def of(name: str, value: Any) -> Fingerprint:
    """The fingerprint of `value` and its parts."""
    return {part: (_form(one), _bits(one)) for part, one in islice(_parts(name, value), _MOST_PARTS)}


def of_numbers(name: str, numbers: Sequence[int]) -> Fingerprint:
    """The fingerprint of up to 100,000 of the numbers, evenly spread."""
    found = [numbers[at] for at in _spread(len(numbers), 100_000)]
    try:
        bits = _bits(torch.tensor([int(one) for one in found], dtype=torch.int64, device="cpu"))
        return {name: (f"{len(numbers)} numbers", bits)}
    except (TypeError, ValueError, RuntimeError):  # other keys than numbers; the samples are compared anyway
        return {name: (f"{len(numbers)} keys", "")}


def quick(value: Any) -> int:
    """A checksum of 32 bits that takes some microseconds; for a tensor on a GPU it covers the shape only."""
    found = 0
    for name, part in islice(_parts("", value), _QUICK_PARTS):
        found = zlib.crc32(f"{name} {_form(part)}".encode(), found)
        if isinstance(part, torch.Tensor):
            there = accelerator_of(part.device).is_host and part.layout == torch.strided and not part.is_nested
            if there and part.numel():
                part = part.detach().reshape(-1)[: max(1, _QUICK // part.element_size())]
                part = part.resolve_conj().resolve_neg().contiguous()
                found = zlib.crc32(part.view(torch.uint8).numpy().data, found)
        elif isinstance(part, bytes):
            found = zlib.crc32(part[:_QUICK], found)
        elif isinstance(part, float | int | str):
            found = zlib.crc32(repr(part)[:_QUICK].encode(), found)
    return found


def difference(prints: Sequence[Fingerprint]) -> str | None:
    """The first difference between the ranks' fingerprints, as text; None without one.

    A part is compared between the ranks that have it.
    """
    for name in dict.fromkeys(name for one in prints for name in one):
        there = {rank: one[name] for rank, one in enumerate(prints) if name in one}
        first, (form, bits) = next(iter(there.items()))
        if others := [rank for rank, other in there.items() if other[0] != form]:
            return f"{name} is {form} on rank {first}, but {there[others[0]][0]} on {_ranks(others)}"
        if others := [rank for rank, other in there.items() if other[1] != bits]:
            return f"{name}, {form}, has different values on {_ranks(others)} than on rank {first}"
    return None


def unlike(one: Fingerprint, other: Fingerprint) -> set[str]:
    """The names of the parts that differ."""
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of nested containers, each container before its parts; arrays and the like as tensors."""
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
    elif hasattr(value, "__array__") or hasattr(value, "__array_interface__"):  # a pillow image, say
        yield from _parts_of_array(name, np.asarray(value))
    else:
        yield name, value


def _parts_of_array(name: str, array: np.ndarray[Any, Any]) -> Iterator[tuple[str, Any]]:
    kind = array.dtype.kind if array.dtype.char not in "gG" else ""  # torch has no long double
    if kind in ("M", "m"):
        array = array.view(np.int64)
    if kind and kind in "biufcMm":
        yield name, torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    elif kind:  # not the array's repr: an object's repr may hold its address
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
    """A checksum of the bits; "" for a value whose bits cannot be read."""
    if isinstance(value, torch.Tensor):
        try:
            return f"{int(checksum(_sampled(value.detach()))):x}"
        except (RuntimeError, NotImplementedError, TypeError):
            return ""  # sparse or quantized; its shape is compared
    if isinstance(value, bytes | str | float | int):
        return f"{zlib.crc32(value if isinstance(value, bytes) else repr(value).encode()):x}"
    return ""


def _spread(length: int, most: int) -> list[int]:
    """Up to `most` of the numbers 0 .. length - 1, evenly spread, with the first and the last."""
    if length <= most:
        return list(range(length))
    return [number * (length - 1) // (most - 1) for number in range(most)]


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.nbytes <= _WHOLE:
        return tensor
    if tensor.is_contiguous():
        flat = tensor.reshape(-1)
        length = _PIECE // tensor.element_size()
        return torch.cat([flat[at : at + length] for at in _spread(len(flat) - length + 1, _PIECES)])
    rows = max(3, min(_PIECES, _PIECES * _PIECE * len(tensor) // tensor.nbytes))
    return tensor[torch.tensor(_spread(len(tensor), rows), device=tensor.device)]
