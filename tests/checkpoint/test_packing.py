"""A state taken apart and put together again: the same values, types, bits and strides."""

from __future__ import annotations

import json
import math
import random
import re
import struct
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from ddp_loop.checkpoint.serialization import (
    DTYPES,
    LEVELS,
    NATIVE,
    SerializedState,
    from_tree,
    parse,
    to_tree,
)
from ddp_loop.checkpoint.staging import copy_to_host
from ddp_loop.determinism import digest


def again(state: object) -> Any:
    """The state after a way through JSON, as a file has it."""
    packed = to_tree(state)
    return from_tree(SerializedState(parse(json.dumps(packed.structure).encode()), copy_to_host(packed, {}).tensors))


def assert_same(one: Any, other: Any) -> None:
    """The same types, values, bits and order, all the way down."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert digest(one.reshape(-1).view(torch.uint8)) == digest(other.reshape(-1).view(torch.uint8))
    elif isinstance(one, dict):
        assert_same(list(one.items()), list(other.items()))
        assert_same(getattr(one, "_metadata", None), getattr(other, "_metadata", None))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, float):
        assert struct.pack("d", one) == struct.pack("d", other)
    else:
        assert one == other


def name_of(value: object) -> str:
    """The same in every process, as a set's repr is not."""
    words = f"{type(value).__name__} of {len(value)}" if isinstance(value, set | frozenset) else repr(value)
    return words[:30].encode("ascii", "replace").decode()


ODD_NAN = struct.unpack("d", struct.pack("Q", 0xFFF800000000BEEF))[0]


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, "", "a\nü\ud800\0", b"", b"\x00\xff", 0, -1, 2**63 - 1, -(2**63), 2**63, -(10**3999)),
        *(0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, ODD_NAN, complex(-0.0, math.inf)),
        *([], [[]], (), (1, (2.0, "x"), []), {}, set(), frozenset({1, "a"}), {1, 2, (3, None)}),
        {1: "a", "1": "b", None: 0, (1, ("x", None)): [2], -0.5: {}, b"k": True},
        *(OrderedDict([("b", 1), ("a", 2)]), Counter({30: 1, 80: 2}), {"dict": {"tensor": [1]}, "__metadata__": 1}),
        *(torch.float32, torch.float8_e5m2, torch.device("cuda:3"), torch.device("cpu")),
        *(torch.Size([2, 0]), torch.Size([])),
    ],
    ids=name_of,
)  # fmt: skip
def test_a_value_comes_back_as_it_was(value: object) -> None:
    assert_same(again({"a": [value]}), {"a": [value]})


@pytest.mark.parametrize("name", [name for name in DTYPES if not name.startswith(("q", "uint8x"))])
def test_a_tensor_of_each_dtype_comes_back_with_its_bits(name: str) -> None:
    dtype = DTYPES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls half complex numbers an experiment
        raw = torch.arange(2 if dtype == torch.bool else 256).to(torch.uint8)  # NaN with a payload, too
        tensor = raw.view(dtype)
        back = again({"x": tensor})["x"]
        assert back.dtype == dtype
        assert torch.equal(back.view(torch.uint8), raw)
        assert all(one.dtype in NATIVE for one in to_tree(tensor).tensors.values())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 1).as_strided((4, 1), (1, 7)),
        *(torch.randn(3, 4).t(), torch.randn(()), torch.empty(0, 3), torch.empty(3, 0).t()),
        torch.randn(2, 3, 4).permute(2, 0, 1),
        *(torch.randn(3, 4, dtype=torch.complex128).t(), torch.arange(6).to(torch.uint16).view(2, 3).t()),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.stride()}",
)  # fmt: skip
def test_a_dense_tensor_keeps_its_strides_and_is_not_copied(tensor: torch.Tensor) -> None:
    assert_same(again([tensor]), [tensor])
    (stored,) = to_tree(tensor).tensors.values()
    assert stored.data_ptr() == tensor.data_ptr()
    assert stored.is_contiguous()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0)[::2],
        torch.arange(12.0).view(3, 4)[:, 1:3],
        torch.ones(1, 3).expand(5, 3),
        torch.randn(3, dtype=torch.complex64).conj(),
    ],
)
def test_a_slice_or_a_conjugate_is_packed_as_its_values_alone(tensor: torch.Tensor) -> None:
    back = again({"a": tensor.conj(), "b": tensor})["b"]
    assert torch.equal(back, tensor)
    assert back.is_contiguous()
    assert back.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_tied_tensors_are_stored_once_and_tied_again() -> None:
    weight = nn.Parameter(torch.randn(3, 4))
    state = {"embedding": weight, "head": weight.detach().view(3, 4), "other": weight.t()}
    assert len(to_tree(state).tensors) == 2
    back = again(state)
    back["embedding"][0, 0] = 7.0
    assert back["head"][0, 0] == 7.0
    assert back["other"][0, 0] != 7.0


