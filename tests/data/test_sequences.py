"""The chunks in the mini-batches of sequences, and invalid sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused
from tests.support.sequences import LENGTHS, by_lane
from tests.support.sources import Mapped, shards_of
from tests.support.training import loop_on

pytestmark = pytest.mark.covers("D9")

LANES, LENGTH = 5, 4
Seen = list[list[tuple[int, list[int], bool, bool]]]


def numbered(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    """Sequences whose values are 100 times their number, and the time step."""
    return [100 * number + torch.arange(length) for number, length in enumerate(lengths)]


def chunks_of(batches: dl.SequenceBatches, epoch: int = 1, start: int = 0) -> Seen:
    """For each mini-batch this rank's rows: the sequence, the values, whether it starts and whether it ends."""
    return [
        [
            (number, row[:length].tolist(), bool(first), bool(last))
            for place in range(len(loaded.mini_batch.shards))
            for chunk in [loaded.data(place)]
            for number, row, length, first, last in zip(
                chunk.sequences.tolist(), chunk.data, chunk.lengths.tolist(), chunk.starts, chunk.ends, strict=True
            )
        ]
        for loaded in batches.epoch(epoch, start)
    ]


def seen_on_ranks(epochs: int, shards: int | None, shuffle: bool, lanes: int = LANES) -> list[Seen]:
    with dl.join_world(seed=3) as world:
        batches = dl.SequenceBatches(numbered(), lanes, LENGTH, world, shards=shards, shuffle=shuffle)
        assert len(batches) == 7
        return [chunks_of(batches, epoch) for epoch in range(1, epochs + 1)]


def together(ranks: list[list[Seen]]) -> list[Seen]:
    """The rows of all ranks, in rank order."""
    return [
        [[row for part in parts for row in part] for parts in zip(*epochs, strict=True)]
        for epochs in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("ranks", "shards", "lanes"), [(2, None, 5), (3, 4, 5), (2, 3, 14)])
def test_an_epoch_has_each_time_step_once_and_in_order_whatever_the_ranks(
    ranks: int, shards: int | None, lanes: int, shuffle: bool, on_ranks: OnRanks
) -> None:
    [alone] = on_ranks(1, seen_on_ranks, 3, None, shuffle, lanes)
    results = on_ranks(ranks, seen_on_ranks, 3, shards, shuffle, lanes)
    assert together(results) == alone
    for epoch in alone:
        found: dict[int, list[int]] = {}
        for rows in epoch:
            for number, values, first, last in rows:
                before = found.setdefault(number, [])
                assert first == (not before)
                before += values
                assert last == (len(before) == LENGTHS[number])
        assert found == {number: values.tolist() for number, values in enumerate(numbered())}
    assert (alone[0] != alone[1]) == shuffle
    for epochs in zip(*results, strict=True):  # each sequence stays on its rank
        assert sum(len({row[0] for rows in epoch for row in rows}) for epoch in epochs) == len(LENGTHS)


def test_without_shuffling_lanes_have_the_sequences_as_assigned(world: dl.World) -> None:
    batches = dl.SequenceBatches(numbered(), LANES, LENGTH, world, shuffle=False)
    rows = chunks_of(batches)
    first = [numbers[0] for numbers in by_lane(LENGTHS, LANES, LENGTH)]
    assert [number for number, *_ in rows[0]] == first
    assert chunks_of(batches, start=3) == rows[3:]
    assert [sum(batches.sizes(position)) for position in range(7)] == [sum(len(r[1]) for r in row) for row in rows]
    values = torch.cat(numbered())
    for loaded, row in zip(batches.epoch(1), rows, strict=True):
        at = loaded.mini_batch
        own = batches.indices(1, at.start, at.samples)
        assert values[own].tolist() == [value for one in row for value in one[1]]
    assert values[batches.indices(1, 7, 60)].tolist() == [v for row in rows for one in row for v in one[1]][7:67]


def drawn(index: int) -> dict[str, Any]:
    """A sequence with noise, in a dict of two parts."""
    return {"noise": torch.randn(LENGTHS[index], 2), "numbers": np.full(LENGTHS[index], index)}


def noise(epoch: int, start: int, lengths: tuple[int, ...] | None) -> list[tuple[float, int]]:
    """For each chunk of this rank: the sum of the noise, and the sum of the sequences' numbers."""
    with dl.join_world(seed=3) as world:
        batches = dl.SequenceBatches(Mapped(len(LENGTHS), drawn), LANES, LENGTH, world, shards=4, lengths=lengths)
        chunks = [chunk.data for _, _, chunk in shards_of(batches, epoch, start)]
        return [(chunk["noise"].sum().item(), chunk["numbers"].sum().item()) for chunk in chunks]


