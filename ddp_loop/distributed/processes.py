"""How a rank's process ends with, and for, the launcher that started it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.process import BaseProcess

PEER_FAILED_EXIT = 75  # the exit code of a process that was ended since another rank failed
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> bool:
    """Have the kernel kill this process when the thread of its parent that started it dies; False where it cannot."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0)


def end_with_torchrun(environment: Mapping[str, str]) -> None:
    """Leave no orphan when torchrun is killed: it starts its workers from its main thread."""
    parent = os.getppid()  # 1 is no sign of an orphan: in a container torchrun may be the first process
    if "TORCHELASTIC_RUN_ID" in environment and end_with_parent() and os.getppid() != parent:
        os._exit(PEER_FAILED_EXIT)  # it died as we asked


def children_except(known: set[BaseProcess]) -> set[BaseProcess]:
    """This process's living children, but for the known ones."""
    return set(multiprocessing.active_children()) - known


def end_daemons(children: set[BaseProcess]) -> None:
    """End those of them that would end with this process: workers of a DataLoader."""
    for child in children:
        if child.daemon:
            child.terminate()
