"""What the tests of loops compare: tensors of several ranks, and of one process."""

from __future__ import annotations

import torch
from torch import nn

Tensors = list[torch.Tensor]


def values_of(*modules: nn.Module) -> Tensors:
    return [parameter.detach().clone() for module in modules for parameter in module.parameters()]


def gradients_of(model: nn.Module) -> Tensors:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def is_same(one: Tensors, other: Tensors) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def same_on_all(results: list[Tensors]) -> Tensors:
    """The first rank's tensors, which must be those of every other rank, bit for bit."""
    assert [rank for rank, other in enumerate(results) if not is_same(other, results[0])] == []
    return results[0]


def distance(one: Tensors, other: Tensors) -> float:
    """The largest difference of two lists of tensors, relative to the largest element of each tensor of `other`."""
    assert len(one) == len(other)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one, other, strict=True))


def is_close(found: Tensors, wanted: Tensors) -> bool:
    """Whether two lists of tensors are equal within 1e-12, as float64 is where only the order of a sum differs."""
    return all(torch.allclose(one, other, rtol=1e-12, atol=1e-14) for one, other in zip(found, wanted, strict=True))


def buffers_of(model: nn.Module) -> Tensors:
    return [buffer.clone() for buffer in model.buffers()]


def state_of(*modules: nn.Module) -> Tensors:
    return [tensor.detach().clone() for module in modules for tensor in module.state_dict().values()]
