"""The job with ddp_loop."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import ddp_loop as dl
from benchmarks.jobs import MINI_BATCH, MOMENTUM, RATE, read_arguments, read_material, show


def hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(1) == labels


class Ours:
    """The digit network in the hands of a `Loop`."""

    def __init__(
        self,
        world: dl.World,
        model: nn.Module,
        train: TensorDataset,
        test: TensorDataset,
        epochs: int,
        *,
        channels_last: bool = False,
        bf16: bool = False,
    ) -> None:
        if channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model, self.bf16 = model, bf16
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        self.test = dl.Batches(test, 1000, world, shuffle=False)
        state = {"model": model, "optimizer": self.optimizer}
        self.epochs = dl.Loop(dl.Batches(train, MINI_BATCH, world), epochs, state=state, progress=False).epochs()

    def epoch(self) -> dict[str, float]:
        totals, samples = torch.zeros(2), 0
        for step in next(self.epochs):
            for images, labels in step:
                with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                    logits = self.model(images).float()
                step.backward(cross_entropy(logits, labels), accuracy=hits(logits, labels))
            result = step.fold()
            self.optimizer.step()
            totals += result.samples * torch.stack([result.loss, result.metrics["accuracy"]])
            samples += result.samples
        loss, accuracy = (totals / samples).tolist()
        return {"loss": loss, "accuracy": accuracy, "samples": samples}

    def evaluate(self) -> dict[str, float]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            return dl.evaluate(self.model, self.test, accuracy=hits)


def main() -> None:
    arguments = read_arguments()
    kernels = {"channels_last": arguments.channels_last, "bf16": arguments.bf16}
    with dl.join_world(device="cpu", seed=arguments.seed, keep_memory=True) as world:
        show(Ours(world, *read_material(arguments), arguments.epochs, **kernels), arguments)


if __name__ == "__main__":
    main()
