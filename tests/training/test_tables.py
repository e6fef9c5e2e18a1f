"""Tables of a run: `loop.log_table`."""

from __future__ import annotations

import json
import re
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.harness import OnRanks, caught
from tests.support.refusals import loop_over, network
from tests.support.training import loop_on

LABELS = ["no", "yes"]


def write(folder: Path | None, values: Any, at: int = 1, only_rank: int | None = None) -> None:
    """Log a table after a step; after the loop if `at` is 0."""
    with dl.join_world() as world:
        model = nn.Linear(3, 1)
        batches = dl.Batches(torch.ones(8, 3), 4, world)
        loop = loop_on(batches, model, epochs=None, steps=2, run_dir=folder)
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


def test_values_are_nested_sequences_an_array_or_a_tensor(tmp_path: Path, world: dl.World) -> None:
    given: list[tuple[Any, object]] = [
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor([[0.5, torch.nan], [torch.inf, 1]], dtype=torch.bfloat16), [[0.5, None], [None, 1.0]]),
        (np.ones((2, 1), dtype=np.float32), [[1.0], [1.0]]),
        (((True, np.int64(2)), [0.5, torch.tensor(3)]), [[1, 2], [0.5, 3]]),
    ]
    loop = loop_over(world, str(tmp_path), network())
    for values, kept in given:
        loop.log_table("counts", values)
        assert table_of(tmp_path)["values"] == kept


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


def log_badly(folder: str | None) -> list[tuple[str, str, float]]:
    with dl.join_world() as world:
        loop = loop_over(world, folder, network())
        tables = ({"name": "counts", "values": [[1, 2], [3, 4]], **arguments} for arguments, _ in REFUSED)
        return [caught(partial(loop.log_table, **table)) for table in tables]


def test_a_bad_table_is_refused_on_every_rank_before_anything_is_written(on_ranks: OnRanks, tmp_path: Path) -> None:
    for folder in (str(tmp_path), None):
        for results in on_ranks(2, log_badly, folder):
            for (kind, text, _), (_, said) in zip(results, REFUSED, strict=True):
                assert kind == "ValueError"
                assert re.search(said, text), text
    assert not list(tmp_path.rglob("tables"))


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(None, [[1], [2]])
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_starts_over_moves_its_tables_away(tmp_path: Path) -> None:
    write(tmp_path, [[1], [2]])
    with dl.join_world() as world:
        loop = loop_on(dl.Batches(torch.ones(8, 3), 4, world), nn.Linear(3, 1), run_dir=tmp_path, resume=False)
        loop.close()
    assert not (tmp_path / "tables").exists()
    assert table_of(tmp_path / "before/1")["values"] == [[1], [2]]


@pytest.mark.parametrize("rule", ["raise", "warn"])
def test_a_table_that_cannot_be_written_is_an_error_or_a_line(
    rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = f"The table counts in {tmp_path} cannot be written (File exists). Make room there"
    with dl.join_world() as world, closing(loop_over(world, str(tmp_path), network(), on_save_error=rule)) as loop:
        (tmp_path / "tables").write_text("a file")
        kind, text, _ = caught(loop.log_table, "counts", [[1]])
    printed = capsys.readouterr().out
    assert bool(kind) == (rule == "raise")
    assert said in (text if rule == "raise" else printed)
    assert ("Training continues." in printed) == (rule == "warn")
