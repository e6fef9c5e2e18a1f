"""Replicas: the same structure on every rank, and the same values to start from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp_loop.world import World


def find_modules(state: Mapping[str, object]) -> dict[str, nn.Module]:
    """The modules among a job's state, by name."""
    return {name: value for name, value in state.items() if isinstance(value, nn.Module)}


def find_parameters(state: Mapping[str, object]) -> dict[str, Parameter]:
    """All parameters of a job's modules, then those that only its optimizers know; each once, by name.

    Raises:
        ValueError: a parameter of a lazy module that has no shape yet.
    """
    named: dict[str, torch.Tensor] = {}
    for prefix, module in find_modules(state).items():
        named.update(module.named_parameters(prefix=prefix))
    for prefix, value in state.items():
        if isinstance(value, Optimizer):
            for number, group in enumerate(value.param_groups):
                named.update({f"{prefix}.{number}.{k}": one for k, one in enumerate(group["params"])})
    found: dict[Parameter, str] = {}
    for name, one in named.items():
        if isinstance(one, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"every parameter needs a shape before the Loop is made; {name} has none: run the model once on "
                "one observation"
            )
        if isinstance(one, torch.Tensor):
            found.setdefault(one, name)  # type: ignore[arg-type]  # optimizers take plain tensors too
    return {name: parameter for parameter, name in found.items()}


class Trained:
    """Which parameters of a job want a gradient: `state_dict` of a module does not say it."""

    def __init__(self, state: Mapping[str, object]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, list[str]]:
        """The names of those that want none."""
        return {"frozen": [name for name, one in find_parameters(self._state).items() if not one.requires_grad]}

    def load_state_dict(self, state: Mapping[str, list[str]]) -> None:
        """Freeze those, and no others."""
        for name, one in find_parameters(self._state).items():
            one.requires_grad_(name not in state["frozen"])


def find_tensors(state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a job, by name."""
    tensors: dict[str, torch.Tensor] = dict(find_parameters(state))
    for prefix, module in find_modules(state).items():
        tensors.update(module.named_buffers(prefix=prefix))
    return tensors


def check_structure(tensors: Mapping[str, torch.Tensor], world: World) -> None:
    """Raise ValueError on every rank unless all have the same tensors. Every rank must call this.

    The first name whose shape, dtype or memory format differs is named.
    """
    forms = {name: (tuple(t.shape), str(t.dtype), t.stride()) for name, t in tensors.items()}
    for rank, other in enumerate(world.gather(forms)):
        if other == forms and list(other) == list(forms):
            continue
        names = [*forms, *(name for name in other if name not in forms)]
        differing = [name for name in names if forms.get(name) != other.get(name)]
        name = differing[0] if differing else "the order of names"
        here, there = forms.get(name, "nothing"), other.get(name, "nothing")
        raise ValueError(
            f"the state must have the same structure on every rank; {name} is {here} on rank {world.rank} and "
            f"{there} on rank {rank} (shape, dtype, strides): build the same model on all ranks"
        )


def make_equal(tensors: Mapping[str, torch.Tensor], world: World) -> None:
    """Give every rank the values of rank 0. Every rank must call this."""
    world.broadcast_all(list(tensors.values()))
