"""Evaluation and prediction on a whole data set: every observation once, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ddp_loop.batches import Batches
from ddp_loop.shards import MiniBatch, Shard
from ddp_loop.world import World

Forward = Callable[[nn.Module, Any], Any]
Metric = Callable[..., torch.Tensor | np.ndarray[Any, Any] | float]


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
    """A shard's inputs, and what the metrics are given: what is beside them, or else the data as they are."""
    if isinstance(data, tuple | list):
        return data[0], tuple(data[1:])
    return data, (data,)


def _forward_first(model: nn.Module, data: Any) -> Any:
    inputs, _ = _split(data)
    if isinstance(inputs, Mapping):
        raise TypeError(
            "the model takes the first part of each shard; these are dicts: give forward=lambda model, data: ..."
        )
    return model(inputs)


def _shards(batches: Batches) -> Generator[tuple[MiniBatch, Shard, Any], None, None]:
    batches.world.demand_free()
    if not batches.ends:
        raise ValueError("evaluation goes through the data once; these never end: give Batches a length")
    observations = 0
    for loaded in batches.epoch(0):
        observations += loaded.mini_batch.observations
        for number, shard in enumerate(loaded.mini_batch.shards):
            yield loaded.mini_batch, shard, loaded.data(number)
    if batches.length is None:
        batches.world.check_same("the observations of a stream", observations)


def evaluate(
    model: nn.Module, batches: Batches, *, forward: Forward | None = None, **metrics: Metric
) -> dict[str, float]:
    """The mean of each metric over all observations, exact on any number of ranks. Every rank must call this.

    sum_i(metric_i) / n in float64, in evaluation mode, each observation once, added up in the order of the shards; the
    model is put back in the mode it was in.

    Args:
        model: the same on every rank.
        batches: usually made with `shuffle=False`; the shards' sizes do not change the result.
        forward: `forward(model, data)` gives the output for a shard's data; by default the model is given the
            data's first part.
        metrics: by name, `metric(output, *other parts of the data)`, or `metric(output, data)` where data are a
            lone tensor or a dict; it gives one value per observation, shape (n,), or their mean, shape ().

    Returns:
        The means by name, and the number of `observations` that they are over; the same on every rank.

    Raises:
        Stopped: all ranks are asked to stop, in the middle of a loop; it ends the script, what was made is kept.
        ValueError: a metric of another shape, or named "observations", or not the same ones on every rank; data
            that never end.
        PeerFailed: another rank failed.
    """
    if "observations" in metrics:
        raise ValueError('the result\'s "observations" is their number; give the metric of this name another one')
    world = batches.world
    world.check_same("the names of the metrics", list(metrics))
    rows: dict[int, torch.Tensor] = {}  # by the shard's number in the epoch
    stage, world.stage = world.stage, "evaluate"
    with evaluating(model), closing(_shards(batches)) as shards:
        for mini_batch, shard, data in shards:
            output = (forward or _forward_first)(model, data)
            row = torch.empty(1 + len(metrics), dtype=torch.float64, device=world.device)
            row[0] = shard.observations
            for place, (name, metric) in enumerate(metrics.items(), 1):
                row[place] = _total(name, metric(output, *_split(data)[1]), shard.observations)
            rows[mini_batch.position * batches.shards + shard.number] = row
            if world.stop_asked is not None:
                break
    world.agree_to_stop()
    observations, *totals = _added_up(rows, 1 + len(metrics), world).tolist()
    means = {name: total / observations for name, total in zip(metrics, totals, strict=True)}
    world.stage = stage
    result = {**means, "observations": int(observations)}
    world.on_evaluated(result)
    return result


def _added_up(rows: dict[int, torch.Tensor], width: int, world: World) -> torch.Tensor:
    """The sum of all shards' rows, (width,), in the shards' order, whichever ranks they are on."""
    there = max(world.gather(max(rows, default=-1))) + 1
    whole = torch.zeros(there, width, dtype=torch.float64, device=world.device)
    for number, row in rows.items():
        whole[number] = row
    return world.sum(whole).sum(0)


def _total(name: str, value: Any, observations: int) -> torch.Tensor:
    if not isinstance(value, torch.Tensor | np.ndarray | np.generic | float | int):
        raise TypeError(f"a metric gives a tensor, an array or a number; {name} gave {type(value).__name__}")
    values: torch.Tensor = torch.as_tensor(value, dtype=None if isinstance(value, torch.Tensor) else torch.float64)
    if values.dim() == 0:
        return values.double() * observations
    if values.shape != (observations,):
        raise ValueError(
            f"a metric gives one value per observation, shape ({observations},), or their mean, shape (); {name} "
            f"gave shape {tuple(values.shape)}: take the mean over its other dimensions"
        )
    return values.double().sum()


def predict(model: nn.Module, batches: Batches, *, forward: Forward | None = None) -> torch.Tensor:
    """The model's output for every observation, in the data's order, on every rank. Every rank must call this.

    Also where `batches` shuffles: row i belongs to observation i of the data. The rows are brought together by
    a sum to which each rank gives its own and zeros; of bytes, which leaves every bit as it was.

    Args:
        model, batches, forward: as in `evaluate`; the output has one row per observation, shape (n, ...).

    Returns:
        Shape (length, ...), on the world's device.

    Raises:
        ValueError: an output without a row per observation, or rows that differ in shape or dtype between shards;
            data that never end; `drop_last`.
        PeerFailed: another rank failed.
    """
    world = batches.world
    if batches.length is None and batches.ends:
        raise ValueError("predictions have a row per observation; nobody knows how many a stream has: give a data set")
    if batches.drop_last:
        raise ValueError("predictions are for every observation; these batches drop some: make them drop_last=False")
    forms: list[tuple[tuple[int, ...], torch.dtype]] = []
    whole: torch.Tensor | None = None
    stage, world.stage = world.stage, "predict"
    with evaluating(model), closing(_shards(batches)) as shards:
        for mini_batch, shard, data in shards:
            output = (forward or _forward_first)(model, data)
            if not isinstance(output, torch.Tensor) or output.shape[:1] != (shard.observations,):
                what = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
                raise ValueError(f"predictions have a row per observation, ({shard.observations}, ...); got {what}")
            form = (tuple(output.shape[1:]), output.dtype)
            if form not in forms:
                forms.append(form)
            if whole is None:
                whole = _zeros(batches, form)
            if form == forms[0]:  # copied at once: a model may use one buffer for all its outputs
                at = batches.indices(0, mini_batch.start + shard.start, shard.observations)
                whole[at.to(world.device)] = output.to(world.device)
            if world.stop_asked is not None:
                break
    world.agree_to_stop()
    told = dict.fromkeys(form for forms in world.gather(forms) for form in forms)
    if len(told) > 1:
        raise ValueError(
            f"predictions have rows of one shape and dtype for all shards; got {list(told)}: pad them to one shape"
        )
    whole = _zeros(batches, next(iter(told))) if whole is None else whole
    world.sum(whole.view(torch.uint8))
    world.stage = stage
    return whole


def _zeros(batches: Batches, form: tuple[tuple[int, ...], torch.dtype]) -> torch.Tensor:
    shape, dtype = form
    return torch.zeros((batches.length or 0, *shape), dtype=dtype, device=batches.world.device)
