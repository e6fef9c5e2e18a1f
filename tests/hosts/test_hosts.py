"""`hosts` on ranks that count as machines of their own: every rank reports each planted fault."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from ddp_loop.cli import main
from ddp_loop.hosts import command, facts, links, verdict
from ddp_loop.hosts.command import HostsOptions, check_hosts
from ddp_loop.hosts.facts import digest_of
from ddp_loop.hosts.links import Listener, connect, own_address
from ddp_loop.hosts.verdict import Bounds
from tests.support.harness import OnRanks, held_ports

pytestmark = pytest.mark.covers("C4", "J14")
AHEAD_S = 7.0
SEEN_S = 0.3  # for a new file; the files are on this machine


@contextmanager
def blocked() -> Iterator[None]:
    """Say that this rank listens at a port where no rank does."""

    class Blocked(Listener):
        def __init__(self, rank: int, token: str) -> None:
            super().__init__(rank, token)
            self.address = ("127.0.0.1", port)

    with held_ports(1) as [port], mock.patch("ddp_loop.hosts.command.Listener", Blocked):
        yield


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """A fault on this rank."""
    ahead = SimpleNamespace(time=lambda: time.time() + AHEAD_S, perf_counter=time.perf_counter)
    others = {**facts.versions(), "torch": "1.0"}
    faults: dict[str, AbstractContextManager[Any]] = {
        "version": mock.patch.object(facts, "versions", return_value=others),
        "words": mock.patch.object(command, "asdict", lambda one: {**dataclasses.asdict(one), "of another version": 1}),
        "port": blocked(),
        "clock": mock.patch.object(links, "time", ahead),
        "interface": mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "none0"}),
    }
    with faults.get(fault, nullcontext()):
        yield


def check(fault: str, culprit: int, folder: str) -> tuple[bool, list[str], float]:
    """Run the check as a rank that is alone on its machine. The culprit has the fault."""
    rank, said = int(os.environ["RANK"]), list[str]()
    own = "own" if rank == culprit else "shared"
    options = HostsOptions(
        run=Path(folder, own if fault == "folder" else "run"),
        data=Path(folder, own if fault == "data" else "shared", "data"),
        bounds=Bounds(gbit_s=1e6 if fault == "slow" else 1e-6, round_trip_ms=1e6),
        timeout_s=5.0 if fault == "missing" else 20.0,
    )
    if fault == "missing" and rank == culprit:
        return False, [], 0.0
    began = time.monotonic()
    alone = mock.patch.dict(os.environ, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    steady = mock.patch.object(verdict, "_PART_OF_MEDIAN", 0.0)  # of links on a busy machine one may wait long
    seen = mock.patch.object(command, "_SEEN_S", SEEN_S)
    with alone, steady, seen, planted(fault if rank == culprit else ""):
        good = check_hosts(options, said.append)
    return good, said, time.monotonic() - began


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Two folders with different data."""
    for name in ("own", "shared"):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "data" / "images").write_text(f"{name:>6}")
    return str(tmp_path)


def test_ranks_without_a_fault_are_ready_and_leave_nothing(on_ranks: OnRanks, folder: str) -> None:
    found = on_ranks(3, check, "", 0, folder)
    assert [good for good, _, _ in found] == [True] * 3, found[0][1][-3:]
    assert [bool(said) for _, said, _ in found] == [True, False, False]
    said = found[0][1]
    assert said[-1] == "READY: 3 hosts are ready for 3 ranks."
    assert len([line for line in said if "Gbit/s" in line]) == 3  # each pair of hosts
    assert sorted(os.listdir(folder)) == ["own", "shared"]


def test_a_late_look_still_sees_a_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_SEEN_S", -1.0)  # as of a process that did not run meanwhile
    path = tmp_path / "written"
    assert not command._sees(path)
    path.touch()
    assert command._sees(path)


def test_a_rank_of_a_version_that_says_more_is_understood(on_ranks: OnRanks, folder: str) -> None:
    found = on_ranks(2, check, "words", 0, folder)
    assert [good for good, _, _ in found] == [True] * 2
    assert found[0][1][-1] == "READY: 2 hosts are ready for 2 ranks."


