"""Custom data-parallel training loops in PyTorch: one device's loop on N devices, with exact weights.

[Note: Names on demand] A room is imported when one of its names is first used: a launcher, a table of runs and the page
need neither torch nor the loop, and start in a fraction of the time.
"""

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_loop import datasets, networks, plots, sinks
    from ddp_loop.batch_norm import local_batch_norm, pool_statistics, sync_batch_norm
    from ddp_loop.checkpoint import load
    from ddp_loop.data import Batches, Draws, SequenceBatches, SequenceChunk, batchify, split_range, split_sizes
    from ddp_loop.determinism import deterministic, seed_shard, seed_step
    from ddp_loop.distributed import (
        PeerFailed,
        Pool,
        RankFailed,
        ReplicaMismatch,
        Stopped,
        World,
        join_world,
        launch,
        scale_batch_size,
    )
    from ddp_loop.early_stopping import EarlyStopping
    from ddp_loop.evaluation import confusion_matrix, evaluate, predict
    from ddp_loop.kernels import compile_model, use_bfloat16
    from ddp_loop.recalibration import update_bn
    from ddp_loop.sweeps import TrialResult, sweep
    from ddp_loop.training import Epoch, Fold, Loop, Step, StepResult, Sum

__all__ = [
    "Batches",
    "Draws",
    "EarlyStopping",
    "Epoch",
    "Fold",
    "Loop",
    "PeerFailed",
    "Pool",
    "RankFailed",
    "ReplicaMismatch",
    "SequenceBatches",
    "SequenceChunk",
    "Step",
    "StepResult",
    "Stopped",
    "Sum",
    "TrialResult",
    "World",
    "batchify",
    "compile_model",
    "confusion_matrix",
    "datasets",
    "deterministic",
    "evaluate",
    "join_world",
    "launch",
    "load",
    "local_batch_norm",
    "networks",
    "plots",
    "pool_statistics",
    "predict",
    "scale_batch_size",
    "seed_shard",
    "seed_step",
    "sinks",
    "split_range",
    "split_sizes",
    "sweep",
    "sync_batch_norm",
    "update_bn",
    "use_bfloat16",
]
__version__ = "0.1.0"
_ROOMS = {
    "batch_norm": ("local_batch_norm", "pool_statistics", "sync_batch_norm"),
    "checkpoint": ("load",),
    "data": ("Batches", "Draws", "SequenceBatches", "SequenceChunk", "batchify", "split_range", "split_sizes"),
    "determinism": ("deterministic", "seed_shard", "seed_step"),
    "distributed": (
        *("PeerFailed", "Pool", "RankFailed", "ReplicaMismatch", "Stopped", "World"),
        *("join_world", "launch", "scale_batch_size"),
    ),
    "early_stopping": ("EarlyStopping",),
    "evaluation": ("confusion_matrix", "evaluate", "predict"),
    "kernels": ("compile_model", "use_bfloat16"),
    "recalibration": ("update_bn",),
    "sweeps": ("TrialResult", "sweep"),
    "training": ("Epoch", "Fold", "Loop", "Step", "StepResult", "Sum"),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import the room that a name belongs to; see [Note: Names on demand]."""
    if name not in __all__:
        near = get_close_matches(name, __all__, 1)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        words = f"module {__name__!r} has no attribute {name!r}{hint}"
        raise AttributeError(words, name=name, obj=None)  # Python would add a hint of its own
    room = import_module(f"{__name__}.{_ROOM_OF.get(name, name)}")
    value = globals()[name] = getattr(room, name) if name in _ROOM_OF else room
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
