"""The arithmetic of synced batch norm: one rank's statistics, and its values normalised by those of all ranks.

[Note: Passes] On the CPU these are torch's kernels of local batch norm, split where the ranks communicate. Forward
takes two passes over the values for the statistics and one to normalise, as torch does. Backward takes one pass for the
sums and two for the gradient; torch takes one for the gradient, but its kernel does not accept the sums of other ranks.
On a GPU each is one kernel of torch's SyncBatchNorm.

[Note: float32 by columns] If the channels lie innermost (channels last, or no positions), torch's CPU kernel adds
float32 values one by one. For 36,864 values with mean 1,000 and deviation 1, the mean is off by 5e-3.
`refine_statistics` corrects this error and that of rounding the mean, and computes the variance around the true mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddp_loop.accelerators import accelerator_of
from ddp_loop.batch_norm.captures import refine_statistics

_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def dense(values: torch.Tensor) -> torch.Tensor:
    """The values, (N, C, ...), as the kernels need them: contiguous or channels last; otherwise a contiguous copy."""
    return values.contiguous(memory_format=_format(values))


def _format(values: torch.Tensor) -> torch.memory_format:
    return next((one for one in _FORMATS if values.is_contiguous(memory_format=one)), torch.contiguous_format)


def statistics_dtype(values: torch.Tensor) -> torch.dtype:
    """The dtype of the statistics passed to the kernels: float64 for float64 values, else float32."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def statistics(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each channel of dense values (N, C, ...), both (C,) float64; zeros without values.

    Also accurate in float32 for a mean far from 0, except on a GPU for the rounding of the mean itself.
    """
    channels = values.shape[1]
    if values.numel() == 0:
        nothing = values.new_zeros(2, channels, dtype=torch.float64)
        return nothing[0], nothing[1]
    spare = None
    if values.dtype != statistics_dtype(values):  # without it the CPU's kernel rounds the statistics to bfloat16
        spare = values.new_zeros(channels, dtype=torch.float32)
    mean, variance = torch.batch_norm_update_stats(values, spare, spare, 0.0)
    refined = refine_statistics(values, mean, variance)
    if refined is None:
        return mean.double(), variance.double()
    rest, biased = refined
    return mean.double() + rest, biased.double()


def normalised(
    values: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    deviation_inverse: torch.Tensor,
) -> torch.Tensor:
    """weight (values - mean) deviation_inverse + bias, in the dtype and memory format of the values."""
    weight = _as(mean, weight)
    bias = _as(mean, bias)
    if values.numel() == 0:
        return torch.empty_like(values)
    if accelerator_of(values.device).has_batch_norm_kernels:
        return torch.batch_norm_elemt(values, weight, bias, mean, deviation_inverse, 0.0)
    return _scaled(values, mean, deviation_inverse if weight is None else deviation_inverse * weight, bias)


def sums_of_gradient(
    gradient: torch.Tensor, values: torch.Tensor, mean: torch.Tensor, deviation_inverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum(gradient) and sum(gradient (values - mean)) of each channel, both (C,) in the type of `mean`.

    Args:
        gradient: in the memory format of `values`.
    """
    if values.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    if accelerator_of(values.device).has_batch_norm_kernels:
        pair = torch.batch_norm_backward_reduce(gradient, values, mean, deviation_inverse, None, True, False, False)
        return pair[0], pair[1]
    one = torch.ones_like(mean)
    _, by_values, alone = torch.ops.aten.native_batch_norm_backward(
        gradient, values, None, None, None, mean, one, True, 0.0, [False, True, True]
    )
    return alone, by_values


