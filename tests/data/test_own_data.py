"""Own data of each rank in everything that a loop does: transforms, gathering, several passes, resuming, evaluation."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.comparing import Tensors, gradients_of, is_same, values_of
from tests.support.harness import OnRanks
from tests.support.own_data import made_steps, network_after_a_norm, of_rows, own_stream, rows_of
from tests.support.refusals import network
from tests.support.snippets import blocks_of, run_python
from tests.support.sources import FORKED, Mapped, Streamed
from tests.support.training import loop_on

pytestmark = pytest.mark.covers("A11", "A12")


def own_row(number: int) -> tuple[int, float]:
    """The number of a row, and an augmentation drawn while it is read."""
    return number, torch.rand(()).item()


def drawn(counts: list[int]) -> list[list[tuple[int, float, float]]]:
    """The number and the draws of each sample of this rank: of a data set, of one read by a worker, of a stream."""
    found = []
    with dl.join_world() as world:
        begin, count = sum(counts[: world.rank]), counts[world.rank]
        mapped = Mapped(count, lambda index: own_row(begin + index))
        stream = Streamed(lambda: map(own_row, range(begin, begin + count)))

        def noisy(data: Any, draws: dl.Draws) -> Any:
            return *data, draws.uniform()

        for data, more in ((mapped, {}), (mapped, FORKED), (stream, {})):
            batches = dl.Batches(data, 4, world, partition="own", transform=noisy, shuffle=False, **more)
            found.append([row for parts in batches for row in zip(*(part.tolist() for part in parts), strict=True)])
    return found


def test_random_numbers_differ_between_ranks_own_samples(on_ranks: OnRanks) -> None:
    for first, second in zip(*on_ranks(2, drawn, [5, 3]), strict=True):
        numbers, *draws = zip(*first, *second, strict=True)
        assert numbers == tuple(range(8))
        assert [len(set(one)) for one in draws] == [8, 8]


def gathered(counts: list[int]) -> list[tuple[list[int], Tensors]]:
    with dl.join_world() as world:
        model = network()
        batches = dl.Batches(own_stream(world, counts), 4, world, partition="local")
        found = []
        for step in loop_on(batches, model):
            for numbers, rows in step:
                step.hold(model(rows), numbers)
            outputs, numbers = step.gather()
            step.backward((outputs - outputs.mean()).square().sum())
            step.fold()
            found.append((numbers.tolist(), gradients_of(model)))
        return found


@pytest.mark.on_gpus_too
def test_a_loss_of_the_whole_mini_batch_over_own_streams(on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, gathered, [7, 3])
    assert [len(numbers) for numbers, _ in first] == [4, 3, 2, 1]
    assert sorted(number for numbers, _ in first for number in numbers) == list(range(10))
    assert [numbers for numbers, _ in second] == [numbers for numbers, _ in first]
    for numbers, gradients in first:
        model = network()
        outputs = model(rows_of(numbers))
        (outputs - outputs.mean()).square().sum().backward()
        torch.testing.assert_close(gradients, gradients_of(model), rtol=1e-10, atol=1e-12)


def in_two_passes(counts: list[int]) -> dict[str, list[tuple[int, bool]]]:
    seen: dict[str, list[tuple[int, bool]]] = {"all": [], "first": []}
    with dl.join_world() as world:
        for until, steps in seen.items():
            model = network()
            batches = dl.Batches(own_stream(world, counts), 4, world, partition="local", until=until)
            for step in loop_on(batches, model, epochs=2):
                for _ in range(2):
                    for _, rows in step:
                        step.backward(model(rows).square().mean())
                    step.fold()
                steps.append((step.samples, step.is_last_of_epoch))
    return seen


@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
def test_several_passes_over_own_streams(on_ranks: OnRanks) -> None:
    expected = {"all": [(4, False), (3, False), (2, False), (1, True)] * 2, "first": [(4, False), (3, True)] * 2}
    assert on_ranks(2, in_two_passes, [7, 3]) == [expected] * 2


def over_own_streams(
    folder: str, until: str, stop_at: int, counts: list[int], is_synced: bool
) -> tuple[Tensors, list[Any], str]:
    with dl.join_world(seed=4) as world:
        model = nn.Sequential(*network(), nn.Dropout(0.2))
        if is_synced:
            model.insert(0, nn.BatchNorm1d(4, dtype=torch.float64))
            dl.sync_batch_norm(model, world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        batches = dl.Batches(own_stream(world, counts), 4, world, partition="local", until=until)
        seen = []
        for step in made_steps(batches, model, 2, optimizer, run_dir=folder or None, save_every=stop_at or None):
            seen.append((step.iteration, step.samples, step.is_last_of_epoch))
            if stop_at and step.iteration == stop_at + 1:
                break
        return values_of(model), seen, str(batches.unused)


@pytest.mark.on_gpus_too
@pytest.mark.parametrize(
    ("until", "stop_at", "counts", "is_synced"),
    [
        ("all", 3, [7, 3], False),
        ("all", 4, [7, 3], False),
        ("first", 1, [7, 3], False),
        ("all", 2, [8, 3], True),
    ],
)
@pytest.mark.slow
def test_own_streams_resume_inside_and_after_an_epoch(
    until: str, stop_at: int, counts: list[int], is_synced: bool, on_ranks: OnRanks, tmp_path: Path
) -> None:
    expected, seen, unused = on_ranks(2, over_own_streams, "", until, 0, counts, is_synced)[0]
    on_ranks(2, over_own_streams, str(tmp_path), until, stop_at, counts, is_synced)
    results = on_ranks(2, over_own_streams, str(tmp_path), until, 0, counts, is_synced)
    for tensors, found, left in results:
        assert is_same(tensors, expected)
        assert found == seen[stop_at:]
        assert left == unused


def evaluated(counts: list[int]) -> tuple[dict[str, float], float, torch.Tensor]:
    """The loss of own streams by `evaluate`, its sum by a plain `for`, and a mean by `update_bn`."""
    with dl.join_world() as world:
        model = network_after_a_norm()
        batches = dl.Batches(own_stream(world, counts), 4, world, partition="local", shuffle=False)
        found = dl.evaluate(model, batches, forward=of_rows, loss=lambda output, rows: output.square().mean(1))
        own = [model.eval()(rows).detach().square().sum() for _, rows in batches]
        total = world.sum(torch.stack([torch.zeros((), dtype=torch.float64), *own]).sum()).item()
        dl.update_bn(model, batches, forward=of_rows)
        return found, total, next(model.buffers())


def test_evaluation_reads_each_sample_of_own_streams_once(on_ranks: OnRanks) -> None:
    results = on_ranks(2, evaluated, [8, 2])
    expected = network_after_a_norm().eval()(rows_of(list(range(10)))).square()
    for found, total, mean in results:
        assert found["samples"] == 10
        assert found["loss"] == pytest.approx(expected.mean().item(), rel=1e-12)
        assert total == pytest.approx(expected.sum().item(), rel=1e-12)
        assert torch.equal(mean, results[0][2])


def statistics(counts: list[int], partition: str, size: int) -> torch.Tensor | None:
    with dl.join_world() as world:
        numbers = own_stream(world, counts).numbers if partition == "own" else list(range(sum(counts)))
        norm = nn.BatchNorm1d(4, dtype=torch.float64)
        dl.update_bn(norm, dl.Batches(rows_of(numbers), size, world, partition=partition, shuffle=False))
        return norm.running_mean


@pytest.mark.parametrize(("counts", "partition", "size"), [([8, 2], "own", 4), ([6, 5, 5], "local", 9)])
def test_statistics_are_those_of_the_mini_batches_of_all_parts(
    counts: list[int], partition: str, size: int, on_ranks: OnRanks
) -> None:
    parts = rows_of(list(range(sum(counts)))).split(counts)
    pieces = [part.split(piece) for part, piece in zip(parts, dl.split_sizes(size, len(counts)), strict=True)]
    means = [torch.cat([one for one in shards if one is not None]).mean(0) for shards in zip_longest(*pieces)]
    for mean in on_ranks(len(counts), statistics, counts, partition, size):
        torch.testing.assert_close(mean, torch.stack(means).mean(0), rtol=1e-11, atol=0)


def test_the_guides_on_policy_loop_makes_one_step_of_all_that_the_ranks_collected(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    [block] = [one.text for one in blocks_of("docs/migrate.md") if "Batches(collected, None" in one.text]
    job = "import torch\nimport ddp_loop as dl\nwith dl.join_world(device='cpu') as world:\n"
    job += indent(block + "world.print(len(whole), whole.batch_size, step.iteration)\n", "    ")
    ran = on_ranks(2, run_python, str(tmp_path / "job"), job)
    assert [one.printed for one in ran] == ["1 24 1\n", ""]


class Foreign:
    """A batch of a user's own class, whose rows ddp_loop cannot remove."""

    def __init__(self, samples: list[tuple[int, torch.Tensor]]) -> None:
        self.rows = torch.stack([row for _, row in samples])


def train_on_foreign(synced: bool) -> int:
    with dl.join_world() as world:
        model = nn.Sequential(nn.BatchNorm1d(4, dtype=torch.float64)) if synced else network()
        if synced:
            dl.sync_batch_norm(model, world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = dl.Batches(own_stream(world, [8, 4]), 4, world, partition="local", collate_fn=Foreign)
        steps = 0
        for step in loop_on(batches, model):
            for batch in step:
                step.backward(model(batch.rows.to(world.device)).square().mean())
            step.fold()
            optimizer.step()
            steps += 1
        return steps


def test_own_batches_whose_rows_cannot_be_removed_are_refused_only_where_they_must_be(on_ranks: OnRanks) -> None:
    assert on_ranks(2, train_on_foreign, False) == [4, 4]
    with pytest.raises(dl.RankFailed, match="Got a Foreign, whose rows cannot be removed"):
        on_ranks(2, train_on_foreign, True)
