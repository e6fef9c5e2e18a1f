"""Detect bright squares in pictures of different sizes, each with another number of boxes."""

import argparse
import os

import ddp_loop as dl
import torch
from torch import nn, optim
from torch.nn.functional import binary_cross_entropy_with_logits, smooth_l1_loss
from torch.utils import data

parser = argparse.ArgumentParser(description="Train a small detector with one anchor a cell.")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--images", type=int, default=48)
parser.add_argument("--lr", type=float, default=0.02)
args = parser.parse_args()
stride = 4

world = dl.join_world()
torch.manual_seed(0)
device = world.device
os.makedirs("runs/detection", exist_ok=True)


class Squares(data.Dataset):
    """Noisy pictures of (1, 16 to 32, 16 to 32) with up to three bright squares: boxes as (x1, y1, x2, y2)."""

    def __init__(self, count, seed):
        self.count, self.seed = count, seed

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        draws = torch.Generator().manual_seed(1000 * self.seed + i)
        height, width = (4 * torch.randint(4, 9, (2,), generator=draws)).tolist()
        image = 0.1 * torch.randn(1, height, width, generator=draws)
        boxes = []
        for _ in range(int(torch.randint(0, 4, (), generator=draws))):
            x, y, size = (int(torch.randint(0, most, (), generator=draws)) for most in (width - 8, height - 8, 4))
            image[0, y : y + size + 4, x : x + size + 4] += 1
            boxes.append([x, y, x + size + 4, y + size + 4])
        return image, {"boxes": torch.tensor(boxes, dtype=image.dtype).view(-1, 4), "image_id": i}


def collate_fn(samples):
    return tuple(zip(*samples, strict=True))


class Detector(nn.Module):
    """One box for each cell of 4 x 4 pixels: whether a centre lies in it, where, and how large the box is."""

    def __init__(self, channels=8):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, channels, 3, 2, 1), nn.ReLU(), nn.Conv2d(channels, channels, 3, 2, 1), nn.ReLU()
        )
        self.objectness, self.regression = nn.Conv2d(channels, 1, 3, 1, 1), nn.Conv2d(channels, 4, 3, 1, 1)

    def forward(self, images):
        features = [self.body(image[None]) for image in images]
        return [(self.objectness(one)[0, 0], self.regression(one)[0].permute(1, 2, 0)) for one in features]


def losses_of(outputs, targets):
    """For each image the sum of both losses over its cells and boxes, and its number of boxes."""
    objectness, regression = [], []
    for (logits, shapes), target in zip(outputs, targets, strict=True):
        centres = (target["boxes"][:, :2] + target["boxes"][:, 2:]) / 2
        sizes = target["boxes"][:, 2:] - target["boxes"][:, :2]
        columns, rows = (centres / stride).long().T
        wanted = torch.zeros_like(logits)
        wanted[rows, columns] = 1
        objectness.append(binary_cross_entropy_with_logits(logits, wanted, reduction="sum"))
        offsets = torch.cat([centres / stride - torch.stack([columns, rows], 1), (sizes / stride).log()], 1)
        regression.append(smooth_l1_loss(shapes[rows, columns], offsets, reduction="sum"))
    boxes = torch.tensor([len(target["boxes"]) for target in targets], device=device)
    return torch.stack(objectness), torch.stack(regression), boxes


train_loader = dl.Batches(Squares(args.images, 1), args.batch_size, world, collate_fn=collate_fn)
test_loader = dl.Batches(Squares(args.images // 3, 2), args.batch_size, world, shuffle=False, collate_fn=collate_fn)
model = Detector().to(device)
optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
scheduler = optim.lr_scheduler.StepLR(optimizer, 3, 0.1)
state = dict(model=model, optimizer=optimizer, scheduler=scheduler)
loop = dl.Loop(train_loader, args.epochs, state=state, progress=False)

for epoch in loop.epochs():
    model.train()
    for i, step in enumerate(epoch):
        for images, targets in step:
            step.hold(*losses_of(model(images), targets))
        objectness, regression, boxes = step.gather()
        count = boxes.sum().clamp(min=1)
        losses = {"objectness": objectness.sum() / count, "regression": regression.sum() / count}
        loss = sum(losses.values())
        optimizer.zero_grad()
        step.backward(loss, **losses)
        result = step.fold()
        optimizer.step()
        logged = ", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
        world.print(f"[{epoch.number}][{i}/{len(train_loader)}] loss {result.loss:.4f}, {logged}")
    scheduler.step()

    model.eval()
    found = boxes = 0
    with torch.no_grad():
        for images, targets in test_loader:
            for (logits, _), target in zip(model(images), targets, strict=True):
                columns, rows = ((target["boxes"][:, :2] + target["boxes"][:, 2:]) / 2 / stride).long().T
                found += int((logits[rows, columns] > 0).sum())
                boxes += len(target["boxes"])
    found, boxes = world.sum(torch.tensor([found, boxes], device=device)).tolist()
    world.print(f" * epoch {epoch.number}: recall {found / boxes:.4f} of {boxes} boxes")
    if world.rank == 0:
        torch.save(model.state_dict(), "runs/detection/model.pt")
