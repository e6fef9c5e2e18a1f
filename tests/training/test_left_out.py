"""Parameters that get no gradient are left out of the sums until they get one."""

from __future__ import annotations

import copy
from hashlib import sha256

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loss_of, network, samples

pytestmark = pytest.mark.on_gpus_too

COPIES = ("deepcopy", "averaged", "frozen", "none")
Lengths = list[int]


def copy_of(kind: str, model: nn.Module) -> nn.Module | None:
    if kind == "averaged":
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return None if kind == "none" else copy.deepcopy(model).requires_grad_(kind != "frozen")


def move(average: nn.Module, model: nn.Module) -> None:
    if isinstance(average, AveragedModel):
        average.update_parameters(model)
        return
    with torch.no_grad():
        for one, other in zip(average.parameters(), model.parameters(), strict=True):
            one.lerp_(other, 0.1)


def train_with_a_copy(kind: str, shards: int | None, bucket_cap_mib: float) -> tuple[str, list[Lengths], list[int]]:
    """The bits of the model, the length of each bucket in each step, and the sums begun before the fold."""
    lengths: list[Lengths] = []
    begun: list[int] = []
    with dl.join_world() as world:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        average = copy_of(kind, model)
        state: dict[str, object] = {"model": model, "optimizer": optimizer}
        state |= {} if average is None else {"average": average}
        batches = dl.Batches(samples(24), 6, world, shards=shards, shuffle=False)
        loop = dl.Loop(batches, 1, state=state, progress=False, bucket_cap_mib=bucket_cap_mib, check_replicas_every=1)
        for step in loop:
            for rows in step:
                step.backward(loss_of(model, rows))
            begun.append(loop.fold.gradients.current.next)
            lengths.append([bucket.length for bucket in loop.fold.gradients.buckets])
            step.fold()
            if average is not None:
                assert all(one.grad is None for one in average.parameters())
            optimizer.step()
            if average is not None:
                move(average, model)
        parameters = [*model.parameters(), *([] if average is None else average.parameters())]
        bits = b"".join(one.detach().cpu().numpy().tobytes() for one in parameters[:4])
        return sha256(bits).hexdigest(), lengths, begun


@pytest.mark.quick_on_gpus
@pytest.mark.parametrize(("ranks", "shards"), [(1, None), (2, None), (3, 4)])
@pytest.mark.parametrize("kind", COPIES[:3])
def test_a_copy_of_the_model_is_not_in_the_sums(kind: str, ranks: int, shards: int | None, on_ranks: OnRanks) -> None:
    """Buckets of some bytes: each has one parameter, and their order is that of backward."""
    alone = on_ranks(ranks, train_with_a_copy, "none", shards, 1e-6)
    with_copy = on_ranks(ranks, train_with_a_copy, kind, shards, 1e-6)
    for (bits, lengths, begun), (wanted, wanted_lengths, wanted_begun) in zip(with_copy, alone, strict=True):
        assert bits == wanted
        assert lengths[1:] == wanted_lengths[1:]
        assert begun[1:] == wanted_begun[1:]
        if kind != "deepcopy":  # that is known only after the first fold
            assert lengths[0] == wanted_lengths[0]
            assert begun[0] == wanted_begun[0]


def distill_from_an_average(detached: bool) -> list[list[torch.Tensor | None]]:
    """The gradients of the model and of its average, through which the loss goes too unless it is detached."""
    found = []
    with dl.join_world() as world:
        model = network()
        average = AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = {"model": model, "optimizer": optimizer, "average": average}
        for step in dl.Loop(dl.Batches(samples(24), 6, world, shuffle=False), 1, state=state, progress=False):
            for rows in step:
                aim = average(rows).detach() if detached else average(rows)
                step.backward(loss_of(model, rows) + (model(rows) - 2 * aim).square().mean())
            step.fold()
            found.append([one.grad for one in (*model.parameters(), *average.parameters())])
            found[-1] = [None if one is None else one.clone() for one in found[-1]]
            optimizer.step()
    return found


