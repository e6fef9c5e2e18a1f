"""Evaluation on ranks: every sample once, the numbers of one process, and nothing left changed."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

import ddp_loop as dl
from tests.support.harness import OnRanks, child_processes
from tests.support.images import IMAGES, hits, images, network
from tests.support.refusals import Refused
from tests.support.sources import Mapped
from tests.support.training import loop_on

pytestmark = pytest.mark.covers("B8")


def share_of_hits(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return hits(logits, labels).double().mean().item()


# -- evaluate --------------------------------------------------------------------------------------------------


def evaluated(
    batch_size: int, shards: int | None = None, shuffle: bool = False, size: int = IMAGES
) -> dict[str, float]:
    with dl.join_world() as world:
        return dl.evaluate(
            network(), dl.Batches(images(size), batch_size, world, shards=shards, shuffle=shuffle), accuracy=hits
        )


def accuracy_of_one_process(size: int = IMAGES) -> float:
    model, (inputs, labels) = network().eval(), images(size)
    with torch.no_grad():
        return int(hits(model(inputs), labels).sum()) / size


@pytest.mark.covers("C6")
@pytest.mark.parametrize(
    ("ranks", "batch_size", "shards", "size"),
    [
        *((1, 300, None, 1000), (2, 999, None, 1000), (3, 64, None, 1000), (3, 300, 7, 1000)),
        *((3, 8, None, 1), (3, 8, None, 2), (3, 8, 1, 10)),  # a rank without samples adds nothing
    ],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_accuracy_equals_one_process_to_the_bit(
    ranks: int, batch_size: int, shards: int | None, size: int, shuffle: bool, on_ranks: OnRanks
) -> None:
    expected = {"accuracy": accuracy_of_one_process(size), "samples": size}
    assert on_ranks(ranks, evaluated, batch_size, shards, shuffle, size) == [expected] * ranks


def first_pixel(logits: torch.Tensor, labels: torch.Tensor) -> np.ndarray[Any, Any]:
    return logits[:, 0].double().numpy()


def several_metrics() -> dict[str, float]:
    with dl.join_world() as world:
        return dl.evaluate(
            network(),
            dl.Batches(images(), 7, world),
            hits=hits,
            share=share_of_hits,
            share_as_tensor=lambda logits, labels: torch.tensor(share_of_hits(logits, labels), dtype=torch.float64),
            constant=lambda logits, labels: 2,
            array=first_pixel,
            number=lambda logits, labels: np.float64(0.5),
        )


def test_means_of_shards_are_weighted_by_their_samples(on_ranks: OnRanks) -> None:
    # 1,000 in mini-batches of 7 over 3 ranks: shards of 3, 2, 2, and at last 2, 2, 2.
    found, *others = on_ranks(3, several_metrics)
    assert all(other == found for other in others)
    assert found["hits"] == accuracy_of_one_process()
    # A share times its samples is not quite whole; 429 such sums round at 1e-16 each.
    assert found["share"] == pytest.approx(found["hits"], rel=1e-13)
    assert found["share_as_tensor"] == found["share"]
    assert (found["constant"], found["number"]) == (2.0, 0.5)
    with torch.no_grad():
        expected = network().eval()(images()[0])[:, 0].double().mean().item()
    # float32 outputs: shards of 2 and 1,000 round differently, at 6e-8.
    assert found["array"] == pytest.approx(expected, abs=1e-6)


def per_token(logits: torch.Tensor, labels: torch.Tensor) -> dl.Sum:
    """Of each sample, as if it had as many tokens as its label says."""
    return dl.Sum(labels * logits.detach().sum(1), over=labels)


def no_token(logits: torch.Tensor, labels: torch.Tensor) -> dl.Sum:
    return dl.Sum(1.0, over=0 * labels)


def mean_over_tokens(data: Any, none: bool) -> dict[str, float]:
    with dl.join_world() as world:
        return dl.evaluate(network(), dl.Batches(data, 7, world), loss=no_token if none else per_token, hits=hits)


@pytest.mark.parametrize("none", [False, True])
def test_a_sum_over_another_one_is_a_mean_over_tokens(none: bool, on_ranks: OnRanks) -> None:
    inputs, labels = images(40)
    found, *others = on_ranks(3, mean_over_tokens, (inputs, labels), none)
    assert all(other["hits"] == found["hits"] for other in others)
    if none:
        assert [math.isnan(one["loss"]) for one in (found, *others)] == [True] * 3
        return
    with torch.no_grad():
        values = network().eval()(inputs).sum(1).double()
    assert found["loss"] == pytest.approx(float((labels * values).sum() / labels.sum()), rel=1e-5)
    assert all(other == found for other in others)


CLASS_WEIGHTS = torch.linspace(1.0, 9.0, 10, dtype=torch.float64)
WITHOUT_3 = CLASS_WEIGHTS.where(torch.arange(10) != 3, 0.0)
by_weight = partial(nn.functional.cross_entropy, weight=CLASS_WEIGHTS)


class OverSamples(nn.CrossEntropyLoss):
    """Divides by the samples, whatever the classes weigh."""

    def forward(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, labels, self.weight, reduction="none").mean()


def with_a_last_layer(**options: Any) -> nn.Module:
    torch.manual_seed(2)
    return cast(nn.Module, nn.LinearCrossEntropyLoss(10, 10, bias=True, dtype=torch.float64, **options))


CRITERIA: dict[str, Callable[[], Callable[..., torch.Tensor]]] = {
    "as it is": nn.CrossEntropyLoss,
    "class weights": lambda: nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
    "ignored": lambda: nn.functional.cross_entropy,
    "all": lambda: nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=3, label_smoothing=0.1),
    "a class of weight 0": lambda: nn.CrossEntropyLoss(WITHOUT_3, label_smoothing=0.3),
    "labels of a byte": lambda: nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
    "weights as arguments": lambda: partial(by_weight, ignore_index=3),
    "a sum": lambda: nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, reduction="sum"),
    "a sum as an argument": lambda: partial(nn.functional.multi_margin_loss, reduction="sum"),
    "a sum by the old argument": lambda: partial(by_weight, size_average=False),
    "a sum by both old arguments": lambda: partial(nn.functional.cross_entropy, size_average=False, reduce=True),
    "a sum by a module's old argument": lambda: nn.CrossEntropyLoss(CLASS_WEIGHTS, size_average=False),
    "a mean by the old argument": lambda: partial(by_weight, size_average=True),
    "the old argument before the new one": lambda: partial(
        nn.functional.multi_margin_loss, reduction="sum", reduce=True
    ),
    "losses by the old argument": lambda: partial(by_weight, reduce=False),
    "losses by both old arguments": lambda: partial(by_weight, reduce=False, size_average=True, reduction="sum"),
    "losses by a module's old argument": lambda: nn.CrossEntropyLoss(CLASS_WEIGHTS, reduce=False),
    "the script's own mean over samples": lambda: OverSamples(weight=CLASS_WEIGHTS),
    "ignored log probabilities": nn.NLLLoss,
    "ignored and weighted log probabilities": lambda: nn.NLLLoss(weight=CLASS_WEIGHTS),
    "ignored log probabilities of images": nn.NLLLoss2d,
    "ignored and weighted log probabilities of images": lambda: nn.NLLLoss2d(weight=CLASS_WEIGHTS),
}
if hasattr(nn, "LinearCrossEntropyLoss"):  # which older ones of torch have not
    CRITERIA |= {
        "ignored, with a layer": with_a_last_layer,
        "3 is ignored, with a layer": lambda: with_a_last_layer(ignore_index=3),
        "class weights, with a layer": lambda: with_a_last_layer(weight=CLASS_WEIGHTS),
        "smoothed class weights, with a layer": lambda: with_a_last_layer(weight=WITHOUT_3, label_smoothing=0.3),
        "a sum, with a layer": lambda: with_a_last_layer(reduction="sum"),
    }


def labelled(what: str) -> tuple[torch.Tensor, torch.Tensor]:
    ignored = -100 if what.startswith("ignored") else 3
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(10, (100,), generator=generator)
    labels[labels < 4] = ignored  # unequally many in each shard
    labels[:16] = ignored  # the first shards have no other
    kind = torch.uint8 if what == "labels of a byte" else torch.int64
    return torch.randn(100, 10, dtype=torch.float64, generator=generator), labels.to(kind)


def evaluated_by_each() -> dict[str, dict[str, float]]:
    with dl.join_world() as world:
        return {
            what: dl.evaluate(nn.Identity(), dl.Batches(labelled(what), 48, world, shuffle=False), loss=criterion())
            for what, criterion in CRITERIA.items()
        }


@pytest.mark.filterwarnings("ignore:size_average and reduce", "ignore:.NLLLoss2d. has been deprecated:FutureWarning")
def test_class_weights_and_ignored_labels_count_as_on_the_whole_data(on_ranks: OnRanks) -> None:
    for found in on_ranks(3, evaluated_by_each):
        for what, criterion in CRITERIA.items():
            expected = criterion()(*labelled(what)).mean().item()
            assert found[what] == {"loss": pytest.approx(expected, rel=1e-12), "samples": 100}, what


def some_of(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    return default_collate([one for one in samples if one[1] != 5])


def test_data_with_fewer_rows_than_samples_are_refused_but_for_sums(world: dl.World) -> None:
    """As where `collate_fn` leaves samples out."""
    output, labels = labelled("as it is")
    batches = dl.Batches(TensorDataset(output, labels), 48, world, shuffle=False, collate_fn=some_of)
    found = dl.evaluate(nn.Identity(), batches, loss=nn.functional.cross_entropy)
    expected = nn.functional.cross_entropy(output[labels != 5], labels[labels != 5]).item()
    assert found["loss"] == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match=r"samples, \d in this one. Its data and the output have \d rows"):
        dl.evaluate(nn.Identity(), batches, accuracy=lambda one, other: (one.argmax(1) == other).float().mean())


def test_pairs_of_samples_and_an_object_that_equals_all_are_means_over_samples(world: dl.World) -> None:
    output, labels = labelled("as it is")
    pairs = dl.Batches(TensorDataset(output[:96], labels[:96]), 32, world, shuffle=False, collate_fn=first_of_pairs)
    found = dl.evaluate(nn.Identity(), pairs, loss=lambda one, other: one.mean())
    assert found["loss"] == pytest.approx(output[:96:2].mean().item(), rel=1e-12)
    output, labels = labelled("ignored")
    batches = dl.Batches((output, labels), 48, world, shuffle=False)
    assert dl.evaluate(nn.Identity(), batches, loss=EqualToAll())["loss"] == pytest.approx(output.mean().item())


def first_of_pairs(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    return default_collate(samples[::2])


class EqualToAll:
    """As a metric of torchmetrics, which makes a new metric of a comparison."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return output.mean()


