"""Contrastive learning: two views of a picture are alike, views of all other pictures in the mini-batch are not."""

import argparse
import os

import ddp_loop as dl
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy, normalize
from torch.utils import data

parser = argparse.ArgumentParser(description="Train a small network by SimCLR.")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--images", type=int, default=96)
parser.add_argument("--temperature", type=float, default=0.2)
args = parser.parse_args()

world = dl.join_world()
torch.manual_seed(0)
device = world.device
os.makedirs("runs/simclr", exist_ok=True)


class TwoViews(data.Dataset):
    """Pictures of 12 x 12 pixels with stripes, in four classes by their direction, each with two noisy views."""

    def __init__(self, count):
        draws = torch.Generator().manual_seed(1)
        self.classes = torch.arange(count) % 4
        angles = self.classes * torch.pi / 4
        y, x = torch.meshgrid(torch.linspace(-3, 3, 12), torch.linspace(-3, 3, 12), indexing="ij")
        along = angles.cos()[:, None, None] * x + angles.sin()[:, None, None] * y
        self.pictures = torch.sin(2 * along + 6 * torch.rand(count, 1, 1, generator=draws))[:, None]

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, i):
        picture = self.pictures[i]
        mirrored = picture.flip(1, 2)
        return picture + 0.3 * torch.randn_like(picture), mirrored + 0.3 * torch.randn_like(mirrored)


class Encoder(nn.Module):
    def __init__(self, features=8):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, features, 3, 2, 1, bias=False),
            nn.BatchNorm2d(features),
            nn.ReLU(),
            nn.Conv2d(features, 2 * features, 3, 2, 1, bias=False),
            nn.BatchNorm2d(2 * features),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.projection = nn.Sequential(nn.Linear(2 * features * 9, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, pictures):
        return self.projection(self.body(pictures))


def nt_xent(z1, z2):
    """The loss of each view against all views of the mini-batch."""
    z = normalize(torch.cat([z1, z2]))
    similarity = z @ z.T / args.temperature
    similarity.fill_diagonal_(-torch.inf)
    partners = torch.arange(len(z), device=z.device).roll(len(z1))
    return cross_entropy(similarity, partners), (similarity.argmax(1) == partners).float().mean()


train_set = TwoViews(args.images)
train_loader = dl.Batches(train_set, args.batch_size, world, drop_last=True)
model = dl.sync_batch_norm(Encoder().to(device), world)
optimizer = optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
loop = dl.Loop(train_loader, args.epochs, state=dict(model=model, optimizer=optimizer), progress=False)

for epoch in loop.epochs():
    for i, step in enumerate(epoch):
        for first, second in step:
            step.hold(model(first), model(second))
        loss, top1 = nt_xent(*step.gather())
        optimizer.zero_grad()
        step.backward(loss, top1=top1)
        result = step.fold()
        optimizer.step()
        world.print(f"[{epoch.number}][{i}/{len(epoch)}] loss {result.loss:.4f}, top-1 {result.metrics['top1']:.4f}")

features = dl.predict(model.body, dl.Batches(train_set.pictures, args.batch_size, world, shuffle=False))
distances = torch.cdist(features, features).fill_diagonal_(torch.inf)
classes = train_set.classes.to(device)
world.print(f" * nearest neighbour of the same class: {(classes[distances.argmin(1)] == classes).float().mean():.4f}")
if world.rank == 0:
    torch.save(model.state_dict(), "runs/simclr/model.pt")
