"""Checks of the script's input: a Loop's arguments and models, a shard's loss, weight and metrics."""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ddp_loop.accelerators import is_asynchronous
from ddp_loop.batch_norm import SyncChannel, batch_norm_layers
from ddp_loop.data import Batches
from ddp_loop.determinism import check_count
from ddp_loop.distributed import each_module, find_modules, format_error

Part = TypeVar("Part")
OnNonFinite = Literal["raise", "skip", "allow"]
_OF_DATA = (TypeError, AttributeError, ValueError, LookupError)  # raised by a list of shards in place of tensors
_OF_STEPS = re.compile(r"values to unpack|(not|got) Step\b|'Step'")
_INNER_LOOP = (
    "A Loop yields steps, and each step the data of this rank's shards. Write `for step in loop:`, and inside it "
    "`for images, labels in step:`."
)
_SCALER = (
    'on_nonfinite="skip" left this step without gradients, which a GradScaler outside of the state cannot know. Pass '
    "Loop state=dict(model=model, optimizer=optimizer, scaler=scaler)."
)
_MORE_SHARDS = (
    "More shards need less memory: Batches(..., shards=8) computes an eighth of a mini-batch at a time, with the "
    "same sums."
)


def explain(error: BaseException, *, taken_for_data: bool, all_read: bool, skips: bool) -> None:
    """Add a note with the remedy to an error by which a script left a step, if it is known.

    Args:
        error: of the script.
        taken_for_data: whether no shard of the step had a backward.
        all_read: whether all its shards were read.
        skips: whether steps are skipped without a GradScaler.
    """
    text = format_error(error)
    if taken_for_data and isinstance(error, _OF_DATA) and (all_read or _OF_STEPS.search(text)):
        error.add_note(_INNER_LOOP)
    elif skips and "No inf checks were recorded" in text:
        error.add_note(_SCALER)
    elif isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        error.add_note(_MORE_SHARDS)


def warn(message: str) -> None:
    """Warn at the line of the script that called the package."""
    level = 1
    while str(sys._getframe(level).f_globals.get("__name__")).startswith("ddp_loop."):
        level += 1
    warnings.warn(message, stacklevel=level + 1)


def check_batches(batches: object, taker: str = "A Loop") -> Batches:
    """The batches of a Loop or an evaluation; raises TypeError for anything else, such as a DataLoader."""
    if isinstance(batches, Batches):
        return batches
    data = "loader.dataset, loader.batch_size" if isinstance(batches, DataLoader) else "data, batch_size"
    raise TypeError(
        f"{taker} takes its mini-batches from Batches. Got {type(batches).__name__}. Pass dl.Batches({data}, world)."
    )


_TOO_LARGE = "A model that is too large for one device needs a program for sharded ones, such as torchtitan."


def folder_of(run_dir: str | Path | None) -> Path | None:
    """The run folder by its whole path.

    Raises:
        ValueError: it has no name; the current folder would become one.
    """
    if run_dir == "":
        raise ValueError("run_dir must name a folder. Got ''. Pass None for a run that keeps nothing.")
    return None if run_dir is None else Path(os.path.abspath(run_dir))


def check_state(state: object) -> dict[str, object]:
    """A copy of the job's state.

    Raises:
        TypeError: it is no mapping by name, holds a class, or holds modules or optimizers in lists or dicts.
        ValueError: a rank holds a part of an optimizer, or of one of its parameters; a part contains itself.
    """
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise TypeError(
            f"state must be a dict of the job's parts by name. Got {type(state).__name__}. Pass "
            "state=dict(model=model, optimizer=optimizer)."
        )
    for name, value in state.items():
        if isinstance(value, type):
            raise TypeError(
                f"state holds what a job trains, not classes. {name!r} is {value.__name__}. Pass an instance."
            )
        try:
            holds_modules = not isinstance(value, nn.Module | Optimizer) and _holds_modules(value)
        except RecursionError:
            raise ValueError(f"state[{name!r}] has too many levels, or contains itself. Make it flatter.") from None
        if holds_modules:
            raise TypeError(
                f"Each module and optimizer in state needs a name of its own. {name!r} is a {type(value).__name__} of "
                "them. Give each a name, or join modules by nn.ModuleList(...) or nn.ModuleDict(...)."
            )
        if isinstance(value, Optimizer):
            _check_whole(name, value)
    return dict(state)


