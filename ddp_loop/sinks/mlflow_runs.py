"""A run of the loop as a run of MLflow; https://mlflow.org."""

from __future__ import annotations

import hashlib
import posixpath
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_loop.reporting import Pixels, RunStart, png
from ddp_loop.sinks.points import Point, PointSink, keep, kept, require

KEPT = "mlflow.json"  # in the run folder: the id of MLflow's run
_NOT_IN_A_KEY = re.compile(r"[^\w\-. :/]")
_MOST_LETTERS = 6000
_MOST_IN_A_KEY = 250


def _key(name: str) -> str:
    """A name as MLflow takes it: no two names may be one path, as a//b and a/b are."""
    key = _NOT_IN_A_KEY.sub("_", name)[:_MOST_IN_A_KEY]
    if posixpath.normpath(key) != key or key == "." or key.startswith(("..", "/")):
        key = re.sub(r"[/.]", "_", key) or "_"
    return key


class _Mlflow(PointSink):
    """See `mlflow_sink`."""

    def __init__(self, experiment: str, run_name: str | None, tracking_uri: str | None, every_s: float) -> None:
        super().__init__(every_s)
        self._experiment = experiment
        self._run_name = run_name
        self._uri = tracking_uri
        self._client: Any = None
        self._run = ""
        self._status = "FINISHED"
        self._sent: dict[str, int] = {}  # the last step of each metric that an earlier process sent
        self._files = Counter[str]()  # how many texts or images have a name

    def begin(self, run: RunStart) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.close()
        client = MlflowClient(tracking_uri=self._uri)
        if (before := kept(run, KEPT)) is not None:
            known = client.get_run(before["run"])
            client.update_run(known.info.run_id, status="RUNNING")
        else:
            found = client.get_experiment_by_name(self._experiment)
            experiment = client.create_experiment(self._experiment) if found is None else found.experiment_id
            known = client.create_run(experiment, run_name=self._run_name or run.name)
            if run.folder is not None:
                keep(run.folder / KEPT, {"run": known.info.run_id})
        self._client = client
        self._run = known.info.run_id
        # MLflow keeps every point. A resumed run repeats steps, whose points are there. The points of one process
        # are never repetitions: a step may have two evaluations, or a row and a logged value of one name.
        self._sent = {
            key: max((one.step for one in client.get_metric_history(self._run, key)), default=-1)
            for key in known.data.metrics
        }
        self._files.clear()
        config = {_key(name): str(value)[:_MOST_LETTERS] for name, value in run.config.items()}
        new = [Param(key, value) for key, value in config.items() if key not in known.data.params]
        client.log_batch(self._run, params=new)  # in parts, if they are many

    def _send(self, points: list[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(key, float(value), int(1000 * point.at_s), point.iteration)
            for point in points
            for key, value in ((_key(name), value) for name, value in point.values.items())
            if point.iteration > self._sent.get(key, -1)
        ]
        self._client.log_batch(self._run, metrics=metrics)

    def log_text(self, name: str, text: str, iteration: int) -> None:
        self._client.log_text(self._run, text, f"texts/{self._file(name, iteration, 'txt')}")

    def log_image(self, name: str, pixels: Pixels, iteration: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / self._file(name, iteration, "png")
            path.write_bytes(png(pixels))
            self._client.log_artifact(self._run, str(path), "images")

    def log_table(self, name: str, table: Mapping[str, Any], iteration: int) -> None:
        self._client.log_dict(self._run, dict(table), f"tables/{_plain(name)}.json")

    def _file(self, name: str, iteration: int, kind: str) -> str:
        """The name of a file; a second one of its name in a step is numbered."""
        stem = f"{_plain(name)}-{iteration}"
        self._files[f"{stem}.{kind}"] += 1
        number = self._files[f"{stem}.{kind}"]
        return f"{stem}.{kind}" if number == 1 else f"{stem}-{number}.{kind}"

    def ended(self, error: BaseException | None) -> None:
        """Take how the script ended, which MLflow shows."""
        self._status = "FINISHED" if error is None else "FAILED"

    def close(self) -> None:
        """Send the points so far, and end MLflow's run."""
        if self._client is not None:
            self.flush()
            client = self._client
            self._client = None
            client.set_terminated(self._run, self._status)


def _plain(name: str) -> str:
    """A name as a file's name; where that changes it, a sum of its bytes tells it from others."""
    plain = re.sub(r"[^\w\-]", "_", name, flags=re.ASCII)
    return plain if plain == name else f"{plain}-{hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()[:8]}"


def mlflow_sink(
    experiment: str = "ddp_loop",
    run_name: str | None = None,
    tracking_uri: str | None = None,
    every_s: float = 1.0,
) -> _Mlflow:
    """Write to a run of MLflow: config as parameters, values as metrics, texts, images and tables as artifacts.

    Points of rows are means of the rows since the last point; evaluations are metrics below `evaluation/`. A resumed
    run continues its run of MLflow and sends no step again that is there.

    Args:
        experiment: of MLflow; created if it is missing.
        run_name: by default the run folder's.
        tracking_uri: where MLflow keeps runs; by default MLFLOW_TRACKING_URI.
        every_s: seconds between two points of rows, at least.

    Raises:
        ImportError: mlflow is missing.
    """
    require("mlflow")
    return _Mlflow(experiment, run_name, tracking_uri, every_s)
