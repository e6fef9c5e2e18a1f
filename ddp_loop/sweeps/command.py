"""`python -m ddp_loop sweep`: begin a sweep from a TOML file, help it, and run failed trials again."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import forget_stop, read_json
from ddp_loop.elastic import program_name
from ddp_loop.reporting import TRIAL, TRIALS, ask_for, has_workers, is_sweep
from ddp_loop.sweeps.folders import STUDY, read_sweep
from ddp_loop.sweeps.jobs import FunctionJob, Job, ScriptJob, find_function, nearest, read_job
from ddp_loop.sweeps.plan import OBJECT, USUAL, SweepPlan, make_plan
from ddp_loop.sweeps.results import GOOD, begun, has_failed, help_sweep, run_sweep
from ddp_loop.sweeps.running import Say
from ddp_loop.sweeps.slurm import LOCAL, SLURM, Jobs, check_jobs, how_to_go_on, read_options, submit_workers
from ddp_loop.sweeps.storage import check_reachable, folders_in, shown_url, sqlite_url

KINDS: dict[str, tuple[type, str]] = {
    "script": (str, "a text"),
    "function": (str, "a text"),
    "folder": (str, "a text"),
    "storage": (str, "a text"),
    "arguments": (list, 'a list of texts, such as ["--epochs", "3"]'),
    "keywords": (dict, "a table"),
    "space": (dict, "a table"),
    "points": (list, "a list of tables, [[points]]"),
}  # the others are checked as `sweep` checks its arguments
KNOWN = (*USUAL, *KINDS, "slots")
HIDDEN = ":***@"  # where a URL had its password


def add_sweep(add: Callable[..., Any], count: Callable[[str], int], say: Say) -> None:
    """Add the command to a parser.

    Args:
        add: adds a command by its name, its call, its help and its exit codes.
        count: reads a whole number, 1 or more.
        say: prints a line.
    """
    command = add(
        "sweep",
        lambda options: _run(options, say),
        "train many networks, each an ordinary run, on all slots of this machine",
        "0 no trial failed, 1 one failed, 2 the sweep cannot be begun",
        usage=f"{program_name()} sweep FILE.toml | work FOLDER|URL | again FOLDER [--slots N] [--storage URL] "
        "[--on slurm|local] [--workers N] ...",
    )
    command.add_argument("words", nargs="+", metavar="FILE.toml | work FOLDER|URL | again FOLDER")
    command.add_argument("--slots", type=count, metavar="N", help="ranks at once here (default: GPUs, or cores)")
    command.add_argument("--folder", type=Path, metavar="FOLDER", help="of the sweep, in place of the file's")
    command.add_argument("--storage", metavar="URL", help="of any storage of Optuna's (default: SQLite in the folder)")
    command.add_argument("--on", choices=(SLURM, LOCAL), help="submit workers as jobs of Slurm, or of this machine")
    command.add_argument("--workers", type=count, default=1, metavar="N", help="jobs, each a worker (default: 1)")
    text = "an option of the jobs, such as partition=gpu, gpus_per_node=1 or timeout_min=60; may be repeated"
    command.add_argument("--slurm", action="append", default=[], metavar="KEY=VALUE", help=text)
    command.add_argument("--trials", metavar="1,2", help="again: these trials (default: all that failed)")


def _run(options: argparse.Namespace, say: Say) -> bool:
    _refuse_unused(options)
    match options.words:
        case ["work", url] if "://" in url:
            return work(options.folder or folder_in(url), options.slots, url, say)
        case ["work", folder]:
            return work(Path(folder), options.slots, options.storage, say)
        case ["again", folder]:
            return again(Path(folder), _numbers(options.trials), options.slots, options.storage, say)
        case [path] if options.on is not None:
            submit(Path(path), options, say)
            return True
        case [path]:
            return begin(Path(path), options.slots, options.folder, options.storage, say)
    raise ValueError(
        f"sweep takes FILE.toml, work FOLDER, work URL or again FOLDER. Got {' '.join(options.words)}. "
        f"{nearest(options.words[0], ('work', 'again'))}".rstrip()
    )


def _refuse_unused(options: argparse.Namespace) -> None:
    """Raise ValueError if an option would not count."""
    words = options.words
    is_alone = len(words) == 1
    for option, is_given, counts, where in (
        ("--trials", options.trials is not None, words[0] == "again", "again FOLDER. A file has trials = N"),
        ("--on", options.on is not None, is_alone, "FILE.toml or FOLDER alone"),
        ("--workers", options.workers > 1, options.on is not None, "--on"),
        ("--slurm", bool(options.slurm), options.on is not None, "--on"),
        ("--folder", options.folder is not None, is_alone or "://" in words[-1], "FILE.toml or work URL"),
    ):
        if is_given and not counts:
            raise ValueError(f"{option} goes with {where}. Got sweep {' '.join(words)} {option}. Leave it out.")


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    if not all(one.isdecimal() for one in text.split(",")):
        raise ValueError(f"--trials must be numbers of trials, such as 1,2. Got {text}.")
    return [int(one) for one in text.split(",")]


def begin(path: Path, slots: int | None, folder: Path | None, storage: str | None, say: Say) -> bool:
    """Begin the sweep of a TOML file, or go on with it; returns whether no trial failed.

    Args:
        path: of the file.
        slots, folder, storage: in place of the file's.
        say: prints a line.

    Raises:
        ValueError: the file cannot be read, or the sweep cannot be begun.
    """
    plan, folder, given = _read_plan(path, folder)
    results = run_sweep(plan, folder, slots or given.get("slots"), storage or given.get("storage"), say)
    return not any(map(has_failed, results))


def _read_plan(path: Path, folder: Path | None) -> tuple[SweepPlan, Path, dict[str, Any]]:
    """The plan, the folder and the keys of a TOML file."""
    if is_sweep(path):
        raise ValueError(
            f"{path} is the folder of a sweep. Pass its TOML file, or run its trials by {program_name()} sweep work "
            f"{path}."
        )
    given = _read_toml(path)
    if folder is None:
        if "folder" not in given:
            raise ValueError(f'{path} names no folder for the sweep. Add folder = "runs/NAME", or pass --folder.')
        folder = path.parent / given["folder"]
    job: Job
    if "script" in given:
        job = ScriptJob(path.parent / given["script"], tuple(map(str, given.get("arguments", ()))))
    else:
        job = FunctionJob(find_function(given["function"], path.parent), given.get("keywords", {}))
    return make_plan(job, given.get("points", given.get("space")), given), folder, given


def submit(path: Path, options: argparse.Namespace, say: Say) -> None:
    """Begin the sweep of a TOML file, or find it in its folder, and submit workers of it.

    Args:
        path: the file, or the folder of a sweep.
        options: of the command.
        say: prints a line.

    Raises:
        ImportError: submitit is missing.
        ValueError: the sweep cannot be begun, Slurm is missing or refused the jobs, or an option is unknown.
    """
    jobs = Jobs(options.on, options.workers, read_options(options.slurm))
    check_jobs(jobs)
    slots = options.slots
    storage = options.storage
    if path.is_dir():
        read_sweep(path)
        folder = path
        forget_stop(folder)
    else:
        plan, folder, given = _read_plan(path, options.folder)
        slots = slots or given.get("slots")
        storage = storage or given.get("storage")
        with begun(plan, folder, storage):
            pass  # the workers find it in the storage
    ids = submit_workers(folder, jobs, slots, storage)
    for line in how_to_go_on(folder, ids, options.on):
        say(line)


def work(folder: Path, slots: int | None, storage: str | None, say: Say) -> bool:
    """Help to run the trials of a sweep; returns whether no trial failed.

    Raises:
        ValueError: the folder has no sweep, or its job cannot be run by another process.
    """
    facts = read_sweep(folder)
    own = folder.absolute() / STUDY  # the folder may have been moved since it was begun
    url = storage or (sqlite_url(own) if own.exists() else facts["storage"])
    if HIDDEN in url:
        raise ValueError(f"The storage {url} needs its password, which the folder does not have. Pass --storage URL.")
    results = help_sweep(_plan_of(facts), folder.absolute(), slots, url, say)
    return not any(map(has_failed, results))


def folder_in(url: str) -> Path:
    """The folder of the sweep in a storage.

    Raises:
        ValueError: the storage cannot be reached, or has no sweep or several.
    """
    check_reachable(url)
    found = folders_in(url)
    if len(found) == 1:
        return found[0]
    listed = f"It has {len(found)}: {', '.join(map(str, found))}." if found else "It has none."
    raise ValueError(f"The storage {shown_url(url)} must have one sweep. {listed} Pass --folder FOLDER.")


def again(folder: Path, trials: Sequence[int] | None, slots: int | None, storage: str | None, say: Say) -> bool:
    """Run trials again, by the sweep's own workers if it has some; returns whether no trial failed.

    Args:
        folder: of the sweep.
        trials: their numbers; None takes all that failed.
        slots, storage, say: as in `work`.

    Raises:
        ValueError: there are none of these numbers, or none failed.
    """
    read_sweep(folder)
    known = {path.parent.name: read_json(path) for path in (folder / TRIALS).glob(f"*/{TRIAL}")}
    status = {int(name): str(facts.get("status")) for name, facts in known.items() if name.isdecimal()}
    ended = {trial for trial, one in status.items() if one not in ("running", "waiting", "interrupted")}
    wanted = [trial for trial in sorted(ended) if status[trial] not in GOOD] if trials is None else list(trials)
    if not wanted:
        raise ValueError(f"No trial of {folder} failed. Pass --trials to run others again.")
    if not ended >= set(wanted):
        raise ValueError(f"Only trials that have ended can run again: {sorted(ended)}. Got {wanted}.")
    ask_for(folder, wanted)
    if has_workers(folder):
        say(f"The workers of {folder} run {len(wanted)} trials again.")
        return True
    return work(folder, slots, storage, say)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"A sweep is described in a TOML file. {path} cannot be read ({error.strerror}).") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}.") from error
    for name in given:
        if name not in KNOWN:
            raise ValueError(f"{path} has an unknown key {name!r}. {nearest(name, KNOWN)}".rstrip())
        kind, described = KINDS.get(name, (object, ""))
        if not isinstance(given[name], kind):
            raise ValueError(f"{name} must be {described}. {path} has {given[name]!r}.")
    if ("script" in given) == ("function" in given):
        raise ValueError(f'{path} must have either script = "FILE.py" or function = "FILE.py:NAME".')
    if ("space" in given) == ("points" in given):
        raise ValueError(f"{path} must have either a table [space] or a list [[points]].")
    return given


def _plan_of(facts: Mapping[str, Any]) -> SweepPlan:
    """The plan of a sweep that another process began."""
    given = dict(facts)
    if str(given["sampler"]).startswith(OBJECT):
        raise ValueError(
            f"This sweep's sampler is {given['sampler']}, which only its own process has. Give it by name, such as "
            '"tpe".'
        )
    if given["sampler"] in ("list", "grid"):
        given |= {"trials": None, "sampler": None}
    return make_plan(read_job(facts["job"]), facts["space"], given)
