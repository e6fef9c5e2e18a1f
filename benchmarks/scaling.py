"""What a step costs on several machines: counted, measured on a network of this machine's own, and computed.

    python -m benchmarks scaling [PART ...]

"counts": collectives, bytes and rounds of a step, by torchrun's ranks on 2, 3, 4 and 8 hosts. "links": the time of a
step on two hosts over links of several delays and rates, beside what the model below expects. "clusters": the model
for 8, 64 and 1,024 GPUs, which measures nothing.

A host is a network namespace; packets go through `benchmarks.switch`. Both need root and Linux. What is measured goes
into docs/benchmarks/scaling.json, and all tables into docs/scaling.md, between their marks.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.hosts import PORT, NoHosts, run_all, switched, torchrun

# -- the model ---------------------------------------------------------------------------------------------

SEGMENT = 2**20  # bytes that gloo sends at once, at most
GLOO_THREADS = 2  # of a group in torch, each with one sum


@dataclass(frozen=True)
class Link:
    """Between two ranks.

    Attributes:
        latency_s: from a message's start on one side until the other side has it, without its bytes.
        bytes_per_s: of each rank, in each direction.
    """

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Compute:
    """Seconds of a step without the network: until backward, of backward, and after all sums."""

    forward_s: float
    backward_s: float
    rest_s: float = 0.0


@dataclass(frozen=True)
class Sum:
    """A sum of a step: its bytes, and the share of backward after which it begins."""

    bytes: float
    ready: float


def all_reduce_rounds(size: float, ranks: int) -> int:
    """Latencies in a row of gloo's all-reduce of `size` bytes: 4 (N - 1) up to 2 MiB per rank.

    A ring has 2 (N - 1) turns. In each a rank sends a chunk, in two segments or more. Two are under way at a time, and
    take two latencies: the receiver announces its buffer, then the sender sends.
    """
    pairs = math.ceil(max(2, math.ceil(size / ranks / SEGMENT)) / 2)
    return 2 * (ranks - 1) * 2 * pairs


@dataclass(frozen=True)
class Cost:
    """Seconds of a sum: in which nothing is on the wire, and of its bytes there."""

    latency_s: float
    bytes_s: float


def all_reduce_cost(size: float, ranks: int, link: Link) -> Cost:
    """What gloo's all-reduce takes: its rounds, and the bytes that each rank sends, 2 (N - 1) / N of them."""
    return Cost(all_reduce_rounds(size, ranks) * link.latency_s, 2 * (ranks - 1) / ranks * size / link.bytes_per_s)


def step_s(compute: Compute, sums: Sequence[Sum], cost: Callable[[float], Cost], at_once: int = 1) -> float:
    """Seconds of a step whose sums run in their order, while backward still computes.

    step = max(forward + backward, end of the last sum) + rest. A sum begins when it is ready, at forward + ready *
    backward, and one of the `at_once` places is free. Its bytes follow those of the sums before it, and its latencies
    follow its bytes.

    Args:
        compute, sums: of the step.
        cost: of a sum of so many bytes.
        at_once: the sums that can be under way: 1 on a stream of NCCL, 2 in gloo's two threads.
    """
    wire, ends = 0.0, [0.0] * at_once
    for one in sums:
        begins = max(compute.forward_s + one.ready * compute.backward_s, min(ends))
        its = cost(one.bytes)
        wire = max(begins, wire) + its.bytes_s
        ends[ends.index(min(ends))] = wire + its.latency_s
    return max(compute.forward_s + compute.backward_s, *ends) + compute.rest_s


# -- clusters ----------------------------------------------------------------------------------------------

PER_MACHINE = 8
BUCKET = 8 * 2**20
WORD = 7  # values of the control word, before one for each tensor
GRADIENT_BYTES = 4
ROW_BYTES, SUM_BYTES = 3 * 4, 2 * 8  # of a channel: mean, the mean's rounding error, variance; or two sums in float64
NVLINK = 450e9  # bytes/s of an H100, in each direction
# NCCL's own cost model, protocol LL128: seconds of a start, and of a turn inside a machine and between machines.
RING_S, TREE_S = (10.0e-6, 1.9e-6, 4.0e-6), (4.4e-6, 1.2e-6, 8.5e-6)
TCP_S = 50e-6  # from one process to another through two kernels
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


def cluster_step_s(network: Network, gpus: int, fabric: Fabric, extra_bytes: float) -> float:
    """Seconds of a step on a cluster, with so many bytes in the last sum beside the gradients."""
    whole = network.parameters * GRADIENT_BYTES
    number = max(1, round(whole / BUCKET))
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
            yield network.name, _between(gpus, fabric), f"{gpus:,}", *(f"{1e3 * one:.3g}" for one in ways.values())

    yield from table("network | between machines | GPUs | ring, ms | tree, ms | hierarchical, ms", rows(), words=2)


