"""Differences that `verify` once missed: values with gradients of about 0, other samples, losses that scale."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_loop.distributed import Pool
from tests.support.scripts import changed, verdict_of, write

# Words with rows that no sample asks for; their mean goes through attention, whose key's bias has a gradient of
# rounding alone.
SCRIPT = """
import os
import torch
from torch import nn
from torch.nn.functional import cross_entropy
import ddp_loop as dl

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) if ATTENTION else nn.Tanh()
        self.head = nn.Linear(8, 4)
        self.register_buffer("average", torch.ones(8))
        self.register_buffer("large", torch.tensor(1e6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("wave", torch.ones(3, dtype=torch.complex64))
        self.register_buffer("exact", torch.ones(3, dtype=torch.float64))
        self.register_buffer("narrow", torch.ones(2, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(1000.0))

    def forward(self, x):
        return self.head(self.layer(self.words(x)).mean(1)) * (self.scale / 1000)

class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(40, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

class Samples:
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        x, y = data[0][index], data[1][index]
        SAMPLE
        return x, y

def collate(samples):
    x, y = (torch.stack(parts) for parts in zip(*samples))
    COLLATE
    return x, y

with dl.join_world(seed=0) as world:
    generator = torch.Generator().manual_seed(1)
    size = SIZE
    data = torch.randint(20, (size, 5), generator=generator), torch.randint(4, (size,), generator=generator)
    lengths = torch.randint(1, 20, (size,), generator=generator)
    own = torch.Generator()
    own.seed()
    model = MODEL
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = OPTIMIZER
    kept = {"average": average, "none": None}
    state = {"model": model, "optimizer": optimizer, **kept}
    batches = dl.Batches(DATA, BATCH, world, shards=SHARDS, check_data=False OPTIONS)
    loop = dl.Loop(batches, 2, state=state, on_nonfinite="allow", progress=False)
    untouched = torch.arange(50) >= 20
    BEFORE
    for step in loop:
        for x, y, *more in step:
            logits = model(x)
            loss = LOSS
            step.backward(loss GIVEN)
        step.fold()
        FOLDED
        optimizer.step()
        with torch.no_grad():
            AFTER
        average.update_parameters(model)
    LAST
"""

USUAL = {
    "SIZE": "52",
    "ATTENTION": "False",
    "SAMPLE": "pass",
    "COLLATE": "pass",
    "MODEL": "Words()",
    "OPTIMIZER": "torch.optim.Adam(model.parameters(), lr=0.01)",
    "DATA": "data",
    "BATCH": "13",
    "SHARDS": "None",
    "OPTIONS": "",
    "BEFORE": "pass",
    "LOSS": "cross_entropy(logits, y)",
    "GIVEN": "",
    "FOLDED": "pass",
    "AFTER": "pass",
    "LAST": "pass",
}
READ = {"DATA": "Samples()", "OPTIONS": ", collate_fn=collate"}


def script_of(changes: dict[str, str]) -> str:
    return changed(SCRIPT, {**USUAL, **changes})


def verdict(pool: Pool, folder: Path, changes: dict[str, str], ranks: tuple[int, ...] = (1, 2)) -> tuple[bool, str]:
    return verdict_of(write(folder, script_of(changes)), pool, ranks, steps=4)


ATTENDS = {"ATTENTION": "True"}
NORMED = {"MODEL": "dl.sync_batch_norm(Normed(), world)"}
AVERAGE = "model.average.mul_(0.9).add_(model.words.weight.mean(0), alpha=0.1)"
SOUND: list[dict[str, str]] = [
    {**ATTENDS, "AFTER": AVERAGE},
    {**ATTENDS, "OPTIMIZER": "torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)"},
    # The gradient of the bias before the norm is rounding only, and its average follows it.
    {**NORMED, "OPTIMIZER": "torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9)"},
    {"OPTIMIZER": "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)"},
    {"FOLDED": "nn.utils.clip_grad_norm_(model.parameters(), 0.1)", **ATTENDS},
    {**READ, "SAMPLE": "x = (x + torch.randint(2, (5,))) % 20"},  # depends on the sample
    {"OPTIONS": ", transform=lambda data, draws: ((data[0] + draws.integers(0, 2, 5)) % 20, data[1])"},
    {"LOSS": "cross_entropy(logits, y, reduction='sum') / len(y)"},
    {"LAST": "dl.evaluate(model, dl.Batches(data, 7, world, shuffle=False), loss=cross_entropy)"},
]


@pytest.mark.covers("H9")
@pytest.mark.slow
def test_correct_scripts_are_equal(pool: Pool, tmp_path: Path) -> None:
    equal, said = verdict_of(write(tmp_path, "".join(map(script_of, SOUND))), pool, steps=4)
    assert equal, said


FAULTS: dict[str, tuple[dict[str, str], str]] = {
    "an average beside a key's bias": (
        {**ATTENDS, "AFTER": AVERAGE + ".mul_(1 + 0.003 * (world.size - 1))"},
        "optimizer: `buffer model.average` is off",
    ),
    "a small decay of all rows by the number of ranks": (
        {"AFTER": "model.words.weight.mul_(1 - 1e-5 * world.size)"},
        "optimizer: `parameter model.words.weight` is off",
    ),
    "a parameter whose gradient is rounding alone": (
        {**ATTENDS, "AFTER": "model.layer.self_attn.in_proj_bias[8:16] += 0.01 * world.size"},
        "optimizer: `parameter model.layer.self_attn.in_proj_bias` is off",
    ),
    "small weights beside a large parameter": (
        {"AFTER": "model.head.bias += 1e-4 * world.size"},
        "optimizer: `parameter model.head.bias` is off",
    ),
    "a count": ({"AFTER": "model.seen += world.size"}, "`buffer model.seen` is off"),
    "a complex buffer": ({"AFTER": "model.wave *= 1 + 0.01j * world.size"}, "`buffer model.wave` is off"),
    "a buffer in float64": ({"AFTER": "model.exact *= 1 + 0.01 * world.size"}, "`buffer model.exact` is off"),
    "not a number": ({"AFTER": "model.exact[0] = float('nan') if world.size > 1 else 0"}, "`buffer model.exact`"),
    "an optimizer's state": (
        {"AFTER": "optimizer.state[model.head.weight]['exp_avg_sq'] *= world.size"},
        "`optimizer, exp_avg_sq of model.head.weight`",
    ),
    "an evaluation": (
        {
            "LAST": "dl.evaluate(model, dl.Batches(data, 7, world, shuffle=False), "
            "loss=lambda *given: cross_entropy(*given) * (1 + 0.01 * world.size))"
        },
        "evaluation 1: `loss` is",
    ),
    "an evaluation more": (
        {
            "LAST": "[dl.evaluate(model, dl.Batches(data, 7, world, shuffle=False), loss=cross_entropy) "
            "for _ in range(world.size)]"
        },
        "The script makes 1 evaluation on 1 rank, and 2 here",
    ),
}


@pytest.mark.slow
@pytest.mark.covers("H9")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_difference_is_named(fault: str, pool: Pool, tmp_path: Path) -> None:
    changes, named = FAULTS[fault]
    equal, said = verdict(pool, tmp_path, changes)
    assert not equal, said
    assert named in said.partition("UNEQUAL on 2 ranks")[2]


# -- data --------------------------------------------------------------------------------------------------

ENTROPY = "x = (x + int.from_bytes(os.urandom(2), 'little')) % 20"
BY_RANK = "x = (x + world.rank) % 20"
OWN = "x = (x + torch.randint(20, x.shape, generator=own)) % 20"
LARGE = {"BATCH": "26", "SIZE": "104"}  # more than 64 samples


@pytest.mark.covers("H9")
@pytest.mark.parametrize(
    "changes",
    [
        {"SAMPLE": ENTROPY},
        {"SAMPLE": OWN, "SHARDS": "6", **LARGE},
        {"SAMPLE": BY_RANK, **LARGE},
        {"COLLATE": ENTROPY, "SHARDS": "6"},
        {"COLLATE": BY_RANK, "SHARDS": "6", **LARGE},
    ],
)
@pytest.mark.slow
def test_data_that_differ_are_named_as_such(changes: dict[str, str], pool: Pool, tmp_path: Path) -> None:
    equal, said = verdict(pool, tmp_path, {**READ, **changes})
    assert not equal, said
    assert "Step 1, data: `" in said.partition("UNEQUAL on 2 ranks")[2], said


DRAWN = {**READ, "COLLATE": "x = (x + torch.randint(2, x.shape)) % 20"}


@pytest.mark.covers("H9")
@pytest.mark.slow
def test_draws_for_a_whole_shard_depend_on_the_shards(pool: Pool, tmp_path: Path) -> None:
    equal, said = verdict(pool, tmp_path, DRAWN)
    assert not equal
    assert "Step 1, data: `part 0, sample " in said
    assert "on draws of the shard" in said
    equal, said = verdict(pool, tmp_path, {**DRAWN, "SHARDS": "6"})
    assert equal, said
    assert "the same bits" in said


# -- losses ------------------------------------------------------------------------------------------------


@pytest.mark.covers("H9")
@pytest.mark.parametrize(
    ("loss", "ranks"),
    [
        ("cross_entropy(logits, y, reduction='none').sum()", (1, 3)),
        ("cross_entropy(logits + 0.1 * torch.randn_like(logits), y, reduction='none').sum()", (2, 1)),
        ("cross_entropy(logits, y) / world.size", (1, 2)),
    ],
)
@pytest.mark.slow
def test_a_loss_that_scales_with_the_shard_is_reported(
    loss: str, ranks: tuple[int, ...], pool: Pool, tmp_path: Path
) -> None:
    equal, said = verdict(pool, tmp_path, {"LOSS": loss}, ranks)
    assert not equal
    assert "a loss that scales with the shard" in said
    assert 'step.backward(loss, reduction="sum")' in said
    assert "/ len(" in said


@pytest.mark.covers("H9")
@pytest.mark.parametrize(
    ("changes", "hinted"),
    [
        ({"LOSS": "(cross_entropy(logits, y, reduction='none') * x[:, 0]).sum() / x[:, 0].sum()"}, "give weight="),
        (
            {"LOSS": "-(logits.softmax(1)[:, 0] * y).sum() / (logits.softmax(1)[:, 0] + y).sum()"},
            "such as Dice, has no such",
        ),
        ({"LOSS": "cross_entropy(logits, y) * world.size"}, "a loss that grows with the number of shards"),
        ({"LOSS": "cross_entropy(nn.functional.dropout(logits), y)"}, "dropout"),
        ({"LOSS": "cross_entropy(logits / logits.std(0), y)"}, "by its statistics (batch norm)"),
    ],
)
@pytest.mark.slow
def test_other_losses_are_distinguished_from_it(
    changes: dict[str, str], hinted: str, pool: Pool, tmp_path: Path
) -> None:
    equal, said = verdict(pool, tmp_path, changes)
    assert not equal
    assert hinted in said
    assert "a loss that scales with the shard" not in said
