"""The order of the samples, their division into shards over the ranks, and the readers."""

from ddp_loop.data.batches import Batches, LoadedBatch, ReadAhead
from ddp_loop.data.fingerprints import check_end, check_first
from ddp_loop.data.placement import EncodedTensors, tensors_in
from ddp_loop.data.position import LoopPosition
from ddp_loop.data.sequences import SequenceBatches, SequenceChunk, batchify
from ddp_loop.data.shards import Announcement, Cut, MiniBatch, Shard, split_range, split_sizes
from ddp_loop.data.transforms import Draws

__all__ = [
    "Announcement",
    "Batches",
    "Cut",
    "Draws",
    "EncodedTensors",
    "LoadedBatch",
    "LoopPosition",
    "MiniBatch",
    "ReadAhead",
    "SequenceBatches",
    "SequenceChunk",
    "Shard",
    "batchify",
    "check_end",
    "check_first",
    "split_range",
    "split_sizes",
    "tensors_in",
]
