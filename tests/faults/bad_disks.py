"""Disks that are full, read-only or gone while ranks train: what comes of it?   python -m tests.faults.bad_disks

Rank 0 harms the disk after step 3 of 10 and heals it before step 7, where that is possible; a checkpoint is due after
every second step. Then the run is started again, on another number of ranks, and must end with the bits of a run that
no fault disturbed. The read-only disk and the small one are mounted, which is root's to do.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import mse_loss

import ddp_loop as dl
from ddp_loop.checkpoint import CheckpointStore, run_id_of
from ddp_loop.distributed import Pool
from tests.faults.job import final_digest
from tests.support.both_exchanges import add_exchange, use_exchange

STEPS, EVERY, HARMED, HEALED, KEEP = 10, 2, 3, 7, 9
LIMIT = 16 << 10  # bytes of a file: less than the tensors take, more than all else
NAMES = [f"{number}{'a long name ' * 15}" for number in range(6)]  # of metrics: a row takes 1 KiB, four a page
RANKS, OTHER_RANKS, TIMEOUT_S = 3, 2, 20.0
OTHER_RUN = '{"id": "of another run"}'


def nothing() -> None:
    """Do nothing."""


# -- disks ---------------------------------------------------------------------------------------------------


def limit_files(run: Path, most: int) -> Callable[[], None]:
    """No file of this process grows beyond `most` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill(run: Path) -> Callable[[], None]:
    """No room is left on the small disk that the run is on."""
    ballast = run.parent / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return lambda: ballast.unlink(missing_ok=True)


def make_read_only(run: Path) -> Callable[[], None]:
    """The run folder can be read alone: for root by a mount over it, since permissions do not bind root."""
    if os.geteuid():
        change_modes(run, 0o555)
        return lambda: change_modes(run, 0o755)
    call("mount", "--bind", str(run), str(run))
    call("mount", "-o", "remount,bind,ro", str(run))
    return lambda: unmount_below(run)


def change_modes(run: Path, mode: int) -> None:
    """Give the folders this mode."""
    for folder in (run, run / "checkpoints"):
        folder.chmod(mode)


def move(run: Path) -> Callable[[], None]:
    """The run folder gets another name, and its own again."""
    away = run.with_name("away")
    run.rename(away)

    def heal() -> None:
        if not run.exists():
            away.rename(run)

    return heal


def replace(run: Path) -> Callable[[], None]:
    """The run folder of another run comes in the place of this one's."""
    back = move(run)
    run.mkdir()
    (run / "run.json").write_text(OTHER_RUN)

    def heal() -> None:
        if run_id_of(run) == "of another run":
            shutil.rmtree(run)
            back()

    return heal


def remove(run: Path) -> Callable[[], None]:
    """The run folder is removed with all that is in it."""
    shutil.rmtree(run)
    return nothing


@dataclass(frozen=True)
class Disk:
    """What is done to a disk.

    Attributes:
        harm: called with the run folder; returns what heals it, which may be called twice.
        stage: where rank 0 fails then: in a fold for a checkpoint that cannot be written, in "rows" for the rows.
        says: what the error says.
        mounts: what must be mounted for it: "", "small" for a small disk, "over" for a mount over the run folder.
        heals: whether the run folder is there again.
        tells: what status.json may say of a run that failed so; "running" where that could not be changed, "failed"
            where rank 1 came to write it when the disk was healed.
    """

    harm: Callable[[Path], Callable[[], None]]
    stage: str
    says: str
    mounts: str = ""
    heals: bool = True
    tells: str = "running|failed"


DISKS = {
    "full for what is large": Disk(lambda run: limit_files(run, LIMIT), "fold", "File too large", tells="failed"),
    "full within a row": Disk(
        lambda run: limit_files(run, (run / "rows.jsonl").stat().st_size + 1500),
        "rows",
        "File too large",
        tells="failed",
    ),
    "full": Disk(fill, "rows", "No space left on device", "small"),
    "read-only": Disk(make_read_only, "fold", "Read-only file system|Permission denied", "over"),
    "moved away": Disk(move, "fold", "no longer the folder of this run"),
    "replaced": Disk(replace, "fold", "no longer the folder of this run"),
    "removed": Disk(remove, "rows", "it was removed", heals=False, tells=""),
}


def call(*words: str) -> None:
    """Run a command.

    Raises:
        OSError: it fails, or is not there.
    """
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise OSError(ended.stderr.strip())


