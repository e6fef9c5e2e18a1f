"""A small training on three ranks with a fault in it, which one of them has in one way at one place."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import ddp_loop as dl
from tests.support.harness import FAULT_S
from tests.support.refusals import loss_of, network

RANKS, SHARE, STEP = 3, 2, 3  # 2 samples a step for each rank; the fault comes in step 3
MINI_BATCH, SAMPLES = RANKS * SHARE, 24
LONG_S = 20.0
SHORT_S = 2.0  # the timeout of a world in which something has to time out
PATIENT_S = 30.0  # and of one in which nothing has to
FAULT = "the fault of this rank"


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        how: what the culprit does.
        where: at which place.
        peers: what the others do then.
        times_out: whether something has to time out before anybody can know.
    """

    how: str
    where: str
    culprit: int
    peers: str = "in a collective"
    times_out: bool = False

    @property
    def limit_s(self) -> float:
        """From the fault to the last exit."""
        stopped = 2.0 if self.how == "is stopped" else 0.0  # it can only be killed, when the pool's patience is over
        return FAULT_S + stopped + (SHORT_S if self.times_out else 0.0)


@dataclass(frozen=True)
class Seen:
    """What a rank raised: as `PeerFailed` has it."""

    kind: str
    text: str
    rank: int | None = None
    stage: str = ""
    step: int = 0


# -- on the ranks ------------------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Rows whose numbers say which they are; perhaps bad ones, or slow."""

    def __init__(self, case: Case, rank: int, folder: str) -> None:
        self._case, self._rank, self._folder = case, rank, folder

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        case, culprit = self._case, self._rank == self._case.culprit
        if torch.utils.data.get_worker_info() is not None:
            Path(self._folder, f"worker-{os.getpid()}").touch()
        if case.where == "data" and culprit and index == first_of(STEP, self._rank):
            act(case, self._folder)
        slow = STEP if case.peers == "waiting for a worker" and not culprit else 0
        slow = STEP + 1 if case.where == "forward, its worker asleep" and culprit else slow
        if slow and Path(self._folder, f"reads-{self._rank}").exists() and index == first_of(slow, self._rank):
            time.sleep(LONG_S)
        return torch.full((4,), index / SAMPLES, dtype=torch.float64)


def first_of(step: int, rank: int) -> int:
    """The rank's first sample of a step."""
    return (step - 1) * MINI_BATCH + rank * SHARE