_SHARDED = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer", "DistributedOptimizer")


def _check_whole(name: str, optimizer: Optimizer) -> None:
    """Raise ValueError if torch divides an optimizer, or one of its parameters, over the ranks."""
    kind = next((kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in _SHARDED), None)
    if kind is not None:
        raise ValueError(
            f"Every rank must hold the whole optimizer. {name!r} is torch's {kind}, which keeps or averages a part on "
            "each rank. Pass the optimizer inside it, such as torch.optim.AdamW(model.parameters())."
        )
    for number, group in enumerate(optimizer.param_groups):
        for k, parameter in enumerate(group["params"]):
            _refuse_partial(f"{name}.{number}.{k}", parameter)


def _refuse_partial(name: str, parameter: nn.Parameter | None) -> None:
    """Raise ValueError if each rank holds a part of a parameter."""
    if type(parameter).__name__ == "DTensor":
        raise ValueError(
            f"Every rank must hold each parameter whole. {name} is a DTensor, a part of one. Build the model without "
            f"parallelize_module, fully_shard or distribute_tensor. {_TOO_LARGE}"
        )


def _holds_modules(value: object) -> bool:
    """Whether it is a module or an optimizer, or some are in nested lists and dicts."""
    if isinstance(value, Mapping):
        return any(map(_holds_modules, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(_holds_modules, value))
    return isinstance(value, nn.Module | Optimizer)


def parts_of(state: Mapping[str, object], kind: type[Part]) -> list[Part]:
    """The parts of a job's state of one kind."""
    return [part for part in state.values() if isinstance(part, kind)]


def enabled_scalers(state: Mapping[str, object]) -> list[GradScaler]:
    """The GradScalers of a job's state that scale losses."""
    return [scaler for scaler in parts_of(state, GradScaler) if scaler.is_enabled()]


def check_trainable(parameters: Mapping[str, nn.Parameter], state: Mapping[str, object]) -> None:
    """Raise ValueError unless a parameter of the state wants a gradient."""
    if not any(parameter.requires_grad for parameter in parameters.values()):
        got = f"Got {sorted(state)} without any. Pass state=dict(model=model, optimizer=optimizer)."
        if parameters:
            got = f"All {len(parameters)} of {sorted(state)} have requires_grad=False. Set it to True for some."
        raise ValueError(f"state must hold a module or an optimizer with parameters to train. {got}")


def check_tables(modules: Mapping[str, nn.Module]) -> None:
    """Raise ValueError if torch divides the gradient of a table by how often a shard has each row of it."""
    for name, module in modules.items():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
            raise ValueError(
                f"With several shards a table must not have scale_grad_by_freq=True. {name} has it, and torch would "
                "divide by how often a row is used in the shard, not in the mini-batch. Make it with "
                "scale_grad_by_freq=False, or train with Batches(..., shards=1)."
            )


def check_arguments(
    batches: Batches,
    epochs: int | None,
    steps: int | None,
    resume: object,
    on_nonfinite: str,
    check_replicas_every: object,
    bucket_cap_mib: float | None,
    reduce_dtype: object,
) -> None:
    """Raise ValueError unless the loop has an end, its sums a size and dtype, and its checks a rule and a frequency.

    A text as `resume`, such as "False" of a command line, must not count as True.
    """
    if bucket_cap_mib is not None and not (isinstance(bucket_cap_mib, Real) and bucket_cap_mib > 0):
        raise ValueError(f"bucket_cap_mib must be a size in MiB, more than 0. Got {bucket_cap_mib!r}.")
    if epochs is not None:
        check_count("epochs", epochs)
    if steps is not None:
        check_count("steps", steps)
    if epochs is None and steps is None:
        raise ValueError("A Loop needs an end. Pass epochs or steps.")
    if not batches.ends and steps is None:
        raise ValueError("An epoch of these data never ends. Give Batches a length, or Loop its steps.")
    if not (resume is None or isinstance(resume, bool)):
        raise ValueError(
            f"resume must be True, False or None. Got {resume!r}. Pass the weights of another run as resume_from=."
        )
    if on_nonfinite not in (rules := get_args(OnNonFinite)):
        raise ValueError(f"on_nonfinite must be one of {rules}. Got {on_nonfinite!r}.")
    if reduce_dtype not in (None, torch.float32, torch.float64):
        raise ValueError(f"reduce_dtype must be torch.float32, torch.float64 or None. Got {reduce_dtype!r}.")
    check_count(
        "check_replicas_every",
        check_replicas_every,
        least=0,
        remedy="It is the number of steps between two comparisons of the ranks, or 0 for none.",
    )


def check_synced(batches: Batches, sync_channels: Sequence[SyncChannel]) -> None:
    """Raise ValueError if a rank has several shards under synced batch norm, or its share is still to be measured."""
    if sync_channels and batches.division.is_unmeasured:
        raise ValueError(
            "With synced batch norm every rank waits for the others in each forward, so the ranks' own times cannot be "
            'measured. Got shares="measured". Pass shares as numbers, or use local_batch_norm(model).'
        )
    if sync_channels and max(batches.division.carried) > 1:
        ranks = "1 rank" if batches.world.size == 1 else f"{batches.world.size} ranks"
        raise ValueError(
            f"Synced batch norm needs at most one shard per rank. Got {batches.shards} shards on "
            f"{ranks}{' with shares' if batches.shards <= batches.world.size else ''}. Remove shards=, or use "
            "local_batch_norm(model): its running statistics are still those of the whole mini-batch."
        )


def check_rows(batches: Batches, state: Mapping[str, object]) -> None:
    """Raise ValueError if a shard of one sample would go through BatchNorm1d, which cannot normalise one value."""
    layers = [
        name
        for name, layer in each_module(find_modules(state)).items()
        if isinstance(layer, nn.BatchNorm1d) and layer.training
    ]
    for position in batches.positions_of_sizes:
        sizes = batches.sizes(position)
        if layers and 1 in sizes:
            raise ValueError(
                f"Batch norm needs more than one value per channel. Mini-batch {position + 1} of an epoch has "
                f"{sum(sizes)} sample{'s' if sum(sizes) > 1 else ''} over {len(sizes)} shard"
                f"{'s' if len(sizes) > 1 else ''}, so one shard has a single sample, and {layers[0]} is "
                "BatchNorm1d. Change batch_size, use fewer shards or drop_last=True, or pass "
                "allow_single_sample_shards=True if a sample has several values: positions, (N, C, L), or nodes."
            )


Weight = float | torch.Tensor
Reduction = Literal["mean", "sum"]
RESERVED_NAMES = frozenset(
    {"loss", "epoch", "iteration", "samples", "elapsed_s", "skipped", "unused_samples", "unused_samples_at_least"}
    | {"learning_rate", "gradient_norm", "samples_per_s", "retain_graph", "create_graph", "inputs", "gradient"}
)
_KEYWORDS = ("weight", "reduction", "more_losses")


def _misspelt(word: str) -> set[str]:
    """The word with two letters exchanged, or one left out, or an s more."""
    exchanged = {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in range(len(word) - 1)}
    left_out = {word[:i] + word[i + 1 :] for i in range(len(word))}
    return (exchanged | left_out | {f"{word}s"}) - {word}


MISSPELT = {wrong: word for word in _KEYWORDS for wrong in _misspelt(word)}
REFUSED_NAMES = RESERVED_NAMES | MISSPELT.keys()  # of metrics


def bad_loss(loss: object) -> ValueError:
    """The error of a loss that is no tensor of shape (), or needs no gradient."""
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        what = type(loss).__name__
        has_loss = isinstance(getattr(loss, "loss", None), torch.Tensor)  # as outputs of transformers
        remedy = "Pass its .loss." if has_loss else "Pass the tensor itself, without .item() or float()."
        if isinstance(loss, torch.Tensor):
            what = f"shape {tuple(loss.shape)}"
            remedy = 'Take its mean, or its sum and tell step.backward(loss, reduction="sum").'
        return ValueError(f"A loss must be a tensor of shape (), one value for the shard. Got {what}. {remedy}")
    return ValueError(
        "A loss must need a gradient. This one does not. Compute it from the model's output, outside of "
        "torch.no_grad() and without detach()."
    )


MEAN = 1  # at::Reduction, which torch's losses keep for their backward
_SUM = 2
_FACTORS = frozenset({"MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1", "NegBackward0"})
_CASTS = frozenset({"ToCopyBackward0", "CloneBackward0", "SqueezeBackward0", "ViewBackward0"})  # of one value
_SELECTIONS = frozenset({"IndexBackward0", "MaskedSelectBackward0"})
_MOST_NODES = 64  # of a loss's graph: scaled losses are added, divided and cast
_MOST_EXACT = 2**24  # numbers that float32 can count
_OF_SEVERAL = (
    " If another part of the loss is a mean over something else, step.hold the sums and counts of both instead, and "
    "divide after step.gather()."
)


def refuse_other_means(loss: Node | None, samples: int, *, is_only: bool, has_weight: bool, reads: bool) -> None:
    """Raise ValueError if a loss that is given as the mean over a shard's samples is not.

    Looked at are torch's own losses in it: those that are added up, even times a number. A sum counts where it stands
    alone or is added, since a factor may make it a mean. Without a weight the loss must be a mean over all samples.

    Args:
        loss: the operation whose result the loss is.
        samples: of the shard.
        is_only: whether the shard has no other loss.
        has_weight: whether the loss has a weight of its own.
        reads: whether values may be read; on a GPU the host would wait.
    """
    for term, is_plain in _terms_of(loss):
        is_alone = is_only and term is loss
        reduction = getattr(term, "_saved_reduction", None)
        if reduction == _SUM and is_plain:
            _refuse_sum(term, samples, is_alone=term is loss)
        elif has_weight:
            continue
        elif reduction == MEAN:
            _refuse_partial_mean(term, samples, is_alone=is_alone, reads=reads)
        elif is_alone and _name_of(term) == "MeanBackward0" and _name_of(term.next_functions[0][0]) in _SELECTIONS:
            _refuse_rows(term._saved_self_sym_numel, samples, "selected values")


def refuse_added_mean(loss: Node | None, samples: int) -> None:
    """Raise ValueError if torch's mean over a shard's samples is in a loss that is added up over the shards.

    Its gradient would be the sum of the shards' means, more on more ranks.

    Args:
        loss: the operation whose result the loss is.
        samples: of the shard.
    """
    for term, is_plain in _terms_of(loss):
        if getattr(term, "_saved_reduction", None) != MEAN or not is_plain or samples == 1:
            continue
        labels = saved_by(term, "target")
        is_entropy = _is_entropy(labels, saved_by(term, "total_weight"))
        rows = len(labels) if is_entropy else _rows_of(term)
        if rows and rows % samples == 0:
            raise ValueError(
                "With reduction=\"sum\" step.backward takes the shard's sum. This loss is torch's mean "
                f'(reduction="mean") over {samples} samples, or has it for a part, and the sum of the shards\' means '
                "would train differently on each number of ranks. Leave reduction= out if the whole loss is a mean, or "
                "multiply this one by what it is over. Pass 1.0 * loss if it is a sum all the same."
            )


def _terms_of(loss: Node | None) -> list[tuple[Any, bool]]:
    """The operations whose results are added up in a loss, and whether each is added as it is, without a factor."""
    found: list[tuple[Any, bool]] = [(loss, True)]
    terms = []
    for node, is_plain in found:  # grows meanwhile
        name = _name_of(node)
        parts = [] if node is None or len(found) >= _MOST_NODES else [part for part, _ in node.next_functions]
        given = [part for part in parts if part is not None]
        if hasattr(node, "_saved_alpha") and parts:
            found += [(parts[0], is_plain), *((part, is_plain and node._saved_alpha == 1) for part in parts[1:])]
        elif name in _CASTS or (name == "MeanBackward0" and node._saved_self_sym_numel == 1):
            found += [(part, is_plain) for part in given]
        elif name in _FACTORS and len(given) == 1:  # a number or a tensor without a graph has None for a part
            found += [(given[0], False)]
        elif name in ("MeanBackward0", "SumBackward0") and _name_of(given[0] if given else None) == "StackBackward0":
            found += [(part, False) for part, _ in given[0].next_functions[:_MOST_NODES]]
        elif node is not None:
            terms.append((node, is_plain))
    return terms


def _name_of(node: Node | None) -> str:
    """The name of an operation; a script's own may have another `name`."""
    return type(node).__name__


def _refuse_sum(node: Node, samples: int, *, is_alone: bool) -> None:
    """Raise ValueError if a loss, or a part of it, is torch's sum over the shard's samples."""
    # A sum over other things has other rows; one over tokens has some for each sample.
    rows = _rows_of(node)
    if samples > 1 and (rows == samples or (is_alone and rows > 0 and rows % samples == 0)):
        raise ValueError(
            f"step.backward takes the shard's mean loss. This one is torch's sum (reduction=\"sum\") over {samples} "
            "samples, which would train differently on each number of ranks. Tell "
            'step.backward(loss, reduction="sum") if the whole loss is a sum, or divide this one by what it is over. '
            "Pass 1.0 * loss if it is a mean all the same."
        )


def _refuse_partial_mean(node: Node, samples: int, *, is_alone: bool, reads: bool) -> None:
    """Raise ValueError if one of torch's means is by class weights, without ignored labels, or over other rows.

    Cross-entropy divides by the sum of the labels' weights, or by the number of labels that are not ignored.
    """
    if not hasattr(node, "_saved_ignore_index"):
        if is_alone and _rows_of(node):
            _refuse_rows(saved_by(node, "self").numel(), samples, "values")
        return
    labels = saved_by(node, "target")
    divisor = saved_by(node, "total_weight")
    if not _is_entropy(labels, divisor):
        return
    if len(labels) % samples:  # a term of some samples alone
        if is_alone:
            _refuse_rows(labels.numel(), samples, "labels")
        return
    beside = "" if is_alone else _OF_SEVERAL
    if saved_by(node, "weight") is not None:
        raise ValueError(
            "This loss is a mean by class weights: it divides by the weights of the labels, not by their number, "
            "and would train differently on each number of ranks. Tell "
            f"step.backward(loss, weight=class_weights[labels].sum()), without ignored labels.{beside}"
        )
    is_exact = divisor.dtype.itemsize >= torch.float32.itemsize and labels.numel() < _MOST_EXACT
    if reads and is_exact and divisor.item() < labels.numel():
        raise ValueError(
            f"This loss is a mean over {divisor.item():.0f} of a shard's {labels.numel()} labels, since it ignores "
            "the others, and would train differently on each number of ranks. Tell "
            "step.backward(loss, weight=(labels != ignore_index).sum()), of the labels as the loss gets them, or "
            f"weight={samples} if it is a mean over the samples all the same.{beside}"
        )


def _is_entropy(labels: object, divisor: object) -> bool:
    """Whether cross-entropy keeps such values; a hook for saved tensors may have packed others."""
    if not isinstance(labels, torch.Tensor) or not isinstance(divisor, torch.Tensor):
        return False
    return divisor.dim() == 0 and divisor.is_floating_point() and labels.dim() > 0 and not labels.is_floating_point()


def _refuse_rows(rows: int, samples: int, what: str) -> None:
    """Raise ValueError if a mean is over so many rows that they cannot be as many for each sample of the shard."""
    if rows % samples:
        raise ValueError(
            f"This loss is a mean over {rows} {what}, and the shard has {samples} samples. It would be weighted by "
            f"the samples, and train differently on each number of ranks. Tell step.backward(loss, weight={rows}), the "
            f"number of what the mean is over, or weight={samples} if it is a mean over the samples all the same."
        )


def saved_by(loss: Node | None, name: str) -> Any:
    """A value kept for an operation's backward; not unpacked, since activation checkpointing would compute it again."""
    return getattr(getattr(loss, f"_raw_saved_{name}", None), "data", None)


def _rows_of(loss: Node) -> int:
    """The first dimension of a torch loss's tensor; 0 for a penalty of a parameter, and if it is unknown."""
    if any(hasattr(below, "variable") for below, _ in loss.next_functions):
        return 0
    output = saved_by(loss, "self")
    is_known = isinstance(output, torch.Tensor) and output.dim() > 0 and output.is_floating_point()
    return output.shape[0] if is_known else 0


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_mean(name: str, value: object, samples: int) -> None:
    """Raise ValueError if a metric, which is taken as a mean, looks like a count of a shard's samples.

    A tensor of whole numbers does, since its value is not read, and a number that is not larger than the samples.
    """
    if isinstance(value, torch.Tensor):
        is_count = value.dim() == 0 and value.dtype in _WHOLE
    else:
        is_count = isinstance(value, int | np.integer) and 2 <= int(value) <= samples
    if is_count and samples > 1:
        raise ValueError(
            f"A metric is the mean over a shard's samples. {name} is a whole number for {samples} samples, as a count "
            "is. Give one value per sample, or their sum as dl.Sum(...), or a mean that is whole as a float."
        )


def check_weight(weight: Weight) -> Weight:
    """A shard's weight: a number, or a GPU's value as a copy in float64, shape ().

    Raises:
        ValueError: no finite number of 0 or more. A GPU's value is not read; a wrong one makes the step NaN.
    """
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise ValueError(f"A shard's weight must be one value. Got shape {tuple(weight.shape)}. Take its sum.")
        weight = weight.detach().reshape(()).to(torch.float64, copy=True)  # float32 would round w / R
        if is_asynchronous(weight):
            return weight.where((weight >= 0) & weight.isfinite(), math.nan)  # the guard finds it one step later
        weight = weight.item()  # a number needs no copy to the loss's device
    elif not isinstance(weight, Real):
        raise ValueError(f"A shard's weight must be a number or a tensor of one value. Got {weight!r}.")
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"A shard's weight must be a finite number, 0 or more. Got {float(weight)}.")
    return weight


