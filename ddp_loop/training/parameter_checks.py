"""What a script does to parameters that a fold cannot make right: hooks on them, and training them outside of `state`.

[Note: Hooks] A hook on a parameter runs in each shard's backward, on that shard's part of the gradient. A clamp is then
applied S times, to S parts. With one shard the part is the whole gradient, so the hook stays and has its plain meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter

from torch.nn import Parameter

HOOKS, AFTER_HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
Hook = Callable[..., object]


def find_hook(names: Mapping[Parameter, str], is_own: Callable[[Hook], bool]) -> str | None:
    """The error that names the first parameter on which the script has a hook; None without one. See [Note: Hooks].

    Args:
        names: of all parameters.
        is_own: whether a post-accumulate hook is the package's.
    """
    for parameter, name in names.items():
        if not parameter.requires_grad:
            continue  # it runs none
        if HOOKS(parameter):
            return _refusal(name, "register_hook")
        others = AFTER_HOOKS(parameter) or {}
        if not all(map(is_own, others.values())):
            remedy = " An optimizer in backward is not supported. Call optimizer.step() after the fold, too."
            return _refusal(name, "register_post_accumulate_grad_hook") + remedy
    return None


def _refusal(name: str, kind: str) -> str:
    return (
        "A hook on a parameter would run once for each shard, on that shard's part of the gradient. "
        f"{name} has one of {kind}. Change and read .grad after step.fold(), when it is the whole mini-batch's."
    )
