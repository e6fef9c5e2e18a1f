"""Train a small language model on sequences of unequal lengths: the loss is the mean over all tokens.

One process:      python tokens.py
All your GPUs:    torchrun --nproc_per_node=gpu tokens.py
Two CPU ranks:    torchrun --nproc_per_node=2 tokens.py

The text is made up, a letter is a token. A shard gives the sum of its tokens' losses and, as its weight, how many
tokens these are; the fold divides once, so that a long sequence counts for more than a short one wherever it lies.
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
LINE_BREAK, NONE = 0, -100  # what a sentence ends with, and begins after; what stands for "no token" among targets

NOUNS = ["cat", "dog", "child", "river", "lantern", "carpenter", "mountain"]
VERBS = ["sees", "follows", "remembers", "carries", "misunderstands"]
ADJECTIVES = ["old", "red", "small", "quiet", "unexpected"]


def make_sentences(count: int, seed: int = 0) -> list[str]:
    """Sentences of some twenty to two hundred letters, each ended by a line break; the same for the same seed."""
    draw = random.Random(seed)

    def thing() -> str:
        adjectives = draw.sample(ADJECTIVES, draw.choice([0, 0, 1, 2]))
        return " ".join(["the", *adjectives, draw.choice(NOUNS)])

    def clause() -> str:
        return f"{thing()} {draw.choice(VERBS)} {thing()}"

    return [", and ".join(clause() for _ in range(draw.choice([1, 1, 1, 2, 3]))) + ".\n" for _ in range(count)]


def tokens_of(sentence: str) -> torch.Tensor:
    """The numbers of a sentence's letters; int64, shape (letters,)."""
    return torch.tensor([LETTERS.index(letter) for letter in sentence])


def pad(sentences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sentences side by side: inputs, and as targets the letter that follows each; both of shape (n, longest).

    Behind a sentence's end the targets are `NONE`. The model looks only backwards, so the inputs there do not matter.
    """
    targets = pad_sequence(sentences, batch_first=True, padding_value=NONE)
    inputs = targets.roll(1, dims=1).clamp(min=0)
    inputs[:, 0] = LINE_BREAK
    return inputs, targets


class LanguageModel(nn.Module):
    """Letters to the logits of the letter that follows each: (n, t) to (n, t, letters)."""

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
    """The sum of each sentence's token losses, shape (n,)."""
    return cross_entropy(logits.transpose(1, 2), targets, ignore_index=NONE, reduction="none").sum(1)


def counts(_: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """How many tokens each sentence has, shape (n,)."""
    return (targets != NONE).sum(1)


def perplexity(model: nn.Module, batches: dl.Batches) -> float:
    """exp of the mean loss over all tokens. Every rank must call this."""
    means = dl.evaluate(model, batches, losses=losses, tokens=counts)  # both over sentences: these cancel
    return math.exp(means["losses"] / means["tokens"])


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small language model.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--sentences", type=int, default=1500, help="to train on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=32, help="of one GPU; of all ranks together on the CPU")
    parser.add_argument("--shards", type=int, help="pieces of a mini-batch; by default one per rank")
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
                loss = losses(model(letters), targets).sum() / count  # nan without a letter, which then counts 0
                step.backward(loss, weight=count)
            step.fold()  # its loss, and the epoch's, is the mean over all tokens
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step.is_last_of_epoch:
                world.print(f"Test perplexity: {perplexity(model, test_batches):.3f}")


if __name__ == "__main__":
    main()
