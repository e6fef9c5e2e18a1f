"""Transforms: on the device, random for each sample, the same on any number of shards, ranks and workers."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddp_loop as dl
from tests.support.harness import OnRanks, in_world
from tests.support.refusals import ALL, Refused, does_it
from tests.support.sources import shards_of
from tests.support.training import loop_on

pytestmark = pytest.mark.covers("A8")

SIZE = 23
ROWS = torch.arange(SIZE, dtype=torch.float32)[:, None].expand(SIZE, 4).contiguous()


def noisy(data: tuple[torch.Tensor, torch.Tensor], draws: dl.Draws) -> tuple[torch.Tensor, ...]:
    rows, numbers = data
    return (
        rows + draws.uniform(4),
        numbers,
        draws.normal(),
        draws.integers(0, 1000, 2),
        draws.chance(0.5, 3),
        draws.uniform(),
    )


Seen = dict[tuple[int, int], list[list[float]]]


def seen(shards: int | None, batch_size: int, options: dict[str, Any], by_index: bool) -> Seen:
    """The data of this rank's shards after the transform, by epoch and sample."""
    found: Seen = {}
    with dl.join_world(seed=5) as world:
        parts = ROWS, torch.arange(SIZE)
        data = parts if by_index else TensorDataset(*parts)
        batches = dl.Batches(data, batch_size, world, shards=shards, transform=noisy, **options)
        for epoch in range(2):
            for _, _, (rows, numbers, *rest) in shards_of(batches, epoch + 1):
                parts_of = [part.reshape(len(rows), -1).tolist() for part in (rows, *rest)]
                for place, sample in enumerate(numbers.tolist()):
                    found[epoch, sample] = [part[place] for part in parts_of]
    return found


def test_draws_depend_on_the_sample_not_on_shards_ranks_or_workers(on_ranks: OnRanks) -> None:
    alone = on_ranks(1, seen, 1, 8, {}, True)[0]
    assert len(alone) == 2 * SIZE
    assert all(alone[0, sample] != alone[1, sample] for sample in range(SIZE))
    for ranks, shards, batch_size, options, by_index in [
        (2, None, 8, {}, True),
        (3, 4, 5, {}, True),
        (2, 3, 23, {"num_workers": 1}, False),
        (1, 1, 4, {"shuffle": False}, True),
    ]:
        together: Seen = {}
        for found in on_ranks(ranks, seen, shards, batch_size, options, by_index):
            together |= found
        assert together == alone


def test_draws_differ_by_sample_epoch_call_and_seed() -> None:
    samples = torch.arange(1000)
    values = [dl.Draws(seed, epoch, samples, torch.device("cpu")).uniform() for seed in (0, 1) for epoch in (1, 2)]
    draws = dl.Draws(0, 1, samples, torch.device("cpu"))
    values += [draws.uniform(), draws.uniform()]
    assert torch.equal(values[0], values[4])
    everything = torch.cat([*values[:4], values[5]])
    assert len(everything.unique()) > 4990  # 5,000 of 2^24 numbers


def test_draws_have_their_distributions() -> None:
    n = 200_000
    draws = dl.Draws(3, 1, torch.arange(n), torch.device("cpu"))
    uniform = draws.uniform(low=-1.0, high=3.0)
    assert (float(uniform.min()) >= -1.0, float(uniform.max()) < 3.0) == (True, True)
    counts = torch.histc(uniform, 64, -1.0, 3.0)
    # chi-square of 63 degrees of freedom: mean 63, deviation 11.2
    assert float(((counts - n / 64) ** 2 / (n / 64)).sum()) < 63 + 5 * 11.2
    normal = draws.normal(mean=2.0, deviation=0.5)
    assert abs(float(normal.mean()) - 2.0) < 5 * 0.5 / n**0.5
    assert abs(float(normal.std()) - 0.5) < 0.005
    standard = (normal - 2.0) / 0.5
    assert abs(float((standard**4).mean()) - 3.0) < 0.1
    dice = torch.bincount(draws.integers(1, 7), minlength=7)
    assert int(dice[0]) == 0
    assert all(abs(int(count) - n / 6) < 5 * (n / 6) ** 0.5 for count in dice[1:])
    assert abs(float(draws.chance(0.3).float().mean()) - 0.3) < 0.006
    # neighbouring samples and elements are uncorrelated
    pairs = draws.uniform(2) - 0.5
    assert abs(float((pairs[:, 0] * pairs[:, 1]).mean())) < 5 / 12 / n**0.5
    assert abs(float((pairs[1:, 0] * pairs[:-1, 0]).mean())) < 5 / 12 / n**0.5


