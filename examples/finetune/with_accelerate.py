"""The same fine-tuning with Accelerate's usual loop, and how far its first step is from one process.

Two CPU ranks:    torchrun --nproc_per_node=2 with_accelerate.py

Each rank takes the mean loss over its own tokens, and DDP averages the gradients of the ranks: a mean of means. Rank 0
also computes loss and gradient of the whole mini-batch, over all of its tokens at once, and prints how far they are
apart.
"""

from __future__ import annotations

from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from train import NO_TARGET, add_lora, collate, make_data, make_model, make_texts, make_tokenizer

BATCH_SIZE = 16
STEPS = 20


def main() -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    texts = make_texts(BATCH_SIZE * STEPS)
    tokenizer = make_tokenizer(texts)
    padded = partial(collate, pad=tokenizer.pad_token_id)
    data = make_data(texts, tokenizer)
    whole = DataLoader(data, BATCH_SIZE, collate_fn=padded)
    each = DataLoader(data, BATCH_SIZE // accelerator.num_processes, collate_fn=padded)
    model = add_lora(make_model(tokenizer, dropout=0.0), dropout=0.0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0)  # every mini-batch is looked at with the same weights
    prepared, optimizer, each = accelerator.prepare(model, optimizer, each)
    losses = []
    gradients = []
    for (tokens, labels), (all_tokens, all_labels) in zip(each, whole, strict=True):
        mask = torch.ones_like(tokens)
        loss = prepared(input_ids=tokens, attention_mask=mask, labels=labels).loss
        accelerator.backward(loss)
        found = [parameter.grad.clone() for parameter in trained]
        reported = accelerator.gather(loss.detach()).mean()
        optimizer.zero_grad()
        exact = model(input_ids=all_tokens, attention_mask=torch.ones_like(all_tokens), labels=all_labels).loss
        wanted = torch.autograd.grad(exact, trained)
        losses.append(float((reported - exact.detach()).abs() / exact.detach()))
        off = sum(float((one - other).square().sum()) for one, other in zip(found, wanted, strict=True))
        gradients.append((off / sum(float(other.square().sum()) for other in wanted)) ** 0.5)
    tokens_of = [int((labels[:, 1:] != NO_TARGET).sum()) for _, labels in whole]
    accelerator.print(
        f"{accelerator.num_processes} ranks, {STEPS} mini-batches of {min(tokens_of)} to {max(tokens_of)} tokens. "
        f"Off by, in the median: loss {100 * sorted(losses)[STEPS // 2]:.2g} %, gradient "
        f"{100 * sorted(gradients)[STEPS // 2]:.2g} %; at most: {100 * max(losses):.2g} %, {100 * max(gradients):.2g} %"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
