"""Running statistics recomputed over a data set, such as for averaged weights: the mean over mini-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_loop.batch_norm import BatchNormStatistics, Captures, SyncChannel, batch_norm_layers, find_sync_channels
from ddp_loop.data import Batches, LoadedBatch, MiniBatch
from ddp_loop.determinism import preserved_streams, seed_shard
from ddp_loop.distributed import IDENTITY, World, each_module
from ddp_loop.evaluation import Forward, forward_first, in_mode, world_of
from ddp_loop.training import Buffers, check_synced, find_buffers, refuse_wrapped

_SINGLE = (
    "Layers normalise by the shard, by default one per rank, and a shard of this mini-batch has a single sample. "
    "Change batch_size, or pass Batches shards=1 or drop_last=True."
)
_AGAIN = 2**32  # stands for the number of a pass; no loop makes so many


def update_bn(model: nn.Module, batches: Batches, *, forward: Forward | None = None) -> None:
    """Set batch norm's running statistics to the plain mean over all mini-batches. Every rank must call this.

    running = sum_k(statistics_k) / K over the K whole mini-batches, on any number of ranks. Layers normalise by the
    shard, as in training, so without `shards=` the statistics of deeper layers follow the ranks.
    `torch.optim.swa_utils.update_bn` computes the same in one process. Use it for averaged weights, which no training
    forward has used. Momenta, modes and all other buffers stay as they are.

    Args:
        model: the same on every rank. Its batch-norm layers that keep running statistics take part.
        batches: the data, read once.
        forward: `forward(model, data)` computes a shard's data; by default the model takes the data's first part.

    Raises:
        ValueError: data that never end, a model wrapped by torch for several ranks, several shards per rank with
            synced batch norm, or a stream that differs between ranks.
        Stopped: as in `evaluate`.
        PeerFailed: another rank failed.
    """
    world = world_of(model, batches, "update_bn")
    world.stops.raise_if_stopped()
    layers = batch_norm_layers({"model": model})
    sync_channels = [channel for channel in find_sync_channels([model]) if channel.size > 1]
    with world.failing_together(ValueError):
        refuse_wrapped({"model": model})
        check_synced(batches, sync_channels)
        if not batches.ends:
            raise ValueError("update_bn passes over the data once. These data never end. Give Batches a length.")
    with world.in_stage("update_bn"):
        _recompute(model, batches, layers, forward or forward_first, sync_channels)
        world.stops.agree()


def _recompute(
    model: nn.Module,
    batches: Batches,
    layers: Mapping[str, _BatchNorm],
    forward: Forward,
    sync_channels: list[SyncChannel],
) -> None:
    world = batches.world
    others = Buffers(find_buffers({"model": model}, {*layers.values(), *_norms(model)}, {}))
    statistics = BatchNormStatistics(layers)
    torch.clear_autocast_cache()  # may hold weights from before an update; see Step
    try:
        reading = closing(batches.epoch(1, agrees=True))
        with _anew(model), preserved_streams(world.device), torch.no_grad(), reading as stream:
            for loaded in stream:
                captures = _forward_shards(model, loaded, statistics, others, forward, sync_channels, world)
                if not _move(statistics, captures, loaded.mini_batch, world):
                    break
            else:
                _agreed_calls(None, (), world)
    finally:
        statistics.release()


def _norms(model: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in each_module({"model": model}).values() if isinstance(layer, _BatchNorm)]


@contextmanager
def _anew(model: nn.Module) -> Iterator[None]:
    """Training mode with statistics reset and averaged plainly. Restores modes and momenta at the end."""
    momenta = [(layer, layer.momentum) for layer in _norms(model)]
    with in_mode(model, True):
        try:
            for layer, _ in momenta:
                layer.reset_running_stats()
                layer.momentum = None
            yield
        finally:
            for layer, momentum in momenta:
                layer.momentum = momentum


def _forward_shards(
    model: nn.Module,
    loaded: LoadedBatch,
    statistics: BatchNormStatistics,
    others: Buffers,
    forward: Forward,
    sync_channels: list[SyncChannel],
    world: World,
) -> dict[int, Captures]:
    """Run forward on this rank's shards of a mini-batch; returns the captures of each shard by its number."""
    found = {}
    mini_batch = loaded.mini_batch
    statistics.open()

    def captured(data: Any) -> Captures:
        captures = statistics.recording()
        try:
            with others.untouched():
                forward(model, data)
        finally:
            statistics.stop()
        return captures

    for number, shard in enumerate(mini_batch.shards):
        data = loaded.data(number)
        seed_shard(world.seed, mini_batch.position + 1, shard.number, world.device, _AGAIN)
        try:
            found[shard.number] = captured(data)
        except ValueError as error:
            if shard.samples == 1:
                error.add_note(_SINGLE)
            raise
    if sync_channels and not mini_batch.shards:
        captured(loaded.nothing())  # also here layers that are not synced must not move their own statistics
    for channel in sync_channels:
        channel.send_control()
    return found


def _agreed_calls(
    mini_batch: MiniBatch | None, calls: tuple[int, ...], world: World, problem: Exception | None = None
) -> tuple[int, ...] | None:
    """The most calls of each layer in a shard of any rank; None if any rank was asked to stop."""
    world.raise_if_any_failed(problem)
    facts = None if mini_batch is None else (mini_batch.position, mini_batch.samples)
    announcement = None if mini_batch is None else mini_batch.announcement
    news = () if announcement is None else announcement.values
    gathered = world.gather((facts, calls, world.stops.breaks_off, news), "a mini-batch of update_bn")
    if any(other != gathered[0][0] for other, *_ in gathered):
        raise ValueError(
            "A stream must give every rank the same samples. Its mini-batches (position, samples) are "
            f"{[other for other, *_ in gathered]} on the ranks. Give every rank the whole stream."
        )
    if announcement is not None:
        announcement.learn([sum(one) for one in zip(*(news for *_, news in gathered), strict=True)])
    if any(stops for _, _, stops, _ in gathered):
        return None
    return tuple(map(max, zip(*(one for _, one, _, _ in gathered), strict=True)))


def _move(
    statistics: BatchNormStatistics,
    captures: dict[int, Captures],
    mini_batch: MiniBatch,
    world: World,
) -> bool:
    """Update the running statistics with the whole mini-batch's; False if any rank was asked to stop."""
    own = [one.calls for one in captures.values()] or [[0] * len(statistics.layers)]
    calls = _agreed_calls(mini_batch, tuple(map(max, zip(*own, strict=True))), world, statistics.problem)
    if calls is None:
        return False
    shape = (len(mini_batch.sizes), statistics.width(calls))
    rows = torch.full(shape, IDENTITY, dtype=torch.float64, device=world.device)
    statistics.pack(captures.values(), calls, map(rows.__getitem__, captures))
    if statistics.layers:
        statistics.apply(world.sum(rows), calls)
    return True
