"""Memory that the ranks of one machine share: without a name, and gone with the last process that has it mapped.

A segment is a file in memory (memfd_create), which travels as a descriptor over a Unix socket. It needs no file system,
is not limited by the size of /dev/shm, and is sealed, so that no process can shrink it under another one.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress

import torch

_ALIGN = 64  # bytes: of a cache line, and of torch's own allocations
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


def aligned(size: int) -> int:
    """The next multiple of a cache line, in bytes."""
    return -(-size // _ALIGN) * _ALIGN


class Segment:
    """Shared memory of one rank.

    Args:
        descriptor: of the file in memory; the segment closes it.

    Attributes:
        bytes: the memory, uint8, shape (size,).
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        try:
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise PermissionError("a segment is not sealed")
            size = os.fstat(descriptor).st_size
            # It opens the file anew and closes it; Python's mmap would hold a descriptor for each mapping.
            path = f"/proc/self/fd/{descriptor}"
            self.bytes = torch.from_file(path, shared=True, size=size, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            self.close()
            raise OSError(errno.ENOMEM, f"a segment cannot be mapped: {error}") from error
        except BaseException:
            self.close()
            raise

    @classmethod
    def make(cls, size: int) -> Segment:
        """A new segment of at least `size` bytes, with all its pages allocated.

        Raises:
            OSError: the system has no such files, no memory for it, or no descriptor left.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "the system has no memfd_create")
        descriptor = os.memfd_create("ddp_loop", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            size = aligned(size)
            os.posix_fallocate(descriptor, 0, size)  # otherwise a page that is missing later ends the process
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    def close(self) -> None:
        """Close the descriptor; the memory stays as long as tensors use it."""
        descriptor = self.descriptor
        self.descriptor = -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)

    __del__ = close  # one that was never sent
