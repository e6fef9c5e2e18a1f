"""The reference: a plain torch loop over the same shards, in one process, with no line of ddp_loop's arithmetic.

Batch-norm statistics are taken over the concatenation of what the shards fed into each layer's call, so they
are those of the union by definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

Tensors = dict[str, torch.Tensor]
Loss = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Outcome:
    """What a step leaves behind."""

    loss: torch.Tensor
    metric: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    state: Tensors


def cut(data: tuple[torch.Tensor, ...], sizes: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
    """The pieces of a mini-batch, without the empty ones."""
    pieces, start = [], 0
    for size in sizes:
        if size:
            pieces.append(tuple(tensor[start : start + size] for tensor in data))
        start += size
    return pieces


def call_inputs(model: nn.Module, noted: dict[tuple[int, int], list[torch.Tensor]]) -> list[Any]:
    """Hooks that note the input of each training batch-norm layer's k-th call in the shard at hand."""
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    calls = [0] * len(layers)

    def make(number: int) -> Callable[..., None]:
        def note(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if layer.training:
                noted.setdefault((calls[number], number), []).append(inputs[0].detach().clone())
                calls[number] += 1

        return note

    return [layer.register_forward_pre_hook(make(number)) for number, layer in enumerate(layers)]


def moments(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and unbiased variance per channel of the union of all `inputs`."""
    values = torch.cat([one.movedim(1, 0).flatten(1) for one in inputs], dim=1).double()
    return values.mean(1), values.var(1, correction=1)


def step(model: nn.Module, shards: list[tuple[torch.Tensor, ...]], loss: Loss,
         weights: Sequence[float] | None = None, others: Sequence[nn.Parameter] = ()) -> Outcome:  # fmt: skip
    """One step over `shards`: gradients in `.grad`, buffers moved; each shard from the buffers at the start.

    `loss(model, *shard)` gives the mean loss and a metric; both and the gradients are weighted by `weights`,
    by default the samples.
    """
    weights = [len(shard[0]) for shard in shards] if weights is None else weights
    total = float(sum(weights))
    buffers = dict(model.named_buffers())
    opened = {name: buffer.clone() for name, buffer in buffers.items()}
    noted: dict[tuple[int, int], list[torch.Tensor]] = {}
    pooled = {name: torch.zeros_like(buffer, dtype=torch.float64) for name, buffer in buffers.items()}
    parameters = {**dict(model.named_parameters()), **{f"criterion.{k}": p for k, p in enumerate(others)}}
    for parameter in parameters.values():
        parameter.grad = None
    sums = [torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)]
    for shard, weight in zip(shards, weights, strict=True):
        for name, buffer in buffers.items():
            buffer.copy_(opened[name])
        hooks = call_inputs(model, noted)
        value, metric = loss(model, *shard)
        (value * (weight / total)).backward()
        for hook in hooks:
            hook.remove()
        sums[0] += value.detach().double() * weight / total
        sums[1] += metric.detach().double() * weight / total
        for name, buffer in buffers.items():
            pooled[name] += buffer.double() * weight / total
    for name, buffer in buffers.items():
        buffer.copy_(pooled[name] if buffer.is_floating_point() else opened[name])
    move_statistics(model, opened, noted)
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()}
    return Outcome(sums[0], sums[1], gradients, {k: v.clone() for k, v in model.state_dict().items()})


@torch.no_grad()
def move_statistics(model: nn.Module, opened: Tensors, noted: dict[tuple[int, int], list[torch.Tensor]]) -> None:
    """Move the running statistics as torch would if all shards' values had come in one mini-batch."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
    for name, layer in layers:
        for key, buffer in layer.named_buffers():
            buffer.copy_(opened[f"{name}.{key}" if name else key])
    for call, number in sorted(noted):
        layer = layers[number][1]
        if layer.running_mean is None or layer.running_var is None or layer.num_batches_tracked is None:
            continue
        layer.num_batches_tracked += 1
        if not any(map(len, noted[call, number])):
            continue
        decay = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
        mean, variance = moments(noted[call, number])
        layer.running_mean.mul_(1 - decay).add_(decay * mean)
        layer.running_var.mul_(1 - decay).add_(decay * variance)
