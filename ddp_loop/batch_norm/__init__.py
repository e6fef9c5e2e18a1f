"""Batch norm over the whole mini-batch: running statistics pooled once a step, or every forward synced."""

from ddp_loop.batch_norm.capture import (
    BatchNormStatistics,
    Captures,
    batch_norm_layers,
    custom_norms,
    is_synced,
    other_norm_layers,
)
from ddp_loop.batch_norm.pooled import PooledStatistics, RunningStatsSnapshot, pool_statistics
from ddp_loop.batch_norm.synced import (
    ENDS_LOOP,
    CallMismatch,
    SyncChannel,
    find_sync_channels,
    local_batch_norm,
    sync_batch_norm,
)

__all__ = [
    "ENDS_LOOP",
    "BatchNormStatistics",
    "CallMismatch",
    "Captures",
    "PooledStatistics",
    "RunningStatsSnapshot",
    "SyncChannel",
    "batch_norm_layers",
    "custom_norms",
    "find_sync_channels",
    "is_synced",
    "local_batch_norm",
    "other_norm_layers",
    "pool_statistics",
    "sync_batch_norm",
]
