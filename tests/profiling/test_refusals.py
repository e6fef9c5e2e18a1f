"""What `profile` refuses, and scripts that it cannot measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ddp_loop as dl
from ddp_loop.cli import main
from ddp_loop.profiling import WARM_UP, CannotProfile
from tests.support.cases import make_data
from tests.support.harness import OnRanks
from tests.support.profiles import planted, profiled
from tests.support.refusals import Refused
from tests.support.scripts import run

pytestmark = pytest.mark.covers("J11")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["profile", "nowhere.py"], "nowhere.py does not exist"),
        (["profile", "."], ". is a folder. Check its path."),
        (["profile", "x.py", "--steps", "0"], "a whole number, 1 or more (got 0)"),
        (["profile", "x.py", "--ranks", "two"], "a whole number, 1 or more (got two)"),
        (["profile"], "the following arguments are required: SCRIPT"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as refused:
        code = refused.code
    assert code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("return", "made none on 2 ranks"),
        ("if len(sys.argv) < 2: sys.exit('give me a folder')", "ended by sys.exit('give me a folder')"),
        ("print('so far'); 1 / 0", "The last output of rank 0:\n  so far"),
        ("sys.stdout.buffer.write(b'\\xff so far'); 1 / 0", "The last output of rank 0:\n  \ufffd so far"),
        ("exec('x = (')", "raised SyntaxError: '(' was never closed"),
    ],
)
def test_a_script_that_makes_no_step_raises_with_the_reason(
    line: str, said: str, on_ranks: OnRanks, tmp_path: Path
) -> None:
    with pytest.raises(CannotProfile) as refused:
        profiled(on_ranks, planted(tmp_path, "BEFORE", line))
    assert said in str(refused.value)


def test_more_steps_than_the_run_has_are_refused_with_the_most_that_it_has(on_ranks: OnRanks, tmp_path: Path) -> None:
    with pytest.raises(CannotProfile) as refused:
        profiled(on_ranks, planted(tmp_path), steps=16)
    assert (
        f"A profile measures steps after the first {WARM_UP}. Got profile=16 and a run of 20 steps. Ask for 15 at most "
        "(profile=15, --steps 15), or train for more epochs."
    ) in str(refused.value)


def test_what_was_measured_is_reported_where_the_script_fails(on_ranks: OnRanks, tmp_path: Path) -> None:
    said: list[str] = []
    script = planted(tmp_path, "AFTER", "assert step.iteration < 8 or world.rank == 0")
    with pytest.raises(CannotProfile, match=r"fails on 2 ranks:\nrank 1 raised AssertionError"):
        profiled(on_ranks, script, said, steps=10)
    assert said[0].startswith(f"Profile: 2 of 10 steps after {WARM_UP} of warm-up, 2 ranks on cpu.")


def test_traces_that_could_not_be_written_are_not_announced(on_ranks: OnRanks, tmp_path: Path) -> None:
    said = "\n".join(profiled(on_ranks, planted(tmp_path), traces=Path(__file__) / "traces"))
    assert "No Chrome trace was written into" in said
    assert "Not a directory" in said
    assert "perfetto" not in said


def test_each_loop_of_a_script_has_a_table_and_one_that_ends_in_its_warm_up_says_so(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    script = planted(
        tmp_path, "AFTER", "if step.iteration == 3 and len(sys.argv) < 2: sys.argv.append(''); main(); break"
    )
    lines = profiled(on_ranks, script)
    assert lines[0] == "Loop 1"
    assert lines[1] == "Profile: no step was measured, since the run ended within its first 6 steps."
    assert lines[2] == "Loop 2"
    assert lines[3].startswith("Profile: 5 steps after 5 of warm-up, 2 ranks on cpu.")


SHORT = (
    "for step in dl.Loop(batches, 1, steps=5, state=state, progress=False): "
    "[step.backward(model(rows).mean()) for rows in step]; step.fold(); optimizer.step()"
)


def test_a_loop_that_is_too_short_does_not_end_the_profile_of_the_others(on_ranks: OnRanks, tmp_path: Path) -> None:
    lines = profiled(on_ranks, planted(tmp_path, "BEFORE", SHORT))
    assert lines[:2] == ["Loop 1", "Profile: no step was measured, since the run ended within its first 6 steps."]
    assert lines[3].startswith("Profile: 5 steps after 5 of warm-up, 2 ranks on cpu.")
    with pytest.raises(CannotProfile, match=r"after the first 5\. No Loop of .* made more on 2 ranks\. Train for more"):
        profiled(on_ranks, planted(tmp_path, "BEFORE", f"{SHORT}\n        return"))


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_others_are_reported(tmp_path: Path) -> None:
    script = planted(tmp_path, "AFTER", "step.iteration < 9 or world.rank == 0 or os.kill(os.getpid(), 9)")
    ended = run("-m", "ddp_loop", "profile", str(script), "--steps", "10")
    assert ended.returncode == 2
    assert ended.stdout.startswith(f"{script} runs to its end, and each Loop ends early, without a run folder. ")
    assert "2 ranks on cpu, without rank 1, which sent no times." in ended.stdout
    assert "rank 1 died by signal 9 (SIGKILL)" in ended.stderr


def loop_of(world: dl.World, folder: str, profile: Any) -> None:
    model = torch.nn.Linear(6, 3).double()
    given = profile[world.rank] if isinstance(profile, list) else profile
    batches = dl.Batches(make_data((6,), 40), 4, world)
    dl.Loop(batches, 1, state={"model": model}, progress=False, profile=given)


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        (0, "profile"),
        (6, "Ask for 5 at most"),
        ([4, None], "profile of Loop must be the same on every rank. Rank 0 has profile=4, rank 1 has profile=None"),
    ],
)
def test_a_bad_number_is_refused_on_all_ranks(profile: object, said: str, refused: Refused) -> None:
    refused(2, loop_of, profile, kind="ValueError", said=said, by=None)
