"""Where the launchers of a job meet, and where their ranks' store listens.

[Note: Who may connect to a launcher] torch's stores listen on all interfaces and ask for no password, and its c10d
rendezvous unpickles what lies in its store. So torch's rendezvous is not used on one machine: its store listens on the
loopback, and nothing in it is unpickled. On several machines the stores listen at the address that was given, and a
state of the rendezvous that would call or import anything is refused before torch unpickles it.

[Note: Waiting for other machines] They may never come. torch's own waits are in compiled code: no Ctrl-C ends them, and
a client that waits in vain tries twice and prints the stack of its C++. So all waits are made here.
"""

from __future__ import annotations

import errno
import importlib
import io
import ipaddress
import pickle
import socket
import time
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from ddp_loop.elastic.loopback import LOOPBACK, host_store, serve_store

Found = TypeVar("Found", tuple[bytes, Any] | None, tuple[bytes, Any, bool] | None)  # a state, and more
_DEFAULT_PORTS = {"static": 29500, "c10d": 29400}  # as torchrun
_STATIC_TIMEOUT_S = 600  # as torchrun
_C10D_TIMEOUT_S = 60  # likewise
_LOOK_S = 0.1  # between two looks for other machines
_BACKENDS = {"c10d": "c10d_rendezvous_backend", "etcd-v2": "etcd_rendezvous_backend"}  # those with a pickled state
_ROOM = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_IN_A_STATE = {
    (_ROOM, "_RendezvousState"),
    (_ROOM, "_NodeDesc"),
    ("datetime", "datetime"),
    ("datetime", "timezone"),
    ("datetime", "timedelta"),
}


class StaticRendezvous(StaticTCPRendezvous):
    """Torch's rendezvous of a fixed number of machines, with our listeners; port 0 is a free one, on one machine."""

    _store: dist.TCPStore | None

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all machines have come.

        Raises:
            RendezvousConnectionError: they do not, or the port is taken.
        """
        if self._store is None or self.master_port == 0:  # a new store has no keys of ranks that have ended
            try:
                self._store = host_store(self.master_port) if self.world_size == 1 else self._meet()
            except (OSError, RuntimeError) as error:  # torch's errors of a store are among the latter
                raise RendezvousConnectionError(str(error)) from error
        bootstrap = RendezvousStoreInfo(self.master_addr, self._store.port)
        return RendezvousInfo(dist.PrefixStore(self.run_id, self._store), self.rank, self.world_size, bootstrap)

    def _meet(self) -> dist.TCPStore:
        """The store of all machines, once each has come. See [Note: Waiting for other machines]."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        host = self.master_addr
        if self.rank == 0:
            store = serve_store(listen_at(host, self.master_port), host, self.timeout)
        else:
            await_listener(host, self.master_port, self.timeout.total_seconds())
            store = dist.TCPStore(host, self.master_port, is_master=False, timeout=self.timeout, wait_for_workers=False)
        own = dist.PrefixStore(f"{self.run_id}/machines", store)
        own.set(str(self.rank), "")
        missing = list(range(self.world_size))
        while missing := [rank for rank in missing if not own.check([str(rank)])]:
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, missing))
                raise RendezvousConnectionError(
                    f"of --nnodes={self.world_size} and --rdzv-id={self.run_id}, --node-rank {ranks} did not come "
                    f"within {self.timeout.total_seconds():g} s"
                )
            time.sleep(_LOOK_S)
        return store


class CheckedBackend(RendezvousBackend):
    """A backend of torch's dynamic rendezvous whose state holds plain data and torch's own classes alone.

    Args:
        backend: which keeps the state, where others can write too.
    """

    def __init__(self, backend: RendezvousBackend) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        return str(self._backend.name)

    def get_state(self) -> tuple[bytes, Any] | None:
        """The state, and its token.

        Raises:
            RendezvousStateError: it is no state of a rendezvous.
        """
        return _checked(self._backend.get_state())

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        """Replace the state that has this token; return the state then, its token, and whether it was replaced.

        Raises:
            RendezvousStateError: it is no state of a rendezvous.
        """
        return _checked(self._backend.set_state(state, token))


