"""Sums over the ranks of one machine, by each exchange that `join_world` has; and the memory of a rank.

    python -m benchmarks exchange [--ranks N] [--exchange NAME] [PART ...]

"sums": `world.start_sum` and `finish` over `dist.all_reduce` on the default group, which is gloo's, on the same ranks.

"memory": a rank's memory with networks of 25 and of 100 million parameters and SGD with momentum: when it has joined,
after three steps, and the peak from one to the other; the latter two also in bytes for each parameter, less the first.
It is the PSS, to which a page that several processes map adds its share, so the ranks' values add up; without mapped
files, because the share of a library's pages depends on who else runs. Each run starts new processes. The table has
means over the ranks. It needs Linux.

The cost of the tree's order is in `python -m benchmarks order fold`, which takes `--exchange` too.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

import ddp_loop as dl
from benchmarks.measuring import RANKS, Ratio, compare, exchanges, joined, print_table
from benchmarks.models import mlp
from benchmarks.steps import JOBS, Job, ddp_step, make_data, our_step

# -- sums --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """The number of float32 values of a sum, the pairs of blocks to measure, and the sums of a block."""

    values: int
    pairs: int
    sums: int


SIZES = {
    "0.2 KiB": Size(51, 200, 50),
    "12 KiB": Size(3 * 2**10, 200, 50),
    "0.5 MiB": Size(2**17, 100, 20),
    "4 MiB": Size(2**20, 100, 5),
    "98 MiB": Size(98 * 2**18, 30, 1),
}
SUM_RANKS = (2, 3, 4)
SUM_S = 5.0  # for a row


def measure_sums(exchange: str) -> dict[str, Ratio]:
    """Sums of each size over those on the default group, on every rank; run by `launch`."""
    with joined(exchange) as world:
        ratios = {}
        for name, size in SIZES.items():
            ours, plain = torch.zeros(size.values), torch.zeros(size.values)
            ratios[name] = compare(
                lambda ours=ours: world.finish(world.start_sum(ours)),  # type: ignore[misc]
                lambda plain=plain: dist.all_reduce(plain),  # type: ignore[misc]
                pairs=size.pairs,
                steps=size.sums,
                within_s=SUM_S,
            )
        return ratios


def report_sums(ranks: int | None, exchange: str | None) -> None:
    rows = (
        (f"{number} ranks, {name}", size, *ratio.columns())
        for number in (SUM_RANKS if ranks is None else (ranks,))
        for name in (exchanges() if exchange is None else (exchange,))
        for size, ratio in dl.launch(measure_sums, number, name)[0].items()
    )
    print_table("exchange / gloo's all-reduce | size | median | quartiles | ms | pairs", rows, words=2)


# -- memory ------------------------------------------------------------------------------------------------

NETWORKS = {
    "25 M parameters": JOBS["25 M parameters"],
    "100 M parameters": Job(lambda: mlp(5700, 4, 512), (512,), 1, 1, 1.0),
}
STEPS = 3
RUNS = 3
LOOK_S = 0.002


def pss_mib() -> float:
    """MiB of this process without mapped files; of a page that others map too, its share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) / 2**10


class PeakMemory:
    """The highest `pss_mib` inside a `with`, as a thread sees it every 2 ms."""

    def __init__(self) -> None:
        self.mib = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self.mib = max(self.mib, pss_mib())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self.mib = max(self.mib, pss_mib())


def together() -> float:
    """`pss_mib` while all ranks are here with all that they map, without what the collector would free later."""
    gc.collect()
    dist.barrier()
    mib = pss_mib()
    dist.barrier()
    return mib


def measure_memory(network: str, exchange: str | None) -> tuple[float, float, float]:
    """MiB of this rank once it has joined, after STEPS steps, and at most in them; run by `launch`.

    Args:
        network: one of NETWORKS.
        exchange: of our step; None measures tuned DDP's.
    """
    job = NETWORKS[network]
    with tempfile.TemporaryDirectory() as folder, joined(exchange or "gloo") as world:
        data = make_data(job)
        before = together()
        with PeakMemory() as peak:
            if exchange is None:
                step = ddp_step(job, world, data, tuned=True, fused=True)
            else:
                step = our_step(job, world, data, folder, fused=True)
            for _ in range(STEPS):
                step()
        return before, together(), peak.mib


def report_memory(ranks: int | None, exchange: str | None) -> None:
    ways = {f"ours, {name}": name for name in (exchanges() if exchange is None else (exchange,))}
    values = ("joined", f"after {STEPS} steps", "peak", "bytes for each parameter", "peak bytes for each parameter")
    head = " | ".join(f"{value}: median | min to max" for value in values)
    rows = (
        _memory_row(network, way, name, ranks or RANKS)
        for network in NETWORKS
        for way, name in {**ways, "tuned DDP": None}.items()
    )
    print_table(f"MiB per rank, network | way | {head}", rows, words=2)


def _memory_row(network: str, way: str, exchange: str | None, ranks: int) -> Iterator[str]:
    runs = [dl.launch(measure_memory, ranks, network, exchange) for _ in range(RUNS)]
    means = [[statistics.mean(values) for values in zip(*run, strict=True)] for run in runs]
    parameters = sum(parameter.numel() for parameter in NETWORKS[network].build().parameters())
    means = [[*mib, *((each - mib[0]) * 2**20 / parameters for each in mib[1:])] for mib in means]
    yield network
    yield way
    for number, values in enumerate(zip(*means, strict=True)):
        digits = 0 if number < 3 else 2
        yield f"{statistics.median(values):.{digits}f}"
        yield f"{min(values):.{digits}f} to {max(values):.{digits}f}"


# -- the report --------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[int | None, str | None], None]] = {"sums": report_sums, "memory": report_memory}


def report(parts: Iterable[str], ranks: int | None = None, exchange: str | None = None) -> None:
    """Print the tables of these parts, by default of all."""
    for part in list(parts) or PARTS:
        PARTS[part](ranks, exchange)
