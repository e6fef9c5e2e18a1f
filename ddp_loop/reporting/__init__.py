"""Reports of a run: rows, throughput, the terminal, pictures at the end."""

from ddp_loop.reporting.exports import export
from ddp_loop.reporting.jsonl import append_whole
from ddp_loop.reporting.jsonl_tail import JsonlTail, TailUpdate
from ddp_loop.reporting.reporter import Receivers, Reporter, all_of
from ddp_loop.reporting.rows import NORM, RATE, OnRow, WeightedMeans, is_averaged
from ddp_loop.reporting.throughput import slowest

__all__ = [
    "NORM",
    "RATE",
    "JsonlTail",
    "OnRow",
    "Receivers",
    "Reporter",
    "TailUpdate",
    "WeightedMeans",
    "all_of",
    "append_whole",
    "export",
    "is_averaged",
    "slowest",
]
