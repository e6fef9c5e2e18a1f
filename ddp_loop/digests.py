"""Digests: whether two values have the same bits, said in a few letters; and the values below a nested state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch

Leaf = torch.Tensor | float | str | bytes | None


def digest(value: Leaf) -> str:
    """32 letters that are the same exactly if type, shape and bits are: the beginning of a SHA-256."""
    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(f"{type(value).__name__} {value!r}".encode()).hexdigest()[:32]
    there = value.detach().to("cpu").contiguous()
    sha = hashlib.sha256(f"{there.dtype} {tuple(there.shape)}".encode())
    if there.numel():
        sha.update(there.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()[:32]


def leaves(name: str, value: object) -> Iterator[tuple[str, Leaf]]:
    """The tensors, arrays, numbers and words below a nest of dicts, lists and tuples, each with its name."""
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
