"""Drawn jobs by ddp_loop on ranks, and by a plain loop in one process with no line of ddp_loop's arithmetic.

All is float64, and gradients, values and buffers may differ by 1e-12 of the largest element of each tensor: only the
order of sums differs. `python -m pytest tests/training/test_differential.py --hypothesis-profile=search` draws others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from math import nan
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

import ddp_loop as dl
from ddp_loop.data.shards import split_by_shares
from tests.support.cases import CASES, Case, make, make_data
from tests.support.harness import OnRanks
from tests.support.reference import call_inputs, move_statistics

pytestmark = pytest.mark.on_gpus_too

BOUND = 1e-12
RULES: dict[str, Any] = {"0.level": "mean"}
Shard = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # inputs, labels, numbers of the samples
Named = dict[str, torch.Tensor | None]


class Drift(nn.Module):
    """Buffers of its own: one that depends on the samples, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.level: torch.Tensor
        self.calls: torch.Tensor

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.level.lerp_(rows.detach().mean(0), 0.1)
            self.calls += 1
        return rows + self.level


NETWORKS = dict(CASES)
NETWORKS["buffers"] = Case(lambda: nn.Sequential(Drift(), nn.Linear(6, 3)), (6,))
SYNCED = {"batch norm 1d", "batch norm 2d", "momentum None", "affine off"}
LOSSES = ("mean", "sum", "weights", "weights in tensors", "weighted sum", "several", "held")


@dataclass(frozen=True)
class Job:
    """What is trained, how it is cut, and what the script does."""

    network: str
    loss: str
    ranks: int
    shards: int | None  # fixed ones
    shares: tuple[int, ...] | None  # of the ranks
    batch_size: int
    samples: int
    passes: int  # of each step
    bucket_cap_mib: float
    optimizer: str
    clipped: bool
    evaluates: bool  # after each pass, before the update
    is_synced: bool
    frozen_at: int  # the step in which the first layer is frozen; 0 for never
    bad_sample: int  # whose loss is nan; -1 for none
    shuffle: bool

    def pieces(self, indices: list[int]) -> Iterator[list[int]]:
        """The samples of each shard of a mini-batch."""
        count = self.shards or self.ranks
        size, rest = divmod(len(indices), count)
        sizes = [size + (number < rest) for number in range(count)]
        if self.shares is not None and self.shards is None:
            sizes = [*split_by_shares(len(indices), self.shares)]
        start = 0
        for size in sizes:
            if size:
                yield indices[start : start + size]
            start += size


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Any of them."""
    batch_size = draw(st.integers(1, 9))
    samples = draw(st.integers(1, 4 * batch_size))
    network = draw(st.sampled_from(sorted(NETWORKS)))
    is_synced = network in SYNCED and draw(st.booleans())
    bad = draw(st.just(-1) | st.integers(0, samples - 1))
    ranks = draw(st.integers(1, 3))
    shards = None if is_synced else draw(st.none() | st.integers(1, 6))
    shares = draw(st.none() | st.tuples(*[st.integers(0, 3)] * ranks))
    if shares is not None and not 0 < sum(map(bool, shares)) <= (shards or ranks):
        shares = None  # each rank with a share needs a shard
    return Job(
        network=network,
        loss=draw(st.sampled_from(LOSSES)),
        ranks=ranks,
        shares=shares,
        shards=shards,
        batch_size=batch_size,
        samples=samples,
        passes=draw(st.sampled_from((1, 1, 2))),
        bucket_cap_mib=draw(st.sampled_from((8.0, 1e-5))),
        optimizer=draw(st.sampled_from(("sgd", "momentum", "adam"))),
        clipped=draw(st.booleans()),
        evaluates=draw(st.booleans()),
        is_synced=is_synced,
        frozen_at=0 if network == "a branch not always taken" else draw(st.integers(0, 3)),
        bad_sample=bad,
        shuffle=draw(st.booleans()),
    )


@dataclass
class Outcome:
    """Of a pass: the step's result, and gradients. Of the last one of a step also what the update left."""

    values: list[float]
    gradients: Named
    state: dict[str, torch.Tensor]


