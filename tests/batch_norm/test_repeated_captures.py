"""What a recorded shard captured is captured again in another shard."""

from __future__ import annotations

import torch

from ddp_loop.batch_norm.captures import BatchStatistics, Captures, FlatStatistics


def captured(form: FlatStatistics, calls: list[int], start: float) -> Captures:
    """Statistics of 2 and 3 channels, of so many calls of each layer."""
    found = Captures(2, form)
    for number, often in enumerate(calls):
        for call in range(often):
            mean, variance = found.spare(number, torch.zeros(2 + number))
            mean.fill_(start + number + call / 4)
            variance.fill_(1 + start + number)
            found.add(number, torch.zeros(7, 2 + number), mean, variance, 0.1)
    return found


def rows_of(captures: Captures) -> list[tuple[int, float, list[float], list[float], list[float]]]:
    return [
        (one.count, one.momentum, one.mean.tolist(), one.rest.tolist(), one.variance.tolist())
        for calls in captures
        for one in calls
    ]


def test_statistics_are_copied_and_lie_in_one_piece_as_in_the_recorded_shard() -> None:
    form = FlatStatistics([torch.zeros(2), torch.zeros(3)])
    recorded, shard = captured(form, [1, 1], 0.5), Captures(2, form)
    shard.repeat(recorded)
    before = rows_of(recorded)
    assert rows_of(shard) == before
    pieces, theirs = shard.in_one_piece(), recorded.in_one_piece()
    assert pieces is not None
    assert theirs is not None
    assert pieces[0] == theirs[0] == (7, 7)
    assert all(map(torch.equal, pieces[1], theirs[1]))
    for calls in recorded:
        calls[0].mean.fill_(torch.nan)  # the next replay writes there
    assert rows_of(shard) == before


def test_further_calls_of_a_layer_and_rests_are_copied_too() -> None:
    form = FlatStatistics([torch.zeros(2), torch.zeros(3)])
    recorded, shard = captured(form, [2, 1], 0.5), Captures(2, form)
    recorded[1][0].rest = torch.full((3,), 0.125)
    shard.repeat(recorded)
    assert rows_of(shard) == rows_of(recorded)
    assert shard.in_one_piece() is None
    assert isinstance(shard[1][0], BatchStatistics)
    assert shard[1][0].rest is not recorded[1][0].rest


def test_a_shard_with_calls_of_its_own_gets_the_repeated_ones_after_them() -> None:
    form = FlatStatistics([torch.zeros(2), torch.zeros(3)])
    shard, recorded = captured(form, [1, 1], 0.5), captured(form, [1, 1], 2.0)
    own, more = rows_of(shard), rows_of(recorded)
    shard.repeat(recorded)
    assert rows_of(shard) == [own[0], more[0], own[1], more[1]]
    assert shard.in_one_piece() is None
