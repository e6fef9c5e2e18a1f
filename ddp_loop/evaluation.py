"""Evaluation and prediction on a whole data set: every sample once, on any number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from inspect import signature
from math import nan
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, nll_loss

from ddp_loop.accelerators import is_asynchronous, sent
from ddp_loop.batch_norm import find_sync_channels
from ddp_loop.data import Batches, MiniBatch, Shard
from ddp_loop.determinism import check_count, preserved_streams, seed_evaluated
from ddp_loop.distributed import World, listed, require_one_model
from ddp_loop.torch_metrics import MetricStates
from ddp_loop.training import Sum, check_batches, check_mean, refuse_wrapped

Forward = Callable[[nn.Module, Any], Any]
Named = Mapping[str, Any] | None
_SUM = "a dl.Sum"
_FORWARD = "If the model returns anything else, pass forward=lambda model, data: ... that returns such a tensor."
_OF_ENTROPY = ("reduction", "ignore_index", "weight", "label_smoothing")
_LINEAR_ENTROPY = "LinearCrossEntropyLoss"  # has the last layer in it, in newer versions of torch
_ENTROPIES = {nn.CrossEntropyLoss, nn.NLLLoss, nn.NLLLoss2d, getattr(nn, _LINEAR_ENTROPY, nn.CrossEntropyLoss)}
Metric = Callable[..., torch.Tensor | np.ndarray[Any, Any] | float | Sum]


@contextmanager
def in_mode(model: nn.Module, mode: bool) -> Iterator[None]:
    """Training or evaluation mode; every module returns to its own, also after an exception.

    One with a `train()` of its own returns by that, which may do more, such as take a LoRA out of the weights that
    eval() merged it in. torch's would also call those of modules inside that are in their mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        (model.train if mode else model.eval)()
        yield
    finally:
        for module, before in modes:  # a module before those inside it
            if module.training != before and getattr(module.train, "__func__", None) is not nn.Module.train:
                module.train(before)
            module.training = before


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module returns to its mode, also after an exception."""
    refuse_wrapped({"model": model}, training=False)
    with in_mode(model, False), torch.no_grad():
        yield


def _split(data: Any) -> tuple[Any, tuple[Any, ...]]:
    """A shard's inputs, and the metrics' other arguments: the parts beside them, or else the data themselves."""
    if isinstance(data, tuple | list):
        return data[0], tuple(data[1:])
    return data, (data,)


def forward_first(model: nn.Module, data: Any) -> Any:
    """The model's output for the first part of a shard's data."""
    inputs, _ = _split(data)
    if isinstance(inputs, Mapping):
        raise TypeError(
            "The model takes the first part of each shard. These data are dicts. Pass forward=lambda model, data: ..."
        )
    return model(inputs)


def world_of(model: object, batches: object, what: str, functions: Mapping[str, object] | None = None) -> World:
    """The world of batches; raises TypeError for other arguments, such as swapped ones.

    Args:
        what: the name of the caller.
        functions: metrics.
    """
    world = check_batches(batches, what).world
    if not isinstance(model, nn.Module):
        raise TypeError(f"{what} takes a model, a torch.nn.Module, first. Got {type(model).__name__}.")
    for name, function in (functions or {}).items():
        if not callable(function):
            raise TypeError(f"A metric must be a function of the output and the data. {name} is {function!r}.")
    return world


@contextmanager
def _going_through(
    model: nn.Module, batches: Batches, what: str
) -> Iterator[Generator[tuple[MiniBatch, Shard, Any], None, None]]:
    """This rank's shards in evaluation mode, each on its own random stream. Every rank must call this.

    Mode and streams are restored, also after an exception.

    Args:
        what: the name of the caller, and the stage.

    Raises:
        RuntimeError, ReplicaMismatch: on every rank, where they called synced layers differently before, or where
            their models differ.
    """
    world = batches.world
    before = batches.world.stage
    with world.in_stage(what):
        world.require_collectives_allowed()
        for channel in find_sync_channels([model]):
            channel.check()
        require_one_model(model, world, what)
        key = world.begin_evaluation(before)
        torch.clear_autocast_cache()  # may hold weights from before an update; see Step
        with preserved_streams(world.device), evaluating(model), closing(_shards(batches, key)) as shards:
            yield shards


def _shards(batches: Batches, key: int) -> Generator[tuple[MiniBatch, Shard, Any], None, None]:
    world = batches.world
    if not batches.ends:
        raise ValueError("Evaluation passes over the data once. These data never end. Give Batches a length.")
    for loaded in batches.epoch(1):
        for number, shard in enumerate(loaded.mini_batch.shards):
            data = loaded.data(number)
            seed_evaluated(key, loaded.mini_batch.position, shard.number, world.device)
            yield loaded.mini_batch, shard, data
    if batches.length is None:
        batches.check_stream()


def evaluate(
    model: nn.Module, batches: Batches, *, forward: Forward | None = None, metrics: Named = None, **functions: Metric
) -> dict[str, float]:
    """The mean of each metric over all samples, exact on any number of ranks. Every rank must call this.

    sum_i(metric_i) / n in float64, in evaluation mode, each sample once, added up in the order of the shards.

    The result has the same bits on any number of ranks, for the same batch size: each mini-batch is cut into 8 shards,
    or into the S of `Batches(..., shards=S)`: a loss that compares samples needs `shards=1`. A rank's own data can be
    an exception; see docs/migrate.md. A model that is random gets a stream per shard; mode and streams are restored.

    Args:
        model: the same on every rank. Its parameters and buffers are compared first, without buffers that are "local"
            in a `Loop` or no part of the state dict.
        batches: usually with `shuffle=False`. A shard is an eighth of a mini-batch, so a larger `batch_size` is faster
            on few ranks, as far as memory allows.
        forward: `forward(model, data)` gives the output for a shard's data; by default the model takes the data's
            first part. It runs in the `torch.autocast` around the call, if there is one, and may enter its own.
        metrics: metrics of torchmetrics by name, also collections of them. They get the arguments of functions. Their
            states are merged in the order of the shards, and the objects themselves are not changed.
        functions: by name, `metric(output, *other parts of the data)`, or `metric(output, data)` where data are a
            single tensor or a dict; it returns one value per sample, (n,), or their mean, (). A `Sum` is added up, and
            divided by the sum of its `over` alone, such as boxes; torch's cross-entropy by its labels or weights.

    Returns:
        The means and sums by name, and the number of `samples`; the same on every rank.

    Raises:
        Stopped: the ranks have stopped, or are asked to between two steps of a loop or after it. It ends the script.
        ValueError: a metric of another shape, a count as a mean, one named "samples", metrics that differ between
            ranks, a sum in some shards alone, a metric of torchmetrics that cannot be merged exactly, or endless data.
        ReplicaMismatch: the models differ; on every rank.
        PeerFailed: another rank failed.
    """
    world, batches = world_of(model, batches, "evaluate", functions), batches.for_evaluation()
    states = MetricStates(metrics or {}, world.device)
    world.stops.raise_if_stopped()
    _agree_on_names([*functions, *states.names], world)
    totals = dict[int, list[torch.Tensor | float]]()  # the samples and metrics of each shard, by its place
    kinds: set[tuple[str, str]] = set()  # of the metrics
    with _going_through(model, batches, "evaluate") as shards:
        for mini_batch, shard, data in shards:
            output, others = (forward or forward_first)(model, data), _split(data)[1]
            place = mini_batch.position * batches.shards + shard.number
            values = {name: _value_of(name, one, output, others, shard.samples) for name, one in functions.items()}
            kinds |= {(name, _kind(value)) for name, value in values.items()}
            totals[place] = [shard.samples, *_totals_and_divisors(values, shard.samples)]
            states.update(place, output, others)
            if world.stops.breaks_off:
                break
    with world.in_stage("evaluate"):
        world.stops.agree()
        of_all = _require_one_kind(set().union(*world.gather(kinds, "the kinds of metrics")))
        samples, *sums = _added_up(totals, 1 + 2 * len(functions), world)
        merged = states.compute(world)
    found = _quotients(list(functions), of_all, sums)
    _check_names([*found, *merged])  # a metric may have several results
    result = {**found, **merged, "samples": int(samples)}
    world.on_evaluated(result)
    return result


def _quotients(names: Sequence[str], kinds: Mapping[str, str], sums: Sequence[float]) -> dict[str, float]:
    """Each metric from its total and its divisor; a plain sum is its total."""
    return {
        name: total if kinds.get(name) == _SUM else total / divisor if divisor else nan
        for name, total, divisor in zip(names, sums[::2], sums[1::2], strict=True)
    }


def _agree_on_names(names: list[str], world: World) -> None:
    _check_names(names)
    world.require_equal("the names of the metrics", names)


def _check_names(names: list[str]) -> None:
    if "samples" in names or len(set(names)) < len(names):
        raise ValueError(
            'A metric must have a name of its own, and not be named "samples", since the result has their number '
            f"there. Got {names}. Rename it."
        )


def _added_up(totals: Mapping[int, Sequence[torch.Tensor | float]], width: int, world: World) -> list[float]:
    """The sums of all shards' totals, `width` of them, added up in the order of the shards."""
    shards = max(world.gather(max(totals, default=-1))) + 1
    own = torch.zeros(shards, width, dtype=torch.float64, device="cpu")
    there: list[torch.Tensor] = []  # on the ranks' device
    places: list[int] = []
    for place, values in totals.items():
        for column, value in enumerate(values):
            if isinstance(value, torch.Tensor) and value.device == world.device:
                there.append(value)
                places.append(place * width + column)
            else:
                own[place, column] = float(value)
    whole = sent(own, world.device)
    if there:
        whole.view(-1)[sent(torch.tensor(places, device="cpu"), world.device)] = torch.stack(there)
    return cast(list[float], world.sum(whole).sum(0).tolist())


