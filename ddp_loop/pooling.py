"""Mean and variance of a union from those of its parts, in a form that does not cancel.

[Note: Pooled variance] For shards j with m_j values behind each channel's statistic (observations times
positions), M = sum(m_j):

    mean = sum(m_j mean_j) / M
    var  = sum(m_j (var_j + (mean_j - mean)^2)) / M          biased; M / (M - 1) times that is what torch keeps

Sums of squares would cancel (off by 1e-3 in float32 at mean 100); this form does not. Pooling the moving
averages instead understates the variance: for shards with mean 0, variance 1 and mean 3, variance 4 and decay
0.1 from (0, 1), the whole mini-batch gives 1.375, pooled moving averages 1.1725, a weighted mean of variances
1.15 (`examples/statistics.py`).

[Note: Far means] torch rounds a shard's mean in float32: at mean 1,000 and deviation 1 it is off by 7e-5, and
the pooled variance then by 1e-5. Where a mean lies far from 0 against the deviation, what is left of it is
computed in a second pass over the values and travels beside it.
"""

from __future__ import annotations

import torch

_FAR = 64.0  # means further than so many deviations from 0; closer ones put less than 2e-6 into the variance


def pooled(counts: torch.Tensor, means: torch.Tensor, variances: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of the union from those of its parts, (S, C) each to (C,) each.

    A part whose count is 0 adds exactly 0. See [Note: Pooled variance].

    Source: Chan, Golub, LeVeque: Algorithms for computing the sample variance, 1983.
    """
    total = counts.sum(0).clamp(min=1)
    mean = (counts * means).sum(0) / total
    return mean, (counts * (variances + (means - mean) ** 2)).sum(0) / total


def refined(
    values: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What rounding took from the mean of each channel, (C,), and the biased variance taken in a second pass, (C,).

    Where the mean lies not far, and on a GPU (asking would hold the host up), these are 0 and None.
    """
    if values.device.type != "cpu" or mean.dtype != torch.float32 or not _is_far(mean, variance):
        return torch.zeros_like(mean), None
    rows = values.detach().transpose(0, 1).reshape(len(mean), -1) - mean.unsqueeze(1)
    rest = rows.mean(1, keepdim=True)
    # torch's own is that around the rounded mean with channels_last: off by 1e-3 at mean 10,000, deviation 1.
    return rest.squeeze(1).to(mean.dtype), (rows - rest).square_().mean(1).to(mean.dtype)


def _is_far(mean: torch.Tensor, variance: torch.Tensor) -> bool:
    means, variances = mean.numpy(), variance.numpy()  # of some ten numbers NumPy finds it in 3 microseconds, not 20
    return bool((means * means > _FAR**2 * variances).any())