class Backward(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        context.call = call
        return value.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.call()
        return gradients[0], None


class Kept:
    """Something in the job's state."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def state_dict(self) -> dict[str, int]:
        self._call()
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """There is none."""


def began(folder: str) -> None:
    """The fault is now; the clock is that of all processes."""
    Path(folder, "began").write_text(str(time.monotonic()))


def act(case: Case, folder: str) -> None:
    """The fault."""
    began(folder)
    match case.how:
        case "raises":
            raise LookupError(FAULT)
        case "says sys.exit(0)":
            sys.exit(0)
        case "says os._exit(0)":
            os._exit(0)
        case "sleeps":
            time.sleep(LONG_S)
        case "calls dist.all_reduce":
            torch.distributed.all_reduce(torch.ones(3))
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "aborts":
            os.kill(os.getpid(), signal.SIGABRT)
        case "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)


def take_long(peers: str) -> None:
    """What the others do meanwhile."""
    match peers:
        case "asleep for 20 s":
            time.sleep(LONG_S)
        case "in a mutex of compiled code":  # no signal ends this wait
            lock = ctypes.CDLL(None).pthread_mutex_lock
            mutex = ctypes.create_string_buffer(64)
            lock(mutex)
            lock(mutex)
        case "in a matrix product":
            large = torch.ones(8000, 8000, dtype=torch.float64)
            large @ large


class Training:
    """Some steps, an evaluation, a checkpoint, a last sum; with the case's fault in it."""

    def __init__(self, world: dl.World, case: Case, folder: str) -> None:
        self.world, self.case, self.folder = world, case, folder
        self.mine = world.rank == case.culprit
        self.model = network()
        self.test = dl.Batches(torch.ones(9, 4, dtype=torch.float64), 4, world)

    def here(self, place: str) -> bool:
        """Whether the fault is now, at this place."""
        case = self.case
        return (
            self.mine
            and case.where.split(",")[0] == place
            and (self.world.step in ((STEP,) if place == "save" else (0, STEP)) or place == "end of the script")
        )

    def fault(self, place: str) -> None:
        if self.here(place):
            act(self.case, self.folder)

    def transform(self, rows: torch.Tensor, draws: dl.Draws) -> torch.Tensor:
        first = round(float(rows[0, 0]) * SAMPLES)
        if self.mine and self.case.where == "transform" and first == first_of(STEP, self.world.rank):
            act(self.case, self.folder)
        return rows

    def metric(self, output: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        self.fault("evaluate")
        return output.mean()

    def loop(self) -> dl.Loop:
        self.fault("making Batches")
        case = self.case
        options = {"num_workers": 1} if "worker" in case.where + case.peers else {}
        rows = Rows(case, self.world.rank, self.folder)
        batches = dl.Batches(rows, MINI_BATCH, self.world, shuffle=False, transform=self.transform, **options)  # type: ignore[arg-type]
        # Before, `Batches` has read some samples, to compare the ranks' data.
        Path(self.folder, f"reads-{self.world.rank}").touch()
        state: dict[str, object] = {"model": self.model, "kept": Kept(partial(self.fault, "save"))}
        if self.here("making Loop"):
            began(self.folder)
            state = {}
        run = Path(self.folder, "run") if case.where == "save" else None
        return dl.Loop(
            batches, 1, state=state, progress=False, run_dir=run, save_every=STEP if run else None,
            on_row=lambda row: self.fault("rows"),
        )  # fmt: skip

    def go_through(self, step: dl.Step) -> None:
        for rows in step:
            self.fault("forward")
            if step.iteration == STEP and not self.mine:
                take_long(self.case.peers)
            if self.here("fold"):
                began(self.folder)
                continue  # without its backward, as fold says
            inputs = Backward.apply(rows.requires_grad_(), partial(self.fault, "backward"))  # type: ignore[no-untyped-call]
            step.backward(loss_of(self.model, inputs))
        step.fold()
        self.fault("optimizer")

    def run(self) -> None:
        with mock.patch("ddp_loop.reporting.reporter.BATCH_S", 0.0):  # a row in each fold
            self.go_through_all()

    def go_through_all(self) -> None:
        for step in self.loop():
            self.go_through(step)
            if self.here("another collective") and not self.go_elsewhere():
                break
            if self.here("elsewhere"):
                self.go_elsewhere()
            elif step.iteration == STEP and self.case.where in ("evaluate", "elsewhere"):
                dl.evaluate(self.model, self.test, mean=self.metric)
        self.fault("end of the script")
        if not (self.mine and self.case.how == "leaves early"):
            self.world.sum(torch.ones(3))

    def sum_apart(self) -> None:
        """All sum, one of them another shape."""
        self.world.sum(torch.ones(3))
        if self.mine:
            self.go_elsewhere()
        else:
            self.world.sum(torch.ones(3))

    def go_ahead(self) -> None:
        """One rank continues with the next step without its fold."""
        for step in self.loop():
            if self.mine and step.iteration == STEP:
                began(self.folder)
                continue
            self.go_through(step)

    def go_elsewhere(self) -> bool:
        """Another collective than the others make; False for none, and no more steps."""
        began(self.folder)
        match self.case.how:
            case "leaves the loop":
                return False
            case "evaluates":
                dl.evaluate(self.model, self.test, mean=lambda output, *rest: output.mean())
            case "gathers":
                self.world.gather("a word")
            case "sums another shape":
                self.world.sum(torch.ones(2))
        return True


def warm_up() -> None:
    """Make a first optimizer, which imports torch._dynamo, for 3 s: so long a world that times out cannot wait."""
    torch.optim.SGD([nn.Parameter(torch.ones(()))])


def on_this_rank(case: Case, folder: str) -> None:
    """The training, and a file about what it raised; ranks that die leave none."""
    rank = int(os.environ["RANK"])
    try:
        with dl.join_world(timeout_s=SHORT_S if case.times_out else PATIENT_S) as world:
            training = Training(world, case, folder)
            {"a sum": training.sum_apart, "a step": training.go_ahead}.get(case.where, training.run)()
        keep(folder, rank, Seen("", ""))
    except dl.PeerFailed as error:
        keep(folder, rank, Seen("PeerFailed", str(error), error.rank, error.stage, error.step))
        raise
    except BaseException as error:
        keep(folder, rank, Seen(type(error).__name__, str(error)))
        raise


def keep(folder: str, rank: int, seen: Seen) -> None:
    """For whoever started the ranks."""
    Path(folder, f"seen-{rank}.json").write_text(json.dumps(asdict(seen)))
