"""What a launcher says of a failure: the culprit's error once, and a line for each other rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ddp_loop.elastic.failures import Ending, describe, describe_rest, find_first, read_ending
from ddp_loop.elastic.rank import leave_error

pytestmark = pytest.mark.covers("J6")

TRACE = "Traceback (most recent call last):\n  File x\nValueError: the labels are bad\n"
CULPRIT = Ending(2, 1, 5.0, TRACE, "ValueError: the labels are bad", " in forward of step 3", is_shown=False)
PEER = Ending(0, 1, 4.0, "rank 2 failed", "rank 2 failed", " in fold of step 3", is_peer=True, is_shown=False)


def left(folder: Path, **facts: object) -> str:
    """An error file, as a rank leaves it."""
    path = folder / "error.json"
    extra = {"py_callstack": TRACE, "timestamp": "7", **facts}
    path.write_text(json.dumps({"message": {"message": "ValueError: the labels are bad", "extraInfo": extra}}))
    return str(path)


def test_the_culprit_comes_first_with_its_traceback_and_the_others_have_a_line() -> None:
    endings = [PEER, CULPRIT, Ending(1, -15), Ending(3, 0)]
    assert describe(endings, []).splitlines() == [
        "ddp_loop: rank 2 failed in forward of step 3:",
        *TRACE.splitlines(),
        "ddp_loop: rank 0 was ended in fold of step 3",
        "ddp_loop: rank 1 was ended by SIGTERM",
        "ddp_loop: rank 3 ended with exit code 0",
    ]


def test_torchrun_names_the_rank_that_left_an_error_before_a_peer_that_ended_in_the_same_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the peer's second from its own clock, and the peer may come first."""
    files = {rank: str(tmp_path / f"error-{rank}.json") for rank in (0, 1)}
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", files[1])
    leave_error(ValueError("a"), "ValueError: a", TRACE, is_shown=True)
    found = {rank: ProcessFailure(rank, 2**22 + rank, 1, file) for rank, file in files.items()}
    rank, failure = ChildFailedError("train.py", found).get_first_failure()
    assert (rank, failure.error_file) == (1, files[1])


def test_the_culprit_is_red_on_a_terminal_and_the_rest_is_not() -> None:
    said = describe([PEER, CULPRIT], [4], is_coloured=True)
    red, _, rest = said.partition("\x1b[0m")
    assert red.startswith("\x1b[31mddp_loop: rank 2 failed")
    assert red.endswith("ValueError: the labels are bad")
    assert rest == (
        "\nddp_loop: rank 0 was ended in fold of step 3\nddp_loop: rank 4 has not ended by itself, and gets SIGTERM\n"
    )
    assert describe_rest([Ending(4, -9, is_by_launcher=True)], ["the ranks start again (restart 1 of 3)"]) == (
        "ddp_loop: rank 4 was killed by SIGKILL, which the launcher sent\n"
        "ddp_loop: the ranks start again (restart 1 of 3)\n"
    )
    assert describe_rest([], []) == ""


