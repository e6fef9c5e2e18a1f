"""The job with Accelerate, as its documentation writes it.

Loss and accuracy in training are sums and counts of each rank, added up once an epoch; the test set goes through
`gather_for_metrics`. Under torchrun on a machine without a GPU `cpu=True` is needed: without it Accelerate 1.15 takes
each rank for a run of its own, and says nothing.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.jobs import MINI_BATCH, MOMENTUM, RATE, read_arguments, read_material, show

TUNED = DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)


class Accelerated:
    """The digit network, its optimizer and its loaders as `prepare` gives them back."""

    def __init__(self, model: nn.Module, train: TensorDataset, test: TensorDataset, tuned: bool = False) -> None:
        self.accelerator = Accelerator(cpu=True, kwargs_handlers=[TUNED] if tuned else None)
        ranks = self.accelerator.num_processes
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        train_loader = DataLoader(train, batch_size=MINI_BATCH // ranks, shuffle=True)
        test_loader = DataLoader(test, batch_size=1000 // ranks)
        self.model, self.optimizer, self.train, self.test = self.accelerator.prepare(
            model, optimizer, train_loader, test_loader
        )

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.optimizer.zero_grad()
        logits = self.model(images)
        loss = cross_entropy(logits, labels)
        self.accelerator.backward(loss)
        self.optimizer.step()
        return loss.detach(), (logits.argmax(1) == labels).sum()

    def epoch(self) -> dict[str, float]:
        self.model.train()
        totals = torch.zeros(3)
        for images, labels in self.train:
            loss, right = self.step(images, labels)
            totals[0] += loss.item() * len(labels)
            totals[1] += right.item()
            totals[2] += len(labels)
        loss, right, samples = self.accelerator.reduce(totals, reduction="sum").tolist()
        return {"loss": loss / samples, "accuracy": right / samples, "samples": samples}

    def evaluate(self) -> dict[str, float]:
        self.model.eval()
        right, samples = 0.0, 0
        for images, labels in self.test:
            with torch.no_grad():
                predictions = self.model(images).argmax(1)
            predictions, references = self.accelerator.gather_for_metrics((predictions, labels))
            right += (predictions == references).sum().item()
            samples += len(references)
        return {"accuracy": right / samples, "samples": samples}


def main() -> None:
    arguments = read_arguments()
    job = Accelerated(*read_material(arguments), arguments.tuned)
    show(job, arguments)
    job.accelerator.end_training()


if __name__ == "__main__":
    main()
