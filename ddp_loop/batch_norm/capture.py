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

[Note: One tensor] A layer costs as many operations as it has tensors. So the statistics of all layers' first calls lie
in one tensor, in the layers' order, and are packed in one piece where each layer was called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ddp_loop.accelerators import accelerator_of, sent
from ddp_loop.batch_norm.pooled import LayerGroup, NormLayer, RunningStatsSnapshot
from ddp_loop.determinism import same_bits
from ddp_loop.distributed import each_module

BatchNorm = _BatchNorm
NO_VALUES = -1  # the count in a row of a call without values, as torch counts it too; 0 stands for no call
_FAR = 64.0  # deviations from 0; a closer mean changes the variance by less than 2e-6
_SMALL_BYTES = 2**20  # of inputs that are kept until the backward
_KEYS = ("running_mean", "running_var")
_SPARE = (*_KEYS, "num_batches_tracked")
_GIVEN: dict[Any, tuple[str, ...]] = {
    functional.batch_norm: ("input", *_KEYS, "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: ("input", "weight", "bias", *_KEYS, "training", "momentum", "eps", "cudnn_enabled"),
}
_COUNT = attrgetter("count")
_IS_FLAT = attrgetter("is_flat")
_WIDTH = attrgetter("width")


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


def custom_norms(modules: Mapping[str, nn.Module]) -> dict[str, NormLayer]:
    """The user's own classes among `modules` that may pass buffers to `F.batch_norm`, by name.

    Their buffers have torch's names, or similar ones in a module without children.
    """
    found: dict[str, NormLayer] = {}
    for name, module in modules.items():
        if isinstance(module, _NormBase | torch.jit.ScriptModule):
            continue
        pairs = [_KEYS]
        for key in () if module._modules else module._buffers:  # everything called in a watched forward is slower
            pairs += [(key, key.replace("mean", other)) for other in ("variance", "var") if "mean" in key]
        for keys in pairs:
            mean, variance = map(module._buffers.get, keys)
            if mean is None or variance is None or mean is variance or name in found:
                continue
            if mean.dim() == 1 and mean.shape == variance.shape and mean.is_floating_point():
                found[name] = NormLayer(module, *keys, is_own=True)
    return found


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


@dataclass(slots=True)
class BatchStatistics:
    """One call's batch statistics: `count` values per channel, mean + rest, unbiased variance."""

    count: int
    mean: torch.Tensor
    rest: torch.Tensor
    variance: torch.Tensor
    momentum: float = 0.0  # of an own norm's call
    is_flat: bool = False  # see [Note: One tensor]; without a rest

    def refine(self, values: torch.Tensor) -> None:
        """Compute a mean that is far from 0, and its variance, more exactly. See [Note: Far means]."""
        found = refine_statistics(values, self.mean, self.variance)
        if found is not None:
            self.rest, biased = found
            self.variance = biased * (self.count / max(self.count - 1, 1))
            self.is_flat = False


class Captures(list[list[BatchStatistics]]):
    """A shard's captures of each layer, in the order of its calls; made by `BatchNormStatistics.recording`.

    Attributes:
        whole: the means, then the variances, of the layers' first calls. See [Note: One tensor].
        spare: the parts of it that no call has yet, by the layer's number.
        unchecked: captures to be refined together, with their inputs. See [Note: Far means].
    """

    whole: torch.Tensor
    spare: dict[int, BatchStatistics]
    unchecked: list[tuple[torch.Tensor, BatchStatistics]]


class BatchNormInterceptor(TorchFunctionMode):
    """While active, `F.batch_norm` leaves the given buffers unchanged and passes the batch statistics to `take`.

    Args:
        mean: the buffer of the running mean, (C,).
        variance: the buffer of the running variance, (C,).
        take: called with the input, the batch's mean and unbiased variance, (C,) each, and the momentum.
    """

    def __init__(
        self,
        mean: torch.Tensor | None,
        variance: torch.Tensor | None,
        take: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None],
    ) -> None:
        super().__init__()
        self.mean = mean
        self.variance = variance
        self._take = take

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, with spare buffers where it is `F.batch_norm` on the given ones."""
        names = _GIVEN.get(func) if callable(func) else None
        given = dict(zip(names or (), args, strict=False)) | (kwargs or {})
        mean = given.get("running_mean")
        is_own = names is not None and mean is self.mean and given.get("running_var") is self.variance
        if not is_own or mean is None or self.variance is None or not given.get("training"):
            return func(*args, **(kwargs or {}))
        spare = (torch.zeros_like(mean), torch.zeros_like(self.variance))
        output = func(**(given | dict(zip(_KEYS, spare, strict=True)) | {"momentum": 1.0}))
        self._take(given["input"], *spare, float(given.get("momentum", 0.1)))
        return output


class LayerCapture:
    """The forward hooks of one norm layer, or of several with the same buffers, and what a layer is lent in its call.

    Args:
        norm: the layer.
        number: its position among the layers.
        statistics: to which its calls are reported. A deepcopied or unpickled layer has none, and is not watched.
    """

    statistics: BatchNormStatistics | None = None

    def __init__(self, norm: NormLayer, number: int, statistics: BatchNormStatistics) -> None:
        self.norm = norm
        self.number = number
        self.statistics = statistics
        self.own: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)  # mean and variance, of this pass
        self._lent: tuple[Any, float | None, torch.Tensor | None] | None = None  # a called layer, what it had instead
        self._spare: BatchStatistics | None = None  # the buffers that a call of torch's own forward writes
        self._interceptor: BatchNormInterceptor | None = None

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
        mean, variance = self.own
        if statistics.called is None:
            return
        if self.norm.is_own:
            self._intercept(mean, variance)  # see [Note: Interception]
            return
        if mean is None or self._lent is not None or not layer.training or not layer.track_running_stats:
            return  # torch updates nothing; a script may turn it off and on around a call
        buffers = layer._buffers  # without nn.Module's __getattr__
        if buffers["running_mean"] is not mean or buffers["running_var"] is not variance:
            return  # the caller's: [Note: Capture]
        self._lent = (layer, layer.momentum, buffers.get("num_batches_tracked"))
        layer.__dict__["momentum"] = 1.0  # bypasses nn.Module's __setattr__, which takes a microsecond
        buffers["num_batches_tracked"] = None
        if (type(layer).forward is not BatchNorm.forward or "forward" in layer.__dict__) and variance is not None:
            spare = (mean.clone(), variance.clone())  # see [Note: Custom forwards]
            self._intercept(*spare)
        else:
            captures = statistics.captures
            self._spare = None if captures is None else captures.spare.pop(self.number, None)
            if self._spare is None:
                self._spare = BatchStatistics(0, torch.zeros_like(mean), torch.zeros_like(mean), torch.zeros_like(mean))
            spare = (self._spare.mean, self._spare.variance)
        buffers.update(zip(_KEYS, spare, strict=True))

    def after(self, layer: Any, inputs: tuple[Any, ...], named: dict[str, Any], output: torch.Tensor | None) -> None:
        """Capture the statistics of a call, and give the layer its own buffers back, even if its forward raised."""
        statistics = self.statistics
        if statistics is None or statistics.called is None:
            return
        interceptor = self._interceptor
        if interceptor is not None:
            interceptor.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._lent is None:
            return
        _, momentum, tracked = self._lent
        spare = self._spare
        buffers = layer._buffers
        mean = buffers["running_mean"]
        variance = buffers["running_var"]
        self._lent = None
        self._spare = None
        self._interceptor = None
        layer.__dict__["momentum"] = momentum
        buffers.update(zip(_SPARE, (*self.own, tracked), strict=True))
        statistics.called.append((self, momentum))
        captures = statistics.captures
        if output is None or mean is None or variance is None or captures is None:
            return
        values = (*inputs, *named.values())[0]
        if spare is not None:
            statistics.add(self.number, values, spare)
        elif interceptor is not None:
            is_own = mean is interceptor.mean and variance is interceptor.variance
            if not is_own or mean._version > 0:  # written by forward itself; the layout of its values is unknown
                count = values.numel() // len(mean) or NO_VALUES
                captures[self.number].append(BatchStatistics(count, mean, torch.zeros_like(mean), variance))

    def _intercept(self, mean: torch.Tensor | None, variance: torch.Tensor | None) -> None:
        self._interceptor = BatchNormInterceptor(mean, variance, self.take)
        self._interceptor.__enter__()  # type: ignore[no-untyped-call]

    def take(self, values: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, momentum: float) -> None:
        """Capture an intercepted call of `F.batch_norm`. Args as for `BatchNormInterceptor`'s `take`."""
        statistics = self.statistics
        if statistics is None:
            return
        if self._lent is not None:
            layer, own, _ = self._lent
            if momentum not in (1.0, own):
                statistics.problem = statistics.problem or RuntimeError(
                    "A batch-norm layer must update its statistics by its own momentum. The forward of a "
                    f"{type(layer).__name__} gives F.batch_norm {momentum:g}, and its momentum is {own}. Set "
                    "layer.momentum."
                )
            momentum = 0.0
        statistics.add(self.number, values, BatchStatistics(0, mean, torch.zeros_like(mean), variance, momentum))


