"""Files of rows that a disk, a crash or a hand damaged: good rows stay, others are kept aside, and gaps are said."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.checkpoint.atomic_files import SAVING
from ddp_loop.cli import main
from ddp_loop.determinism import digest
from ddp_loop.monitor.run_view import RunView
from ddp_loop.reporting.jsonl import CHUNK, JsonlWriter
from ddp_loop.reporting.rows import EpochMeans
from tests.faults.damage_run import damage_runs
from tests.support.harness import OnRanks
from tests.support.runs import lines_of
from tests.support.serving import row, write_lines

pytestmark = pytest.mark.covers("E1", "E3")

ROWS, EVALUATIONS, RANKS, ASIDE = "rows.jsonl", "evaluations.jsonl", "ranks.jsonl", "rows.damaged.jsonl"
LOGGED, TEXTS = "logged.jsonl", "texts.jsonl"
STEPS, AT = 12, 9  # of the checkpoint from which the run resumes
NULS = b"\0" * 700


def train(folder: str, stop_at: int = 0, fail_at: int = 0) -> tuple[str, str]:
    """What rank 0 printed, and a digest of the weights. Evaluates after every third step."""
    said = io.StringIO()
    with redirect_stdout(said), dl.join_world(seed=0) as world:
        torch.manual_seed(1)
        model = nn.Linear(3, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        data = torch.randn(4 * STEPS, 3, generator=torch.Generator().manual_seed(2)).double()
        state = {"model": model, "optimizer": optimizer}
        loop = dl.Loop(
            dl.Batches(data, 4, world, shards=2), 1, state=state, run_dir=folder, save_every=AT, progress=False
        )
        with suppress(dl.Stopped):
            for step in loop:
                for rows in step:
                    step.backward(model(rows).square().mean(), half=0.5)
                step.fold()
                optimizer.step()
                loop.log(twice=2 * step.iteration)
                if step.iteration == 3:
                    loop.log_text("note", "three")
                if step.iteration % 3 == 0:
                    dl.evaluate(model, dl.Batches(data, 8, world), mean=lambda output, rows: output.squeeze(1))
                if step.iteration == fail_at:
                    break
                if step.iteration == stop_at:
                    loop.stop()
    return said.getvalue(), digest(torch.cat([one.detach().flatten() for one in model.parameters()]))


def iterations_of(run: Path, name: str = ROWS) -> list[int]:
    return [row["iteration"] for row in lines_of(run / name)]


@pytest.fixture(scope="module")
def whole(pool: dl.Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that was never disturbed, and its weights."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, pool.run(train, 2, str(folder))[0][1]


@pytest.fixture
def run(pool: dl.Pool, whole: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """A run that was left in step 11, with a checkpoint of step 9."""
    left = whole[0].with_name("left")
    if not left.exists():
        pool.run(train, 2, str(left), 0, 11)
    return Path(shutil.copytree(left, tmp_path / "run"))


# -- what can happen to a file -----------------------------------------------------------------------------------

# Of the lines of 11 rows; the rows of the first 9 that stay, the lines kept aside, and the notice about both.
STRANGE = [b"[1, 2]\n", b'{"loss": 1.0}\n', b"[" * 5000 + b"\n", b"\n"]
Damage = Callable[[list[bytes]], list[bytes]]
DAMAGES: dict[str, tuple[Damage, list[int], int, str]] = {
    "a flipped bit": (
        lambda lines: [*lines[:3], lines[3].replace(b'"loss"', b"\x93\xfeloss"), *lines[4:]],
        [1, 2, 3, 5, 6, 7, 8, 9], 1, "row 4 is missing from rows.jsonl",
    ),
    "no rows": (
        lambda lines: [
            *lines[:5], *STRANGE, lines[5].replace(b'"loss": ', b'"loss": "x", "l": '),
            lines[5].replace(b'"iteration": 6', b'"iteration": true'), *lines[6:],
        ],
        [1, 2, 3, 4, 5, 7, 8, 9], 6, "row 6 is missing from rows.jsonl",
    ),
    "a lost page": (
        lambda lines: [*lines[:2], lines[2][:40] + NULS + lines[6][20:], *lines[7:]],
        [1, 2, 8, 9], 1, "rows 3 to 7 are missing from rows.jsonl",
    ),
    "NULs before a row": (lambda lines: [*lines[:4], NULS + lines[4], *lines[5:]], [*range(1, 10)], 1, ""),
    "rows twice": (
        lambda lines: [*lines[:4], lines[3].replace(b'"half": 0.5', b'"half": 7.0'), *lines[3:]], [*range(1, 10)], 2, ""
    ),
    "another order": (
        lambda lines: [*lines[6:], *lines[:6]], [*range(1, 10)], 0, "the rows of rows.jsonl are put in order"
    ),
    "a huge line": (
        lambda lines: [*lines[:4], b'{"' + b"x" * (3 * CHUNK) + b'": 1}\n', *lines[4:]], [*range(1, 10)], 1, ""
    ),
    "a short file": (
        lambda lines: [*lines[:4], lines[4][:50]], [1, 2, 3, 4], 1, "rows 5 to 9 are missing from rows.jsonl"
    ),
    "no last newline": (lambda lines: [*lines[:8], lines[8].rstrip(b"\n")], [*range(1, 10)], 0, ""),
    "an empty file": (lambda lines: [], [], 0, "rows 1 to 9 are missing from rows.jsonl"),
    "NULs alone": (lambda lines: [NULS], [], 1, "rows 1 to 9 are missing from rows.jsonl"),
}  # fmt: skip


def damage(path: Path, how: Damage) -> tuple[bytes, bytes]:
    """The file's bytes before and after."""
    before = path.read_bytes()
    path.write_bytes(b"".join(how(before.splitlines(keepends=True))))
    return before, path.read_bytes()


