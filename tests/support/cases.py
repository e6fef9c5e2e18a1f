"""Small float64 networks, each with one thing that data-parallel training gets wrong, and data for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import spectral_norm

CLASSES = 3


@dataclass(frozen=True)
class Case:
    """A network, the shape of its samples, and what is changed while it trains."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    criterion: Callable[[], nn.Module] | None = None
    before_step: Callable[[nn.Module, int], None] = field(default=lambda model, step: None)


class TwiceUsed(nn.Module):
    """One batch-norm layer called twice in a forward, on different values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv1d(2, 5, 1), nn.BatchNorm1d(5), nn.Conv1d(5, 5, 1)
        self.last = nn.Linear(20, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(torch.tanh(self.norm(self.second(x))).flatten(1))  # type: ignore[no-any-return]


class Branching(nn.Module):
    """A branch that runs only for shards whose first sample says so; another that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(6, CLASSES), nn.Linear(6, CLASSES), nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.always(x)
        return y + self.sometimes(x) if x[0, 0] > 0 else y  # type: ignore[no-any-return]


class Tied(nn.Module):
    """One weight used in two places, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 6), nn.Linear(6, 6)
        self.out.weight = self.into.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.scale * self.out(torch.tanh(self.into(x))))  # type: ignore[no-any-return]


class TwoTypes(nn.Module):
    """float32 in the middle of float64."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.middle, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.into(x)).to(self.middle.weight.dtype)
        return self.out(self.middle(x).to(self.out.weight.dtype))  # type: ignore[no-any-return]

    def double(self) -> TwoTypes:
        super().double()
        self.middle.float()
        return self


class LearnedTemperature(nn.Module):
    """Cross entropy at a temperature that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits * self.temperature, labels)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def _conv(dimensions: int, **norm: Any) -> Callable[[], nn.Module]:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    batch_norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dimensions - 1]

    def build() -> nn.Module:
        return nn.Sequential(
            conv(2, 4, 3),
            batch_norm(4, **norm),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * 2**dimensions, CLASSES),
        )

    return build


def _frozen() -> nn.Module:
    model = _conv(2)()
    model[1].eval()  # type: ignore[index]
    model[1].weight.requires_grad_(False)  # type: ignore[index]
    return model


def _spectral() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, CLASSES))


def _partly_frozen() -> nn.Module:
    model = _mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


def _unfreeze_at_5(model: nn.Module, step: int) -> None:
    if step == 5:
        model[0].requires_grad_(True)  # type: ignore[index]


CASES: dict[str, Case] = {
    "no batch norm": Case(_mlp, (6,)),
    "batch norm 1d": Case(_conv(1), (2, 4)),
    "batch norm 2d": Case(_conv(2), (2, 4, 4)),
    "batch norm 3d": Case(_conv(3), (2, 4, 4, 4)),
    "momentum None": Case(_conv(2, momentum=None), (2, 4, 4)),
    "affine off": Case(_conv(2, affine=False), (2, 4, 4)),
    "a frozen layer": Case(_frozen, (2, 4, 4)),
    "a layer used twice": Case(TwiceUsed, (2, 4)),
    "spectral norm": Case(_spectral, (6,)),
    "a branch not always taken": Case(Branching, (6,)),
    "unfrozen at step 5": Case(_partly_frozen, (6,), before_step=_unfreeze_at_5),
    "tied weights and a scalar": Case(Tied, (6,)),
    "two dtypes": Case(TwoTypes, (6,)),
    "a criterion with parameters": Case(_mlp, (6,), LearnedTemperature),
}


SPOILING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # added to a loss of these outputs
    "loss": lambda outputs: outputs.sum() * torch.nan,
    "value": lambda outputs: outputs.new_tensor(torch.nan),  # whose gradients are finite
    "gradient": lambda outputs: (outputs.sum() * 0).sqrt(),  # 0, with a gradient of 0 * inf
}


def make(case: Case) -> tuple[nn.Module, nn.Module | None]:
    """The network and the criterion of a case, in float64, always with the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = case.build().double()
        return model, None if case.criterion is None else case.criterion().double()


def make_data(shape: tuple[int, ...], samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples around mean 2 with their classes, always the same."""
    generator = torch.Generator().manual_seed(11)
    inputs = 2 * torch.randn(samples, *shape, generator=generator, dtype=torch.float64)
    return inputs + 0.5, torch.randint(CLASSES, (samples,), generator=generator)