def steps_table() -> Iterator[str]:
    """Whole steps: with rows of statistics and a word that is waited for; and with sums and a word read a step late."""

    def rows() -> Iterator[tuple[object, ...]]:
        for network, gpus, fabric in _places():
            today, small = statistics_bytes(network.channels, gpus), network.channels * SUM_BYTES
            bare = cluster_step_s(network, gpus, fabric, 0)
            full, lean = (cluster_step_s(network, gpus, fabric, extra) for extra in (today, small))
            word = control_word_s(network.tensors, gpus)
            times = [1e3 * (bare - network.compute_s), 1e3 * (full - bare), 1e3 * word]
            whole = max(full, network.launch_s + word), max(lean, network.launch_s, word)
            shares = [network.compute_s / one for one in whole]
            name = network.name, _between(gpus, fabric), f"{gpus:,}", f"{1e3 * network.compute_s:.4g}"
            yield *name, *(f"{one:.3g}" for one in times), *(f"{100 * share:.0f} %" for share in shares)

    head = (
        "network | between machines | GPUs | compute, ms | gradients not hidden, ms | statistics, ms | control word, ms"
    )
    yield from table(f"{head} | efficiency | with both remedies", rows(), words=2)


def growth_table() -> Iterator[str]:
    """What grows with the number of GPUs beside the gradients, of ResNet-50."""
    resnet = NETWORKS[0]
    whole = resnet.parameters * GRADIENT_BYTES
    requests = stored()["counts"]["8"]["store"]["requests_per_s"]

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
        yield row("requests in a second to the store", lambda gpus: f"{requests * gpus:,.0f}")
        yield row("messages of a rank for gradients with fixed shards", lambda gpus: f"{13 * 2 * (gpus - 1):,}")

    yield from table(f"ResNet-50 | {' | '.join(f'{gpus:,} GPUs' for gpus in SIZES)}", rows())


# -- what is measured --------------------------------------------------------------------------------------

ROOT = Path(__file__).parent.parent
FIGURES, DOCUMENT = ROOT / "docs/benchmarks/scaling.json", ROOT / "docs/scaling.md"
HOSTS = (2, 3, 4, 8)
LIMIT_S = 120.0  # for the ranks of all hosts


def measured(part: str, hosts: int) -> dict[str, Any]:
    """What the ranks of so many hosts print. Raises as `switched` and `run_all`."""
    with switched(hosts) as (names, controls_path, controls):
        controls.count_apart(PORT)
        printed = run_all(torchrun(names, "-m", "benchmarks.scaling_rank", str(controls_path), part), LIMIT_S)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def stored() -> dict[str, Any]:
    """The figures of the last measurement."""
    found: dict[str, Any] = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    return found


def store(part: Mapping[str, Any]) -> None:
    """Replace the figures of a part."""
    FIGURES.write_text(json.dumps({**stored(), **part}, indent=1) + "\n")


def counts_table() -> Iterator[str]:
    """Collectives, bytes and rounds of a step, by hosts."""

    def rows() -> Iterator[tuple[object, ...]]:
        for hosts, figures in stored()["counts"].items():
            for name, one in figures["jobs"].items():
                ranks = int(hosts)
                expected = (1 + one["pieces"]) * (ranks - 1) / ranks * sum(one["sums"])
                is_gathered = "exchange" in one["operations"]
                turns = [2 * ranks if is_gathered else all_reduce_rounds(size, ranks) for size in one["sums"]]
                in_a_row = step_s(Compute(0, 0), [Sum(n, 1) for n in turns], lambda n: Cost(n, 0), GLOO_THREADS)
                made = ", ".join(f"{one['operations'].count(kind)} {kind}" for kind in dict.fromkeys(one["operations"]))
                sent = f"{one['bytes']:,.0f}", f"{expected:,.0f}", f"{one['bytes'] / expected:.3f}"
                yield name, made, hosts, f"{one['gradients']:,}", *sent, f"{one['rounds']:.1f}", in_a_row

    head = "network | collectives of a step | hosts | gradients, bytes | sent by a rank, bytes | expected | ratio"
    yield from table(f"{head} | latencies in a row | expected", rows(), words=2)


def starting_table() -> Iterator[str]:
    """What joining and the first step take, and the store's traffic."""

    def rows() -> Iterator[tuple[object, ...]]:
        for hosts, figures in stored()["counts"].items():
            jobs = figures["jobs"]["digit network"]
            store = figures["store"]
            at_rest = f"{store['requests_per_s']:.1f}", f"{store['bytes_per_s']:.0f}"
            yield hosts, figures["sockets"], f"{1e3 * figures['joining_s']:.0f}", jobs["first"], jobs["more"], *at_rest

    head = "hosts | sockets of a rank | joining, ms | operations until the first step has ended | more in an epoch"
    yield from table(f"{head} | requests to the store in a second, each rank | bytes", rows(), words=0)


