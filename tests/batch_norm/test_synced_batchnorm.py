"""Synced batch norm on ranks is batch norm of one process on all their values: forward, back, running statistics."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

import ddp_loop as dl
from benchmarks.payload import counted
from ddp_loop.batch_norm import SyncChannel, sync_batch_norm
from ddp_loop.batch_norm.synced import SyncedBatchNorm, statistics
from tests.support.comparing import Tensors, distance, gradients_of, same_on_all
from tests.support.harness import OnRanks

pytestmark = [pytest.mark.covers("D5"), pytest.mark.on_gpus_too]

BOUND = 1e-10  # float64, relative to the largest magnitude: what the project promises
KINDS: dict[str, type[_BatchNorm]] = {"1d": nn.BatchNorm1d, "2d": nn.BatchNorm2d, "3d": nn.BatchNorm3d}


@dataclass(frozen=True)
class Case:
    """A layer, trained for some steps; `rows` of values (rows, channels, *places) on each rank."""

    rows: tuple[int, ...]
    kind: str = "2d"
    channels: int = 3
    places: tuple[int, ...] = (4, 5)
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 2
    form: str = "contiguous"
    dtype: torch.dtype = torch.float64
    mean: float = 0.5
    tracked: bool = True  # False: it has running statistics, and leaves them alone


@dataclass(frozen=True)
class Trained:
    """What came of it: for each step the outputs and the values' gradients; then the parameters' and the buffers."""

    outputs: Tensors
    of_values: Tensors
    of_parameters: Tensors
    buffers: Tensors


def layer_of(case: Case) -> _BatchNorm:
    layer = KINDS[case.kind](case.channels, **case.options)
    layer = layer.to(torch.float64 if case.dtype == torch.float64 else torch.float32)
    layer.track_running_stats &= case.tracked
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(case.channels, generator=generator, dtype=torch.float64))
    return layer


def values_of(case: Case, step: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Each rank's values, and the gradient that comes back to its outputs; the channels differ in deviation."""
    generator = torch.Generator().manual_seed(10 + step)
    shape = (sum(case.rows), case.channels, *case.places)
    values, gradients = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    scale = torch.linspace(0.5, 2.0, case.channels, dtype=torch.float64).view(-1, *[1] * len(case.places))
    pieces = (case.mean + values * scale).to(case.dtype).split(case.rows)
    return [formed(piece, case.form) for piece in pieces], list(gradients.to(case.dtype).split(case.rows))


def formed(piece: torch.Tensor, form: str) -> torch.Tensor:
    if form == "channels last":
        return piece.to(memory_format=torch.channels_last)
    return piece.transpose(0, -1).contiguous().transpose(0, -1) if form == "strided" else piece


def train(layer: nn.Module, steps: list[tuple[torch.Tensor, torch.Tensor]]) -> Trained:
    outputs, of_values = [], []
    for values, gradient in steps:
        values = values.detach().requires_grad_()
        output = layer(values)
        output.backward(gradient)
        assert values.grad is not None
        outputs.append(output.detach())
        of_values.append(values.grad)
    buffers = [buffer.clone() for buffer in layer.buffers()]
    return Trained(outputs, of_values, gradients_of(layer), buffers)


def train_on_ranks(cases: list[Case], device: str = "cpu") -> list[Trained]:
    with dl.join_world(device=device, share_gpus=True) as world:
        found = []
        for case in cases:
            layer = sync_batch_norm(layer_of(case).to(world.device), world)
            assert isinstance(layer, SyncedBatchNorm)
            pieces = [values_of(case, step) for step in range(case.steps)]
            one = train(layer, [(v[world.rank].to(world.device), g[world.rank].to(world.device)) for v, g in pieces])
            for gradient in one.of_parameters:
                world.sum(gradient)
            parts = one.outputs, one.of_values, one.of_parameters, one.buffers
            found.append(Trained(*([tensor.cpu() for tensor in part] for part in parts)))
        return found


