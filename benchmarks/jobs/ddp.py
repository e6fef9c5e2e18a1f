"""The job with torch's DistributedDataParallel, DistributedSampler and DataLoader, as torch's documentation uses them.

Loss and accuracy are sums and counts of each rank, added up once an epoch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.jobs import MINI_BATCH, MOMENTUM, RATE, read_arguments, read_material, show


class Ddp:
    """The digit network wrapped in DDP, with a sampler for each loader."""

    def __init__(self, model: nn.Module, train: TensorDataset, test: TensorDataset, seed: int = 0) -> None:
        ranks = dist.get_world_size()
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=MOMENTUM)
        self.sampler: DistributedSampler[Any] = DistributedSampler(train, seed=seed)
        test_sampler: DistributedSampler[Any] = DistributedSampler(test, shuffle=False)
        self.train = DataLoader(train, batch_size=MINI_BATCH // ranks, sampler=self.sampler)
        self.test = DataLoader(test, batch_size=1000 // ranks, sampler=test_sampler)
        self.epochs = 0

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.optimizer.zero_grad()
        logits = self.model(images)
        loss = cross_entropy(logits, labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach(), (logits.argmax(1) == labels).sum()

    def epoch(self) -> dict[str, float]:
        self.model.train()
        self.sampler.set_epoch(self.epochs)
        self.epochs += 1
        totals = torch.zeros(3)
        for images, labels in self.train:
            loss, right = self.step(images, labels)
            totals[0] += loss.item() * len(labels)
            totals[1] += right.item()
            totals[2] += len(labels)
        dist.all_reduce(totals)
        loss, right, samples = totals.tolist()
        return {"loss": loss / samples, "accuracy": right / samples, "samples": samples}

    def evaluate(self) -> dict[str, float]:
        self.model.eval()
        totals = torch.zeros(2)
        with torch.no_grad():
            for images, labels in self.test:
                totals[0] += (self.model(images).argmax(1) == labels).sum().item()
                totals[1] += len(labels)
        dist.all_reduce(totals)
        right, samples = totals.tolist()
        return {"accuracy": right / samples, "samples": samples}


def main() -> None:
    arguments = read_arguments()
    dist.init_process_group("gloo")
    show(Ddp(*read_material(arguments), arguments.seed), arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
