"""The state of a run, its length, and how it ended: from status.json, trial.json and the lock of its folder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import MOST_WHY, NAME, STATUS, STOP, is_running, read_json, read_text
from ddp_loop.reporting import ENDED, TRIAL, count, plain_reason, state_of, text_of, total_steps

_NOTHING_YET = "no run has begun in this folder yet: Loop(run_dir=...) begins one here"
_NO_FOLDER = "there is no such folder: Loop(run_dir=...) makes it and begins a run there"
ENDED_TRIAL = ("pruned", "killed", "not finite", "timed out", "interrupted")


class RunState:
    """What a run folder says of its run, but for the rows.

    Args:
        folder: of Loop(run_dir=...), which may not exist yet.

    Attributes:
        state: one word.
        status: the content of status.json.
        trial: the content of trial.json, empty for a run that no sweep began.
        is_active: whether a process trains in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = "missing"
        self.is_active = False
        self.status: dict[str, Any] = {}
        self.trial: dict[str, Any] = {}
        self._seen = False

    def look(self) -> None:
        """Read the folder again."""
        if not self.folder.is_dir():
            self.state = "gone" if self._seen else "missing"
            self.is_active = False
            return
        self._seen = True
        self.status = read_json(self.folder / STATUS)
        self.trial = read_json(self.folder / TRIAL)
        self.state = state_of(self.folder, self.status, self.trial)
        self.is_active = is_running(self.folder)  # a trial also runs before and after its loop

    def about(self, row: int) -> dict[str, Any]:
        """Return what the page shows of the state, as JSON values: how far it is, of how many steps and epochs.

        Args:
            row: the iteration of the last row; 0 without one.
        """
        status = count(self.status.get("iteration")) or 0
        iteration = status if self.state in (*ENDED, *ENDED_TRIAL) and status else max(row, status)
        total = total_steps(self.status)
        return {
            "state": self.state,
            "says": self._says(iteration),
            "fraction": 1.0 if self.state == "done" else min(1.0, iteration / total) if total else None,
            "iteration": iteration,
            "steps": total,
            "epochs": count(self.status.get("epochs")),
            "can_stop": self.is_active and self.state == "running",
        }

    def _says(self, iteration: int) -> str:
        at = f"step {iteration}"
        kept = NAME.fullmatch(text_of(self.status.get("checkpoint")) or "")
        if kept is None:
            saved = "no checkpoint"
        elif int(kept[1]) == iteration:
            saved = "checkpoint saved"
        else:
            saved = f"last checkpoint at step {int(kept[1])}"
        if self.state in ENDED_TRIAL:
            return f"{self.state} at {at}, {saved}"
        return {
            "missing": _NO_FOLDER,
            "gone": "this run folder was removed",
            "waiting": "waiting for a slot" if self.trial else _NOTHING_YET,
            "starting": "starting",
            "running": "running",
            "stopping": "stopping\u2026",
            "lost": f"ended after {at} without a status: its process no longer runs",
            "done": f"done at {at}, {saved}",
            "stopped": f"stopped at {at}, {saved}",
            "left": f"left by its script at {at}, {saved}",
            "failed": f"failed {self._where()}",
        }[self.state]

    def _where(self) -> str:
        step = count(self.status.get("step"))
        rank = self.status.get("rank")
        stage = text_of(self.status.get("stage"))
        parts = ["on a rank" if count(rank) is None else f"on rank {rank}"]
        parts += [f"in step {step}"] if step is not None else []
        parts += [f"({stage})"] if stage else []
        return " ".join(parts)

    def why(self) -> str | None:
        """Return why the run stops or has ended, in the words of whoever asked for it."""
        if self.state == "stopping":
            with suppress(OSError):
                return text_of(read_text(self.folder / STOP, MOST_WHY))
        if self.is_active or self.state in ("missing", "gone"):
            return None
        why = text_of(self.trial.get("why")) or text_of(self.status.get("why") if self.state != "lost" else None)
        return plain_reason(why)


def finite(value: object) -> float | int | None:
    """Return a value that is a finite number, else None."""
    return value if type(value) in (int, float) and abs(value) < 1e300 else None  # type: ignore[arg-type,return-value]
