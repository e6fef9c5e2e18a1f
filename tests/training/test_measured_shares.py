"""Shares measured in the first steps, on a simulated clock so that no test depends on real times."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset

import ddp_loop as dl
from ddp_loop.training.checks import MEASURED_STEPS, WARM_UP, shares_of
from tests.support.cases import make_data
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, MOST_S, Refused, on_this_rank

pytestmark = [pytest.mark.on_gpus_too, pytest.mark.covers("C5")]

FIXED_AFTER = WARM_UP + MEASURED_STEPS
SAMPLES, BATCH = 102, 12  # 9 mini-batches an epoch, the last of 6 samples


class Planted:
    """A clock that only the training advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    @contextmanager
    def of(self, world: dl.World) -> Iterator[None]:
        kind = type(world.accelerator)
        mark = patch.object(kind, "mark", lambda accelerator: self.now_s)
        with mark, patch.object(kind, "seconds", lambda accelerator, first, last: last - first):
            yield


class Result:
    """A run's shares and what follows from them."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, ...]] = []
        self.samples: list[list[int]] = []  # of this rank, by step
        self.shares: tuple[float, ...] | None = None
        self.lines: list[str] = []
        self.bits, self.resumed_at = "", 0


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)).double()


def numbered(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, labels, and the number of each sample."""
    inputs, labels = make_data((6,), number)
    return inputs, labels, torch.arange(number)


class Rows(Dataset[Any]):
    def __init__(self) -> None:
        self.data = [one.cpu() for one in numbered(SAMPLES)]  # workers cannot share what lies on a GPU

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return tuple(one[index] for one in self.data)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(*numbered(SAMPLES), strict=True)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tensors": (lambda: numbered(SAMPLES), {}),
    "a data set with workers": (Rows, {"num_workers": 2, "prefetch_factor": 3}),
    "a stream": (Stream, {}),
}


def train(
    times_s: tuple[float, ...],
    *,
    shares: Any = "measured",
    kind: str = "tensors",
    run: str | None = None,
    steps: int = 22,
    passes: int = 1,
    **options: Any,
) -> Result:
    """Train on ranks that need `times_s[rank]` seconds for each sample."""
    result, clock, words = Result(), Planted(), io.StringIO()
    make, more = KINDS[kind]
    with dl.join_world(seed=3) as world, clock.of(world), redirect_stdout(words):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        batches = dl.Batches(make(), BATCH, world, shares=shares, **more, **options)
        state = {"model": model, "optimizer": optimizer}
        loop = dl.Loop(batches, 9, steps=steps, state=state, run_dir=run, save_every=1, progress=False, resume=None)
        result.resumed_at = loop.iteration
        sha = hashlib.sha256()
        for step in loop:
            result.sizes.append(step._loaded.mini_batch.sizes)
            for number in range(passes):
                own: list[int] = []
                for inputs, labels, numbers in step:
                    own += numbers.tolist()
                    clock.now_s += times_s[world.rank] * len(numbers)
                    step.backward(cross_entropy(model(inputs), labels))
                folded = step.fold()
                if number == 0:
                    result.samples.append(own)
                sha.update(folded.loss.cpu().numpy().tobytes())
            optimizer.step()
            clock.now_s += 100.0  # time outside the shards does not count
        for tensor in model.state_dict().values():
            sha.update(tensor.cpu().numpy().tobytes())
        result.shares, result.bits = batches.shares, sha.hexdigest()
    result.lines = [line for line in words.getvalue().splitlines() if "shares" in line]
    return result


def test_shares_are_in_proportion_to_speed() -> None:
    assert shares_of([0.001, 0.002]) == (0.667, 0.333)
    assert shares_of([3.0, 1.0, 1.5]) == (0.167, 0.5, 0.333)
    assert shares_of([1.0, 1.04]) == (1.0, 1.0)  # noise