def train_alone(case: Case, dtype: torch.dtype = torch.float64) -> Trained:
    layer = layer_of(case).to(dtype)
    pieces = [values_of(case, step) for step in range(case.steps)]
    return train(layer, [(torch.cat(v).to(dtype), torch.cat(g).to(dtype)) for v, g in pieces])


def assert_equal(results: list[Trained], case: Case, bound: float = BOUND) -> None:
    alone = train_alone(case)
    for step in range(case.steps):
        for name in ("outputs", "of_values"):
            whole = torch.cat([getattr(result, name)[step] for result in results])
            assert distance([whole.double()], [getattr(alone, name)[step]]) < bound, (name, case)
    if alone.of_parameters:
        assert distance([one.double() for one in results[0].of_parameters], alone.of_parameters) < bound, case
    buffers = same_on_all([result.buffers for result in results])
    for found, expected in zip(buffers, alone.buffers, strict=True):
        assert float((found - expected).abs().max()) <= bound * float(expected.abs().max()), case


def random_case(number: int, ranks: int) -> Case:
    draw = random.Random(100 * ranks + number)
    kind = draw.choice(["1d", "2d", "3d"])
    places = {"1d": draw.choice([0, 1]), "2d": 2, "3d": 3}[kind]
    rows = [draw.choice([0, 1, 2, 5, 8]) for _ in range(ranks)]
    rows[draw.randrange(ranks)] += 2  # else a mini-batch may be of one value
    return Case(
        tuple(rows), kind, draw.randint(1, 7), tuple(draw.randint(1, 5) for _ in range(places)),
        {"momentum": draw.choice([None, 0.1, 0.7]), "affine": draw.random() < 0.8, "eps": draw.choice([1e-5, 0.1])},
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.slow
def test_ten_random_layers_are_those_of_one_process(ranks: int, on_ranks: OnRanks) -> None:
    cases = [random_case(number, ranks) for number in range(10)]
    for case, *results in zip(cases, *on_ranks(ranks, train_on_ranks, cases), strict=True):
        assert_equal(results, case)


CASES = {
    "the first rank is empty": Case((0, 3, 2)),
    "the last rank is empty": Case((3, 2, 0)),
    "only one rank has rows": Case((0, 4, 0), "1d", places=()),
    "one value per channel on a rank": Case((1, 1, 2), "1d", places=()),
    "one value per channel on every rank": Case((1, 1, 1), "3d", places=(1, 1, 1)),
    "no places, and so no values, on any but one rank": Case((3, 0, 0), "1d", places=(2,)),
    "cumulative average": Case((3, 1, 2), options={"momentum": None}, steps=3),
    "momentum 1": Case((3, 1, 2), options={"momentum": 1.0}),
    "no weight and bias": Case((3, 0, 2), options={"affine": False}),
    "no running statistics": Case((3, 0, 2), options={"track_running_stats": False}),
    "running statistics that are left alone": Case((3, 0, 2), tracked=False),
    "channels last": Case((4, 0, 2), channels=5, form="channels last"),
    "other strides": Case((4, 1, 2), channels=5, form="strided"),
    "a channel that is far from 0": Case((4, 1, 2), mean=1e6),
}


@pytest.mark.slow
def test_layers_of_every_sort_are_those_of_one_process(on_ranks: OnRanks) -> None:
    for case, *results in zip(CASES.values(), *on_ranks(3, train_on_ranks, list(CASES.values())), strict=True):
        # At mean 1e6 float64 itself has 1e-10 left of the values' deviation.
        assert_equal(results, case, bound=1e-8 if case.mean > 1 else BOUND)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_layers_of_every_sort_are_those_of_one_process_on_a_gpu(dtype: torch.dtype, on_ranks: OnRanks) -> None:
    cases = [Case(**{**vars(case), "dtype": dtype, "mean": 0.5}) for case in CASES.values()]
    bound = {torch.float64: BOUND, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]  # some 100, 3 units in the last
    for case, *results in zip(cases, *on_ranks(3, train_on_ranks, cases, device="gpu"), strict=True):
        assert_equal(results, case, bound)


# -- gradients, by differences ---------------------------------------------------------------------------------------

STEP = 1e-6


def differentiate() -> float:
    """The largest error of a gradient on this rank, against differences of the sum of all ranks' losses."""
    with dl.join_world() as world:
        case = Case((2, 0, 1), "1d", 2, (2,))
        layer = sync_batch_norm(layer_of(case), world)
        every, gradients = values_of(case, 0)
        own = every[world.rank].clone().requires_grad_()

        def loss() -> torch.Tensor:
            output: torch.Tensor = layer(own)
            return (output.sin() * gradients[world.rank]).sum()  # sin: not linear in the outputs

        loss().backward()
        worst = 0.0
        for rank, values in enumerate(every):
            for place in range(values.numel()):
                sums = []
                for sign in (1, -1):
                    with torch.no_grad():
                        own.copy_(every[world.rank])
                        if rank == world.rank:
                            own.view(-1)[place] += sign * STEP
                        sums.append(float(world.sum(loss())))
                if rank == world.rank:
                    assert own.grad is not None
                    worst = max(worst, abs((sums[0] - sums[1]) / (2 * STEP) - float(own.grad.view(-1)[place])))
        return worst


def test_a_gradient_is_that_of_the_sum_of_all_ranks_losses(on_ranks: OnRanks) -> None:
    # Central differences are off by STEP ** 2 times a third derivative, and by 1e-16 / STEP.
    assert max(on_ranks(3, differentiate)) < 1e-8


@pytest.mark.parametrize(("kind", "places"), [("1d", ()), ("1d", (3,)), ("2d", (2, 3)), ("3d", (2, 1, 2))])
def test_the_lines_of_the_ranks_pass_gradcheck(kind: str, places: tuple[int, ...]) -> None:
    case = Case((4,), kind, 2, places, {"track_running_stats": False})
    with dl.join_world() as world:
        layer = sync_batch_norm(layer_of(case), world)
        assert isinstance(layer, SyncedBatchNorm)
        channel = SyncChannel(world, ["layer"], case.channels)

        def normalise(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            del layer._parameters["weight"], layer._parameters["bias"]
            layer.__dict__.update(weight=weight, bias=bias)
            try:
                return layer.normalise(values, channel)
            finally:
                del layer.__dict__["weight"], layer.__dict__["bias"]
                layer._parameters.update(weight=None, bias=None)

        given = values_of(case, 0)[0][0], *(parameter.detach().clone() for parameter in layer.parameters())
        assert torch.autograd.gradcheck(normalise, [one.requires_grad_() for one in given])


# -- networks ----------------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """A layer that is used twice, one that is frozen, and a first one, whose inputs need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.frozen = nn.BatchNorm2d(2), nn.BatchNorm2d(4), nn.BatchNorm1d(4)
        self.one, self.other = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Linear(4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.twice(self.one(self.first(images))).relu_()
        hidden = self.twice(self.other(hidden)).relu_().mean((2, 3))
        return torch.as_tensor(self.last(self.frozen(hidden)))


def network() -> Network:
    torch.manual_seed(4)
    model = Network().double()
    model.frozen.eval()
    return model


ROWS = (3, 0, 2, 1)


def images(ranks: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(6)
    rows = (*ROWS[: ranks - 1], sum(ROWS) - sum(ROWS[: ranks - 1]))
    pictures = torch.randn(sum(ROWS), 2, 4, 4, generator=generator, dtype=torch.float64)
    return pictures.split(rows), torch.randint(0, 3, (sum(ROWS),), generator=generator).split(rows)


def train_network(reduced: bool = False) -> tuple[Tensors, Tensors]:
    """Two steps of one process, or of ranks: the gradients of the second, summed over the ranks, and the buffers."""
    with dl.join_world() as world:
        model = sync_batch_norm(network(), world)
        if reduced:
            model.float()
        pictures, labels = (pieces[world.rank] for pieces in images(world.size))
        for _ in range(2):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=reduced):
                logits = model(pictures.to(torch.float32 if reduced else torch.float64))
                losses = cross_entropy(logits.float() if reduced else logits, labels, reduction="sum")
            (losses / sum(ROWS)).backward()
        gradients = [world.sum(gradient) for gradient in gradients_of(model)]
        return gradients, [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.quick_on_gpus
def test_a_network_trains_as_in_one_process_with_a_rank_that_has_no_rows(ranks: int, on_ranks: OnRanks) -> None:
    results = on_ranks(ranks, train_network)
    alone = train_network()
    gradients = same_on_all([gradients for gradients, _ in results])
    buffers = same_on_all([buffers for _, buffers in results])
    # A bias before batch norm has no gradient but rounding: measured against the largest of all.
    largest = max(float(one.abs().max()) for one in alone[0])
    assert (
        max(float((one - other).abs().max()) for one, other in zip(gradients, alone[0], strict=True)) < BOUND * largest
    )
    assert distance(buffers, alone[1]) < BOUND


@pytest.mark.both_exchanges
def test_the_same_run_twice_gives_the_same_bits(on_ranks: OnRanks) -> None:
    first, second = on_ranks(3, train_network), on_ranks(3, train_network)
    for one, other in zip(first, second, strict=True):
        same_on_all([[*one[0], *one[1]], [*other[0], *other[1]]])


def test_bfloat16_autocast_trains_as_in_one_process_up_to_its_rounding(on_ranks: OnRanks) -> None:
    (gradients, buffers), (expected, exact) = on_ranks(3, train_network, reduced=True)[0], train_network()
    # bfloat16 has 8 bits: 0.4 % a product, over the four layers of the network some per cent.
    assert distance([one for one in buffers if one.is_floating_point()],
                    [one.float() for one in exact if one.is_floating_point()]) < 0.02  # fmt: skip
    largest = max(float(one.abs().max()) for one in expected)
    assert (
        max(float((one - other).abs().max()) for one, other in zip(gradients, expected, strict=True)) < 0.05 * largest
    )


# -- bits and digits ---------------------------------------------------------------------------------------------------

FAR = [Case((300, 0, 500), places=(6, 6), form=form, dtype=dtype, mean=1000.0, steps=1, options={"momentum": 1.0})
       for form in ("contiguous", "channels last") for dtype in (torch.float32, torch.bfloat16)]  # fmt: skip


def test_float32_keeps_its_digits_far_from_0(on_ranks: OnRanks) -> None:
    for case, *results in zip(FAR, *on_ranks(3, train_on_ranks, FAR), strict=True):
        alone = train_alone(case)
        mean, variance = (same_on_all([result.buffers for result in results])[number].double() for number in (0, 1))
        assert float((mean / alone.buffers[0] - 1).abs().max()) < 1.2e-7  # float32's last digit, twice
        if case.dtype == torch.float32:
            assert float((variance / alone.buffers[1] - 1).abs().max()) < 1e-5  # torch adds float32 in columns
            # A product near 1,000 is rounded by 6e-5, as in torch's own.
            assert_equal(results, case, bound=1e-4)


@pytest.mark.parametrize("form", ["contiguous", "channels last"])
def test_a_ranks_statistics_are_right_also_where_torchs_mean_is_off(form: str) -> None:
    values = 1e4 + torch.randn(40, 2, 30, 30, generator=torch.Generator().manual_seed(2))
    mean, variance = statistics(formed(values, form))
    exact = torch.var_mean(values.double(), (0, 2, 3), correction=0)
    assert float((mean - exact[1]).abs().max()) < 1e-5  # deviations; torch's own mean is off by 0.03 in columns
    assert float((variance / exact[0] - 1).abs().max()) < 1e-4  # by its mean alone it would be off by 1e-3


def in_evaluation() -> bool:
    with dl.join_world() as world:
        layer = sync_batch_norm(layer_of(Case(())).float(), world).eval()
        if world.rank > 0:
            return True  # no other rank is asked
        values = torch.randn(3, 3, 2, 2)
        usual = layer_of(Case(())).float().eval()
        return torch.equal(layer(values), usual(values))


def test_evaluation_is_torchs_own_and_asks_no_other_rank(on_ranks: OnRanks) -> None:
    assert all(on_ranks(2, in_evaluation))


def test_a_world_of_one_gives_the_bits_of_torchs_own() -> None:
    case = Case((5,), dtype=torch.float32)
    [found], expected = train_on_ranks([case]), train_alone(case, torch.float32)
    for name in ("outputs", "of_values", "of_parameters", "buffers"):
        assert same_on_all([getattr(found, name), getattr(expected, name)])


# -- many ranks: one row for all of them, whose bytes do not grow with their number ---------------------------

ONE_ROW_CASES = [
    Case((4, 0, 3)),
    Case((1, 2, 0), kind="1d", places=()),
    Case((3, 1, 2), options={"momentum": None}),
    Case((3, 1, 2), options={"track_running_stats": False}),
    Case((3, 1, 2), form="channels last"),
]


def most_rows(number: int) -> Any:
    """Have messages of more ranks than this one row."""
    return mock.patch("ddp_loop.batch_norm.synced._MOST_ROWS", number)


def train_with_one_row(cases: list[Case]) -> list[Trained]:
    with most_rows(1):
        return train_on_ranks(cases)


@pytest.mark.covers("J13")
@pytest.mark.both_exchanges
@pytest.mark.quick_on_gpus
def test_one_row_gives_what_one_process_computes(on_ranks: OnRanks) -> None:
    for case, *results in zip(ONE_ROW_CASES, *on_ranks(3, train_with_one_row, ONE_ROW_CASES), strict=True):
        assert_equal(results, case)


@pytest.mark.covers("J13")
@pytest.mark.both_exchanges
def test_a_mean_a_thousand_deviations_from_0_keeps_nine_digits(on_ranks: OnRanks) -> None:
    case = Case((40, 30, 20), mean=1000.0)
    assert_equal([one for one, in on_ranks(3, train_with_one_row, [case])], case, 1e-8)  # fmt: skip


def bytes_of_a_layer(rows: int) -> int:
    with most_rows(rows), dl.join_world() as world, counted(world) as handed:
        layer = sync_batch_norm(nn.BatchNorm1d(100), world)
        handed.clear()
        layer(torch.randn(4, 100, requires_grad=True)).sum().backward()
        return sum(map(sum, handed))


@pytest.mark.covers("J13")
@pytest.mark.both_exchanges
def test_its_bytes_do_not_grow_with_the_ranks(on_ranks: OnRanks) -> None:
    on_two, on_four = (on_ranks(ranks, bytes_of_a_layer, 1)[0] for ranks in (2, 4))
    assert on_two == on_four == 2 * 8 * (3 + 2 * 100)  # forward and backward
    assert on_ranks(4, bytes_of_a_layer, 8)[0] == 4 * on_four


def call_differently(how: str) -> str:
    with most_rows(1):
        try:
            with dl.join_world() as world:
                first, second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
                model: Any = sync_batch_norm(nn.ModuleList([first, second]), world)
                rows = torch.randn(int(world.rank == 0) if how == "one value" else 4, 3)
                model[world.rank == 1 if how == "another layer" else 0](rows)
                model[0]._channel.send_control()
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.covers("J13")
@pytest.mark.both_exchanges
@pytest.mark.one_device("cpu", "on a GPU the hosts compare digests, whatever the messages are")
@pytest.mark.parametrize(
    ("how", "said"), [("another layer", "rank 1 at the forward of layer `1`"), ("one value", "more than 1 value")]
)
def test_ranks_that_call_other_layers_or_have_one_value_all_raise(how: str, said: str, on_ranks: OnRanks) -> None:
    assert [one for one in on_ranks(3, call_differently, how) if said not in one] == []
