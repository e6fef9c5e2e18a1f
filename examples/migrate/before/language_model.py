"""Train an LSTM on the letters of a text, with its hidden state carried from chunk to chunk."""

import argparse
import math
import os

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

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
os.makedirs("runs/language_model", exist_ok=True)


def batchify(tokens, lanes):
    """(letters of a lane, lanes): the text in lanes side by side."""
    length = len(tokens) // lanes
    return tokens[: length * lanes].view(lanes, length).t().contiguous()


def get_batch(source, start):
    length = min(args.bptt, len(source) - 1 - start)
    return source[start : start + length], source[start + 1 : start + 1 + length].reshape(-1)


def repackage_hidden(hidden):
    """The same values without the graph of the chunks before."""
    return tuple(value.detach() for value in hidden)


class LanguageModel(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(len(LETTERS), width), nn.LSTM(width, width)
        self.head, self.width = nn.Linear(width, len(LETTERS)), width

    def init_hidden(self, lanes):
        return tuple(torch.zeros(1, lanes, self.width, device=device) for _ in range(2))

    def forward(self, inputs, hidden):
        outputs, hidden = self.lstm(self.embedding(inputs), hidden)
        return self.head(outputs).flatten(0, 1), hidden


tokens = torch.tensor([LETTERS.index(letter) for letter in TEXT])
cut = len(tokens) * 9 // 10
train_data = batchify(tokens[:cut], args.batch_size).to(device)
val_data = batchify(tokens[cut:], args.batch_size).to(device)
model = LanguageModel().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
best_val_loss = math.inf


def evaluate(source):
    model.eval()
    total, hidden = 0.0, model.init_hidden(args.batch_size)
    with torch.no_grad():
        for start in range(0, len(source) - 1, args.bptt):
            inputs, targets = get_batch(source, start)
            output, hidden = model(inputs, hidden)
            total += len(inputs) * cross_entropy(output, targets).item()
    return total / (len(source) - 1)


for epoch in range(1, args.epochs + 1):
    model.train()
    hidden = model.init_hidden(args.batch_size)
    for start in range(0, len(train_data) - 1, args.bptt):
        inputs, targets = get_batch(train_data, start)
        optimizer.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(inputs, hidden)
        loss = cross_entropy(output, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()

    val_loss = evaluate(val_data)
    print(f"epoch {epoch}: valid loss {val_loss:.4f}, valid perplexity {math.exp(val_loss):.3f}")
    if val_loss < best_val_loss:
        best_val_loss = val_loss
        torch.save(model.state_dict(), "runs/language_model/model.pt")
    else:
        optimizer.param_groups[0]["lr"] /= 4.0
