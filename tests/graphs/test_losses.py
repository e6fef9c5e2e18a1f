"""A captured loss in a loop: the bits of the eager function, on any number of ranks and shards.

The graphs are those of `tests.support.graphs`, which replay a list of operations on a CPU that answers as a GPU does.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout

import ddp_loop as dl
from tests.support.cases import CASES, make, make_data
from tests.support.comparing import Tensors, is_same, same_on_all
from tests.support.graphs import cpu_graphs
from tests.support.harness import OnRanks

pytestmark = [
    pytest.mark.both_modes,
    pytest.mark.one_mode("asynchronous", "graphs are those of a GPU"),
    pytest.mark.covers("J12"),
]

SAMPLES, EPOCHS = 46, 2
HOST_READS = {"a branch not always taken"}  # in the forward


def train(
    name: str,
    batch_size: int,
    shards: int | None,
    *,
    captured: bool,
    drop: float = 0.0,
    folder: str = "",
    stop_at: int | None = None,
    loss_dtype: torch.dtype | None = None,
    scales: bool = False,
    autocasts: bool = False,
    **options: Any,
) -> tuple[Tensors, int, str | None]:
    """The state after the training with all losses and accuracies, the number of replays, and why there were none."""
    case = CASES[name]
    with cpu_graphs() if captured else nullcontext(), dl.join_world(device="cpu", seed=3) as world:
        model, criterion = make(case)
        model.to(torch.float32 if autocasts else torch.float64)
        loss_of: Any = criterion or cross_entropy
        modules = [model] if criterion is None else [model, criterion]
        optimizer = torch.optim.SGD([one for each in modules for one in each.parameters()], lr=0.05, momentum=0.9)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        if criterion is not None:
            state["criterion"] = criterion
        scaler = state["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scales)

        def compute(inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = (dropout(model(inputs), drop) if drop else model(inputs)).to(inputs.dtype)
            loss = loss_of(logits, labels)
            return loss if loss_dtype is None else loss.to(loss_dtype), (logits.argmax(1) == labels).double()

        call: Any = dl.capture(compute, world, state=state, **options) if captured else compute
        data = make_data(case.shape, SAMPLES)
        data = (data[0].float() if autocasts else data[0]), data[1]
        batches = dl.Batches(data, batch_size, world, shards=shards)
        more: dict[str, Any] = {"run_dir": folder or None, "progress": False, "allow_single_sample_shards": True}
        loop = dl.Loop(batches, EPOCHS, state=state, **more)
        found: Tensors = []
        with suppress(dl.Stopped), torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            for step in loop:
                case.before_step(model, step.iteration)
                for inputs, labels in step:
                    loss, hits = call(inputs, labels)
                    step.backward(scaler.scale(loss), accuracy=hits)
                result = step.fold()
                found += [result.loss.clone(), result.values[1].clone()]
                scaler.step(optimizer)
                scaler.update()
                if step.iteration == stop_at:
                    loop.stop()
        found = found[-4:]
        found += [one.detach().clone() for each in modules for one in each.state_dict().values()]
        found += [kept["momentum_buffer"].clone() for kept in optimizer.state.values()]
        return (found, call.replays, call.reason) if captured else (found, 0, None)


def compare(on_ranks: OnRanks, ranks: int, *arguments: Any, **options: Any) -> list[int]:
    """Require the bits of the eager function on all ranks; returns the replays of each rank."""
    eager = same_on_all([found for found, _, _ in on_ranks(ranks, train, *arguments, captured=False, **options)])
    captured = on_ranks(ranks, train, *arguments, captured=True, **options)
    assert is_same(same_on_all([found for found, _, _ in captured]), eager)
    assert {reason for _, _, reason in captured} == {None}
    return [replays for _, replays, _ in captured]


@pytest.mark.parametrize("name", [name for name in CASES if name not in HOST_READS])
def test_every_case_has_the_bits_of_the_eager_function_on_two_ranks(name: str, on_ranks: OnRanks) -> None:
    assert min(compare(on_ranks, 2, name, 8, None)) >= 3


@pytest.mark.parametrize("name", ["batch norm 2d", "a layer used twice", "spectral norm", "no batch norm"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_several_fixed_shards_have_the_bits_of_the_eager_function(name: str, ranks: int, on_ranks: OnRanks) -> None:
    replays = compare(on_ranks, ranks, name, 8, 4)
    assert min(replays) >= 20 // ranks


@pytest.mark.parametrize("name", ["batch norm 2d", "spectral norm"])
def test_one_rank_with_one_shard_has_the_bits_of_the_eager_function(name: str, on_ranks: OnRanks) -> None:
    assert compare(on_ranks, 1, name, 8, None) == [7]  # of 12: 3 to warm up, and 2 partial mini-batches


@pytest.mark.parametrize("shards", [None, 4])
def test_dropout_draws_from_the_streams_of_each_shard(shards: int | None, on_ranks: OnRanks) -> None:
    assert min(compare(on_ranks, 2, "batch norm 2d", 8, shards, drop=0.3)) >= 3


def test_shards_that_differ_by_one_sample_take_two_graphs(on_ranks: OnRanks) -> None:
    one, two = (compare(on_ranks, 1, "batch norm 2d", 10, 4, graphs=graphs)[0] for graphs in (1, 2))
    assert one < two


def test_a_loss_in_bfloat16_is_multiplied_after_its_backward(on_ranks: OnRanks) -> None:
    assert min(compare(on_ranks, 2, "batch norm 2d", 8, None, loss_dtype=torch.bfloat16)) >= 3


def test_autocast_around_the_loop_casts_the_weights_of_each_step(on_ranks: OnRanks) -> None:
    """Autocast keeps the weights that the first shard of a step has cast; the capture is in a later shard."""
    assert min(compare(on_ranks, 1, "batch norm 2d", 8, 6, autocasts=True)) >= 3


def test_a_loss_is_scaled_after_its_replay(on_ranks: OnRanks) -> None:
    assert min(compare(on_ranks, 2, "batch norm 2d", 8, 4, scales=True)) >= 3


@pytest.mark.covers("F4")
def test_a_run_that_was_stopped_resumes_with_the_same_bits(on_ranks: OnRanks, tmp_path: Path) -> None:
    options: dict[str, Any] = {"drop": 0.2, "folder": str(tmp_path)}
    whole, *_ = on_ranks(1, train, "batch norm 2d", 8, 4, captured=False, drop=0.2)[0]
    for stop_at, ranks in ((5, 2), (None, 1)):
        found = on_ranks(ranks, train, "batch norm 2d", 8, 4, captured=True, stop_at=stop_at, **options)
    assert is_same(same_on_all([one for one, _, _ in found]), whole)
    assert found[0][1] > 10


# -- gradients and their memory ----------------------------------------------------------------------------


def build(norm: bool = False) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(5)
    layers = [nn.Linear(6, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, 1)]
    return nn.Sequential(*layers).double(), torch.randn(9, 4, 6, dtype=torch.float64)


def accumulate(captured: bool) -> Tensors:
    """Gradients added up by a plain loop, over several backwards."""
    with cpu_graphs(), dl.join_world(device="cpu", seed=0) as world:
        model, inputs = build()

        def loss_of(rows: torch.Tensor) -> torch.Tensor:
            return model(rows).square().mean()  # type: ignore[no-any-return]

        call: Any = dl.capture(loss_of, world, state={"model": model}) if captured else loss_of
        found: Tensors = []
        for number, rows in enumerate(inputs):
            (2 * call(rows)).backward()
            if number % 3 == 2:
                found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
                model.zero_grad()
        assert not captured or call.replays == 6
        return found


def test_gradients_add_up_over_replays() -> None:
    assert is_same(accumulate(captured=True), accumulate(captured=False))


def held(captured: bool) -> Tensors:
    """Outputs whose backward comes after the forwards of all shards."""
    with cpu_graphs(), dl.join_world(device="cpu", seed=0) as world:
        model, inputs = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = {"model": model, "optimizer": optimizer}
        call: Any = dl.capture(lambda rows: model(rows), world, state=state) if captured else model
        batches = dl.Batches((inputs.flatten(0, 1),), 12, world, shards=3, shuffle=False)
        for step in dl.Loop(batches, 4, state=state, progress=False):
            for (rows,) in step:
                step.hold(call(rows))
            step.backward(step.gather().square().std())
            step.fold()
            optimizer.step()
        assert not captured or call.replays == 11  # one in each step: the others would overwrite what it holds
        return [one.detach().clone() for one in model.parameters()]


def test_a_call_before_the_backward_of_the_last_replay_runs_eagerly() -> None:
    assert is_same(held(captured=True), held(captured=False))


def test_a_second_backward_of_a_replay_is_refused() -> None:
    with cpu_graphs(), dl.join_world(device="cpu", seed=0) as world:
        model, inputs = build()
        call = dl.capture(lambda rows: model(rows).mean(), world, state={"model": model})
        for rows in inputs:
            loss = call(rows)
            loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=r"can be backpropagated once.* This one was backpropagated"):
            loss.backward()
        call(inputs[0])
        with pytest.raises(RuntimeError, match="can be backpropagated once"):
            loss.backward()


def test_results_keep_their_values_over_later_replays() -> None:
    with cpu_graphs(), dl.join_world(device="cpu", seed=0) as world:
        model, inputs = build()

        def compute(rows: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            outputs = model(rows)
            return outputs.mean(), {"largest": outputs.detach().max()}

        call = dl.capture(compute, world, state={"model": model})
        found = []
        for rows in inputs:
            loss, more = call(rows)
            loss.backward()
            found.append((loss.detach(), more["largest"]))
        assert call.replays == 6
        for (loss, largest), rows in zip(found, inputs, strict=True):
            outputs = model(rows)
            assert (loss, largest) == (outputs.mean(), outputs.max())


def test_running_statistics_are_updated_at_their_addresses_and_counted_as_written() -> None:
    with cpu_graphs(), dl.join_world(device="cpu", seed=0) as world:
        (model, inputs), (other, _) = build(norm=True), build(norm=True)
        call = dl.capture(lambda rows: model(rows).mean(), world, state={"model": model})
        tracked = model.get_buffer("1.num_batches_tracked")
        for rows in inputs:
            version, place = tracked._version, tracked.data_ptr()
            call(rows).backward()
            other(rows)
            assert tracked._version > version
            assert tracked.data_ptr() == place
        assert call.replays == 6
        assert is_same(list(model.buffers()), list(other.buffers()))
