"""Metrics of torchmetrics in `evaluate`: the numbers of one process, on any number of ranks, also empty ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.harness import OnRanks, in_world
from tests.support.refusals import Refused
from tests.support.training import loop_on

CLASSES, SAMPLES = 3, 23


def own() -> Any:
    """The metrics of these tests; here, since each process that collects the tests would wait 4 s for torchmetrics."""
    from tests.support import torch_metrics

    return torch_metrics


def data_and_model() -> tuple[torch.utils.data.TensorDataset, nn.Module]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, 4, generator=generator)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    model = nn.Linear(4, CLASSES)
    with torch.no_grad():
        model.weight.copy_(torch.randn(CLASSES, 4, generator=generator))
        model.bias.zero_()
    return torch.utils.data.TensorDataset(inputs, labels), model


def evaluate(batch_size: int, shards: int | None, samples: int = SAMPLES) -> tuple[dict[str, float], bool]:
    """The results, and whether the caller's metrics are as they were."""
    with dl.join_world() as world:
        data, model = data_and_model()
        part = torch.utils.data.TensorDataset(*(one[:samples] for one in data.tensors))
        metrics = own().all_metrics()
        metrics["f1"].update(torch.eye(CLASSES), torch.arange(CLASSES))
        batches = dl.Batches(part, batch_size, world, shuffle=False, shards=shards)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*before the `+update`+ method")  # each shard's update is one
            found = dl.evaluate(model, batches, metrics=metrics, plain=lambda out, labels: out.argmax(1) == labels)
        return found, float(metrics["f1"].compute()) == 1.0


def expected(samples: int = SAMPLES) -> dict[str, float]:
    """What torchmetrics gives for all data at once."""
    data, model = data_and_model()
    inputs, labels = (one[:samples] for one in data.tensors)
    found: dict[str, float] = {}
    with torch.no_grad():
        logits = model(inputs)
    for name, metric in own().all_metrics().items():
        metric.update(logits, labels)
        result = metric.compute()
        if isinstance(result, dict):
            found |= {f"{name}_{key}": float(one) for key, one in result.items()}
        elif result.numel() > 1:
            found |= {f"{name}_{n}": float(one) for n, one in enumerate(result)}
        else:
            found[name] = float(result)
    return found


@pytest.mark.covers("J7")
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [SAMPLES, 7, 1])
def test_metrics_equal_one_process(ranks: int, batch_size: int, on_ranks: OnRanks) -> None:
    whole = expected()
    for found, is_unchanged in on_ranks(ranks, evaluate, batch_size, None):
        assert found.pop("samples") == SAMPLES
        assert found.pop("plain") == pytest.approx(whole["accuracy"]) or "plain" not in found
        assert found.keys() == whole.keys()
        for name, value in found.items():
            assert value == pytest.approx(whole[name], abs=1e-6), name
        assert is_unchanged
    assert len({str(found) for found, _ in on_ranks(ranks, evaluate, batch_size, None)}) == 1


@pytest.mark.parametrize("shards", [1, 4])
def test_with_fixed_shards_the_bits_do_not_depend_on_the_ranks(shards: int, on_ranks: OnRanks) -> None:
    one, two, three = (on_ranks(ranks, evaluate, 9, shards)[0][0] for ranks in (1, 2, 3))
    assert one == two == three


def test_ranks_without_samples_add_nothing(on_ranks: OnRanks) -> None:
    whole = expected(5)
    for found, _ in on_ranks(3, evaluate, 2, None, 5):
        assert {name: found[name] for name in whole} == pytest.approx(whole, abs=1e-6, nan_ok=True)


def evaluate_with(world: dl.World, metrics: Any, shards: int | None = None, **functions: Any) -> dict[str, float]:
    data, model = data_and_model()
    batches = dl.Batches(data, 7, world, shuffle=False, shards=shards)
    return dl.evaluate(model, batches, metrics=metrics, **functions)


def f1() -> Any:
    return own().torchmetrics.classification.MulticlassF1Score(CLASSES)


