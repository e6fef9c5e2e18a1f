"""Kernels that only a GPU has, made of the CPU's: fused cells of LSTM and GRU, and those of nn.SyncBatchNorm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_cuda_extension as device
import torch

Tensors = tuple[torch.Tensor, ...]


def _on_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a kernel on the same memory as tensors of the CPU; its results are new tensors of the device."""

    def run(*arguments: Any) -> Any:
        there = next(one.device for one in arguments if isinstance(one, torch.Tensor))
        result = kernel(*(device.alias(one) if isinstance(one, torch.Tensor) else one for one in arguments))
        results = result if isinstance(result, tuple) else (result,)
        moved = tuple(one.contiguous().to(there, non_blocking=True) if one is not None else one for one in results)
        return moved if isinstance(result, tuple) else moved[0]

    return run


def lstm_cell(inputs: Any, hidden: Any, cell: Any, input_bias: Any = None, hidden_bias: Any = None) -> Tensors:
    gates = inputs + hidden
    for bias in (input_bias, hidden_bias):
        gates = gates if bias is None else gates + bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * cell + i * g
    return o * new.tanh(), new, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hidden: Any, grad_cell: Any, cell: Any, new: Any, workspace: Any, has_bias: bool
) -> tuple[Any, ...]:
    i, f, g, o = workspace.chunk(4, 1)
    squashed = new.tanh()
    grad_hidden = torch.zeros_like(new) if grad_hidden is None else grad_hidden
    grad = torch.zeros_like(new) if grad_cell is None else grad_cell
    grad = grad + grad_hidden * o * (1 - squashed * squashed)
    gates = torch.cat(
        [
            grad * g * i * (1 - i),
            grad * cell * f * (1 - f),
            grad * i * (1 - g * g),
            grad_hidden * squashed * o * (1 - o),
        ],
        1,
    )
    return gates, grad * f, gates.sum(0) if has_bias else gates.new_empty(0)


def gru_cell(inputs: Any, hidden: Any, state: Any, input_bias: Any = None, hidden_bias: Any = None) -> Tensors:
    inputs = inputs if input_bias is None else inputs + input_bias
    hidden = hidden if hidden_bias is None else hidden + hidden_bias
    (ir, iz, n), (hr, hz, hn) = inputs.chunk(3, 1), hidden.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    new = (n + r * hn).tanh()
    return new + z * (state - new), torch.cat([r, z, new, state, hn], 1)


def gru_cell_backward(grad: Any, workspace: Any, has_bias: bool) -> tuple[Any, ...]:
    r, z, new, state, hn = workspace.chunk(5, 1)
    of_new = grad * (1 - z) * (1 - new * new)
    of_z = grad * (state - new) * z * (1 - z)
    of_r = of_new * hn * r * (1 - r)
    inputs = torch.cat([of_r, of_z, of_new], 1)
    hidden = torch.cat([of_r, of_z, of_new * r], 1)
    none = grad.new_empty(0)
    biases = (inputs.sum(0), hidden.sum(0)) if has_bias else (none, none)
    return inputs, hidden, grad * z, *biases


def _column(values: Any, like: torch.Tensor) -> Any:
    return None if values is None else values.view(1, -1, *[1] * (like.dim() - 2))


def batch_norm_elemt(rows: Any, weight: Any, bias: Any, mean: Any, inverse: Any, eps: float) -> Any:
    result = (rows.to(mean.dtype) - _column(mean, rows)) * _column(inverse, rows)
    if weight is not None:
        result = result * _column(weight, rows)
    if bias is not None:
        result = result + _column(bias, rows)
    return result.to(rows.dtype)


def batch_norm_backward_reduce(
    grad: Any, rows: Any, mean: Any, inverse: Any, weight: Any, of_input: bool, of_weight: bool, of_bias: bool
) -> Tensors:
    axes = [axis for axis in range(rows.dim()) if axis != 1]
    wide = grad.to(mean.dtype)
    centred = rows.to(mean.dtype) - _column(mean, rows)
    sums, products = wide.sum(axes), (wide * centred).sum(axes)
    return sums, products, products * inverse if of_weight else sums[:0], sums.clone() if of_bias else sums[:0]


def batch_norm_backward_elemt(
    grad: Any, rows: Any, mean: Any, inverse: Any, weight: Any, sums: Any, products: Any, counts: Any
) -> Any:
    number = counts.sum()
    centred = rows.to(mean.dtype) - _column(mean, rows)
    inner = grad.to(mean.dtype) - _column(sums / number, rows)
    inner = inner - centred * _column(inverse * inverse * products / number, rows)
    return (inner * _column(inverse if weight is None else inverse * weight, rows)).to(rows.dtype)


_LIBRARY = torch.library.Library("aten", "IMPL")  # unregisters all when it is freed
KERNELS: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
    "batch_norm_elemt": batch_norm_elemt,
    "batch_norm_backward_reduce": batch_norm_backward_reduce,
    "batch_norm_backward_elemt": batch_norm_backward_elemt,
}
for name, kernel in KERNELS.items():
    _LIBRARY.impl(name, _on_device(kernel), "CUDA")