def predicted_s(job: Mapping[str, Any], link: Link) -> float:
    """The model's seconds of a step of a measured job on two hosts."""
    compute = Compute(job["forward_s"], job["backward_s"], job["rest_s"])
    sums = [Sum(size, ready) for size, ready in job["sums"]]
    return step_s(compute, sums, lambda size: all_reduce_cost(size, 2, link), GLOO_THREADS)


def links_table() -> Iterator[str]:
    """Steps on two hosts over each link, beside the model."""
    figures = stored()["links"]
    own = Link(**figures["link"])

    def rows() -> Iterator[tuple[object, ...]]:
        for name, job in figures["jobs"].items():
            for delay_s, bits_per_s, median, lower, upper, steps in job["points"]:
                link = Link(own.latency_s + delay_s, min(own.bytes_per_s, bits_per_s / 8))
                expected = predicted_s(job, link)
                link_words = f"{1e3 * delay_s:g}", f"{bits_per_s / 1e9:g}"
                times = f"{1e3 * median:.4g}", f"{1e3 * lower:.4g} to {1e3 * upper:.4g}", f"{1e3 * expected:.4g}"
                rate = f"{job['samples'] / median:,.0f}", f"{job['samples'] / expected:,.0f}"
                yield name, *link_words, *times, f"{100 * (expected / median - 1):+.0f} %", *rate, steps

    head = "network | delay, ms | Gbit/s | step, ms | quartiles | model, ms | error | samples/s | model | steps"
    yield from table(head, rows())


def own_table() -> Iterator[str]:
    """What the model takes from measurement, at the link without delay and limit."""
    figures = stored()["links"]
    link = figures["link"]

    def rows() -> Iterator[tuple[object, ...]]:
        for name, job in figures["jobs"].items():
            times = (f"{1e3 * job[key]:.4g}" for key in ("forward_s", "backward_s", "rest_s", "unshaped_s"))
            model = predicted_s(job, Link(**link))
            sizes = ", ".join(f"{size:,}" for size, _ in job["sums"])
            yield name, sizes, *times, f"{1e3 * model:.4g}", f"{100 * (model / job['unshaped_s'] - 1):+.0f} %"

    yield f"One latency: {1e3 * link['latency_s']:.3f} ms; rate: {8e-9 * link['bytes_per_s']:.2f} Gbit/s.\n"
    head = "network | sums, bytes | forward, ms | backward, ms | rest, ms | step without limits, ms | model, ms | error"
    yield from table(head, rows(), words=2)


# -- the report --------------------------------------------------------------------------------------------

Table = Callable[[], Iterator[str]]
PARTS: dict[str, dict[str, Table]] = {
    "counts": {"counts": counts_table, "starting": starting_table},
    "links": {"own": own_table, "links": links_table},
    "clusters": {"gradients": gradients_table, "steps": steps_table, "growth": growth_table},
}


def table(head: str, rows: Iterable[Iterable[object]], words: int = 1) -> Iterator[str]:
    """The lines of a Markdown table, its first columns words and the others numbers."""
    columns = head.split(" | ")
    yield f"| {head} |"
    yield f"|{'|'.join(['---'] * words + ['--:'] * (len(columns) - words))}|"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def filled(document: str, name: str, lines: Iterable[str]) -> str:
    """A document with other lines between the marks of a table."""
    begin, end = f"<!-- table: {name} -->\n", f"<!-- end: {name} -->"
    text = "\n".join(lines)
    found, changes = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{text}\n\n{end}", document, flags=re.DOTALL
    )
    if changes != 1:
        raise ValueError(f"A document must have the marks of each table once. It has those of {name} {changes} times.")
    return found


def report(names: Iterable[str]) -> None:
    """Measure these parts, by default all; print their tables, and put them into docs/scaling.md."""
    for name in list(names) or PARTS:
        try:
            if name == "counts":
                for hosts in HOSTS:
                    store({name: stored().get(name, {}) | {str(hosts): measured(name, hosts)}})
            elif name == "links":
                store({name: measured(name, 2)})
        except NoHosts as no:
            print(f"{name} is left out: {no}\n")
            continue
        for mark, lines in PARTS[name].items():
            text = list(lines())
            print("\n".join(text) + "\n", flush=True)
            DOCUMENT.write_text(filled(DOCUMENT.read_text(), mark, text))
