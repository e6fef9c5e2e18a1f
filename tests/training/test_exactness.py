"""A step on N ranks against a plain torch loop over the same shards in one process, in float64.

The bound is 1e-12 relative to the largest element of each tensor: float64 rounds at 1.1e-16, and no sum here
has more than some thousand terms. Where nothing but rounding differs, errors of 1e-15 are seen.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import ddp_loop as dl
from tests.support import reference
from tests.support.cases import CASES, Case, make, make_data
from tests.support.harness import OnRanks
from tests.support.images import hits

pytestmark = pytest.mark.on_gpus_too

BOUND = 1e-12
STEPS = 7


def is_close(value: torch.Tensor | None, expected: torch.Tensor | None, bound: float) -> bool:
    if value is None or expected is None:
        return value is expected
    scale = float(expected.double().abs().max()) if expected.numel() else 0.0
    return float((value.double() - expected.double()).abs().max()) <= bound * max(scale, 1e-3)


def train(name: str, batch_size: int, shards: int | None, in_sum: bool = False) -> list[reference.Outcome]:
    """The outcomes of some steps on the ranks."""
    case = CASES[name]
    with dl.join_world(seed=0) as world:
        model, criterion = make(case)
        parameters = [*model.parameters(), *(criterion.parameters() if criterion else ())]
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        batches = dl.Batches(
            make_data(case.shape, batch_size * STEPS - batch_size // 3), batch_size, world, shards=shards, shuffle=False
        )
        state: dict[str, object] = {"model": model, "optimizer": optimizer}
        if criterion is not None:
            state["criterion"] = criterion
        outcomes = []
        for step in dl.Loop(batches, 1, state=state, progress=False, allow_single_sample_shards=True):
            case.before_step(model, step.iteration)
            for inputs, labels in step:
                logits = model(inputs)
                loss = (criterion or cross_entropy)(logits, labels)
                if in_sum:
                    part = loss * len(labels) / step.samples  # these add up to the mean over the mini-batch
                    step.backward(part, reduction="sum", accuracy=hits(logits, labels))
                else:
                    step.backward(loss, accuracy=hits(logits, labels))
            row = step.fold()
            named = {**dict(model.named_parameters())}
            if criterion is not None:
                named.update({f"criterion.{k}": p for k, p in enumerate(criterion.parameters())})
            gradients = {key: None if p.grad is None else p.grad.clone() for key, p in named.items()}
            state_now = {key: value.clone() for key, value in model.state_dict().items()}
            outcomes.append(reference.Outcome(row.loss.clone(), row.metrics["accuracy"], gradients, state_now))
            optimizer.step()
        return outcomes


def expect(case: Case, batch_size: int, shards: int) -> list[reference.Outcome]:
    """The same by the reference."""
    model, criterion = make(case)
    others = list(criterion.parameters()) if criterion else []
    optimizer = torch.optim.SGD([*model.parameters(), *others], lr=0.05, momentum=0.9)
    data = make_data(case.shape, batch_size * STEPS - batch_size // 3)

    def loss(model: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(inputs)
        return (criterion or cross_entropy)(logits, labels), hits(logits, labels).double().mean()

    outcomes = []
    for number in range(STEPS):
        case.before_step(model, number + 1)
        mini_batch = tuple(tensor[number * batch_size : (number + 1) * batch_size] for tensor in data)
        size, rest = divmod(len(mini_batch[0]), shards)
        sizes = [size + (k < rest) for k in range(shards)]
        outcomes.append(reference.step(model, reference.cut(mini_batch, sizes), loss, others=others))
        optimizer.step()
    return outcomes


def differences(outcomes: list[reference.Outcome], expected: list[reference.Outcome], bound: float) -> list[str]:
    """What differs by more than the bound, in words."""
    found = [] if len(outcomes) == len(expected) else [f"{len(outcomes)} steps, not {len(expected)}"]
    for number, (one, other) in enumerate(zip(outcomes, expected, strict=False), 1):
        pairs: dict[str, Any] = {"loss": (one.loss, other.loss), "metric": (one.metric, other.metric)}
        pairs.update({f"gradient of {key}": (one.gradients[key], other.gradients[key]) for key in other.gradients})
        pairs.update({key: (one.state[key], other.state[key]) for key in other.state})
        found += [f"step {number}: {what}" for what, (a, b) in pairs.items() if not is_close(a, b, bound)]
    return found


def bound_of(name: str) -> float:
    return 1e-5 if name == "two dtypes" else BOUND  # its float32 layer rounds at 6e-8, over some steps


@pytest.mark.covers("D3", "D4", "D6")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick_on_gpus
def test_7_samples_over_3_ranks_equal_the_plain_loop_over_the_shards(name: str, on_ranks: OnRanks) -> None:
    for outcomes in on_ranks(3, train, name, 7, None):
        assert differences(outcomes, expect(CASES[name], 7, 3), bound_of(name)) == []


@pytest.mark.covers("C6", "D1", "D3")
@pytest.mark.parametrize(("batch_size", "ranks"), [(2, 3), (1, 2), (128, 7)])
@pytest.mark.parametrize("name", ["no batch norm", "batch norm 2d"])
@pytest.mark.slow
def test_uneven_and_empty_shards_equal_the_plain_loop(
    name: str, batch_size: int, ranks: int, on_ranks: OnRanks
) -> None:
    for outcomes in on_ranks(ranks, train, name, batch_size, None):
        assert differences(outcomes, expect(CASES[name], batch_size, ranks), BOUND) == []


@pytest.mark.covers("D3", "D4")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_4_shards_give_the_same_on_1_and_2_and_4_ranks(name: str, ranks: int, on_ranks: OnRanks) -> None:
    outcomes = on_ranks(ranks, train, name, 10, 4)[0]
    assert differences(outcomes, expect(CASES[name], 10, 4), bound_of(name)) == []


@pytest.mark.covers("D3")
@pytest.mark.parametrize("name", ["no batch norm", "tied weights and a scalar", "a criterion with parameters"])
def test_without_batch_norm_ranks_equal_one_device_on_the_whole_mini_batch(name: str, on_ranks: OnRanks) -> None:
    outcomes = on_ranks(3, train, name, 7, None)[0]
    assert differences(outcomes, expect(CASES[name], 7, 1), BOUND) == []


@pytest.mark.covers("D3")
def test_summed_losses_are_taken_beside_means(on_ranks: OnRanks) -> None:
    outcomes = on_ranks(2, train, "no batch norm", 7, None, in_sum=True)[0]
    assert differences(outcomes, expect(CASES["no batch norm"], 7, 2), BOUND) == []


def train_one_shard(name: str) -> list[reference.Outcome]:
    return train(name, 8, 1)


@pytest.mark.covers("C6")
def test_one_shard_reaches_the_ranks_that_have_none(on_ranks: OnRanks) -> None:
    for outcomes in on_ranks(3, train_one_shard, "batch norm 2d"):
        assert differences(outcomes, expect(CASES["batch norm 2d"], 8, 1), BOUND) == []


def far_from_0(mean: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return (mean + torch.randn(100, 6, 4, 4, generator=generator, dtype=torch.float64)).float()


def statistics_far_from_0(mean: float, memory_format: torch.memory_format) -> tuple[torch.Tensor, torch.Tensor]:
    with dl.join_world(seed=0) as world:
        norm = torch.nn.BatchNorm2d(6, momentum=1.0)
        model = torch.nn.Sequential(norm, torch.nn.Flatten(), torch.nn.Linear(96, 1))
        inputs = far_from_0(mean).contiguous(memory_format=memory_format)
        batches = dl.Batches(inputs, 100, world, shards=5, shuffle=False)
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
            for rows in step:
                step.backward(model(rows).mean())
            step.fold()
        return torch.as_tensor(norm.running_mean).double(), torch.as_tensor(norm.running_var).double()


@pytest.mark.covers("D4")
@pytest.mark.one_device("cpu", "on a GPU the means stay rounded, see the next test")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("mean", [1e3, 1e4])
def test_the_variance_far_from_0_does_not_cancel_in_float32(
    mean: float, memory_format: torch.memory_format, on_ranks: OnRanks
) -> None:
    expected = far_from_0(mean).double().movedim(1, 0).flatten(1)
    for found, variance in on_ranks(3, statistics_far_from_0, mean, memory_format):
        # float32 rounds the shards' means at 6e-8 * 1e4 = 6e-4; sums of squares would be off by 6e-8 * 1e8 = 6 there.
        assert is_close(found, expected.mean(1), 1e-7)
        assert is_close(variance, expected.var(1), 1e-5)


@pytest.mark.covers("D4")
@pytest.mark.one_device("gpu", "the CPU computes the rounded means again")
@pytest.mark.parametrize("mean", [1e3, 1e4])
def test_on_a_gpu_the_variance_far_from_0_is_off_by_the_rounding_of_the_means(mean: float, on_ranks: OnRanks) -> None:
    expected = far_from_0(mean).double().movedim(1, 0).flatten(1)
    for found, variance in on_ranks(3, statistics_far_from_0, mean, torch.contiguous_format):
        assert is_close(found, expected.mean(1), 1e-7)
        # Twice the rounding, 6e-8 of the mean, times a shard's distance from the mean of all, a tenth of a deviation.
        assert is_close(variance, expected.var(1), 1e-8 * mean)


class Recomputed(nn.Module):
    """Batch norm in a block that may be computed again inside backward, to save memory."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh())
        self.last = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, reentrant: bool | None) -> torch.Tensor:
        y = self.block(x) if reentrant is None else checkpoint(self.block, x, use_reentrant=reentrant)
        return self.last(y).mean()  # type: ignore[no-any-return]


