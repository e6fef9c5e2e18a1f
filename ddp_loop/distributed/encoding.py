"""Tensors of any dtype in the few that a sum over ranks carries, with every bit kept.

[Note: Exact columns] A sum that brings rows together adds -0.0 to each value. That keeps every value which the columns'
dtype holds exactly: float32 holds float16, bfloat16, the float8 types and integers of 16 bits; float64 also float32 and
integers of 32 bits. Whatever is wider travels as its own bits, cut into integers of 16 (or 32) bits, a column each. A
complex value is two real ones.
"""

from __future__ import annotations

from functools import lru_cache

import torch

_AS_INT64 = frozenset({torch.bool, torch.int16, torch.uint16, torch.uint32})
_FLOAT8 = frozenset(
    dtype for name in dir(torch) if name.startswith("float8") and isinstance(dtype := getattr(torch, name), torch.dtype)
)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without complex numbers: a real tensor itself, (...,) complex as (..., 2) real."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def summable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype that gloo and NCCL add up: contiguous, in its own memory if that will do, else a copy.

    Integers wrap around as torch's own do; bool is added up as counts.
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
    """Write the sum of all ranks' `summable(tensor)` into `tensor`, unless it stands there."""
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
    """The integers that a real dtype is cut into where a column of dtype `column` cannot hold it; else None."""
    if dtype.is_floating_point:
        fits = dtype.itemsize <= column.itemsize
    else:
        fits = dtype.itemsize * 2 <= column.itemsize
    if fits:
        return None
    return torch.int16 if column.itemsize == 4 else torch.int32


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def columns(tensor: torch.Tensor, column: torch.dtype) -> int:
    """How many columns a tensor takes."""
    real = _real(tensor.dtype)
    chunk = _chunk(real, column)
    reals = 2 if tensor.is_complex() else 1
    return tensor.numel() * reals * (1 if chunk is None else real.itemsize // chunk.itemsize)


def encode(tensor: torch.Tensor, column: torch.dtype) -> torch.Tensor:
    """A tensor as columns, shape (K,). See [Note: Exact columns]."""
    flat = as_real(tensor.resolve_conj()).reshape(-1)
    chunk = _chunk(flat.dtype, column)
    return (flat if chunk is None else flat.contiguous().view(chunk)).to(column)


def decode(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `encode` made of tensors of a dtype, one a row, (S, K); as (S, elements), a complex one as two reals.

    Integers come as int64 (uint64 by its bits), narrower floating types in the columns' dtype.
    """
    real = _real(dtype)
    chunk = _chunk(real, rows.dtype)
    if chunk is not None:
        flat = rows.to(chunk).reshape(-1).view(torch.int64 if real is torch.uint64 else real)
        rows = flat.view(len(rows), -1)
        return rows if real.is_floating_point else rows.to(torch.int64)
    return rows if real.is_floating_point else rows.to(torch.int64)


def assemble(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A row of `decode`, (elements,), as a tensor of the dtype and shape of `like`."""
    if like.is_complex():
        return torch.view_as_complex(values.to(_real(like.dtype)).reshape(*like.shape, 2))
    if like.dtype is torch.uint64:
        return values.view(torch.uint64).reshape(like.shape)
    return values.to(like.dtype).reshape(like.shape)
