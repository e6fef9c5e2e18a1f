"""Predict sine waves with two LSTM cells, trained by LBFGS on all of them at once."""

import argparse
import os

import ddp_loop as dl
import torch
from torch import nn, optim

parser = argparse.ArgumentParser(description="Train a predictor of sine waves.")
parser.add_argument("--steps", type=int, default=6, help="calls of the optimizer")
parser.add_argument("--waves", type=int, default=24)
parser.add_argument("--length", type=int, default=40)
args = parser.parse_args()
future = 10

world = dl.join_world()
torch.manual_seed(0)
device = world.device
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
batches = dl.Batches(train_set, len(train_set), world)

for step in dl.Loop(batches, steps=args.steps, state=dict(model=model, optimizer=optimizer), progress=False):

    def closure(step=step):
        optimizer.zero_grad()
        for some in step:
            step.backward(criterion(model(some[:, :-1]), some[:, 1:]))
        return step.fold().loss

    loss = optimizer.step(closure)
    with torch.no_grad():
        predicted = model(test_set[:, :-1], future=future)
        test_loss = criterion(predicted[:, :-future], test_set[:, 1:])
    world.print(f"step {step.iteration}: loss {loss.item():.6f}, test loss {test_loss.item():.6f}")

if world.rank == 0:
    torch.save(predicted, "runs/sine_waves/predicted.pt")
    torch.save(model.state_dict(), "runs/sine_waves/model.pt")
