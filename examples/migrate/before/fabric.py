"""Classify handwritten digits."""

import argparse

import torch
from lightning_fabric import Fabric
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
    fabric = Fabric()
    train_set, test_set = read_digits()
    loader = fabric.setup_dataloaders(data.DataLoader(train_set, batch_size // fabric.world_size, shuffle=True))
    test_loader = fabric.setup_dataloaders(data.DataLoader(test_set, batch_size=100))
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    schedule = StepLR(optimizer, step_size=4, gamma=0.5)
    for _ in range(epochs):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            fabric.backward(cross_entropy(model(images), labels))
            optimizer.step()
        schedule.step()

        model.eval()
        totals = torch.zeros(2, device=images.device)
        for images, labels in test_loader:
            with torch.no_grad():
                logits = model(images)
            totals[0] += cross_entropy(logits, labels, reduction="sum")
            totals[1] += (logits.argmax(1) == labels).sum()
        fabric.print("Test loss and accuracy:", (fabric.all_reduce(totals, reduce_op="sum") / len(test_set)).tolist())


if __name__ == "__main__":
    main(**read_arguments())
