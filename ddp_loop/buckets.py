"""Buckets: neighbouring parameters' gradients in one flat tensor, so that one sum carries them all.

[Note: Buckets] A bucket is one flat tensor; a parameter's gradient is a view into it with the parameter's own
strides (contiguous views under channels_last and a fused optimizer gave silently wrong weights). Buckets are
in the reverse order of the parameters, which is about the order in which backward finishes them, and never
change while the set of parameters that want a gradient stays: torch's DDP rebuilds its own after the first
step, and a resumed run differs. Sums start strictly in bucket order, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn import Parameter


def grouped(parameters: list[Parameter], bucket_bytes: int) -> list[list[Parameter]]:
    """Neighbours of one dtype and device put together, up to `bucket_bytes`; a larger one stands alone."""
    groups: list[list[Parameter]] = []
    filled = 0
    for parameter in parameters:
        last = groups[-1][0] if groups else None
        same = last is not None and (last.dtype, last.device) == (parameter.dtype, parameter.device)
        if not same or filled + parameter.nbytes > bucket_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(parameter)
        filled += parameter.nbytes
    return groups


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its storage without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class Bucket:
    """Neighbouring parameters' gradients in one flat tensor, and behind them `tail` elements for other sums."""

    def __init__(self, parameters: list[Parameter], tail: int, dtype: torch.dtype, device: torch.device) -> None:
        self.parameters = parameters
        length = sum(parameter.numel() for parameter in parameters)
        self.flat = torch.zeros(length + tail, dtype=dtype, device=device)
        self.gradients, self.tail = self.flat[:length], self.flat[length:]
        self.views = list(self._views())
        self.given = [False] * len(parameters)
        self._version = self.flat._version
        self.missing = set(parameters)  # those that the backward under way has not reached
        self.work: dist.Work | None = None

    def _views(self) -> Iterator[torch.Tensor]:
        offset = 0
        for parameter in self.parameters:
            piece = self.flat[offset : offset + parameter.numel()]
            dense = is_dense(parameter)
            yield (piece.as_strided(parameter.shape, parameter.stride()) if dense else piece.view(parameter.shape))
            offset += parameter.numel()

    def open(self) -> None:
        """Begin a pass over the shards: nothing is collected."""
        self.work = None
        self.given = [False] * len(self.parameters)
        self._version = self.flat._version

    def collect(self) -> None:
        """Bring the parameters' gradients in: one copy for those that autograd made elsewhere."""
        views, gradients = [], []
        for number, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            gradient = parameter.grad
            self.given[number] = gradient is not None
            if gradient is view:
                continue
            if gradient is None:
                view.zero_()
                continue
            if gradient.is_sparse:
                raise ValueError(
                    "gradients must be dense to be folded; a parameter of shape "
                    f"{tuple(parameter.shape)} got a sparse one: make the embedding with sparse=False"
                )
            views.append(view)
            gradients.append(gradient)
            parameter.grad = view
        if views:
            torch._foreach_copy_(views, gradients)
        self._version = self.flat._version

    def taken_away(self) -> Parameter | None:
        """A parameter whose gradient was collected and is not there any more, or not as it was; None if all are."""
        for parameter, view, given in zip(self.parameters, self.views, self.given, strict=True):
            if given and parameter.grad is not view:
                return parameter
        changed = self.work is None and self.flat._version != self._version
        return self.parameters[0] if changed and self.parameters else None
