"""Train a small classifier of images as large ones are trained: meters, top-1 and top-5, resuming, a step schedule."""

import argparse
import time

import ddp_loop as dl
import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d
from torch.optim.lr_scheduler import StepLR
from torch.utils import data

CLASSES = 10
world = dl.join_world()
is_first = world.rank == 0


class Network(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(2 * width * 4, CLASSES)

    def forward(self, images):
        return self.classifier(adaptive_avg_pool2d(self.features(images), 2).flatten(1))


class AverageMeter:
    """A value, and its average so far."""

    def __init__(self, name, form=":f"):
        self.name, self.form = name, form
        self.value = self.average = self.sum = self.count = 0

    def update(self, value, count=1):
        self.value = value
        self.sum += value * count
        self.count += count
        self.average = self.sum / self.count

    def all_reduce(self):
        self.average = world.mean(self.average, self.count)

    def __str__(self):
        return ("{name} {value" + self.form + "} ({average" + self.form + "})").format(**vars(self))


class ProgressMeter:
    def __init__(self, batches, meters, prefix=""):
        self.batches, self.meters, self.prefix = batches, meters, prefix

    def display(self, batch):
        if is_first:
            print(f"{self.prefix}[{batch}/{self.batches}]", *self.meters, sep="\t")

    def display_summary(self):
        if is_first:
            print(" *", *(f"{meter.name} {meter.average:.3f}" for meter in self.meters))


def accuracy(output, target, topk=(1,)):
    """The share of the images, in percent, whose class is among the k best ones, for each k."""
    with torch.no_grad():
        best = output.topk(max(topk), dim=1).indices
        hits = best == target[:, None]
        return [hits[:, :k].any(dim=1).double().mean() * 100 for k in topk]


def make_images(count, seed):
    draws = torch.Generator().manual_seed(0)
    prototypes = torch.randn(CLASSES, 3, 8, 8, generator=draws)
    draws.manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=draws)
    return data.TensorDataset(prototypes[labels] + torch.randn(count, 3, 8, 8, generator=draws), labels)


def read_arguments():
    parser = argparse.ArgumentParser(description="Train a classifier of images.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32, help="of all processes together")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--images", type=int, default=250)
    parser.add_argument("--print-freq", type=int, default=4)
    return parser.parse_args()


def train(model, criterion, optimizer, epoch, args):
    batch_time, data_time = AverageMeter("Time", ":6.3f"), AverageMeter("Data", ":6.3f")
    losses = AverageMeter("Loss", ":.4e")
    top1, top5 = AverageMeter("Acc@1", ":6.2f"), AverageMeter("Acc@5", ":6.2f")
    progress = ProgressMeter(len(epoch), [batch_time, data_time, losses, top1, top5], f"Epoch: [{epoch.number - 1}]")
    model.train()
    end = time.time()
    for i, step in enumerate(epoch):
        data_time.update(time.time() - end)
        for images, target in step:
            output = model(images)
            loss = criterion(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            step.backward(loss, acc1=acc1, acc5=acc5)
        result = step.fold()
        losses.update(result.loss.item(), step.samples)
        top1.update(result.metrics["acc1"].item(), step.samples)
        top5.update(result.metrics["acc5"].item(), step.samples)
        optimizer.step()
        batch_time.update(time.time() - end)
        end = time.time()
        if i % args.print_freq == 0:
            progress.display(i + 1)


def validate(val_loader, model, criterion, device):
    losses = AverageMeter("Loss", ":.4e")
    top1, top5 = AverageMeter("Acc@1", ":6.2f"), AverageMeter("Acc@5", ":6.2f")
    progress = ProgressMeter(len(val_loader), [losses, top1, top5], "Test: ")
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            images = images.to(device, non_blocking=True)
            target = target.to(device, non_blocking=True)
            output = model(images)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            losses.update(criterion(output, target).item(), images.size(0))
            top1.update(acc1.item(), images.size(0))
            top5.update(acc5.item(), images.size(0))
    for meter in progress.meters:
        meter.all_reduce()
    progress.display_summary()
    return top1.average


def main():
    args = read_arguments()
    torch.manual_seed(0)
    device = world.device
    model = dl.sync_batch_norm(Network().to(device), world)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)

    train_set, val_set = make_images(args.images, seed=1), make_images(97, seed=2)
    train_loader = dl.Batches(train_set, args.batch_size, world)
    val_loader = dl.Batches(val_set, args.batch_size, world, shuffle=False)
    state = dict(model=model, optimizer=optimizer, scheduler=scheduler)
    loop = dl.Loop(train_loader, args.epochs, state=state, run_dir="runs/imagenet", progress=False)

    for epoch in loop.epochs():
        train(model, criterion, optimizer, epoch, args)
        acc1 = validate(val_loader, model, criterion, device)
        loop.save(score=-acc1)
        scheduler.step()


if __name__ == "__main__":
    main()
