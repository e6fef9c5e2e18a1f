"""Tensors of any dtype in the few dtypes that a sum over ranks supports, bit for bit.

[Note: Exact columns] A sum that brings rows together adds -0.0 to each value. This keeps every value that the columns'
dtype holds exactly. float32 holds float16, bfloat16, the float8 types and 16-bit integers. float64 also holds float32
and 32-bit integers. Wider values travel as their own bits, cut into 16-bit (or 32-bit) integers, a column each. A
complex value is two real ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

_AS_INT64 = frozenset({torch.bool, torch.int16, torch.uint16, torch.uint32})
_FLOAT8 = frozenset(
    dtype for name in dir(torch) if name.startswith("float8") and isinstance(dtype := getattr(torch, name), torch.dtype)
)


def check_plain(value: object, caller: str) -> None:
    """Check that a value of a script can be sent in place.

    Args:
        value: what the script gave.
        caller: the function that it called.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is sparse or nested.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{caller} takes a tensor and changes it in place. Got {type(value).__name__}. Pass "
            "torch.as_tensor(value, device=world.device), and use what it returns."
        )
    if value.layout is not torch.strided or value.is_nested:
        raise ValueError(f"{caller} takes a dense tensor. Got {value.layout}. Pass tensor.to_dense().")


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A real view of the same memory: a real tensor itself, (...,) complex as (..., 2) real."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def summable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous and in a dtype that gloo and NCCL can add up; a copy only where it must be.

    Integers wrap around as torch's own do. bool is added up as counts.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    elif tensor.dtype is torch.uint64:
        tensor = tensor.view(torch.int64)  # sums modulo 2^64 have the same bits
    elif tensor.dtype in _AS_INT64:
        tensor = tensor.to(torch.int64)
    elif tensor.dtype in _FLOAT8:
        tensor = tensor.float()
    return tensor.contiguous()


def assign_sum(tensor: torch.Tensor, total: torch.Tensor) -> None:
    """Write the sum of all ranks' `summable(tensor)` into `tensor`, unless they share memory."""
    if total.data_ptr() == tensor.data_ptr():
        return
    if tensor.is_complex():
        total = torch.view_as_complex(total)
    elif tensor.dtype is torch.uint64:
        total = total.view(torch.uint64)
    elif tensor.dtype is torch.bool:
        total = total != 0
    tensor.copy_(total)


# -- columns -----------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _chunk(dtype: torch.dtype, column: torch.dtype) -> torch.dtype | None:
    """The integer dtype into which a real dtype is cut for columns of dtype `column`; None if they hold it whole."""
    needed = dtype.itemsize if dtype.is_floating_point else 2 * dtype.itemsize
    if needed <= column.itemsize:
        return None
    return torch.int16 if column.itemsize == 4 else torch.int32


def columns(tensor: torch.Tensor, column: torch.dtype) -> int:
    """The number of columns that a tensor takes."""
    real = tensor.dtype.to_real()
    return tensor.nbytes // (_chunk(real, column) or real).itemsize


def encode_all(tensors: Sequence[torch.Tensor], column: torch.dtype) -> torch.Tensor:
    """Tensors of one dtype as columns, one after another, shape (K,). See [Note: Exact columns]."""
    tensor = tensors[0] if len(tensors) == 1 else torch.cat([one.reshape(-1) for one in tensors])
    flat = as_real(tensor.resolve_conj()).reshape(-1)
    chunk = _chunk(flat.dtype, column)
    return (flat if chunk is None else flat.contiguous().view(chunk)).to(column)


def decode(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode tensors of a dtype, one a row, (S, K), as `encode_all` made them, to (S, elements).

    A complex value is two reals. Integers become int64 (uint64 by its bits), narrow floats keep the columns' dtype.
    """
    real = dtype.to_real()
    chunk = _chunk(real, rows.dtype)
    if chunk is not None:
        flat = rows.to(chunk).reshape(-1).view(torch.int64 if real is torch.uint64 else real)
        rows = flat.view(len(rows), -1)
    return rows if real.is_floating_point else rows.to(torch.int64)


def assemble_all(values: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A row of `decode`, (elements,), as tensors of one dtype, of the shapes of `like`."""
    real = like[0].dtype.to_real()
    values = values.view(real) if real is torch.uint64 else values.to(real)
    if like[0].is_complex():
        pairs = values.view(-1, 2)
        # torch cannot view pairs as complex numbers where they begin at an odd place, as in a row of odd length.
        values = torch.view_as_complex(pairs.clone() if pairs.storage_offset() % 2 else pairs)
    parts = values.split_with_sizes([one.numel() for one in like])
    return [part.view(one.shape) for part, one in zip(parts, like, strict=True)]
