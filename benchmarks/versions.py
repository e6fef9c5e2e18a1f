"""A step of this checkout over the same step of another one, on CPU ranks of each, in turn.

    python -m benchmarks versions CHECKOUT [--ranks N] [--exchange NAME] [NETWORK ...]

Each checkout has ranks of its own, which wait for a line on their standard input while the other one's compute. Blocks
of steps are timed in the order A B B A, so that a drift of the machine's speed cancels. The ranks are started anew
several times: where a process's memory lies makes its steps up to a tenth slower for as long as it lives. This checkout
against itself shows the noise.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.measuring import RANKS, Ratio, print_table

HERE = Path(__file__).parents[1]
NETWORKS = {"32-wide MLP": (400, 40), "digit network": (150, 2)}  # pairs of blocks, steps of each
STARTS = 5  # of the ranks
_SERVE = """
import sys, tempfile, time
import torch.distributed as dist
import ddp_loop as dl
from benchmarks.steps import JOBS, make_data, our_step
job = JOBS[sys.argv[1]]
with tempfile.TemporaryDirectory() as folder, dl.join_world(seed=0) as world:
    step = our_step(job, world, make_data(job), folder if world.rank == 0 else sys.argv[2])
    for line in sys.stdin:
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        for _ in range(int(line)):
            step()
        print((time.perf_counter() - began) / int(line), flush=True)
"""


class Checkout:
    """The ranks of one checkout, which make a network's steps when they are asked to.

    Args:
        folder: of the checkout.
        network: one of `benchmarks.steps.JOBS`.
        ranks: their number.
        exchange: of the ranks, where the checkout has a choice.
    """

    def __init__(self, folder: Path, network: str, ranks: int, exchange: str | None) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        if exchange is not None:
            common["DDP_LOOP_EXCHANGE"] = exchange
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _SERVE, network, self._scratch.name],
                cwd=folder,
                env={
                    **os.environ,
                    "PYTHONPATH": str(folder),
                    "OMP_NUM_THREADS": "1",
                    **{name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()},
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self._ranks:
            if rank.stdin is not None:
                rank.stdin.close()
        for rank in self._ranks:
            rank.wait(timeout=60)
            if rank.stdout is not None:
                rank.stdout.close()
        self._scratch.cleanup()

    def seconds(self, steps: int) -> float:
        """Of one of `steps` steps, on the slowest rank."""
        for rank in self._ranks:
            if rank.stdin is not None:
                print(steps, file=rank.stdin, flush=True)
        return max(float(rank.stdout.readline()) for rank in self._ranks if rank.stdout is not None)


def compare(
    one: Path, other: Path, network: str, pairs: int, steps: int, ranks: int = RANKS, exchange: str | None = None
) -> Ratio:
    """Blocks of steps of one checkout over those of another."""
    times: tuple[list[float], list[float]] = [], []
    for _ in range(STARTS):
        with Checkout(one, network, ranks, exchange) as first, Checkout(other, network, ranks, exchange) as second:
            for checkout in (first, second):
                checkout.seconds(steps)
                checkout.seconds(3 * steps)
            for number in range(pairs // STARTS):
                for checkout, found in list(zip((first, second), times, strict=True))[:: 1 if number % 2 == 0 else -1]:
                    found.append(checkout.seconds(steps))
                    time.sleep(0.001)
    return Ratio.of(*times)


def report(parts: Iterable[str], ranks: int = RANKS, exchange: str | None = None) -> None:
    """Print the table: another checkout's folder, then networks, by default all."""
    folder, *names = parts
    head = "network | what | median | quartiles | ms | pairs"
    other = Path(folder).resolve()
    print_table(head, (row for name in names or NETWORKS for row in _rows(other, name, ranks, exchange)), words=2)


def _rows(other: Path, network: str, ranks: int, exchange: str | None) -> Iterator[tuple[object, ...]]:
    pairs, steps = NETWORKS[network]
    for words, folder, share in (("the other one", other, 1), ("itself", HERE, 2)):
        ratio = compare(HERE, folder, network, pairs // share, steps, ranks, exchange)
        yield network, f"this checkout / {words}", *ratio.columns()
