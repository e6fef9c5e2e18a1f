"""Reading by index of every kind of data: tensors, arrays, data sets, sources."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import ddp_loop as dl
from ddp_loop import datasets
from ddp_loop.accelerators import Cpu
from ddp_loop.data.placement import tensors_in
from ddp_loop.data.readers import LoaderReader, Request, TensorReader, make_reader
from tests.support.dispatching import Dispatched
from tests.support.sources import INPUTS, READERS, SIZE, WORKERS, Images, Mapped, Pair, shards_of


def read(data: Any, batch_size: int = 4, **options: Any) -> list[Any]:
    """The shards of an epoch in a world of one rank."""
    with dl.join_world(seed=3) as world:
        batches = dl.Batches(data, batch_size, world, **{"shuffle": False, **options})
        return [shard for _, _, shard in shards_of(batches)]


def first_of(data: Any, **options: Any) -> Any:
    """The first four samples."""
    return read(data, **options)[0]


def equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(torch.equal(one, other))


# -- tensors side by side --------------------------------------------------------------------------------------

LABELS = torch.arange(SIZE) % 3
FOUR, CLASSES = INPUTS[:4], LABELS[:4]


def test_a_tensor_an_array_and_a_parameter_give_their_rows() -> None:
    assert equal(first_of(INPUTS), FOUR)
    assert equal(first_of(INPUTS.numpy()), FOUR)
    assert equal(first_of(INPUTS.numpy().astype(">f4")), FOUR)
    assert equal(first_of(torch.nn.Parameter(INPUTS.clone())), FOUR)


@READERS
def test_several_tensors_keep_their_container(options: dict[str, Any]) -> None:
    in_tuple = first_of((INPUTS, LABELS.numpy()), **options)
    assert isinstance(in_tuple, tuple | list)  # DataLoader makes a list of a tuple
    assert equal(in_tuple[0], FOUR)
    assert equal(in_tuple[1], CLASSES)
    for kind in (dict, UserDict):  # a tokenizer's BatchEncoding is a UserDict
        in_dict = first_of(kind({"x": INPUTS, "more": (LABELS, kind({"y": LABELS}))}), **options)
        assert type(in_dict) is dict
        assert equal(in_dict["x"], FOUR)
        assert equal(in_dict["more"][1]["y"], CLASSES)
    named = first_of(Pair(INPUTS, LABELS), **options)
    assert type(named) is Pair
    assert equal(named.labels, CLASSES)
    inputs, labels = first_of(TensorDataset(INPUTS, LABELS), **options)
    assert equal(inputs, FOUR)
    assert equal(labels, CLASSES)


class Doubling(TensorDataset):
    """Has tensors and changes them when they are read."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * tensor[index] for tensor in self.tensors)


class First(TensorDataset):
    """The first samples of its tensors."""

    def __len__(self) -> int:
        return 4


class Together(TensorDataset):
    """Its samples are read together, and changed."""

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, ...]]:
        return [tuple(2 * tensor[index] for tensor in self.tensors) for index in indices]


class TogetherOrAlone(Together):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return self.__getitems__([index])[0]


