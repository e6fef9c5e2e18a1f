"""The command line: `ddp_loop COMMAND`, or `python -m ddp_loop COMMAND`; alone it lists the commands.

A room is imported by the command that needs it, so that `run` starts a script's ranks as soon as torchrun would.
"""

from __future__ import annotations

import argparse
import difflib
import os
import platform
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from ddp_loop.checkpoint import CheckpointInfo

HEAD = ("checkpoint", "MiB", "written", "score", "state")
EXAMPLES = {  # one for the help of each command
    "run": "run --ranks 4 train.py --epochs 20",
    "sweep": "sweep sweep.toml --slots 4",
    "hosts": "hosts --run-dir /shared/runs/one",
    "devices": "devices",
    "verify": "verify train.py --ranks 1,2,3 -- --epochs 1",
    "profile": "profile train.py --ranks 2",
    "diff": "diff runs/one runs/two",
    "checkpoints": "checkpoints runs/one",
    "stop": "stop runs/one",
    "monitor": "monitor runs",
    "plot": "plot runs/one runs/two --smooth 10",
    "export": "export runs/one --best -o model.safetensors",
    "runs": 'runs runs --sort "epoch loss" --where "state=done"',
    "best": "best runs --by loss",
}
TO_ITS_END = (
    "runs to its end, and each Loop ends early, without a run folder. So files that the script writes itself, such as "
    "by torch.save, overwrite the files of a whole training."
)
HOW_TO_KEEP = "Pass it other paths after --, or run it in a copy of its folder."
OTHER_NAMES = {  # of commands, under which other tools have them
    "train": "run", "launch": "run", "start": "run", "torchrun": "run", "list": "runs", "ls": "runs",
    "status": "runs", "serve": "monitor", "ui": "monitor", "board": "monitor", "compare": "diff", "test": "verify",
    "search": "sweep", "tune": "sweep", "curves": "plot", "info": "devices", "env": "devices", "kill": "stop",
}  # fmt: skip


def list_checkpoints(run: Path) -> tuple[bool, list[str]]:
    """Read and check every checkpoint of a run, without writing anything.

    Returns:
        Whether there are checkpoints and all are valid; and lines of text, the newest checkpoint first.

    Raises:
        ValueError: `run` is not a run folder.
    """
    from ddp_loop.checkpoint import best_of, store_of
    from ddp_loop.distributed import aligned

    entries = store_of(run).entries(verify=True)
    if not entries:
        return False, [f"{run} has no checkpoint. A resumed run starts from the beginning."]
    newest = next((entry for entry in entries if entry.problem is None), None)
    best = best_of(entries)
    rows = [HEAD, *(_row(entry, entry is newest, entry is best) for entry in entries)]
    lines = aligned(rows)
    if newest is None:
        lines.append("No checkpoint is valid. A resumed run has nothing to start from.")
    return all(entry.problem is None for entry in entries), lines


def _row(entry: CheckpointInfo, is_newest: bool, is_best: bool) -> tuple[str, ...]:
    from ddp_loop.checkpoint import mebibytes

    state = "valid" if entry.problem is None else f"NOT VALID: {entry.problem}"
    state += ", best" if is_best else ""
    state += ", a resumed run starts from here" if is_newest else ""
    state = "".join(letter if letter.isprintable() else "?" for letter in state)  # file names may have any character
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.written_s)) if entry.written_s else "-"
    score = "-" if entry.score is None else f"{entry.score:.6g}"
    return entry.path.name, mebibytes(entry.bytes), written, score, state


EQUAL = 0
UNEQUAL = 1
FAILED = 2
INTERRUPTED = 130
UNREAD = 141  # exit codes


def _ranks(text: str) -> list[int]:
    try:
        ranks = [int(one) for one in text.split(",")]
    except ValueError:
        ranks = []
    if len(ranks) < 2 or min(ranks) < 1 or len(set(ranks)) < len(ranks):
        raise argparse.ArgumentTypeError(
            f"must be two or more different numbers of ranks, 1 or more, such as 1,2,3 (got {text})"
        )
    return ranks


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more (got {text})")
    return int(text)


