"""Batch-norm statistics of the whole mini-batch, pooled from the batch statistics of its shards.

[Note: Capture] torch keeps no batch statistics, but with momentum 1 its running statistics are the batch
statistics. So a layer whose forward runs in a shard gets a pair of spare buffers and momentum 1; a second call in
the same shard gets a second pair. The layer's own buffers do not change before the fold, so every shard starts
from the same values. A layer that holds other buffers than its own was called with the caller's buffers
(`torch.func.functional_call`): torch updates these.

[Note: Custom forwards] A subclass may pass other values to torch than it receives (transposed, or a part of them),
read its running statistics, or not update them. So its spare buffers start as copies of its own, and its call of
`F.batch_norm` is intercepted (`custom_layers`). Statistics that it writes into the buffers itself, with its momentum,
are read after its forward.

[Note: Unseen calls] Hooks run when Python calls a layer. Code that was compiled or recorded before the hooks were
registered does not run them. torch.compile compiles its code anew; any other change of a layer's own buffers in a
shard is an error.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.hooks import RemovableHandle

from ddp_loop.accelerators import accelerator_of, sent
from ddp_loop.batch_norm.captures import NO_VALUES, BatchStatistics, Captures, FlatStatistics
from ddp_loop.batch_norm.custom_layers import BatchNormInterceptor, CustomNorm
from ddp_loop.batch_norm.pooled import LayerGroup, RecomputeGuard
from ddp_loop.determinism import same_bits
from ddp_loop.distributed import each_module

BatchNorm = _BatchNorm
_SPARE = ("running_mean", "running_var", "num_batches_tracked")


def is_synced(layer: nn.Module) -> bool:
    """Whether a layer computes its statistics over all ranks itself."""
    return hasattr(type(layer), "is_synced") and bool(layer.is_synced)  # the class first: a module looks in Python


def batch_norm_layers(modules: Mapping[str, nn.Module]) -> dict[str, BatchNorm]:
    """All layers at and below `modules` that keep running batch-norm statistics, each once, by name."""
    return {
        name: layer
        for name, layer in each_module(modules).items()
        if isinstance(layer, BatchNorm) and layer.running_mean is not None and not is_synced(layer)
    }


def other_norm_layers(modules: Mapping[str, nn.Module], watched: Mapping[str, BatchNorm]) -> list[nn.Module]:
    """All other layers at and below `modules` with running statistics, which they update themselves."""
    known = set(watched.values())
    return [
        layer
        for layer in each_module(modules).values()
        if isinstance(layer, _NormBase) and layer.running_mean is not None and layer not in known
    ]


class StatisticsHook:
    """The forward hooks of a norm layer, before and after. A deepcopied or unpickled layer is not watched."""

    def __init__(self, statistics: BatchNormStatistics | None = None, number: int = 0, *, is_own: bool = False) -> None:
        self._statistics = statistics
        self._number = number
        self._is_own = is_own

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

    @property
    def statistics(self) -> BatchNormStatistics | None:
        """To which the layer's calls are reported."""
        return self._statistics

    def __reduce__(self) -> tuple[type[StatisticsHook], tuple[()]]:  # deepcopy uses it too
        return StatisticsHook, ()


def watching(modules: Iterable[nn.Module]) -> BatchNormStatistics | None:
    """What captures the calls of batch-norm layers among `modules`; None where nothing does."""
    for module in modules:
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, StatisticsHook) and hook.statistics is not None:
                return hook.statistics
    return None


def _by_buffers(layers: Mapping[str, BatchNorm]) -> tuple[list[BatchNorm], list[int]]:
    """The layers with distinct buffers, and for every layer the number of the one that has its buffers."""
    first: dict[tuple[int, ...], int] = {}
    found: list[BatchNorm] = []
    numbers: list[int] = []
    owner: dict[int, tuple[int, ...]] = {}
    for name, layer in layers.items():
        key = tuple(id(layer._buffers.get(one)) for one in _SPARE)
        for one in _SPARE:
            if layer._buffers.get(one) is not None and owner.setdefault(id(layer._buffers[one]), key) != key:
                raise ValueError(
                    f"Batch-norm layers must share all of their running statistics or none. {name} shares only {one} "
                    "with another layer. Share the layer itself."
                )
        if key not in first:
            first[key] = len(found)
            found.append(layer)
        numbers.append(first[key])
    return found, numbers


