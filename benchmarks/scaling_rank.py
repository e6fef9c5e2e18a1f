"""What each rank of `scaling` runs: steps over a link whose delay and rate rank 0 sets, and what travels in them.

    python -m benchmarks.scaling_rank CONTROLS PART

Rank 0 prints the figures as JSON in its last line.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from benchmarks.measuring import Step, joined
from benchmarks.models import mlp
from benchmarks.step_model import all_reduce_rounds
from benchmarks.steps import Job, hits, make, make_data, steps_of
from benchmarks.switch import Controls
from ddp_loop import networks
from ddp_loop.distributed.gloo import open_sockets
from ddp_loop.distributed.torch_backend import TorchBackend
from ddp_loop.training.ordered_sum import tree_order

JOBS = {
    "32-wide MLP": Job(lambda: mlp(32, 2), (32,), 0, 0, 0.0),
    "digit network": Job(networks.digit_classifier, (1, 28, 28), 0, 0, 0.0),
    "4 M parameters": Job(lambda: mlp(1024, 4, 784), (784,), 0, 0, 0.0),
}
FIXED = "digit network, 8 fixed shards"
SHAPES = tuple((delay, rate) for rate in (1e8, 1e9, 1e10) for delay in (5e-5, 5e-4, 1e-3, 5e-3))
HOP_S = 0.02  # the delay by which rounds are counted
POINT_S, LEAST, MOST = 0.6, 3, 60  # seconds for a point, and its steps
EPOCH = 10  # steps
WARM_UP = 4  # steps: the layout is agreed upon, and TCP's windows open
OPERATIONS = ("start_sum", "start_exchange", "start_gather", "start_broadcast")


@dataclass(frozen=True)
class Ready:
    """A job of this rank: its next step, and its loop."""

    step: Step
    loop: dl.Loop


def prepared(name: str, world: dl.World, folder: str, warm_up: int = WARM_UP) -> Ready:
    """The job of this name, after its first steps. Every rank must call this."""
    job, shards = JOBS[name.partition(",")[0]], 8 if name == FIXED else None
    model, optimizer = make(job, world.device, fused=True)
    batches, state = dl.Batches(make_data(job), job.mini_batch, world, shards=shards), {"m": model, "o": optimizer}
    run = str(Path(folder, name))
    loop = dl.Loop(batches, 10**6, state=state, run_dir=run, save_every=10**9, progress=False)
    step = steps_of(loop, model, optimizer)
    for _ in range(warm_up):
        step()
    return Ready(step, loop)


def host() -> int:
    """The number of this rank's host, which torchrun gives."""
    return int(os.environ["GROUP_RANK"])


def of_rank_zero(number: float) -> float:
    """Rank 0's number, on every rank."""
    told = torch.tensor(number, dtype=torch.float64)
    dist.broadcast(told, 0)
    return float(told)


def shape(world: dl.World, controls: Controls, delay_s: float, bits_per_s: float) -> None:
    """Set the link while no rank sends. Every rank must call this."""
    dist.barrier()
    if world.rank == 0:
        controls.shape(delay_s, bits_per_s)
    dist.barrier()


def times(step: Step, number: int) -> list[float]:
    """Seconds of each of so many steps. Every rank must call this."""
    dist.barrier()
    marks = [time.perf_counter()]
    for _ in range(number):
        step()
        marks.append(time.perf_counter())
    return [end - begin for begin, end in pairwise(marks)]


def sums_of(loop: dl.Loop) -> list[tuple[int, float]]:
    """Of each sum of a step: its values, and the share of backward after which it begins, by parameters."""
    gradients = loop.fold.gradients
    total, found, ready = gradients.elements, [], 0
    for bucket in gradients.buckets:
        ready += bucket.length
        extras = len(bucket.memory.extras) if bucket is gradients.buckets[-1] else 0
        found.append((bucket.length + extras, ready / total))
    return found


# -- counts ------------------------------------------------------------------------------------------------


@contextmanager
def counted(made: list[str]) -> Iterator[None]:
    """List the operations that the backends of this process start."""
    usual = {name: getattr(TorchBackend, name) for name in OPERATIONS}

    def counting(name: str) -> Callable[..., Any]:
        def start(backend: TorchBackend, *arguments: Any) -> Any:
            made.append(name.removeprefix("start_"))
            return usual[name](backend, *arguments)

        return start

    for name in OPERATIONS:
        setattr(TorchBackend, name, counting(name))
    try:
        yield
    finally:
        for name, operation in usual.items():
            setattr(TorchBackend, name, operation)


def sent_in(steps: int, step: Step, controls: Controls) -> tuple[int, ...]:
    """What this host sends in so many steps and a barrier, as `Controls.sent` has it. Every rank must call this."""
    dist.barrier()
    before = controls.sent(host())
    for _ in range(steps):
        step()
    dist.barrier()
    return tuple(after - begin for after, begin in zip(controls.sent(host()), before, strict=True))


def operations_of(step: Step) -> tuple[list[str], int]:
    """What a usual step starts, and how many more operations an epoch of steps starts. Every rank must call this."""
    steps: list[tuple[str, ...]] = []
    for _ in range(EPOCH):
        made: list[str] = []
        with counted(made):
            step()
        steps.append(tuple(made))
    usual = Counter(steps).most_common(1)[0][0]
    return list(usual), sum(map(len, steps)) - EPOCH * len(usual)


