"""Accelerators: kinds of devices and their abilities. `Cuda` chooses NCCL; `TorchAccelerator` serves every other kind.

[Note: Asynchronous] A GPU computes while the host continues, so reading a value makes the host wait for it. Values of
an asynchronous device are therefore copied to the host and read one step later, and the ranks' joint decisions
travel over the CPU instead of in the step's own sum.
"""

from __future__ import annotations

import ctypes
import math
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

_CHECK_S = 0.5  # between two checks while the host waits for a device
_SPIN_S = 0.005  # so long a wait looks without a pause
_NAP_S = 0.0002
_READS = "synchronizing CUDA operation"  # in torch's warning
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3  # parameters of mallopt, from glibc's malloc.h
_SLICE = "MIG"
_VISIBLE = ("VISIBLE_DEVICES", "VISIBLE_MODULES", "AFFINITY_MASK")  # how such variables of a kind of device end
_WATCHDOG_LATER = timedelta(seconds=30)  # than the host's own timeout
_checks: list[Callable[[], None]] = []


class Event(Protocol):
    """A point in a device's work, as torch.cuda.Event is."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""


class Accelerator:
    """A device that is no accelerator of torch, such as "meta": it counts as asynchronous, and its copies block.

    Args:
        device: such as cuda:0.

    Attributes:
        kind: such as "cuda".
        is_asynchronous: whether reading a value makes the host wait. See [Note: Asynchronous].
        is_host: whether its memory is the host's, and its kernels are the CPU's.
        is_gpu: whether it has a generator of its own, and copies to pinned memory while the host continues.
        has_batch_norm_kernels: whether torch has the kernels of nn.SyncBatchNorm for it.
        can_be_shared: whether several ranks can have it: gloo takes its tensors.
        needs_triton: whether torch.compile needs Triton for it.
        backend: of torch.distributed for its tensors; empty where torch has none.
        visibility: the environment variable that gives a process some of these devices; empty if unknown.
    """

    is_asynchronous = True
    is_host = False
    is_gpu = False
    has_batch_norm_kernels = False
    can_be_shared = True
    needs_triton = False
    backend = "gloo"
    visibility = ""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = device.type

    def __str__(self) -> str:
        """The device and its size, in words."""
        return str(self.device)

    def activate(self) -> None:
        """Make it this process's current device."""

    def initialize(self) -> None:
        """Have torch initialize devices of this kind; no device gets a context."""

    def require_backend(self, ranks: int) -> None:
        """Refuse so many ranks on such devices, if torch has no backend for their sums.

        Raises:
            ValueError: it has none.
        """

    def uuid(self) -> str:
        """The device's UUID as nvidia-smi shows it, such as "GPU-3f1a..."; empty for a device without one."""
        return ""

    def identity(self) -> str:
        """A name that tells the device from other ranks' devices, on any machine; empty where that does not matter."""
        return ""

    def process_group(self, identities: Sequence[str]) -> tuple[str, torch.device | None]:
        """The backends of a process group, and the device with a backend of its own; None without one.

        Args:
            identities: of the devices of all ranks, in rank order.
        """
        return "gloo", None

    def connect(self, group: Any, timeout: timedelta) -> None:
        """Make this device's own backend of a process group, such as NCCL, ready, after all other connections.

        Args:
            group: of torch, not yet bound to a device.
            timeout: after which the host gives up a wait, and names the culprit.
        """

    def has_bfloat16(self) -> bool:
        """Whether it multiplies in bfloat16. Where it does not, torch refuses or converts, which is slower."""
        return torch.amp.is_autocast_available(self.kind)

    # -- copies --------------------------------------------------------------------------------------------

    def start_copy(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event | None]:
        """Start to copy a tensor to the host. Returns the copy, and the event of its completion; None if complete."""
        return tensor.detach().to("cpu", copy=True), None

    def empty_on_host(self, like: torch.Tensor) -> torch.Tensor:
        """Host memory of the shape and dtype of `like` to which this device copies quickly."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")

    def start_copies(self, here: Sequence[torch.Tensor], there: Sequence[torch.Tensor]) -> Event | None:
        """Start to copy `there`, on this device, into `here`, from `empty_on_host`.

        Returns:
            The event of their completion; None if they are complete.
        """
        torch._foreach_copy_(here, there)  # type: ignore[arg-type]
        return None

    # -- measuring -----------------------------------------------------------------------------------------

    def mark(self) -> Any:
        """A point in the device's work; `seconds` gives the time between two of them."""
        return time.perf_counter()

    def seconds(self, first: Any, last: Any) -> float:
        """The seconds from one mark to a later one, once the device has reached it."""
        return float(last - first)

    @contextmanager
    def host_reads(self, note: Callable[[str, int], None]) -> Iterator[None]:
        """Inside the block call `note` with the file and the line of each operation that makes the host wait for it."""
        yield

    # -- random numbers ------------------------------------------------------------------------------------

    def seed(self, key: int) -> None:
        """Seed its generator, if it has one of its own."""

    def random_state(self) -> torch.Tensor | None:
        """The state of its generator; None if it has none of its own."""
        return None

    def set_random_state(self, state: torch.Tensor) -> None:
        """Restore a state that `random_state` returned."""

    # -- memory --------------------------------------------------------------------------------------------

    def keep_memory(self) -> None:
        """Keep the memory of freed tensors for the next ones; the allocators of most devices always do."""

    def memory_held(self) -> float:
        """Bytes of its memory that this process holds; 0 if unknown."""
        return 0.0

    def memory_free(self) -> float:
        """Bytes of its memory that are free beside this process's peak; infinity where they are not limited."""
        return math.inf

    def empty_cache(self) -> None:
        """Give the memory of freed tensors, which torch keeps, back to the device; the host may wait for it."""