def test_tensors_whose_paths_look_alike_are_kept_apart() -> None:
    state = {
        "a.b": torch.tensor(1.0),
        "a": {"b": torch.tensor(2.0)},
        "__metadata__": torch.tensor(3.0),
        "\ud800": torch.ones(1),
    }
    packed = to_tree(state)
    assert_same(from_tree(packed), state)
    assert list(packed.tensors) == ["a.b", "a.b#2", "__metadata__#2", "?"]


@pytest.mark.parametrize("letter", ["b1", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16", ">f4", ">i8", "g"])
def test_arrays_and_their_scalars_come_back(letter: str) -> None:
    array = (np.arange(12) - 3).astype(letter).reshape(3, 4)
    array.flags.writeable = False
    for one in (array, np.asfortranarray(array), array[::2, 1:], array[0, 0:0], array[1, 2:3].reshape(())):
        back = again({"x": one})["x"]
        assert (back.dtype, back.shape) == (one.dtype, one.shape)
        assert np.array_equal(back, one)
        assert back.flags.f_contiguous == one.flags.f_contiguous or one.base is array
    assert type(again(array[1, 1])) is type(array[1, 1])
    assert again(array[1, 1]) == array[1, 1]


def test_states_of_torch_and_of_random_generators_come_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(torch.bfloat16)
    assert model.state_dict()._metadata["1"]["version"] == 2  # type: ignore[attr-defined]
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    model(torch.ones(3, 2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    parts: list[Any] = [
        *(model, optimizer, torch.optim.swa_utils.AveragedModel(model), torch.amp.GradScaler("cpu", init_scale=8.0)),
        schedules.MultiStepLR(optimizer, [1, 2, 2]),
        schedules.OneCycleLR(optimizer, 0.1, total_steps=9),
        schedules.SequentialLR(
            optimizer, [schedules.ConstantLR(optimizer), schedules.ExponentialLR(optimizer, 0.9)], [2]
        ),
        schedules.ReduceLROnPlateau(optimizer),
    ]
    numbers = np.random.default_rng(3).bit_generator.state
    for state in (*(one.state_dict() for one in parts), numbers, random.getstate(), torch.get_rng_state()):
        assert len(state) > 0
        assert_same(again(state), state)
    legacy = np.random.RandomState(3).get_state()
    assert all(np.array_equal(one, other) for one, other in zip(again(legacy), legacy, strict=True))
    assert_same(again(defaultdict(list, {3: [1]})), {3: [1]})


class Own:
    pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            {"scheduler": {"lr_lambdas": [lambda step: 1.0]}},
            "state.scheduler.lr_lambdas.0 is of type function, .* Give the",
        ),
        (
            {"a": ({"b": Own()},)},
            r"state.a.0.b is of type tests.checkpoint.test_packing.Own, .* Give the object a state_dict",
        ),
        ({"a": {Own(): 1}}, r"\(the key\) is of type tests.checkpoint.test_packing.Own"),
        ({"a": {torch.ones(1): 1}}, r"state.a \(a key\) is of type torch.Tensor, .* Use numbers or strings as keys"),
        ([np.array(["x"])], "state.0 is of type numpy.ndarray, .* Its elements, <U1, are not numbers"),
        ([np.array([Own()])], "state.0 is of type numpy.ndarray, .* Its elements, object, are not numbers"),
        ([np.datetime64("2020-01-01")], "state.0 is of type numpy.datetime64, which a checkpoint cannot store. Give"),
        ([torch.ones(2).to_sparse()], "state.0 is of type torch.Tensor, .* Only dense tensors"),
        ([torch.ones(2, device="meta")], "state.0 is of type torch.Tensor, .* Only dense tensors with values"),
        ([nn.UninitializedParameter()], "state.0 is of type torch.nn.parameter.UninitializedParameter, .* Only dense"),
        ([torch.Generator()], "state.0 is of type torch._C.Generator, which a checkpoint cannot store. Give"),
        ([range(3)], "state.0 is of type range, which a checkpoint cannot store. Give"),
        ([sys], "state.0 is of type module, which a checkpoint cannot store. Give"),
    ],
)
def test_what_cannot_be_packed_is_named_by_its_path(value: object, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        to_tree(value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_named_by_its_path() -> None:
    with pytest.raises(TypeError, match=r"state\.0 is of type torch\.Tensor, .* Only dense tensors with values"):
        to_tree([torch.nested.nested_tensor([torch.ones(2)])])


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


MALFORMED = """
{} ; {"a": 1} ; {"dict": 1, "list": 2} ; {"dict": [[1]]} ; {"dict": [[[1], 2]]}
{"ordered": []} ; {"tuple": 5} ; {"set": [[1]]}
{"set": [{"dict": []}]} ; {"int": "x"} ; {"int": 5} ; {"int": "1111111111_"} ; {"float": "00"} ; {"float": 1}
{"complex": ""} ; {"bytes": "%%"} ; {"bytes": 3} ; {"number": ["<f4", "00"]} ; {"number": ["O", "0000000000000000"]}
{"number": [7, 7]} ; {"number": ["<f3", "000000"]} ; {"array": ["u", "O", [1], "C"]}
{"array": ["u", "<f4", [3], "C"]} ; {"array": ["u", "<f4", [2], "K"]}
{"array": ["no", "<f4", [2], "C"]} ; {"array": []} ; {"dtype": "Tensor"} ; {"dtype": []} ; {"device": "disk"}
{"device": []} ; {"size": [1.5]} ; {"size": 1} ; {"tensor": "x"}
{"tensor": ["x", "float32", [2, 3], [1, 1]]} ; {"tensor": ["x", "float32", [7], [1]]}
{"tensor": ["x", "int32", [6], [1]]} ; {"tensor": ["x", "float32", [-6], [1]]}
{"tensor": ["x", "float32", [6], [-1]]} ; {"tensor": ["x", "qint8", [6], [1]]}
{"tensor": ["x", "float32", [6], [0]]} ; {"tensor": ["x", "float32", [2, 3], [3]]}
{"tensor": [["x"], "float32", [6], [1]]} ; {"tensor": ["x", "os.system", [6], [1]]}
{"tensor": ["x", "float32", [4611686018427387904, 0], [1, 1]]} ; {"posix.system": "true"}
"""


@pytest.mark.parametrize("structure", re.split(" ; |\n", MALFORMED.strip()))
def test_a_structure_that_pack_does_not_make_is_refused(structure: str) -> None:
    tensors = {"x": torch.zeros(6), "u": torch.zeros(8, dtype=torch.uint8)}
    good = [{"tensor": ["x", "float32", [6], [1]]}, {"array": ["u", "<f4", [2], "C"]}]
    assert len(from_tree(SerializedState(good, tensors))) == 2
    with pytest.raises(ValueError, match=r"\w"):
        from_tree(SerializedState([*good, parse(structure.encode())], tensors))


def test_a_tensor_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="has no place for the tensor x"):
        from_tree(SerializedState([1], {"x": torch.zeros(6)}))


def test_too_many_levels_are_refused_also_on_the_way_back() -> None:
    assert_same(again(nested(LEVELS)), nested(LEVELS))
    endless: list[Any] = []
    endless.append(endless)
    for value in (nested(LEVELS + 1), nested(100_000), endless):
        with pytest.raises(ValueError, match="has more than 100 levels"):
            to_tree(value)
    assert from_tree(SerializedState(parse(b"[" * 101 + b"]" * 101), {}))
    with pytest.raises(ValueError, match="has more than 100 levels"):
        from_tree(SerializedState(parse(b"[" * 102 + b"]" * 102), {}))


@pytest.mark.parametrize(
    "text",
    [
        *(b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000),
        *(b"\xff\xfe", "[1]".encode("utf-16"), b"", b"{", b'"' + b"\\", b"1" * 5000),
    ],
    ids=lambda text: repr(text[:20]),
)  # fmt: skip
def test_json_that_is_none_or_too_deep_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse(text)
