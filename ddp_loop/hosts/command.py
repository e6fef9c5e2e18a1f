"""`python -m ddp_loop hosts`: the ranks of a launcher find out whether a run can begin.

The ranks exchange words through the launcher's store alone, which is what works if anything does. Each wait has a
limit. All ranks come to the same verdict, so all have the same exit code; rank 0 prints it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ddp_loop.distributed import RankEnv, launcher_store, read_rank_env
from ddp_loop.hosts.facts import Facts, facts_of, shared_file
from ddp_loop.hosts.links import Link, Listener, connect_all, measure_rounds
from ddp_loop.hosts.verdict import Bounds, Findings, table, verdict

_Kind = TypeVar("_Kind", Facts, Link)
_LOOK_S = 0.02
_PHASE_S = 30.0  # for what takes a rank some seconds
_ROUND_S = 40.0  # for a measurement: two directions, and the round trips
_SEEN_S = 3.0  # for a new file on a network disk


@dataclass(frozen=True)
class HostsOptions:
    """What is checked.

    Attributes:
        run, data, script: the run folder, the data and the script of the run; None for what is not checked.
        bounds: what hosts must keep to.
        timeout_s: how long the ranks are waited for at the beginning.
    """

    run: Path | None = None
    data: Path | None = None
    script: Path | None = None
    bounds: Bounds = field(default_factory=Bounds)
    timeout_s: float = 60.0


@dataclass
class Ranks:
    """Words of some ranks through the launcher's store, each waited for up to a limit.

    Attributes:
        store: with keys of this check alone.
        own: the number of this rank.
        present: the ranks that are waited for.
    """

    store: dist.Store
    own: int
    present: list[int]

    def gather(self, what: str, word: Any, limit_s: float) -> dict[int, Any]:
        """The word of each rank that gave one in time, by rank. Later ones are waited for no more.

        All present ranks must call this. Which ones came is what the first of them found, so that all agree.
        """
        self.store.set(f"{what}/{self.own}", json.dumps(word))
        deadline = time.monotonic() + limit_s
        keys = {rank: f"{what}/{rank}" for rank in self.present}
        with suppress(RuntimeError):  # the store is gone with rank 0
            while not self.store.check(list(keys.values())) and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
            came = json.dumps([rank for rank, key in keys.items() if self.store.check([key])])
            self.present = json.loads(self.store.compare_set(f"{what}/came", "", came))
            return {rank: json.loads(self.store.get(f"{what}/{rank}")) for rank in self.present}
        return {self.own: word}


def check_hosts(options: HostsOptions, say: Callable[[str], None]) -> bool:
    """Check the hosts of all ranks that torchrun started, or this one alone. Every rank must call this.

    Args:
        options: what is checked.
        say: called with each line of the table and the verdict, on rank 0.

    Returns:
        Whether a run can begin, the same on every rank.

    Raises:
        ValueError: this rank does not reach the launcher's store.
    """
    place = read_rank_env(os.environ)
    store: dist.Store = dist.HashStore()
    if place.size > 1:
        try:
            store = launcher_store(place, timedelta(seconds=options.timeout_s))
        except RuntimeError as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise ValueError(
                f"Rank {place.rank} does not reach the launcher's store at {where} ({error}). Check the address, and "
                "open the port between the hosts."
            ) from None
    found = find(Ranks(dist.PrefixStore("hosts", store), place.rank, list(range(place.size))), place, options)
    good, lines = verdict(found, options.bounds)
    if place.rank == min(found.facts):
        for line in (*table(found), "", *lines):
            say(line)
    return good


def find(ranks: Ranks, place: RankEnv, options: HostsOptions) -> Findings:
    """What all ranks find, the same on each. Every rank must call this."""
    token = hashlib.sha256(os.urandom(32)).hexdigest()[:32]
    began = ranks.gather("token", token, options.timeout_s)
    token = next(iter(began.values()))
    shared = None if options.run is None else options.run / f".hosts-{token}"  # do all ranks see one folder?
    facts = facts_of(place, options.run, options.data, options.script)
    with ExitStack() as ending:
        try:
            listener = Listener(place.rank, token)
            ending.callback(listener.close)
            facts = replace(facts, address=listener.address)
        except OSError as error:
            facts = replace(facts, problem=facts.problem or f"It cannot listen for gloo ({error}).")
        problem = ""
        if shared is not None and place.rank == 0:
            problem = ending.enter_context(shared_file(shared))
        words = ranks.gather("facts", {**asdict(facts), "folder": problem}, options.timeout_s)
        problem = next(iter(words.values()))["folder"]
        every = {rank: _read(Facts, word) for rank, word in words.items()}
        found = Findings(place.size, every, problem=problem, timeout_s=options.timeout_s)
        return _connected(ranks, found, shared, token)


def _connected(ranks: Ranks, found: Findings, shared: Path | None, token: str) -> Findings:
    """The findings with what needs connections to the other ranks."""
    addresses = {rank: one.address for rank, one in found.facts.items() if rank != ranks.own and one.address[0]}
    connections, why = connect_all(addresses, token)
    try:
        words = ranks.gather("links", {"why": why, "sees": shared is None or _sees(shared)}, _PHASE_S)
        leaders = found.leaders()
        links: dict[int, Link] = {}
        if ranks.own in leaders:
            leading = replace(ranks, present=leaders)
            meet = partial(leading.gather, word=None, limit_s=_ROUND_S)
            links = measure_rounds(ranks.own, leaders, connections, meet)
        rounds = _ROUND_S * (len(leaders) + 1)
        measured = ranks.gather("measured", {other: asdict(link) for other, link in links.items()}, rounds)
        ranks.gather("end", None, _PHASE_S)  # rank 0 may have the store, and must not end while others read
    finally:
        for connection in connections.values():
            connection.close()
    return replace(
        found,
        unreachable={(rank, int(other)): text for rank, word in words.items() for other, text in word["why"].items()},
        no_run_folder=[rank for rank, word in words.items() if not word["sees"]],
        links={(rank, int(to)): _read(Link, link) for rank, word in measured.items() for to, link in word.items()},
    )


def _read(kind: type[_Kind], word: dict[str, Any]) -> _Kind:
    """What another rank sent, without what only another version of ddp_loop knows."""
    known = {one.name for one in fields(kind)}
    return kind(**{name: value for name, value in word.items() if name in known})


def _sees(path: Path) -> bool:
    """Whether a file is there in time; the folder is listed, since NFS keeps what it has listed."""
    deadline = time.monotonic() + _SEEN_S
    while True:
        is_late = time.monotonic() > deadline
        with suppress(OSError):
            if path.name in os.listdir(path.parent):
                return True
        if is_late:
            return False
        time.sleep(_LOOK_S)


def _amount(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number, 0 or more (got {text})")
    return number


def add_hosts(add: Callable[..., Any], say: Callable[[str], None]) -> None:
    """Add the command to a parser.

    Args:
        add: adds a command by its name, its call, its help and its exit codes.
        say: prints a line.
    """
    usual = Bounds()
    command = add(
        "hosts",
        lambda given: check_hosts(
            HostsOptions(
                given.run_dir,
                given.data,
                given.script,
                Bounds(given.min_gbit_s, given.max_round_trip_ms),
                given.timeout_s,
            ),
            say,
        ),
        "check the hosts of a run before it: torchrun ... -m ddp_loop hosts",
        "0 a run can begin, 1 something is wrong, 2 the launcher cannot be reached",
    )
    command.add_argument("--run-dir", type=Path, metavar="FOLDER", help="the run folder, which all ranks must see")
    command.add_argument("--data", type=Path, metavar="PATH", help="a file or folder that must be equal on all hosts")
    command.add_argument("--script", type=Path, metavar="SCRIPT", help="likewise, the script of the run")
    text = "of a link between hosts, at least (default: %(default)s)"
    command.add_argument("--min-gbit-s", type=_amount, default=usual.gbit_s, metavar="G", help=text)
    text = "of a link between hosts, at most (default: %(default)s)"
    command.add_argument("--max-round-trip-ms", type=_amount, default=usual.round_trip_ms, metavar="MS", help=text)
    text = "seconds for all ranks to come (default: %(default)s)"
    command.add_argument("--timeout-s", type=_amount, default=60.0, metavar="S", help=text)
