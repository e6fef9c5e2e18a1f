"""NaN in a job's parameters, buffers and optimizer states, named.

[Note: Became] A parameter is bad where it is NaN or infinite; a buffer and an optimizer's tensor where they are NaN,
since masks and best scores hold infinity. An element that was bad when the loop began may stay so: masks, rings and
unset values are made so. But the statistics of norm layers are numbers or wrong. The norm of a tensor is NaN exactly if
an element is, so a look costs one norm for each.

[Note: Before the data] When a loss is not finite, a tensor that was bad before the step's data came in explains it, and
the samples are innocent. Right after the fold all tensors are as before the step, but for a rank's own buffers and the
statistics that forward moved. On a GPU the look is one step late, after the bad step's update. Then only what no update
writes was surely bad before, and others are named as bad by now. What was bad when the loop began and has a gradient is
to blame in the first step only, since a finite step could bear it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from ddp_loop.accelerators import HostCopy
from ddp_loop.distributed import World, find_modules, find_parameters, kept_by
from ddp_loop.training.nonfinite import TOLERATE, NonFiniteTensors, OnNonFinite, listed_are

_FIRST = (1, 10)
_EVERY = 100  # steps after which all is looked at
_PARAMETER = "parameter "
_BUFFER = "buffer "

Tensors = dict[str, torch.Tensor]
Marks = list[tuple[list[str], HostCopy]]


def kept_numbers(state: Mapping[str, object]) -> Tensors:
    """The floating-point tensors among a job's parameters, buffers and optimizer states, by name."""
    names: dict[torch.Tensor, str] = {one: name for name, one in find_parameters(state).items()}
    found = {f"{_PARAMETER}{name}": one for one, name in names.items()}
    for prefix, module in find_modules(state).items():
        found |= {f"{_BUFFER}{name}": one for name, one in module.named_buffers(prefix=prefix)}
    for prefix, value in state.items():
        if isinstance(value, Optimizer):
            found |= {name: one for name, one in kept_by(prefix, value, names) if isinstance(one, torch.Tensor)}
    return {name: one for name, one in found.items() if _has_numbers(one)}


def _has_numbers(tensor: torch.Tensor) -> bool:
    there = tensor.layout is torch.strided and not tensor.is_meta
    return there and (tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() > 1))


def statistics(state: Mapping[str, object], *, moved: bool | None = None) -> set[str]:
    """The names of norm layers' statistics; with `moved` only those that forward moves, or does not move."""
    return {
        f"{_BUFFER}{path}.{name}" if path else f"{_BUFFER}{name}"
        for prefix, module in find_modules(state).items()
        for path, layer in module.named_modules(prefix=prefix)
        if isinstance(layer, _NormBase) and moved in (None, layer.training)
        for name in ("running_mean", "running_var")
    }


@torch.no_grad()
def _norms(tensors: Tensors) -> Iterator[tuple[list[str], torch.Tensor]]:
    """The norms of all tensors, by device and dtype, (T,) each: NaN exactly where an element is."""
    groups: dict[tuple[torch.device, torch.dtype], Tensors] = {}
    for name, tensor in tensors.items():
        groups.setdefault((tensor.device, tensor.dtype), {})[name] = tensor.detach()
    for group in groups.values():
        yield list(group), torch.stack(torch._foreach_norm(list(group.values())))


def _marks(tensors: Tensors) -> Marks:
    """The norms of all tensors, perhaps still on their way to the host."""
    return [(names, HostCopy(norms)) for names, norms in _norms(tensors)]


def _suspects(marks: Marks) -> list[str]:
    """The names of tensors whose norm is not finite."""
    found: list[str] = []
    for names, norms in marks:
        finite = norms.wait().isfinite()
        if not bool(finite.all()):
            found += [name for name, one in zip(names, finite.tolist(), strict=True) if not one]
    return found


