"""Training with unequal shares, against one process over the same shards, and to the bit with fixed shards."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from tests.support.cases import CASES, make, make_data
from tests.support.comparing import is_close
from tests.support.harness import OnRanks

pytestmark = [pytest.mark.on_gpus_too, pytest.mark.covers("C5")]

STEPS, BATCH = 4, 11
SHARES = [(1, 1, 1, 0, 1), (3, 1)]


def is_same(value: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    """Whether two tensors are equal within 1e-12."""
    return value is expected if value is None or expected is None else is_close([value.double()], [expected.double()])


# -- fixed shards --------------------------------------------------------------------------------------------


def network(width: int) -> nn.Module:
    layers = nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3)
    return nn.Sequential(*layers)


def bits(shares: Any, shards: int, width: int = 8) -> str:
    """SHA-256 of the model and the losses after some steps over fixed shards."""
    with dl.join_world(seed=3) as world:
        model = network(width)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        batches = dl.Batches(make_data((6,), 100), 26, world, shards=shards, shares=shares)
        sha = hashlib.sha256()
        for step in dl.Loop(batches, 2, state={"model": model, "optimizer": optimizer}, progress=False):
            for inputs, labels in step:
                step.backward(cross_entropy(model(inputs.float()), labels))
            sha.update(step.fold().loss.double().cpu().numpy().tobytes())
            optimizer.step()
        for tensor in model.state_dict().values():
            sha.update(tensor.cpu().numpy().tobytes())
        return sha.hexdigest()


@pytest.mark.parametrize("shares", [*SHARES, (1, 0, 2), (0, 1, 0)], ids=str)
def test_with_fixed_shards_the_bits_are_those_of_equal_shares(shares: tuple[int, ...], on_ranks: OnRanks) -> None:
    assert set(on_ranks(len(shares), bits, shares, 7)) == set(on_ranks(1, bits, None, 7))


def test_statistics_that_travel_as_moments_keep_their_bits(on_ranks: OnRanks) -> None:
    assert set(on_ranks(3, bits, (1, 0, 3), 8, 2048)) == set(on_ranks(2, bits, None, 8, 2048))


# -- a rank that idles, and evaluation -----------------------------------------------------------------------


def evaluated(shares: Any, shards: int | None) -> tuple[dict[str, float], torch.Tensor]:
    with dl.join_world(seed=0) as world:
        model, _ = make(CASES["batch norm 2d"])
        data = make_data(CASES["batch norm 2d"].shape, 29)
        batches = dl.Batches(data, BATCH, world, shuffle=False, shares=shares, shards=shards)

        def losses(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return cross_entropy(output, labels, reduction="none")

        return dl.evaluate(model, batches, loss=losses), dl.predict(model, batches).clone()


@pytest.mark.parametrize("shards", [None, 6])
def test_evaluation_and_predictions_are_those_of_one_process(shards: int | None, on_ranks: OnRanks) -> None:
    ((expected, rows),) = on_ranks(1, evaluated, None, shards)
    for result, found in on_ranks(5, evaluated, (1, 1, 1, 0, 1), shards):
        assert result["samples"] == expected["samples"] == 29
        assert abs(result["loss"] - expected["loss"]) < (1e-12 if shards is None else 1e-300)
        assert is_same(found, rows)
        assert shards is None or torch.equal(found, rows)


def refolded(shares: Any, run: str, epochs: int) -> tuple[int, dict[str, torch.Tensor]]:
    """A run in a folder up to some epochs; the iteration it resumed at, and the model."""
    with dl.join_world(seed=0) as world:
        model, _ = make(CASES["no batch norm"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        batches = dl.Batches(make_data((6,), 22), BATCH, world, shares=shares)
        loop = dl.Loop(
            batches, epochs, state={"model": model, "optimizer": optimizer}, run_dir=run, progress=False, resume=True
        )
        began = loop.iteration
        for step in loop:
            for inputs, labels in step:
                step.backward(cross_entropy(model(inputs), labels))
            step.fold()
            optimizer.step()
        return began, {key: value.clone() for key, value in model.state_dict().items()}


def test_a_run_resumes_with_the_same_and_with_other_shares(tmp_path: Any, on_ranks: OnRanks) -> None:
    (_, expected), *_ = on_ranks(1, refolded, None, str(tmp_path / "whole"), 3)
    done = 0
    for epochs, shares in enumerate([(3, 1), (3, 1), (0, 1)], 1):
        results = on_ranks(2, refolded, shares, str(tmp_path / "run"), epochs)
        assert {began for began, _ in results} == {done}
        done = 2 * epochs
    for _, found in results:
        assert all(is_same(found[key], expected[key]) for key in expected)
