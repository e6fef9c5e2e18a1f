"""The same bits on any number of ranks: a fixed number of shards, the tree over them, streams that follow them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import Optimizer

import ddp_loop as dl
from ddp_loop import networks
from tests.support.both_exchanges import GLOO, MEMORY, exchange_of
from tests.support.harness import OnRanks

pytestmark = pytest.mark.on_gpus_too

STEPS = 50
CLASSES = 5
Data = tuple[torch.Tensor, ...]


def digest(model: nn.Module, optimizer: Optimizer) -> str:
    """SHA-256 of all parameters, buffers and what the optimizer keeps."""
    sha = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sha.update(name.encode() + tensor.contiguous().cpu().numpy().tobytes())
    for number, kept in optimizer.state_dict()["state"].items():
        for name, value in sorted(kept.items()):
            bits = (
                value.contiguous().cpu().numpy().tobytes() if isinstance(value, torch.Tensor) else str(value).encode()
            )
            sha.update(f"{number} {name}".encode() + bits)
    return sha.hexdigest()


# -- four jobs ---------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """Four layers with dropout over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=True))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An LSTM over sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 16, num_layers=2, dropout=0.2, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(sequences)[0][:, -1])  # type: ignore[no-any-return]


def shift(data: Any, draws: dl.Draws) -> Any:
    """Images shifted by up to two pixels, with a little noise."""
    images, labels = data
    steps = draws.integers(-2, 3)
    shifted = torch.stack([image.roll(int(by), -1) for image, by in zip(images, steps, strict=True)])
    return shifted + 0.05 * draws.normal(*images.shape[1:]), labels


def random_data(*shape: int, samples: int) -> Data:
    generator = torch.Generator().manual_seed(11)
    return (
        torch.rand(samples, *shape, generator=generator),
        torch.randint(CLASSES, (samples,), generator=generator),
    )


@dataclass(frozen=True)
class Job:
    """What is trained: a network, its optimizer, and the loss of a shard with its weight."""

    build: Callable[[], nn.Module]
    optimizer: Callable[[list[nn.Parameter]], Optimizer]
    data: Callable[[int], Data]
    loss: Callable[[nn.Module, Data], tuple[torch.Tensor, torch.Tensor | None]]
    transform: Callable[[Any, dl.Draws], Any] | None = None


def digit_network() -> nn.Module:
    return nn.Sequential(
        nn.AvgPool2d(2),
        networks.digit_classifier(CLASSES)[:9],
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(20 * 10 * 10, CLASSES),
    )


def classify(model: nn.Module, data: Data) -> tuple[torch.Tensor, None]:
    return cross_entropy(model(data[0]), data[1]), None


def denoise(model: nn.Module, data: Data) -> tuple[torch.Tensor, None]:
    clean = data[0][:, :, ::2, ::2]
    return mse_loss(model(clean + 0.1 * torch.randn_like(clean)), clean), None


