"""Verdicts of `verify`: no false alarm, and no small difference missed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_loop.distributed import Pool
from tests.support.scripts import changed, verdict_of, write

SCRIPT = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
import ddp_loop as dl

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

DOUBLE = {"rate = 0.1": "rate = 0.1; data = data[0].double(), data[1]"}
USUAL = {
    "SHARDS": "None",
    "MODEL": "mlp()",
    "OPTIMIZER": "torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)",
    "ORDERED": "None",
    "AUTOCAST": "False",
    "ACCURACY": "1",
    "AFTER": "pass",
}


def script_of(changes: dict[str, str]) -> str:
    return changed(SCRIPT, {**USUAL, **changes})


def verdict(pool: Pool, folder: Path, changes: dict[str, str], tolerance: float | None = None) -> tuple[bool, str]:
    return verdict_of(write(folder, script_of(changes)), pool, (1, 2), steps=6, tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.covers("H9")
def test_runs_that_are_equal_up_to_rounding_are_reported_as_equal(pool: Pool, tmp_path: Path) -> None:
    adam = "torch.optim.Adam(model.parameters(), lr=0.01)"
    unordered = {"MODEL": "normed()", "SHARDS": "3", "ORDERED": "False", "OPTIMIZER": adam}
    double = {"MODEL": "mlp().double()", "AFTER": "kept['best'] = str(step.iteration)", **DOUBLE}
    equal, said = verdict_of(write(tmp_path, script_of(unordered) + script_of(double)), pool, steps=6)
    assert equal, said
    assert said.splitlines()[-1].startswith("EQUAL on 1, 2, 3 ranks: the same numbers, up to rounding")


@pytest.mark.covers("H9")
def test_a_difference_far_below_the_tolerance_is_not_told(pool: Pool, tmp_path: Path) -> None:
    equal, said = verdict_of(write(tmp_path, script_of({"MODEL": "mlp().double()", **DOUBLE})), pool, (1, 2), steps=1)
    assert equal, said
    assert said.splitlines()[1:] == [
        "2 ranks, 2 shards, 1 step, against 1 rank",
        "",
        "EQUAL on 1, 2 ranks: the same numbers, up to rounding, in the whole state after 1 step.",
    ]


PAIRS = {"cross_entropy(logits, labels)": "cross_entropy(logits @ logits.T, torch.arange(len(logits)))"}


@pytest.mark.covers("H9")
def test_the_remedy_of_a_loss_over_pairs_is_named_once_for_all_numbers_of_ranks(pool: Pool, tmp_path: Path) -> None:
    equal, said = verdict_of(write(tmp_path, script_of(PAIRS)), pool, (1, 2, 3), steps=2)
    assert not equal
    on_2, _, on_3 = said.partition("UNEQUAL on 3 ranks")
    assert "needs the whole mini-batch, by step.hold and step.gather (docs/buffers.md)" in on_2
    assert "step.gather" not in on_3
    assert on_3.endswith("The rest is as above.\n")


@pytest.mark.covers("H9")
def test_the_remedy_of_a_loss_over_pairs_is_named_with_fixed_shards(pool: Pool, tmp_path: Path) -> None:
    equal, said = verdict(pool, tmp_path, {"SHARDS": "2", **PAIRS})
    assert equal, said
    assert "needs the whole mini-batch, by step.hold and step.gather (docs/buffers.md)" in said


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
        ({"SHARDS": "6", "loss = cross_entropy": "loss = (1 + 1e-6 * world.size) * cross_entropy"}, ", loss`"),
    ],
)
def test_a_difference_in_small_values_is_found(changes: dict[str, str], named: str, pool: Pool, tmp_path: Path) -> None:
    equal, said = verdict(pool, tmp_path, changes)
    assert not equal
    assert named in said.partition("UNEQUAL on 2 ranks")[2]
