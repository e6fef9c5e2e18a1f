"""Recurrent networks over chunks of sequences, against one process over whole sequences.

The bound is 1e-10 relative to the largest element of each tensor: some hundred steps of float64 arithmetic through a
recurrent network, in which only the order of sums differs.
"""

from __future__ import annotations

import random
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from tests.support.comparing import Tensors, distance, gradients_of, is_same, same_on_all, values_of
from tests.support.harness import OnRanks
from tests.support.memory import living_tensors, only_new_objects
from tests.support.sequences import CLASSES, LENGTHS, RATE, WIDTH, Recurrent, by_hand, make_sequences

pytestmark = pytest.mark.on_gpus_too

BOUND, LANES, CHUNK, EPOCHS = 1e-10, 5, 4, 2

Outputs = dict[int, torch.Tensor]


def averaged(world: dl.World, states: list[torch.Tensor]) -> list[torch.Tensor]:
    """States of all rows of all ranks, averaged; each (layers, n, WIDTH)."""
    sums = torch.stack([one.detach().sum(1) for one in states]) if states else torch.zeros(2, 2, WIDTH).double()
    rows = world.sum(torch.tensor(float(states[0].shape[1] if states else 0)))
    means = world.sum(sums) / rows
    return [mean[:, None].expand_as(one).contiguous() for mean, one in zip(means, states, strict=False)]


