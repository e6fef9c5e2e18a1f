"""What a script logs with a loop: numbers, texts and images, in the run folder, in the sinks, in the terminal."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import ddp_loop as dl
from ddp_loop.checkpoint import FileLock
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loop_over, loss_of, network, samples

EPOCHS, STEPS = 3, 4  # an epoch's


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, without their times."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line.pop("elapsed_s") >= 0 for line in found)
    return found


class Taken:
    """A sink that keeps what it got, in a file of lines."""

    def __init__(self, path: Path, fails_in: str = "") -> None:
        self._path, self._fails_in = path, fails_in

    def _take(self, kind: str, *values: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([kind, *values]) + "\n")
        if kind == self._fails_in:
            raise OSError("No space left on device")

    def begin(self, run: Any) -> None:
        self._take("begin", run.iteration, dict(run.config), run.name)

    def __call__(self, row: dict[str, Any]) -> None:
        self._take("row", row["iteration"])

    def evaluated(self, line: dict[str, Any]) -> None:
        self._take("evaluated", line["iteration"])

    def logged(self, line: dict[str, Any]) -> None:
        self._take("logged", line["iteration"], {key: one for key, one in line.items() if key not in PLACE})

    def log_text(self, name: str, text: str, iteration: int) -> None:
        self._take("text", iteration, name, text)

    def log_image(self, name: str, pixels: Any, iteration: int) -> None:
        self._take("image", iteration, name, pixels.shape)

    def log_table(self, name: str, table: dict[str, Any], iteration: int) -> None:
        self._take("table", iteration, name, table["values"])

    def flush(self) -> None:
        self._take("flush")

    def close(self) -> None:
        self._take("close")


PLACE = ("epoch", "iteration", "elapsed_s")


def train(folder: str, stop_at: int | None = None, kill_at: int | None = None, fails_in: str = "") -> None:
    """Log values of every kind of place in a run; some steps and epochs log more than others."""
    with dl.join_world(seed=0) as world:
        torch.manual_seed(1)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
        state = {"model": model, "optimizer": optimizer}
        sink = Taken(Path(folder) / "taken", fails_in)
        options: dict[str, Any] = {"run_dir": f"{folder}/run", "on_row": [sink], "config": {"rate": 0.01}}
        loop = dl.Loop(dl.Batches(data, 2, world), EPOCHS, state=state, progress=False, **options)
        with suppress(dl.Stopped):
            for epoch in loop.epochs():
                for step in epoch:
                    for rows in step:
                        step.backward(model(rows).square().mean())
                    loop.log(inside=step.iteration / 8)
                    if step.iteration == stop_at:
                        loop.stop()
                    step.fold()
                    optimizer.step()
                    loop.log(twice=0)
                    loop.log({"val/100 %": torch.tensor(float(step.iteration)), "rank": world.rank}, twice=1)
                    if step.iteration == kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                scores = dl.evaluate(model, dl.Batches(data, 4, world, shuffle=False), loss=lambda out, _: out[:, 0])
                loop.log(score=scores["loss"])
                loop.log({"mean": float(world.rank)}, over="ranks")
                loop.log_text("words", f"epoch {epoch.number}")
                loop.log_image("picture", np.full((2, 3), epoch.number / 4))
                loop.log_table("counts", [[epoch.number]])
            loop.log(after=True)


def expected(ranks: int) -> list[dict[str, Any]]:
    """The numbers of a whole run, a dict for each step."""
    steps = [{"inside": n / 8, "twice": 1.0, "val/100 %": float(n), "rank": 0.0} for n in range(1, EPOCHS * STEPS + 1)]
    for number in range(STEPS, EPOCHS * STEPS + 1, STEPS):
        steps[number - 1]["mean"] = (ranks - 1) / 2
    steps[-1]["after"] = 1.0
    return steps


def merged(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The values of each step. Each name may appear once in a step."""
    steps: dict[int, dict[str, Any]] = {}
    for line in lines:
        values = {name: one for name, one in line.items() if name not in PLACE}
        before = steps.setdefault(line["iteration"], {})
        assert not before.keys() & values.keys(), line
        before.update(values)
        assert line["epoch"] == (line["iteration"] + STEPS - 1) // STEPS
    assert list(steps) == list(range(1, EPOCHS * STEPS + 1))
    assert all(("score" in values) == (n % STEPS == 0) for n, values in steps.items())
    return [{name: one for name, one in values.items() if name != "score"} for values in steps.values()]


