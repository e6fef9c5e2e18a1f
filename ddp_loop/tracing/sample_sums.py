"""A few numbers for each sample, by which mini-batches with different shards are compared.

[Note: Sample sums] Each sample has four numbers in float64: the sum of its values, the sum of their magnitudes, the sum
of the values weighted by cos(1), cos(2), and so on, and the number of values. A fifth is the allowed difference between
two sums, relative to the sum of the magnitudes. A wrong value changes the sums, and so do swapped values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ddp_loop.data import tensors_in
from ddp_loop.distributed import as_real
from ddp_loop.tracing.compare import is_whole, widened

SIZE, COUNT, ROUNDING, WHOLE = range(2, 6)  # columns of a sample's sums, after the sum and the weighted sum
_ULPS = 64  # the rounding of a transform on other shards
_MOST = 2e-2  # the bound for types narrower than float32
_LEAST = 1e-12  # the rounding of a sum of integers


def sums_of_samples(data: Any, count: int) -> dict[str, torch.Tensor]:
    """The sums of each part of a shard's data, (n, 6) float64, by name.

    A part is a tensor with one row per sample, or a list with one entry per sample.
    """
    return dict(_parts("part", data, count)) if count else {}


def _parts(name: str, data: Any, count: int) -> Iterator[tuple[str, torch.Tensor]]:
    if _is_strided(data):
        if data.dim() and len(data) == count:
            yield name, _of_rows(data)
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _parts(f"{name} {key}", value, count)
    elif isinstance(data, tuple | list):
        found = [part for number, value in enumerate(data) for part in _parts(f"{name} {number}", value, count)]
        yield from found
        if found or not isinstance(data, list) or len(data) != count:
            return
        leaves = [[leaf for leaf in tensors_in(sample) if _is_strided(leaf)] for sample in data]
        if len({len(each) for each in leaves}) == 1:
            for number, values in enumerate(zip(*leaves, strict=True)):
                yield f"{name}, {number} of each sample", torch.cat([_of_rows(value[None]) for value in values])


def _is_strided(data: Any) -> bool:
    return isinstance(data, torch.Tensor) and data.layout == torch.strided


def _of_rows(tensor: torch.Tensor) -> torch.Tensor:
    there = tensor.detach().to("cpu")
    whole = is_whole(there)
    rounding = 0.0 if whole else min(_ULPS * torch.finfo(there.dtype).eps, _MOST)
    rows = as_real(widened(there)).reshape(len(there), -1)
    weights = torch.cos(torch.arange(1, rows.shape[1] + 1, dtype=torch.float64, device="cpu"))
    sums = torch.stack([rows.sum(1), (rows * weights).sum(1), rows.abs().sum(1)], 1)
    same = sums.new_tensor([rows.shape[1], max(rounding, _LEAST), whole])  # in all rows
    return torch.cat([sums, same.expand(len(rows), 3)], 1)


def first_other(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """The first sample that differs by more than rounding; None without one, or if they cannot be compared.

    Rows of different lengths cannot: they were padded to the longest row in a shard.
    """
    if one.shape != other.shape or not torch.equal(one[:, COUNT], other[:, COUNT]):
        return None
    here = one[:, :COUNT]
    there = other[:, :COUNT]
    same = (here == there) | (here.isnan() & there.isnan())
    size = torch.minimum(one[:, SIZE], other[:, SIZE])  # finite if one of the two is
    bound = (size * one[:, ROUNDING]).unsqueeze(1)
    bad = (~same & ~((here - there).abs() <= bound)).any(1).nonzero()
    return int(bad[0]) if len(bad) else None
