"""Remember a symbol over sequences cut into chunks, with the hidden state carried from chunk to chunk.

One process:      python train.py
All your GPUs:    torchrun --nproc_per_node=gpu train.py
Two CPU ranks:    torchrun --nproc_per_node=2 train.py
Without it:       python train.py --forget

A sequence shows one of four symbols in its first time step and noise afterwards, and asks for the symbol in every time
step. All chunks but the first have noise alone, so there the answer is in the hidden state only. With --forget each
chunk starts from zeros, and its answers are guesses: one in four is right.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

import ddp_loop as dl

SYMBOLS, NOISE, SHORTEST, LONGEST = 4, 2, 20, 80
CELLS: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"lstm": nn.LSTM, "gru": nn.GRU}


def make_sequences(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs (t, SYMBOLS + NOISE) and the symbol (t,) of sequences of 20 to 80 time steps."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for length in torch.randint(SHORTEST, LONGEST + 1, (count,), generator=generator).tolist():
        symbols = torch.randint(SYMBOLS, (1,), generator=generator).expand(length)
        shown = one_hot(symbols, SYMBOLS) * (torch.arange(length) == 0)[:, None]
        sequences.append((torch.cat([shown, torch.randn(length, NOISE, generator=generator)], 1), symbols))
    return sequences


class Memory(nn.Module):
    """(n, t, SYMBOLS + NOISE) and a hidden state -> logits (n, t, SYMBOLS) and the state after them."""

    def __init__(self, cell: str, width: int = 32) -> None:
        super().__init__()
        self.recurrent = CELLS[cell](SYMBOLS + NOISE, width, batch_first=True)
        self.logits = nn.Linear(width, SYMBOLS)

    def forward(self, inputs: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
        outputs, state = self.recurrent(inputs, state)
        return self.logits(outputs), state


def recall(model: nn.Module, batches: dl.SequenceBatches, *, forget: bool) -> float:
    """The share of right answers in the chunks after each sequence's first one. Every rank must call this."""

    def forward(model: nn.Module, chunk: dl.SequenceChunk) -> torch.Tensor:
        logits, chunk.hidden = model(chunk.data[0], None if forget else chunk.hidden)
        return chunk.unpad(logits)

    def right(logits: torch.Tensor, chunk: dl.SequenceChunk) -> dl.Sum:
        later = chunk.unpad(~chunk.starts[:, None].expand(chunk.data[1].shape)).double()
        return dl.Sum(later * (logits.argmax(1) == chunk.unpad(chunk.data[1])), over=later)

    return dl.evaluate(model, batches, forward=forward, right=right)["right"]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Remember a symbol over chunked sequences.")
    parser.add_argument("--cell", choices=sorted(CELLS), default="lstm")
    parser.add_argument("--forget", action="store_true", help="start every chunk from a hidden state of zeros")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=400, help="to train on")
    parser.add_argument("--lanes", type=int, default=20, help="rows of a mini-batch")
    parser.add_argument("--length", type=int, default=10, help="time steps of a chunk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, help="shards of a mini-batch (default: one per rank)")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--run-dir", help="folder for rows.jsonl and checkpoints; nothing is written without it")
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    with dl.join_world(device=arguments.device, seed=arguments.seed) as world:
        train, test = make_sequences(arguments.sequences, 1), make_sequences(100, 2)
        model = Memory(arguments.cell).to(world.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        cut = {"lanes": arguments.lanes, "length": arguments.length, "world": world}
        batches = dl.SequenceBatches(train, **cut, shards=arguments.shards)
        test_batches = dl.SequenceBatches(test, **cut, shuffle=False)
        world.print(
            f"{len(train)} training and {len(test)} test sequences, {len(batches)} mini-batches of {arguments.lanes} "
            f"chunks, {world.size} ranks on {world.device.type}, {batches.shards} shards of a mini-batch"
        )

        state = {"model": model, "optimizer": optimizer}
        for step in dl.Loop(batches, arguments.epochs, run_dir=arguments.run_dir, state=state):
            for chunk in step:
                inputs, symbols = chunk.data
                logits, chunk.hidden = model(inputs, None if arguments.forget else chunk.hidden)
                step.backward(cross_entropy(chunk.unpad(logits), chunk.unpad(symbols)))
            step.fold()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        world.print(f"Recalled after the first chunk: {recall(model, test_batches, forget=arguments.forget):.4f}")


if __name__ == "__main__":
    main()
