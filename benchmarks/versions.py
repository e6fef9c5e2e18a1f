"""A step of this checkout over the same step of another one, on 2 CPU ranks each, in turn.

    python -m benchmarks versions CHECKOUT [NETWORK ...]

Each checkout has ranks of its own, which wait for a line on their standard input while the other one's compute. Blocks
of steps are timed in the order A B B A, so that a drift of the machine's speed cancels. This checkout against itself
shows the noise.
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
_SERVE = """
import sys, tempfile, time
import torch.distributed as dist
import ddp_loop as dl
from benchmarks.steps import JOBS, make_data, our_step
job = JOBS[sys.argv[1]]
with tempfile.TemporaryDirectory() as folder, dl.join_world(seed=0) as world:
    step = our_step(job, world, make_data(job), folder if world.rank == 0 else sys.argv[2])
    for line in sys.stdin:
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
    """

    def __init__(self, folder: Path, network: str) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
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
            for rank in range(RANKS)
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
        self._scratch.cleanup()

    def seconds(self, steps: int) -> float:
        """Of one of `steps` steps, on the slowest rank."""
        for rank in self._ranks:
            if rank.stdin is not None:
                print(steps, file=rank.stdin, flush=True)
        return max(float(rank.stdout.readline()) for rank in self._ranks if rank.stdout is not None)


def compare(one: Path, other: Path, network: str, pairs: int, steps: int) -> Ratio:
    """Blocks of steps of one checkout over those of another."""
    ones: list[float] = []
    others: list[float] = []
    with Checkout(one, network) as first, Checkout(other, network) as second:
        for checkout in (first, second):
            checkout.seconds(steps)
            checkout.seconds(3 * steps)
        for number in range(pairs):
            for checkout, times in ((first, ones), (second, others))[:: 1 if number % 2 == 0 else -1]:
                times.append(checkout.seconds(steps))
                time.sleep(0.001)
    return Ratio.of(ones, others)


def report(parts: Iterable[str]) -> None:
    """Print the table: another checkout's folder, then networks, by default all."""
    folder, *names = parts
    head = "network | what | median | quartiles | ms | pairs"
    print_table(head, (row for name in names or NETWORKS for row in _rows(Path(folder).resolve(), name)), words=2)


def _rows(other: Path, network: str) -> Iterator[tuple[object, ...]]:
    pairs, steps = NETWORKS[network]
    yield network, "this checkout / the other one", *compare(HERE, other, network, pairs, steps).columns()
    yield network, "this checkout / itself", *compare(HERE, HERE, network, pairs // 2, steps).columns()