def unmount_below(folder: Path) -> None:
    """Take away what is mounted on `folder` or in it, the last first."""
    points = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for point in reversed([one for one in map(Path, points) if one.is_relative_to(folder)]):
        call("umount", "--lazy", str(point))


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 1 MiB.

    Raises:
        OSError: none can be mounted here.
    """
    folder.mkdir()
    call("mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder))
    try:
        yield folder
    finally:
        unmount_below(folder)


# -- training ------------------------------------------------------------------------------------------------


@dataclass
class Ended:
    """How it ended on a rank.

    Attributes:
        kind, text: of the error; empty for none.
        rank, stage: that a PeerFailed names; the world's own stage elsewhere.
        step: the last one that was made.
        took_s: since the last step before the harm could do any.
        digest: of the state at the end.
        lines: what rank 0 printed.
    """

    kind: str = ""
    text: str = ""
    rank: int | None = None
    stage: str = ""
    step: int = 0
    took_s: float = 0.0
    digest: str = ""
    lines: list[str] = field(default_factory=list)


def train(run: str, disk: str = "", policy: str = "raise", log: str = "", break_at: int = 0, at: int = HARMED) -> Ended:
    """The job, on this rank; rank 0's output goes to the file `log`, if given. Every rank must call this."""
    torch.optim.SGD([nn.Parameter(torch.ones(()))])  # a process's first imports torch._dynamo, for 3 s
    ended, said = Ended(took_s=time.monotonic()), io.StringIO()
    with ExitStack() as ending:
        out = ending.enter_context(closing_quietly(Path(log))) if log and os.environ.get("RANK") == "0" else said
        ending.enter_context(redirect_stdout(out))
        try:
            with dl.join_world(seed=1, timeout_s=TIMEOUT_S) as world:
                train_in(world, ended, Path(run) if run else None, disk, policy, break_at, at, ending)
        except dl.PeerFailed as error:
            ended.kind, ended.text, ended.rank, ended.stage = "PeerFailed", str(error), error.rank, error.stage
        except Exception as error:
            ended.kind, ended.text, ended.stage = type(error).__name__, str(error), world.stage
        ended.took_s = time.monotonic() - ended.took_s
    ended.lines = said.getvalue().splitlines()
    return ended


@contextmanager
def closing_quietly(path: Path) -> Iterator[Any]:
    """A file whose last lines may be lost."""
    file = path.open("w")
    try:
        yield file
    finally:
        with suppress(OSError):
            file.close()


def train_in(
    world: dl.World, ended: Ended, run: Path | None, disk: str, policy: str, break_at: int, at: int, ending: ExitStack
) -> None:
    """The steps, with the harm between them."""
    model = nn.Sequential(nn.Linear(8, 256), nn.Dropout(0.1), nn.Tanh(), nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state: dict[str, object] = {"model": model, "optimizer": optimizer}
    inputs = torch.randn(60, 8, generator=torch.Generator().manual_seed(2))
    batches = dl.Batches(inputs, 12, world, shards=6)
    loop = dl.Loop(
        batches, steps=STEPS, state=state, run_dir=run, resume=True, save_every=EVERY, keep_last=KEEP,
        progress=bool(disk), on_save_error=policy,  # type: ignore[arg-type]
    )  # fmt: skip
    heal: Callable[[], None] = nothing
    for step in loop:
        if step.iteration == break_at:
            break
        if step.iteration == HEALED:
            finish_save()
            heal()
        for rows in step:
            output = model(rows)
            step.backward(mse_loss(output, rows.sum(1, keepdim=True)), **dict.fromkeys(NAMES, output.squeeze(1) / 3))
        step.fold()
        optimizer.step()
        ended.step = step.iteration
        if step.iteration == at:
            ended.took_s = time.monotonic()
            if disk and run is not None and world.rank == 0:
                finish_save()
                heal = DISKS[disk].harm(run)
                ending.callback(heal)
    ended.digest = final_digest(state)


def finish_save() -> None:
    """Wait for the checkpoint that is written beside."""
    for thread in threading.enumerate():
        if thread.name == "ddp_loop save":
            thread.join()


# -- what comes of it ----------------------------------------------------------------------------------------


class Ranks(Protocol):
    """Runs a function on ranks: the fixture `on_ranks`, or what is made of a pool."""

    def __call__(self, ranks: int, function: Callable[..., Ended], /, *arguments: Any) -> list[Ended]: ...


@dataclass(frozen=True)
class Outcome:
    """What came of a disk that was harmed.

    Attributes:
        ended: on each rank.
        kept: the iterations of the checkpoints there, each as it was written, and the others' problems.
        rows: the iterations of the rows in the file, when the run had ended.
        status: what status.json said then.
        again: on each rank, when the run was started again; empty where its folder is gone.
        left: what begins with a dot in the folders after that.
        all_rows: likewise of the rows.
    """

    ended: list[Ended]
    kept: list[int]
    problems: list[str]
    rows: list[int]
    status: str
    again: list[Ended]
    left: list[str]
    all_rows: list[int]


def rows_of(run: Path) -> list[int]:
    """The iterations of the rows, which are whole lines.

    Raises:
        ValueError: they are not.
    """
    text = (run / "rows.jsonl").read_text() if (run / "rows.jsonl").exists() else ""
    if text and not text.endswith("\n"):
        raise ValueError(f"rows are whole lines; the last one is {text.splitlines()[-1][:80]!r}")
    return [json.loads(line)["iteration"] for line in text.splitlines()]


def kept_in(run: Path) -> tuple[list[int], list[str]]:
    """The iterations of the valid checkpoints, read again from the first bit to the last; what is wrong with others."""
    entries = CheckpointStore(run, run_id_of(run) or "").entries(verify=True)
    return (
        sorted(one.iteration for one in entries if one.problem is None),
        [one.problem for one in entries if one.problem is not None],
    )


def examine(on_ranks: Ranks, name: str, policy: str, run: Path) -> Outcome:
    """Train, harm the disk, and start the run again; from the last checkpoint but one where it came to its end."""
    ended = on_ranks(RANKS, train, str(run), name, policy)
    (kept, problems), rows = kept_in(run), rows_of(run)
    status = json.loads((run / "status.json").read_text())["status"] if (run / "status.json").exists() else ""
    if not DISKS[name].heals:
        return Outcome(ended, kept, problems, rows, status, [], [], [])
    if STEPS in kept:
        shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08}")
    again = on_ranks(OTHER_RANKS, train, str(run))
    left = [path.name for folder in (run, run / "checkpoints") for path in folder.glob(".*")]
    return Outcome(ended, kept, problems, rows, status, again, left, rows_of(run))


