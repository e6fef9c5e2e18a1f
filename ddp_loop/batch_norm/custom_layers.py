"""Norm layers written by the user, which pass running statistics of their own to `F.batch_norm`.

[Note: Interception] Such a layer may keep its momentum anywhere, and its kernel writes its buffers unseen. So
`F.batch_norm` is intercepted while the layer's forward runs in a shard. A call on the layer's own buffers gets spare
ones and momentum 1 instead, and the spare buffers then hold the batch statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

Take = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]
_KEYS = ("running_mean", "running_var")
_GIVEN: dict[Any, tuple[str, ...]] = {
    functional.batch_norm: ("input", *_KEYS, "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: ("input", "weight", "bias", *_KEYS, "training", "momentum", "eps", "cudnn_enabled"),
}


class CustomNorm:
    """Adapts a module with its own running statistics to `LayerGroup`. Each call carries its momentum."""

    num_batches_tracked = None
    momentum = None

    def __init__(self, module: nn.Module, keys: tuple[str, str] = _KEYS) -> None:
        self.module = module
        self._keys = keys
        mean = module._buffers[keys[0]]
        self.num_features = 0 if mean is None else len(mean)

    @property
    def running_mean(self) -> torch.Tensor | None:
        """Shape (C,)."""
        return self.module._buffers[self._keys[0]]

    @property
    def running_var(self) -> torch.Tensor | None:
        """Shape (C,)."""
        return self.module._buffers[self._keys[1]]


def custom_norms(modules: Mapping[str, nn.Module]) -> dict[str, CustomNorm]:
    """The user's own classes among `modules` that may pass buffers to `F.batch_norm`, by name."""
    found = {}
    for name, module in modules.items():
        if isinstance(module, _NormBase | torch.jit.ScriptModule):
            continue
        keys = next((pair for pair in _pairs(module) if _may_be_statistics(*map(module._buffers.get, pair))), None)
        if keys is not None:
            found[name] = CustomNorm(module, keys)
    return found


def _pairs(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Pairs of buffer names for mean and variance: torch's, and similar ones in a module without children."""
    yield _KEYS
    for key in () if module._modules else module._buffers:  # everything called in a watched forward is slower
        for other in ("variance", "var"):
            if "mean" in key and key.replace("mean", other) in module._buffers:
                yield key, key.replace("mean", other)


def _may_be_statistics(mean: torch.Tensor | None, variance: torch.Tensor | None) -> bool:
    if mean is None or variance is None or mean is variance:
        return False
    return mean.dim() == 1 and mean.shape == variance.shape and mean.is_floating_point()


class BatchNormInterceptor(TorchFunctionMode):
    """While active, `F.batch_norm` leaves the given buffers unchanged and passes the batch statistics to `take`.

    Args:
        mean: the buffer of the running mean, (C,).
        variance: the buffer of the running variance, (C,).
        take: called with the input, the batch's mean and unbiased variance, (C,) each, and the momentum.
    """

    def __init__(self, mean: torch.Tensor | None, variance: torch.Tensor | None, take: Take) -> None:
        super().__init__()
        self._mean = mean
        self._variance = variance
        self._take = take

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, with spare buffers where it is `F.batch_norm` on the given ones."""
        names = _GIVEN.get(func) if callable(func) else None
        if names is None:
            return func(*args, **(kwargs or {}))
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        mean = self._mean
        variance = self._variance
        is_own = given.get(_KEYS[0]) is mean and given.get(_KEYS[1]) is variance
        if not is_own or not given.get("training") or mean is None or variance is None:
            return func(*args, **(kwargs or {}))
        momentum = given.get("momentum", 0.1)
        spare_mean = torch.zeros_like(mean)
        spare_variance = torch.zeros_like(variance)
        output = func(**{**given, _KEYS[0]: spare_mean, _KEYS[1]: spare_variance, "momentum": 1.0})
        self._take(given["input"], spare_mean, spare_variance, float(momentum))
        return output
