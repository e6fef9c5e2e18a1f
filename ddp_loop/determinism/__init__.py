"""Random streams keyed by what they are for, the settings of a deterministic block, and digests of bits."""

from ddp_loop.determinism.digests import Leaf, checksum, checksum_all, digest, leaves, same_bits
from ddp_loop.determinism.seeding import (
    COLLATE,
    DRAWS,
    EVALUATION,
    SAMPLE,
    next_key,
    permutation,
    preserved_streams,
    restore_streams,
    seed_evaluated,
    seed_everything,
    seed_shard,
    seed_step,
    seed_streams,
    seed_transform,
    stream_key,
    streams,
)
from ddp_loop.determinism.settings import deterministic, require_pinned

__all__ = [
    "COLLATE",
    "DRAWS",
    "EVALUATION",
    "SAMPLE",
    "Leaf",
    "checksum",
    "checksum_all",
    "deterministic",
    "digest",
    "leaves",
    "next_key",
    "permutation",
    "preserved_streams",
    "require_pinned",
    "restore_streams",
    "same_bits",
    "seed_evaluated",
    "seed_everything",
    "seed_shard",
    "seed_step",
    "seed_streams",
    "seed_transform",
    "stream_key",
    "streams",
]
