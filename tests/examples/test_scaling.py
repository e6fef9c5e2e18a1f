"""The model of a step on several machines, held against cases worked out by hand; its network; its document."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.clusters import FABRICS, control_word_s, nccl_s, statistics_bytes
from benchmarks.hosts import NoHosts, address, run_all, switched
from benchmarks.scaling import filled
from benchmarks.step_model import Compute, Cost, Link, Sum, all_reduce_cost, all_reduce_rounds, step_s
from benchmarks.switch import Controls, payload_of
from tests.support.documents import text_of
from tests.support.paths import ROOT

MIB = 2**20

# -- the model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "ranks", "rounds"),
    [
        (4096, 2, 4),  # two turns, each a request and its answer
        (4096, 8, 28),
        (4 * MIB, 2, 4),  # two segments of 1 MiB in each turn
        (4 * MIB + 4, 2, 8),  # three segments, so two pairs
        (8 * MIB, 2, 8),
        (16 * MIB, 2, 16),
        (8 * MIB, 4, 12),
    ],
)
def test_a_ring_takes_two_latencies_for_each_pair_of_segments_in_each_turn(size: int, ranks: int, rounds: int) -> None:
    assert all_reduce_rounds(size, ranks) == rounds


def test_each_rank_of_a_ring_sends_nearly_twice_the_sum() -> None:
    cost = all_reduce_cost(1000, 4, Link(latency_s=0.5, bytes_per_s=100))
    assert cost == Cost(latency_s=12 * 0.5, bytes_s=2 * 3 / 4 * 1000 / 100)


COMPUTE = Compute(forward_s=1, backward_s=4, rest_s=0.5)


@pytest.mark.parametrize(
    ("sums", "cost", "at_once", "seconds"),
    [
        ([], Cost(0, 0), 1, 5.5),
        ([Sum(1, 1)], Cost(1, 2), 1, 5 + 3 + 0.5),  # nothing is hidden
        ([Sum(1, 0.25)], Cost(1, 2), 1, 5.5),  # from 2 to 5, as backward
        ([Sum(1, 0.25), Sum(1, 1)], Cost(1, 2), 1, 8.5),  # the first is hidden
        ([Sum(1, 0), Sum(1, 0.25), Sum(1, 0.5)], Cost(1, 2), 1, 1 + 3 * 3 + 0.5),  # each waits for the one before
        ([Sum(1, 1), Sum(1, 1)], Cost(3, 0), 2, 5 + 3 + 0.5),  # latencies go on side by side
        ([Sum(1, 1), Sum(1, 1)], Cost(0, 2), 2, 5 + 4 + 0.5),  # bytes do not
        ([Sum(1, 1)] * 3, Cost(3, 1), 2, 5 + (1 + 3) + (1 + 3) + 0.5),  # the third begins when the first ends
    ],
)
def test_a_step_ends_after_what_backward_does_not_hide(
    sums: list[Sum], cost: Cost, at_once: int, seconds: float
) -> None:
    assert step_s(COMPUTE, sums, lambda size: cost, at_once) == pytest.approx(seconds)


def test_the_cost_of_a_sum_follows_from_its_own_bytes() -> None:
    sums = [Sum(10, 1), Sum(30, 1)]
    assert step_s(Compute(0, 0), sums, lambda size: Cost(0, size)) == 40


# -- clusters ----------------------------------------------------------------------------------------------

INFINIBAND, ETHERNET = FABRICS[0], FABRICS[2]


def test_sums_on_gpus_by_hand() -> None:
    one = nccl_s(450e6, 8, INFINIBAND)
    assert one["ring"] == pytest.approx(10e-6 + 14 * 1.9e-6 + 1.75e-3)
    assert one["tree"] == pytest.approx(4.4e-6 + 14 * 1.2e-6 + 2 / 0.9 * 1e-3)
    many = nccl_s(400e6, 64, INFINIBAND)  # 8 machines with 400 GB/s each
    assert many["ring"] == pytest.approx(10e-6 + 112 * 1.9e-6 + 14 * 4e-6 + 2 * 63 / 64 * 1e-3)
    assert many["tree"] == pytest.approx(4.4e-6 + 14 * 1.2e-6 + 6 * 8.5e-6 + 2 / 0.9 * 1e-3)
    inside = 2 * (10e-6 + 7 * (1.9e-6 + 50e6 / 450e9))
    assert many["hierarchical"] == pytest.approx(inside + 14 * (4e-6 + 50e6 / 400e9))
    assert nccl_s(0, 64, ETHERNET)["tree"] == pytest.approx(4.4e-6 + 14 * 1.2e-6 + 6 * 50e-6)


def test_what_grows_by_hand() -> None:
    assert statistics_bytes(26_560, 1024) == 326_369_280  # beside 102 MB of gradients
    assert control_word_s(161, 8) == pytest.approx(0.13e-3)
    assert control_word_s(161, 1024) == pytest.approx(2 * 0.13e-3 + 4 * 127 * 50e-6)


# -- the document ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", [mark for tables in scaling.PARTS.values() for mark in tables])
def test_the_tables_of_the_document_are_those_of_the_figures(mark: str) -> None:
    document = text_of("docs/benchmarks/scaling.md")
    lines = next(tables[mark] for tables in scaling.PARTS.values() if mark in tables)
    assert filled(document, mark, lines()) == document


def test_a_document_without_the_marks_of_a_table_is_refused() -> None:
    assert filled("a\n<!-- table: x -->\nold\n<!-- end: x -->\n", "x", ["new"]) == (
        "a\n<!-- table: x -->\n\nnew\n\n<!-- end: x -->\n"
    )
    with pytest.raises(ValueError, match="x 0 times"):
        filled("a\n", "x", ["new"])


def test_what_is_measured_is_stored_and_written_into_the_document(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known, document = scaling.stored(), scaling.DOCUMENT.read_text()
    monkeypatch.setattr(scaling, "FIGURES", tmp_path / "figures.json")
    monkeypatch.setattr(scaling, "DOCUMENT", tmp_path / "document.md")
    monkeypatch.setattr(
        scaling,
        "measured",
        lambda part, hosts, ranks=1: known["links"] if part == "links" else known["counts"][f"{hosts} x {ranks}"],
    )
    scaling.DOCUMENT.write_text(document.replace("32-wide", "other"))
    scaling.report([])
    assert (scaling.stored(), scaling.DOCUMENT.read_text()) == (known, document)
    assert "| 32-wide MLP |" in capsys.readouterr().out


def test_without_namespaces_what_is_measured_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    before = scaling.FIGURES.read_text(), scaling.DOCUMENT.read_text()
    scaling.report(["counts", "links"])
    printed = capsys.readouterr().out
    assert printed.count("is left out: Network namespaces need root and iproute2.") == 2
    assert (scaling.FIGURES.read_text(), scaling.DOCUMENT.read_text()) == before


# -- the network -------------------------------------------------------------------------------------------

ECHO = """
import socket
server = socket.create_server(("{own}", 5000))
peer, _ = server.accept()
whole = b""
while len(whole) < {size}:
    whole += peer.recv(2**20)