class Holder:
    """Not a data set of torch."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors


class Iterated(Holder):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(2 * self.tensors[0])


class Called(Holder):
    def __call__(self, index: int) -> torch.Tensor:
        return torch.as_tensor(2 * self.tensors[0][index])

    def __len__(self) -> int:
        return SIZE


class Sized(Holder):
    def __len__(self) -> int:
        return 4


def test_the_methods_of_a_data_set_take_precedence_over_its_tensors() -> None:
    for data, inputs in ((Doubling, 2 * FOUR), (TogetherOrAlone, 2 * FOUR), (First, FOUR), (Holder, FOUR)):
        assert equal(first_of(data(INPUTS, LABELS))[0], inputs)
    assert equal(first_of(Called(INPUTS))[0], 2 * FOUR[0])
    assert equal(first_of(Sized(FOUR))[0], FOUR)
    for four in (First(INPUTS, LABELS), Subset(First(INPUTS, LABELS), range(4))):
        shards = read(four, 3)
        assert equal(torch.cat([rows for rows, _ in shards]), FOUR)
        assert equal(torch.cat([labels for _, labels in shards]), CLASSES)


@pytest.mark.parametrize(
    ("data", "kind", "said"),
    [
        (
            Together(INPUTS, LABELS),
            TypeError,
            "by __getitem__, never by __getitems__.*Got a Together,.*Define",
        ),
        (Sized(INPUTS), ValueError, "Got a Sized with 4 samples and 10 rows"),
        (Iterated(INPUTS), TypeError, r"both tensors and an __iter__ of their own\. Got a Iterated\. Pass its tensors"),
    ],
)
def test_tensors_that_do_not_fit_the_methods_beside_them_are_refused(
    data: Any, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        first_of(data)


@READERS
@pytest.mark.covers("A7")
def test_labelled_images_are_read_as_floats_from_0_to_1_with_class_indices(options: dict[str, Any]) -> None:
    pixels = torch.arange(SIZE * 28, dtype=torch.uint8).reshape(SIZE, 1, 4, 7)
    pixels[0, 0, 0, :2] = torch.tensor([0, 255])
    images, labels = first_of(datasets.LabelledImages(pixels, LABELS, ("a", "b", "c")), **options)
    assert equal(images, pixels[:4].float() / 255)
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert equal(labels, CLASSES)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(30.0).reshape(SIZE, 3)[::-1, ::-1],
        np.arange(60.0).reshape(SIZE, 6)[:, ::2],
        np.arange(SIZE, dtype=np.uint16),
        np.arange(SIZE) > 4,
        np.arange(SIZE, dtype=np.complex64),
        np.zeros((SIZE, 0)),
    ],
    ids=["mirrored", "every other", "uint16", "bool", "complex", "no columns"],
)
def test_arrays_of_every_layout_and_type_give_their_rows(array: np.ndarray[Any, Any]) -> None:
    assert np.array_equal(first_of(array).numpy(), array[:4])
    assert first_of(array).numpy().dtype == array.dtype


@READERS
def test_a_read_only_array_is_read_without_a_warning(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "inputs.npy"
    np.save(path, INPUTS.numpy())
    mapped = np.load(path, mmap_mode="r")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = first_of(mapped, **options)
    assert [str(warning.message) for warning in caught] == []
    rows += 1  # the rows are not the file's memory
    assert equal(first_of(mapped), FOUR)


LAYOUTS = {
    "rows": torch.rand(SIZE, 3),
    "columns": torch.rand(3, SIZE).t(),
    "some columns of every other row": torch.rand(2 * SIZE, 9)[::2, 2:5],
    "expanded": torch.rand(1, 4).expand(SIZE, 4),
    "channels last": torch.rand(SIZE, 3, 5, 5).to(memory_format=torch.channels_last),
    "one channel, last": torch.rand(SIZE, 1, 5, 5).to(memory_format=torch.channels_last),
    "second dimension outside": torch.rand(5, SIZE, 4).transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_in_order_have_the_layout_of_shuffled_rows(layout: str) -> None:
    data = LAYOUTS[layout]
    in_order, shuffled = first_of(data), first_of(data, shuffle=True)
    assert in_order.numpy().tolist() == data[:4].numpy().tolist()
    assert in_order.stride() == shuffled.stride()
    assert layout != "channels last" or in_order.is_contiguous(memory_format=torch.channels_last)


def test_rows_in_order_are_copied_in_one_piece() -> None:
    names: list[str] = []
    with Dispatched(lambda function, *_: names.append(function.__name__)):
        first_of(TensorDataset(INPUTS, LABELS), batch_size=SIZE)
    assert names[-4:] == ["slice.Tensor", "clone.default"] * 2


def test_data_that_need_a_gradient_give_rows_that_do_not() -> None:
    data = (INPUTS.clone().requires_grad_() * 2, LABELS)
    assert not first_of(data)[0].requires_grad
    assert not first_of(data, num_workers=0)[0].requires_grad


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_workers": 0}, {"collate_fn": list}])
def test_a_shards_data_may_be_changed_in_place(shuffle: bool, options: dict[str, Any]) -> None:
    data = INPUTS.clone()
    for shard in read(data, shuffle=shuffle, **options):
        for row in shard:
            row.zero_()
    images = Images()
    for shard in read(images):
        shard.zero_()
    assert equal(data, INPUTS)
    assert equal(images.inputs, INPUTS)


# -- data sets -------------------------------------------------------------------------------------------------


def mixed(index: int) -> dict[str, Any]:
    """All kinds of values."""
    return {
        "tensor": INPUTS[index],
        "array": INPUTS[index].numpy(),
        "scalar": np.float32(index),
        "label": np.int64(index),
        "number": index,
        "name": f"image {index}",
        "nested": Pair(index, [float(index)]),
    }


@pytest.mark.parametrize("workers", WORKERS)
def test_samples_may_be_dicts_of_anything(workers: str) -> None:
    shards = read(Mapped(SIZE, mixed), **WORKERS[workers])
    assert [len(shard["label"]) for shard in shards] == [4, 4, 2]
    first = shards[0]
    assert equal(first["tensor"], FOUR)
    assert equal(first["array"], FOUR)
    assert equal(first["scalar"], torch.arange(4.0))
    assert equal(first["label"], torch.arange(4))
    assert equal(first["number"], torch.arange(4))
    assert first["name"] == ["image 0", "image 1", "image 2", "image 3"]
    assert type(first["nested"]) is Pair
    assert equal(first["nested"].labels[0], torch.arange(4.0).double())


@pytest.mark.parametrize(
    "data",
    [
        [0, 1, 2, 3, 4],
        Subset(list(range(100)), range(5)),  # type: ignore[arg-type]
        ConcatDataset([TensorDataset(torch.arange(2)), TensorDataset(torch.arange(2, 5))]),
        tuple((index, str(index)) for index in range(5)),
        tuple((torch.tensor(index), index) for index in range(5)),
    ],
    ids=["list", "subset", "concatenated", "pairs", "pairs with tensors"],
)
def test_anything_with_a_length_and_an_index_is_a_data_set(data: Any) -> None:
    shards = [shard[0] if isinstance(shard, list) else shard for shard in read(data)]
    assert torch.cat(shards).tolist() == [0, 1, 2, 3, 4]


SEQUENCES = [torch.arange(1.0, 2 + index) for index in range(SIZE)]


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])


def packed(rows: list[torch.Tensor]) -> PackedSequence:
    return pack_sequence(rows, enforce_sorted=False)


def test_a_collate_fn_combines_sequences_of_variable_length() -> None:
    inputs, lengths = first_of(SEQUENCES, collate_fn=padded, num_workers=2)
    assert lengths.tolist() == [1, 2, 3, 4]
    assert inputs.tolist() == [[1, 0, 0, 0], [1, 2, 0, 0], [1, 2, 3, 0], [1, 2, 3, 4]]


def test_packed_sequences_stay_packed_with_their_sizes_on_the_host() -> None:
    shard = first_of(SEQUENCES, collate_fn=packed)
    assert type(shard) is PackedSequence
    assert torch.equal(shard.data, packed(SEQUENCES[:4]).data)


class Movable:
    """A batch of a user's own class, which has a `to` of its own."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def to(self, device: torch.device, *, non_blocking: bool) -> tuple[list[Any], torch.device]:
        return self.rows, device


