"""Custom data-parallel training loops in PyTorch: the loop of one device, run on N, weighted exactly."""

from ddp_loop import datasets, networks, plots, sinks
from ddp_loop.batches import Batches
from ddp_loop.determinism import seed_shard, seed_step
from ddp_loop.devices import scale_batch_size
from ddp_loop.evaluation import evaluate, predict
from ddp_loop.folding import Fold
from ddp_loop.joining import join_world
from ddp_loop.launching import Pool, RankFailed, launch
from ddp_loop.loop import Loop
from ddp_loop.patience import Patience
from ddp_loop.pooling import pooled
from ddp_loop.replication import ReplicasDiffer
from ddp_loop.row import Row
from ddp_loop.shards import split_range, split_sizes
from ddp_loop.step import Step
from ddp_loop.switches import deterministic
from ddp_loop.syncing import local_batch_norm, sync_batch_norm
from ddp_loop.transforms import Draws
from ddp_loop.words import PeerFailed
from ddp_loop.world import World

__all__ = [
    "Batches",
    "Draws",
    "Fold",
    "Loop",
    "Patience",
    "PeerFailed",
    "Pool",
    "RankFailed",
    "ReplicasDiffer",
    "Row",
    "Step",
    "World",
    "datasets",
    "deterministic",
    "evaluate",
    "join_world",
    "launch",
    "local_batch_norm",
    "networks",
    "plots",
    "pooled",
    "predict",
    "scale_batch_size",
    "seed_shard",
    "seed_step",
    "sinks",
    "split_range",
    "split_sizes",
    "sync_batch_norm",
]
__version__ = "0.1.0"