def of_one_part() -> Mapped:
    return Mapped(10, lambda index: (torch.full((2,), float(index)),))


def spread(shards: int | None) -> float:
    with dl.join_world() as world:
        batches = dl.Batches(torch.arange(6.0)[:, None], 3, world, shuffle=False, shards=shards)
        return dl.evaluate(nn.Identity(), batches, spread=lambda output, _: output.max() - output.min())["spread"]


def test_samples_of_one_part_leave_the_metric_the_output_alone(world: dl.World) -> None:
    batches = dl.Batches(of_one_part(), 5, world, shuffle=False)
    assert dl.evaluate(nn.Identity(), batches, size=lambda output: output.mean(1)) == {"size": 4.5, "samples": 10}


def test_a_metric_that_cannot_take_its_arguments_is_named_with_what_it_is_given(world: dl.World) -> None:
    def failing(output: torch.Tensor) -> torch.Tensor:
        raise TypeError("the script's own")

    said = r"the parts of the data after the first, here 0\. mse cannot .* argument: 'x'\. .* pass its tensor"
    batches = dl.Batches(of_one_part(), 5, world, shuffle=False)
    with pytest.raises(TypeError, match=said):
        dl.evaluate(nn.Identity(), batches, mse=lambda output, x: (output - x).square().mean(1))
    with pytest.raises(TypeError, match=r"^the script's own$"):
        dl.evaluate(nn.Identity(), batches, failing=failing)


