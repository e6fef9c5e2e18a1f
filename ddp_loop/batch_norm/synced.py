"""Batch norm over the whole mini-batch, synced in every forward: a model's layers converted, and converted back.

[Note: One length] gloo ends the process (SIGABRT) when ranks meet in sums of different sizes. So all messages of a
model, its words included, have the length that its widest layer needs. Ranks that call their layers differently then
meet in one sum, and its header tells them apart.

[Note: Rows of a message] A message has a row for each rank. A rank fills its own and puts -0.0 into all others, which
leaves every bit as it is. So the sum brings the rows together, and each rank merges them in rank order. A row is `the
rank's place, the number of values per channel, room for a square | the layer's values`.

[Note: One row] Rows grow with the ranks. With more than `_MOST_ROWS` ranks a message has one row, to which all add.
Forward adds the moments n, n mean and n (var + mean^2), in float64: the variance is off by about 1e-16 mean^2, which is
1e-6 of it where the mean is 50,000 deviations from 0. Backward adds its sums. In the header all add a mark p of their
place, below 2^16, and its square: on N ranks N sum(p^2) = sum(p)^2 exactly if all marks are the same. Otherwise the
ranks gather their places.

[Note: Late] Reading a header on a GPU would make the host wait. So each rank keeps a digest of its own headers, and the
hosts compare the digests at the end of a pass, in a small collective of their own. Ranks that called the layers in
another order, or more of them, raise in the same step, before sums of different lengths follow. Between passes the
digests are compared every so many messages.

[Note: Passes] On the CPU these are torch's kernels of local batch norm, split where the ranks communicate. Forward
takes two passes over the values for the statistics and one to normalise, as torch does. Backward takes one pass for the
sums and two for the gradient; torch takes one for the gradient, but its kernel does not accept the sums of other ranks.
On a GPU each is one kernel of torch's SyncBatchNorm.

[Note: float32 by columns] If the channels lie innermost (channels last, or no positions), torch's CPU kernel adds
float32 values one by one. For 36,864 values with mean 1,000 and deviation 1, the mean is off by 5e-3.
`refine_statistics` corrects it, and the rounding of the mean, and computes the variance around the true mean.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once, for 3 s
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from ddp_loop.accelerators import accelerator_of
from ddp_loop.batch_norm.capture import custom_norms, refine_statistics
from ddp_loop.batch_norm.pooled import from_moments, pool_with_count
from ddp_loop.distributed import World, listed

_ATTRIBUTES = ("_channel", "_number", "_origin")  # attributes that a synced layer has beside its own
_KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
FORWARD = 0
BACKWARD = 1
ENDS_PASS = "the end of its pass"
ENDS_LOOP = "the end of its loop"
WORDS = (ENDS_PASS, ENDS_LOOP)
_KINDS = 2 + len(WORDS)
_HEADER = 3
_MOST_ROWS = 8
_MARKS = 2**16  # so that the squares of all ranks' sums are exact in float64
_MANY = 256  # headers between two comparisons
_WHAT = "a comparison of the calls of synced batch norm"
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_SECOND_DERIVATIVE = (
    "Synced batch norm has no second derivative, as a gradient penalty needs one. The sums over ranks in its backward "
    "are not differentiated. Use dl.local_batch_norm(model), or a norm without the batch, such as nn.GroupNorm."
)


class CallMismatch(RuntimeError):
    """The ranks end their loop alike, but called the layers differently before."""


class SyncChannel:
    """The messages between the ranks of `world` inside one synced model.

    A deepcopy of the model uses the same channel. Pickled it is None: an unpickled model has no world.

    Args:
        world: from `join_world`.
        names: of the model's layers, the same on every rank.
        channels: of the widest layer.
    """

    def __init__(self, world: World, names: Sequence[str], channels: int) -> None:
        self.size = world.size
        self.adds_up = world.size > _MOST_ROWS  # see [Note: One row]
        self.device = world.device
        self._shape = (1 if self.adds_up else world.size, _HEADER + 2 * channels)  # of a message
        self._world = world
        self.names = tuple(names)
        self._late = world.accelerator.is_asynchronous  # see [Note: Late]
        self.calls = 0  # of layers in this pass
        self.is_gathered = False  # whether each rank has the whole mini-batch, so that layers need no others
        self._mask: torch.Tensor | None = None
        self._noted: list[tuple[int, int]] = []  # place and count of each message since the last comparison

    def __deepcopy__(self, memo: dict[int, object]) -> SyncChannel:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    @contextmanager
    def masking(self, mask: torch.Tensor) -> Iterator[None]:
        """Where `mask`, shape () bool, is true, a backward inside adds nothing to the ranks' sums, not even NaN."""
        self._mask = mask
        try:
            yield
        finally:
            self._mask = None

    def masked(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient with 0 for NaN and infinity from the rank's own loss, of weight 0; the others' part counts."""
        if self._mask is None:
            return gradient
        return gradient.masked_fill(self._mask.to(gradient.device) & ~gradient.isfinite(), 0.0)

    def send(
        self, layer: int, call: int, count: int, kind: int, *values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange a layer's values with all ranks. Every rank must call this.

        Args:
            layer: its number among the names.
            call: its number in this pass, which its backward sends too.
            count: the number of values per channel on this rank.
            kind: FORWARD or BACKWARD.
            values: K tensors, (C,) each.

        Returns:
            The counts of all ranks, (size, 1), and their values, (size, K, C), in rank order, float64; (1, 1) and
            (1, K, C), added up, where it `adds_up`.

        Raises:
            RuntimeError: the ranks are not at the same place, or the world was left.
            ValueError: a channel has a single value, over all ranks together.
            PeerFailed: another rank failed.
        """
        if self._world.is_left:
            raise RuntimeError(
                "Synced batch norm trains inside the world of its model. This world was left. Call "
                "local_batch_norm(model), model.eval(), or sync_batch_norm(model, world) with a new world."
            )
        message = torch.full(self._shape, -0.0, dtype=torch.float64, device=self.device)
        row = message[0 if self.adds_up else self._world.rank]
        place = (call * len(self.names) + layer) * _KINDS + kind
        mark = place % _MARKS
        for column, number in enumerate((mark, count, mark * mark) if self.adds_up else (place, count)):
            row[column].fill_(number)  # row[column] = number would make a GPU's host wait
        end = _HEADER + sum(map(len, values))
        if values:
            row[_HEADER:end].copy_(torch.cat(values))
        self._world.finish(self._world.start_sum(message))
        head = message[:, :_HEADER]
        if self._late:
            self._noted.append((place, count))
            if len(self._noted) == _MANY:
                self.check()
        elif not self.adds_up:
            self._require_alike(head[:, :2].tolist())
        else:
            marks, counts, squares = head[0].tolist()
            if self.size * squares != marks * marks or counts == 1:
                self._require_alike(self._world.gather((place, count), _WHAT, in_step=True))
        return head[:, 1:2], message[:, _HEADER:end].view(len(message), len(values) or 1, -1)

    def send_control(self, what: str = ENDS_PASS) -> None:
        """Send where this rank is outside of the layers, one of WORDS. Every rank must call this.

        It precedes each sum of another length, so that a rank that called fewer layers raises.

        Raises:
            RuntimeError: another rank is elsewhere.
        """
        if what not in WORDS:
            raise ValueError(f"A word must be one of {WORDS}. Got {what!r}.")
        self.calls = 0
        kind = 2 + WORDS.index(what)
        if self._late:
            self._noted.append((kind, 2))
            self.check()
        else:
            self.send(0, 0, 2, kind)

    def check(self) -> None:
        """Raise, as `send` would, where calls differed since the last check; waits for no device.

        Every rank must call this.
        """
        if not self._late or self._world.is_left:
            return
        noted = self._noted
        self._noted = []
        digest = hashlib.sha256(repr([place for place, _ in noted]).encode()).digest()
        has_values = all(count > 1 for _, count in noted)  # on one rank is enough
        number = (int.from_bytes(digest[:7], "little") << 1) + has_values
        numbers = self._world.numbers(number, _WHAT, in_step=True)
        if len({number >> 1 for number in numbers}) == 1 and any(number & 1 for number in numbers):
            return
        every = self._world.gather(noted, _WHAT, in_step=True)
        for heads in zip_longest(*every, fillvalue=(math.nan, 2)):
            try:
                self._require_alike(heads)
            except RuntimeError as error:
                if all(headers[-1:] == [(2 + WORDS.index(ENDS_LOOP), 2)] for headers in every):
                    raise CallMismatch(str(error)) from None
                raise

    def _require_alike(self, heads: Sequence[Sequence[float]]) -> None:
        """Raise on every rank alike, unless all are at the same place, with more than one value."""
        first = heads[0][0]
        for rank, (place, _) in enumerate(heads):
            if place != first:
                raise RuntimeError(
                    f"rank 0 is at {self._place(first)}, rank {rank} at {self._place(place)}. Every rank must call the "
                    "layers of a synced model alike, forward and backward, also ranks without samples. Call train() "
                    "and eval() on all ranks alike."
                )
        counts = [int(count) for _, count in heads]
        if sum(counts) == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, over all ranks together. Got {counts} at "
                f"{self._place(first)}. Use a larger mini-batch, or set the layer to eval()."
            )

    def _place(self, place: float) -> str:
        if not float(place).is_integer():
            return "another collective"
        number, kind = divmod(int(place), _KINDS)
        if kind >= 2:
            return WORDS[kind - 2]
        call, layer = divmod(number, len(self.names))
        return f"the {'backward' if kind else 'forward'} of layer `{self.names[layer]}` (call {call} of its pass)"


