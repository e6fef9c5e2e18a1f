"""Classify handwritten digits."""

import argparse

import ddp_loop as dl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils import data


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 16, kernel_size=3)
        self.linear = nn.Linear(16 * 6 * 6, 10)

    def forward(self, images):
        return self.linear(torch.relu(self.convolution(images)).flatten(1))


def read_digits():
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16).float().view(-1, 1, 8, 8), torch.tensor(labels)
    return data.TensorDataset(images[:1600], labels[:1600]), data.TensorDataset(images[1600:], labels[1600:])


def read_arguments():
    parser = argparse.ArgumentParser(description="Classify handwritten digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    return vars(parser.parse_args())


def main(epochs, batch_size):
    torch.manual_seed(0)
    world = dl.join_world()
    train_set, test_set = read_digits()
    test_loader = dl.Batches(test_set, 100, world, shuffle=False)
    model = Network().to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = dl.Loop(dl.Batches(train_set, batch_size, world), epochs, state=dict(model=model, optimizer=optimizer))
    schedule = StepLR(optimizer, step_size=4, gamma=0.5)
    for epoch in loader.epochs():
        model.train()
        for step in epoch:
            optimizer.zero_grad()
            for images, labels in step:
                step.backward(cross_entropy(model(images), labels))
            step.fold()
            optimizer.step()
        schedule.step()

        model.eval()
        totals = torch.zeros(2, device=images.device)
        for images, labels in test_loader:
            with torch.no_grad():
                logits = model(images)
            totals[0] += cross_entropy(logits, labels, reduction="sum")
            totals[1] += (logits.argmax(1) == labels).sum()
        world.print("Test loss and accuracy:", (world.sum(totals) / len(test_set)).tolist())


if __name__ == "__main__":
    main(**read_arguments())
