"""Train a small DCGAN on pictures of one blob each."""

import argparse
import os

import ddp_loop as dl
import torch
from torch import nn, optim
from torch.utils import data

parser = argparse.ArgumentParser(description="Train a small DCGAN.")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--images", type=int, default=128)
parser.add_argument("--nz", type=int, default=8, help="size of the noise")
parser.add_argument("--features", type=int, default=8)
args = parser.parse_args()
nz, features, real_label, fake_label = args.nz, args.features, 1.0, 0.0

world = dl.join_world()
torch.manual_seed(0)
device = world.device
os.makedirs("runs/dcgan", exist_ok=True)


def weights_init(module):
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


class Blobs(data.Dataset):
    """Pictures of 16 x 16 pixels with a blob somewhere, each with the noise that the generator gets beside it."""

    def __init__(self, count):
        draws = torch.Generator().manual_seed(1)
        places = torch.rand(count, 2, 1, 1, generator=draws) * 2 - 1
        y, x = torch.meshgrid(torch.linspace(-2, 2, 16), torch.linspace(-2, 2, 16), indexing="ij")
        distance = (y - places[:, 0]) ** 2 + (x - places[:, 1]) ** 2
        self.pictures = (2 * torch.exp(-2 * distance) - 1)[:, None]
        self.noise = torch.randn(count, nz, 1, 1, generator=draws)

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, i):
        return self.pictures[i], self.noise[i]


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, 2 * features, 4, 1, 0, bias=False),
            nn.BatchNorm2d(2 * features),
            nn.ReLU(True),
            nn.ConvTranspose2d(2 * features, features, 4, 2, 1, bias=False),
            nn.BatchNorm2d(features),
            nn.ReLU(True),
            nn.ConvTranspose2d(features, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, features, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(features, 2 * features, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * features),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(2 * features, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, pictures):
        return self.main(pictures).view(-1)


dataloader = dl.Batches(Blobs(args.images), args.batch_size, world)
netG = Generator().to(device)
netG.apply(weights_init)
netD = Discriminator().to(device)
netD.apply(weights_init)
netG, netD = dl.sync_batch_norm(netG, world), dl.sync_batch_norm(netD, world)
criterion = nn.BCELoss()
fixed_noise = torch.randn(16, nz, 1, 1, device=device)
optimizerD = optim.Adam(netD.parameters(), lr=0.0002, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=0.0002, betas=(0.5, 0.999))
state = dict(netG=netG, netD=netD, optimizerG=optimizerG, optimizerD=optimizerD)
loop = dl.Loop(dataloader, args.epochs, state=state, progress=False)

for epoch in loop.epochs():
    for i, step in enumerate(epoch):
        # Update D: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        fakes = []
        for real, noise in step:
            output = netD(real)
            errD_real = criterion(output, torch.full_like(output, real_label))
            step.backward(errD_real, more_losses=True)
            D_x = output.mean()

            fake = netG(noise)
            output = netD(fake.detach())
            errD_fake = criterion(output, torch.full_like(output, fake_label))
            step.backward(errD_fake, D_x=D_x, D_G_z=output.mean())
            fakes.append(fake)
        on_D = step.fold()
        optimizerD.step()

        # Update G: maximize log(D(G(z)))
        netG.zero_grad()
        for fake, _ in zip(fakes, step, strict=True):
            output = netD(fake)
            errG = criterion(output, torch.full_like(output, real_label))
            step.backward(errG, D_G_z=output.mean())
        on_G = step.fold()
        optimizerG.step()

        world.print(
            f"[{epoch.number - 1}/{args.epochs}][{i}/{len(epoch)}] Loss_D: {on_D.loss:.4f} Loss_G: {on_G.loss:.4f} "
            f"D(x): {on_D.metrics['D_x']:.4f} D(G(z)): {on_D.metrics['D_G_z']:.4f} / {on_G.metrics['D_G_z']:.4f}"
        )

    if world.rank > 0:
        continue
    netG.eval()
    with torch.no_grad():
        torch.save(netG(fixed_noise), "runs/dcgan/fake_samples.pt")
    netG.train()
    torch.save(netG.state_dict(), "runs/dcgan/netG.pth")
    torch.save(netD.state_dict(), "runs/dcgan/netD.pth")