def stopped_together(outcome: Outcome) -> bool:
    """Whether all ranks made the same last step.

    Rank 0 writes rows that are due while a step is reduced, after its word has left. Of an error there the others hear
    in the next step.
    """
    first, *others = outcome.ended
    last = {first.step, first.step + 1} if first.stage == "rows" else {first.step}
    return {one.step for one in others} <= last


def words_of(outcome: Outcome, whole: str) -> list[str]:
    """A row of the report."""
    first = outcome.ended[0]
    if first.kind:
        peers = {(one.kind, one.rank) for one in outcome.ended[1:]}
        together = stopped_together(outcome) and peers == {("PeerFailed", 0)}
        what = f"all stopped after step {first.step}" if together else "PARTED"
        what += f" ({first.stage}), {max(one.took_s for one in outcome.ended):.2f} s"
    else:
        said = sum("training continues" in line for line in first.lines)
        what = f"went on, {said} warnings, " + ("the same bits" if first.digest == whole else "OTHER BITS")
    kept = ", ".join(map(str, outcome.kept)) or "none, they were removed"
    again = {one.digest for one in outcome.again}
    right = "-" if not again else "the same bits" if again == {whole} else "OTHER BITS"
    return [what, kept + "".join(f", NOT VALID: {one}" for one in outcome.problems), right]


def main() -> int:
    """Print the report; 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description="disks that are harmed")
    add_exchange(parser)
    use_exchange(parser.parse_args())
    with Pool(RANKS) as pool, tempfile.TemporaryDirectory() as folder:
        whole = pool.run(train, RANKS, "")[0].digest
        print("| the disk | on_save_error | the ranks | valid checkpoints | resumed with |\n|---|---|---|---|---|")
        broken = 0
        for number, (name, disk) in enumerate(DISKS.items()):
            for policy in ("raise", "warn"):
                place = Path(folder, f"{number}-{policy}")
                with ExitStack() as ending:
                    try:
                        ending.enter_context(small_disk(place)) if disk.mounts else place.mkdir()
                    except OSError as error:
                        print(f"| {name} | {policy} | not tried, nothing can be mounted: {error} | | |")
                        continue
                    words = words_of(
                        examine(lambda ranks, *rest: pool.run(rest[0], ranks, *rest[1:]), name, policy, place / "run"),
                        whole,
                    )
                print(f"| {name} | {policy} | {' | '.join(words)} |", flush=True)
                broken += any(re.search("[A-Z]{3}", word) for word in words)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
