"""What a script logs with a loop: numbers, texts and images, in the run folder, in the sinks, in the terminal."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.checkpoint import FileLock
from ddp_loop.distributed import Pool
from tests.support.harness import OnRanks
from tests.support.refusals import loop_over, loss_of, network, samples
from tests.support.training import take

pytestmark = pytest.mark.covers("J7")

EPOCHS = 3
STEPS = 4  # of an epoch
ENDS = [(number, STEPS * number) for number in range(1, EPOCHS + 1)]  # epochs, and their last steps
PLACE = ("epoch", "iteration", "elapsed_s")
METHODS = ("begin", "evaluated", "logged", "log_text", "log_image", "log_table", "flush", "close")
Line = dict[str, Any]


def lines_of(path: Path) -> list[Line]:
    """The lines of a file, without their times."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line.pop("elapsed_s") >= 0 for line in found)
    return found


class Taken:
    """A sink that keeps what it got, in a file of lines."""

    def __init__(self, folder: str, fails_in: str = "") -> None:
        self._path = Path(folder) / "taken"
        self._fails_in = fails_in
        for method in METHODS:
            setattr(self, method, partial(self._take, method))

    def __call__(self, row: Line) -> None:
        self._take("__call__", row["iteration"])

    def _take(self, method: str, *values: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([method, *values], default=self._described) + "\n")
        if method == self._fails_in:
            raise OSError("No space left on device")

    @staticmethod
    def _described(value: Any) -> object:
        return value.shape if isinstance(value, np.ndarray) else [value.iteration, dict(value.config), value.name]


def taken(folder: Path, method: str = "") -> list[Any]:
    """What a sink got in a method; by default the names of all methods that were called."""
    calls = [json.loads(line) for line in (folder / "taken").read_text().splitlines()]
    return [values for name, *values in calls if name == method] if method else [name for name, *_ in calls]


def train(folder: str, stop_at: int | None = None, kill_at: int | None = None, fails_in: str = "") -> None:
    """Log values of every kind of place in a run; some steps and epochs log more than others."""
    with dl.join_world(seed=0) as world:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        options: dict[str, Any] = {"on_row": [Taken(folder, fails_in)], "config": {"rate": 0.01}}
        loop = loop_over(world, f"{folder}/run", model, optimizer, epochs=EPOCHS, **options)
        with suppress(dl.Stopped):
            for epoch in loop.epochs():
                for step in epoch:
                    for rows in step:
                        step.backward(loss_of(model, rows))
                    if world.rank == 0:  # which may log alone
                        loop.log(inside=step.iteration / 8)
                    if step.iteration == stop_at:
                        loop.stop()
                    step.fold()
                    optimizer.step()
                    loop.log(twice=0)
                    loop.log({"val/100 %": torch.tensor(float(step.iteration)), "rank": world.rank}, twice=1)
                    if step.iteration == kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                scores = dl.evaluate(model, dl.Batches(samples(8), 4, world), loss=lambda out, _: 0 * out[:, 0] + 5)
                loop.log(score=scores["loss"])
                loop.log({"mean": float(world.rank)}, over="ranks")
                loop.log_text("words", f"epoch {epoch.number}")
                loop.log_image("picture", np.full((2, 3), epoch.number / 4))
                loop.log_table("counts", [[epoch.number]])
            loop.log(after=True)


def values_of(lines: list[Line]) -> list[tuple[Any, ...]]:
    """Epoch, step, name and value of each."""
    return sorted(
        (line["epoch"], line["iteration"], name, value)
        for line in lines
        for name, value in line.items()
        if name not in PLACE
    )


def expected() -> list[tuple[Any, ...]]:
    """Those of a whole run on two ranks, each once."""
    lines: list[Line] = []
    for epoch, end in ENDS:
        for number in range(end - STEPS + 1, end + 1):
            values = {"inside": number / 8, "twice": 1.0, "val/100 %": float(number), "rank": 0.0}
            lines.append({"epoch": epoch, "iteration": number, **values})
        lines[-1] |= {"score": 5.0, "mean": 0.5}
    lines[-1]["after"] = 1.0
    return values_of(lines)


def check_folder(folder: Path) -> None:
    """All that a whole run logged is there once."""
    run = folder / "run"
    assert values_of(lines_of(run / "logged.jsonl")) == expected()
    texts = [{"epoch": n, "iteration": at, "name": "words", "text": f"epoch {n}"} for n, at in ENDS]
    assert lines_of(run / "texts.jsonl") == texts
    images = lines_of(run / "images.jsonl")
    assert [(one["epoch"], one["iteration"]) for one in images] == ENDS
    assert {one.name for one in (run / "images").iterdir()} == {Path(one["file"]).name for one in images}


def tables_in(folder: Path) -> list[tuple[Any, ...]]:
    return [(name, table["values"], at) for name, table, at in taken(folder, "log_table")]


TABLES = [("counts", [[number]], at) for number, at in ENDS]