def _where_bad(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return ~tensor.isfinite() if name.startswith(_PARAMETER) else tensor.isnan()


def _one_of_each_kind(names: Collection[str]) -> list[str]:
    """The first parameter, the first buffer, and the first tensor of an optimizer."""
    kinds = {
        name.split(" ", 1)[0] if name.startswith((_PARAMETER, _BUFFER)) else "": name for name in reversed([*names])
    }
    return [name for name in names if name in kinds.values()]


class NonFiniteStateCheck:
    """Finds tensors of a job that became NaN: at intervals, before a checkpoint, at the end, and when a step is bad.

    Args:
        state: of the job.
        world: from `join_world`.
        rule: "raise", or "skip" and "allow" to print it once.
        local: the names of buffers that are each rank's own.

    Attributes:
        due: the next iteration to call `look` after.
        found: the error of an earlier look.
    """

    def __init__(
        self, state: Mapping[str, object], world: World, rule: OnNonFinite, local: Collection[str] = ()
    ) -> None:
        self._state = state
        self._world = world
        self._raises = rule == "raise"
        self._rule = rule
        self._local = {f"{_BUFFER}{name}" for name in local}
        self._before: Tensors | None = None  # where elements were bad when the loop began
        self._pending: tuple[int, Marks] | None = None
        self.found: FloatingPointError | None = None
        self._told = False
        self.due = 0
        self._began = 0

    def begin(self, iteration: int) -> None:
        """Record what is not finite when the loop begins, after this step; later calls do nothing."""
        if self._before is None:
            self._began = iteration
            tensors = kept_numbers(self._state)
            bad = {name: _where_bad(name, tensors[name]) for name in _suspects(_marks(tensors))}
            self._before = {name: where for name, where in bad.items() if bool(where.any())}

    # -- at intervals --------------------------------------------------------------------------------------

    def look(self, iteration: int) -> None:
        """Look after the fold of this step, if it is time; a later fold raises what is found."""
        self._check_pending()
        if iteration in _FIRST or iteration % _EVERY == 0:
            self._pending = iteration, _marks(kept_numbers(self._state))
            if not self._world.accelerator.is_asynchronous:
                self._check_pending()
        next_looks = (*_FIRST, iteration // _EVERY * _EVERY + _EVERY)
        self.due = iteration + 1 if self._pending else min(one for one in next_looks if one > iteration)

    def _check_pending(self) -> None:
        pending = self._pending
        self._pending = None
        if pending is not None and (suspects := _suspects(pending[1])):
            self.found = self.found or self._judge(self._became(suspects), pending[0])

    def check(self, iteration: int) -> FloatingPointError | None:
        """The error of the state after this step, before a checkpoint of it; the host waits."""
        found = self._check_now(iteration)
        return None if found is None else FloatingPointError(f"{found} No checkpoint of it is written.")

    def take(self) -> Exception | None:
        """What was found, once, for the ranks to raise in a fold."""
        found = self.found
        self.found = None
        return found

    def finish(self, iteration: int) -> None:
        """Look after the last step. Every rank must call this.

        Raises:
            FloatingPointError: something became NaN.
        """
        self._check_pending()
        self._world.raise_if_any_failed(self.take() or self._check_now(iteration))

    def _check_now(self, iteration: int) -> FloatingPointError | None:
        suspects = _suspects(_marks(kept_numbers(self._state)))
        return self._judge(self._became(suspects), iteration) if suspects else None

    def _became(self, suspects: Collection[str]) -> list[str]:
        """Those of the suspects that are bad where they were not when the loop began."""
        before = self._before or {}
        tensors = kept_numbers(self._state)
        never = statistics(self._state)
        return [name for name in suspects if name in tensors and _is_new(name, tensors[name], before, never)]

    def _judge(self, names: list[str], iteration: int) -> FloatingPointError | None:
        if not names:
            return None
        told = listed_are(_one_of_each_kind(names))
        if self._raises:
            return FloatingPointError(
                f"Parameters, buffers and optimizer states must not become NaN. After step {iteration} {told}. Look at "
                f"what writes it (the learning rate, 0 / 0 in a statistic, an average of a bad step). {TOLERATE}"
            )
        if not self._told:
            self._told = True
            self._world.print(
                f'ddp_loop: {told} NaN after step {iteration}; training continues with on_nonfinite="{self._rule}"'
            )
        return None

    # -- a step that is not finite -------------------------------------------------------------------------

    def blame(self, late: bool, iteration: int) -> NonFiniteTensors:
        """What is not finite in a bad step, see [Note: Before the data]. Every rank must call this if it raises.

        Args:
            late: whether the step's update has been made.
            iteration: of the step.

        Returns:
            Names, with their ranks where these differ; only this rank's own where the rule does not raise.
        """
        own = self._blame(late, iteration)
        if not self._raises:
            return own
        every = self._world.gather((own.before, own.by_now), "what is not finite")
        return NonFiniteTensors(*(self._of_ranks([one[kind] for one in every]) for kind in (0, 1)))

    def _blame(self, late: bool, iteration: int) -> NonFiniteTensors:
        tensors = kept_numbers(self._state)
        before = self._before or {}
        moved = statistics(self._state, moved=True)
        still = statistics(self._state, moved=False)
        bad = [
            name
            for name in _suspects(_marks(tensors))
            if name not in moved and bool(_where_bad(name, tensors[name]).any())  # these are no part of a loss
        ]
        used = {name for name in bad if tensors[name].is_leaf and tensors[name].grad is not None}
        if iteration - self._began > 1:  # a step was finite in spite of them
            used.clear()
        new = {name for name in bad if _is_new(name, tensors[name], before, still)} | used  # which are no placeholders
        written = {name for name in bad if name in self._local or (late and not _is_frozen(name, tensors[name], still))}
        sure = [name for name in bad if name in new and name not in written]
        others = [name for name in bad if name not in sure]
        return NonFiniteTensors(
            _one_of_each_kind(sure), _one_of_each_kind([name for name in others if name in new] or others)
        )

    def _of_ranks(self, named: list[list[str]]) -> list[str]:
        said = []
        for name in dict.fromkeys(name for names in named for name in names):
            ranks = [rank for rank, names in enumerate(named) if name in names]
            where = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {len(named)}"
            said.append(name if len(ranks) == len(named) else f"{name} (on {where})")
        return said


def _is_frozen(name: str, tensor: torch.Tensor, still: Collection[str]) -> bool:
    """Whether no step writes it, as a frozen parameter or a statistic that forward does not move."""
    return name in still or (name.startswith(_PARAMETER) and not tensor.requires_grad)


def _is_new(name: str, tensor: torch.Tensor, before: Tensors, never: Collection[str]) -> bool:
    where = _where_bad(name, tensor)
    there = before.get(name)
    if there is not None and there.shape == where.shape and name not in never:
        where = where & ~there.to(where.device)
    return bool(where.any())
