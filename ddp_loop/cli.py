"""The command line: `python -m ddp_loop devices | verify | diff | checkpoints | stop | monitor | plot`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from ddp_loop.checkpoint import CheckpointInfo, CheckpointStore, best_of, run_id_of, stop_and_wait
from ddp_loop.distributed import describe_devices
from ddp_loop.monitor import serve
from ddp_loop.reporting import export
from ddp_loop.tracing import CannotVerify, VerifyJob, compare_runs, verify

HEAD = ("checkpoint", "MiB", "written", "score", "state")


def list_checkpoints(run: Path) -> tuple[bool, list[str]]:
    """Read every checkpoint of a run and check it; writes nothing.

    Returns:
        Whether there is one and all are as they were written; and the lines, the newest first.

    Raises:
        ValueError: `run` is no run folder.
    """
    run_id = run_id_of(run)
    if run_id is None:
        what = "has no run.json with an id" if run.is_dir() else "is no folder"
        raise ValueError(f"checkpoints are in the folder of a run; {run} {what}: give the folder of Loop(run_dir=...)")
    entries = CheckpointStore(run, run_id).entries(verify=True)
    if not entries:
        return False, [f"{run} has no checkpoint: a resumed run begins at the beginning"]
    newest = next((entry for entry in entries if entry.problem is None), None)
    best = best_of(entries)
    rows = [HEAD, *(_row(entry, entry is newest, entry is best) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["  ".join(one.ljust(width) for one, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if newest is None:
        lines.append("None is as it was written: a resumed run has nothing to go on from")
    return all(entry.problem is None for entry in entries), lines


def _row(entry: CheckpointInfo, is_newest: bool, is_best: bool) -> tuple[str, ...]:
    state = "valid" if entry.problem is None else f"NOT VALID: {entry.problem}"
    state += ", best" if is_best else ""
    state += ", a resumed run goes on from here" if is_newest else ""
    state = "".join(letter if letter.isprintable() else "?" for letter in state)  # names of files may be anything
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.written_s)) if entry.written_s else "-"
    score = "-" if entry.score is None else f"{entry.score:.6g}"
    return entry.path.name, f"{entry.bytes / 2**20:.1f}", written, score, state


EQUAL, UNEQUAL, FAILED, INTERRUPTED = 0, 1, 2, 130  # exit codes


def _ranks(said: str) -> list[int]:
    try:
        ranks = [int(one) for one in said.split(",")]
    except ValueError:
        ranks = []
    if len(ranks) < 2 or min(ranks) < 1 or len(set(ranks)) < len(ranks):
        raise argparse.ArgumentTypeError(
            f"at least two different numbers of ranks, 1 or more, such as 1,2,3; got {said}"
        )
    return ranks


def _above_0(said: str) -> int:
    if not said.isdecimal() or int(said) < 1:
        raise argparse.ArgumentTypeError(f"a whole number, 1 or more; got {said}")
    return int(said)


def _fraction(said: str) -> float:
    try:
        number = float(said)
    except ValueError:
        number = 0.0
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"a number between 0 and 1, such as 0.02 for bfloat16; got {said}")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ddp_loop", description="Custom data-parallel training loops.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("devices", help="what this machine has for ranks")
    one = commands.add_parser(
        "verify",
        usage="python -m ddp_loop verify SCRIPT [--ranks 1,2,3] [--steps K] [--tolerance T] [--timeout-s S] "
        "[-- SCRIPT'S ARGUMENTS]",
        help="run a script on several numbers of ranks, and say whether its numbers are the same",
        epilog=f"Exit codes: {EQUAL} equal, {UNEQUAL} unequal, {FAILED} the script failed or made no step.",
    )
    one.add_argument("script", type=Path, metavar="SCRIPT")
    one.add_argument("--ranks", type=_ranks, default=[1, 2, 3], metavar="1,2,3", help="the first is the reference")
    one.add_argument("--steps", type=_above_0, default=5, metavar="K", help="of each Loop (default: 5)")
    one.add_argument("--timeout-s", type=_above_0, default=600, metavar="S", help="for each run, in seconds (600)")
    one.add_argument("--tolerance", type=_fraction, metavar="T", help="relative, for all values (by their types)")
    two = commands.add_parser(
        "diff",
        help="the first step and tensor where two runs part",
        epilog=f"Exit codes: {EQUAL} the same bits, {UNEQUAL} not, {FAILED} they cannot be compared.",
    )
    two.add_argument("runs", type=Path, nargs=2, metavar="RUN", help="run folders of Loop(run_dir=..., trace=True)")
    three = commands.add_parser(
        "checkpoints",
        help="the checkpoints of a run, verified",
        epilog=f"Exit codes: {EQUAL} all are valid, {UNEQUAL} one is not or there is none, {FAILED} no run folder.",
    )
    three.add_argument("run", type=Path, metavar="RUN", help="the folder of Loop(run_dir=...)")
    four = commands.add_parser(
        "stop",
        help="end a run after the step under way, with a checkpoint",
        epilog=f"Exit codes: {EQUAL} it stopped or was done, {UNEQUAL} it did not, {FAILED} no run is under way there.",
    )
    four.add_argument("run", type=Path, metavar="RUN", help="the folder of Loop(run_dir=...)")
    four.add_argument("--timeout-s", type=_above_0, default=600, metavar="S", help="to wait for it, in seconds (600)")
    five = commands.add_parser(
        "monitor", help="a page with the curves of runs, under way or over, and Stop; the link is printed"
    )
    five.add_argument(
        "runs", type=Path, nargs="*", metavar="RUN", help="folders of Loop(run_dir=...), there or not yet"
    )
    five.add_argument("--demo", action="store_true", help="show made-up runs; nothing is trained")
    five.add_argument("--port", type=_above_0, default=0, metavar="P", help="to listen at (a free one)")
    five.add_argument("--host", default="127.0.0.1", metavar="A", help="show the page to more than this machine")
    five.add_argument("--allow-host", action="append", default=[], metavar="NAME", help="a further name of this server")
    six = commands.add_parser(
        "plot",
        help="draw a run's loss and metrics, as PNG and SVG, and write its rows as CSV",
        epilog=f"Exit codes: {EQUAL} drawn, {FAILED} there are no rows, or matplotlib is missing.",
    )
    six.add_argument("run", type=Path, metavar="RUN", help="the folder of Loop(run_dir=...)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    end = given.index("--") if "--" in given else len(given)  # what is behind it belongs to the script
    said = _parser().parse_args(given[:end])
    try:
        if said.command == "verify":
            if not said.script.is_file():
                raise CannotVerify(f"SCRIPT must be a file with Python in it; there is no {said.script}")
            job = VerifyJob(said.script, given[end + 1 :], said.steps, said.timeout_s, said.tolerance)
            equal = verify(job, said.ranks, _say)
            return EQUAL if equal else UNEQUAL
        if said.command == "diff":
            equal, lines = compare_runs(*said.runs)
            print("\n".join(lines))
            return EQUAL if equal else UNEQUAL
        if said.command == "checkpoints":
            valid, lines = list_checkpoints(said.run)
            print("\n".join(lines))
            return EQUAL if valid else UNEQUAL
        if said.command == "monitor":
            return _monitor(said)
        if said.command == "stop":
            return EQUAL if stop_and_wait(said.run, said.timeout_s, _say) else UNEQUAL
        if said.command == "plot":
            print("\n".join(str(file) for file in export(said.run)))
            return EQUAL
    except (CannotVerify, ValueError, ImportError) as error:
        print(f"ddp_loop {said.command}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    print(describe_devices())
    return 0


def _monitor(said: argparse.Namespace) -> int:
    if not said.runs and not said.demo:
        raise ValueError("give at least one RUN, the folder of Loop(run_dir=...), or --demo")
    serve(said.runs, _say, host=said.host, port=said.port, also=said.allow_host, demo=said.demo)
    return EQUAL


def _say(line: str) -> None:
    print(line, flush=True)