def test_what_a_loss_gives_an_averaged_model_is_dropped(on_ranks: OnRanks) -> None:
    wanted = on_ranks(2, distill_from_an_average, True)
    assert all(map(_same, on_ranks(2, distill_from_an_average, False), wanted))
    assert [one is None for one in wanted[0][-1]] == [False] * 4 + [True] * 4


def train_the_average(way: str) -> list[bool]:
    """Whether each parameter of an averaged model moves where that is the model that is trained."""
    with dl.join_world() as world:
        model = AveragedModel(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = [one.detach().clone() for one in model.parameters()]
        state: dict[str, object] = {"model": model}
        state |= {"optimizer": optimizer} if way == "optimizer in state" else {}
        for step in dl.Loop(dl.Batches(samples(24), 6, world, shuffle=False), 1, state=state, progress=False):
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()
            optimizer.step()
        return [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]


@pytest.mark.parametrize("way", ["optimizer in state", "optimizer elsewhere"])
def test_an_averaged_model_that_is_trained_is_not_left_out(way: str, on_ranks: OnRanks) -> None:
    for moved in on_ranks(2, train_the_average, way):
        assert all(moved)


def body_and_heads() -> tuple[nn.Module, nn.ModuleList]:
    heads = nn.ModuleList([nn.Linear(6, 1).double() for _ in range(3)])
    for one in heads.parameters():
        nn.init.constant_(one, 0.5)
    return network()[0], heads


def weight_of(numbers: torch.Tensor) -> float:
    return float(numbers[0] % 5 + 1)


def fold_by_turns(shards: int | None, more_losses: bool, weighted: bool = False) -> list[list[torch.Tensor | None]]:
    """Three heads, used by some steps and some shards alone."""
    found = []
    with dl.join_world() as world:
        body, heads = body_and_heads()
        model = nn.ModuleDict({"body": body, "heads": heads})
        batches = dl.Batches((samples(24), torch.arange(24)), 6, world, shards=shards, shuffle=False)
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False, check_replicas_every=0):
            for rows, numbers in step:
                used = [0] if step.iteration == 1 else [0, step.iteration - 2] if int(numbers[-1]) % 6 > 2 else [0]
                losses = [heads[one](torch.tanh(body(rows))).square().mean() for one in used]
                weight = weight_of(numbers) if weighted else None
                if more_losses and len(losses) > 1:
                    step.backward(losses[0], more_losses=True, weight=weight)
                    step.backward(losses[1], weight=weight)
                else:
                    step.backward(torch.stack(losses).sum(), weight=weight)
            step.fold()
            found.append([None if one.grad is None else one.grad.clone() for one in model.parameters()])
    return found


def plain_turns(shards: int, weighted: bool = False) -> list[list[torch.Tensor | None]]:
    found = []
    body, heads = body_and_heads()
    model = nn.ModuleDict({"body": body, "heads": heads})
    pairs = list(zip(samples(24).split(6), torch.arange(24).split(6), strict=True))
    for iteration, (mini_batch, numbers) in enumerate(pairs, 1):
        model.zero_grad()
        total = sum(map(weight_of, numbers.tensor_split(shards)))
        for rows, those in zip(mini_batch.tensor_split(shards), numbers.tensor_split(shards), strict=True):
            used = [0] if iteration == 1 else [0, iteration - 2] if int(those[-1]) % 6 > 2 else [0]
            loss = torch.stack([heads[one](torch.tanh(body(rows))).square().mean() for one in used]).sum()
            (loss * (weight_of(those) / total if weighted else len(rows) / 6)).backward()
        found.append([None if one.grad is None else one.grad.clone() for one in model.parameters()])
    return found


