"""Weights of the user's own: tokens, or one per sample.

The networks have no batch norm, so one device on the whole mini-batch is the truth; in float64 the bound is 1e-12
relative to the largest element of each tensor: no sum here has more than some hundred terms, each rounded at 1.1e-16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import ddp_loop as dl
from ddp_loop.training.rows import as_metric
from ddp_loop.training.validation import check_weight
from tests.support.comparing import Tensors, distance, gradients_of, same_on_all, values_of
from tests.support.devices import CPU
from tests.support.harness import OnRanks
from tests.support.refusals import BOUND, loop_over, network, samples

pytestmark = pytest.mark.on_gpus_too

LETTERS, LONGEST, SPLITS, MASKED = 7, 9, 20, -100


class Speaker(nn.Module):
    """The logits of each next letter: (n, t) to (n, t, letters); float64, always with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, 5)
        self.recurrent = nn.GRU(5, 6, batch_first=True)
        self.logits = nn.Linear(6, LETTERS)
        self.double()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.embedding(letters))
        logits: torch.Tensor = self.logits(hidden)
        return logits


def token_loss(model: nn.Module, letters: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
    """The sum over a shard's tokens, or their mean: nan where there is none, and so are its gradients.

    With `ignore_index` torch itself would keep nan out of the gradients.
    """
    mask = targets != MASKED
    losses = cross_entropy(model(letters).transpose(1, 2), targets.clamp(min=0), reduction="none")
    total = (losses * mask).sum()
    return total if reduction == "sum" else total / mask.sum()


@dataclass
class Split:
    """A mini-batch of sequences of unequal lengths, cut over shards, one of which has no token."""

    letters: torch.Tensor
    targets: torch.Tensor
    shards: int

    def pieces(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The shards' data."""
        sizes = dl.split_sizes(len(self.letters), self.shards)
        return list(zip(self.letters.split(sizes), self.targets.split(sizes), strict=True))


def make_split(number: int) -> Split:
    generator = torch.Generator().manual_seed(number)

    def draw(least: int, most: int, *shape: int) -> torch.Tensor:
        return torch.randint(least, most + 1, shape, generator=generator)

    count, shards = int(draw(5, 16)), int(draw(2, 7))  # sometimes more shards than sequences
    letters, lengths = draw(0, LETTERS - 1, count, LONGEST + 1), draw(1, LONGEST, count)
    split = Split(letters[:, :-1].contiguous(), letters[:, 1:].contiguous(), shards)
    split.targets[torch.arange(LONGEST) >= lengths.unsqueeze(1)] = MASKED
    split.pieces()[int(draw(0, min(count, shards) - 1))][1].fill_(MASKED)
    return split


def speak(form: str) -> list[Tensors]:
    """For each split its loss, gradients, and the parameters after an update."""
    outcomes = []
    with dl.join_world() as world:
        for split in map(make_split, range(SPLITS)):
            model = Speaker()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            data = (split.letters, split.targets)
            batches = dl.Batches(data, len(split.letters), world, shards=split.shards, shuffle=False)
            for step in dl.Loop(batches, 1, state={"model": model, "optimizer": optimizer}, progress=False):
                for letters, targets in step:
                    tokens = (targets != MASKED).sum()
                    if form == "a sum, a number":
                        loss = token_loss(model, letters, targets, "sum")
                        step.backward(loss, weight=tokens.item(), reduction="sum")
                    elif form == "a sum, a tensor":
                        loss = token_loss(model, letters, targets, "sum")
                        step.backward(loss, weight=tokens, reduction="sum")
                    elif form == "a mean, a number":
                        step.backward(token_loss(model, letters, targets, "mean"), weight=tokens.item())
                    else:
                        step.backward(token_loss(model, letters, targets, "mean"), weight=tokens)
                row = step.fold()
                gradients = gradients_of(model)
                optimizer.step()
                outcomes.append([row.loss, *gradients, *values_of(model)])
    return outcomes


@cache
def speak_plainly(reduction: str) -> list[Tensors]:
    """The same with the whole mini-batch in one backward: of the sum over its tokens, or of their mean."""
    outcomes = []
    for split in map(make_split, range(SPLITS)):
        model = Speaker()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = token_loss(model, split.letters, split.targets, reduction)
        loss.backward()
        gradients = gradients_of(model)
        optimizer.step()
        outcomes.append([loss.detach(), *gradients, *values_of(model)])
    return outcomes


def mean_of_means(split: Split) -> Tensors:
    """Loss and gradients as each shard's own mean gives them, averaged over the shards that have tokens."""
    model = Speaker()
    with_tokens = [piece for piece in split.pieces() if bool((piece[1] != MASKED).any())]
    loss = torch.stack([token_loss(model, *piece, "mean") for piece in with_tokens]).mean()
    loss.backward()
    return [loss.detach(), *gradients_of(model)]


@pytest.mark.covers("D11")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("form", ["a sum, a number", "a sum, a tensor", "a mean, a number", "a mean, a tensor"])
@pytest.mark.slow
def test_tokens_count_alike_wherever_20_random_splits_put_them(form: str, ranks: int, on_ranks: OnRanks) -> None:
    results = on_ranks(ranks, speak, form)
    for number, expected in enumerate(speak_plainly("sum" if "sum" in form else "mean")):
        assert distance(same_on_all([outcomes[number] for outcomes in results]), expected) <= BOUND, f"split {number}"


@pytest.mark.covers("D11")
def test_the_mean_of_the_shards_means_has_another_gradient_in_each_of_the_splits() -> None:
    """So the test before this one could tell."""
    losses = []
    for number, expected in enumerate(speak_plainly("mean")):
        split = make_split(number)
        tokens = [int((targets != MASKED).sum()) for _, targets in split.pieces() if len(targets)]
        assert 0 in tokens
        wrong = mean_of_means(split)
        losses.append(distance(wrong[:1], expected[:1]))
        if len(set(tokens) - {0}) > 1:  # else it is the same number
            assert distance(wrong, expected[: len(wrong)]) > 1e-3, f"split {number}"
    assert sum(loss > 1e-3 for loss in losses) > SPLITS / 2


def weights_of(rows: torch.Tensor) -> torch.Tensor:
    """A weight for each sample, some of them 0."""
    return rows[:, 0].abs() * (rows[:, 1] > -0.5)


def weigh(shards: int | None) -> Tensors:
    with dl.join_world() as world:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for step in loop_over(world, "", model, optimizer, run_dir=None, shards=shards):
            for rows in step:
                weights = weights_of(rows)
                loss = (weights * (model(rows) - rows.sum(1, keepdim=True)).squeeze(1) ** 2).sum()
                step.backward(loss / weights.sum(), weight=weights.sum())
            losses.append(step.fold().loss)
            optimizer.step()
        return [*losses, *values_of(model)]


@pytest.mark.covers("D11")
@pytest.mark.parametrize(("ranks", "shards"), [(2, None), (3, None), (2, 6), (3, 6)])
@pytest.mark.quick_on_gpus
def test_each_sample_can_have_a_weight(ranks: int, shards: int | None, on_ranks: OnRanks) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for rows in samples(24).split(6):
        optimizer.zero_grad()
        weights = weights_of(rows)
        loss = (weights * (model(rows) - rows.sum(1, keepdim=True)).squeeze(1) ** 2).sum() / weights.sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert bool((weights_of(samples(24)) == 0).any())
    assert distance(same_on_all(on_ranks(ranks, weigh, shards)), [*losses, *values_of(model)]) <= BOUND


# -- values on the host, for a loss on a GPU; device "meta" stands for the GPU, and refuses to be mixed as it does ---


class Copies(TorchDispatchMode):
    """Collects what is copied from the host to the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
        if isinstance(result, torch.Tensor) and result.is_meta and any(not one.is_meta for one in tensors):
            self.seen.append(str(function))
        return result


@pytest.mark.one_device(CPU, "the host is not the device")
@pytest.mark.parametrize("value", [torch.tensor(2.5), torch.tensor([1, 2, 3]), dl.Sum(torch.ones(3)), 2])
def test_a_metric_on_the_host_is_a_number_to_the_device(value: Any) -> None:
    with Copies() as copies:
        assert as_metric("one", value, 3, torch.device("meta")).device.type == "meta"
    assert copies.seen == []


@pytest.mark.one_device(CPU, "the host is not the device")
@pytest.mark.parametrize("weight", [torch.tensor(3), torch.tensor([2.5]), torch.tensor(0.1, dtype=torch.float64)])
def test_a_weight_on_the_host_is_a_number(weight: torch.Tensor) -> None:
    assert type(checked := check_weight(weight)) is float
    assert checked == weight.to(torch.float64).item()
    for wrong in (torch.tensor(-1.0), torch.tensor(math.nan)):
        with pytest.raises(ValueError, match="must be a finite number, 0 or more"):
            check_weight(wrong)
