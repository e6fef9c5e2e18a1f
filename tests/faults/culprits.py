"""Faults on one of three ranks, of every kind: is it named, and have all ended in time?

    python -m tests.faults.culprits

Each case is a small training in which one rank fails in one way at one place: it raises, leaves, sleeps, makes another
collective than the others, or dies; the others wait in a collective, or do something that takes long. Prints a
Markdown table, and exits with 1 if a culprit was not named, or the ranks took longer than 3 s (and the world's timeout,
where something has to time out).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ddp_loop.distributed import Pool, RankFailed
from tests.faults.training import RANKS, STEP, Case, Seen, on_this_rank, warm_up
from tests.faults.under_torchrun import Ended, kill_a_worker, kill_torchrun, lives, raise_in_a_worker
from tests.support.both_exchanges import add_exchange, use_exchange
from tests.support.harness import Result

# where it raises: the stage that is reported, and the step
PLACES = {
    "making Batches": ("", 0),
    "making Loop": ("start", 0),
    "data": ("data", STEP),
    "transform": ("data", STEP),
    "forward": ("forward", STEP),
    "backward": ("backward", STEP),
    "fold": ("fold", STEP),
    "optimizer": ("optimizer", STEP),
    "evaluate": ("evaluate", STEP),
    "save": ("save", STEP),
    "end of the script": ("", 0),
}


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        seen: by rank, of those that lived to raise.
        took_s: from the fault to the last exit.
        launcher: what the pool of ranks said; empty if it had nothing to say.
        blamed: by the pool.
        left: processes that still live.
    """

    seen: dict[int, Seen]
    took_s: float
    launcher: str
    blamed: int | None
    left: tuple[int, ...]


# -- from outside ------------------------------------------------------------------------------------------------


def outcome_of(run: Callable[..., Any], case: Case, folder: Path) -> Outcome:
    """Run a case by `run(ranks, function, *arguments)`."""
    run(RANKS, warm_up)  # those that were ended in the case before are replaced, outside of the measured time
    folder.mkdir(exist_ok=True)
    launcher, blamed = "", None
    try:
        run(RANKS, on_this_rank, case, str(folder))
    except RankFailed as error:
        launcher, blamed = str(error), error.rank
    ended = time.monotonic()
    seen = {
        rank: Seen(**json.loads(path.read_text()))
        for rank in range(RANKS)
        if (path := folder / f"seen-{rank}.json").is_file()
    }
    workers = [int(path.name.removeprefix("worker-")) for path in folder.glob("worker-*")]
    left = tuple(number for number in workers if lives(number))
    return Outcome(seen, ended - float((folder / "began").read_text()), launcher, blamed, left)


def wrong(case: Case, outcome: Outcome) -> list[str]:
    """What is not as it should be."""
    lines = [f"{number} lives" for number in outcome.left]
    if outcome.took_s > case.limit_s:
        lines.append(f"took {outcome.took_s:.1f} s")
    if outcome.blamed not in (None, case.culprit) and case.how not in LEAVES_WELL | TOLD_BY_HEADERS.keys():
        lines.append(f"the pool blames rank {outcome.blamed}")
    for rank in set(range(RANKS)) - {case.culprit}:
        one = outcome.seen.get(rank)
        if one is None:
            # Its own watchdog ends it or, where the machine is so busy that this comes late, the launcher.
            ends = (f"rank {rank} was ended because another rank failed", f"rank {rank} had not ended")
            if not any(words in outcome.launcher for words in ends):
                lines.append(f"rank {rank} said nothing")
        else:
            lines += [f"rank {rank}: {line}" for line in wrong_of(case, one)]
    return lines


