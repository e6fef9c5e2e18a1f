"""Reports of a run: rows, throughput, the terminal, pictures at the end."""

from ddp_loop.reporting.exports import PictureStyle, compare, export
from ddp_loop.reporting.images import as_pixels, png
from ddp_loop.reporting.jsonl import append_whole
from ddp_loop.reporting.jsonl_tail import Columns, JsonlTail, TailUpdate, columns_of, object_of
from ddp_loop.reporting.logged_values import LoggedValues, as_logged
from ddp_loop.reporting.reporter import Reporter
from ddp_loop.reporting.rows import NORM, RATE, UNUSED, UNUSED_AT_LEAST, WeightedMeans, is_averaged
from ddp_loop.reporting.run_records import (
    ENDED,
    NO_RUNS_BELOW,
    TRIAL,
    RunRecord,
    ValueSummary,
    count,
    find_runs,
    is_lower_better,
    plain_reason,
    read_run,
    state_of,
    text_of,
    total_steps,
)
from ddp_loop.reporting.run_table import RunQuery, best_run, list_runs
from ddp_loop.reporting.sink_calls import OnRow, Receivers, RunStart, all_of
from ddp_loop.reporting.sweep_files import (
    AGAIN,
    FAILED_TRIAL,
    SWEEP,
    SWEEP_LOCK,
    TRIALS,
    WORKERS,
    ask_for,
    ask_sweep_to_stop,
    has_workers,
    is_sweep,
    trial_folder,
)
from ddp_loop.reporting.tables import Labels, make_table, write_table
from ddp_loop.reporting.throughput import as_clock, slowest

__all__ = [
    "AGAIN",
    "ENDED",
    "FAILED_TRIAL",
    "NORM",
    "NO_RUNS_BELOW",
    "RATE",
    "SWEEP",
    "SWEEP_LOCK",
    "TRIAL",
    "TRIALS",
    "UNUSED",
    "UNUSED_AT_LEAST",
    "WORKERS",
    "Columns",
    "JsonlTail",
    "Labels",
    "LoggedValues",
    "OnRow",
    "PictureStyle",
    "Receivers",
    "Reporter",
    "RunQuery",
    "RunRecord",
    "RunStart",
    "TailUpdate",
    "ValueSummary",
    "WeightedMeans",
    "all_of",
    "append_whole",
    "as_clock",
    "as_logged",
    "as_pixels",
    "ask_for",
    "ask_sweep_to_stop",
    "best_run",
    "columns_of",
    "compare",
    "count",
    "export",
    "find_runs",
    "has_workers",
    "is_averaged",
    "is_lower_better",
    "is_sweep",
    "list_runs",
    "make_table",
    "object_of",
    "plain_reason",
    "png",
    "read_run",
    "slowest",
    "state_of",
    "text_of",
    "total_steps",
    "trial_folder",
    "write_table",
]
