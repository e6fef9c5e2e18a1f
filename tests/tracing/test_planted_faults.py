"""Planted faults that `verify` names, with fixed shards and without, and sound scripts that it does not blame."""

from __future__ import annotations

from dataclasses import dataclass
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

class Kept(nn.Module):
    def __init__(self, rule):
        super().__init__()
        self.rule, self.last = rule, nn.Linear(6, 3)
        self.register_buffer("level", torch.zeros(6))

    def forward(self, x):
        with torch.no_grad():
            self.level.copy_(self.rule(self.level, x))
        return self.last(x)

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


@dataclass(frozen=True)
class Fault:
    """What a faulty script changes, and words of the report, or of the error if the package refuses the script."""

    changes: dict[str, str]
    named: str
    is_refused: bool = False


ADDS, AVERAGES = "a shard's loss is about the sum of the losses", "a shard's loss is about the mean of the losses"
PENALTY, WEIGHS = "a part of the loss does not depend on the samples", "give weight="
SCALES = "a loss that scales with the shard"
MIXED = "one part of a shard's loss is a sum over its samples, and another part is their mean"
IN_ONE = f"With each mini-batch in one shard: In step 1, {ADDS}"
VAE = {"MODEL": "Autoencoder()", "ROWS": "104"}

FAULTS = {
    "a sum as a mean": Fault({"LOSS": f"step.backward({SUM})"}, SCALES),
    "a sum as a mean, fixed": Fault({**FIXED, "LOSS": f"step.backward({SUM})"}, ADDS),
    "a sum as a mean beside batch norm, fixed": Fault(
        {**FIXED, "ROWS": "65", "MODEL": "mlp(nn.BatchNorm1d(16))", "LOSS": f"step.backward({SUM})"}, ADDS
    ),
    "an autoencoder's sum, fixed": Fault({**FIXED, **VAE, "LOSS": "step.backward(logits)"}, ADDS),
    "a weight by hand": Fault(
        {"LOSS": "step.backward(F.cross_entropy(logits, b) * size / step.samples)"}, "or was weighted by hand"
    ),
    "a weight by hand, fixed": Fault(
        {**FIXED, "LOSS": "step.backward(F.cross_entropy(logits, b) * size / step.samples)"}, ADDS
    ),
    "a mean as a sum, fixed": Fault(
        {**FIXED, "LOSS": "step.backward(F.cross_entropy(logits, b), reduction='sum')"}, AVERAGES
    ),
    "a sum as a mean beside batch norm that refuses halves, fixed": Fault(
        {"FIXED": "4", "ROWS": "24", "MODEL": "mlp(nn.BatchNorm1d(16))", "LOSS": f"step.backward({SUM})"}, IN_ONE
    ),
    "a weight by hand beside dropout of few samples, fixed": Fault(
        {
            **FIXED,
            "MODEL": "mlp(nn.Dropout(0.4))",
            "LOSS": "step.backward(F.cross_entropy(logits, b) * size / step.samples)",
        },
        IN_ONE,
    ),
    "a mean as a sum beside dropout of few samples, fixed": Fault(
        {
            **FIXED,
            "MODEL": "mlp(nn.Dropout(0.4))",
            "LOSS": "step.backward(F.cross_entropy(logits, b), reduction='sum')",
        },
        f"With each mini-batch in one shard: In step 1, {AVERAGES}",
    ),
    "a mean times a root, fixed": Fault(
        {**FIXED, "LOSS": "step.backward(F.cross_entropy(logits, b) * size**0.5)"},
        "the mean over them times n ** 0.5, ",
    ),
    "a mean that is divided by the samples again, as a sum, fixed": Fault(
        {**FIXED, "LOSS": "step.backward(F.cross_entropy(logits, b) / size, reduction='sum')"},
        "the mean over them times n ** -1, ",
    ),
    "a sum of entropies beside a mean, fixed": Fault({**FIXED, "LOSS": f"step.backward({ENTROPIES})"}, MIXED),
    "a mean beside a sum, fixed": Fault(
        {**FIXED, "LOSS": f"step.backward({SUM} + logits.square().mean(), reduction='sum')"}, MIXED
    ),
    "a penalty beside a sum": Fault({"LOSS": f"step.backward({SUM} + penalty(model), reduction='sum')"}, PENALTY),
    "a penalty beside a sum, fixed": Fault(
        {**FIXED, "LOSS": f"step.backward({SUM} + penalty(model), reduction='sum')"}, PENALTY
    ),
    "a penalty as a further loss, fixed": Fault(
        {
            **FIXED,
            "LOSS": f"step.backward({SUM}, reduction='sum', more_losses=True); "
            "step.backward(model[0].weight.abs().sum() * 0.01, reduction='sum')",
        },
        PENALTY,
    ),
    "a mean over tokens": Fault({"LOSS": f"step.backward({PER_TOKEN})"}, WEIGHS),
    "a mean over tokens, fixed": Fault({**FIXED, "LOSS": f"step.backward({PER_TOKEN})"}, WEIGHS),
    "a metric that is a sum, fixed": Fault(
        {**FIXED, "LOSS": "step.backward(F.cross_entropy(logits, b), hits=(logits.argmax(1) == b).sum().double())"},
        "the metric `hits`",
    ),
    "a clamp of each shard's gradient": Fault(
        {"BEFORE": "model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))"},
        "model.0.weight",
        is_refused=True,
    ),
    "a codebook": Fault(
        {"MODEL": "Kept(lambda level, x: 0.9 * level + 0.1 * x.square().sum(0) / x.square().sum())"},
        "model.level",
        is_refused=True,
    ),
    "a running maximum": Fault(
        {"MODEL": "Kept(lambda level, x: torch.maximum(level, x.amax(0)))"}, "model.level", is_refused=True
    ),
    "a reading of the rank, fixed": Fault(
        {**FIXED, "LOSS": "step.backward(F.cross_entropy(logits * (1 + world.rank), b))"}, "forward: `shard "
    ),
    "a generator of its own, fixed": Fault(
        {
            **FIXED,
            "LOSS": "step.backward(F.cross_entropy(logits * torch.rand(logits.shape, generator=own), b))",
        },
        "forward: `shard ",
    ),
    "a dropout that is seeded by the rank, fixed": Fault(
        {
            **FIXED,
            "LOSS": "torch.manual_seed(world.rank); step.backward(F.cross_entropy(F.dropout(model(a)), b))",
        },
        "forward: `shard ",
    ),
    "data by the place in the shard": Fault(
        {"LOSS": "step.backward(F.cross_entropy(logits * (1 + torch.arange(size))[:, None], b))"},
        "a result depends on the shard",
    ),
    "a loss divided by the ranks, fixed": Fault(
        {**FIXED, "LOSS": "step.backward(F.cross_entropy(logits, b) / world.size)"}, "forward: `shard "
    ),
    "a rate that follows the ranks": Fault(
        {"OPTIMIZER": "torch.optim.SGD(model.parameters(), 0.1 * world.size)"}, "`optimizer, group 0.lr`"
    ),
    "an update that a shard's loss decides": Fault(
        {
            **FIXED,
            "STEP": SHARD.strip().replace("LOSS", "loss = F.cross_entropy(logits, b); step.backward(loss)")
            + "\n        if float(loss) > 1.15: optimizer.step()",
        },
        "rank 0 and rank 1 of 2 differ from each other",
        is_refused=True,
    ),
    "an evaluation that follows the ranks": Fault(
        {
            "AFTER": "dl.evaluate(model, dl.Batches((x, y), 20, world, shuffle=False), "
            "loss=lambda *given: F.cross_entropy(*given) * world.size)"
        },
        "evaluation 1: `loss` is",
    ),
}