@pytest.mark.parametrize(
    ("endings", "first", "words"),
    [
        ([PEER, Ending(1, -9, 9.0)], 1, "rank 1 was killed by SIGKILL, by a user or for lack of memory\n"),
        (
            [PEER, Ending(1, -9, 9.0, lacked_memory=False)],
            1,
            "rank 1 was killed by SIGKILL, by a user or another program",
        ),
        ([PEER, Ending(1, -9, 9.0, lacked_memory=True)], 1, "rank 1 was killed by SIGKILL, for lack of memory\n"),
        ([PEER, Ending(1, -9, 9.0, is_by_launcher=True)], 0, "rank 0 was ended in fold of step 3: rank 2 failed\n"),
        (
            [PEER, Ending(1, -9, 9.0, is_by_launcher=True, is_stopped=True)],
            1,
            "rank 1 was stopped, as by SIGSTOP, so it did not answer, and the launcher killed it\n"
            "ddp_loop: rank 0 was ended in fold of step 3: rank 2 failed\n",
        ),
        ([Ending(0, 1, 1.0, TRACE, "RuntimeError: [gloo/transport/tcp] closed"), Ending(1, 3, 9.0)], 1, "rank 1 ended"),
        ([Ending(0, 74, 9.0)], 0, "rank 0 ended with exit code 74, since its run was not saved whole\n"),
        ([PEER, Ending(1, 3, 9.0)], 1, "rank 1 ended with exit code 3"),
        ([Ending(0, -15, 1.0), Ending(1, 2, 9.0)], 1, "rank 1 ended with exit code 2"),
        ([Ending(0, 1, 1.0), CULPRIT], 2, "rank 2 failed in forward of step 3"),
        ([Ending(0, 0), PEER], 0, "rank 0 was ended in fold of step 3: rank 2 failed"),
        ([Ending(0, 75, 1.0, is_peer=True)], 0, "rank 0 was ended, since another host was ended or a rank there"),
        ([Ending(0, 1, 1.0, TRACE, "x", " in fold of step 2")], 0, "rank 0 failed in fold of step 2, and has printed"),
        ([Ending(0, 1, 1.0), Ending(1, -15, 2.0, TRACE, "x")], 1, "rank 1 failed, and has printed its error"),
        ([PEER, Ending(1, -15, 1.0)], 0, "rank 0 was ended in fold of step 3: rank 2 failed"),
        (
            [PEER, Ending(1, -15, 1.0, "", "ended with exit code 3", " in data of step 1", is_shown=False)],
            1,
            "rank 1 ended with exit code 3 in data of step 1",
        ),
        ([Ending(0, -64, 1.0)], 0, "rank 0 was killed by "),
    ],
)
def test_the_culprit_is_who_failed_by_itself(endings: list[Ending], first: int, words: str) -> None:
    assert find_first(endings).rank == first
    assert describe(endings, []).startswith(f"ddp_loop: {words}")


def error_at(line: int, code: str) -> str:
    frames = f'  File "/lab/train.py", line 30, in <module>\n    main()\n  File "/lab/train.py", line {line}, in main\n'
    return f"Traceback (most recent call last):\n{frames}    {code}\n    ^^^^^^^^\nValueError: the labels are bad\n"


def test_another_rank_s_own_line_of_the_script_is_shown_where_it_is_not_the_culprit_s() -> None:
    first = replace(CULPRIT, error=error_at(12, "dl.evaluate(model, held_out)"))
    alike = replace(first, rank=0, at=6.0)
    apart = replace(alike, rank=1, error=error_at(20, "step.fold()"))
    other = replace(apart, rank=3, line="KeyError: 'x'\nmore")
    assert describe([first, alike, apart, other], []).startswith("ddp_loop: rank 0 failed in forward of step 3:\n")
    assert describe([first, alike, apart, other], []).splitlines()[-3:] == [
        "ddp_loop: rank 1 failed in forward of step 3 too, with the same error, at /lab/train.py:20: step.fold()",
        "ddp_loop: rank 2 failed in forward of step 3 too, with the same error",
        "ddp_loop: rank 3 failed in forward of step 3 too: KeyError: 'x', at /lab/train.py:20: step.fold()",
    ]


def test_an_ending_is_read_from_the_rank_s_file_or_is_its_exit_code_alone(tmp_path: Path) -> None:
    file = left(tmp_path, at=7.5, where=" in fold of step 2", is_peer=True, is_shown=False)
    ending = Ending(4, 1, 7.5, TRACE, "ValueError: the labels are bad", " in fold of step 2", True, False)
    assert read_ending(4, ProcessFailure(0, 1, 1, file)) == ending
    own = read_ending(4, ProcessFailure(0, 1, 1, left(tmp_path)))  # torch's own, of an error that the rank printed
    assert (own.is_shown, own.is_peer, own.at) == (True, False, 7.0)
    without = read_ending(1, ProcessFailure(1, 1, -9, "none"))
    assert (without.exit_code, without.error, without.is_peer) == (-9, "", False)
    assert read_ending(1, ProcessFailure(1, 1, 75, "none")).is_peer