class _StateReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _IN_A_STATE:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _checked(found: Found) -> Found:
    try:
        if found is not None:
            _StateReader(io.BytesIO(found[0])).load()
    except Exception as error:  # bad bytes raise whatever they like
        raise RendezvousStateError(
            f"The store holds what no launcher wrote ({error}). Keep its port inside a network that you trust."
        ) from error
    return found


def make_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous of a job's launchers. See [Note: Who may connect to a launcher].

    Raises:
        RendezvousConnectionError: its store cannot be reached or served.
        ValueError: an option has no such value.
    """
    backend = parameters.backend
    if backend == "static":
        host, port = parse_rendezvous_endpoint(parameters.endpoint, _DEFAULT_PORTS[backend])
        timeout_s = parameters.get_as_int("timeout", _STATIC_TIMEOUT_S)
        rank = int(parameters.config["rank"])
        size = parameters.max_nodes
        return StaticRendezvous(LOOPBACK if size == 1 else host, port, rank, size, parameters.run_id, timeout_s or 0)
    if backend not in _BACKENDS:
        return registry.get_rendezvous_handler(parameters)
    server = None
    if backend == "c10d" and parameters.get("store_type", "tcp").strip().lower() == "tcp":
        server = _serve_meeting(parameters)
        host, port = parse_rendezvous_endpoint(parameters.endpoint, _DEFAULT_PORTS[backend])
        await_listener(host, port, parameters.get_as_int("read_timeout", _C10D_TIMEOUT_S) or 0)
    module = importlib.import_module(f"torch.distributed.elastic.rendezvous.{_BACKENDS[backend]}")
    found, store = module.create_backend(parameters)
    handler = create_handler(store, CheckedBackend(found), parameters)
    vars(handler).update(_meeting=server, _create_tcp_store_server=_serve)  # torch's would listen everywhere
    return handler


def _serve_meeting(parameters: RendezvousParameters) -> dist.TCPStore | None:
    """Serve the store of the c10d rendezvous, if this machine is to; torch's backend then connects to it."""
    host, port = parse_rendezvous_endpoint(parameters.endpoint, _DEFAULT_PORTS["c10d"])
    asked = parameters.get_as_bool("is_host")
    if not (_matches_machine_hostname(host) if asked is None else asked):
        return None
    server: dist.TCPStore | None = None
    try:
        server = _serve(host, port)
    except OSError as error:
        if asked or error.errno != errno.EADDRINUSE:
            raise RendezvousConnectionError(str(error)) from error
    if server is not None:  # otherwise another launcher of this machine serves it
        parameters.endpoint = f"{f'[{host}]' if ':' in host else host}:{server.port}"
    parameters.config["is_host"] = "false"
    return server


def _serve(host: str, port: int) -> dist.TCPStore:
    """A store of all machines, at this one's address."""
    return serve_store(listen_at(host, port), host)


def await_listener(host: str, port: int, timeout_s: float) -> None:
    """Wait until a process listens at an address. See [Note: Waiting for other machines].

    Raises:
        RendezvousConnectionError: none does in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), max(_LOOK_S, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                why = error.strerror or error
                raise RendezvousConnectionError(f"nothing listened there within {timeout_s:g} s ({why})") from None
            time.sleep(_LOOK_S)


def listen_at(host: str, port: int) -> socket.socket:
    """A listener at the address of this machine that `host` names.

    It listens on all interfaces where `host` names none that other machines reach: the name of a machine is often
    127.0.1.1 on itself, and an address that a gateway translates is not the machine's own.

    Raises:
        OSError: the port is taken, or the name is unknown.
    """
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback and host not in (
            address[0],
            "localhost",
        ):
            continue
        try:
            return socket.create_server(address, family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