def has_own_forward(layer: BatchNorm) -> bool:
    """Whether its forward is the user's: see [Note: Custom forwards]."""
    return type(layer).forward is not BatchNorm.forward or "forward" in layer.__dict__


def _compile_anew() -> None:
    """Discard what torch.compile compiled before the hooks were registered. It does not check for new hooks."""
    dynamo = sys.modules.get("torch._dynamo")
    compiling = sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is not None and compiling is not None:
        codes = getattr(compiling, "input_codes", None)
        if codes is None or codes.seen:
            dynamo.reset()


def _few(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class BatchNormStatistics:
    """Captures the batch statistics of `layers` in the shards of a step and updates their running statistics once.

    `open()` begins a pass. `recording()` starts a shard's list of captures. Its backward runs between `discard()` and
    `go_on()`, and calls made there (recomputation) are not captured. `stop()` returns the layers to torch.

    Args:
        layers: by name. Layers that share their buffers count as one that is called several times.
        own_norms: the user's own norm layers, by name.
        others: layers that update their running statistics themselves, in forward but not in backward.

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
        self.problem: RuntimeError | None = None  # found in the shards since the pass was opened
        self._captures: Captures | None = None
        self._active = False
        self._own: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
        self._opened: torch.Tensor | list[int] | None = None
        self._recomputed = RecomputeGuard(others)
        self._form: FlatStatistics | None = None
        self._spared: dict[int, tuple[float | None, dict[str, torch.Tensor | None]]] = {}
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
        """Remove the hooks."""
        self.stop()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def open(self) -> None:
        """Begin a pass over shards. The buffers that the layers have now are their own."""
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
        means = [mean for mean, _ in self._own[: self._known] if mean is not None]
        is_uniform = len(means) == self._known and len({(one.dtype, one.device) for one in means}) == 1
        if self._form is None and is_uniform:
            self._form = FlatStatistics(means)

    def recording(self) -> Captures:
        """Begin a shard. The returned list receives the captures of each layer, in the order of its calls."""
        self._active = True
        self._captures = Captures(len(self.layers), self._form)
        return self._captures

    @property
    def captures(self) -> Captures | None:
        """Those of the shard at hand; None outside of shards and in their backward."""
        return self._captures

    @contextmanager
    def apart(self) -> Iterator[Captures]:
        """Inside of a shard, capture the block's calls into a list of their own."""
        outer = self._captures
        self._captures = Captures(len(self.layers), self._form)
        try:
            yield self._captures
        finally:
            self._captures = outer

    def discard(self) -> None:
        """Stop capturing, and leave the running statistics unchanged."""
        if self._captures is not None:
            self._captures.check()
        self._captures = None
        if self._recomputed.layers:
            self._recomputed.begin()

    def go_on(self, captures: Captures) -> None:
        """Capture into a shard's list again."""
        if self._recomputed.layers:
            self._recomputed.end()
        self._captures = captures

    def stop(self) -> None:
        """End the shard. Layers called from now on update their own statistics, as torch does."""
        if self._active and self.layers and self.problem is None:
            self._require_unmoved()
            self._require_one_momentum()
        if self._captures is not None:
            self._captures.check()
        self._momenta.clear()
        self._active = False
        self._captures = None
        if self._recomputed.layers:
            self._recomputed.end()

    def _look(self) -> torch.Tensor | list[int] | None:
        """What shows whether a layer's own buffers changed: on the CPU their values, on a GPU only their versions."""
        own = [one for pair in self._own[: self._known] for one in pair if one is not None]
        if not own or accelerator_of(own[0].device).is_asynchronous:
            return [tracked._version for layer in self.layers if (tracked := layer.num_batches_tracked) is not None]
        return torch.cat(own)

    def _require_unmoved(self) -> None:
        now = self._look()
        before = self._opened
        if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
            moved = not torch.equal(now, before) and not same_bits(now, before)  # NaN equals nothing
        else:
            moved = now != before
        if moved:
            self.problem = RuntimeError(
                "Only the fold may update batch norm's running statistics, by those of the whole mini-batch. In a "
                f"shard something else updated those of one of {_few(self._names)}, perhaps code that was compiled, "
                "scripted or recorded before the Loop was created, or F.batch_norm on a layer's buffers. Create the "
                "Loop first, or call the layers themselves."
            )

    def _require_one_momentum(self) -> None:
        for number, momentum in self._momenta.items():
            now = self.layers[number].momentum
            if momentum != now:
                self.problem = self.problem or RuntimeError(
                    "A batch-norm layer's momentum must not change within a shard. One of "
                    f"{_few(self._names)} was called with another momentum than it has now, {now}. Change it between "
                    "steps. Turn track_running_stats off around a call that is to update nothing."
                )

    # -- capture -------------------------------------------------------------------------------------------

    def before(self, number: int, layer: BatchNorm) -> None:
        """Give a layer its spare buffers if a shard is being captured."""
        if is_synced(layer):
            raise RuntimeError(
                "A model must be synced before its Loop is created. This one was synced after. Call sync_batch_norm "
                "first."
            )
        buffers = layer._buffers  # without nn.Module's __getattr__
        mean = buffers["running_mean"]
        if not (self._active and layer.training) or number in self._spared or mean is None:
            return
        if not layer.track_running_stats:
            return  # torch updates nothing; a script may turn it off and on around a call
        own_mean, own_variance = self._own[number]
        if mean is not own_mean or buffers["running_var"] is not own_variance:
            return  # the caller's: [Note: Capture]
        self._spared[number] = layer.momentum, {name: buffers.get(name) for name in _SPARE}
        layer.__dict__["momentum"] = 1.0  # bypasses nn.Module's __setattr__, which takes a microsecond
        buffers["num_batches_tracked"] = None
        if has_own_forward(layer) and own_variance is not None:
            self._look_within(number, layer, mean, own_variance)
        elif self._captures is not None:
            buffers["running_mean"], buffers["running_var"] = self._captures.spare(number, mean)
        else:
            buffers["running_mean"] = torch.zeros_like(mean)
            buffers["running_var"] = torch.zeros_like(mean)

    def _look_within(self, number: int, layer: BatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Intercept a layer with a custom forward. See [Note: Custom forwards]."""
        spare = mean.clone(), variance.clone()
        layer._buffers["running_mean"], layer._buffers["running_var"] = spare
        momentum = self._spared[number][0]

        def take(inputs: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, given: float) -> None:
            if given not in (1.0, momentum):
                self.problem = self.problem or RuntimeError(
                    "A batch-norm layer must update its statistics by its own momentum. The forward of a "
                    f"{type(layer).__name__} gives F.batch_norm {given:g}, and its momentum is {momentum}. Set "
                    "layer.momentum."
                )
            self._capture(number, inputs, mean, variance)

        interception = BatchNormInterceptor(*spare, take)
        interception.__enter__()  # type: ignore[no-untyped-call]
        self._within[number] = interception, spare

    def after(self, number: int, layer: BatchNorm, inputs: tuple[Any, ...], output: torch.Tensor | None) -> None:
        """Capture the spare buffers, and restore the layer's own."""
        if number not in self._spared:
            return
        momentum, spared = self._spared.pop(number)
        mean = layer._buffers["running_mean"]
        variance = layer._buffers["running_var"]
        is_moved = is_torch = number not in self._within
        if not is_torch:
            interception, spare = self._within.pop(number)
            interception.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            is_moved = mean is not spare[0] or variance is not spare[1] or spare[0]._version > 0
        layer.__dict__["momentum"] = momentum
        self._momenta[number] = momentum if self._momenta.get(number, momentum) == momentum else math.nan
        layer._buffers.update(spared)
        if output is None or mean is None or variance is None:
            return  # forward raised
        if is_torch:
            self._capture(number, inputs[0], mean, variance)
        elif is_moved and self._captures is not None:  # the layout of its values is unknown
            capture = BatchStatistics(inputs[0].numel() // len(mean), mean, torch.zeros_like(mean), variance)
            self._captures[number].append(capture)

    def _capture(
        self, number: int, inputs: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, momentum: float = 0.0
    ) -> None:
        if self._captures is not None:
            self._captures.add(number, inputs, mean, variance, momentum)

    def enter_own(self, number: int) -> None:
        """Begin the forward of a user's own norm layer: see [Note: Interception]."""
        interception = None
        if self._active:
            interception = BatchNormInterceptor(*self._own[number], partial(self._capture, number))
            interception.__enter__()  # type: ignore[no-untyped-call]
        self._entered.append(interception)

    def leave_own(self, number: int) -> None:
        """End that forward, also if it raised."""
        interception = self._entered.pop()
        if interception is not None:
            interception.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    # -- rows ----------------------------------------------------------------------------------------------

    def width(self, calls: tuple[int, ...]) -> int:
        """Columns of a row: for each call its count, means, rests, variances, and the momentum of a user's own norm."""
        return sum(group.width for group in self.groups(calls))

    @property
    def channels(self) -> int:
        """Those of all layers."""
        return sum(layer.num_features for layer in self.layers)

    def groups(self, calls: tuple[int, ...]) -> list[LayerGroup]:
        """The layers with a first call, those with a second call, ..."""
        if calls not in self._grouped:
            each = [[n for n, times in enumerate(calls) if times > call] for call in range(max(calls, default=0))]
            self._grouped[calls] = [LayerGroup(numbers, [self.layers[n] for n in numbers]) for numbers in each]
        return self._grouped[calls]

    def pack(self, captures: Captures, calls: tuple[int, ...], row: torch.Tensor) -> None:
        """Write a shard's captures into its row: for each call counts, means, rests, variances, own norms' momenta."""
        if max(calls, default=0) == 1 and (whole := captures.in_one_piece()) is not None:
            counts, statistics = whole
            torch.cat([self._on_device(counts, row), *(one.to(row.dtype) for one in statistics)], out=row)
            return
        pieces: list[torch.Tensor] = []
        for call, group in enumerate(self.groups(calls)):
            found = [captures[number][call] if call < len(captures[number]) else None for number in group.numbers]
            pieces.append(self._on_device(tuple(0 if one is None else one.count or NO_VALUES for one in found), row))
            for kind in ("mean", "rest", "variance"):
                for one, size in zip(found, group.sizes, strict=True):
                    pieces.append(row.new_zeros(size) if one is None else getattr(one, kind).to(row.dtype))
            momenta = tuple(0.0 if (one := found[place]) is None else one.momentum for place in group.own)
            pieces.append(self._on_device(momenta, row))
        if pieces:
            torch.cat(pieces, out=row)

    def _on_device(self, counts: tuple[float, ...], like: torch.Tensor) -> torch.Tensor:
        """Counts as a tensor, cached: they are few."""
        if counts not in self._counts:
            if len(self._counts) > 64:  # sequences with ever new lengths
                self._counts.clear()
            self._counts[counts] = sent(torch.tensor(counts, dtype=like.dtype, device="cpu"), like.device)
        return self._counts[counts]

    def apply(self, rows: torch.Tensor, calls: tuple[int, ...], keep: torch.Tensor | None = None) -> None:
        """Update the running statistics with the pooled ones of all shards, one call after another.

        Args:
            rows: the packed rows of all shards, (S, width).
            calls: the most calls of each layer in any shard.
            keep: whether they stay as they are, shape (), bool.
        """
        groups = self.groups(calls)
        for group, columns in zip(groups, rows.split([group.width for group in groups], dim=1), strict=True):
            group.move(group.pooled(columns), keep)