def verdict(changes: dict[str, str], pool: Pool, folder: Path) -> tuple[bool, str]:
    return verdict_of(write(folder, text_of(changes)), pool, (1, 2), steps=3)


def quick(cases: dict[str, Fault] | dict[str, dict[str, str]], name: str) -> list[object]:
    return [pytest.param(one, marks=() if one == name else pytest.mark.slow) for one in cases]


@pytest.mark.covers("H9")
@pytest.mark.parametrize("fault", quick(FAULTS, "a penalty beside a sum, fixed"))
def test_a_planted_fault_is_named(fault: str, pool: Pool, tmp_path: Path) -> None:
    planted = FAULTS[fault]
    try:
        equal, said = verdict(planted.changes, pool, tmp_path)
    except CannotVerify as error:
        equal, said = False, f"UNEQUAL{error}" if planted.is_refused else ""
    assert not equal, said
    assert planted.named in said.partition("UNEQUAL")[2], said


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
CLOSURE = """
        def closure():
            for a, b, n in step:
                step.backward(F.cross_entropy(model(a), b))
            return step.fold().loss
        optimizer.step(closure)
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
    "a mean, with decay and clipping": {
        "OPTIMIZER": "torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)",
        "STEP": SHARD.strip().replace("step.fold()", "step.fold(); nn.utils.clip_grad_norm_(model.parameters(), 0.1)"),
    },
    "batch norm": {"MODEL": "mlp(nn.BatchNorm1d(16))"},
    "batch norm that refuses halves of one sample": {"MODEL": "mlp(nn.BatchNorm1d(16))", "FIXED": "10"},
    "batch norm that is judged in one shard": {"MODEL": "mlp(nn.BatchNorm1d(16))", "FIXED": "4", "ROWS": "24"},
    "dropout": {"MODEL": "mlp(nn.Dropout(0.5))", "ROWS": "104"},
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
    "a closure": {
        "STEP": CLOSURE.strip(),
        "OPTIMIZER": "torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)",
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
    "an autoencoder's mean": {**VAE, "LOSS": "step.backward(logits / size)"},
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
    "float64": {
        "MODEL": "mlp().double()",
        "DATA": "(x.double(), y, tokens)",
        "LOSS": f"step.backward({SUM}, reduction='sum')",
    },
}


@pytest.mark.covers("H9")
@pytest.mark.parametrize("script", quick(SOUND, "several losses"))
def test_a_sound_script_of_fixed_shards_is_not_blamed(script: str, pool: Pool, tmp_path: Path) -> None:
    equal, said = verdict({**FIXED, **SOUND[script]}, pool, tmp_path)
    assert equal, said
    assert "the same bits" in said.splitlines()[-1]


@pytest.mark.covers("H9")
@pytest.mark.parametrize(
    ("script", "is_said"), [("batch norm", True), ("bfloat16", True), ("a mean", False), ("sequences", False)]
)
@pytest.mark.slow
def test_a_result_that_depends_on_the_shard_is_said(script: str, is_said: bool, pool: Pool, tmp_path: Path) -> None:
    _, said = verdict({**FIXED, **SOUND[script]}, pool, tmp_path)
    assert ("So keep the number of shards" in said) == is_said, said


@pytest.mark.covers("H9")
def test_losses_that_are_not_judged_are_said(pool: Pool, tmp_path: Path) -> None:
    loss = "step.backward(F.cross_entropy(logits, b, reduction='none').sum())"
    last_has_4 = {"FIXED": "2", "ROWS": "42", "MODEL": "mlp(nn.BatchNorm1d(16))", "LOSS": loss}
    equal, said = verdict(last_has_4, pool, tmp_path)
    assert equal, said
    assert "The losses were not judged, since the script fails with each shard cut into two" in said
    assert "Mini-batch 4 of an epoch has 4 samples over 4 shards" in said
    assert "with fewer shards, or with drop_last=True" in said
    equal, said = verdict({**last_has_4, "check_data=False": "drop_last=True"}, pool, tmp_path)
    assert not equal
    assert ADDS in said
