"""`verify` of scripts whose buffers depend on the shards: never EQUAL, with the buffer's name and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_loop.distributed import Pool
from ddp_loop.tracing import CannotVerify
from tests.support.scripts import changed, verdict_of, write

SCRIPT = """
import torch
from torch import nn
import ddp_loop as dl

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.ones(3))

    def forward(self, rows):
        with torch.no_grad():
            WRITE
        return rows

with dl.join_world(seed=0) as world:
    rows = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(Layer(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = dl.Batches(rows, 12, world, shards=SHARDS)
    loop = dl.Loop(batches, 1, state={"model": model, "optimizer": optimizer}, RULES progress=False)
    for step in loop:
        for some in step:
            step.backward(model(some).square().mean())
        step.fold()
        optimizer.step()
        AFTER
"""
USUAL = {"SHARDS": "None", "RULES": "", "AFTER": "pass"}
CODEBOOK = "self.kept.mul_(0.9).add_(rows.sum(0), alpha=0.1)"
MAXIMUM = "self.kept.copy_(torch.maximum(self.kept, rows.amax(0)))"
ROTARY = "self.kept = 1.0 / (1e4 * rows.abs().max()) ** torch.arange(3.0)"


@pytest.mark.covers("H9")
@pytest.mark.parametrize(("write_it", "shards"), [(CODEBOOK, "None"), (ROTARY, "6")], ids=["codebook", "rotary"])
def test_a_buffer_that_depends_on_the_shards_fails_with_its_name_also_if_they_are_fixed(
    write_it: str, shards: str, pool: Pool, tmp_path: Path
) -> None:
    script = write(tmp_path, changed(SCRIPT, {**USUAL, "WRITE": write_it, "SHARDS": shards}))
    with pytest.raises(CannotVerify) as refused:
        verdict_of(script, pool, (1, 2), steps=3)
    assert f"fails on {'1 rank' if shards == '6' else '2 ranks'}" in str(refused.value)
    assert "Every shard must change a buffer alike" in str(refused.value)
    assert "model.0.kept" in str(refused.value)
    assert "docs/buffers.md" in str(refused.value)


@pytest.mark.covers("H9")
@pytest.mark.slow
def test_buffers_with_the_right_rule_are_equal(pool: Pool, tmp_path: Path) -> None:
    script = "".join(
        changed(SCRIPT, {"WRITE": write_it, "RULES": rules, "AFTER": after, "SHARDS": shards})
        for write_it, rules, after, shards in (
            (MAXIMUM, 'buffer_reduction={"model.0.kept": "max"},', "pass", "None"),
            ("self.kept.lerp_(rows.mean(0), 0.1)", 'buffer_reduction={"model.0.kept": "mean"},', "pass", "6"),
            ("self.kept.lerp_(rows.mean(0), 0.1)", 'buffer_reduction={"model.0.kept": "mean"},', "pass", "None"),
            ("self.kept.mul_(0.9)", "", "pass", "6"),
            ("pass", "", "model[0].kept.lerp_(model[1].weight[0].detach(), 0.1)", "None"),
        )
    )
    equal, said = verdict_of(write(tmp_path, script), pool, steps=3)
    assert equal, said


@pytest.mark.covers("H9")
def test_a_rule_that_is_not_exact_is_unequal_and_not_only_advised_to_fix_the_shards(pool: Pool, tmp_path: Path) -> None:
    rules = 'buffer_reduction={"model.0.kept": "first"},'
    script = write(tmp_path, changed(SCRIPT, {**USUAL, "WRITE": MAXIMUM, "RULES": rules}))
    equal, said = verdict_of(script, pool, (1, 2), steps=3)
    assert not equal, said
    assert "fold: `buffer model.0.kept` is off" in said
    assert "has a rule that is not exact for it (buffer_reduction=)" in said
    assert "after step.gather (docs/buffers.md)" in said
