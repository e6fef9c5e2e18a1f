"""Transforms of a shard's data on their device, with random numbers that depend on the sample.

[Note: Draws] A number is a hash of (seed, epoch, call) and (sample, element), by splitmix64. All numbers of a shard are
made at once on its device, and none depends on the others.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddp_loop.data.placement import tensors_in
from ddp_loop.determinism import DRAWS, logical_shift, preserved_streams, seed_transform, splitmix64, stream_key


class Draws:
    """Random numbers for each sample of a shard; `Batches` passes them to a transform.

    The k-th call of a method gives sample i of an epoch the same numbers, for any number of shards, ranks and workers.
    Another call, sample, epoch or seed gives other numbers. The words come from splitmix64 (Steele, Lea, Flood: Fast
    splittable pseudorandom number generators, 2014). For example::

        def brighten(images, draws):  # (n, C, H, W) float32
            return images * draws.uniform(1, 1, 1, low=0.8, high=1.2)

        batches = dl.Batches(images, 128, world, transform=brighten)

    Args:
        seed: of the batches.
        epoch: counted from 1.
        samples: (n,) int64, the samples' positions in the data.
        device: where the numbers are made.
    """

    def __init__(self, seed: int, epoch: int, samples: torch.Tensor, device: torch.device) -> None:
        self._seed = seed
        self._epoch = epoch - 1
        self._calls = 0
        self._samples = samples
        self._device = device

    def _bits(self, shape: tuple[int, ...]) -> torch.Tensor:
        """64 random bits for each element, (n, *shape) int64."""
        self._calls += 1
        key = stream_key(self._seed, DRAWS, self._epoch, self._calls)
        rows = splitmix64(key, self._samples.to(self._device, non_blocking=True))
        elements = torch.arange(1, 1 + math.prod(shape), device=self._device)
        return splitmix64(rows.unsqueeze(1), elements).view(-1, *shape)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        """Uniform numbers in [low, high), in steps of (high - low) / 2^24.

        Args:
            shape: of one sample's numbers.
            low: the lower bound.
            high: the upper bound, itself excluded.

        Returns:
            `(n, *shape)` float32.
        """
        return low + (high - low) * (logical_shift(self._bits(shape), 40).float() * 2.0**-24)

    def normal(self, *shape: int, mean: float = 0.0, deviation: float = 1.0) -> torch.Tensor:
        """Normal numbers. Another kind of device may give another last bit.

        Source: Box, Muller: A note on the generation of random normal deviates, 1958.

        Args:
            shape: of one sample's numbers.
            mean: of the numbers.
            deviation: their standard deviation.

        Returns:
            `(n, *shape)` float32.
        """
        bits = self._bits(shape)
        one = logical_shift(bits, 40).float()
        other = (bits & 0xFFFFFF).float()
        radius = torch.sqrt(-2.0 * torch.log((one + 1.0) * 2.0**-24))  # of (0, 1]
        return mean + deviation * radius * torch.cos(other * (2.0 * math.pi * 2.0**-24))

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Uniform whole numbers in low .. high - 1.

        Args:
            low: the least number.
            high: one more than the largest number, at most low + 2^31.
            shape: of one sample's numbers.

        Returns:
            `(n, *shape)` int64.

        Raises:
            ValueError: `high` is not above `low`, or more than 2^31 above it.
        """
        if not 0 < high - low <= 2**31:
            raise ValueError(
                f"integers() draws from low .. high - 1, at most 2^31 numbers. Got {low=}, {high=}. Note that high "
                "itself is never drawn."
            )
        return low + ((logical_shift(self._bits(shape), 32) * (high - low)) >> 32)

    def chance(self, probability: float, *shape: int) -> torch.Tensor:
        """True with the given probability.

        Args:
            probability: in [0, 1].
            shape: of one sample's values.

        Returns:
            `(n, *shape)` bool.
        """
        return self.uniform(*shape) < probability


@dataclass(frozen=True)
class Transform:
    """A user's `change(data, draws)`, which must keep the number of samples.

    Attributes:
        change: returns the data to use in place of a shard's data.
        seed: of the batches.
        device: of the world, where `draws` are made.
    """

    change: Callable[[Any, Draws], Any]
    seed: int
    device: torch.device

    def __post_init__(self) -> None:
        if not callable(self.change):
            raise TypeError(f"transform must be a function, transform(data, draws). Got {self.change!r}.")
        try:
            form = inspect.signature(self.change.forward if isinstance(self.change, nn.Module) else self.change)
        except ValueError:  # of a compiled function
            return
        try:
            form.bind(None, None)
        except TypeError:
            parameters = [one.replace(annotation=one.empty) for one in form.parameters.values()]
            raise TypeError(
                "transform takes a shard's data, as the loop gets them, and the random draws: transform(data, draws). "
                f"Got one of the form {inspect.Signature(parameters)}. Write lambda data, draws: ..., and apply "
                "transforms of a single sample in the data set."
            ) from None

    def __call__(self, epoch: int, start: int, samples: torch.Tensor, data: Any) -> Any:
        """Transform the data of the shard whose first sample is number `start` of an epoch.

        Draws from Python's, NumPy's and torch's generators are keyed by (seed, epoch, start), so the same shards get
        the same numbers.

        Raises:
            ValueError: the transform changed the number of samples.
        """
        before = _lengths(data)
        draws = Draws(self.seed, epoch + 1, samples, self.device)
        with preserved_streams(self.device):
            seed_transform(self.seed, epoch, start, self.device)
            changed = self.change(data, draws)
        after = _lengths(changed)
        if len(after) != len(before):  # then only the first parts are comparable
            before = before[:1]
            after = after[:1] or [None]
        for part, (length, now) in enumerate(zip(before, after, strict=False)):
            if length == len(samples) != now:
                where = f" in part {part + 1}" if part else ""
                raise ValueError(
                    f"A transform must keep the number of samples, {length} in this shard. It returned "
                    f"{'none' if now is None else now}{where}. Give unwanted samples weight 0, or remove them from the "
                    "data."
                )
        return changed


def _lengths(data: Any) -> list[int | None]:
    """The first dimensions of the tensors in the data."""
    return [len(tensor) for tensor in tensors_in(data) if isinstance(tensor, torch.Tensor) and tensor.dim()]
