"""How the process of a rank ends with the launcher that started it."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.process import BaseProcess

from ddp_loop.distributed.failures import format_error

PEER_FAILED_EXIT = 75  # of a process that was ended because another rank failed, or another host was ended
_PR_SET_PDEATHSIG = 1
_TRACE_LETTERS = 8000
_DAEMON_END_S = 5.0  # for a daemon that was terminated; then it is killed


def end_with_parent() -> bool:
    """Have the kernel kill this process when the parent's thread that started it dies; False where it cannot."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0)


def end_with_torchrun(environment: Mapping[str, str]) -> None:
    """End this process when torchrun is killed, which starts its workers from its main thread."""
    parent = os.getppid()  # 1 does not mean orphaned: in a container torchrun may be the first process
    if "TORCHELASTIC_RUN_ID" in environment and end_with_parent() and os.getppid() != parent:
        os._exit(PEER_FAILED_EXIT)  # torchrun died meanwhile


def report_to_torchrun(error: BaseException) -> None:
    """Have torchrun show the error of this rank in its summary, which is the last that it prints."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None or not isinstance(error, Exception):
        return
    text = "".join(traceback.format_exception(error))[-_TRACE_LETTERS:]
    facts = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": format_error(error)[-_TRACE_LETTERS:], "extraInfo": facts}}, file)


def children_except(known: set[BaseProcess]) -> set[BaseProcess]:
    """This process's living children without the known ones."""
    return set(multiprocessing.active_children()) - known


def end_daemons(children: set[BaseProcess]) -> None:
    """End those that would end with this process, such as a DataLoader's workers, and wait until they have ended."""
    daemons = [child for child in children if child.daemon]
    for child in daemons:
        child.terminate()
    deadline = time.monotonic() + _DAEMON_END_S
    for child in daemons:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()