def test_a_loss_that_compares_samples_is_the_mini_batchs_with_one_shard(on_ranks: OnRanks) -> None:
    spreads = {shards: on_ranks(3, spread, shards) for shards in (1, None)}
    assert spreads[1] == [2.0] * 3  # also on more ranks than shards
    assert spreads[None] == [0.0] * 3  # of shards with a sample each


def test_the_shards_of_an_evaluation_leave_no_tensors_until_its_end(world: dl.World) -> None:
    calls = itertools.count()
    counts: list[int] = []

    def count(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if next(calls) in (8, 152):  # a look at all objects takes 0.1 s
            counts.append(sum(isinstance(one, torch.Tensor) for one in gc.get_objects()))
        return output[:, 0]

    data = torch.ones(160, 1), torch.zeros(160)
    dl.evaluate(nn.Identity(), dl.Batches(data, 8, world, shuffle=False), metric=count)
    first, last = counts
    assert last - first < 8  # each mini-batch has eight


def test_nan_is_not_hidden(world: dl.World) -> None:
    result = dl.evaluate(nn.Identity(), dl.Batches(torch.zeros(4), 2, world), bad=lambda x, _: x / 0)
    assert math.isnan(result["bad"])


def dicts() -> Mapped:
    inputs, labels = images()
    return Mapped(IMAGES, lambda index: {"image": inputs[index], "label": labels[index]})


def evaluated_dicts(workers: int) -> dict[str, float]:
    with dl.join_world() as world:
        return dl.evaluate(
            network(),
            dl.Batches(dicts(), 200, world, num_workers=workers, multiprocessing_context="fork" if workers else None),
            forward=lambda model, data: model(data["image"]),
            accuracy=lambda logits, data: hits(logits, data["label"]),
        )


@pytest.mark.parametrize("workers", [0, 1])
def test_dicts_are_given_whole_to_forward_and_to_the_metrics(workers: int, on_ranks: OnRanks) -> None:
    expected = {"accuracy": accuracy_of_one_process(), "samples": 1000}
    assert on_ranks(2, evaluated_dicts, workers) == [expected] * 2


def test_a_lone_tensor_is_given_to_the_metrics_as_an_autoencoder_needs(world: dl.World) -> None:
    data = torch.arange(6.0)
    batches = dl.Batches(data, 4, world)
    error = dl.evaluate(nn.Identity(), batches, error=lambda output, inputs: (output + 2 - inputs) ** 2)
    assert error == {"error": 4.0, "samples": 6}


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


class Watching(nn.Module):
    """Notes how it was called."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.seen = inner, set[tuple[bool, ...]]()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(inputs)
        self.seen.add((*modes(self), torch.is_grad_enabled(), output.requires_grad))
        return output


@pytest.mark.parametrize("call", [dl.evaluate, dl.predict])
@pytest.mark.parametrize("frozen", [(), (1,), (0, 1, 2, 3)], ids=["none frozen", "batch norm frozen", "all frozen"])
def test_the_model_is_in_evaluation_mode_and_goes_back_to_the_mode_it_was_in(
    call: Callable[..., Any], frozen: tuple[int, ...], world: dl.World
) -> None:
    model = network()
    for number in frozen:
        model[number].eval()  # type: ignore[index]
    watching = Watching(model)
    before, state = modes(watching), {key: value.clone() for key, value in watching.state_dict().items()}
    call(watching, dl.Batches(images(), 300, world))
    assert watching.seen == {(False,) * (len(before) + 2)}
    assert modes(watching) == before
    assert torch.is_grad_enabled()
    assert all(torch.equal(value, state[key]) for key, value in watching.state_dict().items())
    assert all(parameter.grad is None for parameter in watching.parameters())


def fail(*values: Any) -> Any:
    raise LookupError("no such class")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("call", [dl.evaluate, dl.predict])
def test_the_mode_comes_back_and_the_workers_end_also_after_an_exception(
    call: Callable[..., Any], workers: int, world: dl.World
) -> None:
    model = network()
    model[1].eval()  # type: ignore[index]
    before = modes(model)
    children = child_processes()
    batches = dl.Batches(dicts(), 200, world, num_workers=workers)
    with pytest.raises(LookupError, match="no such class") as caught:
        call(model, batches, forward=fail)
    assert modes(model) == before
    assert torch.is_grad_enabled()
    assert child_processes() == children
    assert caught.value.__traceback__ is not None  # which holds what the call held


# -- what is refused -------------------------------------------------------------------------------------------


def sum_of_some(logits: torch.Tensor, labels: torch.Tensor) -> dl.Sum:
    return dl.Sum(labels, over=labels if labels[0] else None)


PER_SAMPLE = "bad is a whole number for 5 samp"
METRICS: list[tuple[Callable[..., Any], type[Exception], str]] = [
    (lambda logits, labels: logits, ValueError, r"shape \(5,\).*bad gave shape \(5, 3\)\. Take the mean"),
    (lambda logits, labels: labels[:2], ValueError, r"bad gave shape \(2,\)"),
    (lambda logits, labels: np.zeros((5, 1)), ValueError, r"bad gave shape \(5, 1\)"),
    (lambda logits, labels: logits.sum(1) * 1j, ValueError, r"bad gave torch\.complex64\. Take its"),
    (lambda logits, labels: np.ones(5) * 1j, ValueError, r"bad gave torch\.complex128\. Take its"),
    (lambda logits, labels: None, TypeError, "bad gave NoneType"),
    (lambda logits, labels: (logits.argmax(1) == labels).sum(), ValueError, PER_SAMPLE),
    (lambda logits, labels: 3, ValueError, PER_SAMPLE),
    (lambda logits, labels: np.ones(5, int).sum(), ValueError, PER_SAMPLE),
    (lambda logits, labels: [[1], [1, 2]], TypeError, "bad gave list"),
    (lambda logits, labels: "0.5", TypeError, "bad gave str"),
    (sum_of_some, ValueError, "must be of one kind in every shard. bad is a dl.Sum and a dl.Sum with over= in differ"),
]
BATCHES = "takes its mini-batches from Batches. Got "
CALLS_REFUSED: list[tuple[Callable[..., Any], type[Exception], str]] = [
    (lambda model, batches: dl.evaluate(batches, model), TypeError, f"evaluate {BATCHES}Sequential"),
    (lambda model, batches: dl.evaluate(model, cast(Any, [1])), TypeError, f"evaluate {BATCHES}list"),
    (lambda model, batches: dl.predict(batches, model), TypeError, f"predict {BATCHES}Sequential"),
    (lambda model, batches: dl.confusion_matrix(batches, model, 3), TypeError, f"confusion_matrix {BATCHES}"),
    (lambda model, batches: dl.update_bn(batches, model), TypeError, f"update_bn {BATCHES}"),
    (lambda model, batches: dl.evaluate(model.forward, batches), TypeError, "a model, .* first. Got method"),
    (
        lambda model, batches: dl.evaluate(model, batches, accuracy=cast(Any, 3)),
        TypeError,
        "a function .* accuracy is 3",
    ),
    (lambda model, batches: dl.Batches(images(10), batches.world, cast(Any, 5)), TypeError, "Got 5 as the world"),
    (lambda model, batches: dl.evaluate(model, batches, samples=hits), ValueError, 'named "samples".* Rename it'),
    (
        lambda model, batches: dl.evaluate(model, dl.Batches(float, 2, batches.world)),
        ValueError,
        "Give Batches a length",
    ),
    (
        lambda model, batches: dl.predict(model, dl.Batches(float, 2, batches.world)),
        ValueError,
        "Give Batches a length",
    ),
    (
        lambda model, batches: dl.evaluate(model, dl.Batches({"x": torch.zeros(4)}, 2, batches.world)),
        TypeError,
        "Pass forward=lambda model, data",
    ),
    (
        lambda model, batches: dl.predict(model, dl.Batches(images(10), 4, batches.world, drop_last=True)),
        ValueError,
        "Create them with drop_last=False",
    ),
    *(
        (lambda model, batches, output=output: dl.predict(model, batches, forward=lambda *_: output), ValueError, said)
        for output, said in (
            (torch.zeros(2, 3), r"\(5, ...\). Got \(2, 3\)"),
            (torch.zeros(()), r"Got \(\)"),
            ([1, 2, 3, 4, 5], "Got list. If the model returns anything else, pass forward="),
        )
    ),
    *(
        (lambda model, batches, metric=metric: dl.evaluate(model, batches, bad=metric), kind, said)
        for metric, kind, said in METRICS
    ),
]


@pytest.mark.parametrize(("call", "kind", "said"), CALLS_REFUSED)
def test_what_cannot_be_evaluated_or_predicted_is_refused(
    call: Callable[..., Any], kind: type[Exception], said: str, world: dl.World
) -> None:
    with pytest.raises(kind, match=said):
        call(network(), dl.Batches(images(10), 5, world, shards=1))


def evaluate_differently(world: dl.World, folder: str) -> None:
    metrics: dict[str, Any] = {"accuracy": hits, "again": hits} if world.rank == 1 else {"accuracy": hits}
    dl.evaluate(network(), dl.Batches(images(10), 5, world), **metrics)


def test_metrics_that_differ_between_ranks_are_refused_on_every_rank(refused: Refused) -> None:
    said = r"the names of the metrics must be the same.*rank 1 has \['accuracy', 'again'\]"
    refused(3, evaluate_differently, kind="ValueError", said=said)


def fail_on_rank_1(world: dl.World, folder: str, call: Callable[..., Any]) -> None:
    call(network(), dl.Batches(images(10), 5, world), forward=fail if world.rank == 1 else None)


@pytest.mark.parametrize("call", [dl.evaluate, dl.predict])
def test_a_failure_on_one_rank_ends_all(call: Callable[..., Any], refused: Refused) -> None:
    refused(3, fail_on_rank_1, call, kind="LookupError", said="no such class", by=1)


# -- precision -------------------------------------------------------------------------------------------------


def level(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return output.float().mean(1)


CALLS: dict[str, Callable[..., Any]] = {
    "evaluate": partial(dl.evaluate, level=level),
    "predict": dl.predict,
    "update_bn": dl.update_bn,
    "confusion_matrix": partial(dl.confusion_matrix, classes=3),
}


def precision_of(call: str, where: str) -> set[torch.dtype]:
    """The dtypes in which a model that is evaluated gives its outputs."""
    seen = set[torch.dtype]()

    def bfloat16(here: str) -> AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16) if where == here else nullcontext()

    def note(model: nn.Module, data: Any) -> torch.Tensor:
        with bfloat16("inside of forward"):
            output: torch.Tensor = model(data[0])
        seen.add(output.dtype)
        return output

    with dl.join_world() as world:
        batches = dl.Batches(images(10), 5, world, shuffle=False)
        with bfloat16("around the call"):
            CALLS[call](network(), batches, forward=note)
    return seen


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("where", ["nowhere", "around the call", "inside of forward"])
def test_autocast_is_that_of_the_caller_or_of_forward(call: str, where: str, on_ranks: OnRanks) -> None:
    expected = torch.float32 if where == "nowhere" else torch.bfloat16
    assert on_ranks(2, precision_of, call, where) == [{expected}] * 2


def after_an_update(call: str, looks: bool) -> tuple[Any, list[torch.Tensor]]:
    """What a call in autocast gives after an update; before it, the model may have been called with gradients."""
    with dl.join_world() as world, torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3)).eval()
        batches = dl.Batches(images(10), 5, world, shuffle=False)
        if looks:
            model(images(10)[0])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        return CALLS[call](model, batches), list(model.buffers())


@pytest.mark.covers("B10")
@pytest.mark.parametrize("call", CALLS)
def test_in_autocast_the_weights_are_the_current_ones(call: str, on_ranks: OnRanks) -> None:
    (found, moved), (expected, buffers) = (on_ranks(2, after_an_update, call, looks)[0] for looks in (True, False))
    assert all(map(torch.equal, moved, buffers))
    assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected


class Merging(nn.Linear):
    """A layer whose eval() merges a second weight into its own, and whose train() takes it out, as loralib's LoRA."""

    merged = False
    changes = 0

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False, dtype=torch.float64)
        self.added = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))
        nn.init.constant_(self.weight, 0.5)

    def train(self, mode: bool = True) -> Merging:
        if self.merged == mode:
            self.weight.data += self.added.detach() * (-1 if mode else 1)
            self.merged = not mode
            self.changes += 1
        return super().train(mode)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = super().forward(inputs)
        return output if self.merged else output + inputs * self.added


