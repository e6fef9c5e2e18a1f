"""The benchmarks of steps, exchanges and the cost of the same bits measure what they say."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import __main__ as command
from benchmarks import exchange, order, steps, versions
from benchmarks.measuring import LEAST_PAIRS, Ratio, compare, exchanges, joined
from ddp_loop import launch
from tests.support.harness import OnRanks, until
from tests.support.paths import DOCS

WAYS = ("ours", "DDP", "DDP again", "tuned DDP with a static graph", "tuned DDP", "no communication")


def tiny_network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 10))


# -- what all share ----------------------------------------------------------------------------------------


def sums(name: str | None) -> tuple[list[float], str]:
    """A sum of our world and one on the default group, and that group's backend."""
    with joined(name) as world:
        plain = torch.ones(3)
        dist.all_reduce(plain)
        return [*world.sum(torch.ones(1)).tolist(), *plain.tolist()], dist.get_backend()


@pytest.mark.parametrize("name", [None, *exchanges()])
def test_the_default_group_is_gloo_with_every_exchange(on_ranks: OnRanks, name: str | None) -> None:
    assert on_ranks(2, sums, name) == [([2.0, 2.0, 2.0, 2.0], "gloo")] * 2


@pytest.mark.parametrize(
    ("within_s", "steps", "pairs"), [(None, 5, 40), (60.0, 5, 40), (0.0, 1, LEAST_PAIRS)], ids=["free", "long", "short"]
)
def test_a_limit_in_time_makes_blocks_shorter_and_pairs_fewer(within_s: float | None, steps: int, pairs: int) -> None:
    calls: list[int] = []
    ratio = compare(lambda: calls.append(1), lambda: calls.append(2), pairs=40, steps=5, within_s=within_s)
    assert ratio.pairs == pairs
    warm_up = 2 * ([1] * 5 + [2] * 5)
    turns = ([1] * steps + [2] * steps + [2] * steps + [1] * steps) * (pairs // 2)
    assert calls == warm_up + turns


# -- steps -------------------------------------------------------------------------------------------------


def measure_tiny_steps() -> tuple[dict[str, Ratio], list[list[float]]]:
    """The ratios, and the last bias of each way's network when all is measured."""
    built: list[nn.Module] = []

    def build() -> nn.Module:
        built.append(tiny_network())
        return built[-1]

    steps.JOBS["tiny"] = steps.Job(build, (1, 4, 4), 4, 1, 0.5)
    try:
        ratios = steps.measure("tiny")
    finally:
        del steps.JOBS["tiny"]
    return ratios, [list(model.parameters())[-1].tolist() for model in built]


def test_steps_of_all_ways_train_and_all_but_one_communicate(on_ranks: OnRanks) -> None:
    (ratios, of_rank_0), (_, of_rank_1) = on_ranks(2, measure_tiny_steps)
    assert {"ours / tuned DDP", "ours / DDP", "DDP / DDP", "ours / no communication"} < ratios.keys()
    assert all(min(ratio.median, ratio.one_ms, ratio.other_ms) > 0 for ratio in ratios.values())
    torch.manual_seed(0)
    untrained = list(tiny_network().parameters())[-1].tolist()
    assert untrained not in of_rank_0
    same = {way: one == other for way, one, other in zip(WAYS, of_rank_0, of_rank_1, strict=True)}
    assert same == {way: way != "no communication" for way in WAYS}


def test_a_step_of_one_rank_is_compared_with_the_plain_loop(on_ranks: OnRanks) -> None:
    ((ratios, biases),) = on_ranks(1, measure_tiny_steps)
    assert ratios.keys() == {"ours / plain loop", "plain loop / plain loop"}
    torch.manual_seed(0)
    assert len(biases) == 3
    assert list(tiny_network().parameters())[-1].tolist() not in biases  # all have trained


def samples_taken(mini_batch: int) -> list[int]:
    with joined() as world:
        (numbers,) = steps.mine(world, (torch.arange(steps.SAMPLES),), mini_batch)()
        return numbers.tolist()


def test_the_ranks_of_ddp_share_a_mini_batch_that_they_do_not_divide(on_ranks: OnRanks) -> None:
    parts = on_ranks(3, samples_taken, 128)
    assert [len(part) for part in parts] == [43, 43, 42]
    assert len({number for part in parts for number in part}) == 128


def tensors(model: nn.Module) -> int:
    return len(list(model.parameters()))


def millions(model: nn.Module) -> int:
    return round(sum(parameter.numel() for parameter in model.parameters()) / 1e6)


def norms_of_256(model: nn.Module) -> int:
    return sum(isinstance(layer, nn.BatchNorm1d) and layer.num_features == 256 for layer in model.modules())


def encoder_layers(model: nn.Module) -> int:
    return sum(isinstance(layer, nn.TransformerEncoderLayer) for layer in model.modules())


@pytest.mark.parametrize(
    ("name", "count", "number"),
    [
        ("1,000 tensors", tensors, 1000),
        ("25 M parameters", millions, 25),
        ("30 batch norms of 256", norms_of_256, 30),
        ("6-layer transformer", encoder_layers, 6),
    ],
)
def test_networks_are_what_they_are_called(name: str, count: Callable[[nn.Module], int], number: int) -> None:
    with torch.device("meta"):
        assert count(steps.JOBS[name].build()) == number


@pytest.mark.parametrize("name", steps.JOBS)
@pytest.mark.slow
def test_networks_give_logits_of_ten_classes(name: str) -> None:
    job = steps.JOBS[name]
    with torch.device("meta"):
        assert job.build()(torch.empty(2, *job.shape)).shape == (2, 10)


# -- exchanges ---------------------------------------------------------------------------------------------


def measure_tiny_sums(name: str) -> dict[str, Ratio]:
    usual = dict(exchange.SIZES)
    exchange.SIZES.clear()
    exchange.SIZES["tiny"] = exchange.Size(51, 4, 2)
    try:
        return exchange.measure_sums(name)
    finally:
        exchange.SIZES.clear()
        exchange.SIZES.update(usual)


@pytest.mark.parametrize("name", exchanges())
def test_sums_of_every_exchange_are_measured(on_ranks: OnRanks, name: str) -> None:
    (ratio,) = on_ranks(2, measure_tiny_sums, name)[0].values()
    assert min(ratio.median, ratio.one_ms, ratio.other_ms) > 0
    assert ratio.pairs == 4


MIB = 2**18  # values of float32
LARGE = 256  # MiB, several times what a process of tests may take or give back meanwhile


def filled(mib: int) -> torch.Tensor:
    """A tensor in pages of its own; torch's would lie in pages that earlier tests used, and add less."""
    pages = mmap.mmap(-1, mib * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.float32).fill_(1.0)


@pytest.mark.slow
def test_the_peak_of_memory_is_that_inside_the_block() -> None:
    gc.collect()  # what earlier tests left would be collected after `before` is read
    before = exchange.pss_mib()
    with exchange.PeakMemory() as peak:
        tensor = filled(LARGE)
        until(lambda: peak.mib > before + 3 / 4 * LARGE, "the thread has seen the tensor")
        del tensor
    assert exchange.pss_mib() < before + LARGE / 4
    assert peak.mib < before + 5 / 4 * LARGE


def measure_tiny_memory(name: str | None) -> tuple[float, float, float]:
    job = steps.Job(lambda: nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 295_000)), (32,), 1, 1, 1.0, mini_batch=4)
    exchange.NETWORKS["tiny"] = job
    try:
        return exchange.measure_memory("tiny", name)
    finally:
        del exchange.NETWORKS["tiny"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, *exchanges()])
