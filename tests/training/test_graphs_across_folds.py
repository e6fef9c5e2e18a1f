"""A graph crosses a fold, as in DCGAN: one forward of the generator serves the pass of both networks.

The reference is the plain loop in float64. No sum has more than some hundred terms, each rounded at 1.1e-16.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.reference import moments

pytestmark = pytest.mark.on_gpus_too

NORMS = ("batch_norm", "none", "counted", "own_forward", "instance")
STEPS = 3
Tensors = dict[str, torch.Tensor]


class Counted(nn.Module):
    """Divides by a moving average that it writes in place, seen by torch's version counter, and then saves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(5, dtype=torch.float64))
        self.size: torch.Tensor

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.size.lerp_(values.abs().mean(0), 0.1)
        return values / self.size.view(1, -1)


class OwnForward(nn.BatchNorm1d):
    """A batch norm with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input * 2)


class Instances(nn.Module):
    """Instance norm with running statistics, which torch's kernel writes past the version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True, dtype=torch.float64)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        normalised: torch.Tensor = self.norm(values.unsqueeze(1))
        return normalised.squeeze(1)


def norm_of(kind: str) -> nn.Module:
    makers: dict[str, Callable[[], nn.Module]] = {
        "batch_norm": lambda: nn.BatchNorm1d(5, dtype=torch.float64),
        "none": nn.Identity,
        "counted": Counted,
        "own_forward": lambda: OwnForward(5, dtype=torch.float64),
        "instance": Instances,
    }
    return makers[kind]()


def networks(kind: str) -> nn.ModuleDict:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        generator = nn.Sequential(nn.Linear(3, 5), norm_of(kind), nn.Tanh(), nn.Linear(5, 2))
        # Called twice before a backward, `Counted` raises in torch too.
        norm = nn.Identity() if kind == "counted" else norm_of(kind)
        discriminator = nn.Sequential(nn.Linear(2, 5), norm, nn.Tanh(), nn.Linear(5, 1))
    return nn.ModuleDict({"generator": generator, "discriminator": discriminator}).double()


def optimizers(both: nn.ModuleDict) -> dict[str, torch.optim.Optimizer]:
    return {name: torch.optim.SGD(both[name].parameters(), lr=0.2, momentum=0.9) for name in both}


