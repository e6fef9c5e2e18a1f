"""Checkpoints: when they are saved, how they reach the disk whole, and how a run resumes from one."""

from ddp_loop.checkpoint.atomic_files import REPAIR, explained, identity, sync_folder, write_atomic
from ddp_loop.checkpoint.checkpointer import Checkpointer, CheckpointPolicy, OnSaveError, Snapshot
from ddp_loop.checkpoint.config import Config, flatten_config
from ddp_loop.checkpoint.file_locks import FileLock, Locked, is_locked
from ddp_loop.checkpoint.run_folder import (
    EVALUATIONS,
    NOTE,
    PICTURES,
    PROFILE,
    PROFILE_FILE,
    RANKS,
    ROWS,
    RUN,
    STATUS,
    STOP,
    TABLE,
    TABLES,
    RunFolder,
    ask_to_stop,
    is_running,
    read_json,
    stop_and_wait,
)
from ddp_loop.checkpoint.state import Stateful
from ddp_loop.checkpoint.storage import CHECKPOINTS, NAME, CheckpointInfo, CheckpointStore, best_of, run_id_of

__all__ = [
    "CHECKPOINTS",
    "EVALUATIONS",
    "NAME",
    "NOTE",
    "PICTURES",
    "PROFILE",
    "PROFILE_FILE",
    "RANKS",
    "REPAIR",
    "ROWS",
    "RUN",
    "STATUS",
    "STOP",
    "TABLE",
    "TABLES",
    "CheckpointInfo",
    "CheckpointPolicy",
    "CheckpointStore",
    "Checkpointer",
    "Config",
    "FileLock",
    "Locked",
    "OnSaveError",
    "RunFolder",
    "Snapshot",
    "Stateful",
    "ask_to_stop",
    "best_of",
    "explained",
    "flatten_config",
    "identity",
    "is_locked",
    "is_running",
    "read_json",
    "run_id_of",
    "stop_and_wait",
    "sync_folder",
    "write_atomic",
]
