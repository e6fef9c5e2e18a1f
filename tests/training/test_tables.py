"""Tables of a run: `loop.log_table`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.checkpoint import RunFolder
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loop_over, network

LABELS = ["no", "yes"]


def write(folder: Path | None, values: Any, at: int = 1, only_rank: int | None = None) -> None:
    """Log a table after a step; after the loop if `at` is 0."""
    with dl.join_world() as world:
        model = nn.Linear(3, 1)
        batches = dl.Batches(torch.ones(8, 3), 4, world)
        loop = dl.Loop(batches, steps=2, state={"model": model}, run_dir=folder, progress=False)
        for step in loop:
            for rows in step:
                step.backward(model(rows).mean())
            step.fold()
            if step.iteration == at and only_rank in (None, world.rank):
                loop.log_table("counts", values, rows=LABELS, columns=range(len(values[0])))
        if at == 0:
            loop.log_table("counts", values, LABELS)


def table_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "tables/counts.json").read_text())
    assert found.pop("at") > 1e9
    return found


@pytest.mark.covers("G4")
@pytest.mark.parametrize(("at", "only_rank"), [(1, None), (0, None), (2, 0)])
def test_rank_0_writes_a_table(at: int, only_rank: int | None, on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(2, write, tmp_path, [[1, 2, 3], [4, 5, 6]], at, only_rank)
    table = {"name": "counts", "rows": LABELS, "columns": ["0", "1", "2"], "values": [[1, 2, 3], [4, 5, 6]]}
    assert table_of(tmp_path) == table | {"iteration": at or 2}
    assert [one.name for one in (tmp_path / "tables").iterdir()] == ["counts.json"]


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor([[0.5, torch.nan], [torch.inf, 1]], dtype=torch.bfloat16), [[0.5, None], [None, 1.0]]),
        (np.ones((2, 1), dtype=np.float32), [[1.0], [1.0]]),
        (((True, np.int64(2)), [0.5, torch.tensor(3)]), [[1, 2], [0.5, 3]]),
    ],
)
def test_values_are_nested_sequences_an_array_or_a_tensor(values: Any, kept: object, tmp_path: Path) -> None:
    write(tmp_path, values)
    write(tmp_path, values, at=0)  # the run is finished; it is written again
    assert (table_of(tmp_path)["values"], table_of(tmp_path)["iteration"]) == (kept, 2)


def log(world: dl.World, folder: str, arguments: dict[str, Any], has_folder: bool) -> None:
    loop = loop_over(world, folder, network(), run_dir=folder if has_folder else None)
    assert not (Path(folder) / "tables").exists()
    loop.log_table(**{"name": "counts", "values": [[1, 2], [3, 4]], **arguments})


NAMES: list[Any] = ["", "../up", "a.json", "a b", "\N{LATIN SMALL LETTER E WITH ACUTE}", "-a", "a" * 65, 3, None]
VALUES: list[Any] = [[], [[]], [1, 2], [[1], [2, 3]], [["a"]], "text", 3, None, {"a": 1}, [[1j]], [[[1]]]]
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"name": name}, "A table's name must be a plain word of ASCII.*It becomes the name of a file")
        for name in NAMES
    ),
    *(({"values": one}, "numbers in two dimensions.*Table 'counts' got .*Pass rows of equal length") for one in VALUES),
    ({"values": torch.ones(2)}, r"got shape \(2,\)"),
    ({"values": torch.ones(0, 2)}, r"got shape \(0, 2\)"),
    ({"rows": ["a"]}, "Table 'counts' has 2 rows. Got 1 label for them. Pass rows="),
    ({"columns": list("abc")}, "has 2 columns. Got 3 labels"),
    ({"columns": "ab"}, "has 2 columns. Got one text"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED)
def test_a_bad_table_is_refused_on_every_rank_before_anything_is_written(
    arguments: dict[str, Any], said: str, refused: Refused, tmp_path: Path
) -> None:
    for has_folder in (True, False):
        refused(2, log, arguments, has_folder, kind="ValueError", said=said, by=ALL)
    assert not list(tmp_path.rglob("tables"))


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(None, [[1], [2]])
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_starts_over_moves_its_tables_away(tmp_path: Path) -> None:
    write(tmp_path, [[1], [2]])
    with dl.join_world() as world:
        dl.Loop(
            dl.Batches(torch.ones(8, 3), 4, world), steps=2, state={"model": nn.Linear(3, 1)}, run_dir=tmp_path,
            resume=False, progress=False,
        ).close()  # fmt: skip
    assert not (tmp_path / "tables").exists()
    assert table_of(tmp_path / "before/1")["values"] == [[1], [2]]


def test_the_folder_of_another_process_is_left_alone_after_the_loop(tmp_path: Path) -> None:
    with dl.join_world() as world:
        loop = loop_over(world, str(tmp_path), network(), run_dir=tmp_path)
        loop._leave()  # as at its end
        other = RunFolder(tmp_path, {}, True)
        loop.log_table("counts", [[1]])
        assert not (tmp_path / "tables").exists()
        other.close()
        loop.log_table("counts", [[1]])
        assert (tmp_path / "tables/counts.json").exists()


@pytest.mark.parametrize("on_save_error", ["raise", "warn"])
def test_a_table_that_cannot_be_written_is_an_error_or_a_line(
    on_save_error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with dl.join_world() as world:
        loop = loop_over(world, str(tmp_path), network(), run_dir=tmp_path, on_save_error=on_save_error)
        shutil.rmtree(tmp_path / "tables", ignore_errors=True)
        (tmp_path / "tables").write_text("a file")
        said = f"The table counts in {tmp_path} cannot be written (File exists). Make room there"
        if on_save_error == "raise":
            with pytest.raises(OSError, match="cannot be written") as error:
                loop.log_table("counts", [[1]])
            assert said in str(error.value)
        else:
            loop.log_table("counts", [[1]])
            printed = capsys.readouterr().out
            assert said in printed
            assert "Training continues." in printed
        loop.close()