def test_the_memory_of_a_step_has_parameters_gradients_and_momentum(name: str | None) -> None:
    for before, after, peak in launch(measure_tiny_memory, 2, name):  # new processes: freed memory is used again
        assert before + 2.5 * 36 < after < peak + 8  # each of the three has 36 MiB


# -- the cost of the same bits -----------------------------------------------------------------------------


def measure_order() -> dict[str, Ratio]:
    order.JOBS["tiny"] = order.Job(tiny_network, (1, 4, 4), 4, 1)
    try:
        return {**order.fold("tiny", 2), **order.accumulate("tiny"), **order.deterministic("tiny"),
                **order.synced("tiny", 2)}  # fmt: skip
    finally:
        del order.JOBS["tiny"]


@pytest.mark.covers("H5")
def test_every_cost_is_measured_and_in_the_table(on_ranks: OnRanks) -> None:
    table = (DOCS / "benchmarks" / "order.md").read_text()
    for what, ratio in on_ranks(2, measure_order)[0].items():
        assert min(ratio.median, ratio.one_ms, ratio.other_ms) > 0  # quartiles of two pairs mean nothing
        assert f" | {what} | " in table


def measure_tiny_further() -> tuple[dict[str, Ratio], list[list[float]]]:
    """The ratios, and the last bias of each network when all is measured."""
    built: list[nn.Module] = []

    def build() -> nn.Module:
        built.append(tiny_network())
        return built[-1]

    order.JOBS["tiny"] = order.Job(build, (1, 4, 4), 8, 1)
    try:
        ratios = order.further("tiny", 8)
    finally:
        del order.JOBS["tiny"]
    return ratios, [list(model.parameters())[-1].tolist() for model in built]


def test_further_shards_are_compared_with_an_accumulation_that_does_not_communicate(on_ranks: OnRanks) -> None:
    (ratios, of_rank_0), (_, of_rank_1) = on_ranks(2, measure_tiny_further)
    assert [what.partition(",")[0] for what in ratios] == ["8 shards on 2 ranks / plain accumulation", "4 pieces"]
    assert [one == other for one, other in zip(of_rank_0, of_rank_1, strict=True)] == [True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "starts"), [(1, 2), (2, 1)])
def test_two_checkouts_are_timed_in_turn(ranks: int, starts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "STARTS", starts)
    ratio = versions.compare(versions.HERE, versions.HERE, "32-wide MLP", 4, 1, ranks, "gloo")
    assert ratio.pairs == 4
    assert min(ratio.median, ratio.one_ms, ratio.other_ms) > 0


# -- the command -------------------------------------------------------------------------------------------


def test_a_topic_gets_its_parts_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[object, ...]] = []
    topic = command.Topic(lambda *given, **options: calls.append((*given, options)), ("one", "two"), ("ranks",))
    monkeypatch.setitem(command.TOPICS, "steps", topic)
    monkeypatch.setattr("sys.argv", ["benchmarks", "steps", "--ranks", "4", "two", "one"])
    command.main()
    assert calls == [(["two", "one"], {"ranks": 4})]
    assert "Command: `python -m benchmarks steps --ranks 4 two one`" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "error"),
    [(["steps", "none"], "the parts of steps are 32-wide MLP; "), (["calls", "--ranks", "3"], "calls does not take")],
)
def test_unknown_parts_and_options_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], error: str
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", *words])
    with pytest.raises(SystemExit):
        command.main()
    assert error in capsys.readouterr().err