def train(kind: str, average: bool = False) -> tuple[list[Tensors], Outputs]:
    """What `by_hand` returns, on ranks; the logits are those of this rank's sequences."""
    outcomes = []
    with dl.join_world(seed=0) as world:
        model = Recurrent(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        batches = dl.SequenceBatches(make_sequences(), LANES, CHUNK, world, shuffle=False)
        logits: dict[int, list[torch.Tensor]] = {}
        for step in dl.Loop(batches, EPOCHS, state={"model": model, "optimizer": optimizer}, progress=False):
            used, states = None, list[torch.Tensor]()
            for chunk in step:
                inputs, classes = chunk.data
                outputs, state = model(inputs, chunk.hidden)
                used, states = chunk, list(state) if isinstance(state, tuple) else [state, state]
                chunk.hidden = state
                step.backward(cross_entropy(chunk.unpad(outputs), chunk.unpad(classes)))
                for row, number in enumerate(chunk.sequences.tolist()):
                    if chunk.starts[row]:
                        logits[number] = []
                    logits[number].append(outputs[row, : chunk.lengths[row]].detach())
            result = step.fold()
            if average:
                means = averaged(world, states)
                if used is not None:
                    used.hidden = tuple(means) if kind == "LSTM" else means[0]
            gradients = gradients_of(model)
            optimizer.step()
            outcomes.append([result.loss, *gradients, *values_of(model)])
    return outcomes, {number: torch.cat(parts) for number, parts in logits.items()}


@cache
def wanted(kind: str) -> tuple[list[Tensors], Outputs]:
    return by_hand(kind, LANES, CHUNK, EPOCHS)


@pytest.mark.covers("D9")
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_give_the_gradients_and_outputs_of_one_process_that_feeds_each_sequence_alone(
    ranks: int, kind: str, on_ranks: OnRanks
) -> None:
    results = on_ranks(ranks, train, kind)
    steps, outputs = wanted(kind)
    assert len(steps) == EPOCHS * 7  # in the last two a single lane has a row, so some ranks have none
    for number, step in enumerate(steps):
        found = same_on_all([outcome[number] for outcome, _ in results])
        assert distance(found, step) < BOUND
    logits = {number: one for _, own in results for number, one in own.items()}
    assert logits.keys() == outputs.keys()
    assert sum(len(own) for _, own in results) == len(LENGTHS)  # each sequence stayed on one rank
    assert all(distance([logits[number]], [one]) < BOUND for number, one in outputs.items())


@pytest.mark.covers("D9")
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_averaged_hidden_state_gives_other_gradients(ranks: int, kind: str, on_ranks: OnRanks) -> None:
    results = on_ranks(ranks, train, kind, True)
    steps, outputs = wanted(kind)
    assert distance(results[0][0][0], steps[0]) < BOUND  # nothing was carried yet
    assert all(distance(results[0][0][number], steps[number]) > 1e-3 for number in range(1, 5))
    logits = {number: one for _, own in results for number, one in own.items()}
    assert distance([logits[2]], [outputs[2]]) > 1e-3


def forward_in_chunks(kind: str, length: int) -> Outputs:
    """The logits of this rank's sequences."""
    with dl.join_world(seed=0) as world, torch.no_grad():
        model, logits = Recurrent(kind), dict[int, list[torch.Tensor]]()
        for chunk in dl.SequenceBatches(make_sequences(), LANES, length, world, shuffle=False):
            outputs, chunk.hidden = model(chunk.data[0], chunk.hidden)
            for row, number in enumerate(chunk.sequences.tolist()):
                logits.setdefault(number, []).append(outputs[row, : chunk.lengths[row]])
    return {number: torch.cat(parts) for number, parts in logits.items()}


@pytest.mark.covers("D9")
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("length", [1, 3, 4, 20])
def test_chunk_boundaries_do_not_show_in_the_outputs(length: int, kind: str, on_ranks: OnRanks) -> None:
    model, found = Recurrent(kind), dict[int, torch.Tensor]()
    for own in on_ranks(2, forward_in_chunks, kind, length):
        found |= own
    assert len(found) == len(LENGTHS)
    for number, (inputs, _) in enumerate(make_sequences()):
        with torch.no_grad():
            assert distance([found[number]], [model(inputs[None], None)[0][0]]) < BOUND


# -- bits, and resuming ------------------------------------------------------------------------------------

SHARDS = 4


class InADict(nn.Module):
    """A cell that keeps its states in a dict of lists, with the rows in dimension 0."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.logits = nn.LSTMCell(3, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        outputs = []
        for step in inputs.unbind(1):
            state = {"cell": list(self.cell(step, None if state is None else tuple(state["cell"])))}
            outputs.append(state["cell"][0])
        return self.logits(torch.stack(outputs, 1)), state


def bits(
    kind: str, folder: str | None = None, stop_at: int | None = None, shards: int | None = SHARDS, **keywords: Any
) -> tuple[list[int], Tensors]:
    """The iterations made, and the parameters at the end."""
    made = []
    torch.manual_seed(1)
    with suppress(dl.Stopped), dl.join_world(seed=0) as world:
        model = InADict() if kind == "dict" else Recurrent(kind, 0.2, torch.float32)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        sequences = make_sequences(LENGTHS, torch.float32)
        more = {"shards": shards, "batch_dim": 0 if kind == "dict" else 1}
        batches = dl.SequenceBatches(sequences, 6, 3, world, **more)  # type: ignore[arg-type]
        state = {"model": model, "optimizer": optimizer}
        loop = dl.Loop(batches, 2, state=state, run_dir=folder, progress=False, **keywords)
        for step in loop:
            if step.iteration == stop_at:
                loop.stop()
            for chunk in step:
                inputs, classes = chunk.data
                outputs, chunk.hidden = model(inputs, chunk.hidden)
                step.backward(cross_entropy(chunk.unpad(outputs), chunk.unpad(classes)))
            step.fold()
            optimizer.step()
            made.append(step.iteration)
    return made, values_of(model)


@pytest.mark.covers("D9")
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "dict"])
def test_fixed_shards_give_the_same_bits_on_any_number_of_ranks(kind: str, on_ranks: OnRanks) -> None:
    [(made, alone)] = on_ranks(1, bits, kind)
    assert made == list(range(1, 2 * 9 + 1))
    for ranks in (2, 3):
        assert is_same(same_on_all([values for _, values in on_ranks(ranks, bits, kind)]), alone)


@pytest.mark.covers("D9")
@pytest.mark.parametrize(("first", "then", "stop_at"), [(2, 1, 4), (1, 3, 14), (3, 2, 8), (2, 3, 9)])
@pytest.mark.parametrize("kind", ["LSTM", "dict"])
def test_a_run_that_resumes_inside_an_epoch_on_other_ranks_has_the_same_bits(
    kind: str, first: int, then: int, stop_at: int, on_ranks: OnRanks, tmp_path: Any
) -> None:
    whole = on_ranks(1, bits, kind)[0][1]
    before = on_ranks(first, bits, kind, str(tmp_path), stop_at)
    after = on_ranks(then, bits, kind, str(tmp_path))
    assert before[0][0][-1] == stop_at
    assert after[0][0] == list(range(stop_at + 1, 19))
    assert is_same(same_on_all([values for _, values in after]), whole)


def test_a_run_with_a_shard_per_rank_resumes_on_other_ranks(on_ranks: OnRanks, tmp_path: Any) -> None:
    whole = on_ranks(2, bits, "GRU", None, None, None)[0][1]
    on_ranks(3, bits, "GRU", str(tmp_path), 5, None)
    after = on_ranks(2, bits, "GRU", str(tmp_path), None, None)
    assert after[0][0] == list(range(6, 19))
    # Dropout draws by shard, so only the size is known. Without the states the first chunk would raise.
    assert distance(same_on_all([values for _, values in after]), whole) < 1


def test_checkpoints_inside_an_epoch_change_no_bit(on_ranks: OnRanks, tmp_path: Any) -> None:
    plain = on_ranks(2, bits, "LSTM")[0][1]
    assert is_same(on_ranks(2, bits, "LSTM", str(tmp_path), save_every=5)[1][1], plain)


# -- several passes, evaluation ----------------------------------------------------------------------------


def two_passes() -> list[tuple[Tensors, Tensors]]:
    """For each step the state before each of its two passes."""
    seen = []
    with dl.join_world(seed=0) as world:
        model = Recurrent("GRU")
        batches = dl.SequenceBatches(make_sequences(), LANES, CHUNK, world)
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
            passes = []
            for _ in range(2):
                states = []
                for chunk in step:
                    before = chunk.hidden
                    states += [] if before is None else [before.clone()]
                    outputs, chunk.hidden = model(chunk.data[0], before)
                    assert before is None or not before.requires_grad
                    step.backward(chunk.unpad(outputs).square().mean())
                step.fold()
                passes.append(states)
            seen.append((passes[0], passes[1]))
    return seen


@pytest.mark.quick_on_gpus
def test_a_second_pass_over_a_step_begins_with_the_state_before_the_step(on_ranks: OnRanks) -> None:
    for seen in on_ranks(2, two_passes):
        assert all(is_same(first, second) for first, second in seen)
        assert any(first for first, _ in seen)
        assert any(not is_same(one[0], other[0]) for one, other in pairwise(seen))


def tensors_by_shard() -> tuple[int, list[int]]:
    """The number of different sizes of shards in a run, and the tensors, (S,), that are there after each epoch."""
    alive, sizes, draw = [], set[tuple[int, ...]](), random.Random(1)
    with only_new_objects(), dl.join_world(seed=0) as world:
        model = Recurrent("GRU")
        sequences = make_sequences([draw.randrange(1, 40) for _ in range(150)])
        batches = dl.SequenceBatches(sequences, 12, 9, world, shards=7)
        loop = dl.Loop(batches, 3, state={"model": model}, progress=False)
        for epoch in loop.epochs():
            for step in epoch:
                for chunk in step:
                    outputs, chunk.hidden = model(chunk.data[0], chunk.hidden)
                    step.backward(chunk.unpad(outputs).square().mean())
                step.fold()
            sizes |= {batches.mini_batch(epoch.number, position).sizes for position in range(len(batches))}
            same = (one for one in living_tensors() if one.shape == (batches.shards,) and one.is_floating_point())
            alive.append(sum(1 for _ in same))
        return len(sizes), alive


@pytest.mark.slow
def test_a_long_run_keeps_no_tensor_of_its_earlier_steps(on_ranks: OnRanks) -> None:
    for sizes, alive in on_ranks(2, tensors_by_shard):
        assert sizes > 60
        assert max(alive) < 30  # the shares of the last sizes of shards


LONGEST = 2  # the sequence with a chunk in each step


def before_each_step(bad_step: int) -> tuple[int, list[Outputs]]:
    """How many steps were skipped; and by step the state before it of each sequence. A chunk of the longest is NaN."""
    seen = []
    with dl.join_world(seed=0) as world:
        model = Recurrent("LSTM")
        batches = dl.SequenceBatches(make_sequences(), LANES, CHUNK, world, shuffle=False)
        loop = dl.Loop(batches, 1, state={"model": model}, progress=False, on_nonfinite="skip")
        for step in loop:
            seen.append(dict[int, torch.Tensor]())
            for chunk in step:
                inputs, state = chunk.data[0], chunk.hidden
                for row, number in enumerate(chunk.sequences.tolist()):
                    seen[-1][number] = torch.zeros(()) if state is None else torch.stack([one[:, row] for one in state])
                    if number == LONGEST and step.iteration == bad_step:
                        inputs[row] = torch.nan
                outputs, chunk.hidden = model(inputs, state)
                step.backward(chunk.unpad(outputs).square().mean())
            step.fold()
        return loop.skipped, seen


@pytest.mark.covers("D9", "D10")
@pytest.mark.parametrize("bad_step", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_chunk_that_is_not_finite_costs_one_step_and_is_not_carried_on(
    ranks: int, bad_step: int, on_ranks: OnRanks
) -> None:
    expected, results = on_ranks(ranks, before_each_step, 0), on_ranks(ranks, before_each_step, bad_step)
    assert [skipped for skipped, _ in results] == [1] * ranks
    for (_, seen), (_, plain) in zip(results, expected, strict=True):
        for step, (states, others) in enumerate(zip(seen, plain, strict=True), 1):
            for number, state in states.items():
                assert state.isfinite().all()
                if number != LONGEST or step <= bad_step:
                    assert torch.equal(state, others[number])
                elif step == bad_step + 1:  # as before the bad chunk, zeros where it was the first one
                    assert torch.equal(state, seen[bad_step - 1][number].expand_as(state))


def evaluated(shards: int | None) -> tuple[dict[str, float], torch.Tensor]:
    with dl.join_world(seed=0) as world:
        model = Recurrent("LSTM")
        batches = dl.SequenceBatches(make_sequences(), LANES, CHUNK, world, shards=shards, shuffle=False)

        def forward(_: nn.Module, chunk: dl.SequenceChunk) -> torch.Tensor:
            outputs, chunk.hidden = model(chunk.data[0], chunk.hidden)
            return chunk.unpad(outputs)

        def hits(logits: torch.Tensor, chunk: dl.SequenceChunk) -> torch.Tensor:
            return logits.argmax(1) == chunk.unpad(chunk.data[1])

        found = [dl.evaluate(model, batches, forward=forward, accuracy=hits) for _ in range(2)]
        assert found[0] == found[1]
        return found[0], dl.predict(model, batches, forward=forward)


def test_evaluation_and_prediction_count_each_time_step_once(on_ranks: OnRanks) -> None:
    model, sequences = Recurrent("LSTM"), make_sequences()
    with torch.no_grad():
        logits = torch.cat([model(inputs[None], None)[0][0] for inputs, _ in sequences])
    right = (logits.argmax(1) == torch.cat([classes for _, classes in sequences])).double().mean()
    for ranks, shards in ((1, None), (3, None), (2, 3)):
        for found, predicted in on_ranks(ranks, evaluated, shards):
            assert found == {"accuracy": pytest.approx(float(right)), "samples": sum(LENGTHS)}
            assert distance([predicted], [logits]) < BOUND
