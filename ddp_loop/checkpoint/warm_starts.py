"""A new run that begins with the weights of another one: `Loop(resume_from=...)`."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ddp_loop.checkpoint.serialization import SerializedState, from_tree, to_tree
from ddp_loop.checkpoint.state import read_on_rank_zero, restore_part
from ddp_loop.checkpoint.storage import CHECKPOINTS
from ddp_loop.checkpoint.weights import job_of, plain_names, read_checkpoint
from ddp_loop.distributed import World, listed

Source = str | os.PathLike[str]
_SHOWN = 4  # differences in an error
_REMEDY = (
    "Build the same network, or load by hand what fits: model.load_state_dict(dl.load(RUN), strict=False) before the "
    "Loop."
)


def warm_start(
    source: Source, world: World, state: Mapping[str, object], folder: Path | None, *, resume: bool | None
) -> str | None:
    """Give modules and optimizers the values of another run, unless the run in the folder resumes.

    A part of `state` takes those of the part of its name. An optimizer takes its moments, and keeps the script's
    settings, such as the learning rate. Other parts count steps, as schedules do, and start from scratch. Every rank
    must call this.

    Args:
        source: a run folder, of which the newest checkpoint is taken, or the folder of a checkpoint.
        world: from `join_world`.
        state: the job's objects by name.
        folder: the new run's; None without one.
        resume: of `Loop`.

    Returns:
        Where the values came from; None where the run resumes.

    Raises:
        ValueError: no run, no valid checkpoint, no module of its name in `state`, or one of another structure.
        OSError: the checkpoint cannot be read now.
        PeerFailed: another rank raised one of these.
    """
    takers = {name: one for name, one in state.items() if isinstance(one, nn.Module | Optimizer)}

    def read() -> tuple[tuple[str, str], SerializedState] | None:
        if folder is not None and resume is not False and any((folder / CHECKPOINTS).glob("step-*")):
            return None
        found = read_checkpoint(source, say=world.say)
        job = job_of(found)
        parts = {name: job[name] for name in takers if name in job}
        if not any(isinstance(takers[name], nn.Module) for name in parts):
            modules = [name for name, one in takers.items() if isinstance(one, nn.Module)]
            raise ValueError(
                f"resume_from={str(source)!r} has none of the modules in state=: {found.path} has "
                f"{', '.join(job)}; state= has {', '.join(modules)}. Use the same names."
            )
        others = [name for name in state if name not in parts]
        fresh = f"; {listed(others)} start{'s' if len(others) == 1 else ''} from scratch" if others else ""
        return (f"starts with {listed(list(parts))} of {found.path}{fresh}", str(found.path)), to_tree(parts)

    taken = read_on_rank_zero(world, read)
    if taken is None:
        return None
    (line, origin), packed = taken
    with world.failing_together(TypeError, ValueError, RuntimeError):
        _restore(takers, from_tree(packed), origin)
    world.say(line)
    return origin


def _restore(takers: Mapping[str, object], kept: Mapping[str, Any], origin: str) -> None:
    """Check all parts, and only then change them."""
    fitting: list[tuple[object, Any]] = []
    for name, values in kept.items():
        taker = takers[name]
        if isinstance(taker, Optimizer):
            values, wrong = _moments_for(taker, values)
        else:
            values, wrong = _weights_for(taker, values)
        if wrong:
            more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise ValueError(f"state[{name!r}] does not fit {origin}: {'; '.join(wrong[:_SHOWN])}{more}. {_REMEDY}")
        fitting.append((taker, values))
    for taker, values in fitting:
        restore_part(taker, values)


def _weights_for(module: Any, values: Any) -> tuple[Any, list[str]]:
    """The state dict with the names of this module, and what does not fit."""
    own: Mapping[str, Any] = module.state_dict()
    short = plain_names(OrderedDict((name, name) for name in own))
    kept = plain_names(values)
    wrong = [f"{name} is missing there" for name in short if name not in kept]
    wrong += [f"{name} is there alone" for name in kept if name not in short]
    for name, full in short.items():
        here, there = (getattr(one, "shape", None) for one in (own[full], kept.get(name)))
        if name in kept and here != there:
            wrong.append(f"{name} has shape {_shape(here)}, there {_shape(there)}")
    if wrong:
        return values, wrong
    named = OrderedDict((short[name], one) for name, one in kept.items())
    if hasattr(kept, "_metadata"):
        named._metadata = kept._metadata  # type: ignore[attr-defined]
    return named, []


def _moments_for(optimizer: Optimizer, values: Any) -> tuple[Any, list[str]]:
    """The optimizer's state with the settings of this one, and what does not fit."""
    own = optimizer.state_dict()["param_groups"]
    kept = values["param_groups"]
    here, there = ([str(len(group["params"])) for group in groups] or ["none"] for groups in (own, kept))
    wrong = [] if here == there else [f"its groups have {listed(here)} parameters, there {listed(there)}"]
    lacking = {setting for group in kept for setting in optimizer.defaults if setting not in group}
    if lacking:
        wrong.append(f"it is a {type(optimizer).__name__}, and the one there had no {listed(sorted(lacking))}")
    if wrong:
        return values, wrong
    groups = [{**mine, "params": group["params"]} for mine, group in zip(own, kept, strict=True)]
    return {**values, "param_groups": groups}, []


def _shape(shape: Any) -> str:
    return "none" if shape is None else str(tuple(shape))