class Evaluated(nn.Sequential):
    """Its eval() does more than train(False)."""

    times = 0

    def eval(self) -> Evaluated:
        self.times += 1
        return super().eval()


def merged_after(call: str) -> tuple[bool, bool, int, int, list[float]]:
    """Whether a layer and a frozen one are merged in the end, changes of the latter, calls of eval(), and losses."""
    with dl.join_world(seed=0) as world:
        model = Evaluated(Merging(), Merging().eval())
        batches = dl.Batches(torch.ones(4, 1, dtype=torch.float64), 4, world)
        losses = []
        for step in loop_on(batches, model, epochs=2):
            for inputs in step:
                step.backward(model(inputs).mean())
            losses.append(float(step.fold().loss))
            with torch.no_grad():
                model[0].added -= 1  # type: ignore[operator, assignment]
            dl.update_bn(model, batches) if call == "update_bn" else dl.predict(model, batches)
        return bool(model[0].merged), bool(model[1].merged), cast(Merging, model[1]).changes, model.times, losses


@pytest.mark.parametrize(("call", "changes", "times"), [("predict", 1, 2), ("update_bn", 5, 0)])  # it trains all layers
def test_a_module_goes_back_to_its_mode_by_its_own_train(
    call: str, changes: int, times: int, on_ranks: OnRanks
) -> None:
    assert on_ranks(2, merged_after, call) == [(False, True, changes, times, [2.25, 0.75])] * 2
