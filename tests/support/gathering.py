"""A network and a loss that needs the outputs of the whole mini-batch."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.refusals import network


def encoder() -> nn.Sequential:
    model = network()
    model[2] = nn.Linear(6, 3).double()
    with torch.no_grad():
        for number, parameter in enumerate(model[2].parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape) + number)
    return model


def spread(rows: torch.Tensor) -> torch.Tensor:
    """Needs the whole mini-batch: the mean of the shards' own spreads is another number."""
    return -rows.std(0).log().sum()
