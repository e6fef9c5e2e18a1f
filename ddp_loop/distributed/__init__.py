"""The ranks: how a process joins, sums and leaves, who failed, and whether the replicas are the same."""

from ddp_loop.distributed.backend import PieceOrder, Work
from ddp_loop.distributed.cells import Cell, open_cell
from ddp_loop.distributed.devices import RankEnv, describe_devices, read_rank_env
from ddp_loop.distributed.encoding import as_real, assemble_all, columns, decode, encode_all
from ddp_loop.distributed.failures import PeerFailed, Stopped, aligned, format_error, listed
from ddp_loop.distributed.join import join_world, leave_open_worlds, sharing_gpus
from ddp_loop.distributed.launcher import Pool, RankFailed, launch, pack_call, run_script
from ddp_loop.distributed.machine import machine_of
from ddp_loop.distributed.piece_sums import IDENTITY, fill_identity, merge, padded
from ddp_loop.distributed.process_group import launcher_store
from ddp_loop.distributed.processes import children_except, end_daemons, end_unsaved
from ddp_loop.distributed.replica_check import (
    ReplicaCheck,
    ReplicaMismatch,
    describe_difference,
    ends_of_copies,
    kept_by,
    named_tensors,
    own_names,
    ranks_in_words,
    require_one_model,
)
from ddp_loop.distributed.replicas import (
    check_layout,
    check_structure,
    each_buffer,
    each_module,
    find_modules,
    find_parameters,
    find_tensors,
    under_all_names,
    version_of,
)
from ddp_loop.distributed.signals import WorkerSignals
from ddp_loop.distributed.store import RankStore
from ddp_loop.distributed.two_levels import SumNode, merges_of, nodes_inside
from ddp_loop.distributed.values import sendable
from ddp_loop.distributed.world import World, scale_batch_size

__all__ = [
    "IDENTITY",
    "Cell",
    "PeerFailed",
    "PieceOrder",
    "Pool",
    "RankEnv",
    "RankFailed",
    "RankStore",
    "ReplicaCheck",
    "ReplicaMismatch",
    "Stopped",
    "SumNode",
    "Work",
    "WorkerSignals",
    "World",
    "aligned",
    "as_real",
    "assemble_all",
    "check_layout",
    "check_structure",
    "children_except",
    "columns",
    "decode",
    "describe_devices",
    "describe_difference",
    "each_buffer",
    "each_module",
    "encode_all",
    "end_daemons",
    "end_unsaved",
    "ends_of_copies",
    "fill_identity",
    "find_modules",
    "find_parameters",
    "find_tensors",
    "format_error",
    "join_world",
    "kept_by",
    "launch",
    "launcher_store",
    "leave_open_worlds",
    "listed",
    "machine_of",
    "merge",
    "merges_of",
    "named_tensors",
    "nodes_inside",
    "open_cell",
    "own_names",
    "pack_call",
    "padded",
    "ranks_in_words",
    "read_rank_env",
    "require_one_model",
    "run_script",
    "scale_batch_size",
    "sendable",
    "sharing_gpus",
    "under_all_names",
    "version_of",
]