def gradient_of_values(
    gradient: torch.Tensor,
    values: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    deviation_inverse: torch.Tensor,
    sums: torch.Tensor,
    total: torch.Tensor,
) -> torch.Tensor:
    """Gradient of the sum of all ranks' losses with respect to `values`.

        weight d (gradient - sums[0] / M - (values - mean) d^2 sums[1] / M)          d = deviation_inverse

    Args:
        sums: those of `sums_of_gradient`, added over all ranks, (2, C) float64.
        total: M, the number of values per channel on all ranks, (1,) float64.

    Source: Ioffe, Szegedy: Batch Normalization, 2015, section 3.
    """
    weight = _as(mean, weight)
    if values.numel() == 0:
        return torch.zeros_like(values)
    if accelerator_of(values.device).has_batch_norm_kernels:
        alone = sums[0].to(mean.dtype)
        by_values = sums[1].to(mean.dtype)
        return torch.batch_norm_backward_elemt(
            gradient, values, mean, deviation_inverse, weight, alone, by_values, total.to(torch.int32)
        )
    inverse = deviation_inverse.double()
    scale = inverse if weight is None else inverse * weight
    shift = -scale * sums[0] / total
    slope = -scale * inverse * inverse * sums[1] / total
    result = _scaled(values.to(mean.dtype), mean, slope.to(mean.dtype), shift.to(mean.dtype))
    result.addcmul_(gradient.to(mean.dtype), scale.to(mean.dtype).view(1, -1, *[1] * (values.dim() - 2)))
    return result.to(values.dtype)


def _scaled(values: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    """(values - mean) scale + shift in one pass: torch's batch norm in evaluation, at variance 1 and eps 0."""
    return torch.native_batch_norm(values, scale, shift, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]


def _as(mean: torch.Tensor, parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.to(mean.dtype)


class Normalisation(torch.autograd.Function):
    """Values normalised by the statistics of all ranks, which depend on the values of all ranks.

    The gradient with respect to a rank's values is that of the sum of all ranks' losses. Those with respect to
    weight and bias are the rank's own part, to be summed over the ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        deviation_inverse: torch.Tensor,
        total: torch.Tensor,
        exchange: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        masked: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Normalise.

        Args:
            total: the number of values per channel on all ranks, (1,) float64.
            exchange: takes this rank's `sums_of_gradient`; returns those of all, (ranks, 2, C) float64 in rank order.
            masked: returns a gradient without the parts that do not count.
        """
        ctx.exchange = exchange
        ctx.masked = masked
        ctx.save_for_backward(values, weight, mean, deviation_inverse, total)
        return normalised(values, weight, bias, mean, deviation_inverse)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients. Every rank must call this if the values require a gradient."""
        with torch.no_grad():
            found = Normalisation._gradients(ctx, gradient)
        return _differentiable_once(found) if torch.is_grad_enabled() else found  # under create_graph=True

    @staticmethod
    def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight, mean, deviation_inverse, total = ctx.saved_tensors
        gradient = ctx.masked(gradient).contiguous(memory_format=_format(values))
        alone, by_values = sums_of_gradient(gradient, values, mean, deviation_inverse)
        of_values = None
        if ctx.needs_input_grad[0]:
            sums = ctx.exchange(alone, by_values).sum(0)
            of_values = gradient_of_values(gradient, values, weight, mean, deviation_inverse, sums, total)
        of_weight = by_values * deviation_inverse if ctx.needs_input_grad[1] else None
        of_bias = alone if ctx.needs_input_grad[2] else None
        return of_values, of_weight, of_bias, *(None,) * 5  # autograd gives them their parameters' types


_SECOND_DERIVATIVE = (
    "Synced batch norm has no second derivative, as a gradient penalty needs one. The sums over ranks in its backward "
    "are not differentiated. Use dl.local_batch_norm(model), or a norm without the batch, such as nn.GroupNorm."
)


def _differentiable_once(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    """The gradients, part of a graph whose backward raises."""
    refuse = torch._C._functions.DelayedError(_SECOND_DERIVATIVE, 1)
    return tuple(None if one is None else refuse(one.detach().requires_grad_()) for one in gradients)