def test_what_is_logged_is_in_the_run_folder_and_in_a_sink_once(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(2, train, str(tmp_path))
    check_folder(tmp_path)
    calls = taken(tmp_path)
    assert taken(tmp_path, "begin") == [[[0, {"rate": 0.01}, "run"]]]
    assert taken(tmp_path, "__call__") == [[number] for number in range(1, EPOCHS * STEPS + 1)]
    assert [values[0]["iteration"] for values in taken(tmp_path, "evaluated")] == [at for _, at in ENDS]
    assert values_of([values[0] for values in taken(tmp_path, "logged")]) == expected()
    assert taken(tmp_path, "log_text") == [["words", f"epoch {n}", at] for n, at in ENDS]
    assert taken(tmp_path, "log_image") == [["picture", [2, 3, 3], at] for _, at in ENDS]
    assert tables_in(tmp_path) == TABLES
    assert (calls[0], calls[-1], calls.count("close")) == ("begin", "close", 1)


@pytest.mark.parametrize("stop_at", [3, 8])
def test_a_run_that_stops_and_resumes_has_each_value_once(stop_at: int, on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(2, train, str(tmp_path), stop_at)
    for _ in range(2):  # the second time it is finished
        on_ranks(2, train, str(tmp_path))
        check_folder(tmp_path)
        assert tables_in(tmp_path) == TABLES


def test_a_table_of_a_step_that_is_made_again_reaches_the_sinks_again(on_ranks: OnRanks, tmp_path: Path) -> None:
    """A killed run leaves the table of a step after its checkpoint, and sinks cut off what came after that."""
    on_ranks(1, train, str(tmp_path), 3)
    (tmp_path / "run" / "tables").mkdir()
    left = {"name": "counts", "rows": ["0"], "columns": ["0"], "values": [[1]], "iteration": STEPS, "at": 0.0}
    (tmp_path / "run" / "tables" / "counts.json").write_text(json.dumps(left))
    (tmp_path / "run" / "tables" / "cut.json").write_text('{"name": ')
    on_ranks(1, train, str(tmp_path), STEPS + 1)
    assert tables_in(tmp_path) == TABLES[:1]


@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [1, 6])
def test_a_run_that_is_killed_and_resumes_has_each_value_once(kill_at: int, pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(dl.RankFailed):
        pool.run(train, 2, str(tmp_path), None, kill_at)
    pool.run(train, 2, str(tmp_path))
    check_folder(tmp_path)


@pytest.mark.parametrize("fails_in", ["begin", "__call__", "log_text", "close"])
def test_a_sink_that_fails_is_named_once_and_training_goes_on(fails_in: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(2, train, str(tmp_path), None, None, fails_in)
    check_folder(tmp_path)
    calls = taken(tmp_path)
    assert calls.count(fails_in) == 1
    assert calls[calls.index(fails_in) + 1 :] == ([] if fails_in == "close" else ["close"])
    said = (tmp_path / "run" / "console" / "rank-0.log").read_text()
    assert said.count("Taken gets nothing more") == 1


def test_a_folder_in_the_place_of_a_file_is_a_warning(on_ranks: OnRanks, tmp_path: Path) -> None:
    for name in ("logged.jsonl", "texts.jsonl"):
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run" / "images").touch()
    on_ranks(2, train, str(tmp_path))
    assert taken(tmp_path, "__call__") == [[number] for number in range(1, EPOCHS * STEPS + 1)]
    assert len(taken(tmp_path, "log_text")) == EPOCHS


# -- rows --------------------------------------------------------------------------------------------------


def make_passes(folder: str) -> tuple[list[float], list[Line]]:
    """Two passes of odd steps, and one of the others; the script adds to what `fold` returns, in place."""
    losses: list[float] = []
    rows: list[Line] = []
    with dl.join_world() as world:
        model = network()
        for step in loop_over(world, folder, model, on_row=[rows.append]):
            for number in range(1, 2 + step.iteration % 2):
                for inputs in step:
                    step.backward(number * loss_of(model, inputs), size=3.0 * number, second=float(step.iteration))
                result = step.fold()
                losses.append(float(result.loss))
                loss = result.loss
                loss += 100
                size = result.metrics["size"]
                size += 100
    return losses, rows


@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
def test_every_pass_of_a_step_reaches_its_row_as_it_was(on_ranks: OnRanks, tmp_path: Path) -> None:
    losses, rows = on_ranks(2, make_passes, str(tmp_path))[0]
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for found in (rows, written):
        assert [row["second"] for row in found] == [1, 2, 3, 4]
        assert [row[name] for row in found for name in ("loss", "loss_2") if name in row] == losses
        assert [(row["size"], row.get("size_2")) for row in found] == [(3, 6), (3, None)] * 2
        assert losses[1] == pytest.approx(2 * losses[0])


# -- what cannot be logged ---------------------------------------------------------------------------------


@contextmanager
def loop_alone(folder: Path, model: nn.Module | None = None, **keywords: Any) -> Iterator[dl.Loop]:
    with dl.join_world() as world:
        yield loop_over(world, str(folder), model or network(), **keywords)


BAD: list[tuple[str, list[Any], str]] = [  # a method, what it gets, what it says
    ("log", [{"epoch": 1.0}], "cannot take the name 'epoch'.*columns of each line"),
    ("log", [{"skipped": 1.0}], "cannot take the name 'skipped'.*columns of each line"),
    *(("log", [{name: 1.0}], "1 to 100 printable letters") for name in ("", "a\nb", "a" * 101, 3)),
    *(
        ("log", [{"a": value}], "loop.log takes numbers. Got .* for 'a'. Pass a number")
        for value in (
            "0.5", None, 1j, torch.ones(2), np.ones(3), torch.tensor(1j), 10**400, torch.ones(1, device="meta"),
        )
    ),
    *(
        ("log", [value], r"takes values by name. Got \w+ without one. Call loop.log\(name=value\)")
        for value in (0.5, [("a", 1.0)])
    ),
    *(("log_text", ["a", value], "takes a text. Got") for value in (None, b"bytes")),
    ("log_text", ["", "text"], "1 to 100 printable letters"),
    *(
        ("log_image", ["a", np.zeros(shape)], "An image has shape .* Got shape")
        for shape in ((3,), (2, 3, 4, 5), (5, 6, 7), (4, 0, 3), (2, 3, 2))
    ),
    *(("log_image", ["a", value], "An image has shape .* Got") for value in ("file.png", np.zeros((2, 2), complex))),
]  # fmt: skip


def test_what_cannot_be_logged_is_refused_and_a_text_may_have_the_name_of_a_column(tmp_path: Path) -> None:
    with loop_alone(tmp_path) as loop:
        for method, arguments, said in BAD:
            with pytest.raises(ValueError, match=said):
                getattr(loop, method)(*arguments)
        with pytest.raises(ValueError, match=r'over must be "ranks".*Got .mean.'):
            loop.log({"a": 1.0}, over="mean")  # type: ignore[arg-type]
        loop.log_text("samples", "a text")
        loop.log_image("samples", np.zeros((2, 2)))
        loop.log_table("samples", [[1]])
    assert [one["name"] for name in ("texts", "images") for one in lines_of(tmp_path / f"{name}.jsonl")] == [
        "samples"
    ] * 2
    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["samples.json"]
    assert not (tmp_path / "logged.jsonl").is_file() or lines_of(tmp_path / "logged.jsonl") == []


# -- where and when it is written --------------------------------------------------------------------------


def test_very_many_values_are_written_in_lines_that_readers_take(tmp_path: Path) -> None:
    with loop_alone(tmp_path) as loop:
        loop.log({f"{n:05} {'long ' * 18}": n for n in range(15_000)})
    lines = lines_of(tmp_path / "logged.jsonl")
    assert max(map(len, (tmp_path / "logged.jsonl").read_text().splitlines())) < 1 << 20
    assert [one for line in lines for name, one in line.items() if name not in PLACE] == list(range(15_000))


def test_half_a_letter_is_written_so_that_others_can_encode_it(tmp_path: Path) -> None:
    with loop_alone(tmp_path / "run", on_row=[Taken(str(tmp_path))]) as loop:
        loop.log_text("half", "a\ud800b")  # of a pair of UTF-16, as a decoder of bytes may give it
    assert [line["text"] for line in lines_of(tmp_path / "run" / "texts.jsonl")] == [r"a\ud800b"]
    assert taken(tmp_path, "log_text") == [["half", r"a\ud800b", 0]]


@pytest.mark.parametrize("has_folder", [False, True])
def test_what_is_logged_after_a_loop_is_written_at_once_unless_another_run_has_the_folder(
    has_folder: bool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    model = network()
    with loop_alone(run, model, run_dir=run if has_folder else None, on_row=[Taken(str(tmp_path))]) as loop:
        loop.log({"tenth": 0.1}, over="ranks")
        loop.log(large=10**30, none=float("nan"))
        for step in loop:
            take(step, model)
        assert taken(tmp_path)[-1] == "flush"  # also without a run folder
        loop.log(after=np.float32(0.5))
        if has_folder:
            with closing(FileLock(run / "lock", "Loop")):  # another run
                loop.log(after=1.0)
                loop.log_table("counts", [[1]])
                dl.evaluate(model, dl.Batches(samples(6), 6, loop.world), size=lambda out, _: out.squeeze(1))
            assert not (run / "evaluations.jsonl").exists()
            assert not (run / "tables").exists()
            loop.log_table("counts", [[1]])
            assert (run / "tables" / "counts.json").exists()
            assert [value for *_, value in values_of(lines_of(run / "logged.jsonl"))] == [1e30, None, 0.1, 0.5]
