"""Batch-norm statistics of the whole mini-batch, pooled from the batch statistics of its shards.

[Note: Capture] torch keeps no batch statistics, but with momentum 1 its running statistics are the batch
statistics. So a layer whose forward runs in a shard gets a pair of spare buffers and momentum 1; a second call in
the same shard gets a second pair. The layer's own buffers do not change before the fold, so every shard starts
from the same values. A layer that holds other buffers than its own was called with the caller's buffers
(`torch.func.functional_call`): torch updates these.

[Note: Custom forwards] A subclass may pass other values to torch than it receives (transposed, or a part of them),
read its running statistics, or not update them. So its spare buffers start as copies of its own, and its call of
`F.batch_norm` is intercepted. Statistics that it writes into the buffers itself, with its momentum, are read after its
forward.

[Note: Interception] A norm layer of the user's own class may keep its momentum anywhere, and its kernel writes its
buffers unseen. So `F.batch_norm` is intercepted while the layer's forward runs in a shard. A call on the layer's own
buffers gets spare ones and momentum 1 instead, and the spare buffers then hold the batch statistics.

[Note: Unseen calls] Hooks run when Python calls a layer. Code that was compiled or recorded before the hooks existed
does not run them. For torch.compile that code is discarded, so it is compiled again with the hooks. If anything else
changes a layer's own buffers in a shard, that is an error.

[Note: Far means] torch rounds a shard's mean to float32: at mean 1,000 and deviation 1 it is off by 7e-5, and the
pooled variance by 1e-5. If a mean is large against the deviation, a second pass over the values computes its
rounding error, which is sent with it. Small inputs that a graph keeps are checked together, before the backward; in
compiled code all are, since it has no sizes in bytes if they vary, and a read of a value would cut it in two.

[Note: One tensor] A layer costs as many operations as it has tensors. So one tensor has the statistics of all layers'
first calls, in the layers' order, and another one has their second calls. torch's own forward writes first calls there
if all layers have one dtype and device; everything else is copied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ddp_loop.accelerators import accelerator_of, is_asynchronous
from ddp_loop.batch_norm.pooled import LayerGroup, NormLayer, RunningStatsSnapshot, numbers_on
from ddp_loop.determinism import same_bits
from ddp_loop.distributed import each_module

BatchNorm = _BatchNorm
NO_VALUES = -1  # the count in a row of a call without values, as torch counts it too; 0 stands for no call
_FAR = 64.0  # deviations from 0; a closer mean changes the variance by less than 2e-6
_SMALL_BYTES = 2**20  # of inputs that are kept until the backward
_KEYS = ("running_mean", "running_var")
_SPARE = (*_KEYS, "num_batches_tracked")
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    functional.batch_norm: ("input", *_KEYS, "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: ("input", "weight", "bias", *_KEYS, "training", "momentum", "eps", "cudnn_enabled"),
}
_WIDTH = attrgetter("width")
_MOST = 3  # names in an error


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
    return [
        layer
        for layer in each_module(modules).values()
        if isinstance(layer, _NormBase) and layer.running_mean is not None and layer not in watched.values()
    ]


def custom_norms(modules: Iterable[nn.Module]) -> list[NormLayer]:
    """Those among `modules`, of the user's own classes, that may pass buffers to `F.batch_norm`.

    Their buffers have torch's names, or similar ones in a module without children.
    """
    norms: list[NormLayer] = []
    for module in modules:
        if isinstance(module, _NormBase | torch.jit.ScriptModule):
            continue
        buffers = module._buffers
        means = [] if module._modules else [key for key in buffers if "mean" in key]  # a watched forward is slower
        pairs = [_KEYS, *((key, key.replace("mean", other)) for key in means for other in ("variance", "var"))]
        for keys in pairs:
            mean, variance = map(buffers.get, keys)
            if mean is None or variance is None or mean is variance:
                continue
            if mean.dim() == 1 and mean.shape == variance.shape and mean.is_floating_point():
                norms.append(NormLayer(module, *keys, is_custom=True))
                break
    return norms


def refine_statistics(
    values: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The rounding error of each channel's mean, (C,), and the biased variance computed in a second pass, (C,).

    None if no mean is far from 0, and on a GPU, where the check would make the host wait.
    """
    if not _is_far(mean, variance):
        return None
    rows = values.detach().transpose(0, 1).reshape(len(mean), -1) - mean.unsqueeze(1)
    rest = rows.mean(1, keepdim=True)
    # With channels_last torch's is around the rounded mean: off by 1e-3 at mean 10,000, deviation 1.
    return rest.squeeze(1).to(mean.dtype), (rows - rest).square_().mean(1).to(mean.dtype)


