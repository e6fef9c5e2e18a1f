"""Digests and checksums, which decide whether two values have the same bits.

[Note: The sum] The bytes are read as signed words x_i of 32 bits, the last one padded with zeros:

    checksum = sum_i w_i x_i  mod 2^64,    w_i = a_(i // K) b_(i mod K)

a and b are odd numbers that look random, so every w_i is odd. One flipped bit changes the sum by 2^b w_i with b < 32,
which is never 0 mod 2^64, so a single flipped bit is always found. The words have 32 bits because with 64 a swap of two
values that differ in sign alone would be missed (w_i 2^63 = w_j 2^63). Any other difference is missed with a
probability of about 2^-64. Weights of 2 i + 1 are weaker: 2^20 values that are all multiplied by 4 give the same sum.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from ddp_loop.accelerators import accelerator_of, sent
from ddp_loop.determinism.seeding import splitmix64

_WORDS = 2**14 - 1  # K, the same on every device; on the CPU K words and their weights stay in the cache
_PIECES_AT_ONCE = 256  # on a GPU, where a kernel should be worth its launch


def _odd(count: int, stream: int, device: torch.device) -> torch.Tensor:
    """Odd numbers that look random and are always the same; (count,) int64."""
    return splitmix64(stream, torch.arange(1, count + 1, device=device)) | 1


@torch.no_grad()
def words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in the order of its elements, whatever its strides; (W,) int32, padded with zeros.

    A view if the elements have that order in memory and start at a whole word, else a copy.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size = flat.element_size()
    if flat.numel() * size % 4:
        flat = torch.cat([flat.view(torch.uint8), flat.new_zeros(-flat.numel() * size % 4, dtype=torch.uint8)])
    elif flat.storage_offset() * size % 4:
        flat = flat.clone()
    return flat.view(torch.int32)


def _length(tensor: torch.Tensor) -> int:
    """W of `words`."""
    return -(-tensor.numel() * tensor.element_size() // 4)


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The checksum of a tensor's bits: shape (), int64, on its device; the host does not wait for it."""
    return checksum_all([tensor])[0]


@torch.no_grad()
def checksum_all(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The checksum of each tensor. See [Note: The sum].

    Neither shape, dtype nor device enters: zeros of any kind give 0. The memory needed is a few times K words on the
    CPU, and 256 times as much elsewhere.

    Args:
        tensors: T dense tensors of any dtype.

    Returns:
        (T,) int64, on the device of the first tensor; (0,) on the CPU without one. If that is a GPU, the host waits for
        no sum of its own tensors, such as an optimizer's counts of steps.
    """
    if not tensors:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    checksums: dict[int, torch.Tensor] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        found: dict[int, torch.Tensor] = {}
        here = {number: tensor for number, tensor in enumerate(tensors) if tensor.device == device}
        pieces = 1 if accelerator_of(device).is_host else _PIECES_AT_ONCE
        weights = _odd(min(_WORDS, max(map(_length, here.values()))), 0, device)
        small = {number: words(tensor) for number, tensor in here.items() if _length(tensor) <= _WORDS}
        if small:
            sums = _of_small(list(small.values()), weights, pieces * _WORDS)
            found.update(zip(small, sums.unbind(), strict=True))
        for number in here.keys() - small.keys():
            flat = words(here[number])
            sums = _of_pieces(flat, weights) if pieces == 1 else _of_rows(flat, weights, pieces)
            found[number] = (sums * _odd(len(sums), 1, device)).sum()
        together = torch.stack(list(found.values()))
        together = sent(together, tensors[0].device) if pieces == 1 else together.to(tensors[0].device)
        checksums.update(zip(found, together.unbind(), strict=True))
    return torch.stack([checksums[number] for number in range(len(tensors))])


def _of_pieces(flat: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each piece of K words, piece by piece; (pieces,)."""
    long = torch.empty_like(weights)  # reused: new memory pages for each piece took longer than the sums
    return torch.stack(
        [torch.dot(long[: len(piece)].copy_(piece), weights[: len(piece)]) for piece in flat.split(len(weights))]
    )


def _of_rows(flat: torch.Tensor, weights: torch.Tensor, rows: int) -> torch.Tensor:
    """The weighted sum of each piece of K words, so many in a kernel; (pieces,)."""
    whole = len(flat) // len(weights)
    rest = flat[whole * len(weights) :]
    long = torch.empty(min(rows, whole), len(weights), dtype=torch.int64, device=flat.device)
    sums = [
        long[: len(block)].copy_(block).mul_(weights).sum(1)
        for block in flat[: whole * len(weights)].view(whole, len(weights)).split(rows)
    ]
    if len(rest):
        sums.append((rest.long() * weights[: len(rest)]).sum().unsqueeze(0))
    return torch.cat(sums)


def _of_small(flats: list[torch.Tensor], weights: torch.Tensor, most: int) -> torch.Tensor:
    """The sums of tensors of at most K words each, in a few operations for up to `most` words together; (T,)."""
    factor = _odd(1, 1, weights.device)  # as of a large tensor with one piece
    sums = []
    group: list[torch.Tensor] = []
    size = 0
    for flat in flats:
        if group and size + len(flat) > most:
            sums.append(_of_group(group, weights))
            group = []
            size = 0
        group.append(flat)
        size += len(flat)
    return torch.cat([*sums, _of_group(group, weights)]) * factor


def _of_group(flats: list[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    products = torch.cat(flats).long().mul_(torch.cat([weights[: len(flat)] for flat in flats]))
    return torch.stack([part.sum() for part in products.split([len(flat) for flat in flats])])


Leaf = torch.Tensor | float | str | bytes | None


def digest(value: Leaf) -> str:
    """The first 32 hex digits of a SHA-256 of a value's type, shape and bits."""
    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(f"{type(value).__name__} {value!r}".encode()).hexdigest()[:32]
    there = value.detach().to("cpu").contiguous()
    sha = hashlib.sha256(f"{there.dtype} {tuple(there.shape)}".encode())
    if there.numel():
        sha.update(there.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()[:32]


def leaves(name: str, value: object) -> Iterator[tuple[str, Leaf]]:
    """The tensors, arrays, numbers and strings in nested dicts, lists and tuples, each with its name."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from leaves(f"{name}.{key}", one)
    elif isinstance(value, list | tuple):
        for key, one in enumerate(value):
            yield from leaves(f"{name}.{key}", one)
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        yield name, torch.from_numpy(np.array(value))
    elif value is None or isinstance(value, torch.Tensor | float | int | str | bytes):
        yield name, value


_memcmp = ctypes.PyDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcmp.restype = ctypes.c_int


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same size and bits, NaN included. The host waits for a GPU.

    The CPU compares by `memcmp`, 45 microseconds per MiB; `torch.equal` takes 320, and NaN is not equal to itself.
    """
    plain = type(one) is torch.Tensor and type(other) is torch.Tensor and one.is_contiguous() and other.is_contiguous()
    if plain and one.device == other.device and accelerator_of(one.device).is_host:
        size = one.nbytes  # a buffer may have been resized
        return size == other.nbytes and bool(_memcmp(one.data_ptr(), other.data_ptr(), size) == 0)
    if torch.equal(one, other):
        return True
    if not one.is_floating_point() and not one.is_complex():
        return False
    return torch.equal(*(tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))
