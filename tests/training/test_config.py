"""Hyper-parameters that a run keeps: `Loop(config=...)`."""

from __future__ import annotations

import enum
import json
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.checkpoint import flatten_config
from tests.support.harness import OnRanks
from tests.support.refusals import Refused, loop_over, network
from tests.support.runs import lines_of
from tests.support.training import sgd, train


class Kind(enum.Enum):
    SMALL = 1


class Size(enum.IntEnum):
    LARGE = 2


@dataclass
class Inner:
    rate: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)


@dataclass
class Outer:
    optimizer: Inner = field(default_factory=Inner)
    name: str = "a"


def hits() -> None: ...


VALUES: list[tuple[object, object]] = [
    (None, None), (True, True), (3, 3), (0.5, 0.5), ("a", "a"), (Path("a/b"), "a/b"), (Kind.SMALL, "Kind.SMALL"),
    (Size.LARGE, "2"), ((1, 2), "(1, 2)"), ([1], "[1]"), (np.float32(0.5), 0.5), (np.int64(3), 3),
    (np.bool_(True), True), (torch.tensor(0.5), 0.5), (torch.tensor([1, 2]), "tensor([1, 2])"),
    (float("inf"), "inf"), (np.float64("nan"), "nan"),
    (hits, "hits"), (nn.Linear, "Linear"), ({}, "{}"), ("x" * 600, "x" * 500), (torch.device("cpu"), "cpu"),
    (object(), "<object object>"),  # without its address in memory
]  # fmt: skip


def test_a_value_becomes_a_plain_one() -> None:
    for value, kept in VALUES:
        (found,) = flatten_config({"name": value}).values()
        assert (found, type(found)) == (kept, type(kept))
        json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("config", "flat"),
    [
        ({}, {}),
        ({"rate": 0.1, 3: {"a": {"b": 1}}}, {"rate": 0.1, "3.a.b": 1}),
        (Namespace(rate=0.1, inner=Namespace(a=1)), {"rate": 0.1, "inner.a": 1}),
        (Outer(), {"optimizer.rate": 0.1, "optimizer.betas": "(0.9, 0.99)", "name": "a"}),
        ({"a": Outer(name="b")}, {"a.optimizer.rate": 0.1, "a.optimizer.betas": "(0.9, 0.99)", "a.name": "b"}),
    ],
)  # fmt: skip
def test_a_nested_config_becomes_flat(config: object, flat: dict[str, object]) -> None:
    assert flatten_config(config) == flat


@pytest.mark.parametrize(
    ("configs", "said"),
    [
        ([3], "config must be a mapping, an argparse.Namespace or an instance of a dataclass. Got int. Pass a dict"),
        ([[("rate", 1)]], "Got list"),
        ([Outer], "Got <class .*Outer"),
        ([[{"a": 1}]], "an instance of a dataclass. Got list. Pass a dict"),
        ([{"a": {"b": 1}, "a.b": 2}], "a name of its own. Two are named 'a.b'. Rename one."),
        ([{"rate": 0.1}, {"rate": 1.1}, None], "config of Loop must be the same on every rank.*0\\.1.*1\\.1"),
    ],
)
def test_what_is_no_config_is_refused_on_every_rank(configs: list[Any], said: str, refused: Refused) -> None:
    refused(3, make_loop, configs, kind="ValueError", said=said)


def make_loop(world: dl.World, folder: str, configs: list[Any]) -> None:
    """Each rank's config; all further ranks have the last one."""
    loop_over(world, folder, network(), config=configs[min(world.rank, len(configs) - 1)], run_dir=None)


def run(folder: Path | None, steps: int, **options: Any) -> int:
    """The number of steps that a small job makes."""
    model = network()
    optimizer = sgd(model)
    return len(train(model, optimizer=optimizer, epochs=None, steps=steps, run_dir=folder, **options))


def config_of(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text())["config"]