def test_shapes_and_types_are_those_of_the_documentation() -> None:
    draws = dl.Draws(0, 1, torch.arange(3), torch.device("cpu"))
    assert (draws.uniform().shape, draws.uniform(2, 5).shape, draws.normal(4).shape) == ((3,), (3, 2, 5), (3, 4))
    assert (draws.uniform().dtype, draws.normal().dtype) == (torch.float32, torch.float32)
    assert (draws.integers(0, 2).dtype, draws.chance(0.5).dtype) == (torch.int64, torch.bool)
    assert draws.integers(-5, -4, 2).tolist() == [[-5, -5]] * 3
    assert draws.chance(0.0, 9).sum() == 0
    assert draws.chance(1.0, 9).sum() == 27
    assert dl.Draws(0, 1, torch.arange(0), torch.device("cpu")).uniform(4).shape == (0, 4)
    with pytest.raises(ValueError, match=r"Got low=3, high=3. Note that high"):
        draws.integers(3, 3)


def change(kind: str, rank: int, data: tuple[torch.Tensor, torch.Tensor], draws: dl.Draws) -> Any:
    rows, labels = data
    match kind:
        case "fewer":
            return rows[1:], labels
        case "more":
            return rows.repeat(2, 1), labels
        case "nothing":
            return None
        case "raises":
            return rows @ torch.ones(7), labels
        case "one rank":
            return (rows if rank else rows[1:]), labels
        case "labels":
            return rows, labels[1:]
        case "labels of one rank":
            return rows, (labels if rank else labels[1:])
    return rows, labels, torch.ones(2)  # a table of another length


CHANGES: dict[str, tuple[int, str]] = {  # which rank raises it
    "fewer": (ALL, "A transform must keep the number of samples, 4 in this shard. It returned 3"),
    "more": (ALL, "4 in this shard. It returned 8"),
    "nothing": (ALL, "4 in this shard. It returned none"),
    "raises": (ALL, "mat1 and mat2|size mismatch"),
    "one rank": (0, "4 in this shard. It returned 3"),
    "labels": (ALL, "4 in this shard. It returned 3 in part 2. Give unwanted samples weight 0"),
    "labels of one rank": (0, "4 in this shard. It returned 3 in part 2. Give unwanted samples weight 0"),
}


def train_with(world: dl.World, folder: str, kind: str) -> None:
    model = nn.Linear(4, 1)
    batches = dl.Batches((ROWS, torch.arange(SIZE)), 8, world, transform=partial(change, kind, world.rank))
    for step in loop_on(batches, model):
        for rows, *_ in step:
            step.backward(model(rows).mean())
        step.fold()


def test_a_transform_that_changes_the_number_of_samples_or_labels_or_raises_ends_all_ranks(
    refused: Refused, on_ranks: OnRanks
) -> None:
    for kind, (by, said) in CHANGES.items():
        refused(2, train_with, kind, kind="RuntimeError" if kind == "raises" else "ValueError", said=said, by=by)
    on_ranks(2, in_world, train_with, "", "a table")


class Flip(nn.Module):
    """As torchvision's: of a single image."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.flip(-1)


WRITE = r"\. Write lambda data, draws"
WRONG: list[tuple[Any, str]] = [
    ("flip", "'flip'"),
    (lambda rows: rows, r"one of the form \(rows\)" + WRITE),
    (lambda images, labels, draws: images, r"one of the form \(images, labels, draws\)" + WRITE),
    (lambda: None, r"one of the form \(\)" + WRITE),
    (lambda data, *, draws: data, r"one of the form \(data, \*, draws\)" + WRITE),
    (Flip(), r"one of the form \(image\)" + WRITE),
]


def give(world: dl.World, folder: str, number: int, culprit: int) -> None:
    transform = WRONG[number][0] if does_it(world, culprit) else lambda data, draws: data
    dl.Batches(ROWS, 8, world, transform=transform)


@pytest.mark.parametrize("culprit", [ALL, 1])
def test_a_transform_of_another_form_is_refused_with_the_right_one(culprit: int, refused: Refused) -> None:
    for number, (_, form) in enumerate(WRONG):
        said = rf"transform\(data, draws\)\. Got {form}"
        refused(2, give, number, culprit, kind="TypeError", said=said, by=culprit)


class Twice(nn.Module):
    def forward(self, rows: torch.Tensor, draws: dl.Draws) -> torch.Tensor:
        return 2 * rows


class Compiled:
    """A function whose arguments Python does not know, as of those of C."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(torch.add)  # raises ValueError

    def __call__(self, rows: torch.Tensor, draws: dl.Draws) -> torch.Tensor:
        return rows + 4


def shift(by: float, rows: torch.Tensor, draws: dl.Draws, more: float = 0.0) -> torch.Tensor:
    return rows + by + more


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (partial(shift, 1.0), ROWS + 1),
        (Twice(), 2 * ROWS),
        (lambda *both: both[0] - 3, ROWS - 3),
        (Compiled(), ROWS + 4),
    ],
)
def test_a_transform_of_two_arguments_is_taken_whatever_it_is(
    change: Any, expected: torch.Tensor, world: dl.World
) -> None:
    batches = dl.Batches(ROWS, len(ROWS), world, transform=change, shuffle=False)
    assert torch.equal(dl.predict(nn.Identity(), batches), expected)
