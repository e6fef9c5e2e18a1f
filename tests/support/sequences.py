"""Sequences of unequal lengths, a recurrent network, and its truncated backpropagation through time by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

FEATURES, WIDTH, CLASSES, RATE = 3, 4, 3, 0.1
LENGTHS = (9, 1, 26, 4, 8, 12, 5, 3, 16, 2, 7)
KINDS: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"LSTM": nn.LSTM, "GRU": nn.GRU}

Pair = tuple[torch.Tensor, torch.Tensor]


def make_sequences(lengths: Sequence[int] = LENGTHS, dtype: torch.dtype = torch.float64) -> list[Pair]:
    """Inputs (t, FEATURES) and classes (t,)."""
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(length, FEATURES, generator=generator, dtype=dtype),
            torch.randint(CLASSES, (length,), generator=generator),
        )
        for length in lengths
    ]


class Recurrent(nn.Module):
    """Two recurrent layers and a linear one: (n, t, FEATURES) and a state -> logits (n, t, CLASSES) and a state."""

    def __init__(self, kind: str, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.recurrent = KINDS[kind](FEATURES, WIDTH, 2, batch_first=True, dropout=dropout)
        self.logits = nn.Linear(WIDTH, CLASSES)
        self.to(dtype)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)

    def forward(self, inputs: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        outputs, state = self.recurrent(inputs, state)
        return self.logits(outputs), state


def by_lane(lengths: Sequence[int], lanes: int, chunk: int) -> list[list[int]]:
    """The sequences of each lane in order: the longest first to the lane with the fewest chunks, then as given."""
    chunks = [-(-length // chunk) for length in lengths]
    held: list[list[int]] = [[] for _ in range(lanes)]
    for number in sorted(range(len(lengths)), key=lambda number: -chunks[number]):
        loads = [sum(chunks[one] for one in lane) for lane in held]
        held[loads.index(min(loads))].append(number)
    return [sorted(lane) for lane in held]


def detached(state: Any) -> Any:
    return tuple(one.detach() for one in state) if isinstance(state, tuple) else state.detach()


def by_hand(kind: str, lanes: int, chunk: int, epochs: int) -> tuple[list[list[torch.Tensor]], dict[int, torch.Tensor]]:
    """One process that feeds each sequence alone, and cuts the graph after every chunk.

    Returns:
        For each step its loss, the gradients and the updated parameters; and the last epoch's logits of each sequence.
    """
    sequences, model, steps = make_sequences(), Recurrent(kind), []
    logits: dict[int, list[torch.Tensor]] = {}
    for _ in range(epochs):
        logits = {number: [] for number in range(len(sequences))}
        left = [[(n, at) for n in lane for at in range(0, len(sequences[n][1]), chunk)]
                for lane in by_lane(LENGTHS, lanes, chunk)]  # fmt: skip
        states: dict[int, Any] = {}
        while any(left):
            total, count = torch.zeros((), dtype=torch.float64), 0
            for lane in left:
                if lane:
                    number, at = lane.pop(0)
                    inputs, classes = (one[at : at + chunk] for one in sequences[number])
                    outputs, state = model(inputs[None], states.get(number))
                    states[number] = detached(state)
                    logits[number].append(outputs[0].detach())
                    total, count = total + cross_entropy(outputs[0], classes, reduction="sum"), count + len(classes)
            loss = total / count
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.sub_(RATE * gradient)
            steps.append([loss.detach(), *gradients, *(one.detach().clone() for one in model.parameters())])
    return steps, {number: torch.cat(parts) for number, parts in logits.items()}
