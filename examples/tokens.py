"""Train a small language model on sequences of unequal lengths: the loss is the mean over all tokens.

One process:      python tokens.py
All your GPUs:    torchrun --nproc_per_node=gpu tokens.py
Two CPU ranks:    torchrun --nproc_per_node=2 tokens.py

The text is generated, and each letter is a token. A shard passes the mean loss of its tokens and, as its weight, their
number. The fold divides once, so a long sequence counts for more than a short one, whatever its shard.
"""

from __future__ import annotations

import argparse
import math
import random

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import ddp_loop as dl

LETTERS = "\nabcdefghijklmnopqrstuvwxyz ,."
LINE_BREAK, NONE = 0, -100  # a sentence ends with a line break and starts after one; NONE is the target of padding

NOUNS = ["cat", "dog", "child", "river", "lantern", "carpenter", "mountain"]
VERBS = ["sees", "follows", "remembers", "carries", "misunderstands"]
ADJECTIVES = ["old", "red", "small", "quiet", "unexpected"]


def make_sentences(count: int, seed: int = 0) -> list[str]:
    """Sentences of about 20 to 200 letters, each ending in a line break, as a function of the seed."""
    draw = random.Random(seed)

    def thing() -> str:
        adjectives = draw.sample(ADJECTIVES, draw.choice([0, 0, 1, 2]))
        return " ".join(["the", *adjectives, draw.choice(NOUNS)])

    def clause() -> str:
        return f"{thing()} {draw.choice(VERBS)} {thing()}"

    return [", and ".join(clause() for _ in range(draw.choice([1, 1, 1, 2, 3]))) + ".\n" for _ in range(count)]


def tokens_of(sentence: str) -> torch.Tensor:
    """The numbers of a sentence's letters, (letters,) int64."""
    return torch.tensor([LETTERS.index(letter) for letter in sentence])


def pad(sentences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad sentences to inputs and targets, both (n, longest); the target of a letter is the letter after it.

    Padding has the target `NONE`. The model looks only backwards, so the inputs there do not matter.
    """
    targets = pad_sequence(sentences, batch_first=True, padding_value=NONE)
    inputs = targets.roll(1, dims=1).clamp(min=0)
    inputs[:, 0] = LINE_BREAK
    return inputs, targets


class LanguageModel(nn.Module):
    """Predicts the next letter: (n, t) -> logits (n, t, letters)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.logits = nn.Linear(width, len(LETTERS))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.embedding(letters))
        logits: torch.Tensor = self.logits(hidden)
        return logits


def losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum of the token losses of each sentence, (n,)."""
    return cross_entropy(logits.transpose(1, 2), targets, ignore_index=NONE, reduction="none").sum(1)


def counts(_: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The number of tokens in each sentence, (n,)."""
    return (targets != NONE).sum(1)


def perplexity(model: nn.Module, batches: dl.Batches) -> float:
    """exp of the mean loss over all tokens. Every rank must call this."""
    means = dl.evaluate(model, batches, losses=losses, tokens=counts)  # means over sentences, whose number cancels
    return math.exp(means["losses"] / means["tokens"])


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small language model.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--sentences", type=int, default=1500, help="to train on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=32, help="per GPU; on the CPU, of all ranks")
    parser.add_argument("--shards", type=int, help="shards of a mini-batch (default: one per rank)")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--run-dir", help="folder for rows.jsonl; nothing is written without it")
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    with dl.join_world(device=arguments.device, seed=arguments.seed) as world:
        sentences = [tokens_of(sentence) for sentence in make_sentences(arguments.sentences + 200)]
        train, test = sentences[:-200], sentences[-200:]
        model = LanguageModel().to(world.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
        batch_size = dl.scale_batch_size(arguments.batch_size, world)
        batches = dl.Batches(train, batch_size, world, shards=arguments.shards, collate_fn=pad)
        test_batches = dl.Batches(test, 100, world, shuffle=False, collate_fn=pad)
        world.print(
            f"{len(train)} training and {len(test)} test sentences of {min(map(len, train))} to "
            f"{max(map(len, train))} letters, {world.size} ranks on {world.device.type}, {batches.shards} shards of a "
            f"mini-batch of {batch_size}"
        )
        world.print(f"Test perplexity: {perplexity(model, test_batches):.3f}")

        state = {"model": model, "optimizer": optimizer}
        for step in dl.Loop(batches, arguments.epochs, run_dir=arguments.run_dir, state=state):
            for letters, targets in step:
                count = (targets != NONE).sum()
                loss = losses(model(letters), targets).sum() / count  # NaN without tokens, with weight 0
                step.backward(loss, weight=count)
            step.fold()  # its loss, and the epoch's, is the mean over all tokens
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step.is_last_of_epoch:
                world.print(f"Test perplexity: {perplexity(model, test_batches):.3f}")


if __name__ == "__main__":
    main()