def test_a_data_set_draws_the_same_for_a_sequence_on_any_number_of_ranks(on_ranks: OnRanks) -> None:
    [alone] = on_ranks(1, noise, 2, 0, None)
    for ranks, lengths in ((2, None), (3, LENGTHS)):
        results = on_ranks(ranks, noise, 2, 0, lengths)
        assert sorted(part for own in results for part in own) == sorted(alone)
    [late] = on_ranks(1, noise, 2, 3, LENGTHS)
    assert late == alone[-len(late) :]
    [first] = on_ranks(1, noise, 1, 0, None)
    assert not {of_noise for of_noise, _ in first} & {of_noise for of_noise, _ in alone}


class Parts(NamedTuple):
    of: dict[str, torch.Tensor]


def test_parts_go_by_their_keys_in_whichever_order_a_sequence_has_them(world: dl.World) -> None:
    one, two = torch.ones(4), torch.full((4,), 2.0)
    sequences = [Parts({"one": one, "two": two}), Parts({"two": two, "one": one})]
    (chunk,) = dl.SequenceBatches(sequences, 2, 4, world, shuffle=False)
    assert (chunk.data.of["one"].unique().tolist(), chunk.data.of["two"].unique().tolist()) == ([1.0], [2.0])


def hidden_by_key() -> tuple[list[float], list[float]]:
    with dl.join_world() as world:
        batches = dl.SequenceBatches([torch.ones(8), torch.ones(8)], 2, 4, world, shuffle=False, shards=2)
        loaded = next(batches.epoch(1))
        for number, shard in enumerate(loaded.mini_batch.shards):
            hidden = {"one": torch.ones(1, 1, 1), "two": torch.full((1, 1, 1), 2.0)}
            loaded.data(number).hidden = dict(reversed(hidden.items())) if shard.number else hidden
        carried = batches.checkpointed(skips=False)["hidden"].state_dict()["state"]
        return carried["one"].flatten().tolist(), carried["two"].flatten().tolist()


@pytest.mark.parametrize("ranks", [1, 2])
def test_hidden_states_go_by_their_keys_in_whichever_order_a_shard_assigns_them(ranks: int, on_ranks: OnRanks) -> None:
    assert on_ranks(ranks, hidden_by_key) == [([1.0, 1.0], [2.0, 2.0])] * ranks


def test_batchify_makes_the_windows_of_a_word_level_language_model(world: dl.World) -> None:
    """As `batchify` and `get_batch` of pytorch/examples do, if the text divides."""
    tokens, lanes, window = torch.arange(60) * 7 % 61, 4, 6
    columns = tokens.view(lanes, -1).t()
    batches = dl.SequenceBatches(dl.batchify(tokens, lanes), lanes, window, world, shuffle=False)
    positions = range(0, len(columns) - 1, window)
    assert len(batches) == len(positions)
    for at, loaded in zip(positions, batches.epoch(1), strict=True):
        last = min(at + window, len(columns) - 1)
        chunk = loaded.data(0)
        assert torch.equal(chunk.data[0], columns[at:last].t())
        assert torch.equal(chunk.data[1], columns[at + 1 : last + 1].t())
        assert bool(chunk.starts.all()) == (at == 0)
    assert [len(inputs) for inputs, _ in dl.batchify(torch.arange(14), 4)] == [3, 3, 2, 2]


# -- what is refused ---------------------------------------------------------------------------------------

VALUES: list[tuple[Any, dict[str, Any], str]] = [  # sequences, options, what a ValueError says
    ([], {}, "at least one sequence. Got none"),
    ([torch.ones(3), torch.ones(0)], {}, "must have a time step. Sequence 1 has 0"),
    (numbered(), {"lanes": 0}, "lanes must be a whole number, 1 or more. Got 0"),
    (numbered(), {"length": 0}, "length must be a whole number, 1 or more. Got 0"),
    (numbered(), {"batch_dim": -1}, "batch_dim must be a whole number, 0 or more"),
    ([torch.tensor(1.0)], {}, "same first dimension"),
    ([(torch.ones(3), torch.ones(2))], {}, "same first dimension"),
    ([{"x": torch.ones(3)}, {"y": torch.ones(3)}], {}, "Sequence 1 has {'y': .*{'x': "),
    ([(torch.ones(3),), (torch.ones(3),) * 2], {}, "must have the same parts. Sequence 1"),
    (numbered(), {"lengths": [1, 2]}, "Got 2 for 11 sequences"),
    ([torch.ones(3)], {"lengths": [0]}, "Sequence 0 has 0"),
]
KINDS: list[tuple[Any, dict[str, Any], str]] = [  # sequences, options, what a TypeError says
    (["ab", "cd"], {}, "Sequence 0 is a str. Convert"),
    ("abcd", {}, "must be a list of tensors.*Got str"),
    (iter(numbered()), {}, "Got list_iterator"),
]


@pytest.mark.parametrize(("kind", "cases"), [(ValueError, VALUES), (TypeError, KINDS)])
def test_bad_sequences_are_refused(
    kind: type[Exception], cases: list[tuple[Any, dict[str, Any], str]], world: dl.World
) -> None:
    for sequences, options, said in cases:
        with pytest.raises(kind, match=said):
            dl.SequenceBatches(sequences, **{"lanes": 2, "length": 3, "world": world, **options})