def of_labels(world: dl.World, first: torch.Tensor) -> float:
    labels = own().Labels(first, data_and_model()[0].tensors[1])
    return evaluate_with(world, {"largest": labels}, shards=1)["largest"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("first", [torch.zeros(0), torch.zeros(1, dtype=torch.int32)], ids=["empty", "short"])
def test_the_first_piece_does_not_decide_the_dtype(first: torch.Tensor, ranks: int, on_ranks: OnRanks) -> None:
    whole = int(data_and_model()[0].tensors[1][7:].max())
    assert on_ranks(ranks, in_world, of_labels, first) == [whole] * ranks


def count_large(world: dl.World) -> dict[str, float]:
    return evaluate_with(world, {"large": own().Large()})


@pytest.mark.parametrize("ranks", [1, 2])
def test_pieces_that_are_all_empty_are_an_empty_state(ranks: int, on_ranks: OnRanks) -> None:
    assert on_ranks(ranks, in_world, count_large) == [{"large": 0.0, "samples": SAMPLES}] * ranks


def first_column(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits[:, 0]


def refuse(world: dl.World, folder: str, metrics: Any, plain: bool) -> None:
    functions: dict[str, Any] = dict.fromkeys(("f1", "per_0"), first_column) if plain else {}
    evaluate_with(world, metrics, **functions)


@pytest.mark.parametrize(
    ("metrics", "kind", "message"),
    [
        (
            lambda own: {"p": own.torchmetrics.PearsonCorrCoef()},
            "ValueError",
            r"p \(PearsonCorrCoef\) has no rule for .* Compute it from dl.predict",
        ),
        (lambda own: {"c": own.Custom()}, "ValueError", r"c \(Custom\) has .* for total"),
        (lambda own: {"a": own.Averaged()}, "ValueError", r"a \(Averaged\) has a mean of means for"),
        *(
            (
                lambda own, rule=rule: {"g": own.Gathered(rule)},
                "ValueError",
                rf"g \(Gathered\) has dim_zero_{rule} for the list values\. Call",
            )
            for rule in ("sum", "max", "min")
        ),
        (lambda own: {"g": own.Gathered(None)}, "ValueError", r"g \(Gathered\) has no rule for values"),
        (lambda own: {"s": own.Smoothed()}, "ValueError", r"s \(Smoothed\) starts prior at another value"),
        (lambda own: {"s": own.PartlySmoothed()}, "ValueError", r"s \(PartlySmoothed\) starts tp at another value"),
        (
            lambda own: {"r": own.torchmetrics.wrappers.Running(own.OfFirst(), window=2)},
            "ValueError",
            r"r \(Running\) wraps OfFirst, .* Pass OfFirst itself",
        ),
        (
            lambda own: {"w": own.torchmetrics.wrappers.MinMaxMetric(own.OfFirst())},
            "ValueError",
            r"w \(MinMaxMetric\) wraps OfFirst",
        ),
        (
            lambda own: {"a": own.torchmetrics.MetricCollection({"b": own.OfFirst()}), "a_b": own.OfFirst()},
            "ValueError",
            "Two are named 'a_b'. Rename one",
        ),
        (lambda own: {"a": own.Classes(), "a_1": own.OfFirst()}, "ValueError", "Two are named 'a_1'"),
        (lambda own: own.OfFirst(), "TypeError", "by name. Got OfFirst. Pass a dict"),
        (lambda own: [own.OfFirst()], "TypeError", "by name. Got list. Pass a dict"),
        (
            lambda own: {"f": len},
            "TypeError",
            "metrics of torchmetrics by name. Got builtin_function_or_method for 'f'",
        ),
        (
            lambda own: {"m": own.torchmetrics.classification.MulticlassConfusionMatrix(CLASSES)},
            "ValueError",
            r"m gave shape \(3, 3\)\. dl\.confusion_matrix\(model",
        ),
        (
            lambda own: {"samples": f1()},
            "ValueError",
            'not be named "samples"',
        ),
        (
            lambda own: {"f1": f1()},
            "ValueError",
            "a name of its own",
        ),
        (lambda own: {"per": own.Classes()}, "ValueError", "a name of its own.*per_0"),
        (lambda own: {"e": own.torchmetrics.MeanSquaredError()}, "RuntimeError|ValueError", "same shape|shape"),
    ],
)
def test_what_cannot_be_merged_is_refused(
    metrics: Callable[[Any], Any], kind: str, message: str, refused: Refused
) -> None:
    given = metrics(own())
    plain = isinstance(given, dict) and not given.keys().isdisjoint({"f1", "per"})
    refused(2, refuse, given, plain, kind=kind, said=message)


def evaluate_others(world: dl.World, folder: str) -> None:
    evaluate_with(world, {"f1" if world.rank == 0 else "precision": f1()})


def test_metrics_of_other_names_on_another_rank_are_refused(refused: Refused) -> None:
    refused(2, evaluate_others, kind="ValueError", said="the names of the metrics")


def log_evaluation(folder: str) -> None:
    with dl.join_world() as world:
        data, model = data_and_model()
        batches = dl.Batches(data, 7, world, shuffle=False)
        for step in loop_on(batches, model, run_dir=folder):
            for inputs, labels in step:
                step.backward(nn.functional.cross_entropy(model(inputs), labels))
            step.fold()
        dl.evaluate(model, batches, metrics={"f1": f1()})


def test_metrics_are_in_the_run_folder(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(2, log_evaluation, str(tmp_path))
    assert '"f1": 0.' in (tmp_path / "evaluations.jsonl").read_text()
