"""Fine-tune a language model of `transformers` with LoRA: the loss is the mean over all tokens of the mini-batch.

One process:      python train.py
All your GPUs:    ddp_loop run train.py
Two CPU ranks:    ddp_loop run --ranks 2 train.py

Needs `pip install 'ddp_loop[finetune,metrics]'`. Nothing is downloaded: the model is a tiny GPT-2 made from a
configuration, and the tokenizer is trained here. For a model of the hub, replace `make_model` and `make_tokenizer` by
`AutoModelForCausalLM.from_pretrained(...)` and `AutoTokenizer.from_pretrained(...)`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import ddp_loop as dl

try:
    from datasets import Dataset, disable_progress_bars
    from peft import LoraConfig, PeftModel, get_peft_model
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from torchmetrics.text import Perplexity
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
except ImportError as error:
    raise SystemExit(f"This example needs more packages. {error}. pip install 'ddp_loop[finetune,metrics]'") from None

PAD = "<pad>"
END = "<end>"
NO_TARGET = -100  # of padding
LONGEST = 64  # tokens of a text

NOUNS = ["gradient", "rank", "loss", "shard", "optimizer", "bucket", "checkpoint", "learning rate"]
VERBS = ["waits for", "follows", "sums", "forgets", "doubles", "explains"]


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of very unequal lengths, as a function of the seed."""
    draw = random.Random(seed)
    sentences = (1, 1, 1, 1, 2, 6)
    return [
        " ".join(
            f"The {draw.choice(NOUNS)} {draw.choice(VERBS)} the {draw.choice(NOUNS)}."
            for _ in range(draw.choice(sentences))
        )
        for _ in range(count)
    ]


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer trained on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=[PAD, END], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END
    )


def make_model(tokenizer: PreTrainedTokenizerFast, dropout: float) -> GPT2LMHeadModel:
    """A GPT-2 of two layers, with the random weights of the seed."""
    end = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=LONGEST,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # or transformers says in each run that it takes this one
    return model


def add_lora(model: GPT2LMHeadModel, dropout: float) -> PeftModel:
    """The model with low-rank layers and an output layer, which alone are trained."""
    lora = LoraConfig(
        r=8,
        lora_alpha=16,
        lora_dropout=dropout,
        target_modules=["c_attn", "c_fc"],
        modules_to_save=["lm_head"],
        fan_in_fan_out=True,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, lora)


def make_data(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> Dataset:
    """The numbers of each text's tokens, column `input_ids`."""

    disable_progress_bars()

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        texts = [text + END for text in batch["text"]]
        return {"input_ids": tokenizer(texts, truncation=True, max_length=LONGEST)["input_ids"]}

    return Dataset.from_dict({"text": list(texts)}).map(encode, batched=True, remove_columns=["text"])


def collate(samples: list[dict[str, list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad texts to the longest: tokens and labels, (n, longest) int64 each; padding has the label `NO_TARGET`."""
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    tokens = pad_sequence(rows, batch_first=True, padding_value=pad)
    labels = pad_sequence(rows, batch_first=True, padding_value=NO_TARGET)
    return tokens, labels


class Logits(nn.Module):
    """The logits of a model alone, (n, tokens, vocabulary)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(tokens)  # padding comes last, and the model looks only backwards
        logits: torch.Tensor = self.model(input_ids=tokens, attention_mask=mask).logits
        return logits.float()


class NextTokenPerplexity(Perplexity):
    """torchmetrics' perplexity of labels that are still to be shifted."""

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count a shard."""
        super().update(logits[:, :-1], labels[:, 1:])


def evaluate(model: nn.Module, batches: dl.Batches) -> float:
    """The perplexity over all tokens of the data. Every rank must call this."""
    found = dl.evaluate(Logits(model), batches, metrics={"perplexity": NextTokenPerplexity(ignore_index=NO_TARGET)})
    return float(found["perplexity"])


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a tiny GPT-2 with LoRA.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--texts", type=int, default=600, help="to train on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=16, help="of all ranks")
    parser.add_argument("--shards", type=int, help="fixed ones: the same bits on any number of ranks")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--precision", choices=["float32", "bf16"], default="float32")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--run-dir", help="folder of the run, which then resumes; nothing is written without it")
    parser.add_argument("--export", type=Path, help="folder for the trained weights, which from_pretrained loads")
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    with dl.join_world(device=arguments.device, seed=arguments.seed) as world:
        texts = make_texts(arguments.texts + 100)
        tokenizer = make_tokenizer(texts)
        data = make_data(texts, tokenizer)
        padded = partial(collate, pad=tokenizer.pad_token_id)
        train = data.select(range(arguments.texts))
        test = data.select(range(arguments.texts, len(data)))
        batches = dl.Batches(train, arguments.batch_size, world, shards=arguments.shards, collate_fn=padded)
        test_batches = dl.Batches(test, 50, world, shuffle=False, collate_fn=padded)

        model = add_lora(make_model(tokenizer, arguments.dropout), arguments.dropout).to(world.device)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        is_low = arguments.precision == "bf16"
        world.print(
            f"{sum(map(torch.Tensor.numel, trained))} of {model.num_parameters()} parameters are trained, "
            f"on {world.size} ranks"
        )

        state = {"model": model, "optimizer": optimizer}
        for step in dl.Loop(batches, arguments.epochs, state=state, run_dir=arguments.run_dir):
            for tokens, labels in step:
                count = (labels[:, 1:] != NO_TARGET).sum()  # the model shifts labels itself
                with torch.autocast(world.device.type, torch.bfloat16, enabled=is_low):
                    mask = torch.ones_like(tokens)
                    loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss  # the mean over the tokens
                step.backward(loss, weight=count)
            step.fold()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            if step.is_last_of_epoch:
                world.print(f"Test perplexity: {evaluate(model, test_batches):.4f}")

        if arguments.export is not None and world.rank == 0:
            whole = model.merge_and_unload()
            whole.save_pretrained(arguments.export)  # safetensors
            tokenizer.save_pretrained(arguments.export)
            world.print(f"{arguments.export}: load it by AutoModelForCausalLM.from_pretrained")


if __name__ == "__main__":
    main()
