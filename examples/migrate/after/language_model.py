"""Train an LSTM on the letters of a text, with its hidden state carried from chunk to chunk."""

import argparse
import math
import os

import ddp_loop as dl
import torch
from torch import nn
from torch.nn.functional import cross_entropy

LINES = ["the cat sees the dog", "the old dog follows a small cat", "a river carries the lantern home"]
TEXT = "\n".join(LINES[i * i % 3] + " and ".join(["", *LINES[i % 2 : i % 3 + 1]]) for i in range(60))
LETTERS = sorted(set(TEXT))

parser = argparse.ArgumentParser(description="Train a small language model.")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=8, help="sequences that are read side by side")
parser.add_argument("--bptt", type=int, default=20, help="letters of a chunk")
parser.add_argument("--lr", type=float, default=5.0)
parser.add_argument("--clip", type=float, default=0.25)
args = parser.parse_args()

world = dl.join_world()
torch.manual_seed(0)
device = world.device
os.makedirs("runs/language_model", exist_ok=True)


def batchify(tokens, lanes):
    """The inputs and targets of each lane."""
    length = len(tokens) // lanes
    return [(lane[:-1], lane[1:]) for lane in tokens[: length * lanes].view(lanes, length)]


class LanguageModel(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(len(LETTERS), width), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, len(LETTERS))

    def forward(self, inputs, hidden):
        outputs, hidden = self.lstm(self.embedding(inputs), hidden)
        return self.head(outputs), hidden


tokens = torch.tensor([LETTERS.index(letter) for letter in TEXT])
cut = len(tokens) * 9 // 10
train_text, val_text = batchify(tokens[:cut], args.batch_size), batchify(tokens[cut:], args.batch_size)
train_data = dl.SequenceBatches(train_text, args.batch_size, args.bptt, world, shuffle=False)
val_data = dl.SequenceBatches(val_text, args.batch_size, args.bptt, world, shuffle=False)
model = LanguageModel().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
best_val_loss = math.inf


def forward(model, chunk):
    output, chunk.hidden = model(chunk.data[0], chunk.hidden)
    return chunk.unpad(output)


def loss_of(output, chunk):
    return cross_entropy(output, chunk.unpad(chunk.data[1]))


loop = dl.Loop(train_data, args.epochs, state=dict(model=model, optimizer=optimizer), progress=False)
for epoch in loop.epochs():
    model.train()
    for step in epoch:
        optimizer.zero_grad()
        for chunk in step:
            step.backward(loss_of(forward(model, chunk), chunk))
        step.fold()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()

    val_loss = dl.evaluate(model, val_data, forward=forward, loss=loss_of)["loss"]
    world.print(f"epoch {epoch.number}: valid loss {val_loss:.4f}, valid perplexity {math.exp(val_loss):.3f}")
    if val_loss < best_val_loss:
        best_val_loss = val_loss
        if world.rank == 0:
            torch.save(model.state_dict(), "runs/language_model/model.pt")
    else:
        optimizer.param_groups[0]["lr"] /= 4.0