@pytest.mark.parametrize(("more_losses", "weighted"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("ranks", "shards"), [(1, None), (2, None), (1, 3), (3, 3), (2, 3)])
def test_what_gets_its_first_gradient_later_counts_in_that_step(
    ranks: int, shards: int | None, more_losses: bool, weighted: bool, on_ranks: OnRanks
) -> None:
    wanted = plain_turns(shards or ranks, weighted)
    with torch.random.fork_rng():
        results = on_ranks(ranks, fold_by_turns, shards, more_losses, weighted)
    for found in results:
        for step, (one, other) in enumerate(zip(found, wanted, strict=True), 1):
            assert [gradient is None for gradient in one] == [gradient is None for gradient in other], step
            for gradient, plain in zip(one, other, strict=True):
                if gradient is not None and plain is not None:
                    assert torch.allclose(gradient, plain, rtol=1e-12, atol=1e-15)
    assert all(map(_same, results, [results[0]] * ranks))


def _same(one: list[list[torch.Tensor | None]], other: list[list[torch.Tensor | None]]) -> bool:
    pairs = [pair for steps in zip(one, other, strict=True) for pair in zip(*steps, strict=True)]
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def give_a_first_gradient_that_is_infinite(world: dl.World, folder: str) -> None:
    """Of a square root at 0, where the loss is finite."""
    model = network()
    late = nn.ParameterList([torch.zeros(2, dtype=torch.float64)])
    state = {"model": model, "late": late}
    for step in dl.Loop(dl.Batches(samples(24), 6, world, shuffle=False), 1, state=state, progress=False):
        for rows in step:
            loss = loss_of(model, rows)
            step.backward(loss + late[0].sqrt().sum() if step.iteration == 2 and world.rank == 0 else loss)
        step.fold()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_first_gradient_that_is_not_finite_is_found(ranks: int, refused: Refused) -> None:
    said = r"late\.0|In step 2 one is not"  # a GPU's host does not know which
    refused(ranks, give_a_first_gradient_that_is_infinite, by=ALL, kind="FloatingPointError", said=said)


def test_its_first_gradients_are_added_in_the_shards_own_places(on_ranks: OnRanks) -> None:
    """Of four shards the last three give it one: g2 + (g3 + g4), on any number of ranks."""
    with torch.random.fork_rng():
        first, *others = [found for ranks in (1, 2, 3) for found in on_ranks(ranks, fold_by_turns, 4, False)]
    assert all(_same(first, found) for found in others)


def plans_of_heads_by_turns() -> list[int]:
    """How often the sums were laid out anew, up to each step; the heads are used by turns, from the second step on."""
    plans: list[int] = []
    with dl.join_world() as world:
        body, heads = body_and_heads()
        state = {"model": nn.ModuleDict({"body": body, "heads": heads})}
        loop = dl.Loop(dl.Batches(samples(24), 4, world, shuffle=False), 1, state=state, progress=False)
        seen: list[object] = []
        for step in loop:
            for rows in step:
                step.backward(heads[max(0, step.iteration - 2) % 2](torch.tanh(body(rows))).square().mean())
            step.fold()
            if not any(loop.fold.gradients.buckets is one for one in seen):
                seen.append(loop.fold.gradients.buckets)
            plans.append(len(seen))
    return plans


def test_what_got_a_gradient_once_stays_in_the_plan(on_ranks: OnRanks) -> None:
    """Only the first fold, and the first step of the second head, lead to another plan."""
    assert on_ranks(2, plans_of_heads_by_turns) == [[1, 1, 2, 2, 2, 2]] * 2


def give_a_left_out_parameter_a_gradient_of_the_scripts_own() -> str:
    with dl.join_world() as world:
        model = network()
        spare = nn.Linear(4, 1).double()
        batches = dl.Batches(samples(24), 6, world, shuffle=False)
        for step in dl.Loop(batches, 1, state={"model": model, "spare": spare}, progress=False):
            for rows in step:
                if step.iteration == 2:
                    spare(rows).mean().backward()
                    with pytest.raises(RuntimeError) as caught:
                        step.backward(loss_of(model, rows))
                    return str(caught.value)
                step.backward(loss_of(model, rows))
            step.fold()
    return ""


def test_a_left_out_parameter_takes_no_gradient_of_another_backward(on_ranks: OnRanks) -> None:
    (said,) = on_ranks(1, give_a_left_out_parameter_a_gradient_of_the_scripts_own)
    assert "step.backward alone makes gradients. spare.weight got one from another backward" in said