def reserved_names(names: Iterable[str]) -> ValueError:
    """The error of metrics with reserved names, or with a keyword of `backward` misspelt."""
    for name in names:
        if name in MISSPELT:
            return ValueError(
                f"step.backward takes weight, reduction and more_losses, and metrics by other names. Got {name}. Did "
                f"you mean {MISSPELT[name]}?"
            )
    remedy = "Choose another one."
    if "retain_graph" in names:
        remedy = "more_losses=True keeps the graph for the shard's next loss; another pass needs another forward."
    return ValueError(
        f"Reserved metric name: {sorted(RESERVED_NAMES.intersection(names))}. Reserved are the columns of every row "
        f"and the keywords of Tensor.backward, {sorted(RESERVED_NAMES)}. {remedy}"
    )


@dataclass(frozen=True, slots=True)
class Sum:
    """A metric that adds up over the shards of a mini-batch, or over the data in `evaluate`: hits, tokens, pixels.

        step.backward(loss, hits=dl.Sum(logits.argmax(1) == labels))

    It has no weight: a shard of weight 0 counts too. In `evaluate` it may be divided by another sum, such as a loss by
    the number of tokens: `dl.Sum(loss, over=tokens)`.

    Args:
        value: a shard's sum, shape (), or one value per sample, shape (n,), whose sum is taken.
        over: the divisor, of the same shapes: sum(value) / sum(over), over all data. For `evaluate` alone,
            since a step's metrics have its weight.
    """

    value: Weight
    over: Weight | None = None


