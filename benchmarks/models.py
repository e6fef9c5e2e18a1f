"""Networks of several shapes and sizes, whose steps are measured."""

from __future__ import annotations

import torch
from torch import nn

CLASSES = 10


def mlp(width: int, hidden: int, inputs: int = 32, *, batch_norm: bool = False) -> nn.Module:
    """`hidden` hidden layers of `width`: (N, inputs) -> logits (N, 10)."""
    layers: list[nn.Module] = []
    for number in range(hidden):
        norm = [nn.BatchNorm1d(width)] if batch_norm else []
        layers += [nn.Linear(width if number else inputs, width), *norm, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


class Residual(nn.Module):
    """A residual network of `layers` linear layers of 32: (N, 32) -> logits (N, 10), two tensors per layer.

    The residuals keep gradients from underflowing, and numbers below the smallest normal one are slow.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers - 1))
        self.out = nn.Linear(32, CLASSES)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.hidden:
            rows = torch.add(rows, layer(rows.relu()), alpha=1 / len(self.hidden))
        return self.out(rows)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A mean over the positions of `layers` encoder layers of width 128: (N, length, 16) -> logits (N, 10).

    Four layers have 0.8 million parameters.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.into = nn.Linear(16, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(128, CLASSES)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(self.into(sequences)).mean(1))  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        same = inputs == width and stride == 1
        self.short = nn.Identity() if same else nn.Conv2d(inputs, width, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (self.path(images) + self.short(images)).relu()  # type: ignore[no-any-return]


def resnet18() -> nn.Module:
    """ResNet-18 in its form for CIFAR, 11 million parameters: (N, 3, 32, 32) -> logits (N, 10).

    He, Zhang, Ren, Sun: Deep residual learning for image recognition, 2016. Shortcuts of another width have no norm.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    widths = (64, 64, 128, 128, 256, 256, 512, 512)
    for number, (inputs, width) in enumerate(zip((64, *widths), widths, strict=False)):
        layers.append(_Block(inputs, width, 2 if number in (2, 4, 6) else 1))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))