@pytest.mark.parametrize("ranks", [2, 16, 300, 3000])
def test_shares_of_many_ranks_are_as_exact_as_those_of_two(ranks: int) -> None:
    shares = shares_of([1.0, 2.0, 1.3] * ranks)
    assert shares[0] / shares[1] == pytest.approx(2.0, rel=0.01)
    assert shares[0] / shares[2] == pytest.approx(1.3, rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_follow_the_planted_times_from_one_step_on(kind: str, on_ranks: OnRanks) -> None:
    results = on_ranks(2, train, (0.001, 0.002), kind=kind)
    assert {result.shares for result in results} == {(0.667, 0.333)}
    for result in results:
        assert set(result.sizes[:FIXED_AFTER]) == {(6, 6), (3, 3)}
        assert set(result.sizes[FIXED_AFTER:]) == {(8, 4), (4, 2)}
    for epoch in (range(9), range(9, 18)):  # each sample once, also in the epoch of the change
        seen = [sample for step in epoch for result in results for sample in result.samples[step]]
        assert sorted(seen) == list(range(SAMPLES))
    said = f"The shares of ranks 0 to 1 are 0.667, 0.333, measured up to step {FIXED_AFTER}. They are fixed from now"
    assert results[0].lines == [f"ddp_loop: {said} on."]
    assert not results[1].lines


@pytest.mark.parametrize("passes", [1, 2])
def test_with_fixed_shards_the_bits_stay_and_the_shards_move(passes: int, on_ranks: OnRanks) -> None:
    equal = on_ranks(3, train, (1.0, 1.0, 1.0), shares=None, shards=6, passes=passes, drop_last=True)
    results = on_ranks(3, train, (0.002, 0.001, 0.002), shards=6, passes=passes, drop_last=True)
    assert {result.shares for result in results} == {(0.25, 0.5, 0.25)}
    assert {result.bits for result in results} == {result.bits for result in equal}
    assert [len(result.samples[FIXED_AFTER]) for result in results] == [4, 6, 2]  # of 12; remainders to the first
    assert [len(result.samples[FIXED_AFTER - 1]) for result in results] == [4, 4, 4]


def of_two_loops(times_s: tuple[float, ...], shares: Any, interleaved: bool) -> str:
    """The bits of two models, each with a loop over the same batches that is created before the first one runs."""
    sha, clock = hashlib.sha256(), Planted()
    with dl.join_world(seed=3) as world, clock.of(world):
        batches = dl.Batches(numbered(SAMPLES), BATCH, world, shares=shares, shards=6, drop_last=True)
        models = [network(), network()]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        loops = [
            dl.Loop(batches, 2, state={"model": model, "optimizer": optimizer}, progress=False)
            for model, optimizer in zip(models, optimizers, strict=True)
        ]

        def make(step: dl.Step, number: int) -> None:
            for inputs, labels, numbers in step:
                clock.now_s += times_s[world.rank] * len(numbers)
                step.backward(cross_entropy(models[number](inputs), labels))
            sha.update(step.fold().loss.cpu().numpy().tobytes())
            optimizers[number].step()

        if interleaved:
            for one, other in zip(*loops, strict=True):
                make(one, 0)
                make(other, 1)
        else:
            for number, loop in enumerate(loops):
                for step in loop:
                    make(step, number)
        for tensor in chain(*(model.state_dict().values() for model in models)):
            sha.update(tensor.cpu().numpy().tobytes())
    return sha.hexdigest()


@pytest.mark.parametrize("interleaved", [False, True])
def test_loops_over_the_same_batches_all_use_the_measured_shares(interleaved: bool, on_ranks: OnRanks) -> None:
    equal = on_ranks(3, of_two_loops, (1.0, 1.0, 1.0), None, interleaved)
    assert set(on_ranks(3, of_two_loops, (0.002, 0.001, 0.002), "measured", interleaved)) == set(equal)


@pytest.mark.quick_on_gpus
def test_ranks_that_are_equally_fast_keep_equal_shares(on_ranks: OnRanks) -> None:
    for result in on_ranks(2, train, (0.001, 0.00102)):
        assert result.shares == (1.0, 1.0)
        assert set(result.sizes) == {(6, 6), (3, 3)}


def test_a_rank_without_samples_cannot_be_measured(on_ranks: OnRanks) -> None:
    with_one = on_ranks(2, train, (0.001, 0.002), drop_last=True, steps=FIXED_AFTER + 1)
    assert with_one[0].shares == (0.667, 0.333)
    results = on_ranks(2, train_by_ones)
    assert {result.shares for result in results} == {None}
    assert "rank 1 had no samples in 10 steps. All ranks keep equal shares." in results[0].lines[0]


def train_by_ones() -> Result:
    """Train with mini-batches of one sample, which rank 0 gets."""
    result, words = Result(), io.StringIO()
    with dl.join_world(seed=3) as world, redirect_stdout(words):
        model = nn.Linear(6, 3).double()
        batches = dl.Batches(make_data((6,), 20), 1, world, shares="measured")
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
            for inputs, labels in step:
                step.backward(cross_entropy(model(inputs), labels))
            step.fold()
        result.shares = batches.shares
    result.lines = [line for line in words.getvalue().splitlines() if "shares" in line]
    return result


def test_shares_that_leave_a_shard_with_one_sample_are_not_used(on_ranks: OnRanks) -> None:
    results = on_ranks(2, train, (0.001, 0.009))  # of the last mini-batch of 6: 5 and 1, under BatchNorm1d
    assert {result.shares for result in results} == {None}
    assert "The shares 0.9, 0.1, measured up to step 13, are not used." in results[0].lines[0]
    assert "one shard has a single sample" in results[0].lines[0]
    assert set(results[0].sizes) == {(6, 6), (3, 3)}


# -- resuming ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [None, 6])
def test_a_resumed_run_keeps_the_measured_shares(shards: int | None, tmp_path: Path, on_ranks: OnRanks) -> None:
    whole = on_ranks(2, train, (0.001, 0.002), shards=shards, drop_last=True)
    run = str(tmp_path / "run")
    on_ranks(2, train, (0.001, 0.002), shards=shards, drop_last=True, run=run, steps=16)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["shares"] == [0.667, 0.333]
    results = on_ranks(
        2, train, (0.005, 0.001), shards=shards, drop_last=True, run=run
    )  # which would be measured otherwise
    for result, other in zip(results, whole, strict=True):
        assert result.resumed_at == 16
        assert result.shares == (0.667, 0.333)
        assert result.samples == other.samples[16:]
    assert "measured before the run was resumed" in results[0].lines[0]
    assert json.loads((tmp_path / "run" / "status.json").read_text())["shares"] == [0.667, 0.333]


def test_a_run_that_resumes_before_the_end_of_the_measurement_measures(tmp_path: Path, on_ranks: OnRanks) -> None:
    run = str(tmp_path / "run")
    on_ranks(2, train, (0.001, 0.002), run=run, steps=FIXED_AFTER - 1)
    results = on_ranks(2, train, (0.001, 0.002), run=run, steps=30)
    assert results[0].shares == (0.667, 0.333)
    assert f"measured up to step {2 * FIXED_AFTER - 1}" in results[0].lines[0]


def test_on_another_number_of_ranks_shares_are_measured_again(tmp_path: Path, on_ranks: OnRanks) -> None:
    run = str(tmp_path / "run")
    on_ranks(2, train, (0.001, 0.002), shards=6, drop_last=True, run=run, steps=16)
    results = on_ranks(3, train, (0.002, 0.001, 0.002), shards=6, drop_last=True, run=run, steps=32)
    assert {result.shares for result in results} == {(0.25, 0.5, 0.25)}
    said = [line for line in results[0].lines if "again" in line]
    assert said == ["ddp_loop: The shares were measured on 2 ranks. They are measured again on 3."]


# -- what is refused -----------------------------------------------------------------------------------------


def with_synced_layers(world: dl.World, folder: str) -> None:
    model = network()
    dl.sync_batch_norm(model, world)
    dl.Loop(dl.Batches(make_data((6,), 24), 12, world, shares="measured"), 1, state={"model": model}, progress=False)


def test_synced_batch_norm_cannot_be_measured(refused: Refused) -> None:
    refused(2, with_synced_layers, kind="ValueError", said='Got shares="measured". Pass shares as numbers', by=ALL)


def leaves_one_step_early(world: dl.World, folder: str, shards: int | None, step_left: int, passes: int) -> None:
    """Rank 1 leaves after the first pass of a step, which may have further passes on the others."""
    clock = Planted()
    with clock.of(world):
        model = network()
        batches = dl.Batches(make_data((6,), 96), 12, world, shares="measured", shards=shards)
        for step in dl.Loop(batches, 9, state={"model": model}, progress=False):
            for _ in range(passes):
                for inputs, labels in step:
                    clock.now_s += len(inputs) * (1 + world.rank)
                    step.backward(cross_entropy(model(inputs), labels))
                step.fold()
                if world.rank == 1 and step.iteration == step_left:
                    return


@pytest.mark.both_exchanges
@pytest.mark.parametrize("shards", [None, 6])
@pytest.mark.parametrize("step_left", [FIXED_AFTER - 1, FIXED_AFTER, FIXED_AFTER + 1])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_rank_that_leaves_around_the_change_ends_all(
    passes: int, step_left: int, shards: int | None, on_ranks: OnRanks, tmp_path: Path
) -> None:
    arguments = shards, step_left, passes
    other, leaver = on_ranks(2, on_this_rank, leaves_one_step_early, str(tmp_path / "run"), arguments)
    assert leaver.kind == ""  # a break is no error where it is made
    assert (other.kind, f"it left the loop in step {step_left}" in other.text) == ("PeerFailed", True), other
    assert other.took_s < MOST_S
