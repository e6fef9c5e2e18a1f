"""Metrics of torchmetrics, whose import takes 4 s; tests import this where they need it."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics  # noqa: F401  # the tests take more of it from here
from torchmetrics import AUROC, Accuracy, CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric
from torchmetrics.classification import MulticlassF1Score, MulticlassPrecision

CLASSES = 3


class OfFirst(MeanMetric):
    """The mean of the first output."""

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:  # type: ignore[override]
        super().update(logits[:, 0])


class Extreme(MaxMetric):
    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:  # type: ignore[override]
        super().update(logits)


class Least(MinMetric):
    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:  # type: ignore[override]
        super().update(logits)


class Outputs(CatMetric):
    """Takes none or several pieces of a shard."""

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:  # type: ignore[override]
        for piece in logits[:, 1][logits[:, 1] > 0].split(2):
            super().update(piece)


class Several(OfFirst):
    """A result with several names."""

    def compute(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"one": super().compute(), "negative": -super().compute()}


def all_metrics() -> dict[str, Any]:
    return {
        "f1": MulticlassF1Score(CLASSES, average="macro"),
        "per class": MulticlassPrecision(CLASSES, average=None),
        "accuracy": Accuracy(task="multiclass", num_classes=CLASSES),
        "auroc": AUROC(task="multiclass", num_classes=CLASSES),
        "binned": AUROC(task="multiclass", num_classes=CLASSES, thresholds=20),
        "mean": OfFirst(),
        "largest": Extreme(),
        "least": Least(),
        "both": MetricCollection([MulticlassF1Score(CLASSES), MulticlassPrecision(CLASSES)]),
        "outputs": Outputs(),
        "several": Several(),
    }


class Custom(Metric):
    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx=lambda one: one.sum() / 2)

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.total += logits.sum()

    def compute(self) -> torch.Tensor:
        return self.total


class Gathered(Metric):
    """The mean of the first output, of a list with another rule than "cat"."""

    values: list[torch.Tensor]

    def __init__(self, rule: str | None) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx=rule)

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.values.append(logits[:, 0])

    def compute(self) -> torch.Tensor:
        return torch.cat(list(self.values)).mean()


class Averaged(Custom):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("other", torch.zeros(()), dist_reduce_fx="mean")
        self._reductions["total"] = self._reductions["other"]


class Classes(MulticlassPrecision):
    """A result for each class."""

    def __init__(self) -> None:
        super().__init__(CLASSES, average=None)


class PartlySmoothed(MulticlassPrecision):
    """A metric of which one class's true positives start at 1."""

    def __init__(self) -> None:
        super().__init__(CLASSES)
        self._defaults["tp"] = torch.tensor([1, 0, 0])


class Labels(Metric):
    """The largest label, of a list that starts with a piece of another dtype; a number of Python."""

    found: list[torch.Tensor]

    def __init__(self, first: torch.Tensor, labels: torch.Tensor) -> None:
        super().__init__()
        self.first, self.labels = first, labels
        self.add_state("found", [], dist_reduce_fx="cat")

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        is_first = bool((labels == self.labels[: len(labels)]).all())
        self.found.append(self.first if is_first else labels + 2**40)

    def compute(self) -> float:
        return float(torch.cat(list(self.found)).max()) - 2**40


class Large(Gathered):
    """The number of outputs above 1e9, which none is, so that each piece is empty."""

    def __init__(self) -> None:
        super().__init__("cat")

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.values.append(logits[logits[:, 0] > 1e9, 0])

    def compute(self) -> torch.Tensor:
        return torch.tensor(torch.cat(list(self.values)).numel())


class Smoothed(OfFirst):
    """A metric whose sum starts at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("prior", torch.ones(2), dist_reduce_fx="sum")
