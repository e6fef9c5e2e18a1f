"""What follows from the facts of all ranks: a table, and what is wrong, where, and what helps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ddp_loop.distributed import aligned
from ddp_loop.hosts.facts import Facts
from ddp_loop.hosts.links import Link

MOST_PROBLEMS = 12
_PART_OF_MEDIAN = 0.25  # a slower link is slow, whatever the bound is
_LEAST_FREE = 2**30  # bytes
_CLOCK_S = 1.0  # the most between two clocks


@dataclass(frozen=True)
class Bounds:
    """What hosts must keep to.

    Attributes:
        gbit_s: of a link between hosts, at least.
        round_trip_ms: of a link, at most.
    """

    gbit_s: float = 0.5
    round_trip_ms: float = 10.0


@dataclass(frozen=True)
class Findings:
    """What all ranks found, the same on each of them.

    Attributes:
        size: the number of ranks.
        facts: of the ranks that came, in rank order.
        unreachable: why one rank does not reach another one.
        links: between the first ranks of two hosts.
        no_run_folder: the ranks that do not see the file which rank 0 wrote to the run folder.
        problem: of rank 0 with the run folder, in words.
        timeout_s: how long the ranks were waited for.
    """

    size: int
    facts: Mapping[int, Facts]
    unreachable: Mapping[tuple[int, int], str] = field(default_factory=dict)
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    no_run_folder: Sequence[int] = ()
    problem: str = ""
    timeout_s: float = 60.0

    def leaders(self) -> list[int]:
        """The first rank of each machine."""
        first: dict[str, int] = {}
        for rank, one in self.facts.items():
            first.setdefault(one.machine, rank)
        return list(first.values())

    def host(self, rank: int) -> str:
        """The name of a rank's machine; with its address where another machine has the same name."""
        own = self.facts[rank]
        same = {one.machine for one in self.facts.values() if one.host == own.host}
        return own.host if len(same) == 1 else f"{own.host} ({own.address[0] or f'of rank {rank}'})"

    def ranks(self, ranks: Sequence[int]) -> str:
        """Ranks with their hosts, in words."""
        hosts = ", ".join(dict.fromkeys(map(self.host, ranks)))
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} on {hosts}"


def table(found: Findings) -> list[str]:
    """The facts, one rank a line, and the links, one pair of hosts a line."""
    every = found.facts.values()
    names = dict.fromkeys([name for kind in ("versions", "digests") for one in every for name in getattr(one, kind)])
    rows = [["rank", "host", "address", *names, "free disk", "GPUs"]]
    for one in every:
        address = f"{one.address[0]}:{one.address[1]}" if one.address[0] else "none"
        free = "-" if one.free_bytes is None else f"{one.free_bytes / 2**30:.1f} GiB"
        facts = one.versions | one.digests
        rows.append(
            [str(one.rank), one.host, address, *(facts.get(name, "-") for name in names), free, str(one.count_of_gpus)]
        )
    lines = aligned(rows)
    if found.links:
        rows = [["from", "to", "round trip", "there", "back", "clock ahead"]]
        for (rank, other), link in sorted(found.links.items()):
            rates = [f"{bits / 1e9:.3g} Gbit/s" for bits in (link.bits_per_s, link.bits_per_s_back)]
            clock = f"{1000 * link.clock_s:+.1f} ms"
            rows.append([found.host(rank), found.host(other), f"{1000 * link.round_trip_s:.2f} ms", *rates, clock])
        lines += ["", *aligned(rows)]
    for rank in found.leaders():
        if pairs := found.facts[rank].no_peer_access:
            words = ", ".join(f"{one} to {other}" for one, other in pairs)
            lines.append(f"No peer access between GPUs on {found.host(rank)}: {words}. Their sums go over the host.")
    return lines


def problems(found: Findings, bounds: Bounds) -> list[str]:
    """What is wrong, in a line each: the fact, where, the remedy."""
    return [
        *_missing(found),
        *(f"Rank {one.rank} on {found.host(one.rank)}: {one.problem}" for one in found.facts.values() if one.problem),
        *_unequal(found),
        *_unreachable(found),
        *_bad_links(found, bounds),
        *_folder(found),
    ]


