"""What a step costs whose sums go over a network: compute, latencies, bytes, and what backward hides of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
