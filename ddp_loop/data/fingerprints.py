"""Fingerprints: short descriptions of data, by which the ranks find out whether theirs are the same, and the errors.

[Note: What is compared] Of tensors all bytes up to 64 MiB, and 256 pieces of 64 KiB of a larger one, which may be
mapped from a file that is too large to read. Of a data set three samples, read with generators keyed by their
positions, so that random augmentation is the same on every rank. Of a stream the first sample of each mini-batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from ddp_loop.accelerators import accelerator_of
from ddp_loop.data.shards import MiniBatch
from ddp_loop.determinism import checksum
from ddp_loop.distributed import World, ranks_in_words

Fingerprint = dict[str, tuple[str, str]]  # the name of a part -> its type (with shape or length), and its bits

_WHOLE = 64 * 2**20  # bytes
_PIECES = 256
_PIECE = 64 * 2**10  # a number, and bytes
_PARTS = 32  # of a list; a sample may be a list of a million words
_MOST_PARTS = 500
_QUICK_PARTS = 50  # of a sample; the bound ends cycles
_QUICK = 4096  # bytes of a part that `quick` reads
_REMEDY = (
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
        if not isinstance(part, torch.Tensor):
            found = zlib.crc32(_text(part)[:_QUICK], found)
        elif accelerator_of(part.device).is_host and part.layout == torch.strided and not part.is_nested:
            part = part.detach().reshape(-1)[: max(1, _QUICK // part.element_size())]
            part = part.resolve_conj().resolve_neg().contiguous()
            found = zlib.crc32(part.view(torch.uint8).numpy().data, found)
    return found


def difference(prints: Sequence[Fingerprint]) -> str | None:
    """The first difference between the ranks' fingerprints, as text; None without one.

    A part is compared between the ranks that have it.
    """
    for name in dict.fromkeys(name for one in prints for name in one):
        there = {rank: one[name] for rank, one in enumerate(prints) if name in one}
        first, (form, bits) = next(iter(there.items()))
        if others := [rank for rank, other in there.items() if other[0] != form]:
            return f"{name} is {form} on rank {first}, but {there[others[0]][0]} on {ranks_in_words(others)}"
        if others := [rank for rank, other in there.items() if other[1] != bits]:
            return f"{name}, {form}, has different values on {ranks_in_words(others)} than on rank {first}"
    return None


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of nested containers, each container before its parts; arrays and the like as tensors."""
    if isinstance(value, torch.Tensor) and value.is_quantized:
        yield name, value.int_repr()  # torch crashes where it views the bits of the tensor itself
    elif isinstance(value, torch.Tensor | str | bytes | float | int) or value is None:
        yield name, value
    elif isinstance(value, Mapping | list | tuple):
        yield name, value
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, one in islice(items, _PARTS):
            yield from _parts(f"{name}[{key!r}]", one)
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
    """A checksum of the bits; the same for all values whose bits cannot be read."""
    if isinstance(value, torch.Tensor):
        try:
            return f"{int(checksum(_sampled(value.detach()))):x}"
        except (RuntimeError, NotImplementedError, TypeError):
            return ""  # sparse; its shape is compared
    return f"{zlib.crc32(_text(value)):x}"


def _text(value: Any) -> bytes:
    """The bytes of a word or a number; none of another value."""
    if isinstance(value, bytes):
        return value
    return repr(value).encode() if isinstance(value, str | float | int) else b""


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


# -- agreement ---------------------------------------------------------------------------------------------


def require_alike(prints: Sequence[Fingerprint]) -> None:
    """Raise ValueError unless the ranks' fingerprints agree."""
    if (differs := difference(prints)) is not None:
        raise ValueError(f"Every rank must be given the same data; {differs}. {_REMEDY}")


def _first_sample(mini_batch: MiniBatch) -> Fingerprint:
    return of(f"the first sample of mini-batch {mini_batch.position + 1}", mini_batch.first)


def check_first(mini_batch: MiniBatch, world: World) -> None:
    """Raise ValueError on every rank unless all read the same first sample of a stream. Every rank must call this."""
    require_alike(world.gather(_first_sample(mini_batch), "the samples of a stream"))


def check_end(ranks: int, mini_batch: MiniBatch, world: World) -> None:
    """Raise ValueError on every rank unless a stream ended at the same sample on all. Every rank must call this.

    Args:
        ranks: the number of ranks whose stream ended in this mini-batch.
        mini_batch: the last of the stream.
        world: the ranks.
    """
    if ranks != world.size:
        raise ValueError(
            f"A stream must give every rank the same samples. In mini-batch {mini_batch.position + 1} of "
            f"epoch {mini_batch.epoch} it ended on {ranks} of {world.size} ranks. Give every rank the whole "
            "stream, since Batches makes the shards."
        )
    world.require_equal("the samples of a stream's last mini-batch", mini_batch.samples)


@dataclass(slots=True)
class StreamPass:
    """The samples of a pass over a stream so far: their number, a digest, and the first mini-batch."""

    samples: int = 0
    digest: int = 0
    first: MiniBatch | None = None

    def add(self, mini_batch: MiniBatch) -> None:
        self.first = self.first or mini_batch
        self.samples += mini_batch.samples
        self.digest = zlib.crc32(b"%d %d" % (self.digest, mini_batch.digest))

    def check(self, world: World) -> None:
        """Raise ValueError unless all ranks read the same in the pass that ended. Every rank must call this."""
        whole: Fingerprint = {"the stream": (f"{self.samples} samples", str(self.digest))}
        if difference(world.gather(whole, "the samples of a stream")) is not None:
            found = {} if self.first is None else _first_sample(self.first)
            require_alike(world.gather(found | whole, "the samples of a stream"))


def check_data(read: Callable[[], Fingerprint], world: World) -> None:
    """Raise ValueError on every rank unless all were given the same data. Every rank must call this.

    Args:
        read: the fingerprint of this rank's data; it is called again if ranks differ.
        world: the ranks.
    """
    found = read()
    if difference(world.gather(found, "what the data are")) is not None:
        # A part that changes when it is read again (a time, say) cannot be compared with other ranks.
        again = read()
        changed = {name for name in found.keys() | again.keys() if found.get(name) != again.get(name)}
        unsteady = set().union(*world.gather(changed, "what the data are, read again"))
        steady = {name: one for name, one in found.items() if name not in unsteady}
        require_alike(world.gather(steady, "what the data are"))