def verdict(found: Findings, bounds: Bounds) -> tuple[bool, list[str]]:
    """Whether a run can begin, and the lines that say so; at most 12 problems."""
    wrong = problems(found, bounds)
    hosts = len(found.leaders())
    if not wrong:
        words = "the host is" if hosts == 1 else f"{hosts} hosts are"
        return True, [f"READY: {words} ready for {found.size} rank{'s' if found.size > 1 else ''}."]
    more = [f"And {len(wrong) - MOST_PROBLEMS} more."] if len(wrong) > MOST_PROBLEMS else []
    return False, ["NOT READY:", *(f"  {line}" for line in (*wrong[:MOST_PROBLEMS], *more))]


def _missing(found: Findings) -> Iterator[str]:
    missing = [rank for rank in range(found.size) if rank not in found.facts]
    if missing:
        words = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
        yield (
            f"{words} did not come within {found.timeout_s:g} s. Read what was printed there, and start "
            "`hosts` on every host with the same arguments."
        )


def _unequal(found: Findings) -> Iterator[str]:
    for what, remedy in (("versions", "Install one version on all hosts."), ("digests", "Copy one to all hosts.")):
        values = {rank: getattr(one, what) for rank, one in found.facts.items()}
        for name in dict.fromkeys(name for one in values.values() for name in one):
            ranks_by_value: dict[str, list[int]] = {}
            for rank, one in values.items():
                ranks_by_value.setdefault(one.get(name, "none"), []).append(rank)
            if len(ranks_by_value) > 1:
                words = "; ".join(f"{value} on {found.ranks(ranks)}" for value, ranks in ranks_by_value.items())
                kind = f"The {name}" if what == "digests" else f"The version of {name}"
                yield f"{kind} is not the same on all ranks: {words}. {remedy}"


def _unreachable(found: Findings) -> Iterator[str]:
    """One line for each pair of hosts, with the first pair of their ranks."""
    seen = set()
    for (rank, other), why in found.unreachable.items():
        pair = found.facts[rank].machine, found.facts[other].machine
        if pair in seen:
            continue
        seen.add(pair)
        address, port = found.facts[other].address
        yield (
            f"Rank {rank} on {found.host(rank)} does not reach rank {other} on {found.host(other)} at "
            f"{address}:{port} ({why}). Open all ports between the hosts, since gloo uses any free one, or set "
            "GLOO_SOCKET_IFNAME to the interface by which they reach each other."
        )


def _bad_links(found: Findings, bounds: Bounds) -> Iterator[str]:
    slowest = {pair: min(link.bits_per_s, link.bits_per_s_back) / 1e9 for pair, link in found.links.items()}
    usual = median(slowest.values()) if slowest else 0.0
    for (rank, other), link in sorted(found.links.items()):
        between = f"The link between {found.host(rank)} and {found.host(other)}"
        rate = slowest[rank, other]
        trip_ms = 1000 * link.round_trip_s
        if rate < bounds.gbit_s:
            yield (
                f"{between} carries {rate:.3g} Gbit/s, less than {bounds.gbit_s:g}. Choose another interface by "
                "GLOO_SOCKET_IFNAME, or pass a lower --min-gbit-s."
            )
        elif rate < _PART_OF_MEDIAN * usual:
            yield (
                f"{between} carries {rate:.3g} Gbit/s, the median link {usual:.3g}. Compare the network of these two "
                "hosts with that of the others."
            )
        if trip_ms > bounds.round_trip_ms:
            yield (
                f"{between} has a round trip of {trip_ms:.3g} ms, more than {bounds.round_trip_ms:g}. Take hosts that "
                "are closer to each other, or pass a higher --max-round-trip-ms."
            )
        if abs(link.clock_s) > _CLOCK_S + link.round_trip_s / 2:
            words = "ahead of" if link.clock_s > 0 else "behind"
            yield (
                f"The clock of {found.host(other)} is {abs(link.clock_s):.1f} s {words} that of {found.host(rank)}. "
                "Set both by NTP (timedatectl)."
            )


def _folder(found: Findings) -> Iterator[str]:
    if found.problem:
        yield f"{found.problem} Pass --run-dir a folder that rank 0 may write."
    elif found.no_run_folder:
        yield (
            f"The run folder is not shared. What rank 0 writes there is not seen by "
            f"{found.ranks(found.no_run_folder)}. Take a folder on a disk that all hosts mount."
        )
    for rank in found.leaders():
        free = found.facts[rank].free_bytes
        if free is not None and free < _LEAST_FREE:
            yield f"Only {free / 2**20:.0f} MiB are free in the run folder on {found.host(rank)}. Free some space."