class Trained:
    """What both loops train, and how one updates it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        case = NETWORKS[job.network]
        self.model, criterion = make(case)
        self.criterion = criterion or nn.CrossEntropyLoss()
        self.parameters = dict(self.model.named_parameters())
        self.parameters |= {f"criterion.{name}": one for name, one in self.criterion.named_parameters()}
        self.optimizer: torch.optim.Optimizer
        if job.optimizer == "adam":  # a large eps, or it divides rounding errors by each other
            self.optimizer = torch.optim.Adam(self.parameters.values(), lr=0.05, eps=0.1)
        else:
            momentum = 0.9 if job.optimizer == "momentum" else 0.0
            self.optimizer = torch.optim.SGD(self.parameters.values(), lr=0.05, momentum=momentum)
        inputs, labels = make_data(case.shape, job.samples)
        self.data: Shard = (inputs, labels, torch.arange(job.samples))

    def freeze(self, step: int) -> None:
        """Freeze the first layer, if it is time, or do what the network asks for."""
        NETWORKS[self.job.network].before_step(self.model, step)
        if step == self.job.frozen_at:
            first = next(self.model.children())
            first.requires_grad_(False)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Of a shard, or of all."""
        loss: torch.Tensor = self.criterion(outputs, labels)
        return loss * nan if bool((numbers == self.job.bad_sample).any()) else loss

    def update(self) -> dict[str, torch.Tensor]:
        """Update the parameters, and return all that is trained."""
        if self.job.clipped:
            nn.utils.clip_grad_norm_(self.parameters.values(), 0.3)
        self.optimizer.step()
        tensors = {**self.parameters, **dict(self.model.named_buffers())}
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def outcome(self, values: list[float]) -> Outcome:
        """After a pass, before the update."""
        given = {name: None if one.grad is None else one.grad.clone() for name, one in self.parameters.items()}
        return Outcome(values, given, {})


def weight_of(numbers: torch.Tensor) -> float:
    """Of a shard; 0 for some."""
    return float(int(numbers[0]) % 4)


