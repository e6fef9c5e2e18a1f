"""Verdicts of `verify`: no false alarm, and no small difference missed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_loop.distributed import Pool
from ddp_loop.tracing import VerifyJob, verify
from tests.support.paths import EXAMPLES
from tests.support.scripts import changed, verdict_of, write

SCRIPT = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
import ddp_loop as dl

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.layer(x.unflatten(1, (2, 4)).repeat(1, 1, 2)).mean(1))

def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

def normed():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))

with dl.join_world(seed=0) as world:
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(52, 8, generator=generator), torch.randint(4, (52,), generator=generator)
    shards = SHARDS
    rate = 0.1
    model = MODEL
    optimizer = OPTIMIZER
    kept = {"best": "none", "count": 2**70}
    state = {"model": model, "optimizer": optimizer, "kept": kept}
    loop = dl.Loop(dl.Batches(data, 13, world, shards=shards), 2, state=state, progress=False, ordered=ORDERED)
    for epoch in loop.epochs():
        for step in epoch:
            for inputs, labels in step:
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=AUTOCAST):
                    logits = model(inputs)
                    loss = cross_entropy(logits, labels)
                hits = (logits.argmax(1) == labels).float()
                step.backward(loss, accuracy=hits * ACCURACY, tokens=torch.tensor(1e4))
            step.fold()
            optimizer.step()
            AFTER
"""

USUAL = {
    "SHARDS": "None",
    "MODEL": "mlp()",
    "OPTIMIZER": "torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)",
    "ORDERED": "None",
    "AUTOCAST": "False",
    "ACCURACY": "1",
    "AFTER": "pass",
}
ADAM = "torch.optim.Adam(model.parameters(), lr=0.01)"


def verdict(pool: Pool, folder: Path, changes: dict[str, str], tolerance: float | None = None) -> tuple[bool, str]:
    script = write(folder, changed(SCRIPT, {**USUAL, **changes}))
    return verdict_of(script, pool, steps=6, tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.covers("H9")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"OPTIMIZER": ADAM},
        {"MODEL": "Attention()", "OPTIMIZER": ADAM},  # the gradient of the key's bias is rounding only
        {"MODEL": "dl.sync_batch_norm(normed(), world)", "OPTIMIZER": ADAM},  # so is that of the bias before the norm
        {"MODEL": "normed()", "SHARDS": "3", "ORDERED": "False", "OPTIMIZER": ADAM},
        {"MODEL": "mlp().double()", "SHARDS": "None", "AFTER": "kept['best'] = str(step.iteration)"},
    ],
)
def test_runs_that_are_equal_up_to_rounding_are_reported_as_equal(
    changes: dict[str, str], pool: Pool, tmp_path: Path
) -> None:
    if "double" in changes.get("MODEL", ""):
        changes = {**changes, "rate = 0.1": "rate = 0.1; data = data[0].double(), data[1]"}
    equal, said = verdict(pool, tmp_path, changes)
    assert equal, said
    assert said.splitlines()[-1].startswith("EQUAL on 1, 2, 3 ranks: the same numbers, up to rounding")


@pytest.mark.covers("H9")
@pytest.mark.slow
def test_mixed_precision_is_equal_with_its_own_tolerance(pool: Pool, tmp_path: Path) -> None:
    equal, said = verdict(pool, tmp_path, {"AUTOCAST": "True"})
    assert not equal
    assert "verify --tolerance 0.02" in said
    assert verdict(pool, tmp_path, {"AUTOCAST": "True"}, 0.05)[0]


@pytest.mark.slow
@pytest.mark.covers("H9")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"AFTER": "kept['best'] = f'of {world.size}'"}, "`kept.best`"),  # a word
        ({"ACCURACY": "(1 - 0.03 * world.rank)"}, "`accuracy`"),  # small compared with the tokens
        ({"rate = 0.1": "rate = 1e-5 * world.size"}, "`optimizer, group 0.lr`"),
        # Below any tolerance, but fixed shards must give the same bits.
        (
            {
                "SHARDS": "6",
                "rate = 0.1": "rate = 1e-6",
                "step.fold()": "step.fold(); model[0].weight.grad.mul_(world.size)",
            },
            "`optimizer, momentum_buffer of model.0.weight`",
        ),
        ({"SHARDS": "6", "loss = cross_entropy": "loss = (1 + 1e-6 * world.size) * cross_entropy"}, ", loss`"),
    ],
)
def test_a_difference_in_small_values_is_found(changes: dict[str, str], named: str, pool: Pool, tmp_path: Path) -> None:
    equal, said = verdict(pool, tmp_path, changes)
    assert not equal
    assert named in said.partition("UNEQUAL on 2 ranks")[2]


@pytest.mark.slow
def test_a_script_by_epochs_without_with_is_verified() -> None:
    lines: list[str] = []
    job = VerifyJob(EXAMPLES / "migrate" / "after" / "plain.py", steps=2)
    assert verify(job, [1, 2], lines.append), "\n".join(lines)
