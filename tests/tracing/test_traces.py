"""Traces, and `python -m ddp_loop diff`: the first step, stage and tensor in which two runs differ."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from ddp_loop.cli import main
from ddp_loop.determinism import digest, leaves
from ddp_loop.tracing.trace import read_trace
from tests.support.cases import make_data
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused

STEPS = 24


def network(width: int = 8) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 3))


def train(folder: str, fault: str = "", width: int = 8, shards: int = 4, steps: int = STEPS, trace: bool = True) -> str:
    """Train a small network with momentum and return a digest of its weights. A fault begins at step 17."""
    with dl.join_world(seed=5) as world:
        model = network(width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        inputs, labels = make_data((6,), 60)
        batches = dl.Batches((inputs.float(), labels), 12, world, shards=shards)
        state = {"model": model, "optimizer": optimizer}
        loop = dl.Loop(batches, steps=steps, state=state, run_dir=folder, progress=False, trace=trace)
        model[4].register_full_backward_pre_hook(
            lambda _, slopes: (1.001 * next(iter(slopes)),) if fault == "gradient" and loop.iteration == 17 else slopes
        )
        for step in loop:
            for number, (inputs, labels) in enumerate(step):
                if fault == "noise" and step.iteration == 17 and number == 0:
                    torch.rand(1)
                metric = torch.tensor(float(fault == "metric" and 17 <= step.iteration < 20))
                step.backward(cross_entropy(model(inputs), labels), level=metric)
            step.fold()
            if fault == "rate" and step.iteration == 17:
                optimizer.param_groups[0]["lr"] = 0.06
            optimizer.step()
        return digest(torch.cat([one.detach().flatten() for one in model.parameters()]))


def said_of(capsys: pytest.CaptureFixture[str], *runs: Path) -> tuple[int, str, str]:
    code = main(["diff", *map(str, runs)])
    out, errors = capsys.readouterr()
    return code, out, errors


@pytest.mark.covers("H10")
@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("gradient", "Step 17, backward: `shard 0, gradient of model.4.bias` differs first"),
        ("noise", "Step 17, forward: `shard 0, loss` differs first"),
        ("rate", "Step 17, optimizer: `optimizer, group 0.lr` differs first"),
    ],
)
@pytest.mark.slow
def test_a_fault_is_found_where_it_was_planted(
    fault: str, where: str, on_ranks: OnRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_ranks(2, train, str(tmp_path / "a"))
    on_ranks(2, train, str(tmp_path / "b"), fault)
    code, out, _ = said_of(capsys, tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "The same bits from step 0 to step 16." in out
    assert where in out
    assert "They differ to the end, step 24." in out


@pytest.mark.covers("H10")
def test_a_temporary_fault_is_found_with_its_end(
    on_ranks: OnRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_ranks(2, train, str(tmp_path / "a"))
    on_ranks(2, train, str(tmp_path / "b"), "metric")
    code, out, _ = said_of(capsys, tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "Step 17, forward: `shard 0, level` differs first" in out
    assert "The same bits again from step 20 on." in out


@pytest.mark.covers("H7", "H10")
def test_runs_on_other_numbers_of_ranks_have_the_same_trace(
    on_ranks: OnRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = {on_ranks(ranks, train, str(tmp_path / str(ranks)))[0] for ranks in (1, 3)}
    assert len(digests) == 1
    code, out, _ = said_of(capsys, tmp_path / "1", tmp_path / "3")
    assert (code, out.splitlines()[-1]) == (0, "The same bits in all 25 steps that both have.")


def test_a_trace_changes_no_bit(on_ranks: OnRanks, tmp_path: Path) -> None:
    with_trace, without = (on_ranks(2, train, str(tmp_path / str(trace)), trace=trace)[0] for trace in (True, False))
    assert with_trace == without


def test_every_stage_has_its_entries(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(2, train, str(tmp_path), steps=1)
    trace = read_trace(tmp_path)
    assert trace.numbers == [0, 1]
    names = {stage: [name for kind, name in trace.whole(1) if kind == stage] for stage, _ in trace.whole(1)}
    assert list(names) == ["data", "forward", "backward", "fold", "optimizer"]
    assert names["data"] == ["samples", *(f"shard {n}, part {k}" for n in range(4) for k in range(2))]
    assert names["forward"][:3] == ["shard 0, loss", "shard 0, weight", "shard 0, level"]
    assert len(names["backward"]) == 4 * 6
    assert {"loss", "level", "gradient of model.0.weight", "buffer model.1.running_mean"} <= set(names["fold"])
    assert {
        "optimizer, group 0.lr",
        "optimizer, momentum_buffer of model.4.bias",
        "parameter model.0.weight",
        "buffer model.1.running_var",
    } <= set(names["optimizer"])


# -- bad input ---------------------------------------------------------------------------------------------


def test_runs_with_different_shapes_are_refused(
    on_ranks: OnRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for width in (8, 9):
        on_ranks(1, train, str(tmp_path / str(width)), width=width, steps=1)
    code, _, errors = said_of(capsys, tmp_path / "8", tmp_path / "9")
    assert code == 2
    assert "model.0.weight is float32 (8, 6) in" in errors
    assert "Compare runs of the same model" in errors


def test_runs_with_different_shards_are_compared_by_whole_mini_batches(
    on_ranks: OnRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for shards in (2, 3):
        on_ranks(1, train, str(tmp_path / str(shards)), shards=shards, steps=2)
    code, out, _ = said_of(capsys, tmp_path / "2", tmp_path / "3")
    assert code == 1
    assert "only values of the whole mini-batch are compared" in out
    assert "Step 1, fold: `loss` differs first" in out


def test_runs_without_a_trace_are_refused(
    on_ranks: OnRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_ranks(1, train, str(tmp_path / "a"), steps=1, trace=False)
    code, _, errors = said_of(capsys, tmp_path / "a", tmp_path / "nowhere")
    assert code == 2
    assert "has no trace. Run the script again with Loop(trace=True)" in errors


def test_a_killed_run_is_compared_up_to_its_last_step(
    on_ranks: OnRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_ranks(2, train, str(tmp_path), steps=3)
    path = tmp_path / "trace" / "rank-1.jsonl"
    path.write_text(path.read_text()[:-100])  # in the middle of step 3
    code, out, _ = said_of(capsys, tmp_path, tmp_path)
    assert (code, out.splitlines()[-1]) == (0, "The same bits in all 3 steps that both have.")
    path.write_text("no JSON\n")
    code, _, errors = said_of(capsys, tmp_path, tmp_path)
    assert code == 2
    assert "is not a trace of version " in errors
    path.unlink()
    code, _, errors = said_of(capsys, tmp_path, tmp_path)
    assert code == 2
    assert "lacks rank-1.jsonl. Copy all of them" in errors


def trace_nowhere(world: dl.World, folder: str) -> None:
    dl.Loop(dl.Batches(torch.ones(8, 6), 4, world), 1, state={"model": network()}, trace=True)


def test_a_trace_needs_a_run_folder(refused: Refused) -> None:
    refused(2, trace_nowhere, kind="ValueError", said="Got trace=True without one. Pass run_dir=", by=ALL)


# -- digests -----------------------------------------------------------------------------------------------


def test_a_digest_is_the_same_exactly_if_the_bits_are() -> None:
    one = torch.arange(6.0).view(2, 3)
    assert digest(one) == digest(one.clone()) == digest(one.t().contiguous().t())
    others = [
        one.view(3, 2),
        one.double(),
        one + 1e-7 * one,
        -0.0 * one,
        one.int(),
        one[:, :2],
        None,
        1.0,
        1,
        "1",
        True,
    ]
    assert len({digest(each) for each in [one, *others]}) == 1 + len(others)
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))
    assert digest(torch.ones(2, dtype=torch.bfloat16)) != digest(torch.ones(2, dtype=torch.float16))


def test_the_leaves_of_a_state_have_names() -> None:
    nested = {"rates": [0.1, 0.2], "inner": {"best": 1.0, "done": False, "who": None}, "not said": object()}
    assert dict(leaves("s", nested)) == {
        "s.rates.0": 0.1,
        "s.rates.1": 0.2,
        "s.inner.best": 1.0,
        "s.inner.done": False,
        "s.inner.who": None,
    }


def test_a_trace_is_lines_of_json(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(1, train, str(tmp_path), steps=1)
    head, *steps = map(json.loads, (tmp_path / "trace" / "rank-0.jsonl").read_text().splitlines())
    assert (head["ranks"], head["shards"], [step["step"] for step in steps]) == (1, 4, [0, 1])


# -- a run that was killed and resumed -----------------------------------------------------------------------


def train_in_parts(folder: str, until: int, *, fails: bool) -> None:
    """Steps of a run with a checkpoint after every third one, left by an exception after a step, or stopped."""
    with suppress(ZeroDivisionError), dl.join_world(seed=5) as world:
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        inputs, labels = make_data((6,), 60)
        batches = dl.Batches((inputs.float(), labels), 12, world, shards=4)
        state = {"model": model, "optimizer": optimizer}
        loop = dl.Loop(batches, steps=until, state=state, run_dir=folder, progress=False, trace=True, save_every=3)
        for step in loop:
            for inputs, labels in step:
                step.backward(cross_entropy(model(inputs), labels))
            step.fold()
            optimizer.step()
            if fails and step.iteration == until - 1:
                raise ZeroDivisionError


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()[1:]]


@pytest.mark.slow
@pytest.mark.covers("H10")
@pytest.mark.parametrize("ranks", [(2, 2, 2), (2, 1, 3), (1, 3, 2)])
def test_a_killed_and_resumed_run_has_the_trace_of_the_undisturbed_one(
    ranks: tuple[int, int, int], on_ranks: OnRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = ranks
    on_ranks(1, train_in_parts, str(tmp_path / "whole"), 12, fails=False)
    on_ranks(
        first, train_in_parts, str(tmp_path / "parts"), 6, fails=True
    )  # it left steps 4 and 5 without a checkpoint
    assert steps_in(tmp_path / "parts" / "trace" / "rank-0.jsonl")[-1] in (4, 5)
    on_ranks(second, train_in_parts, str(tmp_path / "parts"), 7, fails=False)
    on_ranks(third, train_in_parts, str(tmp_path / "parts"), 12, fails=False)
    assert steps_in(tmp_path / "parts" / "trace" / "rank-0.jsonl") == [0, 1, 2, 3, 3, 4, 5, 6, 7, 7, 8, 9, 10, 11, 12]
    code, out, _ = said_of(capsys, tmp_path / "whole", tmp_path / "parts")
    assert (code, out.splitlines()[-1]) == (0, "The same bits in all 13 steps that both have.")
    code, out, _ = said_of(capsys, tmp_path / "parts", tmp_path / "whole")
    assert code == 0


@pytest.mark.covers("H10")
@pytest.mark.parametrize("kept", [True, False])
def test_a_restored_state_that_differs_is_found_where_the_run_resumed(
    kept: bool, on_ranks: OnRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_ranks(1, train_in_parts, str(tmp_path / "whole"), 6, fails=False)
    on_ranks(1, train_in_parts, str(tmp_path / "parts"), 3, fails=False)
    path = tmp_path / "parts" / "trace" / "rank-0.jsonl"
    if not kept:
        path.unlink()
    on_ranks(1, train_in_parts, str(tmp_path / "parts"), 6, fails=False)
    assert said_of(capsys, tmp_path / "whole", tmp_path / "parts")[0] == 0
    lines = path.read_text().splitlines()
    place = next(number for number, line in enumerate(lines) if '"step": 3' in line and '["start"' in line)
    start = json.loads(lines[place])
    start["entries"][-1][2] = "0" * 32
    path.write_text("\n".join([*lines[:place], json.dumps(start), *lines[place + 1 :]]) + "\n")
    code, out, _ = said_of(capsys, tmp_path / "whole", tmp_path / "parts")
    assert code == 1
    name = start["entries"][-1][1]
    assert f"After step 3, where a run resumed: `{name}` differs first: the restored state differs." in out


def test_a_run_that_starts_over_moves_its_trace(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(1, train, str(tmp_path), steps=2)
    with dl.join_world() as world:
        loop = dl.Loop(
            dl.Batches(torch.ones(4, 1), 2, world), 1, state={"m": nn.Linear(1, 1)}, run_dir=tmp_path, resume=False
        )
        assert loop.iteration == 0
    assert steps_in(tmp_path / "before" / "1" / "trace" / "rank-0.jsonl") == [0, 1, 2]
    assert not (tmp_path / "trace").exists()
