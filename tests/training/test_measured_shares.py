"""Shares measured in the first steps, on a simulated clock so that no test depends on real times."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import StackDataset

import ddp_loop as dl
from ddp_loop.training.checks import MEASURED_STEPS, WARM_UP, shares_of
from tests.support.cases import make_data
from tests.support.harness import OnRanks
from tests.support.refusals import Refused
from tests.support.sources import Streamed
from tests.support.training import loop_on

pytestmark = [pytest.mark.on_gpus_too, pytest.mark.covers("C5")]

FIXED_AFTER = WARM_UP + MEASURED_STEPS
SAMPLES = 102
BATCH = 12  # 9 mini-batches an epoch, the last of 6 samples


@contextmanager
def planted(world: dl.World, clock: SimpleNamespace) -> Iterator[None]:
    """A clock that only the training advances."""
    kind = type(world.accelerator)
    mark = patch.object(kind, "mark", lambda accelerator: clock.now_s)
    with mark, patch.object(kind, "seconds", lambda accelerator, first, last: last - first):
        yield


def network(batch_size: int = BATCH) -> nn.Module:
    norm = nn.BatchNorm1d(8) if batch_size > 1 else nn.Identity()
    return nn.Sequential(nn.Linear(6, 8), norm, nn.Dropout(0.2), nn.Linear(8, 3)).double()


def numbered() -> tuple[torch.Tensor, ...]:
    """Inputs, labels, and the number of each sample."""
    return (*make_data((6,), SAMPLES), torch.arange(SAMPLES))


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "tensors": (numbered, {}),
    "a data set with workers": (  # which cannot share what lies on a GPU
        lambda: StackDataset(*(one.cpu() for one in numbered())),  # type: ignore[arg-type]
        {"num_workers": 2, "prefetch_factor": 3},
    ),
    "a stream": (lambda: Streamed(partial(zip, *numbered())), {}),
}


def train(
    times_s: tuple[float, ...], *, shares: Any = "measured", kind: str = "tensors", batch_size: int = BATCH,
    steps: int = 22, passes: int = 1, loops: int = 1, interleaved: bool = False, run: str | None = None, **options: Any,
) -> SimpleNamespace:  # fmt: skip
    """Train on ranks that need `times_s[rank]` seconds for each sample; each loop, over the same batches, a model.

    Returns what the rank did: `sizes` of the shards by step, its `samples` by step, the `shares`, the `lines` that were
    printed about them, the `bits`, and where it `resumed_at`.
    """
    clock = SimpleNamespace(now_s=0.0)
    words = io.StringIO()
    sha = hashlib.sha256()
    result = SimpleNamespace(sizes=[], samples=[])
    make, more = KINDS[kind]
    with dl.join_world(seed=3) as world, planted(world, clock), redirect_stdout(words):
        batches = dl.Batches(make(), batch_size, world, shares=shares, **more, **options)
        models = [network(batch_size) for _ in range(loops)]
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
        saved: dict[str, Any] = {"run_dir": run, "save_every": 1, "resume": None}
        made = [
            dl.Loop(batches, 9, steps=steps, state={"m": model, "o": optimizer}, progress=False, **saved)
            for model, optimizer in zip(models, optimizers, strict=True)
        ]
        result.resumed_at = made[0].iteration
        each = [zip(repeat(number), loop) for number, loop in enumerate(made)]
        for number, step in chain.from_iterable(zip(*each, strict=True) if interleaved else each):
            result.sizes.append(step._loaded.mini_batch.sizes)
            for _ in range(passes):
                own: list[int] = []
                for inputs, labels, numbers in step:
                    own += numbers.tolist()
                    clock.now_s += times_s[world.rank] * len(numbers)
                    step.backward(cross_entropy(models[number](inputs), labels))
                sha.update(step.fold().loss.cpu().numpy().tobytes())
            result.samples.append(own)
            optimizers[number].step()
            clock.now_s += 100.0  # time outside the shards does not count
        for tensor in nn.ModuleList(models).state_dict().values():
            sha.update(tensor.cpu().numpy().tobytes())
        result.shares = batches.shares
    result.bits = sha.hexdigest()
    result.lines = [line for line in words.getvalue().splitlines() if "shares" in line]
    return result


def test_shares_are_in_proportion_to_speed() -> None:
    assert shares_of([0.001, 0.002]) == (0.667, 0.333)
    assert shares_of([3.0, 1.0, 1.5]) == (0.167, 0.5, 0.333)
    assert shares_of([1.0, 1.04]) == (1.0, 1.0)  # noise
    shares = shares_of([1.0, 2.0, 1.3] * 1000)  # as exact as those of few ranks
    assert shares[0] / shares[1] == pytest.approx(2.0, rel=0.01)
    assert shares[0] / shares[2] == pytest.approx(1.3, rel=0.01)


@pytest.mark.quick_on_gpus
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


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"passes": 2}, {"loops": 2}, {"loops": 2, "interleaved": True}], ids=str)
def test_with_fixed_shards_the_bits_stay_and_the_shards_move(how: dict[str, Any], on_ranks: OnRanks) -> None:
    """Also those of a loop that is not the one in which they were measured."""
    equal = on_ranks(3, train, (1.0, 1.0, 1.0), shares=None, shards=6, drop_last=True, **how)
    results = on_ranks(3, train, (0.002, 0.001, 0.002), shards=6, drop_last=True, **how)
    assert {result.shares for result in results} == {(0.25, 0.5, 0.25)}
    assert {result.bits for result in results} == {result.bits for result in equal}
    assert [len(result.samples[0]) for result in results] == [4, 4, 4]
    assert [len(result.samples[-1]) for result in results] == [4, 6, 2]  # of 12; remainders to the first


@pytest.mark.parametrize(
    ("times_s", "how", "said"),
    [
        ((1.0, 1.0), {"batch_size": 1}, "rank 1 had no samples in 10 steps. All ranks keep equal shares."),
        # Of the last mini-batch of 6: 5 and 1, under BatchNorm1d.
        (
            (0.001, 0.009),
            {},
            "The shares 0.9, 0.1, measured up to step 13, are not used. .*one shard has a single sample",
        ),
    ],
)
def test_shares_that_cannot_be_are_not_used(
    times_s: tuple[float, ...], how: dict[str, Any], said: str, on_ranks: OnRanks
) -> None:
    results = on_ranks(2, train, times_s, **how)
    assert {result.shares for result in results} == {None}
    assert re.search(said, results[0].lines[0])
    assert len({*results[0].sizes}) <= 2


# -- resuming ------------------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_the_measured_shares(tmp_path: Path, on_ranks: OnRanks) -> None:
    keep = partial(on_ranks, 2, train, drop_last=True)
    whole = keep((0.001, 0.002))
    keep((0.001, 0.002), run=str(tmp_path), steps=16)
    results = keep((0.005, 0.001), run=str(tmp_path))
    for result, other in zip(results, whole, strict=True):
        assert result.resumed_at == 16
        assert result.shares == (0.667, 0.333)
        assert result.samples == other.samples[16:]
    assert "measured before the run was resumed" in results[0].lines[0]
    assert json.loads((tmp_path / "status.json").read_text())["shares"] == [0.667, 0.333]


def test_a_run_that_resumes_before_the_end_of_the_measurement_measures(tmp_path: Path, on_ranks: OnRanks) -> None:
    measure = partial(on_ranks, 2, train, (0.001, 0.002), run=str(tmp_path))
    measure(steps=FIXED_AFTER - 1)
    first, _ = measure(steps=30)
    assert first.shares == (0.667, 0.333)
    assert f"measured up to step {2 * FIXED_AFTER - 1}" in first.lines[0]


@pytest.mark.slow
def test_on_another_number_of_ranks_shares_are_measured_again(tmp_path: Path, on_ranks: OnRanks) -> None:
    on_ranks(2, train, (0.001, 0.002), shards=6, drop_last=True, run=str(tmp_path), steps=16)
    results = on_ranks(3, train, (0.002, 0.001, 0.002), shards=6, drop_last=True, run=str(tmp_path), steps=32)
    assert {result.shares for result in results} == {(0.25, 0.5, 0.25)}
    assert "ddp_loop: The shares were measured on 2 ranks. They are measured again on 3." in results[0].lines


# -- what is refused -----------------------------------------------------------------------------------------


def with_synced_layers(world: dl.World, folder: str) -> None:
    model = network()
    dl.sync_batch_norm(model, world)
    loop_on(dl.Batches(make_data((6,), 24), 12, world, shares="measured"), model)


def test_synced_batch_norm_cannot_be_measured(refused: Refused) -> None:
    refused(2, with_synced_layers, kind="ValueError", said='Got shares="measured". Pass shares as numbers')
