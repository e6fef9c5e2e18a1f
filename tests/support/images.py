"""Small images with labels, and a network for them that evaluation must leave as it is."""

from __future__ import annotations

import torch
from torch import nn

IMAGES = 1000


def images(size: int = IMAGES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.rand(size, 1, 4, 4, generator=generator), torch.randint(3, (size,), generator=generator)


def network() -> nn.Module:
    """With batch norm and dropout, which do otherwise while training."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))


def hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(1) == labels
