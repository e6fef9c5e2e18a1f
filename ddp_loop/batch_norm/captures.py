"""What batch-norm layers leave in a shard: the batch statistics of each call.

[Note: Far means] torch rounds a shard's mean to float32: at mean 1,000 and deviation 1 it is off by 7e-5, and the
pooled variance by 1e-5. If a mean is large against the deviation, a second pass over the values computes its
rounding error, which is sent with it. Small inputs that a graph keeps are checked together, before the backward; in
compiled code all are, since it has no sizes in bytes if they vary, and a read of a value would cut it in two.

[Note: One tensor] A layer costs as many operations as it has tensors. So the statistics of all layers' first calls lie
in one tensor, in the layers' order, and are packed in one piece where each layer was called once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import torch

from ddp_loop.accelerators import accelerator_of

_FAR = 64.0  # deviations from 0; a closer mean changes the variance by less than 2e-6
_SMALL_BYTES = 2**20  # of inputs that are kept until the backward
NO_VALUES = -1  # the count in a row of a call without values, as torch counts it too; 0 stands for no call

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class BatchStatistics:
    """One call's batch statistics: `count` values per channel, mean + rest, unbiased variance."""

    count: int
    mean: torch.Tensor
    rest: torch.Tensor
    variance: torch.Tensor
    momentum: float = 0.0  # of an own norm's call


def refine_statistics(
    values: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The rounding error of each channel's mean, (C,), and the biased variance computed in a second pass, (C,).

    None if no mean is far from 0, and on a GPU, where the check would make the host wait.
    """
    if not _is_checked(mean) or not _is_far(mean, variance):
        return None
    rows = values.detach().transpose(0, 1).reshape(len(mean), -1) - mean.unsqueeze(1)
    rest = rows.mean(1, keepdim=True)
    # With channels_last torch's is around the rounded mean: off by 1e-3 at mean 10,000, deviation 1.
    return rest.squeeze(1).to(mean.dtype), (rows - rest).square_().mean(1).to(mean.dtype)


def _is_checked(mean: torch.Tensor) -> bool:
    return mean.dtype == torch.float32 and accelerator_of(mean.device).is_host


def _is_kept_and_small(inputs: torch.Tensor) -> bool:
    return inputs.requires_grad and inputs.nbytes <= _SMALL_BYTES and torch.is_grad_enabled()


def _is_far(mean: torch.Tensor, variance: torch.Tensor) -> bool:
    means = mean.numpy()
    variances = variance.numpy()  # for some ten numbers: 3 microseconds in NumPy, 20 in torch
    return bool((means * means > _FAR**2 * variances).any())


class FlatStatistics:
    """The form of a tensor with the statistics of all layers. See [Note: One tensor].

    Args:
        means: the running means of the layers, of one dtype and device.
    """

    def __init__(self, means: Sequence[torch.Tensor]) -> None:
        self.sizes = list(map(len, means))
        self.channels = sum(self.sizes)
        self._whole = means[0].detach().new_empty(0)
        self.rests = means[0].detach().new_zeros(self.channels)  # never written
        self.rest_of = self.rests.split_with_sizes(self.sizes)

    def new(self) -> tuple[torch.Tensor, list[Pair]]:
        """A new tensor, (2 channels,), zeros, and each layer's mean and variance in it."""
        whole = self._whole.new_zeros(2 * self.channels)
        parts = whole.split_with_sizes(self.sizes * 2)
        return whole, list(zip(parts[: len(self.sizes)], parts[len(self.sizes) :], strict=True))

    def fits(self, mean: torch.Tensor, number: int) -> bool:
        """Whether a layer's mean still has this form."""
        return mean.dtype is self._whole.dtype and len(mean) == self.sizes[number] and mean.device == self._whole.device


class Captures(list[list[BatchStatistics]]):
    """A shard's captures of each layer, in the order of its calls.

    Args:
        layers: their number.
        form: of the tensor for the first ones' statistics; None where they differ in dtype or device.
    """

    def __init__(self, layers: int, form: FlatStatistics | None) -> None:
        super().__init__(map(list, repeat((), layers)))
        self._form = form
        self._whole: torch.Tensor | None = None
        self._pairs: list[Pair] = []
        if form is not None:
            self._whole, self._pairs = form.new()
        self._plain = 0  # captures in the whole tensor, without a rest
        self._unchecked: list[tuple[torch.Tensor, BatchStatistics]] = []

    def spare(self, number: int, mean: torch.Tensor) -> Pair:
        """Zeros of the shape of a layer's `mean`, for the mean and the variance of its next call."""
        is_first = number < len(self._pairs) and not self[number]
        if is_first and self._form is not None and self._form.fits(mean, number):
            return self._pairs[number]
        return torch.zeros_like(mean), torch.zeros_like(mean)

    def add(
        self, number: int, inputs: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, momentum: float
    ) -> None:
        """Capture a layer's call."""
        count = inputs.numel() // inputs.shape[1]
        if self._form is not None and number < len(self._pairs) and mean is self._pairs[number][0]:
            capture = BatchStatistics(count, mean, self._form.rest_of[number], variance, momentum)
            self._plain += 1
            if torch.compiler.is_compiling() or _is_kept_and_small(inputs):
                self._unchecked.append((inputs, capture))
            else:
                self._refine(inputs, capture)
        else:
            capture = BatchStatistics(count, mean, torch.zeros_like(mean), variance, momentum)
            self._refine(inputs, capture)
        self[number].append(capture)

    def repeat(self, recorded: Captures) -> None:
        """Capture again what is now in the statistics of a recorded shard."""
        here: list[torch.Tensor] = []
        there: list[torch.Tensor] = []
        for number, calls in enumerate(recorded):
            for one in calls:
                mean, variance = self.spare(number, one.mean)
                here += [mean, variance]
                there += [one.mean, one.variance]
                keeps = self._form is not None and number < len(self._pairs) and one.rest is self._form.rest_of[number]
                if keeps and mean is self._pairs[number][0]:
                    self._plain += 1
                rest = one.rest if keeps else one.rest.clone()
                self[number].append(BatchStatistics(one.count, mean, rest, variance, one.momentum))
        if here:
            torch._foreach_copy_(here, there)

    def check(self) -> None:
        """Refine what is far from 0, while the inputs are still there. See [Note: Far means]."""
        unchecked = self._unchecked
        self._unchecked = []
        if unchecked and self._form is not None and self._whole is not None:
            channels = self._form.channels
            if _is_checked(self._whole) and _is_far(self._whole[:channels], self._whole[channels:]):
                for inputs, capture in unchecked:
                    self._refine(inputs, capture)

    def _refine(self, inputs: torch.Tensor, capture: BatchStatistics) -> None:
        found = refine_statistics(inputs, capture.mean, capture.variance)
        if found is not None:
            capture.rest, biased = found
            capture.variance = biased * (capture.count / max(capture.count - 1, 1))
            self._plain = -len(self)  # so it is never all of them

    def in_one_piece(self) -> tuple[tuple[int, ...], list[torch.Tensor]] | None:
        """The counts, and means, rests and variances of all layers, (channels,) each; None unless all lie together."""
        if self._form is None or self._whole is None or self._plain != len(self):
            return None
        if {*map(len, self)} != {1}:
            return None
        channels = self._form.channels
        counts = tuple([calls[0].count or NO_VALUES for calls in self])
        return counts, [self._whole[:channels], self._form.rests, self._whole[channels:]]
