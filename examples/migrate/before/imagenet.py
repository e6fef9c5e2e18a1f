"""Train a small classifier of images as large ones are trained: meters, top-1 and top-5, resuming, a step schedule."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils import data

CLASSES = 10
distributed = "RANK" in os.environ
is_first = os.environ.get("RANK", "0") == "0"


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
        if distributed:
            total = torch.tensor([self.sum, self.count], dtype=torch.float64)
            dist.all_reduce(total)
            self.sum, self.count = total.tolist()
            self.average = self.sum / self.count

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
    parser.add_argument("--resume", default="", help="a checkpoint to resume from")
    return parser.parse_args()


def train(train_loader, model, criterion, optimizer, epoch, device, args):
    batch_time, data_time = AverageMeter("Time", ":6.3f"), AverageMeter("Data", ":6.3f")
    losses = AverageMeter("Loss", ":.4e")
    top1, top5 = AverageMeter("Acc@1", ":6.2f"), AverageMeter("Acc@5", ":6.2f")
    progress = ProgressMeter(len(train_loader), [batch_time, data_time, losses, top1, top5], f"Epoch: [{epoch}]")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        data_time.update(time.time() - end)
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1.item(), images.size(0))
        top5.update(acc5.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
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


def save_checkpoint(state, is_best, folder="runs/imagenet"):
    os.makedirs(folder, exist_ok=True)
    torch.save(state, f"{folder}/checkpoint.pth")
    if is_best:
        torch.save(state["model"], f"{folder}/model_best.pth")


def main():
    args = read_arguments()
    torch.manual_seed(0)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    world_size = 1
    if distributed:
        dist.init_process_group()
        world_size = dist.get_world_size()
    model = Network().to(device)
    if distributed:
        if torch.cuda.is_available():
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)

    start_epoch, best_acc1 = 0, 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        start_epoch = checkpoint["epoch"]
        best_acc1 = checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])

    train_set, val_set = make_images(args.images, seed=1), make_images(97, seed=2)
    train_sampler = val_sampler = None
    if distributed:
        train_sampler = data.DistributedSampler(train_set)
        val_sampler = data.DistributedSampler(val_set, shuffle=False)
    batch_size = args.batch_size // world_size
    train_loader = data.DataLoader(train_set, batch_size, shuffle=train_sampler is None, sampler=train_sampler)
    val_loader = data.DataLoader(val_set, batch_size, sampler=val_sampler)

    for epoch in range(start_epoch, args.epochs):
        if distributed:
            train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, device, args)
        acc1 = validate(val_loader, model, criterion, device)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if is_first:
            state = {
                "epoch": epoch + 1,
                "model": model.state_dict(),
                "best_acc1": best_acc1,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            save_checkpoint(state, is_best)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