def check_folder(folder: Path, ranks: int) -> None:
    """All that a whole run logged is there once."""
    run = folder / "run"
    assert merged(lines_of(run / "logged.jsonl")) == expected(ranks)
    ends = [(number, STEPS * number) for number in range(1, EPOCHS + 1)]
    texts = [{"epoch": n, "iteration": at, "name": "words", "text": f"epoch {n}"} for n, at in ends]
    assert lines_of(run / "texts.jsonl") == texts
    images = lines_of(run / "images.jsonl")
    assert [(one["epoch"], one["iteration"], one["width"], one["height"]) for one in images] == [
        (n, at, 3, 2) for n, at in ends
    ]
    assert {one.name for one in (run / "images").iterdir()} == {Path(one["file"]).name for one in images}
    for (number, _), one in zip(ends, images, strict=True):
        with Image.open(run / one["file"]) as picture:
            assert picture.getpixel((0, 0)) == (round(255 * number / 4),) * 3


@pytest.mark.covers("J7")
def test_what_is_logged_is_in_the_run_folder_and_in_a_sink_once(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(2, train, str(tmp_path))
    check_folder(tmp_path, 2)
    taken = [json.loads(line) for line in (tmp_path / "taken").read_text().splitlines()]
    assert taken[0] == ["begin", 0, {"rate": 0.01}, "run"]
    assert [one[1] for one in taken if one[0] == "row"] == list(range(1, EPOCHS * STEPS + 1))
    assert [one[1] for one in taken if one[0] == "evaluated"] == [STEPS, 2 * STEPS, 3 * STEPS]
    logged = [
        {"iteration": at, "epoch": (at + STEPS - 1) // STEPS, **values}
        for kind, at, values in (one for one in taken if one[0] == "logged")
        if kind
    ]
    assert merged(logged) == expected(2)
    ends = [(number, STEPS * number) for number in range(1, EPOCHS + 1)]
    assert [one[1:] for one in taken if one[0] == "text"] == [[at, "words", f"epoch {n}"] for n, at in ends]
    assert [one[1:] for one in taken if one[0] == "image"] == [[at, "picture", [2, 3, 3]] for _, at in ends]
    assert [one[1:] for one in taken if one[0] == "table"] == [[at, "counts", [[n]]] for n, at in ends]
    assert [one[0] for one in taken].count("close") == 1
    assert taken[-1] == ["close"]


@pytest.mark.covers("J7")
@pytest.mark.parametrize("stop_at", [3, 4, 8, 9])
def test_a_run_that_stops_and_resumes_has_each_value_once(stop_at: int, on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(2, train, str(tmp_path), stop_at)
    on_ranks(2, train, str(tmp_path))
    check_folder(tmp_path, 2)
    taken = [json.loads(line) for line in (tmp_path / "taken").read_text().splitlines()]
    tables = [[at, "counts", [[n]]] for n, at in ((number, STEPS * number) for number in range(1, EPOCHS + 1))]
    assert [one[1:] for one in taken if one[0] == "table"] == tables
    on_ranks(2, train, str(tmp_path))  # of a finished run
    taken = [json.loads(line) for line in (tmp_path / "taken").read_text().splitlines()]
    assert [one[1:] for one in taken if one[0] == "table"] == tables


@pytest.mark.covers("J7")
def test_a_table_of_a_step_that_is_made_again_reaches_the_sinks_again(on_ranks: OnRanks, tmp_path: Path) -> None:
    """A killed run leaves the table of a step after its checkpoint, and sinks cut off what came after that."""
    on_ranks(1, train, str(tmp_path), 3)
    (tmp_path / "run" / "tables").mkdir()
    left = {"name": "counts", "rows": ["0"], "columns": ["0"], "values": [[1]], "iteration": STEPS, "at": 0.0}
    (tmp_path / "run" / "tables" / "counts.json").write_text(json.dumps(left))
    (tmp_path / "run" / "tables" / "cut.json").write_text('{"name": ')
    on_ranks(1, train, str(tmp_path), STEPS + 1)
    taken = [json.loads(line) for line in (tmp_path / "taken").read_text().splitlines()]
    assert [one[1:] for one in taken if one[0] == "table"] == [[STEPS, "counts", [[1]]]]


@pytest.mark.covers("J7")
@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [1, 4, 6, 8, 11])
def test_a_run_that_is_killed_and_resumes_has_each_value_once(kill_at: int, tmp_path: Path) -> None:
    with pytest.raises(dl.RankFailed):
        dl.launch(train, 2, str(tmp_path), None, kill_at)
    dl.launch(train, 2, str(tmp_path))
    check_folder(tmp_path, 2)


METHODS = ["begin", "row", "evaluated", "logged", "text", "image", "table", "flush", "close"]


@pytest.mark.parametrize("fails_in", METHODS)
def test_a_sink_that_fails_is_named_once_and_training_goes_on(
    fails_in: str, on_ranks: OnRanks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    on_ranks(2, train, str(tmp_path), None, None, fails_in)
    check_folder(tmp_path, 2)
    kinds = [json.loads(line)[0] for line in (tmp_path / "taken").read_text().splitlines()]
    assert kinds.count(fails_in) == 1
    assert kinds[kinds.index(fails_in) + 1 :] in (["close"], [])


def two_passes(folder: str) -> list[dict[str, Any]]:
    with dl.join_world(seed=0) as world:
        model, rows = nn.Linear(3, 1), list[dict[str, Any]]()
        batches = dl.Batches(torch.ones(8, 3), 4, world)
        loop = dl.Loop(batches, 2, state={"model": model}, run_dir=folder, progress=False, on_row=rows.append)
        for step in loop:
            for inputs in step:
                step.backward(model(inputs).mean(), first=1.0)
            step.fold()
            for number in (2, 3) if step.iteration % 2 else (2,):
                for inputs in step:
                    step.backward(number * model(inputs).mean(), first=number, second=step.iteration)
                step.fold()
        return rows


@pytest.mark.covers("J7")
def test_every_pass_of_a_step_reaches_its_row(on_ranks: OnRanks, tmp_path: Path) -> None:
    rows = on_ranks(2, two_passes, str(tmp_path))[0]
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for found in (rows, written):
        assert [row["iteration"] for row in found] == [1, 2, 3, 4]
        for row in found:
            odd = row["iteration"] % 2
            assert row["loss_2"] == pytest.approx(2 * row["loss"])
            assert (row["first"], row["first_2"], row["second"]) == (1, 2, row["iteration"])
            assert ("loss_3" in row, "first_3" in row, "second_3" in row) == (odd,) * 3
            if odd:
                assert row["loss_3"] == pytest.approx(3 * row["loss"])


def add_to_results(folder: str) -> tuple[list[float], list[dict[str, Any]]]:
    """The losses of all steps, and the rows that a script gets which adds to what `fold` returns."""
    losses, rows = list[float](), list[dict[str, Any]]()
    with dl.join_world(seed=0) as world:
        model = network().to(world.device)
        for step in loop_over(world, folder, model, on_row=[rows.append]):
            for inputs in step:
                step.backward(loss_of(model, inputs), size=3.0)
            result = step.fold()
            losses.append(float(result.loss))
            total, size = result.loss, result.metrics["size"]
            total += 100  # in place
            size += 100
    return losses, rows


@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
@pytest.mark.covers("J7")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_may_add_to_the_loss_and_the_row_stays(ranks: int, on_ranks: OnRanks, tmp_path: Path) -> None:
    losses, rows = on_ranks(ranks, add_to_results, str(tmp_path))[0]
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for found in (rows, written):
        assert [(row["loss"], row["size"]) for row in found] == [(loss, 3.0) for loss in losses]


def log_bad(world: dl.World, folder: str, call: str, name: Any, value: Any) -> None:
    loop = loop_over(world, folder, network(), run_dir=folder)
    if call == "log":
        loop.log({name: value})
    elif call == "over":
        loop.log({name: value if world.rank == 0 else 1.0}, over="ranks")
    elif call == "mean":
        loop.log({name: value}, over="mean")  # type: ignore[arg-type]
    elif call == "without a name":
        loop.log(value)
    elif call == "text":
        loop.log_text(name, value)
    else:
        loop.log_image(name, value)
    world.raise_if_any_failed(None)  # the ranks that have nothing to log


def log_under_a_column_s_name(folder: str) -> None:
    with dl.join_world(seed=0) as world:
        loop = loop_over(world, folder, network(), run_dir=folder)
        loop.log_text("samples", "a text")
        loop.log_image("samples", np.zeros((2, 2)))
        loop.log_table("samples", [[1]])


@pytest.mark.covers("J7")
def test_a_text_an_image_and_a_table_may_have_the_name_of_a_column(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(1, log_under_a_column_s_name, str(tmp_path))
    assert [lines_of(tmp_path / one)[0]["name"] for one in ("texts.jsonl", "images.jsonl")] == ["samples"] * 2
    assert (tmp_path / "tables" / "samples.json").exists()


RESERVED = ["epoch", "iteration", "samples", "weight", "skipped", "elapsed_s"]
VALUES: list[Any] = ["0.5", None, [1], {"a": 1}, 1j, torch.ones(2), np.ones(3), torch.tensor(1j), object(), 10**400]
VALUES += [torch.ones(1).to_sparse(), torch.ones(1, device="meta")]
SHAPES: list[Any] = [(), (3,), (2, 3, 4, 5), (5, 6, 7), (0, 4), (4, 0, 3), (2, 3, 2)]


@pytest.mark.parametrize(
    ("call", "name", "value", "message"),
    [
        *(("log", name, 1.0, f"cannot take the name '{name}'.*columns of each line") for name in RESERVED),
        *(("log", name, 1.0, "1 to 100 printable letters") for name in ["", "a\nb", "a" * 101, 3, None, "\0"]),
        *(("log", "a", value, "loop.log takes numbers. Got .* for 'a'. Pass a number") for value in VALUES),
        ("over", "a", "x", "loop.log takes numbers"),
        ("over", "a", 10**400, "loop.log takes numbers. Got a whole number beyond 1.8e308 for 'a'"),
        *(
            ("without a name", "", value, r"takes values by name. Got \w+ without one. Call loop.log\(name=value\)")
            for value in (0.5, torch.ones(()), [("a", 1.0)])
        ),
        ("mean", "a", 1.0, "over must be \"ranks\".*Got 'mean'"),
        *(("text", "a", value, "takes a text. Got") for value in [3, None, b"bytes"]),
        ("text", "", "text", "1 to 100 printable letters"),
        *(("image", "a", np.zeros(shape), "An image has shape .* Got shape") for shape in SHAPES),
        *(
            ("image", "a", value, "An image has shape .* Got")
            for value in ["file.png", None, np.zeros((2, 2), complex)]
        ),
    ],
)
def test_what_cannot_be_logged_is_refused(
    call: str, name: Any, value: Any, message: str, refused: Refused, tmp_path: Path
) -> None:
    refused(2, log_bad, call, name, value, kind="ValueError", said=message)
    written = {"logged.jsonl", "texts.jsonl", "images.jsonl"} & set(os.listdir(tmp_path))
    assert all((tmp_path / one).read_text() == "" for one in written)


def log_on_one_rank(world: dl.World, folder: str) -> None:
    loop = loop_over(world, folder, network(), run_dir=folder)
    if world.rank == 1:
        loop.log({"a": 1.0}, over="ranks")
    else:
        world.sum(torch.ones(()))


def test_a_mean_over_ranks_that_only_one_rank_asks_for_is_an_error_on_all(refused: Refused) -> None:
    refused(2, log_on_one_rank, kind="Parted", said="the same collectives in the same order")


def log_other_names(world: dl.World, folder: str) -> None:
    loop_over(world, folder, network(), run_dir=folder).log({f"of rank {world.rank}": 1.0}, over="ranks")


def test_means_of_other_names_on_another_rank_are_refused(refused: Refused) -> None:
    refused(2, log_other_names, kind="ValueError", said="the names in loop.log", by=ALL)


def log_on(folder: str | None, ranks: list[int]) -> None:
    """Log on some ranks only: before the loop, in it and after it."""
    with dl.join_world() as world:
        model = nn.Linear(3, 1)
        batches = dl.Batches(torch.ones(8, 3), 4, world)
        loop = dl.Loop(batches, steps=2, state={"model": model}, run_dir=folder, progress=False)

        def log(**values: Any) -> None:
            if world.rank in ranks:
                loop.log(**values)
                loop.log_text("t", str(values))
                loop.log_image("i", torch.ones(1, 2, 2))

        log(before=1)
        for step in loop:
            for rows in step:
                step.backward(model(rows).mean())
                log(forward=2.0)
            step.fold()
        log(after=np.float32(0.5), large=10**30, none=float("nan"))


def test_a_rank_other_than_0_may_log_and_writes_nothing(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(2, log_on, str(tmp_path), [1])
    assert not {"logged.jsonl", "texts.jsonl", "images.jsonl", "images"} & set(os.listdir(tmp_path))


def test_rank_0_alone_may_log_before_in_and_after_the_loop(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(2, log_on, str(tmp_path), [0])
    assert lines_of(tmp_path / "logged.jsonl") == [
        {"epoch": 0, "iteration": 0, "before": 1.0},
        {"epoch": 1, "iteration": 1, "forward": 2.0},
        {"epoch": 1, "iteration": 2, "forward": 2.0},
        {"epoch": 1, "iteration": 2, "after": 0.5, "large": 1e30, "none": None},
    ]
    assert [line["iteration"] for line in lines_of(tmp_path / "texts.jsonl")] == [0, 1, 2, 2]


def test_without_a_run_folder_nothing_is_written(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(1, log_on, None, [0])
    assert os.listdir(tmp_path) == []


def log_much(folder: str) -> None:
    with dl.join_world() as world:
        loop = loop_over(world, folder, network(), run_dir=folder, progress=False)
        loop.log_text("long", "é" * 10_000_000)
        loop.log({f"value {n}": n for n in range(1000)})


def test_10_mb_of_text_are_cut_and_1000_names_are_kept(
    on_ranks: OnRanks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    on_ranks(1, log_much, str(tmp_path))
    (text,) = lines_of(tmp_path / "texts.jsonl")
    assert text["text"] == "é" * 65_536 + "\n[cut: 10,000,000 characters]"
    (line,) = lines_of(tmp_path / "logged.jsonl")
    assert [line[f"value {n}"] for n in range(1000)] == list(range(1000))


def test_a_folder_in_the_place_of_a_file_is_a_warning(on_ranks: OnRanks, tmp_path: Path) -> None:
    for name in ("logged.jsonl", "texts.jsonl", "images"):
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run" / "images").rmdir()
    (tmp_path / "run" / "images").touch()
    on_ranks(2, train, str(tmp_path))
    taken = [json.loads(line) for line in (tmp_path / "taken").read_text().splitlines()]
    assert [one[1] for one in taken if one[0] == "row"] == list(range(1, EPOCHS * STEPS + 1))
    assert sum(one[0] == "text" for one in taken) == EPOCHS


HALF = "\ud800"  # of a pair of UTF-16, as a decoder of bytes may give it


def log_long_and_half(folder: str) -> None:
    with dl.join_world() as world:
        sink = Taken(Path(folder) / "taken")
        loop = loop_over(world, folder, network(), run_dir=f"{folder}/run", progress=False, on_row=[sink])
        loop.log({f"{n:05} {'long ' * 18}": n for n in range(15_000)})
        loop.log_text("half", f"a{HALF}b")


def test_a_step_with_very_many_values_is_written_in_lines_that_readers_take(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(1, log_long_and_half, str(tmp_path))
    lines = (tmp_path / "run" / "logged.jsonl").read_text().splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) < 1 << 20
    values = [one for line in lines for name, one in json.loads(line).items() if name not in PLACE]
    assert values == list(range(15_000))


def test_half_a_letter_is_written_so_that_others_can_encode_it(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(1, log_long_and_half, str(tmp_path))
    (line,) = lines_of(tmp_path / "run" / "texts.jsonl")
    assert line["text"] == r"a\ud800b"
    taken = [json.loads(line) for line in (tmp_path / "taken").read_text().splitlines()]
    assert [one[1:] for one in taken if one[0] == "text"] == [[0, "half", r"a\ud800b"]]


def log_after(folder: str, run: str | None) -> tuple[list[float | None], str]:
    """Log before and after a loop; the values in the file then, and what the sink got last before."""
    with dl.join_world() as world:
        sink = Taken(Path(folder) / "taken")
        model = network()
        loop = loop_over(world, folder, model, run_dir=run, on_row=[sink])
        loop.log({"tenth": 0.1}, over="ranks")
        for step in loop:
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()
        kinds = [json.loads(line)[0] for line in (Path(folder) / "taken").read_text().splitlines()]
        loop.log(after=0.5)
        if run is None:
            return [], kinds[-1]
        with closing(FileLock(Path(run) / "lock", "Loop")):  # another run
            loop.log(after=1.0)
            dl.evaluate(model, dl.Batches(samples(6), 6, world), size=lambda out, _: out.squeeze(1))
        assert not (Path(run) / "evaluations.jsonl").exists()
        lines = lines_of(Path(run) / "logged.jsonl")
        return [one.get("tenth", one.get("after")) for one in lines], kinds[-1]


def test_what_is_logged_after_a_loop_is_written_at_once_unless_another_run_has_the_folder(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    assert on_ranks(1, log_after, str(tmp_path), str(tmp_path / "run")) == [([0.1, 0.5], "flush")]


def test_sinks_write_at_the_end_of_a_loop_also_without_a_run_folder(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(1, log_after, str(tmp_path), None) == [([], "flush")]
