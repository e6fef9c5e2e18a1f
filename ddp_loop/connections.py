"""The connections of a process group, so that a rank that fails can cut them at once.

gloo closes a connection only when nothing refers to the group any more, and a sum that is still under way in one of
its threads does. A socket that is shut down wakes the peers that wait for this rank.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")  # elsewhere than on Linux none are found, and a peer waits for its timeout


def open_sockets() -> dict[int, str]:
    """This process's sockets now: the kernel's name of each, by file descriptor."""
    found: dict[int, str] = {}
    if _DESCRIPTORS.is_dir():
        for entry in os.listdir(_DESCRIPTORS):
            name = _name(int(entry))
            if name.startswith("socket:"):
                found[int(entry)] = name
    return found


def cut(sockets: dict[int, str]) -> None:
    """Shut these sockets down, but those that are closed already; their owner closes them."""
    for descriptor, name in sockets.items():
        if _name(descriptor) == name:  # the number may belong to another file by now
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
                if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo's listener would end the process
                    one.shutdown(socket.SHUT_RDWR)


def _name(descriptor: int) -> str:
    try:
        return os.readlink(_DESCRIPTORS / str(descriptor))
    except OSError:
        return ""
