"""Planted faults that `verify` names, with fixed shards and without, and sound scripts that it does not blame."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from ddp_loop.distributed import Pool
from ddp_loop.tracing import CannotVerify
from tests.support.scripts import changed, verdict_of, write

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F
import ddp_loop as dl

generator = torch.Generator().manual_seed(1)
own = torch.Generator().manual_seed(2)
SHARDS = FIXED

def mlp(*between, width=16):
    return nn.Sequential(nn.Linear(6, width), *between, nn.Tanh(), nn.Linear(width, 3))

def penalty(model):
    return 1e-3 * sum(one.square().sum() for one in model.parameters())

class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x):
        mean, spread = self.first(x).chunk(2, 1)
        made = self.last(mean + torch.exp(spread / 2) * torch.randn_like(mean))
        return (made - x).square().sum() - 0.5 * (1 + spread - mean.square() - spread.exp()).sum()

with dl.join_world(seed=0) as world:
    x, y = torch.randn(130, 6, generator=generator), torch.randint(3, (130,), generator=generator)
    tokens = torch.randint(1, 9, (130,), generator=generator)
    model = MODEL
    optimizer = OPTIMIZER
    state = {"model": model, "optimizer": optimizer, **{}}
    batches = dl.Batches(DATA, ROWS, world, shards=SHARDS, check_data=False)
    loop = dl.Loop(batches, 2, state=state, progress=False)
    BEFORE
    for step in loop:
        STEP
        AFTER
"""

SHARD = """
        for a, b, n in step:
            size = len(a)
            logits = model(a)
            LOSS
        step.fold()
        optimizer.step()
"""

USUAL = {
    "FIXED": "None",
    "MODEL": "mlp()",
    "OPTIMIZER": "torch.optim.Adam(model.parameters(), 0.01)",
    "DATA": "(x, y, tokens)",
    "ROWS": "26",
    "BEFORE": "pass",
    "STEP": SHARD.strip(),
    "AFTER": "pass",
    "LOSS": "step.backward(F.cross_entropy(logits, b))",
}
FIXED = {"FIXED": "3"}
PER_TOKEN = "(F.cross_entropy(logits, b, reduction='none') * n).sum() / n.sum()"
SUM = "F.cross_entropy(logits, b, reduction='none').sum()"  # torch's own sum is refused as a mean
ENTROPIES = "F.cross_entropy(logits, b) - 0.01 * torch.distributions.Categorical(logits=logits).entropy().sum()"


def text_of(changes: dict[str, str]) -> str:
    """The script; what a change puts in may have names that are changed, too."""
    values = {**USUAL, **changes}
    values["STEP"] = values["STEP"].replace("LOSS", values.pop("LOSS"))
    return changed(SCRIPT, values)


ADDS, AVERAGES = "a shard's loss is about the sum of the losses", "a shard's loss is about the mean of the losses"
PENALTY = "a part of the loss does not depend on the samples"
MIXED = "one part of a shard's loss is a sum over its samples, and another part is their mean"
IN_ONE = "With each mini-batch in one shard: In step 1, "
BY_HAND = "step.backward(F.cross_entropy(logits, b) * size / step.samples)"
MEAN_AS_SUM = "step.backward(1.0 * F.cross_entropy(logits, b), reduction='sum')"

