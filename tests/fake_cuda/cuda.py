"""`torch.cuda` of a process with fake devices; imported at its start, before anything uses torch."""

from __future__ import annotations

import atexit
import gc
import os
import select
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake_cuda_extension as device
import torch
import torch.cuda
import torch.distributed as dist

from tests.fake_cuda.waits import Waits as Waits
from tests.fake_cuda.waits import place, tell

VARIABLES = (
    "FAKE_CUDA_DEVICES",
    "FAKE_CUDA_NAME",
    "FAKE_CUDA_MEMORY",
    "FAKE_CUDA_SHARED",
    "FAKE_CUDA_SLOW_S",
    "FAKE_CUDA_IDLE_S",
    "FAKE_CUDA_ERRORS",
)
BYTES = 80 * 2**30

_MODE_FILE = str(Path(__file__).parents[1] / "support" / "devices.py")  # calls torch for a test that runs here
_CYCLES = 2e9  # in a second, of `torch.cuda._sleep`

count = int(os.environ.get("FAKE_CUDA_DEVICES", os.environ.get("LOCAL_WORLD_SIZE", "1")))
total_bytes = int(os.environ.get("FAKE_CUDA_MEMORY", BYTES))
_idle_s = float(os.environ.get("FAKE_CUDA_IDLE_S", "0"))  # until NCCL closes its idle connections; 0 for never
_mode = 0  # of torch.cuda.set_sync_debug_mode


def visible() -> list[int]:
    """The devices that CUDA_VISIBLE_DEVICES leaves, in its order; the real CUDA reads it once."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(range(count)) if chosen is None else [int(one) for one in chosen.split(",") if one]


def name() -> str:
    return os.environ.get("FAKE_CUDA_NAME", "Fake H100")


def _bus_of(index: int) -> int:
    """Slices of a GPU have one place on the bus."""
    return 0 if " MIG " in name() else visible()[index]


def _waited(what: str) -> None:
    where = place()
    if _mode == 1 and not what.startswith("event."):  # torch does not warn of events
        import warnings

        is_in_mode = sys._getframe(1).f_code.co_filename == _MODE_FILE
        warnings.warn(f"called a synchronizing CUDA operation: {what}", stacklevel=2 + is_in_mode)
    tell(what, where)


@contextmanager
def limited(more: int) -> Iterator[None]:
    """Let the device have `more` bytes beside those in use, as long as the block lasts."""
    global total_bytes
    before = total_bytes
    gc.collect()
    device.reset_peak()
    total_bytes = device.memory()[0] + more
    device.limit_memory(total_bytes)
    try:
        yield
    finally:
        total_bytes = before
        device.limit_memory(before)


class Stream(torch.Stream):
    """A stream of a fake device."""

    def __new__(cls, device: Any = None, priority: int = 0, **keywords: Any) -> Stream:
        if keywords:
            return super().__new__(cls, **keywords)
        return super().__new__(cls, device=_device(device), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return int(self.stream_id)


class Event(torch.Event):
    """An event of a fake device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, device=_device(None), enable_timing=enable_timing)


def _device(given: Any) -> torch.device:
    if given is None:
        return torch.device("cuda", device.device())
    if isinstance(given, int):
        return torch.device("cuda", given)
    found = torch.device(given)
    return torch.device("cuda", device.device() if found.index is None else found.index)


def _current_stream(of: Any = None) -> Stream:
    return _wrapped(torch.accelerator.current_stream(_device(of)))


