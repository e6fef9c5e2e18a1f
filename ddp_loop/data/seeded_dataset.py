"""A data set whose items are whole shards, with random numbers that depend on sample and shard alone.

[Note: Seeded always] Python's, NumPy's and torch's generators are seeded for each sample, in 8 microseconds, whether or
not `__getitem__` draws from them. A sample does not show whether it was drawn, and a data set that starts to draw late
would otherwise continue the stream of any code that ran before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Subset

from ddp_loop.data import fingerprints
from ddp_loop.data.fingerprints import Fingerprint
from ddp_loop.determinism import COLLATE, SAMPLE, next_keys, seed_streams, stream_key

Wanted = tuple[int, int, list[int]]  # the epoch, the shard's first sample in it, and its samples' positions in the data
ONE_BY_ONE = (
    "Samples are read one by one, by __getitem__, since random numbers depend on the sample. The data set's "
    "__getitems__ is not called. What combines samples, such as padding, belongs in collate_fn."
)
PROBE = -1  # in place of the first sample: asks for the samples' fingerprints only


@dataclass(frozen=True)
class SeededDataset:
    """A data set whose items are whole shards. Its random numbers depend on sample and shard, not on the worker.

    Args:
        source: returns sample number i as `source[i]` or `source(i)`, with generators keyed by (seed, epoch, i).
        seed: of the keys.
        collate: makes a shard's data from its samples, with generators keyed by (seed, epoch, first sample).
        device: whose generator is seeded, beside the CPU's.

    """

    source: Any
    seed: int
    collate: Callable[[list[Any]], Any]
    device: torch.device | None = None

    def __getitem__(self, wanted: Wanted) -> Any:
        epoch, start, indices = wanted
        if start == PROBE:
            return self.probe(indices)
        samples = self.samples(epoch, indices)
        seed_streams(stream_key(self.seed, COLLATE, epoch, start), self.device)
        try:
            return collated(self.collate, samples)
        except Exception as error:
            self._note_getitems(error)
            raise

    def samples(self, epoch: int, indices: list[int]) -> list[Any]:
        """The samples at these positions of the data, as drawn for that epoch."""
        read = self.source.__getitem__ if hasattr(self.source, "__getitem__") else self.source
        samples = []
        index = -1
        try:
            for index, key in zip(indices, next_keys(stream_key(self.seed, SAMPLE, epoch), indices), strict=True):
                seed_streams(key, self.device)
                samples.append(read(index))
        except StopIteration as error:  # it would end the epoch without an error
            raise RuntimeError(
                f"A source must return every sample. Sample {index} of epoch {epoch + 1} raised StopIteration. Raise "
                "another error, or return the sample."
            ) from error
        except Exception as error:
            error.add_note(f"while sample {index} of epoch {epoch + 1} was read")
            self._note_getitems(error)
            raise
        return samples

    def _note_getitems(self, error: Exception) -> None:
        source = self.source
        while isinstance(source, Subset):  # which has __getitems__ whether or not its data set has
            source = source.dataset
        if hasattr(source, "__getitems__"):
            error.add_note(ONE_BY_ONE)

    def probe(self, indices: Iterable[int]) -> Fingerprint:
        """The fingerprints of these samples in the first epoch.

        A sample that cannot be read is left out; reading its shard raises.
        """
        found: Fingerprint = {}
        for index in indices:
            with suppress(Exception):
                found |= fingerprints.of(f"sample {index}", self.samples(0, [index])[0])
        return found


def collated(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """A shard's data from its samples; an error gets a note with the remedy."""
    name = getattr(collate, "__name__", "collate_fn")
    try:
        return collate(samples)
    except StopIteration as error:  # it would end the reader without a word
        raise RuntimeError(
            f"collate_fn must return a shard's data. {name} raised StopIteration for {len(samples)} samples, as next() "
            "does at the end. Raise another error, or give it an iterator without an end."
        ) from error
    except Exception as error:
        remedy = ""
        if isinstance(error, RuntimeError | ValueError) and re.search("size|shape|length", str(error)):  # of a stack
            remedy = " Pass a collate_fn that pads samples of unequal sizes."
        elif isinstance(error, RuntimeError | TypeError) and name == "default_collate":  # None, an image of PIL
            remedy = " Let each sample have tensors, arrays or numbers, or pass a collate_fn that makes them."
        if not samples:
            remedy = " A rank without samples needs data without rows. Pass a collate_fn that makes them from []."
        error.add_note(f"while {name} combined the {len(samples)} samples of a shard.{remedy}")
        raise
