"""Reads chunks of sequences, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ddp_loop.accelerators import accelerator_of
from ddp_loop.data import fingerprints
from ddp_loop.data.fingerprints import Fingerprint
from ddp_loop.data.lanes import Numbers, Rows
from ddp_loop.data.placement import Places, gpu_in, map_tensors, tensors_in, to_devices
from ddp_loop.data.readers import as_parts, common_length
from ddp_loop.data.seeded_dataset import SeededDataset
from ddp_loop.determinism import preserved_streams

_COMPARED = 10_000  # sequences in memory, of each of which the ranks compare some KiB


class SequenceReader:
    """Reads sequences by number, and cuts chunks from them.

    Args:
        sequences: each a tensor or array with a row per time step, or a tuple or dict of them.
        lengths: their time steps; None reads all sequences once to find them.
        seed: of what is drawn while a sequence is read.
        places: where the chunks go.

    Attributes:
        lengths: the time steps of each sequence, (N,) int64.

    Raises:
        TypeError: there is no index, or a sequence is not made of tensors.
        ValueError: there are no sequences, or one is empty, has parts of unequal lengths, or has another length.
    """

    def __init__(self, sequences: Any, lengths: Sequence[int] | None, seed: int, places: Places) -> None:
        has_index = hasattr(sequences, "__getitem__") and hasattr(sequences, "__len__")
        if isinstance(sequences, str | bytes) or not has_index:
            raise TypeError(
                "sequences must be a list of tensors with a row per time step (or of tuples or dicts of them), or a "
                f"data set with a length that returns them. Got {type(sequences).__name__}."
            )
        self._places = places
        self._gpu = gpu_in(places)
        self._is_list = isinstance(sequences, list | tuple)
        self._keyed = SeededDataset(sequences, seed, list, self._gpu, fingerprints.of)
        self._open: dict[int, tuple[Any, ...]] = {}  # by lane: epoch, number and parts of its sequence
        if len(sequences) == 0:
            raise ValueError("There must be at least one sequence. Got none. Check where the sequences come from.")
        if lengths is None:
            found = [common_length(self._read(0, number)) for number in range(len(sequences))]
            self.lengths: Numbers = np.array(found, dtype=np.int64)
        else:
            self.lengths = np.array([int(one) for one in lengths], dtype=np.int64)
            if len(self.lengths) != len(sequences):
                raise ValueError(
                    f"lengths must have a number for each sequence. Got {len(self.lengths)} for {len(sequences)} "
                    "sequences. Pass one each, or leave lengths= out to have all sequences read once."
                )
        least = int(self.lengths.argmin())
        if self.lengths[least] < 1:
            raise ValueError(
                f"Every sequence must have a time step. Sequence {least} has {self.lengths[least]}. Remove empty ones."
            )

    def _read(self, epoch: int, number: int) -> Any:
        """The parts of a sequence, as drawn for an epoch counted from 0."""
        if self._is_list:
            sequence = self._keyed.source[number]
        else:
            with preserved_streams(self._gpu):
                sequence = self._keyed.samples(epoch, [number])[0]
        parts = as_parts(sequence)
        if parts is None:
            raise TypeError(
                "A sequence must be a tensor or array with a row per time step, or a tuple or dict of them. Sequence "
                f"{number} is a {type(sequence).__name__}. Convert it by torch.as_tensor(...)."
            )
        try:
            common_length(parts)
        except ValueError as error:
            error.add_note(f"in sequence {number}, whose rows are its time steps")
            raise
        return parts

    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the lengths and of three sequences; in memory, of the first KiB of each."""
        found = fingerprints.of_numbers("the lengths of the sequences", self.lengths.tolist())
        count = len(self.lengths)
        if self._is_list:
            every = max(1, count // _COMPARED)
            sums = [fingerprints.quick(self._keyed.source[number]) for number in range(0, count, every)]
            found |= fingerprints.of_numbers("the values of the sequences", sums)
        with preserved_streams(self._gpu):
            return found | self._keyed.probe(0, sorted({0, count // 2, count - 1}))

    def chunk(self, epoch: int, rows: Rows) -> Any:
        """The padded chunks, (n, T, ...), with T the most time steps of a row.

        Args:
            epoch: counted from 0.
            rows: of a shard.
        """
        wanted = (part.tolist() for part in (rows.lanes, rows.sequences, rows.starts, rows.lengths))
        every = [self._cut(epoch, *one) for one in zip(*wanted, strict=True)]
        flat = [tensors_in(one) for one in every]
        padded = iter([self._pinned(_stacked(list(same))) for same in zip(*flat, strict=True)])
        return to_devices(map_tensors(lambda _: next(padded), every[0]), self._places)

    def _cut(self, epoch: int, lane: int, number: int, start: int, length: int) -> Any:
        if self._open.get(lane, ())[:2] != (epoch, number):
            parts = self._read(epoch, number)
            if (steps := common_length(parts)) != self.lengths[number]:
                raise ValueError(
                    f"A sequence must have its length in every epoch. Sequence {number} has {steps} time steps, and "
                    f"had {self.lengths[number]}. Pass the right lengths, and change no length where it is read."
                )
            self._open[lane] = epoch, number, parts
        return map_tensors(lambda tensor: tensor[start : start + length], self._open[lane][2])

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._gpu is None or not accelerator_of(tensor.device).is_host:
            return tensor
        return accelerator_of(self._gpu).empty_on_host(tensor).copy_(tensor)


def _stacked(rows: list[torch.Tensor]) -> torch.Tensor:
    if all(len(row) == len(rows[0]) for row in rows):
        return torch.stack(rows)
    return pad_sequence(rows, batch_first=True)
