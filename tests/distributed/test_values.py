"""Values that ranks send each other: what arrives is what was sent, and nothing that was sent is executed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ddp_loop as dl
from ddp_loop.distributed.failures import RankStatus
from ddp_loop.distributed.values import from_bytes, to_bytes
from tests.support.harness import OnRanks, caught

VALUES: list[Any] = [
    None,
    True,
    -(2**70),
    0.1,
    -0.0,
    float("inf"),
    "ä\n\0\ud800",
    b"\0\xff",
    [],
    (1, ("2", [3.0])),
    {1},
    frozenset({(1, 2)}),
    {"a": 1, (1, 2): {"b": ()}, 3: None},
    torch.bfloat16,
    Path("runs/a"),
    RankStatus("forward", 3, "a sum"),
    ["dict", ["list"], "path"],
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_arrives_as_it_was_sent(value: Any) -> None:
    found = from_bytes(to_bytes(value))
    assert (type(found), repr(found)) == (type(value), repr(value))
    assert found == value


def test_numbers_of_numpy_arrive_as_pythons_own() -> None:
    assert repr(from_bytes(to_bytes([np.int64(3), np.float32(0.5), np.bool_(True)]))) == "[3, 0.5, True]"


def gather_tensors() -> list[list[torch.Tensor]]:
    with dl.join_world() as world:
        own = [torch.full((world.rank, 2), -0.0, dtype=torch.bfloat16), torch.tensor(float("nan")), torch.ones(2) > 0]
        own.append(torch.arange(6, requires_grad=True, dtype=torch.float64).view(2, 3).T + world.rank)
        refused = caught(world.gather, torch.ones(2).to_sparse())
        assert (refused[0], "dense tensors" in refused[1]) == ("TypeError", True)
        return world.gather(own)


def test_a_dense_tensor_arrives_with_every_bit_and_without_a_graph(on_ranks: OnRanks) -> None:
    for every in on_ranks(3, gather_tensors):
        for rank, (first, nan, truths, last) in enumerate(every):
            assert (first.shape, first.dtype, bool(first.signbit().all())) == ((rank, 2), torch.bfloat16, True)
            assert bool(nan.isnan())
            assert truths.tolist() == [True, True]
            assert torch.equal(last, torch.arange(6, dtype=torch.float64).view(2, 3).T + rank)
            assert not last.requires_grad


class Call:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def test_what_a_peer_sends_is_not_executed(tmp_path: Path) -> None:
    there = tmp_path / "there"
    with pytest.raises(ValueError, match="is no value"):
        from_bytes(pickle.dumps(Call(str(there))))
    plain = '["Call", "there"]', '["dtype", "load"]', '["RankStatus", 1, 2, 3, 4]', '["bytes"]', '[["list"]]'
    tensors = '["tensor", "float32", [3], "AAAA"]', '["tensor", "float32", [-5], ""]'
    for word in (*plain, *tensors, "[" * 100_000):
        with pytest.raises(ValueError, match="is no value"):
            from_bytes(word.encode())
    assert not there.exists()


class Unsendable:
    """A class of a script's own."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_tensors_are_sent_to_the_bit(dtype: torch.dtype) -> None:
    sent = [torch.randn(shape).to(dtype) for shape in ((), (0,), (2, 3), (3, 0))]
    sent.append(sent[2].mT)
    torch.testing.assert_close(from_bytes(to_bytes(sent)), sent, rtol=0, atol=0)


def send(value: Any) -> Any:
    with dl.join_world() as world:
        return world.on_rank_zero(lambda: value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_value_that_cannot_be_sent_is_refused_with_the_remedy(ranks: int, on_ranks: OnRanks) -> None:
    assert on_ranks(ranks, send, Path("runs")) == [Path("runs")] * ranks
    own, *others = on_ranks(ranks, caught, send, Unsendable())
    assert own[0] == "TypeError"
    assert "Got Unsendable. Send its parts." in own[1]
    for kind, text, _ in others:
        assert (kind, "Got Unsendable" in text) == ("PeerFailed", True)
