"""Traces, and `python -m ddp_loop diff`: the first step, stage and tensor in which two runs differ."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from ddp_loop.cli import main
from ddp_loop.determinism import digest, leaves
from ddp_loop.tracing import diagnosis
from ddp_loop.tracing.compare import DifferenceMeter
from ddp_loop.tracing.trace import check_comparable, read_trace
from tests.support.cases import make_data
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused
from tests.support.runs import lines_of
from tests.support.serving import write_lines

STEPS = 10


def network(width: int = 8) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 3))


def train(
    folder: str, fault: str = "", width: int = 8, shards: int = 4, steps: int = STEPS, leave_at: int = 0, **options: Any
) -> str:
    """Train a small network with momentum and return a digest of its weights. A fault begins at step 7."""
    with suppress(ZeroDivisionError), dl.join_world(seed=5) as world:
        model = network(width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        inputs, labels = make_data((6,), 60)
        batches = dl.Batches((inputs.float(), labels), 12, world, shards=shards)
        options = {"run_dir": folder, "progress": False, "trace": True, **options}
        loop = dl.Loop(batches, steps=steps, state={"model": model, "optimizer": optimizer}, **options)
        model[4].register_full_backward_pre_hook(
            lambda _, slopes: (1.001 * next(iter(slopes)),) if fault == "gradient" and loop.iteration == 7 else slopes
        )
        for step in loop:
            for number, (inputs, labels) in enumerate(step):
                if fault == "noise" and step.iteration == 7 and number == 0:
                    torch.rand(1)
                metric = torch.tensor(float(fault == "metric" and 7 <= step.iteration < 9))
                step.backward(cross_entropy(model(inputs), labels), level=metric)
            step.fold()
            if fault == "rate" and step.iteration == 7:
                optimizer.param_groups[0]["lr"] = 0.06
            optimizer.step()
            if step.iteration == leave_at:
                raise ZeroDivisionError
    return digest(torch.cat([one.detach().flatten() for one in model.parameters()]))


def said_of(capsys: pytest.CaptureFixture[str], *runs: Path) -> tuple[int, str, str]:
    code = main(["diff", *map(str, runs)])
    out, errors = capsys.readouterr()
    return code, out, errors


@pytest.mark.covers("H10")
@pytest.mark.slow
def test_a_fault_is_found_where_it_was_planted(
    on_ranks: OnRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_ranks(2, train, str(tmp_path / "sound"))
    for fault, where in {
        "gradient": "Step 7, backward: `shard 0, gradient of model.4.bias` differs first",
        "noise": "Step 7, forward: `shard 0, loss` differs first",
        "rate": "Step 7, optimizer: `optimizer, group 0.lr` differs first",
        "metric": "Step 7, forward: `shard 0, level` differs first",
    }.items():
        on_ranks(2, train, str(tmp_path / fault), fault)
        code, out, _ = said_of(capsys, tmp_path / "sound", tmp_path / fault)
        assert code == 1
        assert "The same bits from step 0 to step 6." in out
        assert where in out
        is_over = fault == "metric"
        assert ("The same bits again from step 9 on." if is_over else "They differ to the end, step 10.") in out


@pytest.mark.covers("H7", "H10")
def test_runs_on_other_numbers_of_ranks_have_the_same_trace_which_changes_no_bit(
    on_ranks: OnRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = {on_ranks(ranks, train, str(tmp_path / str(ranks)), steps=6)[0] for ranks in (1, 3)}
    assert {*on_ranks(2, train, str(tmp_path / "without"), steps=6, trace=False)} == digests
    code, out, _ = said_of(capsys, tmp_path / "1", tmp_path / "3")
    assert (code, out.splitlines()[-1]) == (0, "The same bits in all 7 steps that both have.")
    assert not (tmp_path / "without" / "trace").exists()


def test_every_stage_has_its_entries(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(2, train, str(tmp_path), steps=1)
    head, *steps = lines_of(tmp_path / "trace" / "rank-0.jsonl")
    assert (head["ranks"], head["shards"], [step["step"] for step in steps]) == (2, 4, [0, 1])
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


def test_runs_that_cannot_be_compared_are_refused(
    on_ranks: OnRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for width in (8, 9):
        on_ranks(1, train, str(tmp_path / str(width)), width=width, steps=1)
    code, _, errors = said_of(capsys, tmp_path / "8", tmp_path / "9")
    assert code == 2
    assert "model.0.weight is float32 (8, 6) in" in errors
    assert "Compare runs of the same model" in errors
    shutil.rmtree(tmp_path / "9" / "trace")
    code, _, errors = said_of(capsys, tmp_path / "9", tmp_path / "nowhere")
    assert code == 2
    assert "has no trace. Run the script again with Loop(trace=True)" in errors


def test_runs_with_different_shards_are_compared_by_whole_mini_batches(
    on_ranks: OnRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for shards in (2, 3):
        on_ranks(1, train, str(tmp_path / str(shards)), shards=shards, steps=2)
    code, out, _ = said_of(capsys, tmp_path / "2", tmp_path / "3")
    assert code == 1
    assert "only values of the whole mini-batch are compared" in out
    assert "Step 1, fold: `loss` differs first" in out


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


def test_only_a_shard_that_its_pieces_fill_is_compared_with_them() -> None:
    def cut(*samples: int) -> dict[int, Any]:
        return {number: SimpleNamespace(samples=one) for number, one in enumerate(samples)}

    shards = cut(4, 4)
    for samples, found in (
        ((2, 2, 1, 3), [(0, [0, 1]), (1, [2, 3])]),
        ((2, 2, 4), [(0, [0, 1])]),  # a shard that is not cut has no pieces
        ((2, 1, 5), []),
        ((3, 3, 1, 1), []),
    ):
        pieces = cut(*samples)
        expected = [(number, [shards[number], *map(pieces.__getitem__, parts)]) for number, parts in found]
        assert diagnosis._cut_shards(shards, pieces) == expected


@pytest.mark.parametrize(("element", "is_equal"), [(0, True), (1, False)], ids=["touched", "untouched"])
def test_an_element_that_no_gradient_reached_must_be_equal_to_its_last_places(element: int, is_equal: bool) -> None:
    weight, other = torch.ones(2), torch.ones(2)
    other[element] += 2e-5
    name = ("optimizer", "parameter model.weight")
    here, there = (
        {("fold", "gradient of model.weight"): torch.tensor([1.0, 0.0]), name: one} for one in (weight, other)
    )
    meter = DifferenceMeter(rounding=1e-4, is_given=False)
    meter.add(here, there)
    assert (meter.measure(name[1], weight, other) < 1) == is_equal


def test_equal_lists_of_tensors_can_be_compared() -> None:
    runs: list[Any] = [SimpleNamespace(head={"tensors": {"w": ["torch.float32", [2]]}}, numbers=[1]) for _ in range(2)]
    check_comparable(*runs)


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


# -- a run that was killed and resumed -----------------------------------------------------------------------


def steps_in(run: Path) -> list[int]:
    return [line["step"] for line in lines_of(run / "trace" / "rank-0.jsonl")[1:]]


@pytest.mark.slow
@pytest.mark.covers("H10")
def test_a_killed_and_resumed_run_has_the_trace_of_the_undisturbed_one(
    on_ranks: OnRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    on_ranks(1, train, str(whole), steps=12)
    on_ranks(2, train, str(parts), steps=6, leave_at=5, save_every=3)  # it left steps 4 and 5 without a checkpoint
    assert steps_in(parts)[-1] in (4, 5)
    for ranks, steps in ((1, 7), (3, 12)):
        on_ranks(ranks, train, str(parts), steps=steps, save_every=3)
    assert steps_in(parts) == [0, 1, 2, 3, 3, 4, 5, 6, 7, 7, 8, 9, 10, 11, 12]
    for runs in ((whole, parts), (parts, whole)):
        code, out, _ = said_of(capsys, *runs)
        assert (code, out.splitlines()[-1]) == (0, "The same bits in all 13 steps that both have.")


@pytest.mark.covers("H10")
def test_a_restored_state_that_differs_is_found_where_the_run_resumed(
    on_ranks: OnRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, half = tmp_path / "whole", tmp_path / "half"
    on_ranks(1, train, str(whole), steps=6)
    on_ranks(1, train, str(half), steps=3)
    for kept in (True, False):
        parts = Path(shutil.copytree(half, tmp_path / f"parts, {kept}"))
        path = parts / "trace" / "rank-0.jsonl"
        if not kept:
            path.unlink()
        on_ranks(1, train, str(parts), steps=6)
        assert said_of(capsys, whole, parts)[0] == 0
        lines = lines_of(path)
        start = next(line for line in lines if line.get("step") == 3 and line["entries"][0][0] == "start")
        start["entries"][-1][2] = "0" * 32
        write_lines(path, lines)
        code, out, _ = said_of(capsys, whole, parts)
        assert code == 1
        name = start["entries"][-1][1]
        assert f"After step 3, where a run resumed: `{name}` differs first: the restored state differs." in out