def next_token(model: nn.Module, data: Data) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean over the tokens that are not masked; some shards have none."""
    tokens = (data[0] * CLASSES).long()
    targets = torch.where(data[0][:, 1:] < 0.5, tokens[:, 1:], -100)
    targets = torch.where((data[1] == 0).unsqueeze(1), -100, targets)
    count = (targets != -100).sum()
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets.flatten()), count


JOBS = {
    "digit network": Job(
        digit_network,
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        lambda samples: random_data(1, 28, 28, samples=samples),
        classify,
        shift,
    ),
    "autoencoder": Job(
        networks.denoising_autoencoder,
        lambda parameters: torch.optim.Adam(parameters, lr=0.001),
        lambda samples: random_data(1, 64, 64, samples=samples),
        denoise,
    ),
    "transformer": Job(
        Transformer,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.003),
        lambda samples: random_data(9, samples=samples),
        next_token,
    ),
    "LSTM": Job(
        Recurrent,
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.003),
        lambda samples: random_data(7, 4, samples=samples),
        classify,
    ),
}


def train(
    name: str,
    shards: int,
    steps: int = STEPS,
    *,
    bucket_cap_mib: float = 0.02,
    ordered: bool | None = None,
    is_fixed: bool = True,
    shared_stream: bool = False,
) -> str:
    """Train a job; the digest of what is left. An epoch has seven mini-batches, the last with fewer samples."""
    with dl.join_world(seed=3) as world:
        options: dict[str, Any] = {"bucket_cap_mib": bucket_cap_mib, "ordered": ordered, "is_fixed": is_fixed}
        model, optimizer, loop = begin(name, shards, steps, world, **options)
        for step in loop:
            make(step, JOBS[name], model, optimizer, shared_stream)
        return digest(model, optimizer)


def begin(
    name: str,
    shards: int,
    steps: int,
    world: dl.World,
    *,
    bucket_cap_mib: float = 0.02,
    ordered: bool | None = None,
    is_fixed: bool = True,
) -> tuple[nn.Module, Optimizer, dl.Loop]:
    job = JOBS[name]
    model = job.build()
    optimizer = job.optimizer(list(model.parameters()))
    samples = 6 * 2 * shards + shards // 2 + 1  # so that of the last one some shards are empty
    batches = dl.Batches(
        job.data(samples), 2 * shards, world, shards=shards if is_fixed else None, transform=job.transform
    )
    state = {"model": model, "optimizer": optimizer}
    loop = dl.Loop(batches, steps=steps, state=state, progress=False, bucket_cap_mib=bucket_cap_mib, ordered=ordered,
                   allow_single_sample_shards=True)  # fmt: skip
    return model, optimizer, loop


def make(step: dl.Step, job: Job, model: nn.Module, optimizer: Optimizer, shared_stream: bool = False) -> None:
    for data in step:
        if shared_stream:
            torch.manual_seed(step.iteration)
            torch.rand(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
        loss, weight = job.loss(model, data)
        step.backward(loss, weight=weight)
    step.fold()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def train_part(
    name: str, shards: int, to: int, state: tuple[Any, Any, dict[str, int]] | None
) -> tuple[str, tuple[Any, Any, dict[str, int]]]:
    """Go on from a state in memory until step `to`; the digest, and the state there."""
    with dl.join_world(seed=3) as world:
        model, optimizer, loop = begin(name, shards, to, world)
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
            loop.load_state_dict(state[2])
        for step in loop:
            make(step, JOBS[name], model, optimizer)
        return digest(model, optimizer), (model.state_dict(), optimizer.state_dict(), loop.state_dict())


@pytest.mark.covers("H7")
@pytest.mark.parametrize("name", ["digit network", "transformer"])
@pytest.mark.slow
def test_the_bits_are_the_same_when_the_ranks_and_their_exchange_change_in_mid_run(
    name: str, on_ranks: OnRanks
) -> None:
    undisturbed, _ = on_ranks(1, train_part, name, 8, 20, None)[0]
    state, changed = None, ""
    parts = ((2, 5, MEMORY), (3, 7, GLOO), (2, 10, MEMORY), (2, 12, GLOO), (1, 20, MEMORY))
    for ranks, to, exchange in parts:  # in mid-epoch, and at an epoch's end
        with exchange_of(exchange):
            (changed, state), *others = on_ranks(ranks, train_part, name, 8, to, state)
        assert {one for one, _ in others} <= {changed}
        assert state is not None
        assert state[2] == {"iteration": to, "epoch": to // 7, "position": to % 7}
    assert changed == undisturbed


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.quick_on_gpus
def test_a_plain_sum_gives_other_bits_on_three_ranks(name: str, on_ranks: OnRanks) -> None:
    # Else the test above would prove nothing: it is the order that makes the bits the same.
    with exchange_of(GLOO):
        one, three = (on_ranks(ranks, train, name, 8, 10, ordered=False)[0] for ranks in (1, 3))
    assert one != three


@pytest.mark.covers("H7")
@pytest.mark.one_device("cpu", "GPUs add up over NCCL, whose order is its own")
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", ["digit network", "transformer"])
def test_in_memory_a_sum_has_the_trees_order_also_with_a_shard_per_rank(
    name: str, ranks: int, on_ranks: OnRanks
) -> None:
    fixed = on_ranks(1, train, name, ranks, 5)[0]
    with exchange_of(MEMORY):
        assert set(on_ranks(ranks, train, name, ranks, 5, is_fixed=False)) == {fixed}
    if ranks == 3:  # else this would prove nothing
        with exchange_of(GLOO):
            assert fixed not in on_ranks(ranks, train, name, ranks, 5, is_fixed=False)


@pytest.mark.parametrize("name", JOBS)
def test_a_random_stream_that_does_not_follow_the_shards_gives_other_bits(name: str, on_ranks: OnRanks) -> None:
    one, three = (on_ranks(ranks, train, name, 8, 10, shared_stream=True)[0] for ranks in (1, 3))
    assert one != three


def evaluate_fixed_shards() -> float:
    with dl.join_world(seed=3) as world:
        model = nn.Linear(7, 1).double()  # float32's values would be added up in float64 without rounding
        data = random_data(7, samples=301)[0].double()
        batches = dl.Batches(data, 20, world, shuffle=False, shards=6)
        return dl.evaluate(model, batches, loss=lambda output, _: (9 * output.squeeze(1)).exp())["loss"]


@pytest.mark.covers("H7")
@pytest.mark.slow
@pytest.mark.both_exchanges
def test_evaluation_gives_the_same_bits_on_any_number_of_ranks(on_ranks: OnRanks) -> None:
    assert len({value for ranks in (1, 2, 3, 4, 7) for value in on_ranks(ranks, evaluate_fixed_shards)}) == 1


@pytest.mark.covers("H7")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shards", "numbers", "bucket_cap_mib", "steps"),
    [(8, (1, 2, 3, 4, 6, 8), 8.0, 25), (12, (1, 3, 4, 5), 0.02, 15)],
)
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.both_exchanges
def test_the_bits_are_the_same_on_any_number_of_ranks(
    name: str, shards: int, numbers: tuple[int, ...], bucket_cap_mib: float, steps: int, on_ranks: OnRanks
) -> None:
    digests = {
        ranks: set(on_ranks(ranks, train, name, shards, steps, bucket_cap_mib=bucket_cap_mib, timeout_s=120))
        for ranks in numbers
    }
    assert set.union(*digests.values()) == digests[1]
    assert len(digests[1]) == 1