def _wrapped(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


@contextmanager
def _stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _exchange(index: int) -> int:
    before: int = device.device()
    if index >= 0:
        device.set_device(index)
    return before


def _set_device(given: Any) -> None:
    index = _device(given).index
    if index >= len(visible()):
        raise RuntimeError(f"CUDA error: invalid device ordinal {index}; there are {len(visible())} fake devices")
    device.set_device(index)


def _properties(of: Any = None) -> types.SimpleNamespace:
    index = _device(of).index
    return types.SimpleNamespace(
        name=name(),
        total_memory=total_bytes,
        uuid=f"fake-{visible()[index]}",
        pci_bus_id=_bus_of(index),
        major=9,
        minor=0,
        multi_processor_count=132,
        warp_size=32,
        is_integrated=False,
        gcnArchName="",
    )


def _set_sync_debug_mode(mode: int | str) -> None:
    global _mode
    _mode = {"default": 0, "warn": 1, "error": 2}.get(mode, 0) if isinstance(mode, str) else mode


def _memory_stats(of: Any = None) -> dict[str, int]:
    now, peak = device.memory()
    return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": peak, "num_ooms": 0}


def _put_on_torch() -> None:
    cuda: Any = torch.cuda
    generators = tuple(device.generator(index) for index in range(max(count, 1)))
    replaced: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_available": lambda: bool(visible()),
        "is_initialized": lambda: True,
        "device_count": lambda: len(visible()),
        "current_device": device.device,
        "set_device": _set_device,
        "synchronize": lambda of=None: device.synchronize(),
        "is_bf16_supported": lambda including_emulation=True: True,
        "default_generators": generators,
        "Stream": Stream,
        "Event": Event,
        "current_stream": _current_stream,
        "default_stream": lambda of=None: Stream(stream_id=0, device_index=_device(of).index, device_type=1),
        "set_stream": lambda stream: torch.accelerator.set_stream(stream),
        "stream": _stream,
        "get_device_properties": _properties,
        "get_device_name": lambda of=None: name(),
        "get_device_capability": lambda of=None: (9, 0),
        "memory_reserved": lambda of=None: device.memory()[0],
        "memory_allocated": lambda of=None: device.memory()[0],
        "max_memory_allocated": lambda of=None: device.memory()[1],
        "max_memory_reserved": lambda of=None: device.memory()[1],
        "reset_peak_memory_stats": lambda of=None: device.reset_peak(),
        "memory_stats": _memory_stats,
        "empty_cache": lambda: None,
        "mem_get_info": lambda of=None: (total_bytes - device.memory()[0], total_bytes),
        "can_device_access_peer": lambda one, other: True,
        "get_sync_debug_mode": lambda: _mode,
        "set_sync_debug_mode": _set_sync_debug_mode,
        "manual_seed": lambda seed: generators[device.device()].manual_seed(seed),
        "manual_seed_all": lambda seed: [one.manual_seed(seed) for one in generators],
        "get_rng_state": lambda of=None: generators[_device(of).index].get_state(),
        "set_rng_state": lambda state, of=None: generators[_device(of).index].set_state(state),
        "is_current_stream_capturing": lambda: False,
        "_sleep": lambda cycles: device.slow_down(cycles / _CYCLES),  # each later event takes so long
        "_exchange_device": _exchange,
        "_maybe_exchange_device": lambda index: _exchange(index),  # torch.compile wants two functions
    }
    for attribute, value in replaced.items():
        setattr(cuda, attribute, value)
    beneath: dict[str, Any] = {
        "_cuda_getDeviceCount": lambda: len(visible()),
        "_cuda_getDevice": device.device,
        "_cuda_setDevice": device.set_device,
        "_cuda_exchangeDevice": _exchange,
        "_cuda_maybeExchangeDevice": _exchange,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_synchronize": device.synchronize,
        "_cuda_getCurrentRawStream": lambda index: torch.accelerator.current_stream(index).stream_id,
        "_nccl_version": lambda: (2 << 32) | (28 << 16) | 3,
    }
    for attribute, value in beneath.items():
        setattr(torch._C, attribute, value)
    torch.cuda.graphs._cuda_isCurrentStreamCapturing = lambda: False
    torch.cuda.nccl.version = lambda: (2, 28, 3)


def _put_storages() -> None:
    """Let storages of the device be cloned, for `deepcopy` and `torch.load`."""
    clone: Any = torch.UntypedStorage.clone

    def clone_any(storage: Any) -> Any:
        if storage.device.type != "cuda":
            return clone(storage)
        made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device).untyped_storage()
        made.copy_(storage)
        return made

    torch.UntypedStorage.clone = clone_any  # type: ignore[method-assign]


