"""Replicas: all modules, parameters and buffers of a job, of the same structure and initial values on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp_loop.distributed.world import World

Rule = TypeVar("Rule")


def find_modules(state: Mapping[str, object]) -> dict[str, nn.Module]:
    """The modules in the state of a job, by name."""
    return {name: value for name, value in state.items() if isinstance(value, nn.Module)}


def each_module(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """All modules at and below `modules`, each once, by the first of its names."""
    seen: set[nn.Module] = set()
    return {
        name: module
        for prefix, root in modules.items()
        for name, module in root.named_modules(memo=seen, prefix=prefix)
    }


@dataclass(slots=True)
class SharedBuffer:
    """The tensor of a buffer, all its names, and the modules that have it."""

    tensor: torch.Tensor
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


def each_buffer(modules: Mapping[str, nn.Module]) -> list[SharedBuffer]:
    """All buffers at and below `modules`, each once."""
    found: dict[int, SharedBuffer] = {}
    for prefix, root in modules.items():
        for owner_name, owner in root.named_modules(prefix=prefix, remove_duplicate=False):
            for key, tensor in owner._buffers.items():
                if tensor is None:
                    continue
                shared = found.setdefault(id(tensor), SharedBuffer(tensor))
                shared.names.append(f"{owner_name}.{key}")
                if not any(one is owner and other == key for one, other in shared.places):
                    shared.places.append((owner, key))
    return list(found.values())


def version_of(tensor: torch.Tensor | None) -> int:
    """The number of a tensor's writes; 0 of an inference tensor, which counts none."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def under_all_names(modules: Mapping[str, nn.Module], rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Rules for buffers, under every name of each buffer; of several rules for one buffer the first."""
    spread = dict(rules)
    for shared in each_buffer(modules) if rules else ():
        given = [rules[name] for name in shared.names if name in rules]
        for name in shared.names if given else ():
            spread.setdefault(name, given[0])
    return spread


def find_parameters(state: Mapping[str, object]) -> dict[str, Parameter]:
    """All parameters of a job's modules, then those that only its optimizers have; each once, by name.

    Raises:
        ValueError: a parameter of a lazy module has no shape yet.
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
            raise _without_shape(name)
        if isinstance(one, torch.Tensor):
            found.setdefault(one, name)  # type: ignore[arg-type]  # optimizers take plain tensors too
    return {name: parameter for parameter, name in found.items()}


def _without_shape(name: str) -> ValueError:
    return ValueError(
        f"Every parameter and buffer needs a shape before the Loop is made. {name} has none. Run the model once on one "
        "sample."
    )


def find_tensors(state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a job, each once, by the first of its names.

    Raises:
        ValueError: a parameter or buffer of a lazy module has no shape yet.
    """
    tensors: dict[str, torch.Tensor] = dict(find_parameters(state))
    for shared in each_buffer(find_modules(state)):
        if isinstance(shared.tensor, nn.parameter.UninitializedBuffer):
            raise _without_shape(shared.names[0])
        tensors[shared.names[0]] = shared.tensor
    return tensors


def check_layout(tensors: Mapping[str, torch.Tensor], world: World) -> None:
    """Raise ValueError if a parameter or buffer cannot be sent to other ranks or compared with theirs."""
    for name, tensor in tensors.items():
        if (odd := _why_odd(tensor, world.size)) is not None:
            what, remedy = odd
            raise ValueError(
                "Every parameter and buffer of state must be a dense tensor with memory of its own for each element. "
                f"{name} {what}. {remedy}."
            )


def _why_odd(tensor: torch.Tensor, ranks: int) -> tuple[str, str] | None:
    """What is unusual about the memory of a tensor, and the remedy; None if nothing is."""
    plain = "Keep it as a plain attribute of the module, made alike on every rank, not as a buffer"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"is {'nested' if tensor.is_nested else tensor.layout}", plain
    if tensor.is_quantized and ranks > 1:
        return f"is quantized, {tensor.dtype}", f"{plain}, or keep its int_repr()"
    if tensor.is_meta:
        return "is on the meta device", "Give it values first"
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return "is expanded", "Register it as tensor.clone(memory_format=torch.contiguous_format)"
    return None


def check_structure(tensors: Mapping[str, torch.Tensor], world: World, what: str = "the structure of state") -> None:
    """Raise ValueError on every rank unless all have the same tensors. Every rank must call this.

    The error names the first tensor whose shape, dtype or memory format differs. Where a rank makes another collective
    instead, its error contains `what`.
    """
    forms = {name: (tuple(t.shape), str(t.dtype), t.stride()) for name, t in tensors.items()}
    for rank, other in enumerate(world.gather(forms, what)):
        if other == forms and list(other) == list(forms):
            continue
        differing = [name for name in dict.fromkeys([*forms, *other]) if forms.get(name) != other.get(name)]
        if not differing:
            at = next(k for k, (own, its) in enumerate(zip(forms, other, strict=True)) if own != its)
            raise ValueError(
                "The state must have the same structure on every rank. Its names come in another order: number "
                f"{at + 1} is {list(forms)[at]} on rank {world.rank} and {list(other)[at]} on rank {rank}. Sort them, "
                "or write them out. A set has another order in each process."
            )
        name = differing[0]
        here = forms.get(name, "nothing")
        there = other.get(name, "nothing")
        raise ValueError(
            f"The state must have the same structure on every rank. {name} is {here} on rank {world.rank} and "
            f"{there} on rank {rank} (shape, dtype, strides). Build the same model on all ranks."
        )
