"""Four ways to aggregate the batch-norm state of two workers, compared with the whole mini-batch.

    python pooled_statistics.py

Both workers have the same number of values, with mean 0 and variance 1 on the first and mean 3 and variance 4 on the
second. The running statistics start at mean 0 and variance 1, with a momentum of 0.1. The last two lines agree; a step
of ddp_loop does the third.
"""

from __future__ import annotations

import torch

import ddp_loop as dl

DECAY = 0.1


def worker(mean: float, variance: float, count: int = 1000) -> torch.Tensor:
    """`count` values with exactly this mean and biased variance, float64."""
    values = torch.linspace(-1, 1, count, dtype=torch.float64)
    values = (values - values.mean()) / values.std(correction=0)
    scaled: torch.Tensor = variance**0.5 * values + mean
    return scaled


def moved(old: float, new: float) -> float:
    """The moving average after one step."""
    return (1 - DECAY) * old + DECAY * new


def aggregate() -> dict[str, float]:
    """The running variance after one step in each way; biased, for round numbers."""
    workers = [worker(0.0, 1.0), worker(3.0, 4.0)]
    means = torch.stack([w.mean() for w in workers]).unsqueeze(1)
    variances = torch.stack([w.var(correction=0) for w in workers]).unsqueeze(1)
    counts = torch.tensor([[len(w)] for w in workers], dtype=torch.float64)
    weights = counts / counts.sum()
    mean_of_variances = float((weights * variances).sum())
    moving_means = torch.tensor([[moved(0.0, float(m))] for m in means], dtype=torch.float64)
    moving_variances = torch.tensor([[moved(1.0, float(v))] for v in variances], dtype=torch.float64)
    pooled_moving = dl.pool_statistics(counts, moving_means, moving_variances)[1]
    pooled_batch = dl.pool_statistics(counts, means, variances)[1]
    whole = torch.cat(workers)
    return {
        "plain weighted mean of variances": moved(1.0, mean_of_variances),
        "pooled moving averages": float(pooled_moving),
        "pooled batch statistics": moved(1.0, float(pooled_batch)),
        "the whole mini-batch": moved(1.0, float(whole.var(correction=0))),
    }


def main() -> None:
    for way, variance in aggregate().items():
        print(f"{way:34s} {variance:.4f}")


if __name__ == "__main__":
    main()