@pytest.mark.parametrize(
    ("fault", "culprit", "wanted"),
    [
        ("version", 1, "The version of torch is not the same on all ranks"),
        ("data", 1, "The data is not the same on all ranks"),
        ("port", 1, "does not reach rank 1 on "),
        ("slow", 0, "Gbit/s, less than 1e+06."),
        ("clock", 1, f" is {AHEAD_S:.1f} s ahead of that of "),
        ("clock", 0, f" is {AHEAD_S:.1f} s behind that of "),
        ("folder", 1, "The run folder is not shared. What rank 0 writes there is not seen by rank 1 on"),
        ("interface", 1, "It cannot listen for gloo (GLOO_SOCKET_IFNAME=none0 is no interface"),
        ("missing", 1, "Rank 1 did not come within 5 s."),
    ],
)
@pytest.mark.slow
def test_each_planted_fault_is_found_on_every_rank(
    fault: str, culprit: int, wanted: str, on_ranks: OnRanks, folder: str
) -> None:
    found = on_ranks(2, check, fault, culprit, folder)
    assert [good for good, _, _ in found] == [False] * 2
    said = found[0][1]
    problems = said[said.index("NOT READY:") + 1 :]
    assert len(problems) == 1, said
    assert wanted in problems[0]


def test_the_command_checks_one_rank_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_SEEN_S", SEEN_S)
    assert main(["hosts", "--run-dir", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.endswith("READY: the host is ready for 1 rank.\n")
    (tmp_path / "file").write_text("")
    assert main(["hosts", "--run-dir", str(tmp_path / "file"), "--data", str(tmp_path / "none")]) == 1
    said = capsys.readouterr().out
    assert "cannot be written" in said
    assert "The data cannot be read" in said


@pytest.mark.parametrize("option", ["--min-gbit-s", "--max-round-trip-ms", "--timeout-s"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "fast"])
def test_a_bound_that_nothing_can_break_is_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["hosts", f"{option}={value}"])
    assert f"argument {option}: must be a number, 0 or more (got {value})" in capsys.readouterr().err


def test_a_listener_answers_only_clients_with_the_token() -> None:
    token = "a" * 32
    listener = Listener(3, token)
    try:
        connect(listener.address, 3, token).close()
        for rank, other in ((3, "b" * 32), (2, token)):
            with pytest.raises(ConnectionError, match="another process listens there"):
                connect(listener.address, rank, other)
    finally:
        listener.close()
    with pytest.raises(OSError):  # noqa: PT011
        connect(listener.address, 3, token)


@pytest.mark.parametrize("answer", [b"\0" * 36, b"\xff" * 36, b""], ids=["smaller", "larger", "none"])
def test_another_process_that_answers_is_no_connection(answer: bytes) -> None:
    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(36, socket.MSG_WAITALL)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        answers = threading.Thread(target=serve)
        answers.start()
        with pytest.raises(ConnectionError, match="another process listens there"):
            connect(server.getsockname(), 3, "a" * 32)
        answers.join()


def test_the_address_is_that_of_the_interface_gloo_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address() == "127.0.0.1"


def made(folder: Path, files: dict[str, Any]) -> str:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return digest_of(folder)


def test_a_digest_depends_on_names_sizes_and_contents(tmp_path: Path) -> None:
    files = {"a": b"1", "b/c": b"2", os.fsdecode(b"\xff"): b"3"}  # a name that is no UTF-8
    first = made(tmp_path / "1", files)
    assert made(tmp_path / "2", files) == first
    others = [{"a": b"1", "b/d": b"2"}, {"a": b"1", "b/c": b"3"}, {"a": b"12", "b/c": b""}, {"a": b"1"}]
    others.append(files | {"a": b"0"})
    assert len({first, *(made(tmp_path / f"o{number}", one) for number, one in enumerate(others))}) == 6


def test_a_part_of_large_data_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_WHOLE", 100)
    monkeypatch.setattr(facts, "_PIECES", 3)
    monkeypatch.setattr(facts, "_PIECE", 10)
    path = tmp_path / "large"
    path.write_bytes(bytes(200))
    plain, found = digest_of(path), []
    for at in (0, 50, 100, 150, 199):
        path.write_bytes(bytes(at) + b"x" + bytes(199 - at))
        found.append(digest_of(path) == plain)
    assert found == [False, True, False, True, False]
