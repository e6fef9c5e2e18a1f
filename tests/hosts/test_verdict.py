"""The verdict from the facts of all ranks: a table, and a line for each problem."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_loop.hosts.facts import Facts
from ddp_loop.hosts.links import Link, rounds_of
from ddp_loop.hosts.verdict import MOST_PROBLEMS, Bounds, Findings, problems, table, verdict

VERSIONS = {"Python": "3.12.3", "torch": "2.11.0", "ddp_loop": "0.1.0", "driver": "550.54.15"}
FAST = Link(1e-4, 9.4e9, 9.3e9, 0.002)
pytestmark = pytest.mark.covers("C4", "J14")


def facts(rank: int) -> Facts:
    """The facts of a rank, of four on two machines."""
    machine = rank // 2
    return Facts(
        rank, f"machine {machine}", "ab"[machine], (f"10.0.0.{machine + 1}", 40000 + rank), dict(VERSIONS),
        {"code of ddp_loop": "c0de", "data": "da7a"}, 2.0**40, 2,
    )  # fmt: skip


GOOD = Findings(4, {rank: facts(rank) for rank in range(4)}, links={(0, 2): FAST})


def with_facts(rank: int, **changes: object) -> Findings:
    return replace(GOOD, facts={**GOOD.facts, rank: replace(facts(rank), **changes)})  # type: ignore[arg-type]


def test_good_hosts_are_ready_and_the_table_has_all_facts() -> None:
    assert problems(GOOD, Bounds()) == []
    assert verdict(GOOD, Bounds()) == (True, ["READY: 2 hosts are ready for 4 ranks."])
    lines = table(GOOD)
    assert lines[0].split("  ")[0] == "rank"
    assert lines[4].split() == ["3", "b", "10.0.0.2:40003", *VERSIONS.values(), "c0de", "da7a", "1024.0", "GiB", "2"]
    assert lines[7].split() == ["a", "b", "0.10", "ms", "9.4", "Gbit/s", "9.3", "Gbit/s", "+2.0", "ms"]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            with_facts(2, versions={**VERSIONS, "torch": "2.10.0"}),
            "The version of torch is not the same on all ranks: 2.11.0 on ranks 0, 1, 3 on a, b; 2.10.0 on rank 2 on "
            "b. Install one version on all hosts.",
        ),
        (with_facts(3, versions={**VERSIONS, "driver": "none"}), "The version of driver is not the same"),
        (
            with_facts(1, digests={"code of ddp_loop": "c0de", "data": "0dd"}),
            "The data is not the same on all ranks: da7a on ranks 0, 2, 3 on a, b; 0dd on rank 1 on a. Copy one to all "
            "hosts.",
        ),
        (
            replace(GOOD, unreachable={(0, 2): "timed out", (1, 3): "timed out", (0, 3): "timed out"}),
            "Rank 0 on a does not reach rank 2 on b at 10.0.0.2:40002 (timed out). Open all ports",
        ),
        (
            replace(GOOD, links={(0, 2): replace(FAST, bits_per_s_back=1e8)}),
            "The link between a and b carries 0.1 Gbit/s, less than 0.5.",
        ),
        (
            replace(GOOD, links={(0, 2): replace(FAST, round_trip_s=0.05)}),
            "The link between a and b has a round trip of 50 ms, more than 10.",
        ),
        (
            replace(GOOD, links={(0, 2): replace(FAST, clock_s=-7.0)}),
            "The clock of b is 7.0 s behind that of a. Set both by NTP",
        ),
        (
            replace(GOOD, no_run_folder=[2, 3]),
            "The run folder is not shared. What rank 0 writes there is not seen by ranks 2, 3 on b. Take a folder on",
        ),
        (replace(GOOD, problem="The run folder x cannot be written."), "cannot be written. Pass --run-dir a folder"),
        (with_facts(2, free_bytes=5 * 2.0**20), "Only 5 MiB are free in the run folder on b."),
        (with_facts(3, problem="The data cannot be read."), "Rank 3 on b: The data cannot be read."),
        (replace(GOOD, size=6), "Ranks 4, 5 did not come within 60 s. Read what"),
    ],
)
def test_each_fault_gives_one_line_that_names_the_host_and_the_remedy(found: Findings, said: str) -> None:
    [line] = problems(found, Bounds())
    assert said in line
    assert verdict(found, Bounds()) == (False, ["NOT READY:", f"  {line}"])


def test_a_link_much_slower_than_the_others_is_slow_even_above_the_bound() -> None:
    every = {rank: replace(facts(rank), machine=str(rank), host=f"h{rank}") for rank in range(3)}
    links = {(0, 1): FAST, (0, 2): FAST, (1, 2): replace(FAST, bits_per_s=1e9)}
    [line] = problems(Findings(3, every, links=links), Bounds())
    assert line.startswith("The link between h1 and h2 carries 1 Gbit/s, the median link 9.3.")


def test_hosts_with_one_name_are_distinguished_by_their_addresses() -> None:
    every = {rank: replace(facts(rank), host="node") for rank in range(4)}
    found = replace(GOOD, facts=every, no_run_folder=[3])
    assert "rank 3 on node (10.0.0.2)" in problems(found, Bounds())[0]


def test_at_most_twelve_lines_are_shown() -> None:
    every = {rank: replace(facts(0), rank=rank, machine=str(rank), host=f"h{rank}") for rank in range(5)}
    unreachable = {(rank, other): "refused" for rank in every for other in every if rank != other}
    good, lines = verdict(Findings(5, every, unreachable=unreachable), Bounds())
    assert not good
    assert len(lines) == 1 + MOST_PROBLEMS + 1
    assert lines[-1] == "  And 8 more."


def test_gpus_without_peer_access_are_in_the_table_and_are_no_fault() -> None:
    found = with_facts(0, no_peer_access=[(0, 1), (1, 0)])
    assert table(found)[-1] == "No peer access between GPUs on a: 0 to 1, 1 to 0. Their sums go over the host."
    assert problems(found, Bounds()) == []


@pytest.mark.parametrize("number", [1, 2, 3, 4, 7, 8])
def test_all_pairs_are_measured_and_no_two_share_a_host_at_the_same_time(number: int) -> None:
    rounds = rounds_of(list(range(number)))
    pairs = [pair for one in rounds for pair in one]
    assert sorted(pairs) == [(a, b) for a in range(number) for b in range(a + 1, number)]
    assert all(len({rank for pair in one for rank in pair}) == 2 * len(one) for one in rounds)
