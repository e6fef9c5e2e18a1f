"""Backward of a shard's loss whose share of the mini-batch is multiplied in afterwards."""

from __future__ import annotations

from collections.abc import Collection
from itertools import repeat

import torch
from torch.nn import Parameter

from ddp_loop.training.buckets import dtype_of_sums, set_grads


def backpropagate_apart(
    parameters: Collection[Parameter],
    loss: torch.Tensor,
    factor: float | torch.Tensor,
    *,
    is_low: bool,
    retain_graph: bool,
    synced: bool,
    wider: torch.dtype | None = None,
) -> None:
    """Backpropagate apart from the gradients of the shards before, and add `factor` times the new ones to them.

    Args:
        parameters: all that may get a gradient.
        loss: shape ().
        factor: the shard's share; a tensor of shape () if only the device knows it.
        is_low: whether the factor would be rounded in the loss's dtype, so that it is backpropagated unscaled.
        retain_graph: whether another loss of the same graph follows.
        synced: whether the other shards' losses depend on this one's values, through synced batch norm.
        wider: gradients that are added up in this dtype, and not in their own, are multiplied by the factor there.
    """
    before = {parameter: parameter.grad for parameter in parameters}
    set_grads(parameters, repeat(None))
    seed = torch.ones_like(loss) if is_low else torch.as_tensor(factor, dtype=loss.dtype, device=loss.device)
    loss.backward(seed.reshape(loss.shape), retain_graph=retain_graph)
    for parameter, gradient in before.items():
        if parameter.grad is not None:
            if is_low and dtype_of_sums(parameter.dtype, wider) == parameter.dtype:
                _multiply(parameter.grad, factor)
            if isinstance(factor, torch.Tensor):
                parameter.grad.masked_fill_(_is_void(parameter.grad, factor, synced=synced), 0.0)
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


def _is_void(gradient: torch.Tensor, factor: torch.Tensor, *, synced: bool) -> torch.Tensor:
    """Where a gradient becomes 0 because the shard's factor is.

    With synced batch norm the other shards' losses depend on this one's values too, and their part counts. Only what
    its own loss made of 0 does not.
    """
    void = factor == 0
    return void & ~gradient.isfinite() if synced else void


def _multiply(gradient: torch.Tensor, factor: float | torch.Tensor) -> None:
    """Multiply by a factor without rounding it to the gradient's dtype first."""
    if isinstance(factor, torch.Tensor):
        gradient.copy_(gradient.to(torch.promote_types(gradient.dtype, torch.float32)) * factor.to(gradient.device))
    else:
        gradient.mul_(factor)
