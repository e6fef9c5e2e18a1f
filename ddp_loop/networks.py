"""The networks of the examples: a digit classifier, a denoising autoencoder, a surface.

Plain modules. Their initial weights come from torch's global generator, which `join_world` seeds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def digit_classifier(classes: int = 10, width: int = 20) -> nn.Sequential:
    """A classifier of 28x28 grey images: (N, 1, 28, 28) in [0, 1] -> logits (N, classes).

    Three convolutions with batch norm and relu, then a linear layer. Ten classes give 123,090 parameters in 14 tensors,
    and 6 floating buffers (mean and variance of three batch norms).

    Args:
        classes: the number of classes.
        width: the channels of each convolution.
    """
    return nn.Sequential(
        *_convolution_norm_relu(1, width, kernel_size=5, padding=0),
        *_convolution_norm_relu(width, width, kernel_size=3, padding=1),
        *_convolution_norm_relu(width, width, kernel_size=3, padding=1),
        _Flatten(),
        nn.Linear(width * 24 * 24, classes),
    )


class _Flatten(nn.Module):
    """(N, C, H, W) -> (N, C H W); the gradient has the memory format of the values.

    The gradient of nn.Flatten is always contiguous. With channels last, the layers before it would then work on two
    formats in backward, which takes several times as long.
    """

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        flat: torch.Tensor = _Flattening.apply(values)  # type: ignore[no-untyped-call]
        return flat


class _Flattening(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        is_channels_last = values.is_contiguous(memory_format=torch.channels_last)
        ctx.form = values.shape, torch.channels_last if is_channels_last else torch.contiguous_format
        return values.flatten(1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        shape, memory_format = ctx.form
        return gradient.reshape(shape).contiguous(memory_format=memory_format)


def _convolution_norm_relu(channels: int, width: int, kernel_size: int, padding: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, width, kernel_size, padding=padding), nn.BatchNorm2d(width), nn.ReLU()


def denoising_autoencoder() -> nn.Sequential:
    """A denoising autoencoder of 32x32 grey images: (N, 1, 32, 32) -> (N, 1, 32, 32), clipped to [0, 1].

    Three convolutions with pooling, down to (32, 4, 4), then three transposed convolutions. 12,609 parameters, of which
    72 are weights of the first convolution.
    """
    end = nn.Conv2d(8, 1, kernel_size=1)
    if end.bias is not None:
        # The middle of the clip: with torch's default, 93 of 200 seeds gave 0 everywhere and no gradient.
        nn.init.constant_(end.bias, 0.5)
    return nn.Sequential(
        *_down(1, 8),
        *_down(8, 16),
        *_down(16, 32),
        *_up(32, 32),
        *_up(32, 16),
        *_up(16, 8),
        end,
        nn.Hardtanh(0.0, 1.0),
    )


def _down(channels: int, out_channels: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, out_channels, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)


def _up(channels: int, out_channels: int) -> tuple[nn.Module, ...]:
    return nn.ConvTranspose2d(channels, out_channels, kernel_size=2, stride=2), nn.ReLU()


def surface_network(linear_end: bool = False) -> nn.Sequential:
    """A network for a surface z(x, y): (N, 2) -> (N, 1), layers 2-20-5-1, 171 parameters.

    With a relu after all three layers (the default) no output is negative. If all outputs are 0, the gradient is 0, and
    the network cannot train: so for 61 of 200 seeds.

    Args:
        linear_end: whether to leave out the last relu.
    """
    layers = [nn.Linear(2, 20), nn.ReLU(), nn.Linear(20, 5), nn.ReLU(), nn.Linear(5, 1)]
    return nn.Sequential(*layers, *([] if linear_end else [nn.ReLU()]))
