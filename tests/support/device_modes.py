"""The two ways in which a device answers, both on the CPU: at once, and late as a GPU does.

A test, or a file by its `pytestmark`, marked `both_modes` runs in each; the fixture `device_mode` says in which. Marked
`one_mode(mode, reason)` it runs in that one alone, whatever its file says.

[Note: The simulation] In the mode "asynchronous" the CPU says that it is asynchronous, so the package takes the paths
of a GPU. A copy to the host holds 0xFF in every byte, which is NaN and -1, until two more copies were started, or
somebody waits for it, by `synchronize` or a hundred looks. It brings what the tensor held when the copy was started, as
on a GPU's stream. In `host_reads` each `.item()` counts but those of such copies. A mark has no value but to `seconds`.
Unless the environment says otherwise, its ranks exchange values over gloo, so what runs in both modes runs over both
exchanges.

[Note: Beside the fake GPU] `tests.fake_cuda` shows more of a GPU: waits by copies, the order of streams, NCCL, memory
of its own. New tests of GPU paths run there, on `on_fake_gpus`. This simulation remains for 67 test files whose tasks
have their networks and data on the CPU in both modes, two thirds of them without a word of the world's device. On a
fake GPU each of these would move its tensors, and would be skipped where there is no compiler. It also runs where a
test looks into the process that pytest runs in, which has no fake GPU.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ddp_loop.accelerators import KINDS, Accelerator, Cpu, accelerator_of
from ddp_loop.distributed import sharing_gpus
from tests.support.both_exchanges import EXCHANGE, GLOO, MEMORY, exchange_of
from tests.support.harness import Result, run_cleanly

SYNCHRONOUS, ASYNCHRONOUS = MODES = ("synchronous", "asynchronous")
_LAG = 2  # so many copies that were started later complete one
_LOOKS = 100


class SlowCopy:
    """Copies on their way: an event."""

    under_way: ClassVar[deque[SlowCopy]] = deque()
    on_host: ClassVar[Any] = WeakIdKeyDictionary()  # the copies, which a GPU's host has in its own memory

    def __init__(self, here: Sequence[torch.Tensor], there: Sequence[torch.Tensor]) -> None:
        self.on_host.update(dict.fromkeys(here))
        self._here, self._values, self._looks = here, [one.detach().clone() for one in there], 0
        for one in here:
            one.reshape(-1).view(torch.uint8).fill_(0xFF)
        self.under_way.append(self)
        while len(self.under_way) > _LAG:
            self.under_way.popleft()._arrive()

    def _arrive(self) -> None:
        with torch.no_grad():
            for one, value in zip(self._here, self._values, strict=True):
                one.copy_(value)

    def query(self) -> bool:
        self._looks += 1
        if self._looks == _LOOKS:
            self.synchronize()
        return self not in self.under_way

    def synchronize(self) -> None:
        while self in self.under_way:  # a stream's copies complete in order
            self.under_way.popleft()._arrive()


class Mark:
    """A point in the device's work."""

    def __init__(self) -> None:
        self.at = time.perf_counter()


class HostReads(TorchDispatchMode):
    """Notes the file and the line of each read of a value."""

    def __init__(self, note: Callable[[str, int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and not self._is_on_host(*arguments):
            frame = sys._getframe(1)
            while frame.f_back is not None and "/torch/" in frame.f_code.co_filename:
                frame = frame.f_back
            self._note(frame.f_code.co_filename, frame.f_lineno)
        return function(*arguments, **(keywords or {}))

    @staticmethod
    def _is_on_host(value: torch.Tensor) -> bool:
        return (value if value._base is None else value._base) in SlowCopy.on_host


class AsynchronousCpu(Cpu):
    """A CPU that answers as a GPU does."""

    is_asynchronous = True

    def start_copy(self, tensor: torch.Tensor) -> tuple[torch.Tensor, SlowCopy]:
        host = self.empty_on_host(tensor)
        return host, SlowCopy([host], [tensor])

    def start_copies(self, here: Sequence[torch.Tensor], there: Sequence[torch.Tensor]) -> SlowCopy:
        return SlowCopy(here, there)

    def mark(self) -> Mark:
        return Mark()

    def seconds(self, first: Mark, last: Mark) -> float:
        return last.at - first.at

    @contextmanager
    def host_reads(self, note: Callable[[str, int], None]) -> Iterator[None]:
        with HostReads(note):
            yield


def modes_of(test: pytest.Item) -> tuple[str, ...]:
    """The modes that a test is to run in."""
    if (alone := test.get_closest_marker("one_mode")) is not None:
        mode, _ = alone.args
        return (mode,)
    return MODES if test.get_closest_marker("both_modes") else (SYNCHRONOUS,)


def ways_of(test: pytest.Item) -> dict[str, list[Any]]:
    """The values of the fixtures `device_mode` and `exchange` for which a test is to run, those of a case in one place.

    In the asynchronous mode it runs over gloo alone.
    """
    modes = modes_of(test)
    if test.get_closest_marker("both_exchanges"):
        ways = [(mode, name) for mode in modes for name in (MEMORY, GLOO) if mode == SYNCHRONOUS or name == GLOO]
        return {"device_mode,exchange": ways}
    return {} if modes == (SYNCHRONOUS,) else {"device_mode": list(modes)}


@contextmanager
def cpu_as(kind: type[Accelerator]) -> Iterator[None]:
    """Have this process's CPU be such an accelerator."""
    former, KINDS["cpu"] = KINDS["cpu"], kind
    accelerator_of.cache_clear()
    try:
        yield
    finally:
        KINDS["cpu"] = former
        accelerator_of.cache_clear()
        SlowCopy.under_way.clear()


@contextmanager
def device_mode_of(mode: str) -> Iterator[None]:
    """Have this process's CPU answer so."""
    needs_gloo = mode == ASYNCHRONOUS and EXCHANGE not in os.environ
    with (
        cpu_as(AsynchronousCpu if mode == ASYNCHRONOUS else Cpu),
        exchange_of(GLOO) if needs_gloo else nullcontext(),
    ):
        yield


def current_mode() -> str:
    """How this process's CPU answers."""
    return ASYNCHRONOUS if KINDS["cpu"] is AsynchronousCpu else SYNCHRONOUS


def run_in_mode(mode: str, function: Callable[..., Result], *arguments: Any, **keywords: Any) -> Result:
    """Run a task on a rank whose CPU answers so. Ranks may share the GPUs of this machine, if there are any."""
    with device_mode_of(mode), sharing_gpus():
        return run_cleanly(function, *arguments, **keywords)
