"""Train a small GPT on characters: accumulation, a cosine schedule with warm-up, clipping, the best checkpoint."""

import argparse
import math
import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils import data

LINES = ["the cat sees the dog", "the old dog follows a small cat", "a river carries the lantern home"]
TEXT = "\n".join(LINES[i * i % 3] + " and ".join(["", *LINES[i % 2 : i % 3 + 1]]) for i in range(24))
LETTERS = sorted(set(TEXT))

parser = argparse.ArgumentParser(description="Train a small GPT.")
parser.add_argument("--batch-size", type=int, default=8, help="windows of a micro-batch")
parser.add_argument("--accumulation", type=int, default=4, help="micro-batches of an update")
parser.add_argument("--max-iters", type=int, default=60)
parser.add_argument("--eval-interval", type=int, default=20)
parser.add_argument("--lr", type=float, default=3e-3)
args = parser.parse_args()
block_size, width, heads, warmup_iters, min_lr, grad_clip = 16, 32, 4, 5, 3e-4, 1.0

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
os.makedirs("runs/gpt", exist_ok=True)


class Windows(data.Dataset):
    """All windows of a text that follow one another: inputs and, a letter later, targets."""

    def __init__(self, text):
        self.letters = torch.tensor([LETTERS.index(letter) for letter in text])

    def __len__(self):
        return (len(self.letters) - 1) // block_size

    def __getitem__(self, i):
        window = self.letters[i * block_size : (i + 1) * block_size + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = self.attention(self.norm1(x)).view(n, t, 3, heads, -1).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(len(LETTERS), width), nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(LETTERS), bias=False)

    def forward(self, inputs, targets):
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        logits = self.head(self.norm(self.blocks(x)))
        return logits, cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_lr(iteration):
    if iteration < warmup_iters:
        return args.lr * (iteration + 1) / (warmup_iters + 1)
    ratio = min(1, (iteration - warmup_iters) / (args.max_iters - warmup_iters))
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (args.lr - min_lr)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split, loader in eval_loaders.items():
        total, count = 0.0, 0
        for x, y in loader:
            _, loss = model(x.to(device), y.to(device))
            total, count = total + loss.item() * len(x), count + len(x)
        out[split] = total / count
    model.train()
    return out


def endless(loader):
    while True:
        yield from loader


cut = len(TEXT) * 9 // 10
splits = {"train": Windows(TEXT[:cut]), "val": Windows(TEXT[cut:])}
train_loader = data.DataLoader(splits["train"], args.batch_size, shuffle=True, drop_last=True)
eval_loaders = {name: data.DataLoader(split, args.batch_size) for name, split in splits.items()}
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.1)
best_val_loss = float("inf")
batches = endless(train_loader)

for iteration in range(args.max_iters):
    lr = get_lr(iteration)
    for group in optimizer.param_groups:
        group["lr"] = lr
    for _ in range(args.accumulation):
        x, y = next(batches)
        logits, loss = model(x.to(device), y.to(device))
        loss = loss / args.accumulation
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    if (iteration + 1) % args.eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iteration + 1}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration + 1}
            torch.save(checkpoint, "runs/gpt/ckpt.pt")
