"""Checks for uses of parameters that a fold cannot make right: hooks on them, and training outside of `state`.

[Note: Hooks] A hook on a parameter runs in each shard's backward, on that shard's part of the gradient. A clamp is then
applied S times, to S parts. With one shard the part is the whole gradient, so the hook stays and has its plain meaning.

[Note: Outside of state] A criterion with parameters that is in no part of `state` gets gradients which nothing sums
over the ranks and nothing clears. Whether a loss depends on such a parameter is in its graph alone, before backward
frees it. A walk takes half a microsecond for each operation, milliseconds for a large network, so it is made in passes
1, 2, 4, 8, 16, 32 and each 64th one, and in the first shard. A gradient alone does no harm: perceptual losses often
leave their networks unfrozen. So a found parameter is an error only once it has moved, which checksums show, even after
writes that torch does not count. On a GPU the host waits for them, in the pass after each walk that found something,
and at the next walk.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import compress
from operator import attrgetter

import torch
from torch import nn
from torch.nn import Parameter

from ddp_loop.determinism import checksum_all

HOOKS = attrgetter("_backward_hooks")
AFTER_HOOKS = attrgetter("_post_accumulate_grad_hooks")


class ArrivalHook(partial[None]):
    """The package's own hook on a parameter, of any loop."""


class Arrivals(list[Parameter]):
    """Parameters in the order in which backward has made their gradients; its `append` is a hook of the package too."""


def _is_of_package(hook: Callable[..., object]) -> bool:
    return isinstance(getattr(hook, "__self__", hook), ArrivalHook | Arrivals)


def find_hook(names: Mapping[Parameter, str]) -> str | None:
    """The error that names the first parameter on which the script has a hook; None without one. See [Note: Hooks].

    Args:
        names: of all parameters.
    """
    for parameter, name in names.items():
        kind = remedy = ""
        if HOOKS(parameter):
            kind = "register_hook"
        elif not all(map(_is_of_package, (AFTER_HOOKS(parameter) or {}).values())):
            kind = "register_post_accumulate_grad_hook"
            remedy = " An optimizer in backward is not supported. Call optimizer.step() after the fold, too."
        if kind and parameter.requires_grad:  # else it runs none
            return (
                "A hook on a parameter would run once for each shard, on that shard's part of the gradient. "
                f"{name} has one of {kind}. Change and read .grad after step.fold(), when it is the whole mini-batch's."
                f"{remedy}"
            )
    return None


class OutsideParameters:
    """Finds parameters that a script trains and that are in no part of its state. See [Note: Outside of state].

    Args:
        known: all parameters of the state.
    """

    def __init__(self, known: Collection[Parameter]) -> None:
        self._known = known
        self._found: dict[Parameter, None] = {}
        self._sums = torch.empty(0, device="cpu")  # of those, when they were found

    def open(self, *, again: bool) -> None:
        """Begin a pass with a look at its losses, or the one after it.

        Args:
            again: whether it has a look.

        Raises:
            RuntimeError: a parameter that was found before has moved.
        """
        if self._found:
            for parameter in compress(self._found, (self._checksums() != self._sums).tolist()):
                raise RuntimeError(
                    "Every parameter that a step's loss trains must be part of state, or each rank trains it alone. "
                    f"{_owner_of(parameter)} got gradients and was changed, and no module or optimizer in state has "
                    "it. Add its module: Loop(state=dict(..., criterion=criterion)). If it is trained elsewhere, call "
                    "requires_grad_(False) on it while this loss is computed."
                )
        if again:
            self._found = {}

    def look(self, loss: torch.Tensor) -> None:
        """Find the parameters that a loss depends on, before its backward."""
        new = {leaf: None for leaf in _leaves_of(loss) if leaf not in self._known and leaf not in self._found}
        if new:
            self._found |= new
            self._sums = self._checksums()

    def _checksums(self) -> torch.Tensor:
        return checksum_all(list(map(torch.Tensor.detach, self._found)))


def _leaves_of(loss: torch.Tensor) -> Iterator[Parameter]:
    """The parameters that a loss depends on."""
    waiting = [loss.grad_fn]
    visited = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if isinstance(variable := getattr(node, "variable", None), Parameter):
            yield variable
        waiting += [below for below, _ in node.next_functions]


def _owner_of(parameter: Parameter) -> str:
    """A parameter outside of the state in words, by a module of the process that has it."""
    for found in gc.get_objects():  # some tens of milliseconds, for an error
        if issubclass(type(found), nn.Module):
            for key, value in found.__dict__.get("_parameters", {}).items():
                if value is parameter:
                    return f"{key} of a {type(found).__name__}, shape {tuple(parameter.shape)},"
    return f"A parameter of shape {tuple(parameter.shape)}"