def wrong_of(case: Case, seen: Seen) -> list[str]:
    """Of what one of the others saw."""
    if seen.kind == "Parted" and (place := TOLD_BY_HEADERS.get(case.how)) is not None:
        return [] if f"rank {case.culprit} is at {place}" in seen.text else [seen.text]
    if seen.kind != "PeerFailed" or seen.rank != case.culprit or f"rank {case.culprit} " not in seen.text.lower():
        return [f"{seen.kind} of rank {seen.rank}: {seen.text}"]
    if case.how == "raises":
        stage, step = PLACES.get(case.where.split(",")[0], ("rows", STEP))
        if (seen.stage, seen.step) != (stage, step):
            return [f"told {seen.stage!r} of step {seen.step}"]
    if case.how == "sleeps" and ((seen.stage, seen.step) != ("forward", STEP) or "time.sleep(LONG_S)" not in seen.text):
        return [f"told {seen.stage!r} of step {seen.step}, or no stack: {seen.text}"]
    return []


LEAVES_WELL = {"leaves the loop", "leaves early"}  # so the pool has only those to blame that waited for it
TOLD_BY_HEADERS = {  # where ranks meet, all of them raise the same, with what each came for
    "sums another shape": "a sum of torch.float32 (2,)",
    "gathers": "a gather of a value",
    "evaluates": "a gather of the names of the metrics",
}
RAISES = [Case("raises", place, rank) for place, rank in product(PLACES, range(RANKS))]
ROWS = Case("raises", "rows", 0)
BUSY = [
    Case("raises", "forward", rank, peers)
    for peers in ("asleep for 20 s", "in a mutex of compiled code", "in a matrix product", "waiting for a worker")
    for rank in range(RANKS)
]
OWN_WORKER = Case("raises", "forward, its worker asleep", 1)
DESERTERS = [
    Case("leaves the loop", "another collective", 1),
    Case("says sys.exit(0)", "optimizer", 1),
    Case("says os._exit(0)", "optimizer", 1),
    Case("leaves early", "end of the script", 1),
]
SLEEPER = Case("sleeps", "forward", 1, times_out=True)
LONE_CALL = Case("calls dist.all_reduce", "forward", 1, times_out=True)
OTHERS = [
    Case("evaluates", "another collective", 1),
    Case("gathers", "elsewhere", 1),
    Case("sums another shape", "a sum", 1),
    Case("does not fold", "a step", 1),
]
DEAD = [Case("is killed", "forward", 1), Case("aborts", "forward", 1), Case("is stopped", "forward", 1, times_out=True)]


def all_cases() -> Iterator[Case]:
    """Those that run in a pool."""
    yield from (*RAISES, ROWS, *BUSY, OWN_WORKER)
    for one in (*DESERTERS, SLEEPER, LONE_CALL, *OTHERS, *DEAD):
        yield from (replace(one, culprit=rank) for rank in range(RANKS))


def on_pool(pool: Pool, ranks: int, function: Callable[..., Result], *arguments: Any) -> list[Result]:
    """As the tests' fixture has it."""
    return pool.run(function, ranks, *arguments)


def main() -> int:
    """Run all, or those cases that an argument stands in; print the table."""
    parser = argparse.ArgumentParser(description="faults on one of three ranks")
    parser.add_argument("only", nargs="*", default=[])
    add_exchange(parser)
    said = parser.parse_args()
    use_exchange(said)
    only = " ".join(said.only)
    print("| what | where | rank | the others | named | s |\n|---|---|--:|---|---|--:|")
    bad = 0
    with tempfile.TemporaryDirectory() as folder, Pool(RANKS) as pool:
        for number, case in enumerate(one for one in all_cases() if only in " ".join(map(str, vars(one).values()))):
            outcome = outcome_of(partial(on_pool, pool), case, Path(folder, str(number)))
            problems = wrong(case, outcome)
            bad += bool(problems)
            named = "yes" if not problems else "**no**: " + "; ".join(line.splitlines()[0] for line in problems)
            print(
                f"| {case.how} | {case.where} | {case.culprit} | {case.peers} | {named} | {outcome.took_s:.2f} |",
                flush=True,
            )
        for scenario in (raise_in_a_worker, kill_a_worker, kill_torchrun) if only in "torchrun" else ():
            ended: Ended = scenario(Path(folder))
            bad += bool(ended.problems)
            named = "yes" if not ended.problems else "**no**: " + "; ".join(ended.problems)
            print(f"| {ended.what} | torchrun | 1 | in a collective | {named} | {ended.took_s:.2f} |", flush=True)
    print(f"\n{bad} not as they should be")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
