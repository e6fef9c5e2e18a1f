"""Accelerators: what a device is and can do, one class for each kind. A new kind of device is one new class here.

[Note: Asynchronous] A GPU computes while the host continues, so reading a value makes the host wait for it. Values of
an asynchronous device are therefore copied to the host and read one step later, and what the ranks decide together
travels over the CPU instead of in the step's own sum. `KINDS` lets tests run this way on a CPU.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

_CHECK_S = 0.5  # between two checks while the host waits for a device
_SPIN_S = 0.005  # so long a wait looks without a pause
_NAP_S = 0.0002
_READS = "synchronizing CUDA operation"  # in torch's warning
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt, from glibc's malloc.h
_SLICE = "MIG"
_WATCHDOG_LATER = timedelta(seconds=30)  # than the host's own timeout
_checks: list[Callable[[], None]] = []


class Event(Protocol):
    """A point in a device's work, as torch.cuda.Event is."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""


class Accelerator:
    """A device of a kind without a class of its own: it counts as asynchronous, and its copies block.

    Args:
        device: such as cuda:0.

    Attributes:
        kind: such as "cuda".
        is_asynchronous: whether reading a value makes the host wait. See [Note: Asynchronous].
        is_host: whether its memory is the host's, and its kernels are those of the CPU.
        is_gpu: whether it has a generator of its own, and copies to pinned memory while the host continues.
        has_batch_norm_kernels: whether torch has the kernels of nn.SyncBatchNorm for it.
    """

    is_asynchronous = True
    is_host = False
    is_gpu = False
    has_batch_norm_kernels = False

    def __init__(self, device: torch.device) -> None:
        self.device, self.kind = device, device.type

    def __str__(self) -> str:
        """The device and its size, in words."""
        return str(self.device)

    def activate(self) -> None:
        """Make it this process's current device."""

    def uuid(self) -> str:
        """The device's UUID as nvidia-smi shows it, such as "GPU-3f1a..."; empty for a device without one."""
        return ""

    def identity(self) -> str:
        """What tells the device from those of other ranks, on any machine; empty where that does not matter."""
        return ""

    def process_group(self, identities: Sequence[str]) -> tuple[str, torch.device | None]:
        """The backends of a process group, and the device that `connect` binds it to; None without one.

        Args:
            identities: of the devices of all ranks, in rank order.
        """
        return "gloo", None

    def connect(self, group: Any, timeout: timedelta) -> None:
        """Connect this device's own backend of a process group, such as NCCL, after all other connections.

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
        """Restore what `random_state` returned."""

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
        return f"cpu: {torch.get_num_threads()} threads"

    def has_bfloat16(self) -> bool:
        """Whether the processor has instructions for it: AVX512-BF16 or AMX, or those of ARM."""
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


class Cuda(Accelerator):
    """A GPU that torch reaches by CUDA or ROCm."""

    is_gpu = True
    has_batch_norm_kernels = True

    def __str__(self) -> str:
        properties = torch.cuda.get_device_properties(self.device)
        return f"{self.device}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB"

    def activate(self) -> None:
        torch.cuda.init()  # otherwise the generators exist only after the first tensor on the device
        torch.cuda.set_device(self.device)

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
        """Connect NCCL at once, so that what it needs is known to be there.

        NCCL's watchdog ends a process at NCCL's own timeout, so that timeout is longer than the host's.
        """
        backend = group._get_backend(self.device)
        backend._set_default_timeout(timeout + _WATCHDOG_LATER)
        group.bound_device_id = self.device
        backend.eager_connect_single_device(self.device)

    def has_bfloat16(self) -> bool:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    def start_copy(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        host = self.empty_on_host(tensor)
        return host, self.start_copies([host], [tensor.detach()])

    def empty_on_host(self, like: torch.Tensor) -> torch.Tensor:
        """Pinned memory, to which a GPU copies while the host continues."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

    def start_copies(self, here: Sequence[torch.Tensor], there: Sequence[torch.Tensor]) -> Event:
        """Copy on the device's current stream, after the work launched there before."""
        torch._foreach_copy_(here, there, non_blocking=True)  # type: ignore[arg-type]
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def mark(self) -> torch.cuda.Event:
        """An event on the device's current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000

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
        """What is free, less what this process gave back since its peak: its next step will take that again."""
        given_back = torch.cuda.max_memory_reserved(self.device) - torch.cuda.memory_reserved(self.device)
        return float(torch.cuda.mem_get_info(self.device)[0] - given_back)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()


KINDS: dict[str, type[Accelerator]] = {"cpu": Cpu, "cuda": Cuda}


@cache
def accelerator_of(device: torch.device) -> Accelerator:
    """The accelerator of a device."""
    return KINDS.get(device.type, Accelerator)(device)


def is_asynchronous(tensor: torch.Tensor) -> bool:
    """Whether reading a value of this tensor makes the host wait. See [Note: Asynchronous]."""
    return accelerator_of(tensor.device).is_asynchronous


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host, or one that is there, on a device; the host does not wait for the copy."""
    there = accelerator_of(device)
    if there.is_host or tensor.device == device:
        return tensor
    return there.empty_on_host(tensor).copy_(tensor).to(device, non_blocking=True)


def gpu_count() -> int:
    """The number of GPUs that torch sees, without initializing CUDA."""
    return torch.cuda.device_count()


def all_gpus() -> list[Accelerator]:
    """Every GPU that torch sees, in the order of their indices. CUDA is initialized; no GPU gets a context."""
    if not torch.cuda.is_available():
        return []
    torch.cuda.init()
    return [accelerator_of(torch.device("cuda", number)) for number in range(gpu_count())]


def reaches(one: Accelerator, other: Accelerator) -> bool:
    """Whether a GPU reaches the memory of another one of its machine directly."""
    return bool(torch.cuda.can_device_access_peer(one.device, other.device))


def shares_a_gpu(identity: str, other: str) -> bool:
    """Whether two identities are certainly those of one GPU; slices of GPUs have one identity."""
    return identity == other and identity not in ("", _SLICE)


def check_in_waits(check: Callable[[], None]) -> Callable[[], None]:
    """Call `check` every half second in which the host waits for a device. It raises where the wait is in vain.

    Returns:
        What ends that.
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