def _format(values: torch.Tensor) -> torch.memory_format:
    """The memory format that the kernels take values (N, C, ...) in: their own, or contiguous for other strides."""
    return next(
        (memory_format for memory_format in _FORMATS if values.is_contiguous(memory_format=memory_format)),
        torch.contiguous_format,
    )


def _dtype(values: torch.Tensor) -> torch.dtype:
    """The dtype of the statistics passed to the kernels: float64 for float64 values, else float32."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def statistics(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each channel of dense values (N, C, ...), both (C,) float64; zeros without values.

    Also accurate in float32 for a mean far from 0, except on a GPU for the rounding of the mean itself.
    """
    if values.numel() == 0:
        nothing = values.new_zeros(values.shape[1], dtype=torch.float64)
        return nothing, nothing
    # Without spare ones the CPU's kernel rounds the statistics to bfloat16.
    spare = None if values.dtype == _dtype(values) else values.new_zeros(values.shape[1], dtype=torch.float32)
    mean, variance = torch.batch_norm_update_stats(values, spare, spare, 0.0)
    refined = refine_statistics(values, mean, variance)
    if refined is None:
        return mean.double(), variance.double()
    rest, biased = refined
    return mean.double() + rest, biased.double()


def _scaled(values: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    """(values - mean) scale + shift in one pass: torch's batch norm in evaluation, at variance 1 and eps 0."""
    return torch.native_batch_norm(values, scale, shift, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]


def _as(mean: torch.Tensor, parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.to(mean.dtype)


class Normalisation(torch.autograd.Function):
    """Values normalised by the statistics of all ranks, which depend on the values of all ranks.

    A rank's values get the gradient of the sum of all ranks' losses. Weight and bias get only the rank's own part of
    theirs, which the fold sums over the ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        deviation_inverse: torch.Tensor,
        total: torch.Tensor,
        send: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        masked: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """weight (values - mean) deviation_inverse + bias, in the dtype and memory format of the values.

        Args:
            total: the number of values per channel on all ranks, (1,) float64.
            send: takes this rank's sum(gradient) and sum(gradient (values - mean)) of each channel; returns, after the
                counts, the sums of all ranks, (ranks, 2, C) float64 in rank order.
            masked: returns a gradient without the parts that do not count.
        """
        ctx.send = send
        ctx.masked = masked
        ctx.save_for_backward(values, weight, mean, deviation_inverse, total)
        if values.numel() == 0:
            return torch.empty_like(values)
        weight = _as(mean, weight)
        bias = _as(mean, bias)
        if accelerator_of(values.device).has_batch_norm_kernels:
            return torch.batch_norm_elemt(values, weight, bias, mean, deviation_inverse, 0.0)
        return _scaled(values, mean, deviation_inverse if weight is None else deviation_inverse * weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients. Every rank must call this if the values require a gradient."""
        gradients = _gradients(ctx, gradient)
        if not torch.is_grad_enabled():
            return gradients
        refuse = torch._C._functions.DelayedError(_SECOND_DERIVATIVE, 1)  # under create_graph=True
        return tuple(None if gradient is None else refuse(gradient.detach().requires_grad_()) for gradient in gradients)


@torch.no_grad()
def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the sum of all ranks' losses with respect to the values, and of this rank's to weight and bias.

        of_values = weight d (gradient - sums[0] / M - (values - mean) d^2 sums[1] / M)

    with d = deviation_inverse, M = total, and sums[0] = sum(gradient), sums[1] = sum(gradient (values - mean)), both
    over all ranks.

    Source: Ioffe, Szegedy: Batch Normalization, 2015, section 3.
    """
    values, weight, mean, deviation_inverse, total = ctx.saved_tensors
    dtype = mean.dtype
    has_kernels = accelerator_of(values.device).has_batch_norm_kernels
    gradient = ctx.masked(gradient).contiguous(memory_format=_format(values))
    if values.numel() == 0:
        alone = by_values = torch.zeros_like(mean)
    elif has_kernels:
        alone, by_values, *_ = torch.batch_norm_backward_reduce(
            gradient, values, mean, deviation_inverse, None, True, False, False
        )
    else:
        _, by_values, alone = torch.ops.aten.native_batch_norm_backward(
            gradient, values, None, None, None, mean, torch.ones_like(mean), True, 0.0, [False, True, True]
        )
    of_weight = by_values * deviation_inverse if ctx.needs_input_grad[1] else None
    of_bias = alone if ctx.needs_input_grad[2] else None
    of_values = None
    if ctx.needs_input_grad[0]:
        sums = ctx.send(alone, by_values)[1].sum(0)
        if values.numel() == 0:
            of_values = torch.zeros_like(values)
        elif has_kernels:
            alone, by_values = sums.to(dtype)
            of_values = torch.batch_norm_backward_elemt(
                gradient, values, mean, deviation_inverse, _as(mean, weight), alone, by_values, total.to(torch.int32)
            )
        else:
            inverse = deviation_inverse.double()
            scale = inverse if weight is None else inverse * weight.to(dtype)
            shift = -scale * sums[0] / total
            slope = -scale * inverse * inverse * sums[1] / total
            result = _scaled(values.to(dtype), mean, slope.to(dtype), shift.to(dtype))
            result.addcmul_(gradient.to(dtype), scale.to(dtype).view(1, -1, *[1] * (values.dim() - 2)))
            of_values = result.to(values.dtype)
    return of_values, of_weight, of_bias, *(None,) * 5  # autograd gives them their parameters' types


class SyncedBatchNorm(_BatchNorm):
    """Batch norm by the statistics of all ranks' values; made by `sync_batch_norm`.

    In training, forward and backward are one collective each. In evaluation, in a world of one, unpickled, and between
    `step.gather` and the fold it is torch's own.
    """

    _channel: SyncChannel | None = None
    _number = 0  # among the layers of the channel
    _origin: type[_BatchNorm] = nn.SyncBatchNorm  # its class before

    @property
    def is_synced(self) -> bool:
        """Whether other ranks take part in its forward while it trains."""
        return self._channel is not None and self._channel.size > 1

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002
        self._origin._check_input_dim(self, input)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Normalise, (N, C, ...); N may be 0 on some ranks. Every rank must call this, while training."""
        if self.training and (channel := self._channel) is not None and channel.size > 1 and not channel.is_gathered:
            return self.normalise(input, channel)
        return super().forward(input)

    @_disable_dynamo
    def normalise(self, values: torch.Tensor, channel: SyncChannel) -> torch.Tensor:
        """Normalise by the statistics of all ranks' values, and move the running ones. Every rank must call this.

        torch.compile skips it: a collective has nothing to compile, and the values that it depends on always change.

        Raises:
            ValueError: values that do not fit the layer, or a single value per channel, over all ranks together.
        """
        self._check_input_dim(values)
        name = channel.names[self._number]
        if values.shape[1] != self.num_features:
            raise ValueError(
                f"Layer `{name}` takes {self.num_features} channels, (N, {self.num_features}, ...). Got "
                f"{tuple(values.shape)}. Give it such values, also where there are no samples."
            )
        if values.device != channel.device:
            raise ValueError(
                f"A synced model computes on its world's device. Layer `{name}` got values on {values.device}, the "
                f"world is on {channel.device}. Move the model and its data by .to(world.device)."
            )
        values = values.contiguous(memory_format=_format(values))
        count = values.numel() // self.num_features
        channel.calls += 1
        send = partial(channel.send, self._number, channel.calls, count)
        dtype = _dtype(values)
        with torch.no_grad():
            mean, variance = statistics(values)
            if channel.adds_up:
                counts, sums = send(FORWARD, count * mean, count * (variance + mean.square()))
                total = counts[0]
                mean, variance = from_moments(total, *sums[0])
            else:
                counts, rows = send(FORWARD, mean, variance)
                total, mean, variance = pool_with_count(counts, rows[:, 0], rows[:, 1])
            self._move(mean, variance * (total / (total - 1).clamp(min=1)), total > 0)
            inverse = (variance + self.eps).rsqrt()
        arguments = (mean.to(dtype), inverse.to(dtype), total, partial(send, BACKWARD), channel.masked)
        result: torch.Tensor = Normalisation.apply(  # type: ignore[no-untyped-call]
            values, self.weight, self.bias, *arguments
        )
        return result

    def _move(self, mean: torch.Tensor, unbiased: torch.Tensor, has_values: torch.Tensor) -> None:
        """Move the running statistics as torch does, past the version counter: other graphs may hold them.

        Without values on any rank torch counts the call, and leaves them as they are.
        """
        if not self.track_running_stats:
            return
        factor: float | torch.Tensor = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / self.num_batches_tracked.double()
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            if running is not None:
                share = factor.to(running.dtype) if isinstance(factor, torch.Tensor) else factor
                running.data.lerp_(torch.where(has_values, new.to(running.dtype), running), share)


def sync_batch_norm(model: nn.Module, world: World) -> nn.Module:
    """Make each batch norm below `model` normalise by the values of all ranks, in place. Every rank must call this.

    nn.BatchNorm1d, 2d and 3d, and nn.SyncBatchNorm, are replaced in their parents by layers that share their
    parameters, buffers and hooks. So an existing optimizer and the names in the state dict stay valid. A reference to
    such a layer outside of the model still leads to the local layer. Models that call each other are converted
    together, `sync_batch_norm(nn.ModuleList([one, other]), world)`.

    In training every rank calls the layers alike, with an input of no rows, (0, C, ...), where it has no samples.

    Args:
        model: the same on every rank.
        world: from `join_world`.

    Returns:
        `model`; the new layer, if `model` is such a layer itself.

    Raises:
        ValueError: a lazy layer without a shape, a batch norm of another class, or other layers on other ranks.
    """
    layers: dict[str, _BatchNorm] = {}
    problem: ValueError | None = None
    for name, layer in model.named_modules():
        if not isinstance(layer, _BatchNorm):
            continue
        shown = name or "the model itself"
        layers[shown] = layer
        if isinstance(layer, LazyModuleMixin):
            problem = problem or ValueError(
                f"A batch norm must have its shape before it is synced. `{shown}` is a lazy one. Run the model once."
            )
        elif type(layer) not in (*_KNOWN, SyncedBatchNorm):
            problem = problem or ValueError(
                f"sync_batch_norm takes nn.BatchNorm1d, 2d, 3d and nn.SyncBatchNorm. `{shown}` is a "
                f"{type(layer).__name__} with its own forward. Use one of these there, or sync the other parts."
            )
    world.raise_if_any_failed(problem)
    others = [norm.module for norm in custom_norms(model.modules())]
    others += [
        one for one in model.modules() if isinstance(one, torch.jit.ScriptModule) and hasattr(one, "running_var")
    ]
    if others and world.rank == 0:
        names = sorted({getattr(one, "original_name", type(one).__name__) for one in others})
        warnings.warn(
            f"sync_batch_norm leaves {listed(names)} as it is, a class with running statistics of its own. Where its "
            "forward normalises by a batch, that is each shard's. Use nn.BatchNorm1d, 2d or 3d there.",
            stacklevel=2,
        )
    facts = attrgetter("num_features", "eps", "momentum", "affine", "track_running_stats")
    descriptions = [f"{name}: {', '.join(map(str, facts(layer)))}" for name, layer in layers.items()]
    world.require_equal("the batch-norm layers of a synced model", descriptions)
    channel = SyncChannel(world, list(layers), max((layer.num_features for layer in layers.values()), default=0))
    made: dict[nn.Module, nn.Module] = {}
    for number, layer in enumerate(layers.values()):
        synced = made[layer] = SyncedBatchNorm.__new__(SyncedBatchNorm)
        synced.__dict__.update(layer.__dict__)  # the same parameters, buffers and hooks, in the same dictionaries
        synced.__dict__.setdefault("_origin", type(layer))
        synced._channel = channel
        synced._number = number
    return _replace(model, made)


def local_batch_norm(model: nn.Module) -> nn.Module:
    """Turn the layers of `sync_batch_norm` back into the original kinds, with the same tensors, in place.

    Args:
        model: from `sync_batch_norm`, or any other.

    Returns:
        `model`; the local layer, if `model` is such a layer itself.
    """
    made: dict[nn.Module, nn.Module] = {}
    for layer in model.modules():
        if isinstance(layer, SyncedBatchNorm):
            local = made[layer] = layer._origin.__new__(layer._origin)
            local.__dict__.update({name: value for name, value in layer.__dict__.items() if name not in _ATTRIBUTES})
    return _replace(model, made)


def find_sync_channels(modules: Iterable[nn.Module]) -> list[SyncChannel]:
    """The channels of all synced layers below these modules, each once, in order."""
    layers = [layer for module in modules for layer in module.modules() if isinstance(layer, SyncedBatchNorm)]
    return list(dict.fromkeys(layer._channel for layer in layers if layer._channel is not None))


def _replace(model: nn.Module, made: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replace the keys of `made` by its values, below `model`."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and child in made:
                module._modules[name] = made[child]
    return made.get(model, model)