def loss_of_all(outputs: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """One that is no mean over samples."""
    return loss + outputs.mean().square()


def train(job: Job) -> list[Outcome]:
    """By ddp_loop."""
    outcomes = []
    with dl.join_world(seed=0) as world:
        trained = Trained(job)
        if job.is_synced:
            dl.sync_batch_norm(trained.model, world)
        state: dict[str, object] = {
            "model": trained.model, "criterion": trained.criterion, "optimizer": trained.optimizer
        }  # fmt: skip
        rules = {f"model.{name}": rule for name, rule in RULES.items()} if job.network == "buffers" else None
        cut: dict[str, Any] = {"shards": job.shards, "shares": job.shares}
        batches = dl.Batches(trained.data, job.batch_size, world, shuffle=job.shuffle, **cut)
        test = dl.Batches(trained.data[:2], 4, world, shuffle=False)
        loop = dl.Loop(
            batches, 2, state=state, progress=False, on_nonfinite="skip", buffer_reduction=rules,
            bucket_cap_mib=job.bucket_cap_mib, allow_single_sample_shards=True,
        )  # fmt: skip
        for step in loop:
            trained.freeze(step.iteration)
            for _ in range(job.passes):
                for shard in step:
                    give(job, step, trained, shard)
                if job.loss == "held":
                    outputs, labels, numbers = step.gather()
                    loss = loss_of_all(outputs, trained.loss(outputs, labels, numbers))
                    step.backward(loss, first=float(outputs.detach()[0].sum()))
                result = step.fold()
                values = [result.loss.item(), *(one.item() for _, one in sorted(result.metrics.items()))]
                if job.evaluates:
                    dl.evaluate(trained.model, test, hits=lambda logits, labels: logits.argmax(1) == labels)
                outcomes.append(trained.outcome(values))
            outcomes[-1].state = trained.update()
    return outcomes


def give(job: Job, step: dl.Step, trained: Trained, shard: Shard) -> None:
    """One shard's backward."""
    inputs, labels, numbers = shard
    outputs = trained.model(inputs)
    if job.loss == "held":
        step.hold(outputs, labels, numbers)
        return
    loss = trained.loss(outputs, labels, numbers)
    hits: dict[str, Any] = {"hits": outputs.argmax(1) == labels, "size": dl.Sum(len(labels))}
    weight = weight_of(numbers) if len(numbers) else 1.0
    if job.loss == "mean":
        step.backward(loss, **hits)
    elif job.loss == "sum":
        step.backward(loss * len(labels) / step.samples, reduction="sum", **hits)
    elif job.loss == "weights":
        step.backward(loss if weight else loss * nan, weight=weight, **hits)  # a shard of weight 0 adds exactly 0
    elif job.loss == "weights in tensors":
        step.backward(loss if weight else loss * nan, weight=torch.tensor(weight), **hits)
    elif job.loss == "weighted sum":
        step.backward(loss, weight=weight, reduction="sum", **hits)
    else:
        step.backward(loss / 4, more_losses=True)
        step.backward(trained.loss(trained.model(inputs), labels, numbers) * 0.75, **hits)


def train_plainly(job: Job, order: list[list[int]]) -> list[Outcome]:
    """As one would on one device: one backward of the mini-batch's loss, but batch norm over each shard."""
    trained, outcomes = Trained(job), []
    buffers = dict(trained.model.named_buffers())
    for number, indices in enumerate(order, 1):
        trained.freeze(number)
        inputs, labels, numbers = trained.data
        shards = [Piece(inputs[piece], labels[piece], numbers[piece]) for piece in job.pieces(indices)]
        if job.loss.startswith("weight"):
            assume(any(weight_of(shard.numbers) for shard in shards))
        for _ in range(job.passes):
            opened = {name: buffer.clone() for name, buffer in buffers.items()}
            forward_plainly(trained, shards, opened)
            loss, values = loss_and_values(trained, shards)
            trained.optimizer.zero_grad()
            if bool(loss.isfinite()):
                loss.backward()
            else:  # the step is skipped
                for name, buffer in buffers.items():
                    buffer.copy_(opened[name])
            outcomes.append(trained.outcome([loss.item(), *values]))
        outcomes[-1].state = trained.update()
    return outcomes


@dataclass
class Piece:
    """A shard, and what its forwards give."""

    inputs: torch.Tensor
    labels: torch.Tensor
    numbers: torch.Tensor
    outputs: tuple[torch.Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self.inputs)


def forward_plainly(trained: Trained, shards: list[Piece], opened: dict[str, torch.Tensor]) -> None:
    """The outputs of each shard, each from the buffers at the start; afterwards buffers are those of all shards."""
    job, model, samples = trained.job, trained.model, sum(map(len, shards))
    noted: dict[tuple[int, int], list[torch.Tensor]] = {}
    left: list[tuple[int, dict[str, torch.Tensor]]] = []

    def forward(inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        buffers = {name: buffer.clone() for name, buffer in opened.items()}
        left.append((len(inputs), buffers))
        hooks = call_inputs(model, noted)
        tensors = {**dict(model.named_parameters()), **buffers}
        outputs = [functional_call(model, tensors, (inputs,)) for _ in range(2 if job.loss == "several" else 1)]
        for hook in hooks:
            hook.remove()
        return tuple(outputs)

    if job.is_synced:  # one device on the whole mini-batch
        whole = [one.split([*map(len, shards)]) for one in forward(torch.cat([shard.inputs for shard in shards]))]
        for shard, *outputs in zip(shards, *whole, strict=True):
            shard.outputs = tuple(outputs)
    else:
        for shard in shards:
            shard.outputs = forward(shard.inputs)
    for name, buffer in model.named_buffers():
        is_mean = name.endswith("level")  # all shards change the others alike, but for batch norm's, which follow
        mean = torch.stack([size / samples * own[name] for size, own in left]).sum(0)
        buffer.copy_(mean if is_mean else left[-1][1][name])
    move_statistics(model, opened, noted)


def loss_and_values(trained: Trained, shards: list[Piece]) -> tuple[torch.Tensor, list[float]]:
    """The loss of a mini-batch, and its metrics."""
    form = trained.job.loss
    if form == "held":
        outputs = torch.cat([shard.outputs[0] for shard in shards])
        labels, numbers = torch.cat([s.labels for s in shards]), torch.cat([s.numbers for s in shards])
        loss = loss_of_all(outputs, trained.loss(outputs, labels, numbers))
        return loss, [float(outputs[0].detach().sum())]
    weights = [weight_of(shard.numbers) if form.startswith("weight") else float(len(shard)) for shard in shards]
    shares = [weight / sum(weights) for weight in weights]
    losses, hits = [], 0.0
    for shard, share in zip(shards, shares, strict=True):
        factors = (0.25, 0.75) if form == "several" else (1.0,)
        for factor, output in zip(factors, shard.outputs, strict=True):
            loss = factor * trained.loss(output, shard.labels, shard.numbers)
            losses += [loss if form == "weighted sum" else share * loss] if share else []
        hits += share * float((shard.outputs[0].argmax(1) == shard.labels).double().mean())
    return torch.stack(losses).sum(), [hits, float(sum(map(len, shards)))]


def order_of(job: Job) -> list[list[int]]:
    """The samples of each mini-batch."""
    with dl.join_world(seed=0) as world:
        batches = dl.Batches(torch.zeros(job.samples), job.batch_size, world, shuffle=job.shuffle)
        places = [(epoch, batches.mini_batch(epoch, number)) for epoch in (1, 2) for number in range(len(batches))]
        return [batches.indices(epoch, one.start, one.samples).tolist() for epoch, one in places]


def differences(found: list[Outcome], wanted: list[Outcome], bound: float) -> list[str]:
    """What differs by more than the bound of the pass's largest number, in words."""
    assert len(found) == len(wanted)
    lines = []
    for number, (one, other) in enumerate(zip(found, wanted, strict=True), 1):
        assert one.gradients.keys() == other.gradients.keys()
        assert one.state.keys() == other.state.keys()
        values = [torch.tensor(outcome.values, dtype=torch.float64) for outcome in (one, other)]
        pairs: dict[str, Any] = {"loss and metrics": tuple(values)}
        pairs |= {f"gradient of {name}": (one.gradients[name], wanted) for name, wanted in other.gradients.items()}
        pairs |= {name: (one.state[name], wanted) for name, wanted in other.state.items()}
        largest = max([1.0, *(float(t.abs().max()) for _, t in pairs.values() if t is not None and t.numel())])
        lines += [
            f"pass {number}: {name}" for name, pair in pairs.items() if not is_close(pair[0], pair[1], bound * largest)
        ]
    return lines


def is_close(one: torch.Tensor | None, other: torch.Tensor | None, bound: float) -> bool:
    if one is None or other is None:
        return one is other
    return torch.allclose(one, other, rtol=0, atol=bound, equal_nan=True)


def bits(outcomes: list[Outcome]) -> str:
    """A hash of all that was trained."""
    digest = sha256()
    for one in outcomes:
        for tensor in (*filter(torch.is_tensor, one.gradients.values()), *one.state.values()):
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.covers("C5", "C6", "D1", "D3", "D4", "D6", "D11", "J2")
@pytest.mark.quick_on_gpus
@given(job=jobs())
def test_any_job_is_that_of_the_plain_loop(on_ranks: OnRanks, job: Job) -> None:
    wanted = train_plainly(job, order_of(job))
    results = on_ranks(job.ranks, train, job)
    bound = 1e-4 if job.network == "two dtypes" else BOUND  # a float32 layer rounds at 6e-8, over some steps
    assert differences(results[0], wanted, bound) == []
    assert len(set(map(bits, results))) == 1


@pytest.mark.covers("D5")
@given(job=jobs(), ranks=st.integers(1, 3), shards=st.integers(1, 6))
def test_any_job_with_fixed_shards_has_the_same_bits_on_any_number_of_ranks(
    on_ranks: OnRanks, job: Job, ranks: int, shards: int
) -> None:
    shares = job.shares if job.shares and sum(map(bool, job.shares)) <= shards else None
    job = replace(job, shards=shards, shares=shares, is_synced=False)
    results = on_ranks(job.ranks, train, job)
    results += on_ranks(ranks, train, replace(job, ranks=ranks, shares=None))
    assert len(set(map(bits, results))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("network", ["no batch norm", "batch norm 2d"])
def test_seven_ranks_too(network: str, on_ranks: OnRanks) -> None:
    job = Job(
        network, "mean", ranks=7, shards=None, shares=None, batch_size=128, samples=500, passes=1,
        bucket_cap_mib=8.0, optimizer="momentum", clipped=False, evaluates=False, is_synced=False, frozen_at=0,
        bad_sample=-1, shuffle=False,
    )  # fmt: skip
    wanted = train_plainly(job, order_of(job))
    for found in on_ranks(7, train, job):
        assert differences(found, wanted, BOUND) == []
