"""A run of the loop as a run of Weights & Biases; https://docs.wandb.ai."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ddp_loop.reporting import Pixels, RunStart
from ddp_loop.sinks.points import Point, PointSink, keep, kept, require

KEPT = "wandb.json"  # in the run folder: the id of the run, and the last step of each kind of value that was sent
STEP = "iteration"


class _Wandb(PointSink):
    """See `wandb_sink`."""

    def __init__(
        self, project: str, name: str | None, mode: str | None, every_s: float, options: dict[str, Any]
    ) -> None:
        super().__init__(every_s)
        self._project = project
        self._name = name
        self._options = options
        self._mode: Any = mode
        self._run: Any = None
        self._kept: Path | None = None
        self._id = ""
        self._before = dict[str, int]()  # the last step of each kind of value that earlier processes sent
        self._sent = dict[str, int]()  # and this one too
        self._exit_code = 0

    def begin(self, run: RunStart) -> None:
        import wandb

        self.close()
        self._kept = None if run.folder is None else run.folder / KEPT
        before = kept(run, KEPT) or {"run": secrets.token_hex(4), "sent": {}}
        self._id = before["run"]
        self._before = before["sent"]
        self._sent = dict(self._before)
        mode: Any = self._mode or wandb.Settings().mode
        if mode == "online" and not wandb.login(prompt=False):
            raise RuntimeError("Weights & Biases has no login. Run wandb login, or pass mode='offline'.")
        folder = {} if run.folder is None else {"dir": str(run.folder)}
        self._run = wandb.init(
            project=self._project,
            name=self._name or run.name,
            id=self._id,
            resume="allow",
            mode=mode,
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
            **(folder | self._options),
        )
        self._run.define_metric("*", step_metric=STEP)
        self._keep()

    def _keep(self) -> None:
        if self._kept is not None:
            keep(self._kept, {"run": self._id, "sent": self._sent})

    def _send(self, points: list[Point]) -> None:
        """Send values of steps that no earlier process sent: a resumed run repeats steps.

        The values of one process are never repetitions: a step may have two evaluations of one name, or two texts. All
        is noted before, so that a killed process has sent nothing that is not noted.
        """
        lines = []
        for kind, values, iteration, _ in points:
            new = {name: one for name, one in values.items() if iteration > self._before.get(f"{kind} {name}", -1)}
            if new:
                lines.append({STEP: iteration, **{_key(name): one for name, one in new.items()}})
                self._sent |= {f"{kind} {name}": iteration for name in new}
        self._keep()
        for line in lines:
            self._run.log(line)

    def log_text(self, name: str, text: str, iteration: int) -> None:
        self._add("text", {name: text}, iteration)

    def log_image(self, name: str, pixels: Pixels, iteration: int) -> None:
        import wandb

        self._add("image", {name: wandb.Image(pixels)}, iteration)

    def log_table(self, name: str, table: Mapping[str, Any], iteration: int) -> None:
        import wandb

        rows = [[label, *row] for label, row in zip(table["rows"], table["values"], strict=True)]
        self._add("table", {name: wandb.Table(columns=["", *table["columns"]], data=rows)}, iteration)

    def ended(self, error: BaseException | None) -> None:
        """Take how the script ended, which Weights & Biases shows."""
        self._exit_code = 0 if error is None else 1

    def close(self) -> None:
        """Send the points so far, and end the run."""
        if self._run is not None:
            self.flush()
            run = self._run
            self._run = None
            run.finish(exit_code=self._exit_code)


def _key(name: str) -> str:
    """A name as Weights & Biases takes it, which keeps _step and its like for itself."""
    return name if not name.startswith("_") else f"logged{name}"


def wandb_sink(
    project: str = "ddp_loop",
    name: str | None = None,
    mode: Literal["online", "offline", "disabled"] | None = None,
    every_s: float = 1.0,
    **options: Any,
) -> _Wandb:
    """Write to a run of Weights & Biases: config, values, texts, images and tables, over the step `iteration`.

    Points of rows are means of the rows since the last point; evaluations have names below `evaluation/`. A resumed run
    continues its run and sends no step again that was sent. Without a login one line says so, nothing is asked, and
    training continues.

    Args:
        project: of Weights & Biases.
        name: of the run, by default the run folder's.
        mode: "offline" keeps everything in the run folder, for `wandb sync`; by default WANDB_MODE.
        every_s: seconds between two points of rows, at least.
        options: further arguments of `wandb.init`, such as `entity` and `tags`.

    Raises:
        ImportError: wandb is missing.
    """
    require("wandb")
    return _Wandb(project, name, mode, every_s, options)
