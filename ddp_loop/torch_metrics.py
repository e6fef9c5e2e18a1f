"""Metrics of torchmetrics over all ranks: their states per shard, merged in the order of the shards.

A metric of torchmetrics keeps states, such as the true positives of each class, and says how two of them become one.
Each shard gives a state of its own here, and the states are merged in the shards' order: the result is the same as
on one process, and its bits do not depend on the ranks. The metric's own synchronization is off.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from functools import reduce
from typing import Any

import torch

from ddp_loop.distributed import World

_SUM = "dim_zero_sum"
_CAT = "dim_zero_cat"  # torchmetrics' names of its functions
_EXTREMES = {"dim_zero_max": torch.amax, "dim_zero_min": torch.amin}
_REMEDY = "Compute it from dl.predict's output, for instance with scikit-learn."
_Form = tuple[torch.dtype, tuple[int, ...]]


def _each(name: str, metric: Any) -> dict[str, Any]:
    """A metric, or the metrics of a collection, by the names of their results.

    Raises:
        TypeError: it is no metric of torchmetrics.
    """
    if hasattr(metric, "items") and hasattr(metric, "keep_base"):
        return {f"{name}_{key}": one for key, one in metric.items()}
    if hasattr(metric, "items") and hasattr(metric, "compute_groups"):
        return {f"{name}_{key}": one for key, one in metric.items(keep_base=False, copy_state=False)}
    missing = [part for part in ("_reductions", "update", "compute", "reset", "clone") if not hasattr(metric, part)]
    if missing:
        raise TypeError(
            f"metrics= takes metrics of torchmetrics by name. Got {type(metric).__name__} for {name!r}. Pass a "
            "function as an argument of its own: evaluate(model, batches, accuracy=hits)."
        )
    return {name: metric}


def _check(name: str, metric: Any) -> None:
    """Raise ValueError where states cannot be merged exactly."""
    if parts := [one for one in metric.modules() if one is not metric and hasattr(one, "_reductions")]:
        raise ValueError(
            f"A metric must keep all of its states itself. {name} ({type(metric).__name__}) wraps "
            f"{type(parts[0]).__name__}, whose states depend on the order of the updates, or are not its own. Pass "
            f"{type(parts[0]).__name__} itself. {_REMEDY}"
        )
    for state, reduction in metric._reductions.items():
        kind = getattr(reduction, "__name__", str(reduction))
        if kind not in (_SUM, _CAT, *_EXTREMES):
            how = "a mean of means" if kind == "dim_zero_mean" else f"{kind}" if reduction else "no rule"
            raise ValueError(
                f"The states of a metric must be sums, maxima, minima or lists, to be merged exactly. {name} "
                f"({type(metric).__name__}) has {how} for {state}. {_REMEDY}"
            )
        start = metric._defaults[state]
        if isinstance(start, list) and kind != _CAT:
            raise ValueError(
                f'A metric\'s list must have the reduction "cat", since shards have unequally many samples. {name} '
                f"({type(metric).__name__}) has {kind} for the list {state}. Call add_state({state!r}, [], "
                'dist_reduce_fx="cat").'
            )
        if kind == _SUM and bool(start.any()):
            raise ValueError(
                f"A metric's sum must start at 0, since each shard's is added. {name} ({type(metric).__name__}) starts "
                f"{state} at another value. Add it in the metric's compute."
            )
    if not metric._reductions:
        raise ValueError(f"A metric must have states. {name} ({type(metric).__name__}) has none. {_REMEDY}")


class MetricStates:
    """The states of metrics of torchmetrics, of this rank's shards.

    Args:
        metrics: by name; also collections, whose parts get the name of the collection before theirs.
        device: of the states.

    Raises:
        TypeError, ValueError: something else, or a metric whose states cannot be merged exactly.
    """

    def __init__(self, metrics: Mapping[str, Any], device: torch.device) -> None:
        self._metrics: dict[str, Any] = {}
        if not hasattr(metrics, "items"):
            raise TypeError(
                f"metrics= takes metrics of torchmetrics by name. Got {type(metrics).__name__}. Pass a dict: "
                'metrics={"f1": MulticlassF1Score(10)}.'
            )
        for name, metric in metrics.items():
            for key, one in _each(str(name), metric).items():
                _require_new([key], self._metrics)
                _check(key, one)
                own = one.clone()  # the caller's keeps its state
                own.sync_on_compute = own._to_sync = False
                own.reset()
                self._metrics[key] = own.to(device)
        self._states: dict[str, dict[int, dict[str, torch.Tensor]]] = {name: {} for name in self._metrics}

    @property
    def names(self) -> list[str]:
        """The names of the results, but for metrics with several values."""
        return list(self._metrics)

    def update(self, number: int, output: Any, others: tuple[Any, ...]) -> None:
        """Take a shard.

        Args:
            number: of the shard, in the order of the data.
            output, others: the arguments of the metrics.
        """
        for name, metric in self._metrics.items():
            metric.reset()
            metric.update(output, *others)
            states = {state: getattr(metric, state) for state in metric._reductions}
            self._states[name][number] = {
                state: torch.cat([one.reshape(1) if one.dim() == 0 else one for one in value])
                if isinstance(value, list)
                else value.clone()
                for state, value in states.items()
                if not isinstance(value, list) or value
            }
            metric.reset()

    def compute(self, world: World) -> dict[str, float]:
        """Return the results over all shards of all ranks, by name. Every rank must call this.

        Raises:
            ValueError: a result that is neither a number nor a row of numbers.
        """
        found: dict[str, float] = {}
        for name, metric in self._metrics.items():
            for state, reduction in metric._reductions.items():
                pieces = {n: one[state] for n, one in self._states[name].items() if state in one}
                start = metric._defaults[state]
                whole = self._merged(pieces, reduction.__name__, world)
                if whole is not None:
                    value = [whole] if isinstance(start, list) else whole
                    setattr(metric, state, value)
            metric._update_count = max(1, metric._update_count)
            metric._computed = None
            numbers = _numbers(name, metric.compute())
            _require_new(numbers, found)
            found |= numbers
        return found

    def _merged(self, pieces: dict[int, torch.Tensor], kind: str, world: World) -> torch.Tensor | None:
        """All ranks' pieces as one state; None if no rank has any."""
        forms: list[tuple[int, _Form]] = [(n, (one.dtype, tuple(one.shape))) for n, one in pieces.items()]
        everywhere = sorted(one for rank in world.gather(forms, "states of metrics") for one in rank)
        if not everywhere:
            return None
        sizes = [int(torch.Size(shape).numel()) for _, (_, shape) in everywhere]
        dtypes = [dtype for (_, (dtype, _)), size in zip(everywhere, sizes, strict=True) if size]  # as torch.cat does
        dtype = reduce(torch.promote_types, dtypes or [everywhere[0][1][0]])
        flat = torch.zeros(sum(sizes), dtype=dtype, device=world.device)
        at = 0
        places = {}
        for (number, (_, shape)), size in zip(everywhere, sizes, strict=True):
            places[number] = slice(at, at + size), shape
            at += size
        for number, one in pieces.items():
            flat[places[number][0]] = one.to(world.device, dtype).reshape(-1)
        if flat.numel():
            world.sum(flat.view(torch.uint8))  # of one rank's bytes and zeros
        parts = [flat[place].view(shape) for place, shape in places.values()]
        if kind == _CAT:
            return torch.cat(parts)
        if kind in _EXTREMES:
            return _EXTREMES[kind](torch.stack(parts), 0)
        whole = parts[0].clone()
        for one in parts[1:]:
            whole += one
        return whole


def _require_new(names: Iterable[str], known: Container[str]) -> None:
    """Raise ValueError where two results would have one name, such as a collection's and a metric's."""
    if both := [name for name in names if name in known]:
        raise ValueError(f"A metric's result must have a name of its own. Two are named {both[0]!r}. Rename one.")


def _numbers(name: str, result: Any) -> dict[str, float]:
    """A metric's result as numbers by name: of several, `name_0`, or `name_key`."""
    if isinstance(result, Mapping):
        return {key: one for part, value in result.items() for key, one in _numbers(f"{name}_{part}", value).items()}
    if isinstance(result, torch.Tensor | float | int) and (not isinstance(result, torch.Tensor) or result.numel() == 1):
        return {name: float(result)}
    if isinstance(result, torch.Tensor) and result.dim() == 1:
        return {f"{name}_{place}": float(one) for place, one in enumerate(result)}
    what = type(result).__name__
    remedy = _REMEDY
    if isinstance(result, torch.Tensor):
        what = f"shape {tuple(result.shape)}"
        remedy = f"dl.confusion_matrix(model, batches, classes=...) counts pairs of classes. {_REMEDY}"
    raise ValueError(f"A metric's result must be a number, or numbers in one dimension. {name} gave {what}. {remedy}")