def _kind(value: object) -> str:
    """The kind of a metric, in words."""
    if not isinstance(value, Sum):
        return "a mean"
    return _SUM if value.over is None else f"{_SUM} with over="


def _require_one_kind(kinds: Collection[tuple[str, str]]) -> dict[str, str]:
    """The kind of each metric; raises ValueError if shards returned different ones."""
    for name, count in sorted(Counter(name for name, _ in kinds).items()):
        if count > 1:
            found = listed(sorted(kind for one, kind in kinds if one == name))
            raise ValueError(
                f"A metric must be of one kind in every shard. {name} is {found} in different shards. Return the same "
                "from each call."
            )
    return dict(kinds)


def _called(name: str, function: Metric, output: Any, others: tuple[Any, ...]) -> Any:
    """What a metric returns; raises TypeError, in other words than Python's, where it cannot take the arguments."""
    try:
        return function(output, *others)
    except TypeError as error:
        try:
            signature(function).bind(output, *others)
        except TypeError as unfit:
            raise TypeError(
                f"A metric is given the output and the parts of the data after the first, here {len(others)}. {name} "
                f"cannot be called so: {unfit}. Change its arguments; or, where the data are a tuple of one, pass its "
                "tensor as the data, Batches(x, ...), which a metric is then given as metric(output, x)."
            ) from error
        except ValueError:  # a function in C may have no signature
            pass
        raise