@pytest.mark.parametrize("name", DAMAGES)
def test_good_rows_survive_what_a_disk_does_to_a_file(name: str, tmp_path: Path) -> None:
    how, stay, aside, said = DAMAGES[name]
    path = tmp_path / ROWS
    write_lines(path, [row(number, half=0.5) for number in range(1, 12)])
    before, after = damage(path, how)
    lines = JsonlWriter(path, AT, print, "raise", once=True)
    lines.close()
    plural = "line of rows.jsonl is" if aside == 1 else "lines of rows.jsonl are"
    kept = f"{aside} damaged {plural} kept in rows.damaged.jsonl" if aside else ""
    assert lines.notice == "; ".join(filter(None, [kept, said]))
    written = dict(enumerate(before.splitlines(), 1))
    rows = path.read_bytes().splitlines()
    assert rows == [written[iteration] for iteration in stay]  # byte for byte
    there = (tmp_path / ASIDE).read_bytes() if aside else b""
    lost = [line.rstrip(b"\n") for line in after.splitlines(keepends=True) if line not in before]
    assert all(line in there or line.strip(b"\0") in rows for line in lost)
    assert set(os.listdir(tmp_path)) == ({ROWS, ASIDE} if aside else {ROWS})


@pytest.mark.slow
def test_files_that_are_gone_leave_a_gap_that_is_said_and_the_numbers_are_the_same(
    run: Path, whole: tuple[Path, str], on_ranks: OnRanks
) -> None:
    beside = (EVALUATIONS, LOGGED, TEXTS)
    sizes = {name: (run / name).stat().st_size for name in beside}
    for name in (ROWS, *beside):
        (run / name).unlink()
    (printed, weights), _ = on_ranks(2, train, str(run))
    assert f"ddp_loop: {run}: rows 1 to 9 are missing from rows.jsonl; training continues at step 10\n" in printed
    assert (weights, iterations_of(run)) == (whole[1], [10, 11, 12])
    for name in beside:
        lost = f"{run}: {name} is not as the checkpoint left it: it has lost lines, or was removed (0 of "
        assert lost in printed
        assert 0 < int(printed.partition(lost)[2].split()[0]) <= sizes[name]


def test_several_gaps_are_said_in_one_line(tmp_path: Path) -> None:
    for more, last, said in (((), 20, "9 to 20"), (range(22, 60, 2), 60, "33 more")):
        write_lines(tmp_path / ROWS, map(row, (2, 3, 5, 8, *more)))
        lines = JsonlWriter(tmp_path / ROWS, last, print, "raise", once=True)
        lines.close()
        assert lines.notice == f"rows 1, 4, 6 to 7 and {said} are missing from rows.jsonl"


