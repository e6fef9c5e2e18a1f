"""Runs of MLflow (in a folder of files) and of Weights & Biases (offline), read back with their own tools."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ddp_loop as dl
from ddp_loop.sinks import RunStart, mlflow_sink, wandb_sink
from tests.support.harness import OnRanks
from tests.support.runs import lines_of, log_everything

STEPS = 9


@contextmanager
def quiet(folder: str) -> Iterator[None]:
    """No telemetry and no messages; MLflow warns of its own folders of files, wandb of its own parts."""
    variables = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "WANDB_SILENT": "true",
        "WANDB_CONFIG_DIR": folder,
        "WANDB_CACHE_DIR": folder,
        "WANDB_DATA_DIR": folder,
        "WANDB_DISABLE_GIT": "true",
        "HOME": folder,
    }
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in variables.items():
            patch.setenv(name, value)
        for name in ("WANDB_API_KEY", "WANDB_MODE"):
            patch.delenv(name, raising=False)
        yield


def make_sink(kind: str, folder: str) -> Any:
    if kind == "mlflow":
        return mlflow_sink("trial", tracking_uri=f"file://{folder}/mlruns", every_s=0.0)
    return wandb_sink("trial", mode="offline" if kind == "wandb" else "online", every_s=0.0)


def train(kind: str, folder: str, stop_at: int = 0) -> None:
    with quiet(folder):
        config = {"rate": 0.1, "net": {"width": 3}, "text": "x" * 300}
        log_everything(folder, make_sink(kind, folder), stop_at, "second, of 2", config=config)


def mlflow_run(folder: Path) -> tuple[Any, Any]:
    with quiet(str(folder)):
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=f"file://{folder}/mlruns")
        experiment = client.get_experiment_by_name("trial")
        assert experiment is not None
        [run] = client.search_runs([experiment.experiment_id])
        return client, run


@pytest.mark.covers("J7")
@pytest.mark.slow
def test_mlflow_gets_everything_once_also_when_the_run_goes_on(on_ranks: OnRanks, tmp_path: Path) -> None:
    for stop_at in (3, 0):
        on_ranks(2, train, "mlflow", str(tmp_path), stop_at)
    client, run = mlflow_run(tmp_path)
    with quiet(str(tmp_path)):
        points = {
            name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        files = {
            one.path
            for folder in ("texts", "images", "tables")
            for one in client.list_artifacts(run.info.run_id, folder)
        }
    assert points["second_ of 2"] == [(n, n / 2) for n in range(1, STEPS + 1)]
    assert points["score"] == [(3, 1.0), (6, 2.0), (9, 3.0)]
    assert [step for step, _ in points["evaluation/size"]] == [3, 6, 9]
    rows = lines_of(tmp_path / "run" / "rows.jsonl")
    assert points["loss"] == [(row["iteration"], pytest.approx(row["loss"])) for row in rows]
    assert run.data.params == {"rate": "0.1", "net.width": "3", "text": "x" * 300}
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert files == {
        *(f"texts/words_a-{hashlib.sha1(b'words/a').hexdigest()[:8]}-{n}.txt" for n in (3, 6, 9)),
        *(f"images/picture-{n}.png" for n in (3, 6, 9)),
        "tables/counts.json",
    }


BLOCK, HEADER = 32768, 7


def records_of(path: Path) -> Iterator[bytes]:
    """The records of a file of wandb: a log of blocks, as in LevelDB, after 7 bytes."""
    data, at, whole = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # the rest of a block is padding
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        whole += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def wandb_history(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], set[str]]:
    """The lines of all processes of a run, its config, and its ids."""
    with quiet(str(folder)):
        from wandb.proto import wandb_internal_pb2
    lines, config, ids = [], dict[str, Any](), set[str]()
    for path in sorted(folder.rglob("*.wandb"), key=lambda one: one.stat().st_mtime_ns):
        for data in records_of(path):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                line: dict[str, Any] = {}
                for one in record.history.item:
                    name, *inner = one.nested_key or [one.key]
                    if inner:
                        line.setdefault(name, {})[inner[0]] = json.loads(one.value_json)
                    else:
                        line[name] = json.loads(one.value_json)
                lines.append(line)
            elif record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
                config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
    return lines, config, ids


@pytest.mark.covers("J7")
@pytest.mark.slow
def test_wandb_gets_everything_once_also_when_the_run_goes_on(tmp_path: Path) -> None:
    for stop_at in (5, 0):  # in processes of their own: the threads that wandb starts last as long as its process
        dl.launch(train, 2, "wandb", str(tmp_path), stop_at)
    lines, config, ids = wandb_history(tmp_path)
    points = partial(points_of, lines)
    assert points("second, of 2") == [(n, n / 2) for n in range(1, STEPS + 1)]
    assert points("score") == [(3, 1.0), (6, 2.0), (9, 3.0)]
    assert [step for step, _ in points("evaluation/size")] == [3, 6, 9]
    rows = lines_of(tmp_path / "run" / "rows.jsonl")
    assert points("loss") == [(row["iteration"], pytest.approx(row["loss"])) for row in rows]
    assert points("words/a") == [(3 * n, f"epoch {n}") for n in (1, 2, 3)]
    assert [(step, one["height"], one["width"]) for step, one in points("picture")] == [(n, 4, 5) for n in (3, 6, 9)]
    assert [(step, one["_type"]) for step, one in points("counts")] == [(n, "table-file") for n in (3, 6, 9)]
    assert (config["rate"], config["net.width"]) == (0.1, 3)
    assert len(ids) == 1


@pytest.mark.slow
def test_without_a_login_one_line_says_so_and_training_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dl.launch(train, 2, "wandb online", str(tmp_path))
    assert capfd.readouterr().out.count("Weights & Biases has no login. Run wandb login, or pass mode='offline'.") == 1
    assert len(lines_of(tmp_path / "run" / "rows.jsonl")) == STEPS
    assert not list(tmp_path.rglob("*.wandb"))


@pytest.mark.parametrize("make", [mlflow_sink, wandb_sink])
def test_a_missing_package_names_its_extra(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = make.__name__.removesuffix("_sink")
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: None)
    with pytest.raises(ImportError, match=rf'{make.__name__} needs {name}\. Run pip install "ddp_loop\[{name}\]"'):
        make()


@pytest.mark.slow
def test_a_tracking_server_that_is_not_there_is_a_line(on_ranks: OnRanks, tmp_path: Path) -> None:
    (tmp_path / "mlruns").touch()  # a file in the place of MLflow's folder
    on_ranks(1, train, "mlflow", str(tmp_path))
    assert len(lines_of(tmp_path / "run" / "rows.jsonl")) == STEPS
    assert os.path.isfile(tmp_path / "mlruns")


def row_of(iteration: int, **values: float) -> dict[str, Any]:
    return {"epoch": 1, "iteration": iteration, "samples": 1, "weight": 1, **values, "elapsed_s": 0.0}


def line_of(iteration: int, **values: float) -> dict[str, Any]:
    return {"epoch": 1, "iteration": iteration, **values, "elapsed_s": 0.0}


def give_two_of_each(sink: Any) -> None:
    """A step whose evaluations, row and logged values, texts and images have the same names."""
    sink(row_of(1, loss=0.5))
    sink.logged(line_of(1, loss=0.25))
    for score in (3.0, 4.0):
        sink.evaluated(line_of(1, score=score))
    for text in ("one", "two"):
        sink.log_text("words", text, 1)
    for number in (0, 1):
        sink.log_image("picture", np.full((2, 3, 3), number, np.uint8), 1)


@pytest.mark.slow
def test_mlflow_keeps_two_values_of_one_step_and_name(tmp_path: Path) -> None:
    with quiet(str(tmp_path)):
        sink = make_sink("mlflow", str(tmp_path))
        sink.begin(RunStart(None, {}, 0, "run"))
        give_two_of_each(sink)
        for name in ("a b", "a/b", "a_b", "ä_b"):
            sink.log_text(name, name, 2)
        sink.close()
    client, run = mlflow_run(tmp_path)
    with quiet(str(tmp_path)):
        found = {
            name: sorted(one.value for one in client.get_metric_history(run.info.run_id, name))
            for name in run.data.metrics
        }
        paths = [one.path for one in client.list_artifacts(run.info.run_id, "texts")]
        folder = Path(run.info.artifact_uri.removeprefix("file:"))
        texts = {(folder / one).read_text(encoding="utf-8") for one in paths}
        images = sorted(one.path for one in client.list_artifacts(run.info.run_id, "images"))
    assert (found["loss"], found["evaluation/score"]) == ([0.25, 0.5], [3.0, 4.0])
    assert texts == {"one", "two", "a b", "a/b", "a_b", "ä_b"}
    assert images == ["images/picture-1-2.png", "images/picture-1.png"]


@pytest.mark.slow
def test_mlflow_takes_many_points_and_parameters_and_a_changed_config(tmp_path: Path) -> None:
    with quiet(str(tmp_path)):
        sink = mlflow_sink("trial", tracking_uri=f"file://{tmp_path}/mlruns", every_s=1e9)
        sink.begin(RunStart(tmp_path, {"rate": 0.1, **{f"n{number}": number for number in range(150)}}, 0, "run"))
        began = time.time()
        for n in range(1, 1201):
            sink.logged(line_of(n, second=n))
        sink(row_of(1200, loss=0.5))
        sink.close()
        again = make_sink("mlflow", str(tmp_path))
        again.begin(RunStart(tmp_path, {"rate": 0.2, "new": 1}, 1200, "run"))
        _, run = mlflow_run(tmp_path)
        assert run.info.status == "RUNNING"
        again.logged(line_of(1200, second=1200))
        again.logged(line_of(1201, second=1201))
        again.close()
    client, run = mlflow_run(tmp_path)
    with quiet(str(tmp_path)):
        points = client.get_metric_history(run.info.run_id, "second")
        assert sorted(one.step for one in points) == list(range(1, 1202))
        assert [one.step for one in client.get_metric_history(run.info.run_id, "loss")] == [1200]
        assert all(abs(one.timestamp / 1000 - began) < 600 for one in points)
        assert (run.data.params["rate"], run.data.params["n149"], run.data.params["new"]) == ("0.1", "149", "1")
        anew = make_sink("mlflow", str(tmp_path))
        anew.begin(RunStart(tmp_path, {}, 0, "run"))
        anew.close()
        assert len(client.search_runs([run.info.experiment_id])) == 2


@pytest.mark.slow
def test_names_that_mlflow_refuses_are_changed(tmp_path: Path) -> None:
    names = ["/begins", "ends/", "two//parts", "../up", "..", ".", "a/../b", "comma, too", "% of", "x" * 100]
    with quiet(str(tmp_path)):
        sink = make_sink("mlflow", str(tmp_path))
        config = {**dict.fromkeys(names, 1), "long." * 80: 2, "one,": 1, "one;": 2}
        sink.begin(RunStart(None, config, 0, "run"))
        for name in names:
            sink.logged(line_of(1, **{name: 1.0}))
        sink.close()
    _, run = mlflow_run(tmp_path)
    assert len(run.data.metrics) == len(names)
    assert len(run.data.params) == len(names) + 2


class Recorded:
    """What stands in the place of the package wandb: it keeps the lines that a run of it is given."""

    def __init__(self) -> None:
        self.lines, self.ids, self.exit_codes = list[dict[str, Any]](), list[str](), list[int]()
        self.options: dict[str, Any] = {}
        self.Settings = lambda **_: SimpleNamespace(mode="offline")
        self.Image = lambda pixels: int(pixels[0, 0, 0])

    def init(self, **options: Any) -> Any:
        self.ids.append(options["id"])
        self.options = options
        return SimpleNamespace(
            log=self.lines.append,
            finish=lambda exit_code: self.exit_codes.append(exit_code),
            define_metric=lambda *_, **__: None,
        )

    def points(self, name: str) -> list[tuple[int, Any]]:
        return points_of(self.lines, name)


def points_of(lines: list[dict[str, Any]], name: str) -> list[tuple[int, Any]]:
    return [(line["iteration"], line[name]) for line in lines if name in line]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    found = Recorded()
    monkeypatch.setitem(sys.modules, "wandb", found)
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: True)
    return found


@pytest.mark.slow
def test_mlflow_shows_that_the_script_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), quiet(str(tmp_path)):
        log_everything(str(tmp_path), [make_sink("mlflow", str(tmp_path)), lambda row: 1 / (row["iteration"] - 2)])
    _, run = mlflow_run(tmp_path)
    assert run.info.status == "FAILED"


def test_wandb_keeps_two_values_of_one_step_and_name(recorded: Recorded) -> None:
    sink = wandb_sink(every_s=0.0)
    sink.begin(RunStart(None, {}, 0, "run"))
    give_two_of_each(sink)
    sink.logged(line_of(2, _step=7.0))
    sink.close()
    assert recorded.points("loss") == [(1, 0.5), (1, 0.25)]
    assert recorded.points("evaluation/score") == [(1, 3.0), (1, 4.0)]
    assert recorded.points("words") == [(1, "one"), (1, "two")]
    assert recorded.points("picture") == [(1, 0), (1, 1)]
    assert recorded.points("logged_step") == [(2, 7.0)]


@pytest.mark.covers("J7")
@pytest.mark.parametrize("every_s", [0.0, 100.0])
def test_wandb_gets_everything_once_also_when_the_process_was_killed(
    every_s: float, recorded: Recorded, tmp_path: Path
) -> None:
    # Killed after 5 with a checkpoint of 2, at once, and after 9.
    for first, last in ((0, 5), (2, 2), (2, 9), (9, 9)):
        sink = wandb_sink(every_s=every_s)
        sink.begin(RunStart(tmp_path, {}, first, "run"))
        for n in range(first + 1, last + 1):
            sink(row_of(n, loss=n, rate=1.0))
            sink.logged(line_of(n, second=n / 2, loss=-n))
            if n == 2 or n == 9:
                sink.flush()  # as a checkpoint asks for
    assert recorded.points("second") == [(n, n / 2) for n in range(1, 10)]
    assert [step for step, one in recorded.points("loss") if one < 0] == list(range(1, 10))
    if every_s == 0:
        assert [step for step, one in recorded.points("loss") if one > 0] == list(range(1, 10))
    assert len(set(recorded.ids)) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["wandb.json"]


def test_wandb_gets_a_new_run_where_a_run_begins_anew_and_shows_how_the_script_ended(
    recorded: Recorded, tmp_path: Path
) -> None:
    for error in (None, ValueError("bad")):  # what is recorded has no login to ask for
        sink = wandb_sink(mode="disabled", dir="elsewhere", tags=["a"], every_s=0.0)
        sink.begin(RunStart(tmp_path, {"rate": 0.1}, 0, "run"))
        sink.logged(line_of(1, score=1.0))
        sink.ended(error)
        sink.close()
    assert len(set(recorded.ids)) == 2
    assert recorded.points("score") == [(1, 1.0)] * 2
    assert recorded.exit_codes == [0, 1]
    chosen = {"mode": "disabled", "dir": "elsewhere", "tags": ["a"], "config": {"rate": 0.1}, "name": "run"}
    assert chosen.items() <= recorded.options.items()
    assert recorded.options["project"] == "ddp_loop"


def test_wandb_waits_between_two_sends_and_notes_before_it_sends(recorded: Recorded, tmp_path: Path) -> None:
    sink = wandb_sink(every_s=100.0)
    sink.begin(RunStart(tmp_path, {}, 0, "run"))
    noted = tmp_path / "wandb.json"
    for n in range(1, 1001):
        sink.logged(line_of(n, second=n))
    assert recorded.lines == []
    assert json.loads(noted.read_text())["sent"] == {}
    seen: list[int] = []
    sink._run.log = lambda line: seen.append(json.loads(noted.read_text())["sent"]["logged second"])
    sink.flush()
    assert seen == [1000] * 1000