def _value_of(name: str, function: Metric, output: Any, others: tuple[Any, ...], samples: int) -> Any:
    """A metric of a shard; of torch's mean cross-entropy its total, and the labels or class weights that it is over."""
    value = _called(name, function, output, others)
    reduction, options = _reduction_of(function)
    if reduction == "sum":
        return Sum(cast(torch.Tensor, value))
    if options is None or reduction != "mean" or len(others) != 1 or others[0].is_floating_point():
        if not isinstance(value, Sum):
            _refuse_missing([output, *others], samples)
        return value
    labels = others[0].long()
    ignored = options.get("ignore_index")
    ignored = -100 if ignored is None else ignored
    counts = labels != ignored
    if (class_weights := options.get("weight")) is not None:
        counts = class_weights[labels.where(counts, 0)] * counts
    divisor = counts.sum(dtype=torch.float64)
    if class_weights is not None and (smoothing := options.get("label_smoothing", 0.0)):
        # Its part for the other classes counts for a label of weight 0 too.
        summed: dict[str, Any] = {"ignore_index": ignored, "reduction": "sum", "label_smoothing": smoothing}
        return Sum(cross_entropy(_logits_of(function, output), labels, class_weights, **summed), over=divisor)
    return Sum((value * divisor).where(divisor > 0, 0.0), over=divisor)


def _logits_of(entropy: Any, output: torch.Tensor) -> torch.Tensor:
    """A cross-entropy's logits, of which the last layer may be in it: (n, classes, ...)."""
    if type(entropy).__name__ != _LINEAR_ENTROPY:
        return output
    logits: torch.Tensor = entropy.linear(output)
    return logits.view(len(output), entropy.num_classes, *entropy.out_features)


def _reduction_of(function: Metric) -> tuple[str, Mapping[str, Any] | None]:
    """The reduction of torch's own losses, "mean" for all others; and the arguments of a cross-entropy, else None."""
    if isinstance(function, partial) and not function.args:
        options = function.keywords
        is_torchs = function.func.__module__ == cross_entropy.__module__
        is_entropy = function.func is cross_entropy or function.func is nll_loss
    else:
        kind = type(function)
        options = {name: getattr(function, name) for name in _OF_ENTROPY if hasattr(function, name)}
        is_torchs = kind.__module__ == nn.CrossEntropyLoss.__module__  # a class of the user's may divide otherwise
        is_functional = function is cross_entropy or function is nll_loss
        is_entropy = is_functional or kind in _ENTROPIES
    return _reduction_in(options) if is_torchs else "mean", options if is_entropy else None