class _Options:
    """ProcessGroupNCCL.Options."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self._timeout: Any = None
        self.is_high_priority_stream = is_high_priority_stream
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self.config = types.SimpleNamespace()


class _HasItsName(type):
    def __instancecheck__(cls, one: object) -> bool:
        return getattr(one, "name", lambda: "")() == "nccl"


class ProcessGroupNCCL(metaclass=_HasItsName):
    """Made by torch for the backend "nccl"."""

    Options = _Options

    def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
        _require_own_gpu(store, rank, size)
        below = _gloo(store, rank, size, timeout=options._timeout)
        return device.nccl(below, rank, size)


def _require_own_gpu(store: Any, rank: int, size: int) -> None:
    """Refuse two ranks with one place on the bus, as the real NCCL does."""
    store.set(f"bus/{rank}", str(_bus_of(device.device())))
    places = [store.get(f"bus/{one}") for one in range(size)]
    for one in range(size):
        if one != rank and places[one] == places[rank]:
            raise RuntimeError(f"NCCL error: invalid usage. Duplicate GPU detected : rank {rank} and rank {one}")


_gloo = dist.ProcessGroupGloo


class _LikeGloo(type):
    def __instancecheck__(cls, one: object) -> bool:
        return getattr(one, "name", lambda: "")() == "gloo"

    def __getattr__(cls, attribute: str) -> Any:
        return getattr(_gloo, attribute)


class ProcessGroupGloo(metaclass=_LikeGloo):
    """gloo; where ranks share a device it takes tensors of the device too, as that of a CUDA build does."""

    def __new__(cls, store: Any, rank: int, size: int, *more: Any, **keywords: Any) -> Any:
        below = _gloo(store, rank, size, *more, **keywords)
        return device.gloo(below, rank, size) if os.environ.get("FAKE_CUDA_SHARED") else below


_MOST = 64  # sockets; a world has a few


class _Sockets:
    """Connections of NCCL's own, as for its start, which stay, and for RAS, which it closes when they are idle.

    Its listeners stay open too. In a process that joins one world after another only the newest stay, since `select`
    takes no descriptor above 1,023.
    """

    def __init__(self) -> None:
        self.open: list[socket.socket] = []
        self.listeners: list[socket.socket] = []

    def connect(self) -> None:
        for sockets in (self.open, self.listeners):
            for one in sockets[:-_MOST]:
                one.close()
            del sockets[:-_MOST]
        self.open += self._connected()
        if _idle_s:
            threading.Thread(target=_close_later, args=self._connected(), daemon=True).start()

    def _connected(self) -> list[socket.socket]:
        listener = socket.create_server(("127.0.0.1", 0))
        self.listeners.append(listener)
        return [socket.create_connection(listener.getsockname()), listener.accept()[0]]

    def warn_of_ends(self) -> None:
        """Say, as NCCL does under NCCL_DEBUG=WARN, that a peer has closed a connection."""
        if self.open and select.select(self.open, [], [], 0)[0] and os.environ.get("NCCL_DEBUG") in ("WARN", "INFO"):
            print("NCCL WARN socketPollConnect: connection closed by remote peer", flush=True)

    def close(self) -> None:
        """Close all, as NCCL's RAS does with idle ones."""
        for one in (*self.open, *self.listeners):
            one.close()
        self.open.clear()
        self.listeners.clear()


def _close_later(*idle: socket.socket) -> None:
    time.sleep(_idle_s)
    for one in idle:
        one.close()


nccl_sockets = _Sockets()


def _put_backends() -> None:
    groups: Any = dist.distributed_c10d
    package: Any = dist
    destroy = groups.destroy_process_group

    def destroy_and_look(*group: Any) -> None:
        nccl_sockets.warn_of_ends()
        destroy(*group)

    groups.destroy_process_group = package.destroy_process_group = destroy_and_look
    groups.ProcessGroupNCCL = package.ProcessGroupNCCL = ProcessGroupNCCL
    groups._NCCL_AVAILABLE = True
    groups.is_nccl_available = package.is_nccl_available = lambda: True
    groups.ProcessGroupGloo = package.ProcessGroupGloo = ProcessGroupGloo
    backend: Any = torch._C._distributed_c10d.Backend
    backend.options = types.SimpleNamespace()  # torch notes the ranks of a group there


def _write_errors(folder: Path) -> None:
    """Check the order of kernels from now on, and write what was wrong when this process ends."""
    device.check_order(True)

    def write() -> None:
        if device.launches():  # not a launcher, which has no kernels
            (folder / f"errors-{os.getpid()}").write_text("\n".join(device.errors()))

    atexit.register(write)


_put_on_torch()
_put_storages()
_put_backends()
device.limit_memory(total_bytes)
device.slow_down(float(os.environ.get("FAKE_CUDA_SLOW_S", "0")))
device.on_wait(_waited)
device.on_place(place)
device.on_connect(nccl_sockets.connect)
if folder := os.environ.get("FAKE_CUDA_ERRORS"):
    _write_errors(Path(folder))
