"""Train a variational autoencoder on pictures of one blob each."""

import argparse
import os

import ddp_loop as dl
import torch
from torch import nn, optim
from torch.nn.functional import binary_cross_entropy
from torch.utils import data

parser = argparse.ArgumentParser(description="Train a small VAE.")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--images", type=int, default=160, help="pictures to train on; a quarter more are for testing")
parser.add_argument("--latent", type=int, default=4)
args = parser.parse_args()
side = 12

world = dl.join_world()
torch.manual_seed(0)
device = world.device
os.makedirs("runs/vae", exist_ok=True)


def blobs(count, seed):
    """Pictures of 12 x 12 pixels from 0 to 1 with a blob somewhere."""
    places = torch.rand(count, 2, 1, 1, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    y, x = torch.meshgrid(torch.linspace(-2, 2, side), torch.linspace(-2, 2, side), indexing="ij")
    return torch.exp(-2 * ((y - places[:, 0]) ** 2 + (x - places[:, 1]) ** 2))


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(side * side, 48), nn.ReLU())
        self.mu, self.logvar = nn.Linear(48, args.latent), nn.Linear(48, args.latent)
        self.decoder = nn.Sequential(nn.Linear(args.latent, 48), nn.ReLU(), nn.Linear(48, side * side), nn.Sigmoid())

    def forward(self, pictures):
        hidden = self.encoder(pictures.flatten(1))
        mu, logvar = self.mu(hidden), self.logvar(hidden)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.decoder(z), mu, logvar


def loss_function(reconstruction, pictures, mu, logvar):
    """Reconstruction and KL divergence, both summed over pixels and pictures."""
    bce = binary_cross_entropy(reconstruction, pictures.flatten(1), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


train_set, test_set = data.TensorDataset(blobs(args.images, 1)), data.TensorDataset(blobs(args.images // 4, 2))
train_loader = dl.Batches(train_set, args.batch_size, world)
test_loader = dl.Batches(test_set, args.batch_size, world, shuffle=False)
model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-3)
loop = dl.Loop(train_loader, args.epochs, state=dict(model=model, optimizer=optimizer), progress=False)

for epoch in loop.epochs():
    model.train()
    train_loss = 0.0
    for step in epoch:
        optimizer.zero_grad()
        for (pictures,) in step:
            reconstruction, mu, logvar = model(pictures)
            loss = loss_function(reconstruction, pictures, mu, logvar)
            step.backward(loss, reduction="sum")
        train_loss += step.fold().loss
        optimizer.step()

    model.eval()
    test_loss = 0.0
    with torch.no_grad():
        for (pictures,) in test_loader:
            reconstruction, mu, logvar = model(pictures)
            test_loss += loss_function(reconstruction, pictures, mu, logvar).item()
    test_loss = world.sum(torch.tensor(test_loss, device=device)).item()
    world.print(
        f"epoch {epoch.number}: loss {train_loss / len(train_set):.4f}, test loss {test_loss / len(test_set):.4f}"
    )
    if world.rank == 0:
        torch.save(model.state_dict(), "runs/vae/model.pt")
