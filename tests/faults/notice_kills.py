"""How soon is a killed rank noticed, and is anything left of it?   python -m tests.faults.notice_kills --times 200

Each time some ranks are forked from this process and train; after some steps one of them gets SIGKILL, at a random
moment. Every other rank must raise PeerFailed that names it, and leave its world with no more descriptors and threads
than it had before. At the end no process, no file in /dev/shm, no descriptor and no thread may be left of all of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.distributed.launcher import _environment
from ddp_loop.elastic import host_store
from tests.faults.launched import left_below
from tests.support.both_exchanges import add_exchange, use_exchange

LIMIT_S = 0.1  # of what is promised in memory
BEGUN = 5  # steps
PORT_BYTES = 2
_DELAY_S = 0.02  # at most, from the first steps to the kill
_SLOW_S = 0.001  # one rank in turn, so that the others wait for it


@dataclass
class Counts:
    """What was seen.

    Attributes:
        took: seconds from the kill to PeerFailed, of each rank that lived.
        places: where messages said that the killed rank was last seen.
        broken: what is not as it should be.
        forked: the process ids of all ranks.
    """

    took: list[float] = field(default_factory=list)
    places: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    forked: list[int] = field(default_factory=list)


def holdings() -> tuple[int, int]:
    """The numbers of descriptors and of threads of this process."""
    gc.collect()  # an exception's traceback may hold a world, and with it the connections to the store
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def train(world: dl.World, begun: int) -> None:
    """Steps without end; a byte goes to the pipe `begun` after some."""
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    for step in dl.Loop(dl.Batches(torch.ones(48, 4), 12, world), steps=10**7, state=state, progress=False):
        if step.iteration == BEGUN:
            os.write(begun, b"1")
        if step.iteration % world.size == world.rank:
            time.sleep(_SLOW_S)
        for rows in step:
            step.backward(model(rows).square().mean())
        step.fold()
        optimizer.step()


def seen_in(begun: int) -> dict[str, object]:
    """Train until a peer is killed; returns what was raised."""
    found: dict[str, object] = {}
    try:
        with dl.join_world(seed=1) as world:
            try:
                train(world, begun)
            except dl.PeerFailed as error:
                place = f"{error.stage} of step" if error.step else "nowhere"
                found = {"at": time.monotonic(), "rank": error.rank, "place": place, "text": str(error)}
                raise
    except dl.PeerFailed:
        pass
    return found


def on_this_rank(begun: int, seen: int) -> None:
    """Write what was seen to a pipe, and what this process holds more than before."""
    before = holdings()
    found = seen_in(begun)
    found["more"] = [now - then for now, then in zip(holdings(), before, strict=True)]
    os.write(seen, json.dumps({"own": int(os.environ["RANK"]), **found}).encode() + b"\n")


def fork_ranks(ranks: int, port: int, begun: int, seen: int) -> list[int]:
    """Start ranks that meet in the store at the port that they read from the pipe `port`; returns their process ids.

    The store is hosted after them: a process that forks while a thread of it serves others leaves its child the locks
    that this thread holds, for ever.
    """
    processes = []
    for rank in range(ranks):
        if (process := os.fork()) == 0:
            code = 1
            try:
                os.environ.update(_environment(rank, ranks, int.from_bytes(os.read(port, PORT_BYTES))))
                on_this_rank(begun, seen)
                code = 0
            finally:
                os._exit(code)
        processes.append(process)
    return processes


def kill_once(ranks: int, chance: random.Random, counts: Counts) -> None:
    """Start ranks, kill one of them, and look at what the others raise."""
    (begun, begun_end), (seen, seen_end) = os.pipe(), os.pipe()
    port, port_end = os.pipe()
    processes = fork_ranks(ranks, port, begun_end, seen_end)
    counts.forked += processes
    store = host_store()
    os.write(port_end, store.port.to_bytes(PORT_BYTES) * ranks)
    for _ in processes:
        os.read(begun, 1)
    victim = chance.randrange(ranks)
    time.sleep(chance.uniform(0, _DELAY_S))
    killed = time.monotonic()
    os.kill(processes[victim], signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    expected = [-signal.SIGKILL if rank == victim else 0 for rank in range(ranks)]
    if codes != expected:
        counts.broken.append(f"exit codes {codes}; rank {victim} was killed")
    os.close(seen_end)
    with os.fdopen(seen) as file:
        for line in file:
            judge(json.loads(line), victim, killed, counts)
    for end in (begun, begun_end, port, port_end):
        os.close(end)


def judge(found: dict[str, object], victim: int, killed: float, counts: Counts) -> None:
    """Hold what a rank saw against what it must be."""
    own, at = found["own"], found.get("at")
    if not isinstance(at, float) or found["rank"] != victim:
        counts.broken.append(f"rank {own}, where rank {victim} was killed: {found}")
        return
    counts.took.append(at - killed)
    counts.places[str(found["place"])] += 1
    if any(number > 0 for number in found["more"]):  # type: ignore[attr-defined]
        counts.broken.append(f"rank {own} has more descriptors and threads than before: {found['more']}")


def shared_files(processes: list[int]) -> list[str]:
    """The shared memory of torch that these processes left; other programs may have left some too."""
    return [
        name for name in sorted(os.listdir("/dev/shm")) if name.startswith(tuple(f"torch_{one}_" for one in processes))
    ]


def campaign(times: int, ranks: int, seed: int) -> Counts:
    """Kill `times` ranks."""
    counts, chance = Counts(), random.Random(seed)
    kill_once(ranks, chance, counts)  # torch's first imports and open files
    counts = Counts()
    before = holdings()
    for _ in range(times):
        kill_once(ranks, chance, counts)
    if holdings() != before:
        counts.broken.append(f"descriptors and threads were {before}, are {holdings()}")
    if new := shared_files(counts.forked):
        counts.broken.append(f"left in /dev/shm: {new}")
    if left := left_below((os.getpid(),)):
        counts.broken.append(f"processes left: {left}")
    return counts


def main() -> int:
    """Print the report; 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description="how soon a killed rank is noticed")
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    add_exchange(parser)
    said = parser.parse_args()
    use_exchange(said)
    torch.set_num_threads(1)
    torch.optim.SGD([nn.Parameter(torch.ones(()))])  # the first one imports torch._dynamo, for 3 s
    began = time.monotonic()
    counts = campaign(said.times, said.ranks, said.seed)
    took = sorted(counts.took)
    print(f"`python -m tests.faults.notice_kills {' '.join(sys.argv[1:])}`, {time.strftime('%Y-%m-%d')}, "
          f"torch {torch.__version__}, {os.cpu_count()} cores, {time.monotonic() - began:.0f} s\n")  # fmt: skip
    if took:
        print(f"{said.times} kills, {len(took)} ranks raised PeerFailed that names the killed one, after "
              f"{1e3 * statistics.median(took):.1f} ms (median), {1e3 * took[-1]:.1f} ms (most); within {LIMIT_S:g} s: "
              f"{sum(one <= LIMIT_S for one in took)}.")  # fmt: skip
    for place, times in counts.places.most_common():
        print(f"* last seen in {place}: {times}")
    for line in counts.broken:
        print(f"* broken: {line}")
    return int(bool(counts.broken) or len(took) != said.times * (said.ranks - 1))


if __name__ == "__main__":
    sys.exit(main())
