"""Lanes: which part of which sequence each row of a mini-batch has.

[Note: Lanes] A lane is a row of the mini-batch that reads one sequence after the other, chunk by chunk. Sequences are
assigned to lanes longest first, each to the lane with the fewest chunks so far (Graham: Bounds on multiprocessing
timing anomalies, 1969). Which lane gets a number of chunks depends on the lengths alone, so every epoch has equally
many mini-batches. Which sequence of that many chunks it is, and the order within the lane, depend on the epoch's order.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Rows:
    """The chunks of n lanes in a mini-batch; each array is (n,) int64.

    Attributes:
        lanes: the lanes' numbers, ascending.
        sequences: the number of each lane's sequence.
        starts: the number of time steps of the sequence before the chunk.
        lengths: the number of time steps of the chunk, never 0.
        left: the number of time steps of the sequence after the chunk.
    """

    lanes: Numbers
    sequences: Numbers
    starts: Numbers
    lengths: Numbers
    left: Numbers

    def between(self, first: int, last: int) -> Rows:
        """The rows of the lanes `first` .. `last - 1`."""
        here = slice(*np.searchsorted(self.lanes, (first, last)).tolist())
        parts = (self.lanes, self.sequences, self.starts, self.lengths, self.left)
        return Rows(*(part[here] for part in parts))


class Lanes:
    """The assignment of sequences to lanes. See [Note: Lanes].

    Args:
        lengths: the time steps of each sequence, (N,) int64, each 1 or more.
        lanes: the number of lanes.
        length: the most time steps of a chunk.

    Attributes:
        lengths, lanes, length: as given.
        steps: the number of mini-batches in an epoch.
    """

    def __init__(self, lengths: Numbers, lanes: int, length: int) -> None:
        self.lengths = lengths
        self.lanes = lanes
        self.length = length
        self._chunks = -(-lengths // length)
        loads = [(0, lane) for lane in range(lanes)]
        heapify(loads)
        slots = []
        for chunks in np.sort(self._chunks)[::-1].tolist():
            load, lane = loads[0]
            slots.append(lane)
            heapreplace(loads, (load + chunks, lane))
        self._lane_of_slot: Numbers = np.array(slots, dtype=np.int64)  # of the k-th longest sequence
        self._loads: Numbers = np.zeros(lanes, dtype=np.int64)
        for load, lane in loads:
            self._loads[lane] = load
        self.steps = int(self._loads.max())

    def plan(self, order: Numbers) -> LanePlan:
        """The plan of an epoch that has the sequences in this order, (N,) int64."""
        lane_of = np.empty_like(self._lane_of_slot)
        lane_of[order[np.argsort(-self._chunks[order], kind="stable")]] = self._lane_of_slot
        sequences = order[np.argsort(lane_of[order], kind="stable")]
        lanes = lane_of[sequences]
        chunks = self._chunks[sequences]
        first = np.cumsum(chunks) - chunks - (np.cumsum(self._loads) - self._loads)[lanes]
        missing = chunks * self.length - self.lengths[sequences]  # of a sequence's last chunk
        running = self.lanes - np.searchsorted(np.sort(self._loads), np.arange(self.steps), side="right")
        sizes = self.length * running - np.bincount(first + chunks - 1, missing, self.steps).astype(np.int64)
        return LanePlan(self, sequences, lanes, first, np.concatenate([[0], np.cumsum(sizes)]))


@dataclass(frozen=True, slots=True)
class LanePlan:
    """The chunks of an epoch.

    Attributes:
        of: the lanes.
        sequences: the sequences' numbers, lane by lane and in the order in which each lane reads them; (N,) int64.
        lanes: the lane of each.
        first: the position of the mini-batch with its first chunk.
        before: the number of time steps before each mini-batch, and at last of the whole epoch; (steps + 1,) int64.
    """

    of: Lanes
    sequences: Numbers
    lanes: Numbers
    first: Numbers
    before: Numbers

    def rows(self, position: int) -> Rows:
        """The chunks of the lanes that are not done before the mini-batch at `position`, counted from 0."""
        lanes = np.flatnonzero(self.of._loads > position)
        keys = self.lanes * self.of.steps + self.first  # ascending
        at = np.searchsorted(keys, lanes * self.of.steps + position, side="right") - 1
        sequences = self.sequences[at]
        starts = (position - self.first[at]) * self.of.length
        lengths = np.minimum(self.of.lengths[sequences] - starts, self.of.length)
        return Rows(lanes, sequences, starts, lengths, self.of.lengths[sequences] - starts - lengths)
