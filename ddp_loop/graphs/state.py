"""The state of a job as a graph sees it: addresses and settings that it takes for granted, and how to restore them.

[Note: A quick look] Facts are compared in each call. In Python that takes 0.5 ms for 150 modules, a tenth of what their
eager launches take. So a `Look` holds the objects that the facts are taken from, and compares them in a few calls of C
functions, in a sixth of that time. The facts themselves are compared only where an object has been replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, zip_longest
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp_loop.batch_norm import BatchNormStatistics, watching
from ddp_loop.determinism import preserved_streams, restore_streams, streams
from ddp_loop.distributed import each_module

_SETTINGS = frozenset((bool, int, float, str, complex, type(None)))
_VALUES, _PLACE, _WANTS = methodcaller("values"), methodcaller("data_ptr"), attrgetter("requires_grad")
_HOOKS = attrgetter("_forward_pre_hooks")
Fact = tuple[str, str, Any]  # of whom, its name, its value


class Look:
    """The objects that the facts of a state are taken from. See [Note: A quick look].

    Args:
        modules: all modules.
        optimizers: those whose settings and state count.
    """

    def __init__(self, modules: list[nn.Module], optimizers: list[Optimizer]) -> None:
        self.modules = modules
        self._owners = [(one, one.state, one.param_groups, len(one.param_groups)) for one in optimizers]
        tables: list[dict[Any, Any]] = [
            table for one in modules for table in (one._parameters, one._buffers, one._modules)
        ]
        for one in optimizers:
            tables += [*one.param_groups, one.state, *one.state.values()]
        self._tables, self._values = tables, [value for table in tables for value in table.values()]
        self._getters = [(_settings_of(one), one.__dict__) for one in modules]
        self._tensors = [value for value in self._values if isinstance(value, torch.Tensor)]
        self._tensors += [
            one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]
        ]
        self._seen = self._now()

    def _now(self) -> Any:
        lengths = [*map(len, self._tables), *(len(place) for _, place in self._getters)]
        settings = [get(place) for get, place in self._getters]
        return lengths, settings, list(map(_PLACE, self._tensors)), list(map(_WANTS, self._tensors))

    def is_alike(self) -> bool:
        """Whether all objects are the same ones, at the same addresses."""
        for optimizer, state, groups, number in self._owners:
            if optimizer.state is not state or optimizer.param_groups is not groups or len(groups) != number:
                return False
        same = map(is_, chain.from_iterable(map(_VALUES, self._tables)), self._values)
        return bool(self._now() == self._seen) and all(same)


def _settings_of(module: nn.Module) -> Any:
    """What gets a module's settings from its attributes."""
    return itemgetter("training", *(key for key, one in module.__dict__.items() if type(one) in _SETTINGS))


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
        self._look: Look | None = None  # at the time of the last facts

    @property
    def modules(self) -> dict[str, nn.Module]:
        """All modules, each once, by name."""
        return each_module(self._roots)

    @property
    def statistics(self) -> BatchNormStatistics | None:
        """What captures the batch-norm layers' calls in a shard of a `Loop`; None where nothing does."""
        modules = self._look.modules if self._look is not None else self.modules.values()
        return watching(filter(_HOOKS, modules))

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

    def is_as_before(self) -> bool:
        """Whether the facts are those of the last time."""
        return self._look is not None and self._look.is_alike()

    def facts(self, *, updates: bool) -> list[Fact]:
        """What a graph takes for granted, with `updates` that of the optimizers too."""
        found: list[Fact] = []
        modules = self.modules
        self._look = Look(list(modules.values()), list(self.optimizers.values()) if updates else [])
        for name, module in modules.items():
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