class Nested(Movable):
    """Moved as the NestedTensor of DETR and torchvision's ImageList, which take the device alone."""

    def to(self, device: torch.device) -> tuple[list[Any], torch.device]:  # type: ignore[override]
        return self.rows, device


@pytest.mark.parametrize("kind", [Movable, Nested])
def test_a_batch_of_a_users_class_is_moved_by_its_own_to(kind: type[Movable]) -> None:
    assert first_of([1, 2, 3], collate_fn=kind) == ([1, 2, 3], torch.device("cpu"))


class Named(dict[str, Any]):
    """A dict whose values are attributes too; what it has not is a KeyError, as in many scripts."""

    __getattr__ = dict.__getitem__


def named(rows: list[torch.Tensor]) -> Named:
    return Named(x=torch.stack(rows), to=[Named(y=rows[0])])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dict_of_a_users_class_keeps_its_class(workers: int) -> None:
    shard = first_of(list(INPUTS), collate_fn=named, num_workers=workers)
    assert torch.equal(shard.x, INPUTS[:4])
    assert torch.equal(shard.to[0].y, INPUTS[0])


def test_a_users_collate_fn_applies_to_tensors_too() -> None:
    assert first_of((INPUTS, LABELS), collate_fn=len) == 4


def note(worker: int) -> None:
    """Runs in a worker when it starts."""


