"""gloo, over the CPU: what it takes to wait for it, to wake the peers of a rank that failed, and to leave it.

gloo does not always end a collective when a peer fails, so a wait is cut into slices, between which the caller looks
for failures itself.

gloo closes a connection only with the last reference to its group, and a sum that is under way in one of its threads
holds one. A socket that is shut down wakes the peers that wait for this rank.

Destroying a group waits for its sums. Rarely one is not woken before its timeout: another sum ended with an error
between the head and the body of a message, and gloo reads that connection no further, but polls it without a pause.
Such a group is kept until the timeout. A worker of a pool then ends, and the pool starts another one.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ddp_loop.distributed.backend import LOOK_S, Work
from ddp_loop.distributed.torch_backend import TorchBackend

_DESCRIPTORS = Path("/proc/self/fd")  # only on Linux; elsewhere peers wait for their timeout
_END_S = 0.5  # for the sums of a failed group: nearly all are woken at once
_LOOK_S = 0.005
_SLICE = timedelta(seconds=LOOK_S)
_kept: list[tuple[dist.ProcessGroup, Collection[Work]]] = []


class GlooBackend(TorchBackend):
    """A process group of gloo.

    Args:
        group: of the ranks.
        in_vain: as in `Backend.wait`.
    """

    holds_up_host = True

    def __init__(self, group: dist.ProcessGroup, in_vain: Callable[[], bool]) -> None:
        super().__init__(group)
        self._in_vain = in_vain

    def wait(self, work: Work) -> None:
        """Wait in slices; with several sums under way one of ten is not woken when a peer's connection closes."""
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError:
                if work.is_completed():  # perhaps after the slice ran out, so it may not have failed
                    work.wait()  # returns at once, or raises what ended it
                    return
                if self._in_vain():
                    raise

    def leave(self, unfinished: Collection[Work]) -> None:
        """Give the group up; keep it, even at exit, if a sum that was cut off does not end soon."""
        deadline = time.monotonic() + _END_S
        while not all(work.is_completed() for work in unfinished):
            if time.monotonic() > deadline:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))  # the list alone would release it at exit
                _kept.append((self._group, unfinished))
                break
            time.sleep(_LOOK_S)
        super().leave(unfinished)


def open_sockets() -> dict[int, str]:
    """This process's sockets now: the kernel's name of each, by file descriptor."""
    numbers = map(int, os.listdir(_DESCRIPTORS) if _DESCRIPTORS.is_dir() else ())
    return {number: name for number in numbers if (name := _name(number)).startswith("socket:")}


def has_closed_one(sockets: dict[int, str]) -> bool:
    """Whether one of them is closed: gloo does that when its peer ends."""
    return any(_name(descriptor) != name for descriptor, name in sockets.items())


def cut(sockets: dict[int, str]) -> None:
    """Shut down the sockets that are still open; their owner closes them."""
    for _, one in _opened(sockets):
        with suppress(OSError):
            if not _listens(one):  # gloo's listener would end the process
                one.shutdown(socket.SHUT_RDWR)


def end_silent(sockets: dict[int, str], after: timedelta) -> None:
    """Have the kernel end these connections when the other end confirms nothing for so long.

    A host that is cut off or down sends no word. TCP itself repeats a message for 15 minutes, and torch's store waits
    for the answer without a limit.
    """
    for _, one in _opened(sockets):
        if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None and _port(one) is not None:
            with suppress(OSError):
                one.setsockopt(socket.IPPROTO_TCP, option, max(1, int(1000 * after.total_seconds())))


def accepted(sockets: dict[int, str]) -> dict[int, str]:
    """Those that a listener among them accepted: one end of each connection of gloo, and no socket of anything else.

    gloo closes its connections one by one, each when its thread polls next, every 10 ms. A shutdown of one end wakes
    the threads of both.
    """
    opened = [(number, _port(one), _listens(one)) for number, one in _opened(sockets)]
    ports = {port for _, port, listens in opened if listens and port is not None}
    return {number: sockets[number] for number, port, listens in opened if not listens and port in ports}


def _opened(sockets: dict[int, str]) -> Iterator[tuple[int, socket.socket]]:
    for descriptor, name in sockets.items():
        if _name(descriptor) == name:  # the number may belong to another file by now
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
                yield descriptor, one


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _port(one: socket.socket) -> int | None:
    """The port of this end; None for a socket without ports."""
    return one.getsockname()[1] if one.family in (socket.AF_INET, socket.AF_INET6) else None


def free_kept() -> None:
    """Release the kept groups whose sums have ended."""
    for group, sums in _kept[:]:
        if all(work.is_completed() for work in sums):
            _kept.remove((group, sums))
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


def keeps_a_group() -> bool:
    """Whether a failed group is still kept."""
    return bool(_kept)


def _name(descriptor: int) -> str:
    try:
        return os.readlink(_DESCRIPTORS / str(descriptor))
    except OSError:
        return ""
