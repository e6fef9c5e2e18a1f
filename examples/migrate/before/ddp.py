"""Classify handwritten digits."""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
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


def train(model, device, loader, optimizer, epoch):
    model.train()
    loader.sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        images, labels = images.to(device), labels.to(device)
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()


def test(model, device, loader):
    model.eval()
    totals = torch.zeros(3, device=device)
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            logits = model(images)
            totals[0] += cross_entropy(logits, labels, reduction="sum")
            totals[1] += (logits.argmax(1) == labels).sum()
            totals[2] += len(labels)
    dist.all_reduce(totals)
    if dist.get_rank() == 0:
        print("Test loss and accuracy:", (totals[:2] / totals[2]).tolist())


def main(epochs, batch_size):
    torch.manual_seed(0)
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
    train_set, test_set = read_digits()
    model = Network().to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = data.DataLoader(train_set, batch_size // dist.get_world_size(), sampler=data.DistributedSampler(train_set))
    test_loader = data.DataLoader(test_set, 100, sampler=data.DistributedSampler(test_set, shuffle=False))
    for epoch in range(epochs):
        train(model, device, loader, optimizer, epoch)
        test(model, device, test_loader)
        if dist.get_rank() == 0:
            os.makedirs("runs/migrate", exist_ok=True)
            torch.save(model.module.state_dict(), "runs/migrate/digits.pt")


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    main(**read_arguments())
    dist.destroy_process_group()