def test_options_are_those_of_the_data_loader_and_without_workers_their_start_function_is_ignored() -> None:
    options = {"num_workers": 1, "timeout": 60, "worker_init_fn": note, "multiprocessing_context": "fork"}
    assert equal(first_of(Images(), **options, prefetch_factor=1), FOUR)
    assert equal(first_of(Images(), num_workers=0, worker_init_fn=note), FOUR)


class Pinning(Cpu):
    """A CPU in place of a GPU, which records the host memory as pinned."""

    is_gpu = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.pinned: list[int] = []

    def empty_on_host(self, like: torch.Tensor) -> torch.Tensor:
        memory = super().empty_on_host(like)
        self.pinned.append(memory.data_ptr())
        return memory


def test_images_are_gathered_as_bytes_and_become_floats_once(world: dl.World) -> None:
    sizes: list[int] = []

    def note(function: Any, arguments: Any, result: torch.Tensor) -> None:
        """The bytes of what is made."""
        if not function.is_view and result is not arguments[0]:
            sizes.append(result.nbytes)

    pixels = torch.arange(SIZE * 256).remainder(256).to(torch.uint8).reshape(SIZE, 1, 16, 16)
    data = datasets.LabelledImages(pixels, LABELS, ("a", "b", "c"))
    batches = dl.Batches(data, 8, world, shuffle=True)
    assert isinstance(batches._reader, TensorReader)
    stored = sum(one.nbytes for one in tensors_in(batches._reader._parts))
    indices, loaded = batches.indices(1, 0, 8), next(batches.epoch(1))
    with Dispatched(note):
        images, labels = loaded.data(0)
    assert stored == SIZE * (256 + 8)
    assert sum(sizes) == 8 * (256 + 8 + 4 * 256) + 4
    assert equal(images, (pixels / 255)[indices])  # every bit, of all 256 values
    assert equal(labels, LABELS[indices])


def test_a_gpus_images_are_divided_on_the_gpu_and_those_of_its_host_before() -> None:
    data = datasets.LabelledImages(torch.full((3, 1, 2, 2), 7, dtype=torch.uint8), torch.zeros(3).long(), ("a",))
    request = Request(0, 0, torch.tensor([2, 0]))
    accelerator = Pinning(torch.device("cpu"))
    reader, _ = make_reader(data, 0, accelerator.device, {}, accelerator)
    assert [one.data_ptr() for one in tensors_in(reader.one(request))] == accelerator.pinned
    meta, _ = make_reader(data, 0, torch.device("meta"), {}, accelerator)
    images, _ = meta.one(Request(0, 0, range(2)))
    assert (images.device.type, images.dtype, images.shape) == ("meta", torch.float32, (2, 1, 2, 2))


def test_rows_on_a_gpus_host_are_pinned() -> None:
    data = {"x": (INPUTS, INPUTS[:, :1])}
    accelerator = Pinning(torch.device("cpu"))
    reader, _ = make_reader(data, 0, accelerator.device, {}, accelerator)
    plain, _ = make_reader(data, 0, accelerator.device, {}, Cpu(accelerator.device))
    request = Request(0, 0, torch.tensor([2, 0]))
    found, expected = tensors_in(reader.one(request)), tensors_in(plain.one(request))
    assert [one.data_ptr() for one in found] == accelerator.pinned
    assert all(map(torch.equal, found, expected))
    loader, _ = make_reader(data, 0, accelerator.device, {"num_workers": 0}, accelerator)
    assert isinstance(loader, LoaderReader)
    assert loader._loader.pin_memory
