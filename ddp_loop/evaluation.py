"""Evaluation and prediction on a whole data set: every observation once, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ddp_loop.batches import Batches
from ddp_loop.shards import Shard

Forward = Callable[[nn.Module, Any], Any]
Metric = Callable[..., torch.Tensor]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module goes back to the mode it was in, also after an exception."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _split(data: Any) -> tuple[Any, tuple[Any, ...]]:
    """A shard's inputs and what is beside them."""
    if isinstance(data, tuple | list):
        return data[0], tuple(data[1:])
    return data, ()


def _forward_first(model: nn.Module, data: Any) -> Any:
    inputs, _ = _split(data)
    if isinstance(inputs, dict):
        raise TypeError(
            "the model takes the first part of each shard; these are dicts: give forward=lambda model, data: ..."
        )
    return model(inputs)


def _shards(batches: Batches) -> Iterator[tuple[int, Shard, Any]]:
    if batches.length is None:
        raise ValueError("evaluation goes through the data once; these never end: give Batches a length")
    for loaded in batches.epoch(0):
        for number, shard in enumerate(loaded.mini_batch.shards):
            yield loaded.mini_batch.start, shard, loaded.data(number)


def evaluate(
    model: nn.Module, batches: Batches, *, forward: Forward | None = None, **metrics: Metric
) -> dict[str, float]:
    """The mean of each metric over all observations, exact on any number of ranks. Every rank must call this.

    sum_i(metric_i) / n in float64, in evaluation mode, each observation once; the model is put back in the mode
    it was in.

    Args:
        model: the same on every rank.
        batches: usually made with `shuffle=False`; the shards' sizes do not change the result.
        forward: `forward(model, data)` gives the output for a shard's data; by default the model is given the
            data's first part.
        metrics: by name, `metric(output, *other parts of the data)`; it gives one value per observation, shape
            (n,), or their mean, shape ().

    Returns:
        The means by name, and the number of `observations` that they are over; the same on every rank.

    Raises:
        ValueError: a metric of another shape, data that never end.
        PeerFailed: another rank failed.
    """
    world = batches.world
    sums = torch.zeros(len(metrics) + 1, dtype=torch.float64, device=world.device)
    with evaluating(model):
        for _, shard, data in _shards(batches):
            output = (forward or _forward_first)(model, data)
            sums[0] += shard.observations
            for number, (name, metric) in enumerate(metrics.items(), 1):
                sums[number] += _total(name, metric(output, *_split(data)[1]), shard.observations)
    observations, *totals = world.sum(sums).tolist()
    means = {name: total / observations for name, total in zip(metrics, totals, strict=True)}
    return {**means, "observations": int(observations)}


def _total(name: str, value: torch.Tensor | float, observations: int) -> torch.Tensor | float:
    if not isinstance(value, torch.Tensor):
        return value * observations
    if value.dim() == 0:
        return value.double() * observations
    if value.shape != (observations,):
        raise ValueError(
            f"a metric gives one value per observation, shape ({observations},), or their mean, shape (); {name} "
            f"gave shape {tuple(value.shape)}: take the mean over its other dimensions"
        )
    return value.double().sum()


def predict(model: nn.Module, batches: Batches, *, forward: Forward | None = None) -> torch.Tensor:
    """The model's output for every observation, in the data's order, on every rank. Every rank must call this.

    Also where `batches` shuffles: row i belongs to observation i of the data. The rows are brought together by
    a sum to which each rank gives its own and zeros.

    Args:
        model, batches, forward: as in `evaluate`; the output has one row per observation, shape (n, ...).

    Returns:
        Shape (length, ...), on the world's device.

    Raises:
        ValueError: an output without a row per observation; data that never end; `drop_last`.
        PeerFailed: another rank failed.
    """
    world = batches.world
    if batches.drop_last:
        raise ValueError("predictions are for every observation; these batches drop some: make them drop_last=False")
    places, rows = [], []
    with evaluating(model):
        for start, shard, data in _shards(batches):
            output = (forward or _forward_first)(model, data)
            if not isinstance(output, torch.Tensor) or output.shape[:1] != (shard.observations,):
                what = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
                raise ValueError(f"predictions have a row per observation, ({shard.observations}, ...); got {what}")
            places.append(batches.indices(0, start + shard.start, shard.observations))
            rows.append(output)
    forms = world.gather((tuple(rows[0].shape[1:]), rows[0].dtype) if rows else None)
    shape, dtype = next(form for form in forms if form is not None)
    whole = torch.zeros((batches.length or 0, *shape), dtype=dtype, device=world.device)
    if rows:
        whole[torch.cat(places).to(world.device)] = torch.cat(rows)
    carried = whole.to(torch.uint8) if dtype == torch.bool else whole
    return world.sum(carried).to(dtype)