def rows(count: int) -> torch.Tensor:
    """Real points in the first two columns, noise in the others."""
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def first_loss(both: nn.ModuleDict, drawn: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    discriminator = both["discriminator"]
    loss: torch.Tensor = softplus(-discriminator(drawn[:, :2])).mean() + softplus(discriminator(fake.detach())).mean()
    return loss


def second_loss(both: nn.ModuleDict, fake: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = softplus(-both["discriminator"](fake)).mean()
    return loss


def state_of(both: nn.Module) -> Tensors:
    return {name: one.detach().clone() for name, one in both.state_dict().items()}


# -- the plain loop, over shards ---------------------------------------------------------------------------


class PlainShards:
    """Runs each shard from the buffers at the pass's start, and merges them by definition at its end."""

    def __init__(self, both: nn.Module) -> None:
        self.both = both
        self.layers = [layer for layer in both.modules() if isinstance(layer, nn.BatchNorm1d)]
        self.others = [one for one in both.modules() if isinstance(one, Counted | nn.InstanceNorm1d)]

    def pass_over(self, shards: list[torch.Tensor], loss_of: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        self.both.zero_grad()
        total = sum(map(len, shards))
        noted: dict[tuple[int, int], list[torch.Tensor]] = {}
        opened = [{name: one.clone() for name, one in layer.named_buffers()} for layer in self.others]
        pooled = [{name: torch.zeros_like(one.double()) for name, one in before.items()} for before in opened]
        for number, shard in enumerate(shards):
            for layer, before in zip(self.others, opened, strict=True):  # new tensors: graphs hold the old ones
                layer._buffers.update({name: one.clone() for name, one in before.items()})
            with Noting(self.layers, noted):
                loss = loss_of(number, shard)
            for layer, sums in zip(self.others, pooled, strict=True):
                for name, one in layer.named_buffers():
                    sums[name] += one.double() * len(shard) / total
            (loss * len(shard) / total).backward()
        for layer, sums in zip(self.others, pooled, strict=True):
            layer._buffers.update({name: sums[name].to(one.dtype) for name, one in layer.named_buffers()})
        with torch.no_grad():
            for (_, number), inputs in sorted(noted.items()):
                norm = self.layers[number]
                mean, variance = moments(inputs)
                running_mean, running_var, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
                assert running_mean is not None
                assert running_var is not None
                assert count is not None
                norm.running_mean = 0.9 * running_mean + 0.1 * mean
                norm.running_var = 0.9 * running_var + 0.1 * variance
                norm.num_batches_tracked = count + 1


class Noting:
    """Notes what the batch-norm layers normalise, and keeps their statistics as they are."""

    def __init__(self, layers: list[nn.BatchNorm1d], noted: dict[tuple[int, int], list[torch.Tensor]]) -> None:
        self.layers, self.noted = layers, noted

    def __enter__(self) -> None:
        self.calls = [0] * len(self.layers)
        self.hooks = []
        for number, layer in enumerate(self.layers):
            layer.momentum, layer.track_running_stats = 0.0, False
            self.hooks.append(layer.register_forward_pre_hook(self._hook(number)))

    def _hook(self, number: int) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def note(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            values = inputs[0].detach() * (2 if isinstance(layer, OwnForward) else 1)
            self.noted.setdefault((self.calls[number], number), []).append(values)
            self.calls[number] += 1

        return note

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()
        for layer in self.layers:
            layer.momentum, layer.track_running_stats = 0.1, True


def train_plainly(kind: str, size: int, shards: int) -> Tensors:
    both = networks(kind)
    optimizer, plain = optimizers(both), PlainShards(both)
    for whole in rows(STEPS * size).split(size):
        cut = list(whole.tensor_split(shards))
        fakes: list[torch.Tensor] = []

        def first(number: int, drawn: torch.Tensor, fakes: list[torch.Tensor] = fakes) -> torch.Tensor:
            fakes.append(both["generator"](drawn[:, 2:]))
            return first_loss(both, drawn, fakes[-1])

        def second(number: int, drawn: torch.Tensor, fakes: list[torch.Tensor] = fakes) -> torch.Tensor:
            return second_loss(both, fakes[number])

        plain.pass_over(cut, first)
        optimizer["discriminator"].step()
        plain.pass_over(cut, second)
        optimizer["generator"].step()
    return state_of(both)


def train_whole(kind: str, size: int) -> Tensors:
    """Torch's own loop, over whole mini-batches."""
    both = networks(kind)
    optimizer = optimizers(both)
    for drawn in rows(STEPS * size).split(size):
        both.zero_grad()
        fake = both["generator"](drawn[:, 2:])
        first_loss(both, drawn, fake).backward()
        optimizer["discriminator"].step()
        both.zero_grad()
        second_loss(both, fake).backward()
        optimizer["generator"].step()
    return state_of(both)


# -- with ddp_loop -----------------------------------------------------------------------------------------


def train(kind: str, size: int, shards: int | None, synced: bool = False) -> tuple[Tensors, str]:
    with dl.join_world() as world:
        both = networks(kind)
        if synced:
            dl.sync_batch_norm(both, world)
        before = {name: id(one) for name, one in both.named_buffers()}
        optimizer = optimizers(both)
        batches = dl.Batches(rows(STEPS * size), size, world, shards=shards, shuffle=False)
        rules = {f"both.{name}": "mean" for name, _ in both.named_buffers() if name.endswith("size")}
        state: dict[str, Any] = {"both": both, **optimizer}
        loop = dl.Loop(batches, 1, state=state, buffer_reduction=rules, progress=False, check_replicas_every=1)  # type: ignore[arg-type]
        for step in loop:
            fakes: list[torch.Tensor] = []
            for drawn in step:
                if not fakes:  # the last step's graphs are gone
                    assert before == {name: id(one) for name, one in both.named_buffers()}
                fakes.append(both["generator"](drawn[:, 2:]))
                step.backward(first_loss(both, drawn, fakes[-1]))
            step.fold()
            optimizer["discriminator"].step()
            for fake, _ in zip(fakes, step, strict=True):
                step.backward(second_loss(both, fake))
            step.fold()
            optimizer["generator"].step()
        fakes.clear()
        if kind != "counted":
            assert before == {name: id(one) for name, one in both.named_buffers()}
        state = state_of(both)
        digest = sha256(b"".join(one.cpu().numpy().tobytes() for one in state.values())).hexdigest()
        return state, digest


def assert_close(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert torch.allclose(found[name], one, rtol=1e-11, atol=1e-13), name


@pytest.mark.quick_on_gpus
@pytest.mark.covers("J1")
@pytest.mark.parametrize("kind", NORMS)
def test_one_shard_has_the_bits_of_torchs_own_loop(kind: str, on_ranks: OnRanks) -> None:
    wanted = train_whole(kind, 9)
    ((found, _),) = on_ranks(1, train, kind, 9, None)
    assert {name for name, one in wanted.items() if not torch.equal(found[name], one)} == set()


@pytest.mark.covers("J1")
@pytest.mark.parametrize("kind", NORMS)
def test_four_shards_have_the_bits_of_each_other_on_1_2_and_3_ranks(kind: str, on_ranks: OnRanks) -> None:
    wanted = train_plainly(kind, 9, 4)
    digests = set()
    for ranks in (1, 2, 3):
        for found, digest in on_ranks(ranks, train, kind, 9, 4):
            assert_close(found, wanted)
            digests.add(digest)
    assert len(digests) == 1


@pytest.mark.covers("J1")
@pytest.mark.parametrize("size", [9, 2])  # 2 leave the third rank without samples
def test_synced_batch_norm_equals_the_plain_loop_over_whole_mini_batches(size: int, on_ranks: OnRanks) -> None:
    wanted = train_whole("batch_norm", size)
    for found, _ in on_ranks(3, train, "batch_norm", size, None, synced=True):
        assert_close(found, wanted)


def train_through_evaluation_mode(size: int, shards: int | None, synced: bool = False) -> Tensors:
    """A graph holds the running statistics themselves, which the other call of the layer moves."""
    with dl.join_world() as world:
        both = networks("batch_norm")
        if synced:
            dl.sync_batch_norm(both, world)
        optimizer, discriminator = optimizers(both)["discriminator"], both["discriminator"]
        batches = dl.Batches(rows(STEPS * size), size, world, shards=shards, shuffle=False)
        for step in dl.Loop(batches, 1, state={"both": both, "optimizer": optimizer}, progress=False):
            kept = []
            for drawn in step:
                kept.append(softplus(discriminator.eval()(drawn[:, 2:4])).mean())
                step.backward(softplus(-discriminator.train()(drawn[:, :2])).mean())
            step.fold()
            for loss, _ in zip(kept, step, strict=True):
                step.backward(loss)
            step.fold()
            optimizer.step()
        return state_of(both)


def train_plainly_through_evaluation_mode(size: int) -> Tensors:
    both = networks("batch_norm")
    optimizer, discriminator = optimizers(both)["discriminator"], both["discriminator"]
    for drawn in rows(STEPS * size).split(size):
        kept = softplus(discriminator.eval()(drawn[:, 2:4])).mean()
        discriminator.train()(drawn[:, :2])
        discriminator.zero_grad()
        kept.backward()
        optimizer.step()
    return state_of(both)


@pytest.mark.parametrize(("ranks", "shards", "synced"), [(1, None, False), (2, 3, False), (2, None, True)])
def test_running_statistics_move_past_the_version_counter_as_in_torch(
    ranks: int, shards: int | None, synced: bool, on_ranks: OnRanks
) -> None:
    wanted = train_plainly_through_evaluation_mode(9)
    for found in on_ranks(ranks, train_through_evaluation_mode, 9, shards, synced=synced):
        assert_close(found, wanted)


def error_of(backward: Callable[..., None], loss: torch.Tensor) -> str:
    """Torch's error for the backward of a loss whose weights were stepped."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        backward(loss)
    return str(caught.value).split(" is at version")[0].replace("torch.cuda.", "torch.")  # the same type on a GPU


def step_weights_that_a_graph_needs() -> str:
    with dl.join_world() as world:
        both = networks("batch_norm")
        optimizer = optimizers(both)["discriminator"]
        batches = dl.Batches(rows(9), 9, world, shuffle=False)
        said = ""
        for step in dl.Loop(batches, 1, state={"both": both, "optimizer": optimizer}, progress=False):
            kept: list[torch.Tensor] = []
            for drawn in step:
                fake = both["generator"](drawn[:, 2:])
                kept.append(second_loss(both, fake))
                step.backward(first_loss(both, drawn, fake))
            step.fold()
            optimizer.step()
            for _ in step:
                said = error_of(step.backward, kept[0])
                break
            break
        return said


def test_weights_that_were_stepped_are_refused_as_in_torch(on_ranks: OnRanks) -> None:
    both = networks("batch_norm")
    (drawn,) = rows(9).split(9)
    fake = both["generator"](drawn[:, 2:])
    kept = second_loss(both, fake)
    first_loss(both, drawn, fake).backward()
    optimizers(both)["discriminator"].step()
    assert on_ranks(1, step_weights_that_a_graph_needs) == [error_of(torch.Tensor.backward, kept)]
