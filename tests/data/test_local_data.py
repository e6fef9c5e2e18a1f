"""Data that live with their shard or their rank: parts of unequal length, exact weights, unused samples."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import ddp_loop as dl
from tests.support.comparing import Tensors, is_same, same_on_all, values_of
from tests.support.documents import fenced_blocks
from tests.support.harness import OnRanks
from tests.support.paths import DOCS
from tests.support.refusals import ALL, Refused, network, samples

pytestmark = pytest.mark.covers("A11", "A12")

BOUND = 1e-12
Gradients = dict[str, torch.Tensor]


class Own:
    """A rank's own stream: the rows number `begin` .. `begin + count - 1`, a different order in each epoch."""

    def __init__(self, begin: int, count: int) -> None:
        self.numbers = list(range(begin, begin + count))

    def set_epoch(self, epoch: int) -> None:
        self.numbers.sort()
        random.Random(epoch).shuffle(self.numbers)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        return ((number, row_of(number)) for number in self.numbers)


def row_of(number: int) -> torch.Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def rows_of(numbers: list[int]) -> torch.Tensor:
    return torch.stack([row_of(number) for number in numbers]) if numbers else torch.empty(0, 4, dtype=torch.float64)


def own_stream(world: dl.World, counts: list[int]) -> Own:
    return Own(sum(counts[: world.rank]), counts[world.rank])