def trained_with_recomputation(reentrant: bool | None) -> list[torch.Tensor]:
    with dl.join_world(seed=0) as world:
        model = Recomputed().double().to(world.device)
        rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        batches = dl.Batches(rows, 10, world, shards=4)
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
            for inputs in step:
                step.backward(model(inputs.requires_grad_(), reentrant))
            step.fold()
        return [tensor.detach().double() for tensor in model.state_dict().values()]


@pytest.mark.covers("D4")
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_inside_backward_does_not_count_twice(reentrant: bool, on_ranks: OnRanks) -> None:
    expected = on_ranks(2, trained_with_recomputation, None)[0]
    for found in on_ranks(2, trained_with_recomputation, reentrant):
        assert all(map(torch.equal, found, expected))


def every_state(rounds: int) -> list[list[bytes]]:
    """Parameters, momentum and buffers after every step, as bytes."""
    with dl.join_world(seed=0) as world:
        torch.manual_seed(world.rank)  # differing start: rank 0's is given to all
        model = CASES["batch norm 2d"].build().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        inputs, labels = make_data((2, 4, 4), 50)
        batches = dl.Batches((inputs.float(), labels), 7, world)
        states = []
        for step in dl.Loop(batches, steps=rounds, state={"model": model, "optimizer": optimizer}, progress=False):
            for images, classes in step:
                step.backward(cross_entropy(model(images), classes))
            step.fold()
            optimizer.step()
            momenta = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
            tensors = [*model.state_dict().values(), *momenta]
            states.append([tensor.cpu().numpy().tobytes() for tensor in tensors])
        return states


@pytest.mark.covers("D2", "D7")
def test_parameters_and_momentum_and_buffers_are_bit_equal_on_all_ranks_after_each_of_50_steps(
    on_ranks: OnRanks,
) -> None:
    first, *others = on_ranks(3, every_state, 50)
    assert len(first) == 50
    assert all(other == first for other in others)
