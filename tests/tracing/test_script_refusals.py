"""Scripts that `verify` cannot verify, and how it measures differences."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_loop.cli import main
from ddp_loop.distributed import Pool
from ddp_loop.profiling import profile
from ddp_loop.tracing import CannotVerify
from ddp_loop.tracing.compare import DifferenceMeter, apart, is_close, kind_of
from tests.support.scripts import verdict_of, write

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
        ("return", "script.py made none on 1 rank"),
        ("if len(sys.argv) < 2: sys.exit('give me a folder')", "ended by sys.exit('give me a folder')"),
        ("if world.size == 2: raise LookupError('no second part')", "fails on 2 ranks"),
        ("if world.rank == 1: raise LookupError('no second part')", "LookupError: no second part"),
        ("print('so far')\n        1 / 0", "The last output of rank 0:\n  so far"),
    ],
)
def test_a_script_that_cannot_be_verified_raises_with_the_reason(
    line: str, said: str, pool: Pool, tmp_path: Path
) -> None:
    with pytest.raises(CannotVerify) as refused:
        verdict_of(write(tmp_path, TRAINS.replace("HERE", line)), pool, (1, 2))
    assert said in str(refused.value)


def test_sinks_write_nothing_under_verify_and_profile_and_a_plain_function_gets_rows(
    pool: Pool, tmp_path: Path
) -> None:
    sinks = "on_row=[csv_sink(sys.argv[1] + '/rows.csv'), tensorboard_sink(sys.argv[1]), print], progress=False"
    text = TRAINS.replace("HERE", "pass").replace("progress=False", sinks)
    script = Path(write(tmp_path, "from ddp_loop.sinks import csv_sink, tensorboard_sink\n" + text))
    folder = tmp_path / "written"
    folder.mkdir()
    assert verdict_of(script, pool, (1, 2), arguments=[str(folder)])[0]
    profile(script, 1, [str(folder)], lambda line: None, steps=1, start=pool.run)
    assert list(folder.iterdir()) == []
    script.write_text(script.read_text().replace(", print]", ", lambda row: 1 / 0]"))
    with pytest.raises(CannotVerify, match="division by zero"):
        verdict_of(script, pool, (1, 2), arguments=[str(folder)])


def test_a_script_gets_its_arguments_and_is_stopped_early(pool: Pool, tmp_path: Path) -> None:
    script = write(tmp_path, TRAINS.replace("HERE", "assert sys.argv[1:] == ['--data', 'here'], sys.argv"))
    equal, said = verdict_of(script, pool, (1, 2), arguments=["--data", "here"], steps=2)
    assert equal
    assert said.splitlines()[1:] == [
        "2 ranks, 2 shards, 2 steps, against 1 rank: the same bits",
        "",
        "EQUAL on 1, 2 ranks: the same bits, in the whole state after 2 steps.",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("verify nowhere.py", "nowhere.py does not exist"),
        ("verify .", ". is a folder. Check its path."),
        ("verify x.py --ranks 2", "two or more different numbers of ranks"),
        ("verify x.py --ranks 1,two", "two or more different numbers of ranks"),
        ("verify x.py --steps 0", "a whole number, 1 or more"),
        ("verify x.py --tolerance 2", "must be between 0 and 1"),
        ("verify", "the following arguments are required: SCRIPT"),
        ("diff here", "the following arguments are required: RUN"),
    ],
)
def test_bad_arguments_are_refused(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(arguments.split())
    except SystemExit as refused:
        code = refused.code
    assert code == 2
    assert said in capsys.readouterr().err


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("one", "other", "scale", "relative"),
    [
        ([1.0, 1.0], [1.0, 1.0], 0.0, 0.0),
        ([1.0, 100.0], [1.01, 100.0], 0.0, 1e-4),
        ([1e-9], [-1e-9], 0.01, 2e-7),  # rounding, with a gradient of 1 elsewhere
        (torch.ones(1).double(), torch.ones(1).double() + 1e-8, 0.0, 1e-8),
        (torch.tensor([60000.0]).half(), torch.tensor([-60000.0]).half(), 0.0, 2.0),
        ([3e38], [-3e38], 0.0, 2.0),
        ([1 + 1j], [1 + 1.1j], 0.0, 0.0707),
        ([1], [2], 0.0, INF),
        ([1.0], [NAN], 0.0, INF),
        ([INF, 1.0], [-INF, 1.0], 0.0, INF),
        ([NAN, INF, 1.0], [NAN, INF, 1.0], 0.0, 0.0),
        ([NAN, INF, 1.0], [NAN, INF, 1.1], 0.0, 0.1),
        ([True, False], [True, True], 0.0, INF),
        ([1.0], [1], 0.0, INF),
        ([1.0, 1.0], [1.0], 0.0, INF),
    ],
)
def test_a_difference_is_relative(one: Any, other: Any, scale: float, relative: float) -> None:
    one = torch.as_tensor(one)
    assert apart(one, torch.as_tensor(other), scale) == pytest.approx(relative, rel=0.01)
    assert DifferenceMeter(0.0, is_given=False).measure("loss", one, None) == INF


def test_a_difference_of_the_last_bits_is_measured() -> None:
    one = torch.ones(1)
    assert apart(one, torch.nextafter(one, torch.full((1,), 2.0)), 0.0) == 2.0**-23  # 1 unit in the last place
    assert apart(one, one + 2.0**-13, 0.0) == 2.0**-13


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1.0, 1.009, True),
        (1.0, 1.02, False),
        (0.0, 9e-6, True),  # the least scale is 0.001
        (0.0, 2e-5, False),
        (NAN, NAN, True),
        (INF, INF, True),
        (INF, -INF, False),
        (INF, 1.0, False),
        (NAN, 1.0, False),
    ],
)
def test_results_are_close_up_to_the_tolerance(one: float, other: float, expected: bool) -> None:
    assert is_close(one, other, 0.01) == is_close(other, one, 0.01) == expected


def test_values_are_of_five_kinds() -> None:
    kinds = {
        "loss": "row",
        "pass 2, loss": "row",
        "pass 2, gradient of model.0.weight": "gradient",
        "parameter model.0.weight": "parameter",
        "buffer model.1.running_mean": "buffer",
        "optimizer, group 0.lr": "state",
        "scheduler.last_epoch": "state",
    }
    assert {name: kind_of(name) for name in kinds} == kinds
