"""The same bits on any number of ranks: the tree over fixed shards, and streams that follow them.

All that a script keeps has them. It draws wherever one can: in its transform, in dropout and in its losses. It has two
networks, each with its optimizer and its pass, a scaler, a schedule, and a moving average.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from tests.support.both_exchanges import GLOO, MEMORY, exchange_of
from tests.support.harness import OnRanks
from tests.support.runs import digests

pytestmark = pytest.mark.on_gpus_too

CLASSES = 5
Left = dict[str, dict[str, Any]]  # the state of all that a script keeps


class Network(nn.Module):
    """Convolution, batch norm, attention, a recurrent layer, and dropout: (n, 4, t) to (n, t, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Sequential(nn.Conv1d(4, 16, 3, padding=1), nn.BatchNorm1d(16))
        self.attention = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.recurrent = nn.LSTM(16, 16, num_layers=2, dropout=0.2, batch_first=True)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        values = self.into(sequences).transpose(1, 2)
        return self.last(self.recurrent(self.attention(values))[0])  # type: ignore[no-any-return]


class Script:
    """What it keeps, and its step."""

    def __init__(self, world: dl.World, *, shared_stream: bool) -> None:
        self.shared_stream = shared_stream
        self.world = world
        self.model = Network()
        self.average = copy.deepcopy(self.model)
        self.judge = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
        self.one = torch.optim.AdamW(self.model.parameters(), lr=0.003)
        self.other = torch.optim.RMSprop(self.judge.parameters(), lr=0.003)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.one, 0.05, total_steps=50)
        # So large a scale that it must be halved.
        self.scaler = torch.amp.GradScaler(world.device.type, init_scale=2.0**20, growth_interval=5)

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if hasattr(value, "state_dict")}

    def draw(self, step: dl.Step) -> None:
        if self.shared_stream:  # which does not follow the shards
            torch.manual_seed(step.iteration)
            torch.rand(self.world.rank)

    def make(self, step: dl.Step) -> None:
        for sequences, labels in step:
            self.draw(step)
            logits = self.model(sequences + 0.1 * torch.randn_like(sequences))
            targets = torch.where(sequences[:, 0] < 0.5, labels.unsqueeze(1), -100)
            targets = torch.where(labels.unsqueeze(1) == 0, -100, targets)  # some shards have no token
            step.backward(cross_entropy(logits.flatten(0, 1), targets.flatten()), weight=(targets != -100).sum())
        step.fold()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.one.step()
        self.schedule.step()
        with torch.no_grad():
            for slow, fast in zip(self.average.parameters(), self.model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        for sequences, _ in step:
            self.draw(step)
            with torch.autocast(self.world.device.type, dtype=torch.float16):
                real = self.judge(sequences.mean(2)).float()
                drawn = self.judge(torch.randn(len(sequences), 4)).float()
            step.backward(self.scaler.scale((drawn - real).mean() + real.square().mean()))
        step.fold()
        self.scaler.unscale_(self.other)
        nn.utils.clip_grad_norm_(self.judge.parameters(), 0.5)
        self.scaler.step(self.other)
        self.scaler.update()


def shift(data: Any, draws: dl.Draws) -> Any:
    """Sequences shifted by up to two places, with a little noise."""
    sequences, labels = data
    places = draws.integers(-2, 3)
    shifted = torch.stack([one.roll(int(by), -1) for one, by in zip(sequences, places, strict=True)])
    return shifted + 0.05 * draws.normal(*sequences.shape[1:]), labels


def train(
    shards: int, until: int, left: Left | None = None, shares: tuple[int, ...] | None = None,
    *, is_fixed: bool = True, shared_stream: bool = False, **options: Any,
) -> tuple[dict[str, str], Left]:  # fmt: skip
    """Train until a step, from what was left before; digests, and what is left. An epoch has seven steps."""
    with dl.join_world(seed=3) as world:
        script = Script(world, shared_stream=shared_stream)
        samples = 6 * 2 * shards + shards // 2 + 1  # so that of the last one some shards are empty
        sequences = torch.rand(samples, 4, 7, generator=torch.Generator().manual_seed(11))
        data = (sequences, torch.arange(samples) % CLASSES)
        batches = dl.Batches(
            data, 2 * shards, world, shards=shards if is_fixed else None, shares=shares, transform=shift
        )
        options = {"bucket_cap_mib": 0.02, "allow_single_sample_shards": True, "progress": False, **options}
        loop = dl.Loop(batches, steps=until, state=script.state(), **options)
        kept = {**script.state(), "loop": loop}
        for name, state in (left or {}).items():
            kept[name].load_state_dict(state)
        for step in loop:
            script.make(step)
        return digests(kept), {name: one.state_dict() for name, one in kept.items()}


def bits_of(results: list[tuple[dict[str, str], Left]]) -> dict[str, str]:
    """The digests, which all ranks have alike."""
    first = results[0][0]
    for found, _ in results:
        assert [name for name in first if found[name] != first[name]] == []
    return first


@pytest.mark.covers("H7", "C5")
@pytest.mark.slow
def test_the_bits_are_the_same_when_ranks_and_shares_and_their_exchange_change_in_mid_run(on_ranks: OnRanks) -> None:
    undisturbed = bits_of(on_ranks(1, train, 8, 20))
    left = None
    for ranks, to, exchange, shares in (  # in mid-epoch, and at an epoch's end
        (2, 5, MEMORY, None),
        (3, 7, GLOO, (3, 0, 1)),
        (2, 10, MEMORY, (1, 3)),
        (2, 12, GLOO, None),
        (1, 20, MEMORY, None),
    ):
        with exchange_of(exchange):
            results = on_ranks(ranks, train, 8, to, left, shares)
        left = results[0][1]
        assert left["loop"] == {"iteration": to, "epoch": to // 7, "position": to % 7}
    assert bits_of(results) == undisturbed
    assert left is not None
    assert left["scaler"]["scale"] < 2.0**20


@pytest.mark.parametrize("change", [{"ordered": False}, {"shared_stream": True}])
@pytest.mark.quick_on_gpus
def test_a_plain_sum_or_a_stream_that_does_not_follow_the_shards_gives_other_bits(
    change: dict[str, bool], on_ranks: OnRanks
) -> None:
    # Else the other tests would prove nothing.
    with exchange_of(GLOO):
        one, three = (on_ranks(ranks, train, 8, 5, **change)[0][0] for ranks in (1, 3))
    assert one != three


@pytest.mark.covers("H7")
@pytest.mark.one_device("cpu", "GPUs add up over NCCL, whose order is its own")
@pytest.mark.parametrize("ranks", [3, 4])
def test_in_memory_a_sum_has_the_trees_order_also_with_a_shard_per_rank(ranks: int, on_ranks: OnRanks) -> None:
    fixed = bits_of(on_ranks(1, train, ranks, 5))
    with exchange_of(MEMORY):
        assert bits_of(on_ranks(ranks, train, ranks, 5, is_fixed=False)) == fixed


@pytest.mark.covers("H7", "B10")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shards", "numbers", "bucket_cap_mib"), [(8, (1, 2, 3, 4, 6, 8), 8.0), (12, (1, 3, 5), 0.02), (6, (1, 7), 1e-4)]
)
@pytest.mark.both_exchanges
def test_the_bits_are_the_same_on_any_number_of_ranks(
    shards: int, numbers: tuple[int, ...], bucket_cap_mib: float, on_ranks: OnRanks
) -> None:
    first, *others = [bits_of(on_ranks(ranks, train, shards, 10, bucket_cap_mib=bucket_cap_mib)) for ranks in numbers]
    assert [found == first for found in others] == [True] * len(others)
