"""Recurrent networks over chunks of sequences, against one process over whole sequences.

The bound is 1e-10 relative to the largest element of each tensor: some hundred steps of float64 arithmetic through a
recurrent network, in which only the order of sums differs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
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
from tests.support.training import loop_on

pytestmark = [pytest.mark.covers("D9"), pytest.mark.on_gpus_too]

BOUND = 1e-10
LANES = 5
CHUNK = 4
EPOCHS = 2

Outputs = dict[int, torch.Tensor]


def loop_over(
    world: dl.World, kind: str, sequences: Any = None, epochs: int = 1, shards: int | None = None, **options: Any
) -> tuple[Recurrent, torch.optim.Optimizer, dl.Loop]:
    model = Recurrent(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    data = make_sequences() if sequences is None else sequences
    batches = dl.SequenceBatches(data, LANES, CHUNK, world, shards=shards, shuffle=False)
    return model, optimizer, loop_on(batches, model, optimizer, epochs=epochs, **options)


def forward_of(model: nn.Module) -> Any:
    """The forward of an evaluation."""

    def forward(_: nn.Module, chunk: dl.SequenceChunk) -> torch.Tensor:
        outputs, chunk.hidden = model(chunk.data[0], chunk.hidden)
        return chunk.unpad(outputs)

    return forward


def feed(step: dl.Step, model: nn.Module) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """A pass: each chunk, the state before it, and its outputs."""
    for chunk in step:
        before = chunk.hidden
        inputs, classes = chunk.data
        outputs, chunk.hidden = model(inputs, before)
        step.backward(cross_entropy(chunk.unpad(outputs), chunk.unpad(classes)))
        yield chunk, before, outputs.detach()
    step.fold()


def train(kind: str) -> tuple[list[Tensors], Outputs]:
    """What `by_hand` returns, on ranks; the logits are those of this rank's sequences."""
    outcomes = []
    logits: dict[int, list[torch.Tensor]] = {}
    with dl.join_world(seed=0) as world:
        model, optimizer, loop = loop_over(world, kind, epochs=EPOCHS)
        for step in loop:
            for chunk, _, outputs in feed(step, model):
                for row, number in enumerate(chunk.sequences.tolist()):
                    if chunk.starts[row]:
                        logits[number] = []
                    logits[number].append(outputs[row, : chunk.lengths[row]])
            gradients = gradients_of(model)
            optimizer.step()
            outcomes.append([*gradients, *values_of(model)])
    return outcomes, {number: torch.cat(parts) for number, parts in logits.items()}


@pytest.mark.parametrize(("ranks", "kind"), [(1, "GRU"), (3, "LSTM"), (3, "GRU")])
def test_ranks_give_the_gradients_and_outputs_of_one_process_that_feeds_each_sequence_alone(
    ranks: int, kind: str, on_ranks: OnRanks
) -> None:
    results = on_ranks(ranks, train, kind)
    steps, wanted = by_hand(kind, LANES, CHUNK, EPOCHS)
    assert len(steps) == EPOCHS * 7  # in the last two a single lane has a row, so some ranks have none
    for number, (_, *step) in enumerate(steps):
        assert distance(same_on_all([outcome[number] for outcome, _ in results]), step) < BOUND
    found = [(number, one) for _, own in results for number, one in own.items()]
    assert sorted(number for number, _ in found) == [*range(len(LENGTHS))]  # each sequence stayed on one rank
    assert all(distance([one], [wanted[number]]) < BOUND for number, one in found)


# -- bits, and resuming ------------------------------------------------------------------------------------


