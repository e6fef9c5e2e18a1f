"""What a step costs on clusters of GPUs, by published figures; their sources are in docs/benchmarks/scaling.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.measuring import ms, table_lines
from benchmarks.step_model import Compute, Cost, Sum, all_reduce_rounds, step_s

PER_MACHINE = 8
BUCKET = 8 * 2**20
WORD = 7  # values of the control word, before one for each tensor
GRADIENT_BYTES = 4
ROW_BYTES, SUM_BYTES = 3 * 4, 2 * 8  # of a channel: mean, the mean's rounding error, variance; or two sums in float64
NVLINK = 450e9  # bytes/s of an H100, in each direction
# NCCL's own cost model, protocol LL128: seconds of a start, and of a turn inside a machine and between machines.
RING_S, TREE_S = (10.0e-6, 1.9e-6, 4.0e-6), (4.4e-6, 1.2e-6, 8.5e-6)
TCP_S = 50e-6  # from one process to another through two kernels
REQUESTS_PER_S = 4.5  # of a rank to the store, as the part "counts" has counted
IN_MEMORY_S = 0.13e-3  # a sum of a few values in shared memory, docs/benchmarks/exchange.md


@dataclass(frozen=True)
class Fabric:
    """What is between machines.

    Attributes:
        bytes_per_s: of a machine, all adapters together, in each direction.
        is_tcp: whether messages go through the kernel.
    """

    name: str
    bytes_per_s: float
    is_tcp: bool


FABRICS = (
    Fabric("8 x InfiniBand 400", 8 * 400e9 / 8, is_tcp=False),
    Fabric("8 x InfiniBand 200", 8 * 200e9 / 8, is_tcp=False),
    Fabric("Ethernet 100", 100e9 / 8, is_tcp=True),
    Fabric("Ethernet 25", 25e9 / 8, is_tcp=True),
)


@dataclass(frozen=True)
class Network:
    """A network, with the seconds of a step on one GPU.

    Attributes:
        compute_s: of the device.
        launch_s: until the host has started all that the device computes.
    """

    name: str
    parameters: int
    tensors: int
    channels: int
    compute_s: float
    launch_s: float


NETWORKS = (
    Network("ResNet-50", 25_557_032, 161, 26_560, 256 / 2470, 30e-3),
    Network("transformer, 1.3 B", 1_300_000_000, 292, 0, 6 * 1.3e9 * 16 * 2048 / (0.41 * 989e12), 40e-3),
    Network("digit network", 123_090, 14, 60, 1e-3, 1e-3),
)
SIZES = (8, 64, 1024)


def nccl_s(size: float, gpus: int, fabric: Fabric) -> dict[str, float]:
    """Seconds of an all-reduce on the GPUs of machines of 8, by algorithm; as NCCL computes it to choose one."""
    machines = max(1, gpus // PER_MACHINE)
    inside = gpus // machines
    bus = NVLINK if machines == 1 else min(NVLINK, fabric.bytes_per_s)
    between = TCP_S if fabric.is_tcp else 0.0

    def seconds(constants: tuple[float, float, float], turns: int, between_turns: int, share: float) -> float:
        start, within, across = constants
        return start + turns * within + between_turns * max(across, between) + share * size / bus

    ring = seconds(RING_S, 2 * (gpus - machines), 2 * (machines - 1), 2 * (gpus - 1) / gpus)
    tree = seconds(TREE_S, 2 * (inside - 1), 2 * math.ceil(math.log2(machines)), 2 / 0.9)
    halves = 2 * (RING_S[0] + (inside - 1) * (RING_S[1] + size / inside / NVLINK))
    across = 2 * (machines - 1) * (max(RING_S[2], between) + size / machines / fabric.bytes_per_s)
    return {"ring": ring, "tree": tree, "hierarchical": halves + across if machines > 1 else ring}


def statistics_bytes(channels: int, shards: int) -> int:
    """What the statistics of batch norm add to a step's sum as a row of each shard."""
    return shards * channels * ROW_BYTES