# Every number of ranks gives the same bits; what follows the cut into shards shows in other cuts.
FIXED_FAULTS = {
    "a sum as a mean": ({"LOSS": f"step.backward({SUM})"}, ADDS),
    "a sum as a mean beside batch norm": (
        {"ROWS": "65", "MODEL": "mlp(nn.BatchNorm1d(16))", "LOSS": f"step.backward({SUM})"}, ADDS
    ),
    "a mean as a sum": ({"LOSS": MEAN_AS_SUM}, AVERAGES),
    "a sum as a mean beside batch norm that refuses halves": (
        {"FIXED": "4", "ROWS": "24", "MODEL": "mlp(nn.BatchNorm1d(16))", "LOSS": f"step.backward({SUM})"},
        IN_ONE + ADDS,
    ),
    "a weight by hand beside dropout of few samples": (
        {"MODEL": "mlp(nn.Dropout(0.4))", "LOSS": BY_HAND}, IN_ONE + ADDS
    ),
    "a mean as a sum beside dropout of few samples": (
        {"MODEL": "mlp(nn.Dropout(0.4))", "LOSS": MEAN_AS_SUM}, IN_ONE + AVERAGES
    ),
    "a mean times a root": (
        {"LOSS": "step.backward(F.cross_entropy(logits, b) * size**0.5)"}, "the mean over them times n ** 0.5, "
    ),
    "a mean that is divided by the samples again, as a sum": (
        {"LOSS": "step.backward(F.cross_entropy(logits, b) / size, reduction='sum')"},
        "the mean over them times n ** -1, ",
    ),
    "a sum of entropies beside a mean": ({"LOSS": f"step.backward({ENTROPIES})"}, MIXED),
    "a mean beside a sum": (
        {"LOSS": f"step.backward({SUM} + logits.square().mean(), reduction='sum')"}, MIXED
    ),
    "a penalty as a further loss": (
        {
            "LOSS": f"step.backward({SUM}, reduction='sum', more_losses=True); "
            "step.backward(model[0].weight.abs().sum() * 0.01, reduction='sum')",
        },
        PENALTY,
    ),
    "a mean over tokens": ({"LOSS": f"step.backward({PER_TOKEN})"}, "give weight="),
    "a metric that is a sum": (
        {"LOSS": "step.backward(F.cross_entropy(logits, b), hits=(logits.argmax(1) == b).sum().double())"},
        "the metric `hits`",
    ),
    # Numbers of ranks whose bits differ: the first step, stage and value is named.
    "other start weights": (
        {"BEFORE": "model[2].bias.data.add_(0.01 * world.size)"},
        "Before the first step: `parameter model.2.bias` differs first",
    ),
    "another order of the data": ({"check_data=False": "seed=world.size"}, "data: `samples` differs first"),
    "a transform that draws from a generator of its own": (
        {
            "BEFORE": "draw = __import__('random').Random(3).random",
            "check_data=False": "check_data=False, transform=lambda data, _: (data[0] + draw(), *data[1:])",
        },
        "data: `shard 2, part 0` differs first",
    ),
    "a generator of its own": (
        {"LOSS": "step.backward(F.cross_entropy(logits * torch.rand(logits.shape, generator=own), b))"},
        "forward: `shard 2, loss` differs first",
    ),
    "a dropout that is seeded by the rank": (
        {"LOSS": "torch.manual_seed(world.rank); step.backward(F.cross_entropy(F.dropout(model(a)), b))"},
        "forward: `shard 2, loss` differs first",
    ),
    "a loss divided by the ranks": (
        {"LOSS": "step.backward(F.cross_entropy(logits, b) / world.size)"}, "forward: `shard 0, loss` differs first"
    ),
    "a hook that scales a layer's gradient by the ranks": (
        {"BEFORE": "model[1].register_full_backward_hook(lambda _, slopes, __: (slopes[0] * world.size,))"},
        "backward: `shard 0, gradient of model.0.bias` differs first",
    ),
    "a buffer of rank 0": (
        {
            "MODEL": "mlp(); model.register_buffer('level', torch.zeros(()))",
            "progress=False": "progress=False, buffer_reduction={'model.level': 'local'}",
            "LOSS": "model.level.copy_(a.mean()); step.backward(F.cross_entropy(logits, b))",
            "AFTER": "world.broadcast(model.level)",
        },
        "`buffer model.level` differs first",
    ),
    "one more update where there are two ranks": (
        {"AFTER": "step.iteration == 2 and world.size == 2 and optimizer.step()"},
        "Step 2, optimizer: `optimizer, step of model.0.weight` differs first",
    ),
    "a mean of the ranks' means decides on the rate": (
        {
            "AFTER": "optimizer.param_groups[0]['lr'] = 0.01 + 0.01 * float(world.sum(logits.detach().mean()) "
            "/ world.size)"
        },
        "`optimizer, group 0.lr` differs first",
    ),
    "an update of one rank": (
        {"AFTER": "world.rank == 1 and optimizer.step()", "progress=False": "progress=False, check_replicas_every=0"},
        "Ranks 0 and 1 have different values",
    ),
}  # fmt: skip

# As many shards as ranks.
FAULTS = {
    "a penalty beside a sum": ({"LOSS": f"step.backward({SUM} + penalty(model), reduction='sum')"}, PENALTY),
    "data by the place in the shard": (
        {"LOSS": "step.backward(F.cross_entropy(logits * (1 + torch.arange(size))[:, None], b))"},
        "result depends on the shard",
    ),
}


def verdict(script: str, pool: Pool, folder: Path) -> tuple[bool, str]:
    return verdict_of(write(folder, script), pool, (1, 2), steps=3)


