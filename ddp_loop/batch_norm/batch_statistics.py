"""Batch-norm statistics of the whole mini-batch, pooled from the batch statistics of its shards.

[Note: Capture] torch keeps no batch statistics, but with momentum 1 its running statistics are just those. So
while a layer's forward runs in a shard, it works on a pair of spare buffers with momentum 1; a second call in
the same shard gets a second pair. The layer's own buffers are not touched before the fold, so every shard
starts from the same ones. A call that finds other buffers in the layer than its own is one with buffers of the
caller's (`torch.func.functional_call`): torch moves these.

[Note: Forwards of their own] A subclass may give torch other values than it is given (transposed ones, a part of
them), read its running statistics, or leave them alone. So its spare buffers hold what its own ones do, and what it
gives to `F.batch_norm` is taken there (`custom_layers`); what it writes into them itself, with its momentum, is read
behind it.

[Note: Unseen calls] Hooks run where Python calls a layer. Code that was compiled or recorded before they were there
does not know them: torch.compile's is compiled anew; what else moves a layer's own buffers in a shard is an error.

[Note: Far means] torch rounds a shard's mean in float32: at mean 1,000 and deviation 1 it is off by 7e-5, and
the pooled variance then by 1e-5. Where a mean lies far from 0 against the deviation, what is left of it is
computed in a second pass over the values and travels beside it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.hooks import RemovableHandle

from ddp_loop.accelerators import accelerator_of
from ddp_loop.batch_norm.custom_layers import BatchNormInterceptor, CustomNorm
from ddp_loop.batch_norm.pooled import LayerGroup, RecomputeGuard
from ddp_loop.determinism import same_bits
from ddp_loop.distributed import each_module

BatchNorm = _BatchNorm
_FAR = 64.0  # means further than so many deviations from 0; closer ones put less than 2e-6 into the variance
_SPARE = ("running_mean", "running_var", "num_batches_tracked")


def is_synced(layer: nn.Module) -> bool:
    """Whether a layer takes its statistics from all ranks itself."""
    return bool(getattr(layer, "is_synced", False))


def batch_norm_layers(modules: Mapping[str, nn.Module]) -> dict[str, BatchNorm]:
    """All layers at and below `modules` that keep running batch-norm statistics, each once, by name."""
    return {
        name: layer
        for name, layer in each_module(modules).items()
        if isinstance(layer, BatchNorm) and layer.running_mean is not None and not is_synced(layer)
    }


def other_norm_layers(modules: Mapping[str, nn.Module], watched: Mapping[str, BatchNorm]) -> list[nn.Module]:
    """All other layers at and below `modules` with running statistics, which they move themselves."""
    known = set(watched.values())
    return [
        layer
        for layer in each_module(modules).values()
        if isinstance(layer, _NormBase) and layer.running_mean is not None and layer not in known
    ]


@dataclass(slots=True)
class BatchStatistics:
    """One call's batch statistics: `count` values behind each channel, mean + rest, unbiased variance."""

    count: int
    mean: torch.Tensor
    rest: torch.Tensor
    variance: torch.Tensor
    momentum: float = 0.0  # of an own norm's call


