"""The state of a job as a graph sees it: addresses and settings that it takes for granted, and how to restore them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp_loop.batch_norm import BatchNormStatistics, watching
from ddp_loop.determinism import preserved_streams, restore_streams, streams
from ddp_loop.distributed import each_module

_SETTINGS = frozenset((bool, int, float, str, complex, type(None)))
Fact = tuple[str, str, Any]  # of whom, its name, its value


class JobState:
    """The modules and optimizers of a job.

    A graph holds addresses and numbers. Facts are what must be equal in two calls, so that one graph serves both: where
    parameters, buffers and the optimizers' state lie, and each setting that is a plain number, a word or a flag.

    Args:
        state: by name, as `Loop` takes it.

    Raises:
        ValueError: no module and no optimizer.
    """

    def __init__(self, state: Mapping[str, object]) -> None:
        self._roots = {name: one for name, one in state.items() if isinstance(one, nn.Module)}
        self.optimizers = {name: one for name, one in state.items() if isinstance(one, Optimizer)}
        if not self._roots and not self.optimizers:
            raise ValueError(
                f"state must have the modules and optimizers that the function uses. Got {dict(state)!r}. Pass what "
                'Loop gets, such as {"model": model, "optimizer": optimizer}.'
            )

    @property
    def modules(self) -> dict[str, nn.Module]:
        """All modules, each once, by name."""
        return each_module(self._roots)

    @property
    def statistics(self) -> BatchNormStatistics | None:
        """What captures the batch-norm layers' calls in a shard of a `Loop`; None where nothing does."""
        return watching(self.modules.values())

    @property
    def parameters(self) -> list[Parameter]:
        """Those of the modules and optimizers, each once."""
        found = [one for module in self.modules.values() for one in module._parameters.values() if one is not None]
        for optimizer in self.optimizers.values():
            found += [one for group in optimizer.param_groups for one in group["params"]]
        return list(dict.fromkeys(found))

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Those of the modules, each once."""
        found = (one for module in self.modules.values() for one in module._buffers.values() if one is not None)
        return list({id(one): one for one in found}.values())

    @property
    def optimizer_tensors(self) -> list[torch.Tensor]:
        """Those of the optimizers' state and settings."""
        found = []
        for optimizer in self.optimizers.values():
            found += [value for kept in optimizer.state.values() for value in kept.values()]
            found += [value for group in optimizer.param_groups for value in group.values()]
        return [one for one in found if isinstance(one, torch.Tensor)]

    def facts(self, *, updates: bool) -> list[Fact]:
        """What a graph takes for granted, with `updates` that of the optimizers too."""
        found: list[Fact] = []
        for name, module in self.modules.items():
            found += [(name, key, one) for key, one in module.__dict__.items() if type(one) in _SETTINGS]
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    found.append((name, key, (parameter.data_ptr(), parameter.requires_grad)))
            found += [(name, key, one.data_ptr()) for key, one in module._buffers.items() if one is not None]
        for name, optimizer in self.optimizers.items() if updates else ():
            for group in optimizer.param_groups:
                found += [(name, key, _fact(one)) for key, one in group.items()]
            for kept in optimizer.state.values():
                found += [(name, key, _fact(one)) for key, one in kept.items()]
        return found

    # -- what must leave no trace --------------------------------------------------------------------------

    @contextmanager
    def restored_if_abandoned(self, device: torch.device) -> Iterator[None]:
        """Where the block raises, restore what it set from Python: nothing that it launched was done."""
        restore, drawn = self._objects(), streams(device)
        try:
            yield
        except BaseException:
            restore()
            restore_streams(drawn)
            raise

    @contextmanager
    def untouched(self, device: torch.device) -> Iterator[None]:
        """Restore buffers and random streams too after a block that was done."""
        values = [(one, one.detach().clone()) for one in self.buffers]
        restore = self._objects()
        with preserved_streams(device):
            try:
                yield
            finally:
                restore()
                with torch.no_grad():
                    for buffer, value in values:
                        buffer.data.copy_(value)  # `.data`: it counts as not written

    def _objects(self) -> Any:
        """What restores the modules' attributes, the gradients and the optimizers' state as objects."""
        modules = [(one.__dict__, one._parameters, one._buffers) for one in self.modules.values()]
        before = [(place, dict(place)) for places in modules for place in places]
        gradients = [(one, one.grad) for one in self.parameters]
        kept = [(one, {key: dict(value) for key, value in one.state.items()}) for one in self.optimizers.values()]
        before += [(group, dict(group)) for one in self.optimizers.values() for group in one.param_groups]

        def restore() -> None:
            for now, then in before:
                _become(now, then)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for optimizer, state in kept:
                _become(optimizer.state, state)

        return restore


def _become(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    now.clear()
    now.update(before)


def _fact(value: Any) -> Any:
    """A setting of an optimizer: of tensors the addresses."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, (list, tuple)):
        return tuple(map(_fact, value))
    return value if type(value) in _SETTINGS else id(value)


def first_difference(before: list[Fact], now: list[Fact]) -> str:
    """In words, the first fact that differs."""
    for old, new in zip_longest(before, now):
        if old != new:
            name, key, _ = new or old
            return f"{name}.{key}"
    return "nothing"