def test_a_run_that_goes_on_as_it_should_says_nothing(run: Path, on_ranks: OnRanks) -> None:
    number = (run / ROWS).stat().st_ino
    other_digit(run / ROWS, AT, "loss")  # of a row that is cut off, which has no sum
    with (run / ROWS).open("ab") as file:  # what a killed process leaves
        file.write(b'{"epoch": 1, "iteration": 12, "ob')
    assert on_ranks(2, train, str(run))[0][0] == ""
    assert iterations_of(run) == [*range(1, STEPS + 1)]
    assert (run / ROWS).stat().st_ino == number  # cut, not written anew
    assert not (run / ASIDE).exists()


def test_what_was_kept_aside_is_said_never_written_over_and_moves_away_with_the_run(
    run: Path, whole: tuple[Path, str], on_ranks: OnRanks
) -> None:
    flip, stay, _, missing = DAMAGES["a flipped bit"]
    damage(run / ROWS, flip)
    said = f"1 damaged line of rows.jsonl is kept in rows.damaged.jsonl; {missing}; training continues at step {AT + 1}"
    assert on_ranks(2, train, str(run))[0] == (f"ddp_loop: {run}: {said}\n", whole[1])
    assert iterations_of(run) == [*stay, *range(AT + 1, STEPS + 1)]
    first = (run / ASIDE).read_bytes()
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    damage(run / ROWS, lambda lines: [*lines[:2], b"{}\n", *lines[3:]])
    on_ranks(2, train, str(run))
    assert (run / ASIDE).read_bytes() == first
    assert (run / "rows.damaged-2.jsonl").read_bytes() == b"{}\n"
    with dl.join_world(device="cpu") as world:
        dl.Loop(dl.Batches(torch.ones(4), 4, world), 1, state={"m": nn.Linear(1, 1)}, run_dir=run, resume=False)
    assert not list(run.glob("*damaged*"))
    assert {one.name for one in (run / "before" / "1").glob("*damaged*")} == {ASIDE, "rows.damaged-2.jsonl"}


def test_lines_beside_the_rows_survive_likewise(run: Path, whole: tuple[Path, str], on_ranks: OnRanks) -> None:
    write_lines(run / RANKS, map(row, range(1, 10)))
    strange = [b"{}\n", NULS + b"\n", b'{"iteration": "x", "elapsed_s": 1}\n']
    kept = {name: [one for one in lines_of(run / name) if one["iteration"] <= AT] for name in (EVALUATIONS, RANKS)}
    for name in kept:
        damage(run / name, lambda lines: [lines[0], *strange, *lines[1:]])
    (printed, weights), _ = on_ranks(2, train, str(run))
    for name, lines in kept.items():
        aside = name.replace(".", ".damaged.")
        assert lines_of(run / name)[: len(lines)] == lines
        assert f"ddp_loop: {run}: 3 damaged lines of {name} are kept in {aside}\n" in printed
        assert len((run / aside).read_bytes().splitlines()) == 3
    assert weights == whole[1]
    assert iterations_of(run, EVALUATIONS) == [3, 6, 9, 12]


@pytest.mark.parametrize("once", [False, True])
def test_what_follows_a_row_that_is_made_again_is_cut_silently(once: bool, tmp_path: Path) -> None:
    there = [*map(row, (1, 2, 5))]
    path = tmp_path / ROWS
    write_lines(path, there)
    path.write_text(path.read_text() + '{}\n{"epoch": 2, "it')
    file = path.stat().st_ino
    lines = JsonlWriter(path, 2, print, "raise", once=once)
    lines.close()
    assert path.stat().st_ino == file  # the file is truncated, not rewritten
    assert (lines.notice, lines_of(path), os.listdir(tmp_path)) == ("", there[:2], [ROWS])


@pytest.mark.slow
def test_a_damaged_folder_can_be_looked_at_and_drawn(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run / EVALUATIONS, lambda lines: [b'{"iteration": 1, "mean": "x"}\n{"iteration": [1]}\n{}\n', *lines, NULS])
    before = (run / ROWS).read_bytes()
    for how, *_ in DAMAGES.values():
        (run / ROWS).write_bytes(before)
        damage(run / ROWS, how)
        view = RunView("a", run)
        view.summary()
        while view._is_behind:
            view.summary()
        view.curves(100, 0, 0, STEPS)
        code = main(["plot", str(run)])
        assert code == (2 if "has no rows.jsonl with rows to draw" in capsys.readouterr().err else 0)