def _fraction(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, such as 0.02 for bfloat16 (got {text})")
    return number


class _Parser(argparse.ArgumentParser):
    """Argparse's, but the error of an unknown command names one that is like it."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the mistake, and exit."""
        typed = re.match(r"argument COMMAND: invalid choice: '(.*?)' ", message)
        if typed is not None:
            names = {**OTHER_NAMES, **{name: name for name in EXAMPLES}}
            like = difflib.get_close_matches(typed[1], names, 1)
            meant = f"The commands are {', '.join(EXAMPLES)}."
            if like:
                name = names[like[0]]
                meant = f"Did you mean {name!r}? For example: {self.prog} {EXAMPLES[name]}"
            message = f"There is no command {typed[1]!r}. {meant}"
        super().error(message)


def _version() -> str:
    versions = [f"{name} {metadata.version(name)}" for name in ("ddp_loop", "torch")]
    return ", ".join([*versions, f"Python {platform.python_version()}"])


def _parser() -> argparse.ArgumentParser:
    from ddp_loop.elastic import add_run, program_name
    from ddp_loop.hosts import add_hosts
    from ddp_loop.sweeps import add_sweep

    program = program_name()
    parser = _Parser(
        prog=program,
        description="Custom data-parallel training loops: the loop of one device, run on N.",
        epilog=f"`{program} COMMAND --help` explains a command. For example: {program} {EXAMPLES['run']}",
    )
    parser.add_argument("--version", action="version", version=_version())
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        metavar="SHELL",
        help="print the completion of bash, zsh, tcsh or fish",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str, call: Callable[[argparse.Namespace], bool], what: str, codes: str = "", note: str = "", **more: Any
    ) -> Any:
        ends = textwrap.fill(f"Exit codes: {codes}.", 100) if codes else ""
        command = commands.add_parser(
            name,
            help=what,
            description=textwrap.fill(f"{what[0].upper()}{what[1:]}. {note}", 100),
            epilog=f"Example: {program} {EXAMPLES[name]}\n{ends}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **more,
        )
        command.set_defaults(call=call, refuse=command.error)
        return command

    add_run(add)
    add_sweep(add, _count, _say)
    add_hosts(add, _say)
    add("devices", _devices, "show the devices of this machine", f"{EQUAL} always")
    _add_checks(add)
    _add_folders(add)
    _add_outputs(add)
    _add_runs(add)
    return parser


