"""Predict sine waves with two LSTM cells, trained by LBFGS on all of them at once."""

import argparse
import os

import torch
from torch import nn, optim

parser = argparse.ArgumentParser(description="Train a predictor of sine waves.")
parser.add_argument("--steps", type=int, default=6, help="calls of the optimizer")
parser.add_argument("--waves", type=int, default=24)
parser.add_argument("--length", type=int, default=40)
args = parser.parse_args()
future = 10

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
os.makedirs("runs/sine_waves", exist_ok=True)


class Sequence(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, width), nn.LSTMCell(width, width), nn.Linear(width, 1)
        self.width = width

    def forward(self, waves, future=0):
        outputs = []
        h1 = c1 = h2 = c2 = waves.new_zeros(len(waves), self.width)
        for value in waves.split(1, dim=1):
            h1, c1 = self.lstm1(value, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            outputs.append(self.linear(h2))
        for _ in range(future):
            h1, c1 = self.lstm1(outputs[-1], (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, dim=1)


starts = torch.randint(-80, 80, (args.waves, 1), generator=torch.Generator().manual_seed(1))
waves = torch.sin((torch.arange(args.length + 1) + starts) / 5.0).to(device)
train_set, test_set = waves[args.waves // 8 :], waves[: args.waves // 8]
model = Sequence().to(device)
criterion = nn.MSELoss()
optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)

for i in range(args.steps):

    def closure():
        optimizer.zero_grad()
        loss = criterion(model(train_set[:, :-1]), train_set[:, 1:])
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    with torch.no_grad():
        predicted = model(test_set[:, :-1], future=future)
        test_loss = criterion(predicted[:, :-future], test_set[:, 1:])
    print(f"step {i + 1}: loss {loss.item():.6f}, test loss {test_loss.item():.6f}")

torch.save(predicted, "runs/sine_waves/predicted.pt")
torch.save(model.state_dict(), "runs/sine_waves/model.pt")