@pytest.mark.covers("G4", "J8")
def test_a_run_keeps_its_config(on_ranks: OnRanks, tmp_path: Path) -> None:
    config = Namespace(rate=0.1, data=Path("x"), name="", folder=tmp_path)  # a table of runs need not show its folder
    assert on_ranks(2, run, tmp_path, 3, config=config) == [3, 3]
    kept = {"rate": 0.1, "data": "x", "name": "", "folder": "RUN_DIR"}
    assert config_of(tmp_path) == kept
    assert [one["config"] for one in lines_of(tmp_path / "starts.jsonl")] == [kept]


def test_a_value_that_only_reads_as_the_folder_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"run_dir": "digits", "data": "digits", "rate": 0.1, "out": str(tmp_path / "digits")}
    assert run(Path("digits"), 3, config=config) == 3
    assert config_of(tmp_path / "digits") == config | {"out": "RUN_DIR"}


def test_without_a_folder_a_config_is_ignored_and_a_run_without_one_keeps_none(tmp_path: Path) -> None:
    assert run(None, 2, config={"rate": 0.1}) == 2
    assert run(tmp_path, 2) == 2
    assert config_of(tmp_path) == {}


def test_a_resumed_run_says_what_changed_and_keeps_the_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def notice(steps: int, **options: Any) -> str:
        run(tmp_path, steps, **options)
        return "".join(line for line in capsys.readouterr().out.splitlines() if "continues with changes" in line)

    def changed(steps: int) -> str:
        return f"ddp_loop: {tmp_path} continues with changes: steps: was {steps - 1}, is {steps}"

    assert notice(1) == ""
    assert notice(2, config={"rate": 0.1, "width": 8}) == f"{changed(2)}."  # there was none to differ from
    parts = "config: rate was 0.1, is 0.2; config: depth is new, 3; config: width was 8, is left out"
    assert notice(3, config={"rate": 0.2, "depth": 3}) == f"{changed(3)}; {parts}."
    assert notice(4) == f"{changed(4)}."
    assert config_of(tmp_path) == {"rate": 0.2, "depth": 3}
    assert notice(5, config={}) == f"{changed(5)}; config: rate was 0.2, is left out; config: depth was 3, is left out."
    kept = [{}, {"rate": 0.1, "width": 8}, {"rate": 0.2, "depth": 3}, {"rate": 0.2, "depth": 3}, {}]
    starts = lines_of(tmp_path / "starts.jsonl")
    assert [one["config"] for one in starts] == kept
    assert [len(one["changed"]) for one in starts] == [0, 1, 4, 1, 3]
    assert config_of(tmp_path) == {}


def test_a_start_that_makes_no_step_keeps_the_config_and_the_command_of_the_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("command", "start", "directory")
    monkeypatch.setattr(sys, "argv", ["train.py", "--rate", "0.1"])
    run(tmp_path, 2, config={"rate": 0.1})
    before = (tmp_path / "run.json").read_text()
    first = json.loads((tmp_path / "status.json").read_text())
    monkeypatch.setattr(sys, "argv", ["train.py", "--rate", "5"])
    capsys.readouterr()
    assert run(tmp_path, 2, config={"rate": 5}) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path} keeps the config and the command of its steps. This start makes none with: " in said
    assert "config: rate was 0.1, is 5." in said
    assert (tmp_path / "run.json").read_text() == before
    again = json.loads((tmp_path / "status.json").read_text())
    assert [again[name] for name in names] == [first[name] for name in names]
    assert [one["config"]["rate"] for one in lines_of(tmp_path / "starts.jsonl")] == [0.1, 5]
    assert run(tmp_path, 3, config={"rate": 5}) == 1
    assert config_of(tmp_path) == {"rate": 5}
    assert json.loads((tmp_path / "status.json").read_text())["command"] == sys.argv


@pytest.mark.parametrize("damage", [None, [], "text", 3])
def test_a_damaged_config_stops_no_run(damage: object, tmp_path: Path) -> None:
    run(tmp_path, 1, config={"rate": 0.1})
    known = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(known | {"config": damage}))
    assert run(tmp_path, 2, config={"rate": 0.2}) == 1
    assert config_of(tmp_path) == {"rate": 0.2}