def test_the_means_of_the_epoch_are_of_the_rows_that_stay(run: Path) -> None:
    expected, found = EpochMeans(), EpochMeans()
    for there in lines_of(run / ROWS)[:AT]:
        expected.recall(there)
    damage(run / ROWS, DAMAGES["another order"][0])
    JsonlWriter(run / ROWS, AT, print, "raise", found.begin, once=True).close()
    assert found.means.means() == expected.means.means()
    assert found.means.rows == AT


# -- a row that looks like any other -----------------------------------------------------------------------------


def other_digit(path: Path, line: int, field: str) -> None:
    """Flip the lowest bit of the last digit of a value."""
    lines = path.read_bytes().splitlines(keepends=True)
    end = re.search(rf'"{field}": [-0-9.e]*?([0-9])[,}}]'.encode(), lines[line]).start(1)  # type: ignore[union-attr]
    lines[line] = lines[line][:end] + bytes([lines[line][end] ^ 1]) + lines[line][end + 1 :]
    path.write_bytes(b"".join(lines))


def test_a_flipped_digit_is_said_and_the_rows_stay(run: Path, whole: tuple[Path, str], on_ranks: OnRanks) -> None:
    before = {}
    for name, line, field in ((ROWS, 3, "loss"), (EVALUATIONS, 1, "mean"), (LOGGED, 2, "twice")):
        other_digit(run / name, line, field)
        before[name] = (run / name).read_bytes().splitlines()[: line + 1]
    (printed, weights), _ = on_ranks(2, train, str(run))
    for name, lines in before.items():
        said = f"ddp_loop: {run}: {name} is not as the checkpoint left it, though each line can be read"
        assert printed.count(said) == 1
        assert (run / name).read_bytes().splitlines()[: len(lines)] == lines
    assert weights == whole[1]
    shutil.rmtree(run / "checkpoints" / "step-00000012")  # the older one has the sum of what was there
    shutil.copytree(run, again := run.with_name("again"))
    printed = on_ranks(2, train, str(again))[0][0]
    assert all(name in printed for name in before)


def test_a_run_of_an_earlier_version_resumes_without_sums(
    run: Path, whole: tuple[Path, str], on_ranks: OnRanks
) -> None:
    for path in run.glob("checkpoints/*/manifest.json"):
        said = json.loads(path.read_text())
        del said["facts"]["files"], said["sha256"]
        body = json.dumps(said, separators=(",", ":")).encode()[:-1]
        path.write_bytes(body + b',"sha256":"%s"}\n' % hashlib.sha256(body).hexdigest().encode())
    other_digit(run / ROWS, 3, "loss")
    assert on_ranks(2, train, str(run))[0] == ("", whole[1])


@pytest.mark.slow
def test_no_damage_of_a_run_folder_is_taken_in_silence(tmp_path: Path) -> None:
    counts = damage_runs(tmp_path, 13, random.Random(1))  # a digit of each file, of three checkpoints
    assert sum(one["taken"] for one in counts.values()) == 0
    assert all(counts[name]["seen"] == 1 for name in (ROWS, EVALUATIONS, LOGGED))


# -- the disk's order --------------------------------------------------------------------------------------------


def lose_power(folder: str) -> list[tuple[str, list[int]]]:
    """For each checkpoint, the moment that it gets its name: the rows that would be there if power went then."""
    durable, seen, run = b"", [], Path(folder)
    fsync, rename = os.fsync, Path.rename

    def note_what_is_durable(descriptor: int) -> None:
        nonlocal durable
        fsync(descriptor)
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(run / ROWS):
            durable = (run / ROWS).read_bytes()

    def look(path: Path, target: Path) -> Path:
        if path.name.startswith(SAVING) and Path(target).name.startswith("step-"):
            whole = durable[: durable.rfind(b"\n") + 1]
            seen.append((Path(target).name, [json.loads(line)["iteration"] for line in whole.splitlines()]))
        return rename(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", note_what_is_durable)
        patch.setattr(Path, "rename", look)
        train(folder)
    return seen


def test_no_checkpoint_is_there_before_the_rows_that_it_counts(on_ranks: OnRanks, tmp_path: Path) -> None:
    seen = on_ranks(2, lose_power, str(tmp_path / "run"))[0]
    assert [name for name, _ in seen] == ["step-00000009", "step-00000012"]
    for name, rows in seen:
        made = int(name.removeprefix("step-"))
        assert rows[:made] == [*range(1, made + 1)]
