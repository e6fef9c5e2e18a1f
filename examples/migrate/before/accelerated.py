"""Classify handwritten digits."""

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
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
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    train_set, test_set = read_digits()
    loader = data.DataLoader(train_set, batch_size // accelerator.num_processes, shuffle=True)
    test_loader = data.DataLoader(test_set, batch_size=100)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
    for _ in range(epochs):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()

        model.eval()
        totals = torch.zeros(2)
        for images, labels in test_loader:
            with torch.no_grad():
                logits = model(images)
            logits, labels = accelerator.gather_for_metrics((logits, labels))
            totals[0] += cross_entropy(logits, labels, reduction="sum").cpu()
            totals[1] += (logits.argmax(1) == labels).sum().cpu()
        accelerator.print("Test loss and accuracy:", (totals / len(test_set)).tolist())


if __name__ == "__main__":
    main(**read_arguments())
