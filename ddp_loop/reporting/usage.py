"""What a rank uses of its machine, every 5 s: processor, memory, GPU. In the run folder: usage/rank-R.jsonl."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch

from ddp_loop.accelerators import accelerator_of
from ddp_loop.checkpoint import RUN, USAGE
from ddp_loop.reporting.jsonl import JsonlWriter

EVERY_S = 5.0
_LEAST_S = 1.0  # between the last line but one and the one at the end
_MIB = 2**20
_PROCESSES = Path("/proc")  # of Linux; elsewhere children count only when they have ended


def _descendants(process: str) -> Iterator[str]:
    """The processes below a process that live."""
    for children in _PROCESSES.glob(f"{process}/task/*/children"):
        with suppress(OSError):  # the thread has ended since
            for child in children.read_text().split():
                yield child
                yield from _descendants(child)


def processor_s() -> float:
    """Return the processor time of this process and all below it, in seconds; those that ended count too."""
    own = os.times()
    ticks = 0
    for process in _descendants("self"):
        with suppress(OSError, ValueError, IndexError):  # it has ended since
            fields = (_PROCESSES / process / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # its own, and its ended children's
    return sum(own[:4]) + ticks / os.sysconf("SC_CLK_TCK")


def gpu_percent(device: torch.device) -> float | None:
    """How much of the last moment a GPU was busy; None without one, or if nothing can be asked (nvidia-ml-py)."""
    if accelerator_of(device).is_host:
        return None
    try:
        return float(torch.get_device_module(device).utilization(device))
    except Exception:  # the library is missing, or refuses
        return None


def memory_mib(device: torch.device) -> float:
    """Return the memory of this process: on a GPU what torch has reserved, else the resident set."""
    return round(accelerator_of(device).memory_held() / _MIB, 1)


class UsageLog:
    """A thread that writes what this process uses, until `close`.

    Its file loses lines rather than to hold up training. The thread holds no lock that a forked process could need.

    Args:
        folder: of the run; a machine that does not have it gets no file.
        rank: of this process.
        device: of this rank.
        iteration: returns the step that the loop is in.
        began: when the run began, on the monotonic clock, less the time of earlier processes.
        warn: shows the user a line.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        device: torch.device,
        iteration: Callable[[], int],
        began: float,
        warn: Callable[[str], None],
    ) -> None:
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if not (folder / RUN).is_file():
            return
        try:
            (folder / USAGE).mkdir(exist_ok=True)
            file = JsonlWriter(folder / USAGE / f"rank-{rank}.jsonl", iteration(), warn, "drop")
        except OSError as error:
            warn(f"{error} The usage of rank {rank} is not recorded; training continues.")
            return
        watched = (file, device, iteration, began)
        self._thread = threading.Thread(target=self._watch, args=watched, name="ddp_loop usage", daemon=True)
        self._thread.start()

    def _watch(self, file: JsonlWriter, device: torch.device, iteration: Callable[[], int], began: float) -> None:
        """Write a line now and then, and one at the end."""
        last_s = time.monotonic()
        last_processor_s = processor_s()
        lines = 0
        has_ended = False
        while not has_ended:
            has_ended = self._ended.wait(EVERY_S)
            now = time.monotonic()
            if has_ended and lines and now - last_s < _LEAST_S:
                break
            used = processor_s()
            spent = max(used - last_processor_s, 0.0)
            gone = max(now - last_s, 1e-3)
            last_s = now
            last_processor_s = used
            line = {
                "time": round(time.time(), 3),
                "elapsed_s": round(now - began, 3),
                "iteration": iteration(),
                "processor_percent": round(100 * spent / gone, 1),
                "memory_mib": memory_mib(torch.device("cpu")),
                "gpu_percent": gpu_percent(device),
                "gpu_memory_mib": None if accelerator_of(device).is_host else memory_mib(device),
            }
            lines += 1
            file.add(json.dumps(line) + "\n")
            file.flush()
        file.close()

    def close(self) -> None:
        """End the thread, after a last line."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
