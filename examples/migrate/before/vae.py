"""Train a variational autoencoder on pictures of one blob each."""

import argparse
import os

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

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
train_loader = data.DataLoader(train_set, args.batch_size, shuffle=True)
test_loader = data.DataLoader(test_set, args.batch_size)
model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(1, args.epochs + 1):
    model.train()
    train_loss = 0.0
    for (pictures,) in train_loader:
        pictures = pictures.to(device)
        optimizer.zero_grad()
        reconstruction, mu, logvar = model(pictures)
        loss = loss_function(reconstruction, pictures, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()

    model.eval()
    test_loss = 0.0
    with torch.no_grad():
        for (pictures,) in test_loader:
            pictures = pictures.to(device)
            reconstruction, mu, logvar = model(pictures)
            test_loss += loss_function(reconstruction, pictures, mu, logvar).item()
    print(f"epoch {epoch}: loss {train_loss / len(train_set):.4f}, test loss {test_loss / len(test_set):.4f}")
    torch.save(model.state_dict(), "runs/vae/model.pt")
