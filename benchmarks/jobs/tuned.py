"""The job with DistributedDataParallel, tuned as far as it can be.

Gradients are views of the buckets, a mini-batch is indexed at once, and nothing waits for a number before the epoch's
end. Buffers are not sent, so that each rank keeps the batch-norm statistics of its own shards, and evaluates with them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from benchmarks.jobs import MINI_BATCH, MOMENTUM, RATE, ddp_tuning, read_arguments, read_material, show


class Tuned:
    """The digit network wrapped in DDP, fed with whole mini-batches."""

    def __init__(self, model: nn.Module, train: TensorDataset, test: TensorDataset) -> None:
        ranks = dist.get_world_size()
        self.model = DistributedDataParallel(model, **ddp_tuning())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=MOMENTUM)
        self.sampler: DistributedSampler[Any] = DistributedSampler(train)
        test_sampler: DistributedSampler[Any] = DistributedSampler(test, shuffle=False)
        batches = BatchSampler(self.sampler, MINI_BATCH // ranks, drop_last=False)
        test_batches = BatchSampler(test_sampler, 1000 // ranks, drop_last=False)
        self.train = DataLoader(train, sampler=batches, batch_size=None)
        self.test = DataLoader(test, sampler=test_batches, batch_size=None)
        self.epochs = 0

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.optimizer.zero_grad()
        logits = self.model(images)
        loss = cross_entropy(logits, labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach(), (logits.detach().argmax(1) == labels).sum()

    def epoch(self) -> dict[str, float]:
        self.model.train()
        self.sampler.set_epoch(self.epochs)
        self.epochs += 1
        totals, samples = torch.zeros(2), 0
        for images, labels in self.train:
            loss, right = self.step(images, labels)
            totals += torch.stack([loss * len(labels), right])
            samples += len(labels) * dist.get_world_size()
        dist.all_reduce(totals)
        loss, right = (totals / samples).tolist()
        return {"loss": loss, "accuracy": right, "samples": samples}

    def evaluate(self) -> dict[str, float]:
        self.model.eval()
        totals = torch.zeros(2)
        with torch.inference_mode():
            for images, labels in self.test:
                right = (self.model(images).argmax(1) == labels).sum()
                totals += torch.stack([right, torch.tensor(len(labels))])
        dist.all_reduce(totals)
        right, samples = totals.tolist()
        return {"accuracy": right / samples, "samples": samples}


def main() -> None:
    arguments = read_arguments()
    dist.init_process_group("gloo")
    show(Tuned(*read_material(arguments)), arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