def _reduction_in(options: Mapping[str, Any]) -> str:
    """The reduction by the arguments of one of torch's losses; as in torch the two deprecated ones go before it."""
    averages = options.get("size_average")
    reduces = options.get("reduce")
    if averages is None and reduces is None:
        return cast(str, options.get("reduction", "mean"))
    if reduces is not None and not reduces:
        return "none"
    return "mean" if averages is None or averages else "sum"


def _refuse_missing(parts: Sequence[Any], samples: int) -> None:
    """Raise ValueError if a shard's output and data have fewer rows than the shard has samples.

    Args:
        parts: the output and the data. A dimension of the samples may come later than the first one.
        samples: of the shard.
    """
    shapes = [part.shape for part in parts if isinstance(part, torch.Tensor) and part.dim()]
    rows = {shape[0] for shape in shapes}
    is_alike = len(shapes) > 1 and len(rows) == 1 and not any(samples in shape for shape in shapes)
    if is_alike and 0 < max(rows) < samples and samples % max(rows):  # pairs of samples have half as many
        raise ValueError(
            f"A metric is the mean over a shard's samples, {samples} in this one. Its data and the output have "
            f"{max(rows)} rows, as where collate_fn leaves samples out. Remove them from the data before, or return "
            "dl.Sum(total, over=rows)."
        )


def _totals_and_divisors(values: Mapping[str, Any], samples: int) -> Iterator[torch.Tensor | float]:
    """A shard's part of each metric's total and of its divisor; a plain sum has 0 for it."""
    for name, value in values.items():
        if not isinstance(value, Sum):
            total = _total(name, value, samples, is_sum=False)
            check_mean(name, value, samples)
            yield total
            yield samples
        else:
            yield _total(name, value.value, samples, is_sum=True)
            yield 0 if value.over is None else _total(name, value.over, samples, is_sum=True)


def _total(name: str, value: Any, samples: int, *, is_sum: bool) -> torch.Tensor | float:
    """A number where the host need not wait for it: each shard's stays until the end, and a tensor takes 2 kB."""
    if not isinstance(value, torch.Tensor | np.ndarray | np.generic | float | int):
        raise TypeError(f"A metric must return a tensor, an array or a number. {name} gave {type(value).__name__}.")
    values = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value), device="cpu")
    if values.is_complex():
        raise ValueError(f"A metric must be real. {name} gave {values.dtype}. Take its .abs() or .real.")
    if values.dim() and values.shape != (samples,):
        raise ValueError(
            f"A metric must return one value per sample, shape ({samples},), or their mean, shape (). {name} gave "
            f"shape {tuple(values.shape)}. Take the mean over its other dimensions."
        )
    total = values.double().sum() if values.dim() else values.double() * (1 if is_sum else samples)
    return total if is_asynchronous(total) else total.item()


def predict(model: nn.Module, batches: Batches, *, forward: Forward | None = None) -> torch.Tensor:
    """The model's output for every sample, in the data's order, on every rank. Every rank must call this.

    Row i belongs to sample i of the data, even if `batches` shuffles, and has the same bits on any number of ranks, as
    in `evaluate`. A sum of bytes, of each rank's rows and zeros, brings the rows together and leaves every bit as it
    is.

    Args:
        model, batches, forward: as in `evaluate`; the output has one row per sample, shape (n, ...).

    Returns:
        Shape (length, ...), on the world's device.

    Raises:
        ValueError: an output without a row per sample, or rows that differ in shape or dtype between shards;
            data that never end; `drop_last`.
        Stopped: as in `evaluate`.
        ReplicaMismatch: the models differ; on every rank.
        PeerFailed: another rank failed.
    """
    world = world_of(model, batches, "predict")
    world.stops.raise_if_stopped()
    if batches.length is None and batches.ends:
        raise ValueError("Predictions have a row per sample. The length of a stream is unknown. Pass a data set.")
    if batches.drop_last or batches.until != "all":
        raise ValueError(
            "Predictions are for every sample. These batches drop some. Create them with drop_last=False and "
            'until="all".'
        )
    batches = batches.for_evaluation()
    forms: list[tuple[tuple[int, ...], torch.dtype]] = []
    whole: torch.Tensor | None = None
    with _going_through(model, batches, "predict") as shards:
        for mini_batch, shard, data in shards:
            output = (forward or forward_first)(model, data)
            if not isinstance(output, torch.Tensor) or output.shape[:1] != (shard.samples,):
                what = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
                raise ValueError(f"Predictions need a row per sample, ({shard.samples}, ...). Got {what}. {_FORWARD}")
            form = (tuple(output.shape[1:]), output.dtype)
            if form not in forms:
                forms.append(form)
            if whole is None:
                whole = _zeros(batches, form)
            if form == forms[0]:  # copied at once: a model may use one buffer for all its outputs
                at = batches.indices(1, mini_batch.start + shard.start, shard.samples)
                whole[sent(at, world.device)] = output.to(world.device)
            if world.stops.breaks_off:
                break
    with world.in_stage("predict"):
        world.stops.agree()
        found = dict.fromkeys(form for forms in world.gather(forms) for form in forms)
        if len(found) > 1:
            raise ValueError(
                f"Predictions must have rows of one shape and dtype for all shards. Got {list(found)}. Pad them to one "
                "shape."
            )
        whole = _zeros(batches, next(iter(found))) if whole is None else whole
        world.sum(whole.view(torch.uint8))
    return whole


