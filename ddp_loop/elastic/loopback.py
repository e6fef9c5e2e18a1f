"""The loopback interface, where the ranks of one machine meet: no other machine can connect to it.

A listener made by torch accepts on all interfaces, and looks up each peer's IPv6 address in DNS: with 1 of 50 answers
lost, 1 task of 10 began 5 s late. So the listeners are made here. Nothing asks for a password: every process of this
machine can connect, of whichever user.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT = timedelta(seconds=300)  # torch's own default


def host_store(port: int = 0) -> dist.TCPStore:
    """A key-value store of this machine's ranks, served by this process.

    Args:
        port: by default a free one, which the kernel chooses.

    Raises:
        OSError: the port is taken.
    """
    return serve_store(socket.create_server((LOOPBACK, port)), LOOPBACK)


def serve_store(listener: socket.socket, host: str, timeout: timedelta = _STORE_TIMEOUT) -> dist.TCPStore:
    """A key-value store on a listener, which belongs to the store from then on.

    Args:
        listener, host: where it listens, and where this process reaches it.
        timeout: of each request.
    """
    import torch.distributed as dist

    port = listener.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach(),
    )  # fmt: skip


def loopback_variables() -> dict[str, str]:
    """Environment variables that have gloo and NCCL listen on the loopback alone; none where its name is unknown."""
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)  # Linux, macOS
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
