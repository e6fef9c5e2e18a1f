"""`python -m ddp_loop verify`: correct scripts are equal on any number of ranks, and planted faults are named."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_loop.distributed import Pool
from ddp_loop.tracing import CannotVerify
from tests.support.paths import EXAMPLES, ROOT
from tests.support.scripts import verdict_of

DIGITS = EXAMPLES / "digits" / "train.py"

# Where a fault is planted: a line of the digit example.
BEFORE_TRAINING = '        state = {"model": model, "optimizer": optimizer}\n'
SHARD = "                    logits = forward(images).float()\n"
FOLD = "            step.fold()\n"
UPDATE = "            optimizer.step()\n"
BATCHES = "dl.Batches(train, batch_size, world, shards=arguments.shards)"
BACKWARD = "step.backward(cross_entropy(logits, labels),"
LOOP = "state=state, **watching)"
Change = tuple[str, str]
UNCHECKED: Change = (LOOP, f"check_replicas_every=0, {LOOP}")  # else the Loop itself raises ReplicaMismatch


def after(line: str, *new: str) -> Change:
    """New lines after one, with its indentation."""
    depth = line[: len(line) - len(line.lstrip())]
    return line, line + "".join(f"{depth}{one}\n" for one in new)


def before(line: str, *new: str) -> Change:
    """New lines before one, with its indentation."""
    depth = line[: len(line) - len(line.lstrip())]
    return line, "".join(f"{depth}{one}\n" for one in new) + line


def digit_script(folder: Path, *changes: Change) -> Path:
    """A copy of the digit example with lines changed."""
    text = DIGITS.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path = folder / "train.py"
    path.write_text(text)
    return path


SMALL = ("--batch-size", "26", "--epochs", "1", "--device", "cpu")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddp_loop", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.covers("H9")
def test_the_digit_example_gives_the_same_bits_on_1_2_and_3_ranks_with_fixed_shards() -> None:
    ended = command("verify", "examples/digits/train.py", "--steps", "3", "--", "--shards", "6", *SMALL)
    assert (
        ended.stdout.splitlines()[-1] == "EQUAL on 1, 2, 3 ranks: the same bits, in the whole state after 3 steps."
    ), ended.stdout + ended.stderr
    assert ended.stdout.count("the same bits") == 3
    assert ended.returncode == 0


@pytest.mark.covers("H9")
@pytest.mark.slow
def test_with_one_shard_per_rank_local_batch_norm_is_unequal_and_the_remedy_is_named(
    pool: Pool, tmp_path: Path
) -> None:
    equal, said = verdict_of(digit_script(tmp_path), pool, (1, 2), arguments=SMALL, steps=3)
    assert not equal
    assert "UNEQUAL on 2 ranks. Step 1, fold: `gradient of model." in said
    assert "into 1 and 2 shards" in said
    assert re.search(r"largest difference of the gradients: .*, [\d,]+ times the tolerance for rounding$", said, re.M)
    assert "batch norm" in said
    assert "--shards" in said


FAULTS: dict[str, tuple[list[Change], str]] = {
    "forgot the weight: a mean of the ranks' means decides on the rate": (
        [
            before(BEFORE_TRAINING, "right, seen = 0, 0"),
            after(SHARD, "right, seen = right + hits(logits, labels).sum(), seen + len(labels)"),
            after(
                FOLD,
                "mean = world.sum(right / seen) / world.size",
                "optimizer.param_groups[0]['lr'] = 0.01 + 0.01 * float(mean)",
            ),
        ],
        "`optimizer, group 0.lr` differs first",
    ),
    "a seed that depends on the rank": (
        [
            (
                SHARD,
                "                    torch.manual_seed(world.rank + step.iteration)\n"
                "                    logits = forward(images + 0.1 * torch.randn_like(images)).float()\n",
            )
        ],
        "forward: `shard 3, loss` differs first",
    ),
    "an evaluation of the rank's own part": (
        [
            after(
                FOLD,
                "own = test.images[world.rank :: world.size][:20].float() / 255",
                "with torch.no_grad():",
                "    optimizer.param_groups[0]['lr'] = 0.01 * float(model(own).std())",
            ),
            UNCHECKED,
        ],
        "`optimizer, group 0.lr` differs first",
    ),
    "a buffer of rank 0": (
        [
            before(BEFORE_TRAINING, "model.register_buffer('level', torch.zeros(()))"),
            before(SHARD, "model.level.copy_(images.mean())"),
            (
                LOOP,
                "buffer_reduction={'model.level': 'local'}, state=state, **watching)",
            ),
            after(FOLD, "world.broadcast(model.level)"),
        ],
        "`buffer model.level` differs first",
    ),
    "a branch of one rank": (
        [before(UPDATE, "if world.rank == 1:", "    model[0].weight.grad.mul_(1.5)"), UNCHECKED],
        "optimizer: `optimizer, momentum_buffer of model.0.weight` differs first",
    ),
    "an unkeyed dropout": (
        [
            before(BEFORE_TRAINING, "own = torch.Generator().manual_seed(7)"),
            before(SHARD, "images = images * (torch.rand(images.shape, generator=own) > 0.1)"),
        ],
        "forward: `shard 3, loss` differs first",
    ),
    # Faults that are in no list of known causes.
    "a loss divided by the number of ranks": (
        [(BACKWARD, "step.backward(cross_entropy(logits, labels) / world.size,")],
        "forward: `shard 0, loss` differs first",
    ),
    "a hook that scales a layer's gradient by the number of ranks": (
        [
            before(
                BEFORE_TRAINING,
                "model[4].register_full_backward_hook(lambda _, slopes, __: (slopes[0] * world.size,))",
            )
        ],
        "backward: `shard 0, gradient of model.3.bias` differs first",
    ),
    "a transform that draws from a generator of its own": (
        [
            before(BEFORE_TRAINING, "draw = __import__('random').Random(3).random"),
            before(
                BEFORE_TRAINING,
                f"batches = {BATCHES[:-1]}, transform=lambda data, draws: (data[0] + draw(), data[1]))",
            ),
        ],
        "data: `shard 3, part 0` differs first",
    ),
    "one more update where there are two ranks": (
        [after(UPDATE, "if world.size == 2 and step.iteration == 2:", "    optimizer.step()")],
        "Step 2, optimizer: `optimizer, momentum_buffer of model.0.weight` differs first",
    ),
    "another order of the data": (
        [(BATCHES, f"{BATCHES[:-1]}, seed=world.size)")],
        "data: `samples` differs first",
    ),
    "other start weights": (
        [before(BEFORE_TRAINING, "with torch.no_grad():", "    model[6].bias.add_(0.01 * world.size)")],
        "Before the first step: `parameter model.6.bias` differs first",
    ),
}


@pytest.mark.covers("H9")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
def test_a_planted_fault_is_found_and_the_tensor_is_named(fault: str, pool: Pool, tmp_path: Path) -> None:
    changes, named = FAULTS[fault]
    script = digit_script(tmp_path, *changes)
    equal, said = verdict_of(script, pool, (1, 2), arguments=("--shards", "6", *SMALL), steps=3)
    assert not equal
    assert "UNEQUAL on 2 ranks" in said
    assert named in said.partition("UNEQUAL")[2]


@pytest.mark.slow
def test_a_hook_on_a_parameter_is_named_with_fixed_shards_too(pool: Pool, tmp_path: Path) -> None:
    """On every number of ranks it would clamp four times, so equal bits prove nothing."""
    script = digit_script(tmp_path, before(BEFORE_TRAINING, "model[3].weight.register_hook(lambda g: g.clamp(-1, 1))"))
    with pytest.raises(CannotVerify, match=r"model\.3\.weight has one of register_hook\. Change and read \.grad after"):
        verdict_of(script, pool, (1, 2), arguments=("--shards", "4", *SMALL), steps=3)
