"""The launcher: `python -m ddp_loop run SCRIPT` starts a script's ranks on this machine, through torch's own agent."""

from ddp_loop.elastic.command import add_run, program_name, run_command, run_parser
from ddp_loop.elastic.loopback import LOOPBACK, host_store, loopback_variables
from ddp_loop.elastic.process_states import (
    GRACE_S,
    INTERRUPTED_EXIT,
    PEER_FAILED_EXIT,
    UNSAVED_EXIT,
    is_stopped,
    lacked_memory,
    oom_kills,
)
from ddp_loop.elastic.rank import (
    MOST_LETTERS,
    START,
    begin_at_script,
    cut_text,
    flush_output,
    is_of_package,
    is_outside,
    is_reported,
    leave_advice,
    leave_error,
    open_missing_streams,
    shorten_refusal,
    show_unless_reported,
)

__all__ = [
    "GRACE_S",
    "INTERRUPTED_EXIT",
    "LOOPBACK",
    "MOST_LETTERS",
    "PEER_FAILED_EXIT",
    "START",
    "UNSAVED_EXIT",
    "add_run",
    "begin_at_script",
    "cut_text",
    "flush_output",
    "host_store",
    "is_of_package",
    "is_outside",
    "is_reported",
    "is_stopped",
    "lacked_memory",
    "leave_advice",
    "leave_error",
    "loopback_variables",
    "oom_kills",
    "open_missing_streams",
    "program_name",
    "run_command",
    "run_parser",
    "shorten_refusal",
    "show_unless_reported",
]
