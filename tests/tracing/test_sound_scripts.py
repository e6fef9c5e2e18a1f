"""Correct scripts of many kinds, with one shard per rank, are equal; the faults of faulty ones are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_loop.distributed import Pool
from tests.support.scripts import verdict_of, write

HEAD = """
import os
import torch
from torch import nn
from torch.nn import functional as F
import ddp_loop as dl

generator = torch.Generator().manual_seed(1)

def averaged(model):
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    return torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average, use_buffers=True)

def go(world, data, state, rows=20, **options):
    batches = dl.Batches(data, rows, world, check_data=False, **options)
    return dl.Loop(batches, 3, state=state, progress=False)

with dl.join_world(seed=0) as world:
    x, y = torch.randn(60, 6, generator=generator), torch.randint(3, (60,), generator=generator)
    words = torch.randint(1, 40, (60, 9), generator=generator)
"""

TWO_NETWORKS = """
    z = torch.randn(60, 4, generator=generator)
    made = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
    judge = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(), nn.Linear(16, 1))
    one, two = (torch.optim.Adam(each.parameters(), 0.01) for each in (made, judge))
    for step in go(world, (x, z), dict(made=made, judge=judge, one=one, two=two)):
        for a, b in step:
            step.backward(F.softplus(-judge(a)).mean() + F.softplus(judge(made(b).detach())).mean())
        step.fold()
        two.step()
        for a, b in step:
            step.backward(F.softplus(-judge(made(b))).mean() SECOND)
        step.fold()
        one.step()
"""

CLOSURE = """
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    for step in go(world, (x, y), dict(model=model, optimizer=optimizer)):
        def closure():
            for a, b in step:
                step.backward(F.cross_entropy(model(a), b))
            return step.fold().loss
        optimizer.step(closure)
"""

PICTURES = """
    def block(before, after):
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

    pictures = torch.randn(60, 3, 8, 8, generator=generator)
    layers = block(3, 16), block(16, 16), nn.MaxPool2d(2), block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model = dl.sync_batch_norm(nn.Sequential(*layers, nn.Linear(32, 3)), world)
    average, optimizer = averaged(model), torch.optim.AdamW(model.parameters(), 0.01)
    for step in go(world, (pictures, y), dict(model=model, optimizer=optimizer, average=average)):
        for a, b in step:
            step.backward(F.cross_entropy(model(a), b))
        step.fold()
        optimizer.step()
        average.update_parameters(model)
        AVERAGED
"""

LANGUAGE = """
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(80, 32)
            self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 2)
            self.head = nn.Linear(32, 80, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x):
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.head(self.layers(self.words(x), mask=mask, is_causal=True))

    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for step in go(world, words, dict(model=model, optimizer=optimizer, rates=rates)):
        for a in step:
            step.backward(F.cross_entropy(model(a[:, :-1]).flatten(0, 1), a[:, 1:].flatten()))
        step.fold()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
"""

TOKENS = """
    words[torch.arange(9) >= torch.randint(2, 9, (60, 1), generator=generator)] = 0
    model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 40))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in go(world, words, dict(model=model, optimizer=optimizer)):
        for a in step:
            kept = a[:, 1:] != 0
            step.backward(F.cross_entropy(model(a[:, :-1])[kept], a[:, 1:][kept]), weight=int(kept.sum()))
        step.fold()
        optimizer.step()
"""

WHOLE = """
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in go(world, (x, x.flip(1)), dict(model=model, optimizer=optimizer)):
        for a, b in step:
            step.hold(model(a), model(b))
        one, two = step.gather()
        step.backward(F.cross_entropy(F.normalize(one) @ F.normalize(two).T * 5, torch.arange(len(one))))
        step.fold()
        optimizer.step()
"""

BOXES = """
    class Boxes:
        def __len__(self):
            return 60

        def __getitem__(self, index):
            count = 1 + index % 4
            return torch.rand(3, 4) + DRAWN, {"boxes": torch.arange(4.0 * count).view(count, 4) + index}

    def collate(samples):
        numbers = torch.arange(len(samples))  # depend on the shard, and change nothing
        return [one for one, _ in samples], [two for _, two in samples], numbers

    model = nn.Linear(12, 4)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in go(world, Boxes(), dict(model=model, optimizer=optimizer), 12, collate_fn=collate):
        for pictures, targets, _ in step:
            number = sum(len(target["boxes"]) for target in targets)
            found = model(torch.stack(pictures).flatten(1))
            errors = [(one - two["boxes"] / 60).square().sum() for one, two in zip(found, targets)]
            step.backward(sum(errors) / number, weight=number)
        step.fold()
        optimizer.step()
"""

STREAM = """
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            for number in range(60):
                yield x[number], y[number]

    model = nn.Linear(6, 3)
    optimizer = torch.optim.Muon([model.weight], 0.01)
    rates = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in go(world, Stream(), dict(model=model, optimizer=optimizer, rates=rates), 13):
        for a, b in step:
            step.backward(F.cross_entropy(model(a), b))
        step.fold()
        optimizer.step()
        rates.step(dl.evaluate(model, dl.Batches((x, y), 9, world, shuffle=False), loss=F.cross_entropy)["loss"])
