"""Scripts that `verify` cannot verify, and how it measures differences."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from ddp_loop.cli import main
from ddp_loop.distributed import Pool
from ddp_loop.tracing import CannotVerify, VerifyJob, verify
from ddp_loop.tracing.compare import apart, kind_of

TRAINS = """
import sys
import torch
import ddp_loop as dl

def main():
    with dl.join_world(seed=0) as world:
        model = torch.nn.Linear(3, 1)
        loop = dl.Loop(dl.Batches(torch.ones(12, 3), 4, world, shards=2), 2, state={"model": model}, progress=False)
        HERE
        for step in loop:
            for rows in step:
                step.backward(model(rows).mean())
            step.fold()

main()
"""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("return", "made none on 1 rank"),
        ("if len(sys.argv) < 2: sys.exit('give me a folder')", "ended by sys.exit('give me a folder')"),
        ("if world.size == 2: raise LookupError('no second part')", "fails on 2 ranks"),
        ("if world.rank == 1: raise LookupError('no second part')", "LookupError: no second part"),
        ("print('so far')\n        1 / 0", "The last output of rank 0:\n  so far"),
    ],
)
def test_a_script_that_cannot_be_verified_raises_with_the_reason(
    line: str, said: str, pool: Pool, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS.replace("HERE", line))
    with pytest.raises(CannotVerify) as refused:
        verify(VerifyJob(script, timeout_s=60.0, start=pool.run), [1, 2], lambda line: None)
    assert said.replace("it made none", f"{script} made none") in str(refused.value)


def test_a_script_gets_its_arguments_and_is_stopped_early(pool: Pool, tmp_path: Path) -> None:
    script, lines = tmp_path / "train.py", list[str]()
    script.write_text(TRAINS.replace("HERE", "assert sys.argv[1:] == ['--data', 'here'], sys.argv"))
    job = VerifyJob(script, ["--data", "here"], steps=2, timeout_s=60.0, start=pool.run)
    assert verify(job, [1, 2], lines.append)
    assert lines[1:] == [
        "2 ranks, 2 shards, 2 steps, against 1 rank: the same bits",
        "\nEQUAL on 1, 2 ranks: the same bits, in the whole state after 2 steps.",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verify", "nowhere.py"], "nowhere.py does not exist"),
        (["verify", "x.py", "--ranks", "2"], "two or more different numbers of ranks"),
        (["verify", "x.py", "--ranks", "1,two"], "two or more different numbers of ranks"),
        (["verify", "x.py", "--steps", "0"], "a whole number, 1 or more"),
        (["verify"], "the following arguments are required: SCRIPT"),
        (["diff", "here"], "the following arguments are required: RUN"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as refused:
        code = refused.code
    assert code == 2
    assert said in capsys.readouterr().err


INF = math.inf


@pytest.mark.parametrize(
    ("one", "other", "scale", "relative"),
    [
        (torch.ones(3), torch.ones(3), 0.0, 0.0),
        (torch.tensor([1.0, 100.0]), torch.tensor([1.01, 100.0]), 0.0, 1e-4),
        (torch.tensor([1e-9]), torch.tensor([-1e-9]), 0.01, 2e-7),  # rounding, with a gradient of 1 elsewhere
        (torch.ones(1).double(), torch.ones(1).double() + 1e-8, 0.0, 1e-8),
        (torch.tensor([60000.0]).half(), torch.tensor([-60000.0]).half(), 0.0, 2.0),
        (torch.tensor([3e38]), torch.tensor([-3e38]), 0.0, 2.0),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 1.1j]), 0.0, 0.0707),
        (torch.tensor([1]), torch.tensor([2]), 0.0, INF),
        (torch.tensor([1.0]), torch.tensor([math.nan]), 0.0, INF),
        (torch.tensor([INF, 1.0]), torch.tensor([-INF, 1.0]), 0.0, INF),
        (torch.tensor([math.nan, INF, 1.0]), torch.tensor([math.nan, INF, 1.0]), 0.0, 0.0),
        (torch.tensor([math.nan, INF, 1.0]), torch.tensor([math.nan, INF, 1.1]), 0.0, 0.1),
        (torch.tensor([True, False]), torch.tensor([True, True]), 0.0, INF),
        (torch.ones(3), torch.ones(3).double(), 0.0, INF),
        (torch.ones(3), torch.ones(2), 0.0, INF),
        (torch.ones(3), None, 0.0, INF),
    ],
)
def test_a_difference_is_relative(one: torch.Tensor, other: torch.Tensor | None, scale: float, relative: float) -> None:
    assert apart(one, other, scale)[0] == pytest.approx(relative, rel=0.01)


def test_a_difference_is_measured_in_bits() -> None:
    one = torch.ones(1)
    assert apart(one, torch.nextafter(one, torch.full((1,), 2.0)), 0.0)[1] == 1.0  # 1 unit in the last place
    assert apart(one, one + 2.0**-13, 0.0)[1] == pytest.approx(10, abs=0.01)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("loss", "row"),
        ("pass 2, loss", "row"),
        ("pass 2, gradient of model.0.weight", "gradient"),
        ("parameter model.0.weight", "parameter"),
        ("buffer model.1.running_mean", "buffer"),
        ("optimizer, group 0.lr", "state"),
        ("scheduler.last_epoch", "state"),
    ],
)
def test_values_are_of_five_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind
