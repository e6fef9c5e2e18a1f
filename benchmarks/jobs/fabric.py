"""The job with Lightning Fabric, as its documentation writes it.

Loss and accuracy are sums and counts of each rank, added up once an epoch. Under torchrun the number of devices is
given, since on the CPU Fabric takes one by default and refuses a world of more.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies.ddp import DDPStrategy
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.jobs import MINI_BATCH, MOMENTUM, RATE, ddp_tuning, read_arguments, read_material, show


class Fabricated:
    """The digit network, its optimizer and its loaders as `setup` gives them back."""

    def __init__(self, model: nn.Module, train: TensorDataset, test: TensorDataset, tuned: bool = False) -> None:
        devices = int(os.environ.get("WORLD_SIZE", "1"))
        strategy = DDPStrategy(**ddp_tuning()) if tuned else "ddp"
        self.fabric: Any = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
        self.fabric.launch()
        ranks = self.fabric.world_size
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.train = self.fabric.setup_dataloaders(DataLoader(train, batch_size=MINI_BATCH // ranks, shuffle=True))
        self.test = self.fabric.setup_dataloaders(DataLoader(test, batch_size=1000 // ranks))

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.optimizer.zero_grad()
        logits = self.model(images)
        loss = cross_entropy(logits, labels)
        self.fabric.backward(loss)
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
        loss, right, samples = self.fabric.all_reduce(totals, reduce_op="sum").tolist()
        return {"loss": loss / samples, "accuracy": right / samples, "samples": samples}

    def evaluate(self) -> dict[str, float]:
        self.model.eval()
        totals = torch.zeros(2)
        with torch.no_grad():
            for images, labels in self.test:
                totals[0] += (self.model(images).argmax(1) == labels).sum().item()
                totals[1] += len(labels)
        right, samples = self.fabric.all_reduce(totals, reduce_op="sum").tolist()
        return {"accuracy": right / samples, "samples": samples}


def main() -> None:
    arguments = read_arguments()
    job = Fabricated(*read_material(arguments), arguments.tuned)
    show(job, arguments)


if __name__ == "__main__":
    main()