"""

AUTOENCODER = """
    class Autoencoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(*sizes) for sizes in [(40, 32), (32, 4), (32, 4), (4, 32), (32, 40)])

        def forward(self, x):
            first, mean, spread, back, last = self.parts
            hidden = F.relu(first(x))
            mean, spread = mean(hidden), spread(hidden)
            code = mean + torch.exp(spread / 2) * torch.randn_like(mean)
            return torch.sigmoid(last(F.relu(back(code)))), mean, spread

    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    pixels = torch.rand(60, 40, generator=generator).round()
    for step in go(world, pixels, dict(model=model, optimizer=optimizer)):
        for a in step:
            made, mean, spread = model(a)
            loss = F.binary_cross_entropy(made, a, reduction="none").sum()
            loss = loss - 0.5 * (1 + spread - mean.square() - spread.exp()).sum()
            step.backward(loss)
        step.fold()
        optimizer.step()
"""

DRAWN_EVALUATION = """
    class Always(nn.Dropout):
        def train(self, mode=True):
            return super().train(True)

    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in go(world, (x, y), dict(model=model, optimizer=optimizer)):
        for a, b in step:
            step.backward(F.cross_entropy(model(a), b))
        step.fold()
        optimizer.step()
        test = dl.Batches((x, y), 20, world, shuffle=False SHARDS)
        dl.evaluate(nn.Sequential(model, Always(0.5)), test, loss=F.cross_entropy)
"""

SOUND = [
    DRAWN_EVALUATION.replace("SHARDS", ", shards=6"),
    DRAWN_EVALUATION.replace("SHARDS", ""),
    TWO_NETWORKS.replace("SECOND", ""),
    CLOSURE,
    PICTURES.replace("AVERAGED", "pass"),
    LANGUAGE,
    TOKENS,
    WHOLE,
    BOXES.replace("DRAWN", "0"),
    STREAM,
]

SCALES = "a loss that scales with the shard"
UNSOUND = {
    "an evaluation that draws, of a batch size that follows the ranks": (
        DRAWN_EVALUATION.replace("SHARDS", "").replace("(x, y), 20", "(x, y), 20 * world.size"),
        "In evaluation 1: `loss` is ",
        "Does the batch size of this evaluation depend on the ranks?",
    ),
    "a sum in the second pass": (
        TWO_NETWORKS.replace("SECOND", "* len(b)"),
        "Step 1, fold: `pass 2, gradient of made",
        SCALES,
    ),
    "an averaged model, by a thousandth": (
        PICTURES.replace("AVERAGED", "with torch.no_grad(): average.module[6].weight *= 1 + 1e-3 * world.size"),
        "`parameter average.module.6.weight` is off",
        "the same gradients gave another state",
    ),
    "a mean over tokens without their number": (
        TOKENS.replace("[kept]), weight=int(kept.sum())", "[kept], reduction='none').mean()"),
        "Step 1, fold",
        "Then give weight=",
    ),
    "entropy in lists": (
        BOXES.replace("DRAWN", "int.from_bytes(os.urandom(1), 'little')"),
        "Step 1, data: `part 0, 0 of each sample, sample ",
        "a generator of your own",
    ),
    "an autoencoder's sum": (AUTOENCODER, "Step 1, fold", SCALES),
}


def verdict(script: str, pool: Pool, folder: Path) -> tuple[bool, str]:
    return verdict_of(write(folder, HEAD + script), pool, steps=5)


@pytest.mark.covers("H9")
@pytest.mark.slow
def test_correct_scripts_of_many_kinds_are_equal(pool: Pool, tmp_path: Path) -> None:
    equal, said = verdict("".join(SOUND), pool, tmp_path)
    assert equal, said


@pytest.mark.covers("H9")
@pytest.mark.parametrize("script", UNSOUND)
@pytest.mark.slow
def test_a_faulty_script_is_unequal_and_the_cause_is_named(script: str, pool: Pool, tmp_path: Path) -> None:
    text, where, why = UNSOUND[script]
    equal, said = verdict(text, pool, tmp_path)
    assert not equal, said
    found = said.partition("UNEQUAL on 2 ranks")[2].partition("3 ranks")[0]
    assert where in found
    assert why in found
    assert (SCALES in found) == (why == SCALES)


ROUNDING = """
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)  # the first bias has a gradient of rounding
    model = dl.sync_batch_norm(nn.Sequential(*layers), world)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in go(world, (x, y), dict(model=model, optimizer=optimizer)):
        for a, b in step:
            step.backward(F.cross_entropy(model(a), b))
        step.fold()
        optimizer.step()
"""


@pytest.mark.covers("H9")
def test_what_is_equal_up_to_rounding_is_said_in_plain_words(pool: Pool, tmp_path: Path) -> None:
    equal, said = verdict_of(write(tmp_path, HEAD + ROUNDING), pool, (1, 2), steps=3)
    assert equal, said
    again = "So the steps were made again on 1 rank with the gradients of 2 ranks:"
    assert f"The gradients are equal up to rounding, which an optimizer can enlarge. {again}\n" in said
    largest = (
        r"  largest difference of the gradients: `gradient of model\.\S+` in step \d, [\d.]+% of the tolerance for "
    )
    assert re.search(f"^{largest}rounding$", said, re.MULTILINE)