class InADict(nn.Module):
    """A cell that keeps its states in a dict of lists, with the rows in dimension 0."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, WIDTH)
        self.logits = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        outputs = []
        for step in inputs.unbind(1):
            state = {"cell": list(self.cell(step, None if state is None else tuple(state["cell"])))}
            outputs.append(state["cell"][0])
        return self.logits(torch.stack(outputs, 1)), state


def bits(
    kind: str, folder: str | None = None, stop_at: int | None = None, **keywords: Any
) -> tuple[list[int], Tensors]:
    """The iterations made, and the parameters at the end."""
    made = []
    torch.manual_seed(1)
    with suppress(dl.Stopped), dl.join_world(seed=0) as world:
        model = InADict() if kind == "dict" else Recurrent(kind, 0.2, torch.float32)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        sequences = make_sequences(LENGTHS, torch.float32)
        batches = dl.SequenceBatches(sequences, 6, 3, world, shards=4, batch_dim=0 if kind == "dict" else 1)
        loop = loop_on(batches, model, optimizer, epochs=EPOCHS, run_dir=folder, **keywords)
        for step in loop:
            if step.iteration == stop_at:
                loop.stop()
            for _ in feed(step, model):
                pass
            optimizer.step()
            made.append(step.iteration)
    return made, values_of(model)


@pytest.mark.parametrize(
    ("kind", "first", "then", "stop_at"), [("LSTM", 2, 1, 4), ("GRU", 1, 3, 14), ("dict", 3, 2, 8)]
)
@pytest.mark.slow
def test_fixed_shards_give_the_same_bits_on_any_number_of_ranks_also_if_it_changes_inside_an_epoch(
    kind: str, first: int, then: int, stop_at: int, on_ranks: OnRanks, tmp_path: Any
) -> None:
    made, whole = on_ranks(4 - first, bits, kind)[0]
    assert made == [*range(1, 19)]
    assert on_ranks(first, bits, kind, str(tmp_path), stop_at, save_every=3)[0][0] == made[:stop_at]
    after = on_ranks(then, bits, kind, str(tmp_path))
    assert after[0][0] == made[stop_at:]
    assert is_same(same_on_all([values for _, values in after]), whole)


# -- several passes, skipped steps, evaluation -------------------------------------------------------------


def two_passes() -> list[list[Tensors]]:
    """For each step the states before the chunks of each of its two passes."""
    with dl.join_world(seed=0) as world:
        model, _, loop = loop_over(world, "GRU")
        return [
            [[before.clone() for _, before, _ in feed(step, model) if before is not None] for _ in range(2)]
            for step in loop
        ]


@pytest.mark.quick_on_gpus
def test_a_second_pass_over_a_step_begins_with_the_state_before_the_step(on_ranks: OnRanks) -> None:
    for seen in on_ranks(2, two_passes):
        assert all(is_same(first, second) for first, second in seen)
        assert not any(state.requires_grad for first, _ in seen for state in first)
        assert any(first for first, _ in seen)
        assert any(not is_same(one[0], other[0]) for one, other in pairwise(seen))


def tensors_by_shard() -> tuple[int, list[int]]:
    """The number of different sizes of shards in a run, and the tensors, (S,), that are there after each epoch."""
    alive = []
    sizes = set[tuple[int, ...]]()
    draw = random.Random(1)
    with only_new_objects(), dl.join_world(seed=0) as world:
        model = Recurrent("GRU")
        sequences = make_sequences([draw.randrange(1, 40) for _ in range(150)])
        batches = dl.SequenceBatches(sequences, 12, 9, world, shards=7)
        for epoch in loop_on(batches, model, epochs=3).epochs():
            for step in epoch:
                assert sum(1 for _ in feed(step, model)) <= 7
            sizes |= {batches.mini_batch(epoch.number, position).sizes for position in range(len(batches))}
            same = (one for one in living_tensors() if one.shape == (batches.shards,) and one.is_floating_point())
            alive.append(sum(1 for _ in same))  # a list that is kept would be counted after the next epoch
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
    sequences = make_sequences()
    if bad_step:
        sequences[LONGEST][0][CHUNK * (bad_step - 1) : CHUNK * bad_step] = torch.nan
    with dl.join_world(seed=0) as world:
        model, _, loop = loop_over(world, "LSTM", sequences, on_nonfinite="skip")
        for step in loop:
            seen.append(dict[int, torch.Tensor]())
            for chunk, before, _ in feed(step, model):
                states = torch.zeros(1, len(chunk.sequences)) if before is None else torch.cat(before)
                seen[-1] |= {number: states[:, row] for row, number in enumerate(chunk.sequences.tolist())}
        return loop.skipped, seen


@pytest.mark.covers("D10")
@pytest.mark.parametrize("bad_step", [1, 3])
def test_a_chunk_that_is_not_finite_costs_one_step_and_is_not_carried_on(bad_step: int, on_ranks: OnRanks) -> None:
    expected = on_ranks(2, before_each_step, 0)
    for (skipped, seen), (_, plain) in zip(on_ranks(2, before_each_step, bad_step), expected, strict=True):
        assert skipped == 1
        for step, (states, others) in enumerate(zip(seen, plain, strict=True), 1):
            for number, state in states.items():
                assert state.isfinite().all()
                if number != LONGEST or step <= bad_step:
                    assert torch.equal(state, others[number])
                elif step == bad_step + 1:  # as before the bad chunk, zeros where it was the first one
                    assert torch.equal(state, seen[bad_step - 1][number].expand_as(state))


def evaluated(chunk_length: int, shards: int | None) -> tuple[dict[str, float], torch.Tensor]:
    with dl.join_world(seed=0) as world:
        model = Recurrent("LSTM")
        batches = dl.SequenceBatches(make_sequences(), LANES, chunk_length, world, shards=shards, shuffle=False)

        forward = forward_of(model)

        def hits(logits: torch.Tensor, chunk: dl.SequenceChunk) -> torch.Tensor:
            return logits.argmax(1) == chunk.unpad(chunk.data[1])

        found = [dl.evaluate(model, batches, forward=forward, accuracy=hits) for _ in range(2)]
        assert found[0] == found[1]
        return found[0], dl.predict(model, batches, forward=forward)


def train_and_evaluate(evaluates: bool) -> Tensors:
    """The parameters after an epoch; with evaluations of the same batches within it."""
    with dl.join_world(seed=0) as world:
        model, optimizer, loop = loop_over(world, "GRU", shards=3)
        for step in loop:
            for _ in feed(step, model):
                pass
            optimizer.step()
            if evaluates:
                dl.evaluate(model, loop.batches, forward=forward_of(model), mean=lambda outputs, _: outputs.mean(1))
        return values_of(model)


@pytest.mark.covers("H8")
def test_an_evaluation_within_an_epoch_of_the_same_sequences_leaves_their_hidden_states(on_ranks: OnRanks) -> None:
    assert is_same(on_ranks(2, train_and_evaluate, True)[0], on_ranks(2, train_and_evaluate, False)[0])


@pytest.mark.parametrize(("ranks", "shards", "chunk_length"), [(1, None, 20), (3, None, 3), (2, 3, 1)])
def test_evaluation_and_prediction_count_each_time_step_once_and_chunks_do_not_show(
    ranks: int, shards: int | None, chunk_length: int, on_ranks: OnRanks
) -> None:
    model = Recurrent("LSTM")
    sequences = make_sequences()
    with torch.no_grad():
        logits = torch.cat([model(inputs[None], None)[0][0] for inputs, _ in sequences])
    right = (logits.argmax(1) == torch.cat([classes for _, classes in sequences])).double().mean()
    for found, predicted in on_ranks(ranks, evaluated, chunk_length, shards):
        assert found == {"accuracy": pytest.approx(float(right)), "samples": sum(LENGTHS)}
        assert distance([predicted], [logits]) < BOUND