def refine_statistics(
    values: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What rounding took from the mean of each channel, (C,), and the biased variance taken in a second pass, (C,).

    Where the mean lies not far, and on a GPU (asking would hold the host up), these are 0 and None.
    """
    if not accelerator_of(values.device).is_host or mean.dtype != torch.float32 or not _is_far(mean, variance):
        return torch.zeros_like(mean), None
    rows = values.detach().transpose(0, 1).reshape(len(mean), -1) - mean.unsqueeze(1)
    rest = rows.mean(1, keepdim=True)
    # torch's own is that around the rounded mean with channels_last: off by 1e-3 at mean 10,000, deviation 1.
    return rest.squeeze(1).to(mean.dtype), (rows - rest).square_().mean(1).to(mean.dtype)


def _is_far(mean: torch.Tensor, variance: torch.Tensor) -> bool:
    means, variances = mean.numpy(), variance.numpy()  # of some ten numbers NumPy finds it in 3 microseconds, not 20
    return bool((means * means > _FAR**2 * variances).any())


class StatisticsHook:
    """A norm layer's forward hooks, before and after. A copy of the layer, by deepcopy or pickle, is not watched."""

    def __init__(self, statistics: BatchNormStatistics | None = None, number: int = 0, *, is_own: bool = False) -> None:
        self._statistics, self._number, self._is_own = statistics, number, is_own

    def __call__(
        self, layer: Any, inputs: tuple[Any, ...], named: dict[str, Any], *output: torch.Tensor | None
    ) -> None:
        if self._statistics is None:
            return
        if self._is_own:
            (self._statistics.leave_own if output else self._statistics.enter_own)(self._number)
        elif output:
            self._statistics.after(self._number, layer, (*inputs, *named.values()), output[0])
        else:
            self._statistics.before(self._number, layer)

    def __reduce__(self) -> tuple[type[StatisticsHook], tuple[()]]:  # deepcopy asks it too
        return StatisticsHook, ()


def _by_buffers(layers: Mapping[str, BatchNorm]) -> tuple[list[BatchNorm], list[int]]:
    """The layers that have buffers of their own, and for each of all layers the number of the one with its buffers."""
    first: dict[tuple[int, ...], int] = {}
    found: list[BatchNorm] = []
    numbers: list[int] = []
    owner: dict[int, tuple[int, ...]] = {}
    for name, layer in layers.items():
        key = tuple(id(layer._buffers.get(one)) for one in _SPARE)
        for one in _SPARE:
            if layer._buffers.get(one) is not None and owner.setdefault(id(layer._buffers[one]), key) != key:
                raise ValueError(
                    f"batch-norm layers share all of their running statistics or none; {name} shares {one} alone "
                    "with another layer: share the layer itself"
                )
        if key not in first:
            first[key] = len(found)
            found.append(layer)
        numbers.append(first[key])
    return found, numbers


def has_own_forward(layer: BatchNorm) -> bool:
    """Whether its forward is the user's: see [Note: Forwards of their own]."""
    return type(layer).forward is not BatchNorm.forward or "forward" in layer.__dict__


def _compile_anew() -> None:
    """Have torch.compile forget what it compiled before hooks were there: it does not look for new ones by itself."""
    dynamo, compiling = sys.modules.get("torch._dynamo"), sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is not None and compiling is not None:
        codes = getattr(compiling, "input_codes", None)
        if codes is None or codes.seen:
            dynamo.reset()


def _few(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class BatchNormStatistics:
    """Watches `layers` through the shards of a step and moves their running statistics once.

    `open()` begins a pass; `recording()` starts a shard's list of captures; `discard()` to `go_on()` is its backward,
    and what is called in it (recomputation) leaves no trace; `stop()` hands the layers back to torch.

    Args:
        layers: by name. Those that share their buffers are taken for one, called several times.
        own_norms: layers of the user's own, by name.
        others: layers that move their running statistics themselves, in forward; but not in backward.

    Raises:
        ValueError: layers that share some of their buffers, but not all.
    """

    def __init__(
        self,
        layers: Mapping[str, BatchNorm],
        own_norms: Mapping[str, CustomNorm] | None = None,
        others: Iterable[nn.Module] = (),
    ) -> None:
        known, numbers = _by_buffers(layers)
        own = list((own_norms or {}).values())
        self.layers: list[BatchNorm | CustomNorm] = [*known, *own]
        self._known = len(known)
        self._names = list(layers)
        self._entered: list[BatchNormInterceptor | None] = []
        self.problem: RuntimeError | None = None  # what was found in the shards since the pass was opened
        self._captures: list[list[BatchStatistics]] | None = None
        self._active = False
        self._own: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
        self._opened: torch.Tensor | list[int] | None = None
        self._recomputed = RecomputeGuard(others)
        self._spared: dict[int, dict[str, Any]] = {}
        self._momenta: dict[int, float | None] = {}  # in the shard's calls; NaN if they differ
        self._within: dict[int, tuple[BatchNormInterceptor, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._counts: dict[tuple[float, ...], torch.Tensor] = {}
        self._grouped: dict[tuple[int, ...], list[LayerGroup]] = {}
        self._hooks: list[RemovableHandle] = []
        watched: list[tuple[int, nn.Module]] = list(zip(numbers, layers.values(), strict=True))
        for number, module in [*watched, *((n, norm.module) for n, norm in enumerate(own, self._known))]:
            hook = StatisticsHook(self, number, is_own=number >= self._known)
            self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(hook, always_call=True, with_kwargs=True))
        if self.layers:
            _compile_anew()

    def release(self) -> None:
        """Take the hooks away."""
        self.stop()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def open(self) -> None:
        """Begin a pass over shards: the layers' buffers of now are their own ones."""
        self.problem = None
        if not self.layers:
            return
        self._own = [
            (layer.running_mean, layer.running_var)
            if isinstance(layer, CustomNorm)
            else (layer._buffers["running_mean"], layer._buffers["running_var"])  # without nn.Module's __getattr__
            for layer in self.layers
        ]
        self._opened = self._look()

    def recording(self) -> list[list[BatchStatistics]]:
        """Begin a shard: the captures of each layer, in the order of its calls, will stand in the list returned."""
        self._active = True
        self._captures = [[] for _ in self.layers]
        return self._captures

    def discard(self) -> None:
        """Keep nothing of what is called from now on, and leave the running statistics alone."""
        self._captures = None
        if self._recomputed.layers:
            self._recomputed.begin()

    def go_on(self, captures: list[list[BatchStatistics]]) -> None:
        """Add to a shard's captures again."""
        if self._recomputed.layers:
            self._recomputed.end()
        self._captures = captures

    def stop(self) -> None:
        """End the shard: layers called from now on move their own statistics, as torch does."""
        if self._active and self.layers and self.problem is None:
            self._require_unmoved()
            self._require_one_momentum()
        self._momenta.clear()
        self._active, self._captures = False, None
        if self._recomputed.layers:
            self._recomputed.end()

    def _look(self) -> torch.Tensor | list[int] | None:
        """What shows that a layer's own buffers were moved: on the CPU their bits, on a GPU their versions alone."""
        own = [one for pair in self._own[: self._known] for one in pair if one is not None]
        if not own or accelerator_of(own[0].device).is_asynchronous:
            return [tracked._version for layer in self.layers if (tracked := layer.num_batches_tracked) is not None]
        return torch.cat(own)

    def _require_unmoved(self) -> None:
        now, before = self._look(), self._opened
        if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
            moved = not torch.equal(now, before) and not same_bits(now, before)  # NaN equals nothing
        else:
            moved = now != before
        if moved:
            self.problem = RuntimeError(
                "running statistics of batch norm are moved by the fold alone, by those of the whole mini-batch; in a "
                f"shard something else moved them, unseen, in one of {_few(self._names)} (code that was compiled, "
                "scripted or recorded before the Loop was made, or F.batch_norm on a layer's buffers?): "
                "make the Loop first, or call the layers themselves"
            )

    def _require_one_momentum(self) -> None:
        for number, momentum in self._momenta.items():
            now = self.layers[number].momentum
            if momentum != now:
                self.problem = self.problem or RuntimeError(
                    "the fold moves running statistics, by the momentum that a batch-norm layer has behind the shard; "
                    f"one of {_few(self._names)} was called with another one, and now has {now}: change it between "
                    "steps, and turn track_running_stats off around a call that is to move nothing"
                )

    # -- capture -------------------------------------------------------------------------------------------

    def before(self, number: int, layer: BatchNorm) -> None:
        """Give a layer its spare buffers, if its shard is watched."""
        mean = layer.running_mean
        if is_synced(layer):
            raise RuntimeError(
                "a model is synced before its Loop is made; this one was after it: sync_batch_norm first"
            )
        if not (self._active and layer.training) or number in self._spared or mean is None:
            return
        if not layer.track_running_stats:
            return  # torch moves nothing; a script may turn it off and on around a call
        buffers = layer._buffers
        own_mean, own_variance = self._own[number]
        if mean is not own_mean or buffers["running_var"] is not own_variance:
            return  # the caller's: [Note: Capture]
        self._spared[number] = {"momentum": layer.momentum, **{name: buffers.get(name) for name in _SPARE}}
        layer.__dict__["momentum"] = 1.0  # past nn.Module's __setattr__, which takes a microsecond
        buffers["num_batches_tracked"] = None
        if has_own_forward(layer) and own_variance is not None:
            self._look_within(number, layer, mean, own_variance)
        else:
            buffers["running_mean"], buffers["running_var"] = torch.zeros_like(mean), torch.zeros_like(mean)

    def _look_within(self, number: int, layer: BatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """See [Note: Forwards of their own]."""
        spare = mean.clone(), variance.clone()
        layer._buffers["running_mean"], layer._buffers["running_var"] = spare
        momentum = self._spared[number]["momentum"]

        def take(inputs: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, told: float) -> None:
            if told not in (1.0, momentum):
                self.problem = self.problem or RuntimeError(
                    f"a batch-norm layer moves its statistics by its momentum; a {type(layer).__name__}, whose forward "
                    f"is its own, gives F.batch_norm {told:g}, and its momentum is {momentum}: set layer.momentum"
                )
            self._capture(number, inputs, mean, variance)

        interception = BatchNormInterceptor(*spare, take)
        interception.__enter__()  # type: ignore[no-untyped-call]
        self._within[number] = interception, spare

    def after(self, number: int, layer: BatchNorm, inputs: tuple[Any, ...], output: torch.Tensor | None) -> None:
        """Take what the spare buffers hold, and put the layer's own back."""
        if number not in self._spared:
            return
        spared = self._spared.pop(number)
        mean, variance = layer.running_mean, layer.running_var
        is_moved = is_torch = number not in self._within
        if not is_torch:
            interception, spare = self._within.pop(number)
            interception.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            is_moved = mean is not spare[0] or variance is not spare[1] or spare[0]._version > 0
        momentum = layer.__dict__["momentum"] = spared.pop("momentum")
        self._momenta[number] = momentum if self._momenta.get(number, momentum) == momentum else math.nan
        layer._buffers.update(spared)
        if output is None or mean is None or variance is None:
            return  # forward raised
        if is_torch:
            self._capture(number, inputs[0], mean, variance)
        elif is_moved and self._captures is not None:  # how the values lie is not known
            capture = BatchStatistics(inputs[0].numel() // len(mean), mean, torch.zeros_like(mean), variance)
            self._captures[number].append(capture)

    def _capture(
        self, number: int, inputs: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, momentum: float = 0.0
    ) -> None:
        if self._captures is not None:
            count = inputs.numel() // inputs.shape[1]
            rest, biased = refine_statistics(inputs, mean, variance)
            if biased is not None:
                variance = biased * (count / max(count - 1, 1))
            self._captures[number].append(BatchStatistics(count, mean, rest, variance, momentum))

    def enter_own(self, number: int) -> None:
        """Begin the forward of a norm layer of the user's own: see [Note: Interception]."""
        interception = None
        if self._active:
            interception = BatchNormInterceptor(*self._own[number], partial(self._capture, number))
            interception.__enter__()  # type: ignore[no-untyped-call]
        self._entered.append(interception)

    def leave_own(self, number: int) -> None:
        """It is over, or raised."""
        interception = self._entered.pop()
        if interception is not None:
            interception.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    # -- rows ----------------------------------------------------------------------------------------------

    def width(self, calls: tuple[int, ...]) -> int:
        """Columns of a row: each call's count, its channels' means, rests, variances, and an own norm's momentum."""
        return sum(group.width for group in self._groups(calls))

    def _groups(self, calls: tuple[int, ...]) -> list[LayerGroup]:
        """The layers that are called a first time, a second time, ..."""
        if calls not in self._grouped:
            each = [[n for n, times in enumerate(calls) if times > call] for call in range(max(calls, default=0))]
            self._grouped[calls] = [LayerGroup(numbers, [self.layers[n] for n in numbers]) for numbers in each]
        return self._grouped[calls]

    def pack(self, captures: list[list[BatchStatistics]], calls: tuple[int, ...], row: torch.Tensor) -> None:
        """Write a shard's captures into its row: by call, counts, means, rests, variances, own norms' momenta."""
        pieces: list[torch.Tensor] = []
        for call, group in enumerate(self._groups(calls)):
            found = [captures[number][call] if call < len(captures[number]) else None for number in group.numbers]
            pieces.append(self._on_device(tuple(0 if one is None else one.count for one in found), row))
            for kind in ("mean", "rest", "variance"):
                for one, size in zip(found, group.sizes, strict=True):
                    pieces.append(row.new_zeros(size) if one is None else getattr(one, kind).to(row.dtype))
            momenta = tuple(0.0 if (one := found[place]) is None else one.momentum for place in group.own)
            pieces.append(self._on_device(momenta, row))
        if pieces:
            torch.cat(pieces, out=row)

    def _on_device(self, counts: tuple[float, ...], like: torch.Tensor) -> torch.Tensor:
        """Counts as a tensor; kept, since the copy to a GPU would hold the host up and they are few."""
        if counts not in self._counts:
            if len(self._counts) > 64:  # sequences of ever other lengths
                self._counts.clear()
            self._counts[counts] = torch.tensor(counts, dtype=like.dtype).to(like.device)
        return self._counts[counts]

    def apply(self, rows: torch.Tensor, calls: tuple[int, ...], keep: torch.Tensor | None = None) -> None:
        """Move the running statistics by the pooled ones of all shards, rows (S, width), one call after another.

        Args:
            keep: whether they stay as they are, shape (), bool.
        """
        groups = self._groups(calls)
        for group, columns in zip(groups, rows.split([group.width for group in groups], dim=1), strict=True):
            group.move(columns, keep)