def control_word_s(tensors: int, gpus: int) -> float:
    """Seconds of the control word's sum on the hosts: in memory, then over gloo between the machines."""
    machines = max(1, gpus // PER_MACHINE)
    rounds = all_reduce_rounds(4 * (WORD + tensors), machines) if machines > 1 else 0
    return IN_MEMORY_S * (2 if machines > 1 else 1) + rounds * TCP_S


def buckets_of(network: Network) -> int:
    """The number of its gradients' buckets."""
    return math.ceil(network.parameters * GRADIENT_BYTES / BUCKET)


def cluster_step_s(network: Network, gpus: int, fabric: Fabric, extra_bytes: float) -> float:
    """Seconds of a step on a cluster, with so many bytes in the last sum beside the gradients."""
    whole, number = network.parameters * GRADIENT_BYTES, buckets_of(network)
    sums = [Sum(whole / number, (k + 1) / number) for k in range(number)]
    sums[-1] = Sum(sums[-1].bytes + extra_bytes, 1.0)
    compute = Compute(network.compute_s / 3, network.compute_s * 2 / 3)
    return step_s(compute, sums, lambda size: Cost(0.0, min(nccl_s(size, gpus, fabric).values())))


def _places() -> Iterator[tuple[Network, int, Fabric]]:
    for network in NETWORKS:
        for gpus in SIZES:
            for fabric in FABRICS[: 1 if gpus == PER_MACHINE else None]:
                yield network, gpus, fabric


def _between(gpus: int, fabric: Fabric) -> str:
    return "NVLink" if gpus == PER_MACHINE else fabric.name


def gradients_table() -> Iterator[str]:
    """The sum of all gradients, in one collective."""

    def rows() -> Iterator[tuple[object, ...]]:
        for network, gpus, fabric in _places():
            ways = nccl_s(network.parameters * GRADIENT_BYTES, gpus, fabric)
            yield network.name, _between(gpus, fabric), f"{gpus:,}", *(ms(one) for one in ways.values())

    yield from table_lines(
        "network | between machines | GPUs | ring, ms | tree, ms | hierarchical, ms", rows(), words=2
    )


def steps_table() -> Iterator[str]:
    """Whole steps: with rows of statistics and a word that is waited for; and with sums and a word read a step late."""

    def rows() -> Iterator[tuple[object, ...]]:
        for network, gpus, fabric in _places():
            today, small = statistics_bytes(network.channels, gpus), network.channels * SUM_BYTES
            bare = cluster_step_s(network, gpus, fabric, 0)
            full, lean = (cluster_step_s(network, gpus, fabric, extra) for extra in (today, small))
            word = control_word_s(network.tensors, gpus)
            times = bare - network.compute_s, full - bare, word
            whole = max(full, network.launch_s + word), max(lean, network.launch_s, word)
            shares = [network.compute_s / one for one in whole]
            name = network.name, _between(gpus, fabric), f"{gpus:,}", f"{1e3 * network.compute_s:.4g}"
            yield *name, *map(ms, times), *(f"{100 * share:.0f} %" for share in shares)

    head = "network | between machines | GPUs | compute, ms | gradients not hidden, ms | statistics as rows, ms"
    yield from table_lines(f"{head} | control word, ms | efficiency | with both remedies", rows(), words=2)


def growth_table() -> Iterator[str]:
    """What grows with the number of GPUs beside the gradients, of ResNet-50."""
    resnet = NETWORKS[0]
    whole = resnet.parameters * GRADIENT_BYTES

    def rows() -> Iterator[tuple[object, ...]]:
        def row(what: str, of: Callable[[int], str]) -> tuple[str, ...]:
            return what, *map(of, SIZES)

        def payload(gpus: int) -> str:
            size = statistics_bytes(resnet.channels, gpus)
            return f"{size / 1e6:.3g} MB, {100 * size / whole:.3g} %"

        def word(gpus: int) -> str:
            machines = gpus // PER_MACHINE
            return f"{all_reduce_rounds(4 * (WORD + resnet.tensors), machines) if machines > 1 else 0:,}"

        yield row("statistics as a row of each shard, and of the gradients", payload)
        yield row("latencies in a row of the control word between machines", word)
        yield row("connections of a rank in the default gloo group", lambda gpus: f"{gpus - 1:,}")
        yield row("connections of a first rank of a machine beside them", lambda gpus: f"{2 * (gpus // 8 - 1):,}")
        yield row("values read from the store to join, all ranks", lambda gpus: f"{3 * gpus * gpus:,}")
        yield row("requests in a second to the store", lambda gpus: f"{REQUESTS_PER_S * gpus:,.0f}")
        yield row(
            "messages of a rank for gradients with fixed shards",
            lambda gpus: f"{buckets_of(resnet) * 2 * (gpus - 1):,}",
        )

    yield from table_lines(f"ResNet-50 | {' | '.join(f'{gpus:,} GPUs' for gpus in SIZES)}", rows())
