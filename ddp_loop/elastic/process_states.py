"""What the kernel tells of a process that does not answer, or was killed: whether it is stopped, or memory ran out."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

# Exit codes of a rank.
PEER_FAILED_EXIT = 75  # another rank failed, or another host was ended
UNSAVED_EXIT = 74  # its run was not saved whole, with on_save_error="warn"; EX_IOERR of sysexits.h
INTERRUPTED_EXIT = 130  # a second Ctrl-C

# Peers of a failed rank have this long to end by themselves; with `join_world` they need milliseconds, and a watchdog
# ends one that cannot be interrupted after 1.6 s. A fault must end all ranks within 3 s, and reporting and killing need
# the rest.
GRACE_S = 2.0

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_COUNTERS = {"": "memory.events", "memory": "memory.oom_control"}  # by controller: version 2 has one hierarchy for all
_KILLS = "oom_kill"


def is_stopped(process_id: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP: it then handles no other signal than SIGKILL and SIGCONT."""
    with suppress(OSError, IndexError):
        return (_PROC / str(process_id) / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def oom_kills() -> int | None:
    """How many processes the kernel has killed for lack of memory; None where it does not tell.

    The kernel counts a kill before it sends the signal. It counts for each control group, of which the ranks share the
    launcher's, and for the whole machine. A daemon that kills early, such as systemd-oomd, is not counted.
    """
    for path in (*_of_own_group(), _PROC / "vmstat"):
        with suppress(OSError, ValueError):
            words = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
            if _KILLS in words:
                return int(words[_KILLS])
    return None


def lacked_memory(kills_before: int | None) -> bool | None:
    """Whether the kernel has killed a process for lack of memory since then; None where it does not tell."""
    now = oom_kills()
    return None if now is None or kills_before is None else now > kills_before


def _of_own_group() -> list[Path]:
    """The files of this process's control groups that count such kills, where they are there."""
    found = []
    with suppress(OSError, ValueError):
        for line in (_PROC / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            there = {*controllers.split(",")} & _COUNTERS.keys()
            found += [_CGROUPS / controller / path.strip("/") / _COUNTERS[controller] for controller in there]
    return found
