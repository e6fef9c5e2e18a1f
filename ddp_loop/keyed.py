"""A map-style data set read observation by observation, each on random streams of its own.

[Note: Seeding where it is needed] To seed torch's generator takes a microsecond, Python's and NumPy's 15, as long as
reading a small observation. So these two are seeded only for data sets that draw from them: whether one does shows in
its first observations, which are read seeded; and should it begin later, the shard in which it did is read once more.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ddp_loop.determinism import OBSERVATION, next_key, seed_process, stream_key

_FIRST = 64  # observations that are read seeded before a data set is taken for one that does not draw


@dataclass
class Keyed:
    """A data set whose item [epoch, indices] is a whole shard: its randomness follows the observation, not the worker.

    Args:
        source: gives observation number i by `source[i]` or `source(i)`.
        seed: of its streams, which are keyed by (seed, epoch, i).
        collate: makes a shard's data of a list of observations.
    """

    source: Any
    seed: int
    collate: Callable[[list[Any]], Any]
    _draws: bool = field(default=False, init=False)  # whether it was seen to draw from Python's or NumPy's generator
    _seen: int = field(default=0, init=False)  # observations without a draw, as far as they were read seeded

    def __getitem__(self, wanted: tuple[int, list[int]]) -> Any:
        if self._draws or self._seen < _FIRST:
            return collated(self.collate, self._observations(*wanted, self._read_seeded))
        np.random.seed(0)  # drops the second of a pair of normal numbers, which would be drawn without a trace
        before = _streams()
        observations = self._observations(*wanted, self._read_unseeded)
        if _streams() != before:
            self._draws = True
            observations = self._observations(*wanted, self._read_seeded)
        return collated(self.collate, observations)

    def _observations(
        self, epoch: int, indices: list[int], read: Callable[[Callable[[int], Any], int, int], Any]
    ) -> list[Any]:
        source = self.source.__getitem__ if hasattr(self.source, "__getitem__") else self.source
        epoch_key = stream_key(self.seed, OBSERVATION, epoch)
        observations, index = [], -1
        try:
            for index in indices:
                observations.append(read(source, index, next_key(epoch_key, index)))
        except StopIteration as error:  # it would end the epoch without a word
            raise RuntimeError(f"the source ended when observation {index} of epoch {epoch} was read") from error
        except Exception as error:
            error.add_note(f"while observation {index} of epoch {epoch} was read")
            raise
        return observations

    def _read_unseeded(self, source: Callable[[int], Any], index: int, key: int) -> Any:
        torch.default_generator.manual_seed(key)
        return source(index)

    def _read_seeded(self, source: Callable[[int], Any], index: int, key: int) -> Any:
        seed_process(key)
        if self._draws:
            return source(index)
        before = _streams()
        observation = source(index)
        self._draws = _streams() != before
        self._seen += 1
        return observation


def collated(collate: Callable[[list[Any]], Any], observations: list[Any]) -> Any:
    """A shard's data of its observations; an error says what to do about it."""
    try:
        return collate(observations)
    except Exception as error:
        name = getattr(collate, "__name__", "collate_fn")
        error.add_note(
            f"while the {len(observations)} observations of a shard were put together by {name}: give a collate_fn "
            "that pads those of unequal sizes"
        )
        raise


def _streams() -> tuple[object, object]:
    """What Python's and NumPy's generators hold, to be compared."""
    generator: Any = vars(np.random)["get_bit_generator"]()
    if isinstance(generator, np.random.MT19937):  # as it is unless somebody changed it; 0.3 microseconds, not 26
        return random.getstate(), ctypes.string_at(generator.ctypes.state_address, 625 * 4)
    return random.getstate(), str(generator.state)