peer.sendall(b"!")
peer.recv(1)
print("")
"""
SEND = """
import socket, time
deadline = time.monotonic() + 20
while True:
    try:
        peer = socket.create_connection(("{other}", 5000))
        break
    except OSError:
        assert time.monotonic() < deadline
        time.sleep(0.02)
began = time.monotonic()
peer.sendall(bytes({size}))
peer.recv(1)
print(time.monotonic() - began)
"""


def sent_through(delay_s: float, bits_per_s: float, size: int) -> tuple[float, tuple[int, ...]]:
    """The seconds until `size` bytes have come and an answer is back; what the sender has sent."""
    try:
        with switched(2) as (names, _, controls):
            controls.shape(delay_s, bits_per_s)
            scripts = SEND.format(other=address(1), size=size), ECHO.format(own=address(1), size=size)
            commands = [
                ["ip", "netns", "exec", name, sys.executable, "-c", script]
                for name, script in zip(names, scripts, strict=True)
            ]
            return float(run_all(commands, 30.0)), controls.sent(0)
    except NoHosts as no:
        pytest.skip(f"no network namespaces can be made here: {no}")


def namespaces_of_this_machine() -> str:
    return subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("delay_s", "bits_per_s", "size", "least_s"),
    [(0.05, 0.0, 1, 0.1), (0.0, 4e7, 500_000, 0.1)],
    ids=["delay", "rate"],
)
def test_the_switch_delays_limits_and_counts(delay_s: float, bits_per_s: float, size: int, least_s: float) -> None:
    seconds, (sent, packets, *_) = sent_through(delay_s, bits_per_s, size)
    assert seconds >= least_s
    assert 0 <= sent - size <= 65000  # TCP repeats what comes late on a busy machine
    assert packets >= math.ceil(size / 65000)


def fail_on_a_host(made: list[str]) -> None:
    with switched(2) as (names, *_):
        made += names
        run_all([["ip", "netns", "exec", names[0], sys.executable, "-c", "raise SystemExit(3)"]], 30.0)


@pytest.mark.slow
def test_hosts_are_removed_after_a_failure() -> None:
    names: list[str] = []
    try:
        with pytest.raises(RuntimeError, match=r"exit codes \[3\]"):
            fail_on_a_host(names)
    except NoHosts as no:
        pytest.skip(f"no network namespaces can be made here: {no}")
    assert names
    assert not any(name in namespaces_of_this_machine() for name in names)


WAIT = """
import time
from benchmarks.hosts import NoHosts, namespaces
try:
    with namespaces(1) as names:
        print(names[0], flush=True)
        time.sleep(60)
except NoHosts as no:
    print(no)
"""


@pytest.mark.slow
def test_hosts_are_removed_after_sigterm() -> None:
    with subprocess.Popen([sys.executable, "-c", WAIT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        process.terminate()
    if " " in name:
        pytest.skip(f"no network namespaces can be made here: {name}")
    assert process.returncode == 143
    assert name.startswith(f"ddp-{process.pid}-")
    assert name not in namespaces_of_this_machine()


def test_what_a_host_sends_is_added_up_apart_for_the_store(tmp_path: Path) -> None:
    controls, same = (Controls(tmp_path / "controls", 2) for _ in range(2))
    controls.shape(0.5, 1e9)
    controls.count_apart(29400)
    controls.add(1, (10, 1, 0, 0))
    controls.add(1, (5, 1, 7, 2))
    assert (same.shape_now(), same.port(), same.sent(0), same.sent(1)) == ((0.5, 1e9), 29400, (0,) * 4, (15, 2, 7, 2))


def test_only_the_payload_of_tcp_counts() -> None:
    header = bytes([0x45, 0, 0, 0, 0, 0, 0, 0, 64, 6, 0, 0, 10, 77, 0, 1, 10, 77, 0, 2])
    tcp = bytes([0x13, 0x88, 0x72, 0xD8, *[0] * 8, 0x80, *[0] * 19])  # ports 5000 and 29400, 32 bytes
    assert payload_of(header + tcp + b"abc") == (3, 5000, 29400)
    assert payload_of(header[:9] + b"\x11" + header[10:] + tcp) == (0, 0, 0)