class Told:
    """What a rank saw of each step: its samples, R, whether it was the epoch's last; and the fold's gradients."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, list[int], int, bool, float, Gradients]] = []
        self.unused: list[tuple[int, ...] | None] = []


def went(
    counts: list[int], size: int, until: str, epochs: int, *, layer: bool = False, sized: bool = False, **options: Any
) -> Told:
    """Training steps over data of the ranks' own."""
    with dl.join_world() as world:
        model: nn.Module = network()
        if layer:
            model = dl.sync_batch_norm(nn.Sequential(nn.BatchNorm1d(4, dtype=torch.float64), *network()), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        data: Any = own_stream(world, counts)
        if sized:
            numbers = data.numbers
            data = torch.tensor(numbers, dtype=torch.int64), rows_of(numbers)
        batches = dl.Batches(data, size, world, partition="own" if sized else "local", until=until, **options)
        loop = dl.Loop(
            batches, epochs, state={"model": model, "optimizer": optimizer}, progress=False,
            allow_single_sample_shards=True,
        )  # fmt: skip
        told = Told()
        for epoch in loop.epochs():
            for step in epoch:
                seen: list[int] = []
                for numbers, rows in step:
                    seen += numbers.tolist()
                    step.backward(mse_loss(model(rows), rows.sum(1, keepdim=True)))
                result = step.fold()
                gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
                place = step.epoch, seen, step.samples, step.is_last_of_epoch
                told.steps.append((*place, result.loss.item(), gradients))
                assert result.samples == step.samples
                optimizer.step()
            told.unused.append(None if batches.unused is None else tuple(batches.unused))
        return told


def assert_exact(results: list[Told], layer: bool = False) -> list[list[int]]:
    """Each step's gradients and loss are those of one process on the union of the ranks' samples; returns these."""
    assert len({len(told.steps) for told in results}) == 1
    model: nn.Module = network()
    if layer:
        model = nn.Sequential(nn.BatchNorm1d(4, dtype=torch.float64), *network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    unions = []
    for steps in zip(*(told.steps for told in results), strict=True):
        union = [number for step in steps for number in step[1]]
        unions.append(union)
        rows = rows_of(union)
        loss = mse_loss(model(rows), rows.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        for _, _, count, _, found, gradients in steps:
            assert count == len(union)
            assert found == pytest.approx(loss.item(), rel=1e-12)
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                bound = BOUND * max(1.0, parameter.grad.abs().max().item())
                assert (gradients[name] - parameter.grad).abs().max() <= bound
        optimizer.step()
    return unions


COUNTS = [[7, 3], [1000, 0], [0, 5], [8, 8], [13, 1, 0, 6]]


@pytest.mark.both_modes
@pytest.mark.quick_in_both_modes
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("sized", [False, True])
def test_own_data_of_unequal_length_train_as_one_process_on_their_union(
    counts: list[int], sized: bool, on_ranks: OnRanks
) -> None:
    size = 64 if 1000 in counts else 2 * len(counts)
    results = on_ranks(len(counts), went, counts, size, "all", 2, sized=sized)
    unions = assert_exact(results)
    steps = len(unions) // 2
    piece = size // len(counts)
    assert steps == -(-max(counts) // piece)
    for epoch in range(2):
        seen = Counter(number for union in unions[epoch * steps :][:steps] for number in union)
        assert seen == Counter(range(sum(counts)))
    for told in results:
        assert [is_last for _, _, _, is_last, _, _ in told.steps] == ([False] * (steps - 1) + [True]) * 2
        assert told.unused == [(0, True)] * 2


@pytest.mark.parametrize("sized", [False, True])
def test_until_first_ends_with_the_first_rank_and_counts_the_unused(sized: bool, on_ranks: OnRanks) -> None:
    results = on_ranks(2, went, [7, 3], 4, "first", 2, sized=sized)
    unions = assert_exact(results)
    assert [len(union) for union in unions] == [4, 3] * 2
    for told in results:
        assert told.unused == [(3, True)] * 2
    if sized:
        return
    for told in on_ranks(2, went, [1000, 3], 4, "first", 1):
        assert told.unused == [(6, False)]  # of the 996 it had read three pieces


@pytest.mark.slow
@pytest.mark.both_modes
@pytest.mark.quick_in_both_modes
@pytest.mark.parametrize("seed", range(6))
def test_streams_of_random_lengths_on_four_ranks(seed: int, on_ranks: OnRanks) -> None:
    draw = random.Random(seed)
    counts = [draw.choice([0, 1, draw.randrange(40)]) for _ in range(4)]
    counts[draw.randrange(4)] += 5
    size, drop_last = draw.randrange(4, 20), bool(seed % 2)
    piece = dl.split_sizes(size, 4)
    made = [count // one if drop_last else -(-count // one) for count, one in zip(counts, piece, strict=True)]
    left = [count % one if drop_last else 0 for count, one in zip(counts, piece, strict=True)]
    results = on_ranks(4, went, counts, size, "all", 2, drop_last=drop_last)
    unions = assert_exact(results)
    assert len(unions) == 2 * max(made)
    assert sum(map(len, unions)) == 2 * (sum(counts) - sum(left))
    assert results[0].unused == [(sum(left), True)] * 2


@pytest.mark.parametrize(("counts", "sized"), [([9, 3], False), ([9, 2], True)])
def test_synced_batch_norm_continues_where_a_rank_has_no_samples_left(
    counts: list[int], sized: bool, on_ranks: OnRanks
) -> None:
    assert_exact(on_ranks(2, went, counts, 6, "all", 2, layer=True, sized=sized), layer=True)


# -- one data set, cut into parts -------------------------------------------------------------------------------


def parts_of(shards: int | None, epochs: int, **options: Any) -> list[list[tuple[int, int, list[int]]]]:
    """For each epoch (position, shard, sample numbers) of this rank."""
    with dl.join_world(seed=5) as world:
        batches = dl.Batches(torch.arange(10), 3, world, shards=shards, partition="local", **options)
        return [
            [
                (loaded.mini_batch.position, shard.number, loaded.data(number).tolist())
                for loaded in batches.epoch(epoch + 1)
                for number, shard in enumerate(loaded.mini_batch.shards)
            ]
            for epoch in range(epochs)
        ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ten_samples_over_three_shards_are_parts_of_4_3_3_shuffled_inside(ranks: int, on_ranks: OnRanks) -> None:
    results = on_ranks(ranks, parts_of, 3, 3)
    orders = []
    for epoch in range(3):
        whole = sorted(one for result in results for one in result[epoch])
        order = [[number for _, shard, numbers in whole if shard == part for number in numbers] for part in range(3)]
        assert [sorted(part) for part in order] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
        assert [position for position, _, _ in whole] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
        orders.append(order)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders == parts_on_three_ranks(on_ranks)


def parts_on_three_ranks(on_ranks: OnRanks) -> list[list[list[int]]]:
    results = on_ranks(3, parts_of, None, 3)
    return [[[n for _, _, numbers in result[epoch] for n in numbers] for result in results] for epoch in range(3)]


def test_parts_in_order_until_the_first_and_without_small_pieces(on_ranks: OnRanks) -> None:
    def numbers(**options: Any) -> list[list[int]]:
        results = on_ranks(3, parts_of, None, 1, shuffle=False, **options)
        return [[n for _, _, part in result[0] for n in part] for result in results]

    assert numbers() == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert numbers(until="first") == [[0, 1, 2], [4, 5, 6], [7, 8, 9]]
    assert numbers(until="first", drop_last=True) == numbers(until="first")


class Numbered:
    """A map-style data set whose samples know their index."""

    def __len__(self) -> int:
        return 17

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, row_of(index) + torch.rand(())


def of_rows(model: nn.Module, data: Any) -> torch.Tensor:
    return model(data[1])  # type: ignore[no-any-return]


def trained(
    folder: str, shards: int | None, *, as_tensors: bool = True, stop_at: int = 0, until: str = "all", epochs: int = 3
) -> tuple[Tensors, list[Any]]:
    with dl.join_world(seed=2) as world:
        model = nn.Sequential(nn.BatchNorm1d(4, dtype=torch.float64), *network(), nn.Dropout(0.3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        data: Any = (torch.arange(17), rows_of(list(range(17)))) if as_tensors else Numbered()
        batches = dl.Batches(data, 9, world, shards=shards, partition="local", until=until)
        loop = dl.Loop(
            batches, epochs, state={"model": model, "optimizer": optimizer}, progress=False,
            run_dir=folder or None, allow_single_sample_shards=True, save_every=stop_at or None,
        )  # fmt: skip
        began = loop.iteration
        for step in loop:
            for _, rows in step:
                step.backward(model(rows).square().mean())
            step.fold()
            optimizer.step()
            if stop_at and step.iteration == stop_at + 1:
                break
        losses = dl.evaluate(model, batches, forward=of_rows, loss=lambda output, *_: output.square().mean(1))
        return values_of(model), [losses, began]


@pytest.mark.both_modes
@pytest.mark.quick_in_both_modes
@pytest.mark.parametrize("as_tensors", [True, False])
def test_with_fixed_shards_parts_give_the_same_bits_on_any_number_of_ranks(as_tensors: bool, on_ranks: OnRanks) -> None:
    expected, said = on_ranks(1, trained, "", 3, as_tensors=as_tensors)[0]
    for ranks in (2, 3, 4):
        results = on_ranks(ranks, trained, "", 3, as_tensors=as_tensors)
        assert is_same(same_on_all([tensors for tensors, _ in results]), expected)
        assert all(told == said for _, told in results)


def test_a_run_on_parts_resumes_inside_an_epoch_on_another_number_of_ranks(on_ranks: OnRanks, tmp_path: Path) -> None:
    expected, _ = on_ranks(2, trained, "", 3)[0]
    on_ranks(2, trained, str(tmp_path), 3, stop_at=3)
    results = on_ranks(3, trained, str(tmp_path), 3)
    assert is_same(same_on_all([tensors for tensors, _ in results]), expected)
    assert [began for _, (_, began) in results] == [3] * 3


# -- one pass: evaluation ------------------------------------------------------------------------------------------


def evaluated(counts: list[int], kind: str, size: int) -> tuple[dict[str, float], float, list[float], Gradients]:
    """The loss by `evaluate`, by a plain `for`, by predictions, and the statistics by `update_bn`."""
    with dl.join_world() as world:
        model = nn.Sequential(nn.BatchNorm1d(4, dtype=torch.float64), *network())
        data: Any = own_stream(world, counts)
        if kind == "own":
            data = torch.tensor(data.numbers, dtype=torch.int64), rows_of(data.numbers)
        elif kind == "local":
            data = torch.arange(sum(counts)), rows_of(list(range(sum(counts))))
        partition = "own" if kind == "own" else "local"
        batches = dl.Batches(data, size, world, partition=partition, shuffle=False)
        found = dl.evaluate(model, batches, forward=of_rows, loss=lambda output, rows: output.square().mean(1))
        own = [model.eval()(rows).detach().square().sum() for _, rows in batches]
        total = world.sum(torch.stack([torch.zeros((), dtype=torch.float64), *own]).sum()).item()
        predicted = [] if kind == "stream" else dl.predict(model, batches, forward=of_rows).flatten().tolist()
        dl.update_bn(model, batches, forward=of_rows)
        return found, total, predicted, model.state_dict()


@pytest.mark.parametrize(("counts", "kind"), [([8, 2], "stream"), ([8, 2], "own"), ([6, 5, 5], "local")])
def test_evaluation_reads_each_sample_once(counts: list[int], kind: str, on_ranks: OnRanks) -> None:
    number, size = sum(counts), 4 if len(counts) == 2 else 9
    results = on_ranks(len(counts), evaluated, counts, kind, size)
    rows = rows_of(list(range(number)))
    expected = nn.Sequential(nn.BatchNorm1d(4, dtype=torch.float64), *network()).eval()(rows)
    for found, total, predicted, state in results:
        assert found["samples"] == number
        assert found["loss"] == pytest.approx(expected.square().mean().item(), rel=1e-12)
        assert total == pytest.approx(expected.square().sum().item(), rel=1e-12)
        assert kind == "stream" or predicted == pytest.approx(expected.flatten().tolist(), rel=1e-12)
        piece = dl.split_sizes(size, len(counts))
        begin = [sum(counts[:rank]) for rank in range(len(counts))]
        if kind != "stream":  # its order is shuffled
            means = []
            for step in range(-(-max(counts) // piece[0])):
                pieces = [
                    range(start + min(step * one, count), start + min((step + 1) * one, count))
                    for start, one, count in zip(begin, piece, counts, strict=True)
                ]
                means.append(rows[[number for part in pieces for number in part]].mean(0))
            assert state["0.running_mean"].tolist() == pytest.approx(torch.stack(means).mean(0).tolist(), rel=1e-11)
        assert all(torch.equal(one, results[0][3][name]) for name, one in state.items())


# -- reports -------------------------------------------------------------------------------------------------------


def reported(folder: str, counts: list[int], until: str) -> Any:
    with dl.join_world() as world:
        model = network()
        batches = dl.Batches(own_stream(world, counts), 4, world, partition="local", until=until)
        assert batches.unused is None
        loop = dl.Loop(batches, 2, state={"model": model}, run_dir=folder)
        for step in loop:
            for _, rows in step:
                step.backward(model(rows).square().mean())
            step.fold()
        return str(batches.unused)


@pytest.mark.both_modes
@pytest.mark.parametrize(
    ("counts", "until", "key", "said"),
    [
        ([7, 3], "first", "unused_samples", "3 samples"),
        ([1000, 2], "first", "unused_samples_at_least", "at least 6 samples"),
        ([7, 3], "all", "unused_samples", "0 samples"),
    ],
)
def test_unused_samples_are_reported(
    counts: list[int], until: str, key: str, said: str, on_ranks: OnRanks, tmp_path: Path
) -> None:
    assert on_ranks(2, reported, str(tmp_path), counts, until) == [said] * 2
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["samples"] for row in rows][: len(rows) // 2] == [row["samples"] for row in rows][len(rows) // 2 :]
    last = [row for row in rows if key in row]
    assert [row["epoch"] for row in last] == [1, 2]
    assert {row[key] for row in last} == {float(said.removeprefix("at least ").split()[0])}


# -- bad input -----------------------------------------------------------------------------------------------------


def refused(world: dl.World, folder: str, culprit: int, options: dict[str, Any], others: dict[str, Any]) -> None:
    chosen = options if culprit in (ALL, world.rank) else others
    keywords = {"partition": "local", **chosen}
    epochs, counts = keywords.pop("epochs", 1), keywords.pop("counts", [6, 6])
    data: Any = own_stream(world, counts)
    if keywords.pop("sized", False):
        data = samples(counts[world.rank])
    batches = dl.Batches(data, keywords.pop("size", 4), world, **keywords)
    model = network()
    if keywords.pop("predicts", None):
        dl.predict(model, batches)
    for step in dl.Loop(batches, epochs, state={"model": model}, progress=False):
        for shard in step:
            rows = shard[1] if isinstance(shard, list | tuple) else shard
            step.backward(model(rows).square().mean())
        step.fold()


SIZED = {"sized": True}


@pytest.mark.parametrize(
    ("culprit", "options", "others", "said"),
    [
        (1, {"epochs": 2}, {}, r"must be the same on every rank\. Rank 0 has .*1.*, rank 1 has .*2"),
        (1, {"until": "first"}, {}, r"until.* must be the same on every rank\. .*'all'.*'first'"),
        (1, {"partition": "own"}, {}, r"partition.* must be the same on every rank\. .*'local'.*'own'"),
        (1, {**SIZED, "partition": "global"}, {**SIZED}, r"must be the same on every rank\. .*'local'.*'global'"),
        (0, {**SIZED, "partition": "own"}, {"partition": "own"}, r"kind.* must be the same on every rank"),
        (ALL, {"partition": "mine"}, {}, r"partition must be one of \('global', 'local', 'own'\)\. Got 'mine'"),
        (ALL, {"until": "last"}, {}, r"until must be one of"),
        (ALL, {"partition": "global", "until": "first"}, {}, r'until="first" is for data in parts'),
        (ALL, {"shards": 3}, {}, r"Got shards=3 on 2 ranks\. Remove shards="),
        (ALL, {**SIZED, "partition": "own", "shards": 4}, {}, r"Got shards=4 on 2 ranks\. Remove shards="),
        (ALL, {"size": 1}, {}, r"Got batch_size=1 for 2 parts"),
        (ALL, {**SIZED, "size": 3, "shards": 4}, {}, r"Got batch_size=3 for 4 parts"),
        (ALL, {"counts": [0, 0]}, {}, r"None of them does"),
        (ALL, {"counts": [5, 0], "until": "first"}, {}, r'That of rank 1 does not.*until="all"'),
        (ALL, {**SIZED, "counts": [6, 5]}, {}, r"the length is 6 samples on rank 0, but 5 samples on rank 1"),
        (ALL, {**SIZED, "partition": "own", "counts": [0, 0]}, {}, r"at least one sample"),
        (ALL, {**SIZED, "partition": "own", "counts": [5, 0], "until": "first"}, {}, r"Parts of \[5, 0\] samples"),
    ],
)
def test_ranks_that_disagree_and_parts_that_give_nothing_are_refused(
    culprit: int, options: dict[str, Any], others: dict[str, Any], said: str, on_ranks: OnRanks, tmp_path: Path
) -> None:
    Refused(on_ranks, tmp_path)(2, refused, culprit, options, others, kind="ValueError", said=said, by=ALL)


def evaluated_until_first(world: dl.World, folder: str, predicts: bool) -> None:
    data: Any = samples(6) if predicts else own_stream(world, [6, 6])
    batches = dl.Batches(data, 4, world, partition="local", until="first", shuffle=False)
    if predicts:
        dl.predict(network(), batches)
    dl.evaluate(network(), batches, loss=lambda output, *rest: output.mean())


@pytest.mark.parametrize("predicts", [False, True])
def test_an_evaluation_of_some_of_the_samples_is_refused(predicts: bool, on_ranks: OnRanks, tmp_path: Path) -> None:
    said = 'until="all"'
    Refused(on_ranks, tmp_path)(2, evaluated_until_first, predicts, kind="ValueError", said=said)


def test_a_run_on_other_parts_is_another_run(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(2, trained, str(tmp_path), None, stop_at=1)
    refuse = Refused(on_ranks, tmp_path / "none")
    refuse(3, resumed, str(tmp_path), kind="ValueError", said=r"parts: was 2, is 3")


def resumed(world: dl.World, folder: str, run: str) -> None:
    data = torch.arange(17), rows_of(list(range(17)))
    batches = dl.Batches(data, 9, world, partition="local")
    dl.Loop(batches, 3, state={"model": network()}, run_dir=run, progress=False)


# -- own data in all that a loop can do ------------------------------------------------------------------------------


class OwnRows:
    """A rank's own data set: a row and an augmentation drawn while it is read."""

    def __init__(self, begin: int, count: int) -> None:
        self.begin, self.count = begin, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, float]:
        return self.begin + index, torch.rand(()).item()


def drawn(counts: list[int], as_stream: bool, workers: int) -> list[tuple[int, float, float]]:
    with dl.join_world() as world:
        begin = sum(counts[: world.rank])
        data: Any = Drawing(begin, counts[world.rank]) if as_stream else OwnRows(begin, counts[world.rank])
        more: dict[str, Any] = {} if as_stream else {"num_workers": workers}

        def noisy(data: Any, draws: dl.Draws) -> Any:
            return *data, draws.uniform()

        batches = dl.Batches(data, 4, world, partition="own", transform=noisy, shuffle=False, **more)
        found = [tensor.tolist() for numbers, one, other in batches for tensor in torch.stack([numbers, one, other], 1)]
        return [(int(number), one, other) for number, one, other in found]


class Drawing:
    def __init__(self, begin: int, count: int) -> None:
        self.rows = OwnRows(begin, count)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return (self.rows[index] for index in range(len(self.rows)))


@pytest.mark.parametrize(("as_stream", "workers"), [(False, 0), (False, 1), (True, 0)])
def test_random_numbers_differ_between_ranks_own_samples(as_stream: bool, workers: int, on_ranks: OnRanks) -> None:
    results = [one for result in on_ranks(2, drawn, [5, 3], as_stream, workers) for one in result]
    assert [number for number, _, _ in results] == list(range(8))
    assert len({one for _, one, _ in results}) == len({other for _, _, other in results}) == 8


def gathered(counts: list[int]) -> list[tuple[list[float], Gradients]]:
    with dl.join_world() as world:
        model = network()
        batches = dl.Batches(own_stream(world, counts), 4, world, partition="local")
        found = []
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
            for _, rows in step:
                step.hold(model(rows), rows)
            outputs, rows = step.gather()
            step.backward((outputs - outputs.mean()).square().sum())
            step.fold()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            found.append((rows.sum(1).tolist(), gradients))
        return found


@pytest.mark.both_modes
def test_a_loss_of_the_whole_mini_batch_over_own_streams(on_ranks: OnRanks) -> None:
    results = on_ranks(2, gathered, [7, 3])
    assert [len(sums) for sums, _ in results[0]] == [4, 3, 2, 1]
    sums = {round(row_of(number).sum().item(), 12): number for number in range(10)}
    for step, (found, gradients) in enumerate(results[0]):
        assert found == results[1][step][0]
        model, rows = network(), rows_of([sums[round(one, 12)] for one in found])
        outputs = model(rows)
        (outputs - outputs.mean()).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)


def in_two_passes(counts: list[int], until: str) -> list[tuple[int, bool]]:
    with dl.join_world() as world:
        model = network()
        batches = dl.Batches(own_stream(world, counts), 4, world, partition="local", until=until)
        told = []
        for step in dl.Loop(batches, 2, state={"model": model}, progress=False):
            for _ in range(2):
                for _, rows in step:
                    step.backward(model(rows).square().mean())
                step.fold()
            told.append((step.samples, step.is_last_of_epoch))
        return told


@pytest.mark.both_modes
@pytest.mark.parametrize("until", ["all", "first"])
def test_several_passes_over_own_streams(until: str, on_ranks: OnRanks) -> None:
    expected = [(4, False), (3, False), (2, False), (1, True)] if until == "all" else [(4, False), (3, True)]
    assert on_ranks(2, in_two_passes, [7, 3], until) == [expected * 2] * 2


class Broken(Own):
    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        yield from list(super().__iter__())[:3]
        raise OSError("the disk is gone")


def over_a_broken_stream(world: dl.World, folder: str, size: int) -> None:
    data = (Broken if world.rank == 1 else Own)(10 * world.rank, 10)
    model = network()
    batches = dl.Batches(data, size, world, partition="local")
    for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
        for _, rows in step:
            step.backward(model(rows).square().mean())
        step.fold()


@pytest.mark.parametrize("size", [2, 6])  # the error comes in the first read, or while one reads ahead
def test_an_error_of_one_own_stream_ends_all_ranks(size: int, on_ranks: OnRanks, tmp_path: Path) -> None:
    Refused(on_ranks, tmp_path)(2, over_a_broken_stream, size, kind="OSError", said="the disk is gone", by=1)


def over_own_streams(folder: str, until: str, stop_at: int) -> tuple[Tensors, list[Any], str]:
    with dl.join_world(seed=4) as world:
        model = nn.Sequential(*network(), nn.Dropout(0.2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        batches = dl.Batches(own_stream(world, [7, 3]), 4, world, partition="local", until=until)
        state = {"model": model, "optimizer": optimizer}
        told = []
        save = stop_at or None
        loop = dl.Loop(batches, 2, state=state, progress=False, run_dir=folder or None, save_every=save)
        for step in loop:
            for _, rows in step:
                step.backward(model(rows).square().mean())
            step.fold()
            optimizer.step()
            told.append((step.iteration, step.samples, step.is_last_of_epoch))
            if stop_at and step.iteration == stop_at + 1:
                break
        return values_of(model), told, str(batches.unused)


@pytest.mark.both_modes
@pytest.mark.quick_in_both_modes
@pytest.mark.parametrize(("until", "stop_at"), [("all", 2), ("all", 3), ("all", 4), ("first", 1), ("first", 2)])
def test_own_streams_resume_inside_and_after_an_epoch(
    until: str, stop_at: int, on_ranks: OnRanks, tmp_path: Path
) -> None:
    expected, told, unused = on_ranks(2, over_own_streams, "", until, 0)[0]
    on_ranks(2, over_own_streams, str(tmp_path), until, stop_at)
    results = on_ranks(2, over_own_streams, str(tmp_path), until, 0)
    for tensors, found, left in results:
        assert is_same(tensors, expected)
        assert found == told[stop_at:]
        assert left == unused


def documented(code: str) -> tuple[int, str]:
    with dl.join_world() as world:
        names: dict[str, Any] = {"dl": dl, "torch": torch, "world": world}
        exec(code, names)
        return len(names["batches"]), str(names["batches"].unused)


def test_the_example_of_the_document_is_true(on_ranks: OnRanks) -> None:
    blocks = fenced_blocks((DOCS / "migrate.md").read_text(), "python")
    (code,) = (block for block in blocks if 'partition="own"' in block)
    steps, unused = on_ranks(2, documented, code)[0]
    assert f"# {steps} mini-batches; {unused} are not used" in code
