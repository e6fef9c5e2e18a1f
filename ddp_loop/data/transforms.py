"""Transforms of a shard's data on their device, with random numbers that follow the sample.

[Note: Draws] A number is a hash of (seed, epoch, call) and (sample, element): counters in, bits out, so that all
of a shard's are made at once on its device and none depends on the others. splitmix64's mixing is used, as in
`determinism.stream_key`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ddp_loop.data.placement import tensors_in
from ddp_loop.determinism import DRAWS, preserved_streams, seed_transform, stream_key

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(word: int) -> int:
    """64 bits as torch's int64 has them."""
    return (word + 2**63) % 2**64 - 2**63


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right; torch's own repeats the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """splitmix64's mixing of each word; products wrap around."""
    words = (words ^ _shifted(words, 30)) * _signed(_FIRST)
    words = (words ^ _shifted(words, 27)) * _signed(_SECOND)
    return words ^ _shifted(words, 31)


class Draws:
    """Random numbers of a shard's samples, as a transform is given them.

    The k-th call of a method gives sample i of an epoch the same numbers on any number of shards, ranks and
    workers; other calls, samples, epochs and seeds give others.

    Args:
        seed, epoch: of the batches.
        samples: (n,) int64, their numbers in the data.
        device: where the numbers are made.
    """

    def __init__(self, seed: int, epoch: int, samples: torch.Tensor, device: torch.device) -> None:
        self._seed, self._epoch, self._calls = seed, epoch, 0
        self._samples, self._device = samples, device

    def _bits(self, shape: tuple[int, ...]) -> torch.Tensor:
        """64 random bits for each element, (n, *shape) int64."""
        self._calls += 1
        key = _signed(stream_key(self._seed, DRAWS, self._epoch, self._calls))
        rows = _mixed(self._samples.to(self._device, non_blocking=True) * _signed(_GOLDEN) + key)
        elements = torch.arange(1, 1 + math.prod(shape), device=self._device) * _signed(_GOLDEN)
        return _mixed(rows.unsqueeze(1) + elements).view(-1, *shape)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        """Evenly spread over [low, high): float32, shape (n, *shape), multiples of (high - low) / 2^24."""
        return low + (high - low) * (_shifted(self._bits(shape), 40).float() * 2.0**-24)

    def normal(self, *shape: int, mean: float = 0.0, deviation: float = 1.0) -> torch.Tensor:
        """Normal: float32, shape (n, *shape). On another kind of device the last bit may differ.

        Source: Box, Muller: A note on the generation of random normal deviates, 1958.
        """
        bits = self._bits(shape)
        one, other = _shifted(bits, 40).float(), (bits & 0xFFFFFF).float()
        radius = torch.sqrt(-2.0 * torch.log((one + 1.0) * 2.0**-24))  # of (0, 1]
        return mean + deviation * radius * torch.cos(other * (2.0 * math.pi * 2.0**-24))

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Whole numbers in low .. high - 1: int64, shape (n, *shape).

        Raises:
            ValueError: `high` is not above `low`, or further above than 2^31.
        """
        if not 0 < high - low <= 2**31:
            raise ValueError(
                f"integers are drawn from low .. high - 1, at most 2^31 of them; got {low=}, {high=}: high is left out"
            )
        return low + ((_shifted(self._bits(shape), 32) * (high - low)) >> 32)

    def chance(self, probability: float, *shape: int) -> torch.Tensor:
        """True with the given probability: bool, shape (n, *shape)."""
        return self.uniform(*shape) < probability


@dataclass(frozen=True)
class Transform:
    """A user's `change(data, draws)`, held to the number of samples.

    Attributes:
        change: gives what stands for a shard's data.
        seed: of the batches.
        device: where `draws` are made, the world's.
    """

    change: Callable[[Any, Draws], Any]
    seed: int
    device: torch.device

    def __post_init__(self) -> None:
        if not callable(self.change):
            raise TypeError(f"transform must be a function, transform(data, draws); got {self.change!r}")

    def __call__(self, epoch: int, start: int, samples: torch.Tensor, data: Any) -> Any:
        """What stands for the data of the shard that begins with number `start` of an epoch.

        Random draws by Python's, NumPy's and torch's generators are keyed by (seed, epoch, start): the same with the
        same shards.

        Raises:
            ValueError: the first tensor has another number of samples than before.
        """
        before = _first_length(data)
        draws = Draws(self.seed, epoch, samples, self.device)
        with preserved_streams(self.device):
            seed_transform(self.seed, epoch, start, self.device)
            changed = self.change(data, draws)
        after = _first_length(changed)
        if before == len(samples) != after:
            raise ValueError(
                f"a transform keeps the number of samples, {before} in this shard; it gave "
                f"{'nothing' if after is None else after}: give what shall not count the weight 0, or leave it out of "
                "the data"
            )
        return changed


def _first_length(data: Any) -> int | None:
    """The first dimension of the first tensor in the data; None without one."""
    return next((len(tensor) for tensor in tensors_in(data) if isinstance(tensor, torch.Tensor) and tensor.dim()), None)
