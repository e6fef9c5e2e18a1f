"""Each part of a shard's data on its device. The second device is torch's "meta", which every machine has."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import ddp_loop as dl
from ddp_loop.accelerators import KINDS, Accelerator, accelerator_of
from ddp_loop.data.placement import parse_devices, tensors_in, without_rows
from ddp_loop.data.readers import Request, TensorReader
from ddp_loop.distributed import RankFailed
from tests.support.harness import OnRanks
from tests.support.sources import READERS, Encoding, Pair
from tests.support.training import loop_on

pytestmark = pytest.mark.covers("C8")

INPUTS = torch.arange(12.0).reshape(6, 2)
LABELS = torch.arange(6)


def shards(data: Any, devices: Any, **options: Any) -> list[Any]:
    """The data of this process in an epoch, by shard."""
    with dl.join_world() as world:
        return list(dl.Batches(data, 4, world, shuffle=False, devices=devices, **options))


@READERS
def test_each_part_is_on_its_device_and_none_is_the_worlds_device(options: dict[str, Any]) -> None:
    for first, second in [(None, "meta"), ("meta", None), (torch.device("meta"), "cpu")]:
        inputs, labels = shards((INPUTS, LABELS), (first, second), **options)[1]
        there = [str(part.device) for part in (inputs, labels)]
        assert there == ["cpu" if device in (None, "cpu") else "meta" for device in (first, second)]
        on_cpu, rows = (inputs, INPUTS) if there[0] == "cpu" else (labels, LABELS)
        assert torch.equal(on_cpu, rows[4:])


@READERS
def test_parts_may_be_named_and_nested_and_one_device_holds_for_all_below_it(options: dict[str, Any]) -> None:
    data = {"x": Pair(INPUTS, LABELS), "y": (INPUTS, (LABELS, LABELS))}
    found = shards(data, {"x": [None, "meta"], "y": (None, "meta")}, **options)[0]
    assert type(found["x"]) is Pair
    assert [found["x"].inputs.device.type, found["x"].labels.device.type] == ["cpu", "meta"]
    assert [part.device.type for part in found["y"][1]] == ["meta", "meta"]
    assert torch.equal(found["y"][0], INPUTS[:4])


class Limited(Accelerator):
    """A device, here "meta", with little memory left."""

    def memory_free(self) -> float:
        return 100.0


def test_a_part_that_does_not_fit_is_copied_shard_by_shard(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setitem(KINDS, "meta", Limited)
    accelerator_of.cache_clear()
    request.addfinalizer(accelerator_of.cache_clear)
    places = parse_devices(("meta", "meta", None), torch.device("cpu"))
    reader = TensorReader((INPUTS, torch.ones(6, 3), LABELS[:, None]), places)  # 48, 72 and 48 bytes
    for stored in (["cpu", "cpu", "cpu"], ["meta", "cpu", "cpu"]):
        assert [part.device.type for part in tensors_in(reader._parts)] == stored
        assert [part.device.type for part in reader.one(Request(0, 0, range(4)))] == ["meta", "meta", "cpu"]
        reader.move()


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("gpu 3", "must be a device of this machine.*Got 'gpu 3'"),
        (("cpu", 1.5), "must be a device of this machine.*Got 1.5"),
        (("cpu",), r"a tuple or dict with the structure of the data\. Got .* for 2 parts"),
        ({"x": "cpu"}, "a tuple or dict with the structure of the data. Got .* for 2 parts"),
        (("cpu", ("cpu", "cpu")), "with the structure of the data. Got .* for Tensor"),
    ],
)
def test_devices_that_do_not_exist_or_do_not_fit_the_data_are_refused(devices: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        shards((INPUTS, LABELS), devices)


def read_what_collate_made() -> None:
    with dl.join_world() as world:
        batches = dl.Batches((INPUTS, LABELS), 4, world, devices=(None, None, None), num_workers=0)
        for step in loop_on(batches, torch.nn.Linear(2, 1)):
            for _ in step:
                pass


def test_data_with_another_structure_than_the_devices_are_refused_on_every_rank(on_ranks: OnRanks) -> None:
    with pytest.raises(RankFailed, match=r"with the structure of the data\. Got .* for 2 parts") as failed:
        on_ranks(2, read_what_collate_made)
    assert "rank 0" in str(failed.value)
    assert "rank 1" in str(failed.value)


# -- data without rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    inputs: Any
    more: Any = None

    @cached_property
    def doubled(self) -> torch.Tensor:
        return torch.as_tensor(2 * self.inputs)


class Moving(NamedTuple):
    """A named tuple with a `to`, as many batches have."""

    inputs: torch.Tensor

    def to(self, device: torch.device) -> Moving:
        return Moving(self.inputs.to(device))


class Together:
    """Tensors with the rows in common, which can be sliced, as TensorDict."""

    ndim = 1

    def __init__(self, **named: torch.Tensor) -> None:
        self.named = named

    def __getitem__(self, rows: slice) -> Together:
        return Together(**{name: one[rows] for name, one in self.named.items()})


def test_what_can_be_sliced_by_rows_is() -> None:
    assert without_rows(Together(x=INPUTS)).named["x"].shape == (0, 2)


def test_every_kind_of_container_loses_its_rows_and_keeps_its_kind() -> None:
    array = INPUTS.numpy()
    data = Batch({"x": [INPUTS, Batch(array)], "y": Pair(LABELS, (array, 7))}, Batch(Moving(INPUTS), "a text"))
    found = without_rows(data)
    assert type(found) is Batch
    assert [type(one) for one in found.inputs["x"]] == [torch.Tensor, Batch]
    assert found.inputs["x"][0].shape == found.inputs["x"][1].inputs.shape == (0, 2)
    assert type(found.inputs["y"]) is Pair
    assert found.inputs["y"].inputs.shape == (0,)
    assert found.inputs["y"].labels[0].shape == (0, 2)
    assert found.inputs["y"].labels[1] == 7
    assert type(found.more.inputs) is Moving
    assert found.more.inputs.inputs.shape == (0, 2)
    assert found.more.more == "a text"
    assert data.inputs["x"][1].inputs is array  # the data themselves are unchanged


def test_a_cached_property_of_a_dataclass_loses_its_rows() -> None:
    data = Batch(INPUTS, INPUTS.shape)
    assert len(data.doubled) == 6
    found = without_rows(data)
    assert found.doubled.shape == (0, 2)
    assert found.more == INPUTS.shape


@pytest.mark.parametrize("kind", [dict, OrderedDict, Encoding])
def test_a_dict_keeps_its_kind(kind: Any) -> None:
    data = kind(x=INPUTS)
    found = without_rows(data)
    assert type(found) is kind
    assert found["x"].shape == (0, 2)
    assert data["x"] is INPUTS


@pytest.mark.parametrize(
    "each", [["a", "b"], ("a", "b"), [b"a"], [Path("a")], [torch.tensor(1.0), torch.tensor(2.0)], [np.array(1.0)]]
)
def test_a_list_with_a_text_or_a_number_for_each_sample_becomes_empty(each: Any) -> None:
    inputs, kept = without_rows([INPUTS, each])
    assert inputs.shape == (0, 2)
    assert kept == type(each)()
    assert without_rows([224, 224]) == [224, 224]


def test_what_has_no_samples_stays() -> None:
    scalars = (torch.tensor(1.0), torch.tensor(2.0))
    assert without_rows(scalars) == scalars  # a pair that a script unpacks
    for thing in (
        None,
        {1},
        slice(3),
        date(2026, 11, 28),
        SimpleNamespace(level=1),
        len,
        torch.float32,
        np.float32(2.0),
    ):
        assert without_rows(thing) is thing


class Foreign:
    """A batch of a user's own class."""

    def __init__(self) -> None:
        self.inputs = INPUTS


class Movable(Foreign):
    def to(self, device: torch.device) -> Movable:
        return self


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: pack_sequence([torch.zeros(2), torch.zeros(1)]), PackedSequence.__name__),
        (Foreign, "Foreign"),
        (Movable, "Movable"),
        (lambda: torch.eye(3).to_sparse(), r"tensor of layout torch\.sparse_coo"),
        (
            lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)], layout=torch.jagged),
            "nested tensor",
        ),
    ],
    ids=["packed", "class", "class with to", "sparse", "nested"],
)
def test_data_whose_rows_cannot_be_removed_are_refused_with_the_remedy(make: Any, named: str) -> None:
    for data in (make(), [INPUTS, {"x": Batch(make())}]):
        with pytest.raises(TypeError, match=f"Got a {named}, whose rows cannot be removed. Use larger mini-batches"):
            without_rows(data)