class Cpu(Accelerator):
    """The host itself."""

    is_asynchronous = False
    is_host = True

    def __str__(self) -> str:
        threads = torch.get_num_threads()
        return f"cpu: {threads} thread{'s' if threads != 1 else ''}"

    def has_bfloat16(self) -> bool:
        """Whether the processor has instructions for it: AVX512-BF16, AMX or ARM's."""
        known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # older torch lacks it
        found = [bool(value) for name, value in known.items() if name.endswith("bf16")]
        return any(found) if found else bool(torch.cpu._is_avx512_bf16_supported())

    def keep_memory(self) -> None:
        """Keep the memory of freed tensors, if the C library is glibc.

        By default glibc gives large blocks back to the system, which clears each page again when it is next used: 7,700
        to 16,100 page faults in a step of the digit network.
        """
        with suppress(AttributeError, OSError, TypeError):
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_TRIM_THRESHOLD, 2**31 - 1)
            if not mallopt(_MMAP_THRESHOLD, 2**30):
                mallopt(_MMAP_THRESHOLD, 2**25)  # the most of older versions

    def memory_held(self) -> float:
        """The resident part of this process's memory."""
        with suppress(OSError, ValueError, IndexError):
            return float(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 0.0


class TorchAccelerator(Accelerator):
    """An accelerator of torch, of any kind, through `torch.accelerator` and the kind's own module."""

    is_gpu = True
    can_be_shared = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.needs_triton = self.kind in ("cuda", "xpu")
        self.backend = dist.Backend.default_device_backend_map.get(self.kind, "")

    def __str__(self) -> str:
        properties = self._properties()
        name = getattr(properties, "name", self.kind)
        size = getattr(properties, "total_memory", 0)
        return f"{self.device}: {name}" + (f", {size / 2**30:.0f} GiB" if size else "")

    @property
    def _module(self) -> Any:
        """Such as torch.cuda."""
        return torch.get_device_module(self.device)

    def _properties(self) -> Any:
        """The device's properties from the kind's module; None if it gives none."""
        ask = getattr(self._module, "get_device_properties", None)
        return None if ask is None else ask(self.device)

    def activate(self) -> None:
        torch.accelerator.set_device_index(self.device)

    def require_backend(self, ranks: int) -> None:
        if ranks > 1 and not has_own_backend(self):
            has = "gloo, which takes no such tensors" if self.backend else "none"
            raise ValueError(
                f"Ranks on {self.kind} devices need a backend of torch.distributed for their sums. torch has {has}. "
                'Start one rank, pass device="cpu", or install and import the package with the backend.'
            )

    def uuid(self) -> str:
        return str(getattr(self._properties(), "uuid", ""))

    def identity(self) -> str:
        """Its UUID; without one its index, the host, and the variables that may give each rank another device."""
        chosen = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.endswith(_VISIBLE)]
        return self.uuid() or ", ".join([f"{self.device} on host {socket.gethostname()}", *chosen])

    def process_group(self, identities: Sequence[str]) -> tuple[str, torch.device | None]:
        """The backend that torch has for such devices; it connects when it is first used."""
        return f"cpu:gloo,{self.kind}:{self.backend}", self.device

    def connect(self, group: Any, timeout: timedelta) -> None:
        """Have the backend wait for longer than the host: a watchdog such as NCCL's ends the process at its timeout."""
        with suppress(AttributeError):  # not every backend of an extension has such a timeout
            group._get_backend(self.device)._set_default_timeout(timeout + _WATCHDOG_LATER)

    def start_copy(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        host = self.empty_on_host(tensor)
        return host, self.start_copies([host], [tensor.detach()])

    def empty_on_host(self, like: torch.Tensor) -> torch.Tensor:
        """Pinned memory, to which the device copies while the host continues."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

    def start_copies(self, here: Sequence[torch.Tensor], there: Sequence[torch.Tensor]) -> Event:
        """Copy on the device's current stream, after the work launched there before."""
        torch._foreach_copy_(here, there, non_blocking=True)  # type: ignore[arg-type]
        return self._event(enable_timing=False)

    def mark(self) -> Event:
        """An event on the device's current stream."""
        return self._event(enable_timing=True)

    def seconds(self, first: Any, last: Any) -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000

    def _event(self, *, enable_timing: bool) -> torch.Event:
        event = torch.Event(self.device, enable_timing=enable_timing)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def seed(self, key: int) -> None:
        """Seed its generator. A DataLoader's worker has no device, and does nothing."""
        if self._is_in_use():
            with torch.accelerator.device_index(self.device.index):
                self._module.manual_seed(key)

    def random_state(self) -> torch.Tensor | None:
        state: torch.Tensor | None = self._module.get_rng_state(self.device) if self._is_in_use() else None
        return state

    def set_random_state(self, state: torch.Tensor) -> None:
        self._module.set_rng_state(state.contiguous(), self.device)

    def _is_in_use(self) -> bool:
        """Whether this process itself has initialized such devices; a forked one cannot use its parent's."""
        is_forked = getattr(self._module, "_is_in_bad_fork", lambda: False)
        return not is_forked() and bool(getattr(self._module, "is_initialized", lambda: True)())

    def memory_held(self) -> float:
        with suppress(AttributeError, RuntimeError):  # an older torch, or an allocator that does not count
            return float(torch.accelerator.memory_reserved(self.device))
        return 0.0

    def memory_free(self) -> float:
        """Free bytes, less the bytes that this process gave back since its peak: its next step takes those again.

        0 if unknown, so that data are copied shard by shard.
        """
        with suppress(AttributeError, RuntimeError):
            peak = torch.accelerator.max_memory_reserved(self.device)
            given_back = peak - torch.accelerator.memory_reserved(self.device)
            return float(torch.accelerator.get_memory_info(self.device)[0] - given_back)
        return 0.0

    def empty_cache(self) -> None:
        with suppress(AttributeError, RuntimeError):
            torch.accelerator.empty_cache()


class Cuda(TorchAccelerator):
    """A GPU that torch reaches by CUDA or ROCm."""

    has_batch_norm_kernels = True
    can_be_shared = True
    visibility = "CUDA_VISIBLE_DEVICES"

    def activate(self) -> None:
        self.initialize()
        torch.cuda.set_device(self.device)

    def initialize(self) -> None:
        torch.cuda.init()  # otherwise the generators exist only after the first tensor on the device

    def uuid(self) -> str:
        return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"

    def identity(self) -> str:
        """Its UUID; one word for all slices of GPUs, which NCCL refuses as one GPU."""
        return _SLICE if " MIG " in torch.cuda.get_device_properties(self.device).name else self.uuid()

    def process_group(self, identities: Sequence[str]) -> tuple[str, torch.device | None]:
        """NCCL where each rank has a GPU of its own, since it refuses two ranks on one."""
        has_own = len(set(identities)) == len(identities)
        return ("cpu:gloo,cuda:nccl", self.device) if has_own else ("gloo", None)

    def connect(self, group: Any, timeout: timedelta) -> None:
        """Connect NCCL at once, so that it is known to have all that it needs.

        NCCL's watchdog ends a process at NCCL's own timeout, so that timeout is longer than the host's.
        """
        backend = group._get_backend(self.device)
        backend._set_default_timeout(timeout + _WATCHDOG_LATER)
        group.bound_device_id = self.device
        backend.eager_connect_single_device(self.device)

    def has_bfloat16(self) -> bool:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    @contextmanager
    def host_reads(self, note: Callable[[str, int], None]) -> Iterator[None]:
        """Inside the block call `note` for each warning of `torch.cuda.set_sync_debug_mode`."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            show = warnings.showwarning

            def see(message: Any, category: Any, filename: str, lineno: int, *more: Any, **others: Any) -> None:
                if _READS in str(message):
                    note(filename, lineno)
                else:
                    show(message, category, filename, lineno, *more, **others)

            warnings.filterwarnings("always", f".*{_READS}")
            warnings.filterwarnings("ignore", "Synchronization debug mode")
            warnings.showwarning = see
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)

    def seed(self, key: int) -> None:
        """Seed its generator. A DataLoader's worker has no GPU, and does nothing."""
        if torch.cuda.is_initialized():
            self._generator.manual_seed(key)

    def random_state(self) -> torch.Tensor:
        return self._generator.get_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        self._generator.set_state(state.contiguous())

    @property
    def _generator(self) -> torch.Generator:
        return torch.cuda.default_generators[self.device.index or 0]  # get_rng_state fails in a forked worker

    def memory_held(self) -> float:
        return float(torch.cuda.memory_reserved(self.device))

    def memory_free(self) -> float:
        """Free bytes, less the bytes that this process gave back since its peak: its next step takes those again."""
        given_back = torch.cuda.max_memory_reserved(self.device) - torch.cuda.memory_reserved(self.device)
        return float(torch.cuda.mem_get_info(self.device)[0] - given_back)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()


KINDS: dict[str, type[Accelerator]] = {"cpu": Cpu, "cuda": Cuda}


@cache
def accelerator_of(device: torch.device) -> Accelerator:
    """The accelerator of a device."""
    usual = TorchAccelerator if device.type == current_kind() else Accelerator
    return KINDS.get(device.type, usual)(device)


def current_kind() -> str:
    """The type of torch's accelerator, such as "cuda"; empty in a build that has none."""
    found = torch.accelerator.current_accelerator()
    return "" if found is None else found.type


def has_own_backend(one: Accelerator) -> bool:
    """Whether torch has a backend for its sums that is not gloo."""
    return one.backend not in ("", "gloo")


def is_asynchronous(tensor: torch.Tensor) -> bool:
    """Whether reading a value of this tensor makes the host wait. See [Note: Asynchronous]."""
    return accelerator_of(tensor.device).is_asynchronous


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host, or one that is there, on a device; the host does not wait for the copy."""
    there = accelerator_of(device)
    if there.is_host or tensor.device == device:
        return tensor
    return there.empty_on_host(tensor).copy_(tensor).to(device, non_blocking=True)


@torch.no_grad()
def copies_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors, one or more; by few kernels where all have one device and dtype."""
    copies = list(map(torch.empty_like, tensors))
    torch._foreach_copy_(copies, tensors)
    return copies


def device_count() -> int:
    """The number of torch's accelerators, without initializing them."""
    kind = current_kind()
    return int(torch.get_device_module(kind).device_count()) if kind else 0


def gpu_count() -> int:
    """The number of GPUs that ranks take unasked, without initializing them: those between which torch can sum."""
    count = device_count()
    return count if count and has_own_backend(accelerator_of(torch.device(current_kind(), 0))) else 0


def all_gpus() -> list[Accelerator]:
    """Every accelerator of torch, in the order of their indices. They are initialized; none gets a context."""
    found = [accelerator_of(torch.device(current_kind(), number)) for number in range(device_count())]
    for one in found[:1]:
        one.initialize()
    return found


def gpu_visibility() -> str:
    """The environment variable that gives a process some GPUs; empty if unknown."""
    return accelerator_of(torch.device(current_kind() or "cuda", 0)).visibility


def reaches(one: Accelerator, other: Accelerator) -> bool:
    """Whether a GPU reaches the memory of another one of its machine directly, as far as torch can say."""
    ask = getattr(torch.get_device_module(one.device), "can_device_access_peer", None)
    return ask is None or bool(ask(one.device, other.device))


def shares_a_gpu(identity: str, other: str) -> bool:
    """Whether two identities certainly belong to one GPU; slices of GPUs have one identity."""
    return identity == other and identity not in ("", _SLICE)


def check_in_waits(check: Callable[[], None]) -> Callable[[], None]:
    """Call `check` every half second in which the host waits for a device. It raises where the wait is in vain.

    Returns:
        A function that ends the calls.
    """
    _checks.append(check)
    return lambda: _checks.remove(check)


def wait_for(event: Event) -> None:
    """Wait until the device has reached an event; it may wait there for a rank that never comes."""
    if not _checks:
        event.synchronize()
        return
    began = checked = time.monotonic()
    while not event.query():
        now = time.monotonic()
        time.sleep(0.0 if now - began < _SPIN_S else _NAP_S)
        if now - checked > _CHECK_S:
            checked = now
            for check in _checks:
                check()


class HostCopy:
    """A copy on the host of a tensor as it is now, perhaps not complete yet."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values, self._event = accelerator_of(tensor.device).start_copy(tensor)

    def ready(self) -> bool:
        event = self._event  # another thread may wait for it meanwhile
        return event is None or event.query()

    def wait(self) -> torch.Tensor:
        """Wait until the copy is complete, and return it."""
        if self._event is not None:
            wait_for(self._event)
            self._event = None
        return self._values