Value = Weight | Sum


_WRAPPERS = {
    "DistributedDataParallel": "Put the wrapped model, wrapped.module, into state, and call that.",
    "DataParallel": "Put the wrapped model, wrapped.module, into state, and call that.",
    "FullyShardedDataParallel": f"Put the wrapped model, wrapped.module, into state. {_TOO_LARGE}",
    "FSDPModule": f"Leave fully_shard out. {_TOO_LARGE}",
    "DDP": "Leave replicate(model) out.",  # which makes it a class of torch's own composable DDP
    "ReplicateModule": "Leave replicate(model) out.",
    "SyncBatchNorm": "Convert these layers by dl.sync_batch_norm(model, world), which works on the CPU too.",
}


def refuse_wrapped(modules: Mapping[str, nn.Module], *, training: bool = True) -> None:
    """Raise ValueError if torch itself shares the work of `modules`, or of modules below them, between ranks.

    Its wrappers run collectives in forward and backward, or hold a part of each parameter.

    Args:
        training: whether to refuse even wrappers that do no harm in evaluation.
    """
    for name, module in each_module(modules).items():
        for kind in type(module).__mro__:
            is_wrapper = kind.__module__.partition(".")[0] == "torch" and kind.__name__ in _WRAPPERS
            if is_wrapper and (training or kind.__name__ != "SyncBatchNorm"):
                raise ValueError(
                    f"fold and evaluate share a model between ranks themselves. {name} is torch's {kind.__name__}, "
                    f"which runs collectives too. {_WRAPPERS[kind.__name__]}"
                )
        for key, parameter in module._parameters.items():
            _refuse_partial(f"{name}.{key}", parameter)
        if (
            training
            and getattr(module.__dict__.get("forward"), "__module__", "") == "torch.cuda.graphs"
            and batch_norm_layers({name: module})
        ):
            raise ValueError(
                f"A CUDA graph updates batch norm's running statistics unseen. {name} has one from "
                "torch.cuda.make_graphed_callables. Graph only the parts without batch norm."
            )


def find_scale(loss: torch.Tensor, scalers: Sequence[GradScaler]) -> tuple[torch.Tensor | None, Node | None]:
    """The scale that one of the scalers multiplied a loss by, shape (), and that product; None if none did.

    It is found in the loss's graph, where the product keeps the scaler's own tensor. So an unscaled loss stays as it
    is. Only the last operations are searched, and no value is read.

    Args:
        loss: before its backward, shape ().
        scalers: of the job.
    """
    scales = {scaler._scale.data_ptr(): scaler._scale for scaler in scalers if scaler._scale is not None}
    nodes = [loss.grad_fn] if scales else []
    for node in nodes:  # grows during the search
        if node is None:
            continue
        if _name_of(node) == "MulBackward0":
            for saved in (node._raw_saved_other, node._raw_saved_self):  # type: ignore[attr-defined]
                # Not unpacked: activation checkpointing would compute it again.
                factor = None if saved is None else saved.data
                if isinstance(factor, torch.Tensor) and factor.data_ptr() in scales:
                    return scales[factor.data_ptr()], node
        nodes += [below for below, _ in node.next_functions[: _MOST_NODES - len(nodes)]]
    return None, None
