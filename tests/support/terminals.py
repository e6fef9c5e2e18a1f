"""Terminals: both ends, and what comes out of one."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

END_S = 100.0  # two ranks that import torch take 5 s on two idle cores


@contextmanager
def screen_of(columns: int) -> Iterator[tuple[int, int]]:
    """Both ends of a terminal of so many columns."""
    near, far = pty.openpty()
    fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    try:
        yield near, far
    finally:
        os.close(near)
        os.close(far)


def read_until(near: int, mark: str) -> str:
    """What is sent up to this mark: the kernel hands it on a little later, and in parts."""
    said, deadline = b"", time.monotonic() + END_S
    while mark.encode() not in said and select.select([near], [], [], max(0.0, deadline - time.monotonic()))[0]:
        said += os.read(near, 65536)
    return said.decode(errors="replace")