class _PrintCompletion(argparse.Action):
    """Prints the code with which a shell completes commands and options."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: Any, option_string: str | None = None
    ) -> None:
        try:
            print(completion_of(values))
        except (ImportError, ValueError) as error:
            parser.error(str(error))
        parser.exit()


def completion_of(shell: str) -> str:
    """The script with which a shell completes commands and options.

    Args:
        shell: "bash", "zsh", "tcsh" or "fish".

    Raises:
        ValueError: another shell.
        ImportError: shtab is missing.
    """
    try:
        import shtab
    except ImportError as error:
        raise ImportError("--print-completion needs shtab. Run pip install 'ddp_loop[completion]'.") from error
    from ddp_loop.elastic import run_parser

    if shell not in shtab.SUPPORTED_SHELLS:
        raise ValueError(f"--print-completion takes {', '.join(shtab.SUPPORTED_SHELLS)}. Got {shell!r}.")
    parser = _parser()
    commands: Any = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    commands.choices["run"] = run_parser()
    for command in commands.choices.values():
        for action in command._actions:
            if action.type is Path or action.dest == "training_script":
                action.complete = shtab.FILE  # a folder too
    script: str = shtab.complete(parser, shell)
    return script


def _add_checks(add: Callable[..., Any]) -> None:
    verify = add(
        "verify",
        _verify,
        "run a script on several numbers of ranks and compare the results",
        f"{EQUAL} equal, {UNEQUAL} unequal, {FAILED} the script failed or made no step",
        note=f"The script {TO_ITS_END} {HOW_TO_KEEP}",
        usage="%(prog)s SCRIPT [--ranks 1,2,3] [--steps K] [--tolerance T] [--timeout-s S] [-- SCRIPT'S ARGUMENTS]",
    )
    verify.add_argument("script", type=Path, metavar="SCRIPT")
    verify.add_argument("--ranks", type=_ranks, default=[1, 2, 3], metavar="1,2,3", help="the first is the reference")
    verify.add_argument("--steps", type=_count, default=5, metavar="K", help="steps of each Loop (default: 5)")
    verify.add_argument(
        "--timeout-s", type=_count, default=600, metavar="S", help="seconds for each run (default: 600)"
    )
    verify.add_argument("--tolerance", type=_fraction, metavar="T", help="relative, for all values (default: by dtype)")
    profile = add(
        "profile",
        _profile,
        "run a script and show where the time of a step goes on each rank",
        f"{EQUAL} measured, {FAILED} the script failed or made no step",
        note=f"The script {TO_ITS_END} {HOW_TO_KEEP}",
        usage="%(prog)s SCRIPT [--ranks N] [--steps K] [--trace FOLDER] [-- SCRIPT'S ARGUMENTS]",
    )
    profile.add_argument("script", type=Path, metavar="SCRIPT")
    profile.add_argument("--ranks", type=_count, metavar="N", help="number of ranks (default: the GPUs, or 2)")
    profile.add_argument("--steps", type=_count, default=20, metavar="K", help="steps to measure (default: 20)")
    profile.add_argument("--trace", type=Path, metavar="FOLDER", help="also write a Chrome trace of each rank there")
    diff = add(
        "diff",
        _diff,
        "show the first step and tensor in which two runs differ",
        f"{EQUAL} the same bits, {UNEQUAL} different bits, {FAILED} the runs cannot be compared",
    )
    diff.add_argument("runs", type=Path, nargs=2, metavar="RUN", help="run folders of Loop(run_dir=..., trace=True)")


def _add_folders(add: Callable[..., Any]) -> None:
    one = add(
        "checkpoints",
        lambda options: _show(*list_checkpoints(options.run)),
        "list and check the checkpoints of a run",
        f"{EQUAL} all are valid, {UNEQUAL} one is not or there is none, {FAILED} no run folder",
    )
    two = add(
        "stop",
        _stop,
        "stop a run, or all trials of a sweep, after the current step, with a checkpoint",
        f"{EQUAL} it stopped or was done, {UNEQUAL} it did not stop, {FAILED} it was not running",
    )
    two.add_argument("--timeout-s", type=_count, default=600, metavar="S", help="seconds to wait (default: 600)")
    for command in (one, two):
        command.add_argument("run", type=Path, metavar="RUN", help="the folder of Loop(run_dir=...)")
    three = add(
        "monitor",
        _monitor,
        "serve a page with the curves of runs and a Stop button, and print its link",
        f"{EQUAL} ended by Ctrl-C, {FAILED} it cannot be served",
    )
    three.add_argument("runs", type=Path, nargs="*", metavar="FOLDER", help="run folders, or folders of runs")
    three.add_argument("--demo", action="store_true", help="show made-up runs; nothing is trained")
    three.add_argument("--port", type=_count, default=0, metavar="P", help="port of the page (default: a free one)")
    three.add_argument("--host", default="127.0.0.1", metavar="A", help="address that serves other machines too")
    three.add_argument("--allow-host", action="append", default=[], metavar="NAME", help="another name of this server")


def _devices(options: argparse.Namespace) -> bool:
    from ddp_loop.distributed import describe_devices

    return _show(True, [describe_devices()])


def _diff(options: argparse.Namespace) -> bool:
    from ddp_loop.tracing import compare_runs

    return _show(*compare_runs(*options.runs))


def _plot(options: argparse.Namespace) -> bool:
    from ddp_loop.reporting import PictureStyle, compare, export

    style = PictureStyle(options.title, options.smooth, options.log or None)
    if len(options.runs) == 1 and options.output is None:
        return _show(True, map(str, export(options.runs[0], style)))
    return _show(True, map(str, compare(options.runs, options.output or Path("pictures"), style)))


def _add_outputs(add: Callable[..., Any]) -> None:
    plot = add(
        "plot",
        _plot,
        "draw the loss and metrics of a run, or of several over each other, as PNG and SVG",
        f"{EQUAL} drawn, {FAILED} there are no rows, or matplotlib is missing",
    )
    plot.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the folder of Loop(run_dir=...)")
    plot.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", help="for pictures (default: in the run, of several pictures/)"
    )
    plot.add_argument("--title", metavar="TEXT", help="above the curves (default: the run's name)")
    plot.add_argument(
        "--smooth",
        type=_count,
        default=0,
        metavar="STEPS",
        help="draw exponential means over so many steps, and the rows pale",
    )
    plot.add_argument("--log", action="store_true", help="logarithmic scale (default: where values span much)")
    export = add(
        "export",
        _export,
        "write the weights of a run's newest or best checkpoint to a safetensors file",
        f"{EQUAL} written, {FAILED} there is no such checkpoint or part, or the file cannot be written",
    )
    export.add_argument("run", type=Path, metavar="RUN", help="the folder of Loop(run_dir=...), or of a checkpoint")
    export.add_argument("-o", "--output", type=Path, metavar="FILE", required=True, help="such as model.safetensors")
    export.add_argument("--best", action="store_true", help="the checkpoint with the lowest score, not the newest")
    export.add_argument("--checkpoint", metavar="NAME", help="the checkpoint of this name, such as step-00000120")
    export.add_argument("--part", default="model", metavar="NAME", help="of Loop(state=...) (default: model)")


def _add_runs(add: Callable[..., Any]) -> None:
    one = add(
        "runs",
        _list_runs,
        "show a table of all runs below a folder: state, config, last and best values",
        f"{EQUAL} shown, {FAILED} no folder, no run in it, or an unknown column",
    )
    one.add_argument("--sort", metavar="COLUMN", help='sort by a column, such as "best eval loss"')
    one.add_argument("--descending", action="store_true", help="with --sort: the largest first")
    one.add_argument(
        "--where", action="append", default=[], metavar="CONDITION", help='show runs with "rate=0.1", "state!=failed"'
    )
    one.add_argument("--csv", type=Path, metavar="FILE", help="also write all columns and digits as CSV")
    one.add_argument("--watch", action="store_true", help="show the table again each second, until Ctrl-C")
    two = add(
        "best",
        _best,
        "show the best run below a folder, or the best trial of a sweep, with its checkpoint",
        f"{EQUAL} found, {UNEQUAL} there is none, {FAILED} no folder, no run in it, or an unknown value",
    )
    two.add_argument(
        "--by",
        metavar="NAME",
        help="value that decides (default: a sweep's objective, or eval loss, or the checkpoints' score)",
    )
    two.add_argument("--highest", action="store_true", help="the highest is the best (default for all but losses)")
    for command in (one, two):
        command.add_argument("folder", type=Path, metavar="FOLDER", help="a folder of runs, or of a sweep")


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code.

    Args:
        arguments: of the command line, without the program; by default this process's own.
    """
    from ddp_loop.elastic import open_missing_streams

    open_missing_streams()
    try:
        try:
            return _command(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again at its end
        return UNREAD


def _command(arguments: list[str] | None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["help"]:
        given = [*given[1:2], "--help"]
    if given[:1] == ["run"]:
        return _run(given[1:], None if arguments is not None else sys.orig_argv)
    if not given:
        _parser().print_help()
        return EQUAL
    if given[:1] == ["resume"]:
        print(f"ddp_loop: {_how_to_resume(given[1:])}", file=sys.stderr)
        return FAILED
    end = given.index("--") if "--" in given else len(given)  # the rest belongs to the script
    options, unknown = _parser().parse_known_args(given[:end], argparse.Namespace(arguments=given[end + 1 :]))
    if unknown:
        options.refuse(f"unrecognized arguments: {' '.join(unknown)}")  # with the usage of this command alone
    try:
        return EQUAL if options.call(options) else UNEQUAL
    except BrokenPipeError:
        raise
    except _refusals() as error:
        print(f"ddp_loop {options.command}: {_in_words(error)}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _how_to_resume(words: list[str]) -> str:
    """The answer to `resume`, which is no command, but a word that other tools have."""
    from ddp_loop.checkpoint import STATUS, lacks_secret, read_json, way_on
    from ddp_loop.elastic import program_name

    fact = "There is no command 'resume'. A run resumes when its script is started again"
    for word in words:
        status = read_json(Path(word) / STATUS)
        if command := way_on(status):
            return " ".join(filter(None, (f"{fact}: {command}", lacks_secret(status))))
    return f"{fact}, for example: {program_name()} {EXAMPLES['run']}"


def _refusals() -> tuple[type[Exception], ...]:
    """The exceptions that are the user's to mend, after one was raised."""
    from ddp_loop.profiling import CannotProfile
    from ddp_loop.tracing import CannotVerify

    return (CannotVerify, CannotProfile, ValueError, ImportError, OSError)


def _in_words(error: Exception) -> str:
    """What an exception says; of a file that fails also what to do, which the package's own messages have."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if error.filename is None:
        return error.strerror
    return (
        f"{error.filename} cannot be read or written ({error.strerror}). Check its path, its permissions and its disk."
    )


def _run(arguments: list[str], typed: list[str] | None) -> int:
    """`run` apart from the others, since all that follows its SCRIPT belongs to the script."""
    try:
        from ddp_loop.elastic import run_command

        return run_command(arguments, typed)
    except (ValueError, ImportError) as error:
        print(f"ddp_loop run: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _best(options: argparse.Namespace) -> bool:
    from ddp_loop.reporting import best_run

    return best_run(options.folder, _say, by=options.by, highest=options.highest)


def _announce(script: Path) -> None:
    """Say what becomes of a script, which must be a file."""
    if not script.is_file():
        what = "is a folder" if script.is_dir() else "does not exist"
        raise ValueError(f"SCRIPT must be a Python file. {script} {what}. Check its path.")
    _say(f"{script} {TO_ITS_END}")


def _verify(options: argparse.Namespace) -> bool:
    from ddp_loop.tracing import VerifyJob, verify

    _announce(options.script)
    job = VerifyJob(options.script, options.arguments, options.steps, options.timeout_s, options.tolerance)
    return verify(job, options.ranks, _say)


def _profile(options: argparse.Namespace) -> bool:
    from ddp_loop.accelerators import gpu_count
    from ddp_loop.profiling import profile

    _announce(options.script)
    ranks = options.ranks or gpu_count() or 2
    profile(options.script, ranks, options.arguments, _say, steps=options.steps, traces=options.trace)
    return True


def _stop(options: argparse.Namespace) -> bool:
    from ddp_loop.checkpoint import stop_and_wait
    from ddp_loop.reporting import is_sweep
    from ddp_loop.sweeps import stop_sweep

    stop = stop_sweep if is_sweep(options.run) else stop_and_wait
    return stop(options.run, options.timeout_s, _say)


def _export(options: argparse.Namespace) -> bool:
    from ddp_loop.checkpoint import export_weights

    what = options.run, options.output, options.part
    return _show(True, [export_weights(*what, say=_complain, best=options.best, checkpoint=options.checkpoint)])


def _complain(line: str) -> None:
    print(f"ddp_loop export: {line}", file=sys.stderr)


def _list_runs(options: argparse.Namespace) -> bool:
    from ddp_loop.reporting import RunQuery, list_runs

    query = RunQuery(options.folder, options.sort, options.descending, options.where)
    list_runs(query, _say, file=options.csv, watch=options.watch)
    return True


def _monitor(options: argparse.Namespace) -> bool:
    from ddp_loop.monitor import serve

    if not options.runs and not options.demo:
        raise ValueError("monitor needs at least one FOLDER, of Loop(run_dir=...) or with runs below it, or --demo.")
    serve(options.runs, _say, host=options.host, port=options.port, also=options.allow_host, demo=options.demo)
    return True


def _show(good: bool, lines: Iterable[str]) -> bool:
    print("\n".join(lines))
    return good


def _say(line: str) -> None:
    print(line, flush=True)