class BatchNormStatistics:
    """Captures the batch statistics of `layers` in the shards of a step and updates their running statistics once.

    `open()` begins a pass. `recording()` starts a shard's list of captures. Its backward runs between `discard()` and
    `go_on()`, and calls made there (recomputation) are not captured. `stop()` returns the layers to torch.

    Args:
        layers: by name. Layers that share their buffers count as one that is called several times.
        own_norms: the user's own norm layers, by name.
        others: layers that update their running statistics themselves, in forward but not in backward.

    Attributes:
        layers: one for each set of buffers, the user's own classes last.
        problem: found in the shards since the pass was opened.
        captures: of the shard at hand; None outside of shards and in their backward.
        called: the layers called in the shard at hand, each with its momentum; None outside of shards.
        groups: for the most calls of each layer, the layers with a first call, those with a second call, ...

    Raises:
        ValueError: layers that share some of their buffers, but not all.
    """

    def __init__(
        self,
        layers: Mapping[str, BatchNorm],
        own_norms: Mapping[str, NormLayer] | None = None,
        others: Iterable[nn.Module] = (),
    ) -> None:
        found: dict[tuple[int, ...], LayerCapture] = {}
        owner: dict[int, tuple[int, ...]] = {}
        watched: list[tuple[nn.Module, LayerCapture]] = []
        for name, layer in layers.items():
            buffers = [layer._buffers.get(one) for one in _SPARE]
            key = tuple(map(id, buffers))
            for one, buffer in zip(_SPARE, buffers, strict=True):
                if buffer is not None and owner.setdefault(id(buffer), key) != key:
                    raise ValueError(
                        f"Batch-norm layers must share all of their running statistics or none. {name} shares only "
                        f"{one} with another layer. Share the layer itself."
                    )
            watched.append((layer, found.setdefault(key, LayerCapture(NormLayer(layer), len(found), self))))
        for number, norm in enumerate((own_norms or {}).values(), len(found)):
            watched.append((norm.module, LayerCapture(norm, number, self)))
        self.layers = list(dict.fromkeys(capture for _, capture in watched))
        self.problem: RuntimeError | None = None
        self.captures: Captures | None = None
        self.called: list[tuple[LayerCapture, float | None]] | None = None
        self.groups = lru_cache(maxsize=None)(self._make_groups)
        self._names = list(layers)
        self._others = RunningStatsSnapshot(others)
        self._numbers = lru_cache(maxsize=64)(_numbers)
        self._look: Callable[[], Any] = list
        self._opened: Any = []
        self._rest = torch.empty(0, device="cpu")  # zeros, (channels,); never written
        self._rests: Sequence[torch.Tensor] = ()  # of each layer
        self._hooks: list[RemovableHandle] = []
        for module, capture in watched:
            self._hooks.append(module.register_forward_pre_hook(capture.before))
            self._hooks.append(module.register_forward_hook(capture.after, always_call=True, with_kwargs=True))
        if self.layers:
            _compile_anew()

    def release(self) -> None:
        """Remove the hooks."""
        self.stop()
        for hook in self._hooks:
            hook.remove()

    def open(self) -> None:
        """Begin a pass over shards. The buffers that the layers have now are their own."""
        self.problem = None
        is_new = False
        for layer in self.layers:
            buffers = layer.norm.module._buffers
            own = (buffers[layer.norm.mean], buffers[layer.norm.variance])
            if own[0] is not layer.own[0] or own[1] is not layer.own[1]:
                layer.own = own
                is_new = True
        if is_new:
            self._look_at_buffers()
        self._opened = self._look()

    def _look_at_buffers(self) -> None:
        """Look at the layers' new buffers, and give spare ones their form."""
        known = [layer for layer in self.layers if not layer.norm.is_own]
        own = [one for layer in known for one in layer.own if one is not None]
        if own and not accelerator_of(own[0].device).is_asynchronous:
            self._look = partial(torch.cat, own)
        else:  # only the versions: a read would make the host wait

            def versions() -> list[int]:
                tracked = [layer.norm.module._buffers.get("num_batches_tracked") for layer in known]
                return [one._version for one in tracked if one is not None]

            self._look = versions
        means = [layer.own[0] for layer in known if layer.own[0] is not None]
        is_uniform = len(means) == len(known) and len({(one.dtype, one.device) for one in means}) == 1
        sizes = list(map(len, means)) if is_uniform else []
        self._rest = (means or [self._rest])[0].detach().new_zeros(sum(sizes))
        self._rests = self._rest.split(sizes) if sizes else ()

    def recording(self) -> Captures:
        """Begin a shard. The returned list receives the captures of each layer, in the order of its calls."""
        captures = Captures(map(list, repeat((), len(self.layers))))
        captures.whole = self._rest
        captures.spare = {}
        captures.unchecked = []
        if self._rests:
            captures.whole = self._rest.new_zeros(2 * len(self._rest))
            parts = captures.whole.split_with_sizes([*map(len, self._rests)] * 2)
            columns = (parts, self._rests, parts[len(self._rests) :], repeat(0.0), repeat(True))
            captures.spare = dict(enumerate(map(BatchStatistics, repeat(0), *columns)))
        self.captures = captures
        self.called = []
        return captures

    def discard(self) -> None:
        """Stop capturing, and leave the running statistics unchanged."""
        captures = self.captures
        self.captures = None
        # While the inputs are still there. See [Note: Far means].
        if captures is not None and captures.unchecked:
            if _is_far(*captures.whole.chunk(2)):
                for values, one in captures.unchecked:
                    one.refine(values)
            captures.unchecked = []
        if self._others.layers:
            self._others.record(training_only=True)

    def go_on(self, captures: Captures) -> None:
        """Capture into a shard's list again."""
        if self._others.layers:
            self._others.restore()
        self.captures = captures

    def stop(self) -> None:
        """End the shard. Layers called from now on update their own statistics, as torch does."""
        called = self.called
        if self.captures is not None and self.captures.unchecked:
            self.discard()
        if self._others.layers:
            self._others.restore()
        self.captures = None
        self.called = None
        if called is None or not self.layers or self.problem is not None:
            return
        now = self._look()
        before = self._opened
        if now != before if isinstance(now, list) else not torch.equal(now, before) and not same_bits(now, before):
            self.problem = RuntimeError(
                "Only the fold may update batch norm's running statistics, by those of the whole mini-batch. In a "
                f"shard something else updated the statistics of one of {_few(self._names)}, perhaps code that was "
                "compiled, scripted or recorded before the Loop was created, or F.batch_norm on a layer's buffers. "
                "Create the Loop first, or call the layers themselves."
            )
        for layer, momentum in called:
            if self.problem is None and momentum != layer.norm.module.momentum:
                self.problem = RuntimeError(
                    "A batch-norm layer's momentum must not change within a shard. One of "
                    f"{_few(self._names)} was called with another momentum than it has now, "
                    f"{layer.norm.module.momentum}. Change it between steps. Turn track_running_stats off around a "
                    "call that is to update nothing."
                )

    def add(self, number: int, values: torch.Tensor, capture: BatchStatistics) -> None:
        """Capture a layer's call.

        Args:
            number: the layer's.
            values: its input, (N, C, ...).
            capture: the statistics of `values`, not counted yet.
        """
        if self.captures is None:
            return
        capture.count = values.numel() // values.shape[1] or NO_VALUES
        self.captures[number].append(capture)
        is_kept = torch.compiler.is_compiling() or (
            values.requires_grad and values.nbytes <= _SMALL_BYTES and torch.is_grad_enabled()
        )
        if is_kept and capture.is_flat:
            self.captures.unchecked.append((values, capture))
        else:
            capture.refine(values)

    # -- rows ----------------------------------------------------------------------------------------------

    def width(self, calls: tuple[int, ...]) -> int:
        """Columns of a row: for each call its count, means, rests, variances, and the momentum of a user's own norm."""
        return sum(map(_WIDTH, self.groups(calls)))

    @property
    def channels(self) -> int:
        """Those of all layers."""
        return sum(len(layer.norm.module._buffers[layer.norm.mean]) for layer in self.layers)

    def _make_groups(self, calls: tuple[int, ...]) -> list[LayerGroup]:
        each = [[n for n, times in enumerate(calls) if times > call] for call in range(max(calls, default=0))]
        return [LayerGroup(numbers, [self.layers[n].norm for n in numbers]) for numbers in each]

    def pack(self, captures: Captures, calls: tuple[int, ...], row: torch.Tensor) -> None:
        """Write a shard's captures into its row: for each call counts, means, rests, variances, own norms' momenta."""
        pieces: list[torch.Tensor] = []
        for call, group in enumerate(self.groups(calls)):
            found: list[BatchStatistics] = []
            for number, size in zip(group.numbers, group.sizes, strict=True):
                zeros = None if call < len(captures[number]) else row.new_zeros(size)
                found.append(captures[number][call] if zeros is None else BatchStatistics(0, zeros, zeros, zeros))
            pieces.append(self._numbers(tuple(map(_COUNT, found)), row.dtype, row.device))
            if len(found) == len(captures) and all(map(_IS_FLAT, found)):
                mean, variance = captures.whole.chunk(2)
                pieces += [mean, self._rest, variance]
            else:
                for kind in ("mean", "rest", "variance"):
                    pieces += map(attrgetter(kind), found)
            momenta = tuple(one.momentum for one in found[len(found) - group.own :])
            pieces.append(self._numbers(momenta, row.dtype, row.device))
        if pieces:
            torch.cat(pieces, out=row)

    def apply(self, rows: torch.Tensor, calls: tuple[int, ...], keep: torch.Tensor | None = None) -> None:
        """Update the running statistics with the pooled ones of all shards, one call after another.

        Args:
            rows: the packed rows of all shards, (S, width).
            calls: the most calls of each layer in any shard.
            keep: whether they stay as they are, shape (), bool.
        """
        groups = self.groups(calls)
        for group, columns in zip(groups, rows.split([*map(_WIDTH, groups)], dim=1), strict=True):
            group.move(group.pooled(columns), keep)


def _numbers(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Counts or momenta as a tensor; cached, as they are few."""
    return sent(torch.tensor(numbers, dtype=dtype, device="cpu"), device)


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