def _is_far(mean: torch.Tensor, variance: torch.Tensor) -> bool:
    if mean.dtype != torch.float32 or not accelerator_of(mean.device).is_host:
        return False
    means = mean.numpy()
    return bool((means * means > _FAR**2 * variance.numpy()).any())  # for some ten numbers: 3 microseconds, 20 in torch


class CallStatistics(NamedTuple):
    """The first call of each layer in a shard, or the second, ...: mean + rest and unbiased variance of each channel.

    Attributes:
        counts: the values per channel of each layer's call; 0 without one.
        momenta: with which the user's own classes called `F.batch_norm`.
        whole: the means of all layers, then the rests, then the variances. See [Note: One tensor].
        parts: of it, the mean of each layer, then the rest of each, then the variance of each.
    """

    counts: list[int]
    momenta: list[float]
    whole: torch.Tensor
    parts: Sequence[torch.Tensor]

    def refine(self, number: int, values: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Compute a mean that is far from 0, and its variance, more exactly. See [Note: Far means]."""
        refined = refine_statistics(values, mean, variance)
        if refined is not None:
            rest, biased = refined
            count = self.counts[number]
            self.write(number, mean, rest, biased * (count / max(count - 1, 1)))

    def write(self, number: int, *values: torch.Tensor) -> None:
        """Write a layer's mean, rest and variance, past the version counter: a graph holds a layer's lent tensors."""
        for part, value in zip(self.parts[number :: len(self.counts)], values, strict=True):
            part.data.copy_(value)


@dataclass(slots=True)
class Captures:
    """A shard's batch statistics; made by `BatchNormStatistics.recording`.

    Attributes:
        by_call: the statistics of each layer's first call, its second call, ...
        calls: of each layer so far.
        unchecked: first calls to be refined together, each a layer's number and its input. See [Note: Far means].
    """

    by_call: list[CallStatistics]
    calls: list[int]
    unchecked: list[tuple[int, torch.Tensor]]


class BatchNormInterceptor(TorchFunctionMode):
    """While active, `F.batch_norm` leaves the given buffers unchanged and passes the batch statistics to `capture`.

    Args:
        mean: the buffer of the running mean, (C,).
        variance: the buffer of the running variance, (C,).
        capture: called with the input, the batch's mean and unbiased variance, (C,) each, and the momentum.
    """

    def __init__(
        self,
        mean: torch.Tensor,
        variance: torch.Tensor,
        capture: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None],
    ) -> None:
        super().__init__()
        self.mean = mean
        self.variance = variance
        self._capture = capture

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, with spare buffers where it is `F.batch_norm` on the given ones."""
        arguments = dict(zip(_ARGUMENTS.get(func, ()), args, strict=False)) | (kwargs or {})
        buffers = (arguments.get("running_mean"), arguments.get("running_var"))
        is_watched = func in _ARGUMENTS and buffers[0] is self.mean and buffers[1] is self.variance
        if not is_watched or not arguments.get("training"):
            return func(*args, **(kwargs or {}))
        spare = (torch.zeros_like(self.mean), torch.zeros_like(self.variance))
        output = func(**(arguments | dict(zip(_KEYS, spare, strict=True)) | {"momentum": 1.0}))
        self._capture(arguments["input"], *spare, float(arguments.get("momentum", 0.1)))
        return output


@dataclass(eq=False, repr=False)
class LayerCapture:
    """The forward hooks of one norm layer, or of several with the same buffers, and the spare buffers of a call.

    Args:
        norm: the layer.
        number: its position among the layers.
        statistics: to which its calls are reported. A deepcopied or unpickled layer has none, and is not watched.
        is_closed: whether a shard called it, and the outputs of all shards are gathered.
    """

    norm: NormLayer
    number: int
    statistics: BatchNormStatistics | None = None
    running: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)  # mean and variance, of this pass
    _replaced: tuple[Any, float | None, torch.Tensor | None] | None = None  # a called layer, and its former values
    _interceptor: BatchNormInterceptor | None = None
    is_closed: bool = False

    def __getstate__(self) -> None:
        """Nothing of it is copied."""

    def before(self, layer: Any, inputs: object) -> None:
        """Give a layer its spare buffers if a shard is being captured."""
        statistics = self.statistics
        if statistics is None:
            return
        if layer is not self.norm.module and is_synced(layer):
            raise RuntimeError(
                "A model must be synced before its Loop is created. This one was synced after. Call sync_batch_norm "
                "first."
            )
        mean, variance = self.running
        if statistics.called is None and self.is_closed and layer.training:
            statistics.problem = statistics.problem or _called_twice(layer)
        if statistics.called is None or mean is None or variance is None:
            return
        if self.norm.is_custom:
            self._intercept(mean, variance)  # see [Note: Interception]
            return
        if self._replaced is not None or not layer.training or not layer.track_running_stats:
            return  # torch updates nothing; a script may turn it off and on around a call
        buffers = layer._buffers  # without nn.Module's __getattr__
        if buffers["running_mean"] is not mean or buffers["running_var"] is not variance:
            return  # the caller's: [Note: Capture]
        self._replaced = (layer, layer.momentum, buffers.get("num_batches_tracked"))
        layer.__dict__["momentum"] = 1.0  # bypasses nn.Module's __setattr__, which takes a microsecond
        buffers["num_batches_tracked"] = None
        captures = statistics.captures
        if type(layer).forward is not BatchNorm.forward or "forward" in layer.__dict__:
            spare: Sequence[torch.Tensor] = (mean.clone(), variance.clone())  # see [Note: Custom forwards]
            self._intercept(*spare)
        elif captures is None or captures.calls[self.number] or not statistics.is_uniform:
            spare = (torch.zeros_like(mean), torch.zeros_like(mean))
        else:
            spare = captures.by_call[0].parts[self.number :: 2 * len(captures.calls)]
        buffers.update(zip(_KEYS, spare, strict=True))

    def _intercept(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        self._interceptor = BatchNormInterceptor(mean, variance, self.capture)
        self._interceptor.__enter__()  # type: ignore[no-untyped-call]

    def after(self, layer: Any, inputs: tuple[Any, ...], named: dict[str, Any], output: torch.Tensor | None) -> None:
        """Capture the statistics of a call, and give the layer its own buffers back, even if its forward raised."""
        statistics = self.statistics
        if statistics is None or statistics.called is None:
            return
        interceptor = self._interceptor
        self._interceptor = None
        if interceptor is not None:
            interceptor.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._replaced is None:
            return
        _, momentum, tracked = self._replaced
        buffers = layer._buffers
        mean = buffers["running_mean"]
        variance = buffers["running_var"]
        self._replaced = None
        layer.__dict__["momentum"] = momentum
        buffers.update(zip(_SPARE, (*self.running, tracked), strict=True))
        statistics.called.append((self, momentum))
        if mean is None or variance is None:
            return
        if output is None:
            torch._foreach_zero_([mean.data, variance.data])  # they may be lent again
            return
        is_intercepted = interceptor is not None and mean is interceptor.mean and variance is interceptor.variance
        if not is_intercepted or mean._version > 0:  # by forward itself: then the layout of its values is unknown
            self.capture((*inputs, *named.values())[0], mean, variance, refines=interceptor is None)

    def capture(
        self,
        values: torch.Tensor,
        mean: torch.Tensor,
        variance: torch.Tensor,
        momentum: float = 1.0,
        *,
        refines: bool = True,
    ) -> None:
        """Capture a call. Args as for `BatchNormInterceptor`'s `capture`; without `refines` their layout is unknown."""
        statistics = self.statistics
        if statistics is None or (captures := statistics.captures) is None:
            return
        if self._replaced is not None:
            layer, its_momentum, _ = self._replaced
            if momentum not in (1.0, its_momentum):
                statistics.problem = statistics.problem or RuntimeError(
                    "A batch-norm layer must update its statistics by its own momentum. The forward of a "
                    f"{type(layer).__name__} gives F.batch_norm {momentum:g}, and its momentum is {its_momentum}. Set "
                    "layer.momentum."
                )
        number = self.number
        earlier = captures.calls[number]
        captures.calls[number] += 1
        if earlier == len(captures.by_call):
            captures.by_call.append(statistics.no_calls())
        call = captures.by_call[earlier]
        call.counts[number] = values.numel() // len(mean) or NO_VALUES
        call.momenta[number] = momentum
        if mean is not call.parts[number]:
            call.write(number, mean, torch.zeros_like(mean), variance)
        is_kept = torch.compiler.is_compiling() or (
            values.requires_grad and values.nbytes <= _SMALL_BYTES and torch.is_grad_enabled()
        )
        if refines and is_kept and mean is call.parts[number]:
            captures.unchecked.append((number, values))
        elif refines:
            call.refine(number, values, mean, variance)


class BatchNormStatistics:
    """Captures the batch statistics of `layers` in the shards of a step and updates their running statistics once.

    `open()` begins a pass. `recording()` starts a shard's list of captures. `discard()` comes before its backward, in
    which calls (recomputation) are not captured; after it `captures` is set again, and `others` are restored. `stop()`
    returns the layers to torch.

    Args:
        layers: by name. Layers that share their buffers count as one that is called several times.
        custom: norm layers of the user's own classes.
        others: layers that update their running statistics themselves, in forward but not in backward.

    Attributes:
        layers: one for each set of buffers, the user's own classes last.
        problem: found in the shards since the pass was opened.
        captures: of the shard at hand; None outside of shards and in their backward.
        called: the layers called in the shard at hand, each with its momentum; None outside of shards.
        groups: for the most calls of each layer, the layers with a first call, those with a second call, ...
        others: the running statistics of the others, as they were before a backward.

    Raises:
        ValueError: layers that share some of their buffers, but not all.
    """

    def __init__(
        self,
        layers: Mapping[str, BatchNorm],
        custom: Iterable[NormLayer] = (),
        others: Iterable[nn.Module] = (),
    ) -> None:
        captures: dict[tuple[int, ...], LayerCapture] = {}  # by the ids of a layer's buffers
        ids_with: dict[int, tuple[int, ...]] = {}
        watched: list[tuple[nn.Module, LayerCapture]] = []
        for name, layer in layers.items():
            buffers = {key: layer._buffers.get(key) for key in _SPARE}
            ids = tuple(map(id, buffers.values()))
            for key, buffer in buffers.items():
                if buffer is not None and ids_with.setdefault(id(buffer), ids) != ids:
                    raise ValueError(
                        f"Batch-norm layers must share all of their running statistics or none. {name} shares only "
                        f"{key} with another layer. Share the layer itself."
                    )
            watched.append((layer, captures.setdefault(ids, LayerCapture(NormLayer(layer), len(captures), self))))
        for number, norm in enumerate(custom, len(captures)):
            watched.append((norm.module, LayerCapture(norm, number, self)))
        self.layers = list(dict.fromkeys(capture for _, capture in watched))
        self.captures: Captures | None = None
        self.called: list[tuple[LayerCapture, float | None]] | None = None
        self.groups = lru_cache(maxsize=None)(partial(_grouped, [capture.norm for capture in self.layers]))
        names = list(layers)
        self._names = ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")
        self.others = RunningStatsSnapshot(others)
        self._numbers = lru_cache(maxsize=64)(numbers_on)  # counts and momenta, which are few
        self._look_at_buffers()
        self.open()
        self._hooks: list[RemovableHandle] = []
        for module, capture in watched:
            self._hooks += [
                module.register_forward_pre_hook(capture.before),
                module.register_forward_hook(capture.after, always_call=True, with_kwargs=True),
            ]
        if self.layers:
            _compile_anew()

    def release(self) -> None:
        """Remove the hooks."""
        self.stop()
        for hook in self._hooks:
            hook.remove()
        self.layers = []  # they refer to this object, so all would wait for the garbage collector

    def open(self, former: Iterable[Captures] = ()) -> None:
        """Begin a pass over shards. The buffers that the layers have now are their own.

        Args:
            former: of the shards of the pass before, whose memory is used again.
        """
        self.problem: RuntimeError | None = None
        self._free: list[CallStatistics] = [each.by_call[0] for each in former if each.by_call]
        for layer in self.layers:
            layer.is_closed = False
        for layer in self.layers:
            buffers = layer.norm.module._buffers
            if buffers[layer.norm.mean] is not layer.running[0] or buffers[layer.norm.variance] is not layer.running[1]:
                self._look_at_buffers()
                break
        self._opened: Any = torch.cat(self._watched) if self._watched else self._versions()

    def close(self, shards: Sequence[Captures]) -> None:
        """End the shards: their outputs are gathered. What they called must not be called again in this pass."""
        for layer in self.layers:
            layer.is_closed = any(captures.calls[layer.number] for captures in shards)

    def accept(self) -> None:
        """Keep what the layers' statistics are now: calls after a gather had the whole mini-batch."""
        self._opened = torch.cat(self._watched) if self._watched else self._versions()

    def _look_at_buffers(self) -> None:
        """Note the layers' buffers, which of them to look at, and the form of spare ones."""
        self._free = []
        for layer in self.layers:
            buffers = layer.norm.module._buffers
            layer.running = (buffers[layer.norm.mean], buffers[layer.norm.variance])
        of_torch = [layer.running for layer in self.layers if not layer.norm.is_custom]
        watched = [buffer for buffers in of_torch for buffer in buffers if buffer is not None]
        # Empty where a look at the values would make the host wait.
        self._watched = watched if watched and not is_asynchronous(watched[0]) else []
        means = [layer.running[0] for layer in self.layers]
        known = [mean for mean in means if mean is not None]
        self.is_uniform = len({(mean.dtype, mean.device) for mean in known}) == 1
        sizes = 3 * [0 if mean is None else len(mean) for mean in means]
        first = known[0] if known else torch.empty(0, device="cpu")
        whole = first.new_zeros(sum(sizes), dtype=first.dtype if self.is_uniform else torch.float64)
        self._empty_call = CallStatistics([], [], whole, whole.split_with_sizes(sizes))

    def _versions(self) -> list[int]:
        """The versions of torch's layers' batch counters, which show a write without a look at values."""
        buffers = [layer.norm.module._buffers for layer in self.layers if not layer.norm.is_custom]
        tracked = [each.get("num_batches_tracked") for each in buffers]
        return [count._version for count in tracked if count is not None]

    def recording(self) -> Captures:
        """Begin a shard. The returned object receives the captures of each layer, in the order of its calls."""
        numbers = len(self.layers)
        if self._free:  # its many views take longer to make than to fill
            call = self._free.pop()
            call.whole.data.zero_()  # past the version counter, as in `CallStatistics.write`
            calls = [call._replace(counts=[0] * numbers, momenta=[0.0] * numbers)]
        else:
            calls = [self.no_calls()] if numbers else []
        captures = self.captures = Captures(calls, [0] * numbers, [])
        self.called = []
        return captures

    def no_calls(self) -> CallStatistics:
        """Room for a call of each layer."""
        whole = torch.zeros_like(self._empty_call.whole)
        numbers = len(self.layers)
        parts = whole.split_with_sizes([*map(len, self._empty_call.parts)])
        return CallStatistics([0] * numbers, [0.0] * numbers, whole, parts)

    def discard(self) -> None:
        """Stop capturing, and leave the running statistics unchanged."""
        captures = self.captures
        self.captures = None
        # While the inputs are still there. See [Note: Far means].
        if captures is not None and captures.unchecked:
            first = captures.by_call[0]
            means, _, variances = first.whole.chunk(3)
            for number, values in captures.unchecked if _is_far(means, variances) else ():
                first.refine(number, values, *first.parts[number :: 2 * len(self.layers)])
            captures.unchecked = []
        if self.others.layers:
            self.others.record_if_called()

    def stop(self) -> None:
        """End the shard. Layers called from now on update their own statistics, as torch does."""
        called = self.called
        if self.captures is not None and self.captures.unchecked:
            self.discard()
        if self.others.layers:
            self.others.restore()
        self.captures = None
        self.called = None
        if called is None or not self.layers or self.problem is not None:
            return
        now = torch.cat(self._watched) if self._watched else self._versions()
        before = self._opened
        if now != before if isinstance(now, list) else not torch.equal(now, before) and not same_bits(now, before):
            self.problem = RuntimeError(
                "Only the fold may update batch norm's running statistics, by those of the whole mini-batch. In a "
                f"shard something else updated the statistics of one of {self._names}, perhaps code that was "
                "compiled, scripted or recorded before the Loop was created, or F.batch_norm on a layer's buffers. "
                "Create the Loop first, or call the layers themselves."
            )
        for layer, momentum in called:
            if self.problem is None and momentum != layer.norm.module.momentum:
                self.problem = RuntimeError(
                    "A batch-norm layer's momentum must not change within a shard. One of "
                    f"{self._names} was called with another momentum than it has now, "
                    f"{layer.norm.module.momentum}. Change it between steps. Turn track_running_stats off around a "
                    "call that is to update nothing."
                )

    # -- rows ----------------------------------------------------------------------------------------------

    def width(self, calls: tuple[int, ...]) -> int:
        """Columns of a row: for each call its count, means, rests, variances, and the momentum of a user's own norm."""
        return sum(map(_WIDTH, self.groups(calls)))

    @property
    def channels(self) -> int:
        """The number of channels of all layers."""
        return len(self._empty_call.whole) // 3

    def pack(self, captures: Iterable[Captures], calls: tuple[int, ...], rows: Iterable[torch.Tensor]) -> None:
        """Write shards' captures into their rows: for each call counts, means, rests, variances, own norms' momenta."""
        groups = self.groups(calls)
        for shard, row in zip(captures, rows, strict=True):
            pieces: list[torch.Tensor] = []
            for earlier, group in enumerate(groups):
                call = shard.by_call[earlier] if earlier < len(shard.by_call) else self.no_calls()
                counts = tuple(map(call.counts.__getitem__, group.numbers))
                pieces.append(self._numbers(counts, row.dtype, row.device))
                if len(counts) == len(self.layers):
                    pieces.append(call.whole)
                else:
                    for kind in range(0, len(call.parts), len(self.layers)):
                        pieces += [call.parts[kind + number] for number in group.numbers]
                momenta = tuple(map(call.momenta.__getitem__, group.numbers[len(counts) - group.customs :]))
                pieces.append(self._numbers(momenta, row.dtype, row.device))
            if pieces:
                torch.cat(pieces, out=row)

    def apply(self, rows: torch.Tensor, calls: tuple[int, ...], is_bad: torch.Tensor | None = None) -> None:
        """Update the running statistics with the pooled ones of all shards, one call after another.

        Args:
            rows: the packed rows of all shards, (S, width).
            calls: the most calls of each layer in any shard.
            is_bad: whether the step moves nothing, shape (), bool.
        """
        groups = self.groups(calls)
        for group, columns in zip(groups, rows.split([*map(_WIDTH, groups)], dim=1), strict=True):
            group.move(group.pooled(columns), is_bad)


def _called_twice(layer: nn.Module) -> RuntimeError | None:
    """The error of a layer that is called in the shards and after a gather; None if it moves no statistics."""
    if not getattr(layer, "track_running_stats", True):
        return None
    return RuntimeError(
        "A batch-norm layer must move its running statistics in the shards, or between step.gather() and step.fold(), "
        f"not in both. One of the class {type(layer).__name__} was called in both. Use another layer after the gather."
    )


def _compile_anew() -> None:
    """Discard code that torch.compile compiled before the hooks were registered. It does not check for new hooks."""
    dynamo = sys.modules.get("torch._dynamo")
    compiling = sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is not None and compiling is not None:
        codes = getattr(compiling, "input_codes", None)
        if codes is None or codes.seen:
            dynamo.reset()


def _grouped(norms: Sequence[NormLayer], calls: tuple[int, ...]) -> list[LayerGroup]:
    each = [[n for n, times in enumerate(calls) if times > call] for call in range(max(calls, default=0))]
    return [LayerGroup(numbers, [norms[n] for n in numbers]) for numbers in each]