def quick(cases: Iterable[str], name: str) -> list[object]:
    return [pytest.param(one, marks=() if one == name else pytest.mark.slow) for one in cases]


@pytest.mark.covers("H9")
@pytest.mark.parametrize("fault", quick([*FIXED_FAULTS, *FAULTS], "a penalty as a further loss"))
def test_a_planted_fault_is_named(fault: str, pool: Pool, tmp_path: Path) -> None:
    changes, named = FIXED_FAULTS.get(fault) or FAULTS[fault]
    equal, said = verdict(text_of({**FIXED, **changes} if fault in FIXED_FAULTS else changes), pool, tmp_path)
    assert not equal, said
    assert named in said.partition("UNEQUAL")[2], said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        # On every number of ranks it would clamp three times, so equal bits prove nothing.
        (
            {"BEFORE": "model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))"},
            r"model\.0\.weight has one of register_hook\. Change and read \.grad after",
        ),
        ({"AFTER": "world.rank == 1 and optimizer.step()"}, "rank 0 and rank 1 of 2 differ from each other"),
    ],
)
def test_what_the_loop_itself_refuses_is_said(changes: dict[str, str], named: str, pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(CannotVerify, match=named):
        verdict(text_of({**FIXED, **changes}), pool, tmp_path)


# -- sound scripts -----------------------------------------------------------------------------------------

TWO_NETWORKS = """
        for a, b, n in step:
            step.backward(F.softplus(-judge(a)).mean() + F.softplus(judge(model(a).detach().repeat(1, 2))).mean())
        step.fold()
        others.step()
        for a, b, n in step:
            step.backward(F.softplus(-judge(model(a).repeat(1, 2))).mean())
        step.fold()
        optimizer.step()
"""
WHOLE = """
        for a, b, n in step:
            step.hold(model(a), model(a.flip(1)))
        one, two = step.gather()
        step.backward(F.cross_entropy(F.normalize(one) @ F.normalize(two).T * 5, torch.arange(len(one))))
        step.fold()
        optimizer.step()
"""
LOCAL = """F.cross_entropy(
                F.normalize(logits) @ F.normalize(model(a.flip(1))).T * 5, torch.arange(size)
            )"""
STREAM = "type('Stream', (), {'__iter__': lambda self: zip(x, y, tokens)})()"
SEQUENCES = """
    texts = [(torch.randn(9, 6, generator=generator), torch.randint(3, (9,), generator=generator)) for _ in range(12)]
    batches = dl.SequenceBatches(texts, 6, 5, world, shards=SHARDS)
    loop = dl.Loop(batches, 2, state=state, progress=False)
"""
CHUNKS = """
        for chunk in step:
            inputs, targets = chunk.data
            step.backward(F.cross_entropy(chunk.unpad(model(inputs)), chunk.unpad(targets)))
        step.fold()
        optimizer.step()
"""

SOUND: dict[str, dict[str, str]] = {
    "a mean": {},
    "batch norm": {"MODEL": "mlp(nn.BatchNorm1d(16))"},
    "batch norm that refuses halves of one sample": {"MODEL": "mlp(nn.BatchNorm1d(16))", "FIXED": "10"},
    "batch norm that is judged in one shard": {"MODEL": "mlp(nn.BatchNorm1d(16))", "FIXED": "4", "ROWS": "24"},
    "dropout of few samples": {"MODEL": "mlp(nn.Dropout(0.5))"},
    "a sum beside dropout of few samples": {
        "MODEL": "mlp(nn.Dropout(0.5))",
        "LOSS": f"step.backward({SUM}, reduction='sum')",
    },
    "a mean of entropies": {"LOSS": f"step.backward({ENTROPIES.replace('sum', 'mean')})"},
    "tokens with their weight": {"LOSS": f"step.backward({PER_TOKEN}, weight=int(n.sum()))"},
    "a sum of a metric, and means": {
        "LOSS": "step.backward(F.cross_entropy(logits, b), hits=dl.Sum(logits.argmax(1) == b), "
        "right=logits.argmax(1) == b, size=torch.tensor(7.0), zero=0)"
    },
    "several losses": {
        "LOSS": "step.backward(F.cross_entropy(logits, b), more_losses=True); step.backward(penalty(model))"
    },
    "two networks in two passes": {
        "STEP": TWO_NETWORKS.strip(),
        "MODEL": "nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))",
        "**{}": "'judge': (judge := nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))), "
        "'others': (others := torch.optim.Adam(judge.parameters(), 0.01))",
    },
    "a sum beside an exact penalty": {
        "LOSS": f"step.backward({SUM} + penalty(model) * size / step.samples, reduction='sum')"
    },
    "a sum over the samples of the mini-batch": {"LOSS": f"step.backward({SUM} / step.samples, reduction='sum')"},
    "a sum beside batch norm and dropout": {
        "MODEL": "mlp(nn.BatchNorm1d(16), nn.Dropout(0.3))",
        "ROWS": "104",
        "LOSS": f"step.backward({SUM}, reduction='sum')",
    },
    "an autoencoder's mean": {"MODEL": "Autoencoder()", "ROWS": "104", "LOSS": "step.backward(logits / size)"},
    "a loss of the whole mini-batch": {"STEP": WHOLE.strip()},
    "a contrastive loss of a shard": {"ROWS": "65", "LOSS": f"step.backward({LOCAL})"},
    "a contrastive loss that is judged in one shard": {"LOSS": f"step.backward({LOCAL.replace('* 5', '* 0.1')})"},
    "a shard's covariances": {
        "LOSS": "step.backward(F.cross_entropy(logits, b) + (logits.T.cov() - torch.eye(3)).square().mean())"
    },
    "a contrastive loss of few samples, which is about their logarithm": {
        "FIXED": "24",
        "ROWS": "96",
        "LOSS": f"step.backward({LOCAL.replace('* 5', '* 0.1')})",
    },
    "advantages that are normed in a shard": {
        "LOSS": "step.backward(-(F.log_softmax(logits, 1)[:, 0] * (n - n.float().mean()) / n.float().std()).mean())"
    },
    "bfloat16": {
        "LOSS": "with torch.autocast('cpu', torch.bfloat16): loss = F.cross_entropy(model(a), b)\n"
        "            step.backward(loss)"
    },
    "sequences": {"BEFORE": SEQUENCES.strip(), "STEP": CHUNKS.strip()},
    "data in parts": {"check_data=False": "partition='local'"},
    "a stream": {"DATA": STREAM},
    "more shards than samples": {"FIXED": "30"},
    "a shard per sample": {"FIXED": "26"},
    "frozen parameters": {"BEFORE": "model[0].requires_grad_(False)"},
}


QUICK = ["several losses"]
EXACT = [
    *("a mean", "tokens with their weight", "sequences", "two networks in two passes", "a stream", "data in parts"),
    *("a loss of the whole mini-batch", "a sum beside an exact penalty", "a sum over the samples of the mini-batch"),
    *("frozen parameters", "a sum of a metric, and means", "a mean of entropies"),
]
ALONE = [
    *("batch norm that refuses halves of one sample", "batch norm that is judged in one shard"),
    *("more shards than samples", "a shard per sample"),
]


@pytest.mark.covers("H9")
@pytest.mark.parametrize(
    ("scripts", "is_said"),
    [
        (QUICK, False),
        pytest.param(EXACT, False, marks=pytest.mark.slow),
        pytest.param([one for one in SOUND if one not in QUICK + EXACT + ALONE], True, marks=pytest.mark.slow),
        *(pytest.param([one], None, marks=pytest.mark.slow) for one in ALONE),
    ],
)
def test_sound_scripts_of_fixed_shards_are_not_blamed_and_a_result_that_depends_on_the_shard_is_said(
    scripts: list[str], is_said: bool | None, pool: Pool, tmp_path: Path
) -> None:
    equal, said = verdict("".join(text_of({**FIXED, **SOUND[one]}) for one in scripts), pool, tmp_path)
    assert equal, said
    assert "the same bits" in said.splitlines()[-1]
    assert is_said is None or ("So keep the number of shards" in said) == is_said, said


@pytest.mark.covers("H9")
def test_losses_that_are_not_judged_are_said(pool: Pool, tmp_path: Path) -> None:
    last_has_4 = {"FIXED": "2", "ROWS": "42", "MODEL": "mlp(nn.BatchNorm1d(16))", "LOSS": f"step.backward({SUM})"}
    equal, said = verdict(text_of(last_has_4), pool, tmp_path)
    assert equal, said
    assert "The losses were not judged, since the script fails with each shard cut into two" in said
    assert "Mini-batch 4 of an epoch has 4 samples over 4 shards" in said
    assert "with fewer shards, or with drop_last=True" in said
    equal, said = verdict(text_of({**last_has_4, "check_data=False": "drop_last=True"}), pool, tmp_path)
    assert not equal
    assert ADDS in said