def test_a_text_that_is_too_short_and_unpad_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two tokens or more for each lane. Got shape \(5,\) for 3 lanes"):
        dl.batchify(torch.arange(5), 3)
    with pytest.raises(TypeError, match=r"Got list\. Pass torch\.tensor\(tokens\)"):
        dl.batchify([1, 2, 3, 4], 2)  # type: ignore[arg-type]
    with dl.join_world() as world:
        chunk = next(iter(dl.SequenceBatches(numbered(), 3, LENGTH, world, shuffle=False)))
    with pytest.raises(ValueError, match=r"here \(3, 4\). Got \(4, 3, 2\). Build the network with batch_first=True"):
        chunk.unpad(torch.zeros(4, 3, 2))


Case = tuple[list[torch.Tensor], int, int]  # sequences, lanes, length


def changed(number: int, sequence: torch.Tensor) -> Case:
    sequences = numbered()
    sequences[number] = sequence
    return sequences, LANES, LENGTH


BAD_ON_RANK_1: list[tuple[Case, int, str]] = [  # which rank raises it
    (changed(2, torch.ones(0, dtype=torch.int64)), 1, "must have a time step. Sequence 2 has 0"),
    ((numbered(), 4, LENGTH), ALL, r"lanes of SequenceBatches must be the same on every rank\..* has lanes=4"),
    ((numbered(), LANES, 3), ALL, r"length of SequenceBatches must be the same on every rank\..* has length=3"),
    (changed(3, torch.arange(6)), ALL, "Every rank must be given the same data"),
    (changed(4, numbered()[4] + 1), ALL, "the values of the sequences.*different values on rank 1"),
]


def make_badly(world: dl.World, folder: str, bad: Case) -> None:
    sequences, lanes, length = bad if world.rank == 1 else (numbered(), LANES, LENGTH)
    dl.SequenceBatches(sequences, lanes, length, world)


def test_sequences_that_are_bad_on_one_rank_are_refused_on_all(refused: Refused) -> None:
    for bad, by, said in BAD_ON_RANK_1:
        refused(3, make_badly, bad, kind="ValueError", said=said, by=by)


def read_with_wrong_lengths(world: dl.World, folder: str) -> None:
    chunks_of(dl.SequenceBatches(numbered(), LANES, LENGTH, world, lengths=[*LENGTHS[:-1], 9]))
    world.gather(0)


def test_a_sequence_of_another_length_than_was_said_ends_all_ranks(refused: Refused) -> None:
    refused(3, read_with_wrong_lengths, kind="ValueError", said="Sequence 10 has 7 time steps, and had 9", by=None)


def train_with_a_narrow_state(world: dl.World, folder: str) -> None:
    model = nn.GRU(1, 4, batch_first=True)
    inputs = [torch.ones(length, 1) for length in LENGTHS]
    batches = dl.SequenceBatches(inputs, LANES, LENGTH, world, shuffle=False)
    for step in loop_on(batches, model):
        for chunk in step:
            outputs, state = model(chunk.data, chunk.hidden)
            chunk.hidden = state[..., :3] if world.rank == 1 and step.iteration == 2 else state
            step.backward(chunk.unpad(outputs).square().mean())
        step.fold()


def test_a_bad_hidden_state_is_refused_on_all_ranks(refused: Refused, world: dl.World) -> None:
    said = r"must keep its structure.*\[1, 4\].*\[1, 3\]"
    refused(3, train_with_a_narrow_state, kind="ValueError", said=said, by=1)
    chunk = next(iter(dl.SequenceBatches(numbered(), LANES, LENGTH, world, shuffle=False)))
    with pytest.raises(ValueError, match=r"in dimension 1. Got shape \(1, 9, 4\) for \d rows"):
        chunk.hidden = torch.zeros(1, 9, 4)
    with pytest.raises(TypeError, match=r"must be a tensor.*Got float"):
        chunk.hidden = 1.0
    with pytest.raises(TypeError, match="Got max"):
        chunk.hidden = torch.ones(2, 2).max(0)


def test_chunks_in_another_order_are_refused_and_an_epoch_that_begins_in_its_middle_has_no_state(
    world: dl.World,
) -> None:
    batches = dl.SequenceBatches(numbered(), LANES, LENGTH, world, shuffle=False)
    chunks = list(batches)
    chunks[0].hidden = torch.zeros(1, LANES, 2)
    with pytest.raises(RuntimeError, match=r"Mini-batch 3 of epoch 1 continues.*after mini-batch 1 of epoch 1"):
        _ = chunks[2].hidden
    chunks[1].hidden = chunks[1].hidden
    chunks[2].hidden = chunks[2].hidden
    with pytest.raises(RuntimeError, match="Chunks must be used in their order"):
        chunks[1].hidden = torch.zeros(1, LANES, 2)
    late = next(dl.SequenceBatches(numbered(), LANES, LENGTH, world).epoch(1, 2)).data(0)
    with pytest.raises(RuntimeError, match=r"Mini-batch 3 of epoch 1 continues.*none was.*Assign chunk\.hidden"):
        _ = late.hidden