def count(world: dl.World, controls: Controls, folder: str) -> dict[str, Any]:
    """Collectives, bytes and rounds of a step of each job. Every rank must call this."""
    found: dict[str, Any] = {}
    for name in (*JOBS, FIXED):
        first: list[str] = []
        with counted(first):
            job = prepared(name, world, folder, warm_up=1)
        operations_of(job.step)
        usual, more = operations_of(job.step)
        once, twice = (sent_in(number * EPOCH, job.step, controls)[0] for number in (1, 2))
        near = min(times(job.step, 6))
        shape(world, controls, HOP_S, 0)
        far = min(times(job.step, 6))
        shape(world, controls, 0, 0)
        gradients = job.loop.fold.gradients
        found[name] = {
            "operations": usual,
            "more": more,
            "first": len(first),
            "bytes": max(world.gather((twice - once) / EPOCH, "bytes")),
            "gradients": 4 * sum(bucket.length for bucket in gradients.buckets),
            "sums": [4 * size for size, _ in sums_of(job.loop)],
            "pieces": max(tree_order(8, controls.hosts, 0).pieces) if name == FIXED else 1,
            "rounds": (far - near) / HOP_S,
        }
    return found


def watch_store(world: dl.World, controls: Controls) -> dict[str, float]:
    """The requests that reach rank 0's store from another rank while nothing happens, in a second."""
    dist.barrier()
    before, began = controls.sent(host()), time.perf_counter()
    time.sleep(2.0)
    after, seconds = controls.sent(host()), time.perf_counter() - began
    told = world.gather(tuple((after[k] - before[k]) / seconds for k in (2, 3)), "requests")
    return {"bytes_per_s": told[-1][0], "requests_per_s": told[-1][1]}


# -- links -------------------------------------------------------------------------------------------------


def calibrate_link() -> tuple[float, float]:
    """One-way latency and bytes/s of gloo's all-reduce over the link as it is, between two ranks."""
    small, large = torch.zeros(2**10), torch.zeros(2**22)
    times(lambda: dist.all_reduce(small), 100)  # the first ones take several times as long
    latency = statistics.median(times(lambda: dist.all_reduce(small), 100)) / all_reduce_rounds(4 * len(small), 2)
    whole = statistics.median(times(lambda: dist.all_reduce(large), 8))
    left = whole - latency * all_reduce_rounds(4 * len(large), 2)
    return of_rank_zero(latency), of_rank_zero(4 * len(large) / left)


def calibrate_step(name: str, job: Ready, world: dl.World) -> dict[str, Any]:
    """What a step costs without the network: seconds of forward, of backward and of the rest; its sums."""
    network, data = JOBS[name], make_data(JOBS[name])
    model, _ = make(network, world.device)
    part = network.mini_batch // world.size
    inputs, labels = (tensor[:part] for tensor in data)
    forwards, backwards = [], []
    for _ in range(12):
        began = time.perf_counter()
        logits = model(inputs)
        loss = cross_entropy(logits, labels)
        hits(logits, labels)
        middle = time.perf_counter()
        loss.backward()
        forwards.append(middle - began)
        backwards.append(time.perf_counter() - middle)
    whole, waited = [], []
    dist.barrier()
    for _ in range(20):
        before, began = job.loop.fold.control.waited.seconds, time.perf_counter()
        job.step()
        whole.append(time.perf_counter() - began)
        waited.append(job.loop.fold.control.waited.seconds - before)
    own = statistics.median(a - b for a, b in zip(whole, waited, strict=True))
    forward, backward = statistics.median(forwards), statistics.median(backwards)
    return {
        "forward_s": of_rank_zero(forward),
        "backward_s": of_rank_zero(backward),
        "rest_s": of_rank_zero(max(0.0, own - forward - backward)),
        "unshaped_s": of_rank_zero(statistics.median(whole)),
        "sums": [[4 * size, ready] for size, ready in sums_of(job.loop)],
    }


def measure_links(world: dl.World, controls: Controls, folder: str) -> dict[str, Any]:
    """The steps of each job over each shape of the link. Every rank must call this."""
    found: dict[str, Any] = {"jobs": {}}
    links = [calibrate_link()]
    for name in JOBS:
        job = prepared(name, world, folder)
        figures = {**calibrate_step(name, job, world), "samples": JOBS[name].mini_batch, "points": []}
        for delay_s, bits_per_s in SHAPES:
            shape(world, controls, delay_s, bits_per_s)
            first = of_rank_zero(min(times(job.step, 2)))
            steps = int(min(MOST, max(LEAST, POINT_S / first)))
            lower, median, upper = statistics.quantiles(times(job.step, steps), n=4)
            figures["points"].append([delay_s, bits_per_s, median, lower, upper, steps])
        shape(world, controls, 0, 0)
        found["jobs"][name] = figures
        links.append(calibrate_link())
    latencies, rates = zip(*links, strict=True)
    found["link"] = {"latency_s": min(latencies), "bytes_per_s": max(rates)}  # others on the machine only slow it down
    found["links"] = links
    return found


def main() -> None:
    controls = Controls(Path(sys.argv[1]), int(os.environ["GROUP_WORLD_SIZE"]))
    before, began = len(open_sockets()), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, joined() as world:
        figures: dict[str, Any] = {"joining_s": time.perf_counter() - began, "exchange": world.exchange}
        figures["sockets"] = len(open_sockets()) - before
        if sys.argv[2] == "counts":
            figures |= {"jobs": count(world, controls, folder), "store": watch_store(world, controls)}
        else:
            figures |= measure_links(world, controls, folder)
        if world.rank == 0:
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