def _zeros(batches: Batches, form: tuple[tuple[int, ...], torch.dtype]) -> torch.Tensor:
    shape, dtype = form
    return torch.zeros((batches.length or 0, *shape), dtype=dtype, device=batches.world.device)


def confusion_matrix(
    model: nn.Module, batches: Batches, classes: int, *, forward: Forward | None = None
) -> torch.Tensor:
    """The number of samples of each class that are predicted as each class, exact on any number of ranks.

    counts[i, j] is the number of samples of class i whose largest output is class j's; of equal outputs the first
    counts. Each sample counts once, in evaluation mode; the counts are the same on any number of ranks, as in
    `evaluate`. `Loop.log_table` keeps the matrix with a run. Every rank must call this.

    Args:
        model, batches, forward: as in `evaluate`; the output has shape (n, classes). The second part of the data are
            the labels, (n,) integers.
        classes: the number of classes.

    Returns:
        Shape (classes, classes), int64, rows the truth and columns the predictions, on the world's device; the same on
        every rank.

    Raises:
        ValueError: labels outside of 0 to classes - 1, on every rank; an output or labels of another shape or kind;
            data that never end.
        Stopped: as in `evaluate`.
        ReplicaMismatch: the models differ; on every rank.
        PeerFailed: another rank failed.
    """
    world = world_of(model, batches, "confusion_matrix")
    world.stops.raise_if_stopped()
    classes = check_count("classes", classes)
    world.require_equal("classes", classes)
    outside = classes * classes  # the place of labels that are no class
    counts = torch.zeros(outside + 1, dtype=torch.int64, device=world.device)
    with _going_through(model, batches.for_evaluation(), "confusion_matrix") as shards:
        for _, shard, data in shards:
            output = (forward or forward_first)(model, data)
            labels = _labels_of(data, shard.samples)
            if not isinstance(output, torch.Tensor) or output.shape != (shard.samples, classes):
                what = f"shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else type(output).__name__
                raise ValueError(
                    f"The output must have one value per sample and class, shape ({shard.samples}, {classes}). Got "
                    f"{what}. Pass classes= the number of outputs. {_FORWARD}"
                )
            labels = labels.to(world.device, torch.int64)
            places = labels * classes + output.argmax(1).to(world.device)
            places = torch.where((labels >= 0) & (labels < classes), places, outside)
            counts.index_add_(0, places, torch.ones_like(places))
            if world.stops.breaks_off:
                break
    with world.in_stage("confusion_matrix"):
        world.stops.agree()
        world.sum(counts)
    if number := int(counts[outside]):
        raise ValueError(
            f"Labels must be from 0 to {classes - 1}, with classes={classes}. {number} of the labels are not. Pass "
            "classes= their number, or number the classes from 0."
        )
    return counts[:outside].view(classes, classes)


def _labels_of(data: Any, samples: int) -> torch.Tensor:
    """The labels of a shard's samples: integers, the second part of its data."""
    labels = data[1] if isinstance(data, tuple | list) and len(data) > 1 else None
    is_integer = isinstance(labels, torch.Tensor) and not (labels.is_floating_point() or labels.is_complex())
    if not isinstance(labels, torch.Tensor) or not is_integer or labels.shape != (samples,):
        what = type(labels).__name__ if labels is not None else type(data).__name__ + " without a second part"
        what = f"{labels.dtype} of shape {tuple(labels.shape)}" if isinstance(labels, torch.Tensor) else what
        raise ValueError(
            f"Labels must be integers, one per sample, shape ({samples},), in the second part of the data. Got {what}. "
            "Pass batches of (inputs, labels)."
        )
    return labels
