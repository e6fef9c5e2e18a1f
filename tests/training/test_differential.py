"""Drawn jobs by ddp_loop on ranks, and by a plain loop in one process with no line of ddp_loop's arithmetic.

All is float64 but a layer of one network, and gradients, values, buffers and what the optimizer keeps may differ by
1e-12 of a pass's largest number: only the order of sums differs. With one shard nothing may differ.
`python -m pytest tests/training/test_differential.py --hypothesis-profile=search` draws others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

import ddp_loop as dl
from benchmarks.payload import travelling
from tests.support.cases import CASES, SPOILING, Case, make, make_data
from tests.support.exchanges import on_machines
from tests.support.harness import OnRanks

pytestmark = pytest.mark.on_gpus_too

BOUND = 1e-12
RULES: dict[str, Any] = {"0.level": "mean"}
Shard = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # inputs, labels, numbers of the samples
Named = dict[str, torch.Tensor | None]


class Drift(nn.Module):
    """Buffers of its own: one that depends on the samples, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.level: torch.Tensor
        self.calls: torch.Tensor

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.level.lerp_(rows.detach().mean(0), 0.1)
            self.calls += 1
        return rows * (1 + self.level)


class Complex(nn.Module):
    """Parameters that are complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows.to(self.weight.dtype) @ self.weight).abs()


class Calls(nn.Module):
    """A batch-norm layer that some shards call twice, and one that some do not call."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv1d(2, 5, 1)
        self.often = nn.BatchNorm1d(5)
        self.rarely = nn.BatchNorm1d(5, momentum=0.2)
        self.last = nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = self.often(self.into(x))
        if x[0, 0, 0] > 0.5:
            values = self.rarely(self.often(torch.tanh(values)))
        return self.last(values.flatten(1))  # type: ignore[no-any-return]


class Branch(nn.Module):
    """Rows that are selected, often none, pass through a norm: without rows torch counts the call alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2, momentum=None)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_selected = x[:, 0, 0] > 0.5
        branch = torch.zeros_like(x).index_put((is_selected,), self.norm(x[is_selected]))
        return self.last((x + branch).flatten(1))  # type: ignore[no-any-return]


class Undefined(torch.autograd.Function):
    """The identity, whose backward gives no gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


def triple(module: nn.Module, slopes: Any, _: Any) -> tuple[torch.Tensor]:
    return (3 * slopes[0],)


class Unusual(nn.Module):
    """Uses of parameters that torch's tests of DDP try.

    Several forwards of a layer, one for nothing and one without a graph; a functional call, hooks of modules, nested
    outputs; a layer whose gradients are undefined, and one without outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(6, 3)  # the first layer, which jobs freeze: torch warns of a hook without an input
        self.body = nn.Linear(6, 5)
        self.one = nn.Linear(5, 3)
        self.other = nn.Linear(5, 3)
        self.empty = nn.Linear(6, 1, bias=False)
        self.empty.weight = nn.Parameter(torch.empty(0, 6))
        self.body.register_forward_pre_hook(lambda module, inputs: (torch.relu(inputs[0]),))
        self.body.register_forward_hook(lambda module, inputs, output: {"hidden": [output * 2]})
        self.one.register_full_backward_hook(triple)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.other(self.body(rows)["hidden"][0])
        with torch.no_grad():
            aim = self.one(self.body(rows)["hidden"][0]).tanh()
        hidden = torch.tanh(self.body(rows)["hidden"][0])
        doubled = {name: 2 * parameter for name, parameter in self.other.named_parameters()}
        found = self.one(hidden) - aim + functional_call(self.other, doubled, (self.body(2 * rows)["hidden"][0],))
        return found + Undefined.apply(self.unused(rows)) + self.empty(rows).sum(1, keepdim=True)  # type: ignore[no-any-return, no-untyped-call]


def instance_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten(), nn.Linear(8, 3)
    )


NETWORKS = {
    **CASES,
    "instance norm": Case(instance_norm, (2, 4)),
    "a branch with few rows": Case(Branch, (2, 4)),
    "buffers": Case(lambda: nn.Sequential(Drift(), nn.Linear(6, 3)), (6,)),
    "complex": Case(lambda: nn.Sequential(Complex()), (6,)),
    "calls that differ": Case(Calls, (2, 4)),
    "unusual uses": Case(Unusual, (6,)),
}
SYNCED = {
    *("batch norm 1d", "batch norm 2d", "momentum None", "affine off"),
    *("a frozen layer", "a layer used twice", "a branch with few rows"),
}
NOT_ALWAYS_CALLED = {"a branch not always taken", "calls that differ"}  # a layer of each
DTYPES_OF_ITS_OWN = {"complex", "two dtypes"}
CHANGED_IN_FORWARD = {"buffers", "spectral norm"}  # whose outputs differ when they are computed again, in torch too
LOSSES = ("mean", "sum", "weights", "tokens", "weighted sum", "several", "held", "held at times")
WEIGHTED = ("weights", "tokens", "weighted sum")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.05, eps=0.1),  # a smaller one amplifies what is rounded
    "fused Adam": partial(torch.optim.Adam, lr=0.05, eps=0.1, fused=True),
}


@dataclass(frozen=True)
class Job:
    """What is trained, how it is cut, and what the script does."""

    network: str
    loss: str = "mean"
    ranks: int = 2
    machines: tuple[int, ...] = ()  # with so many ranks each; one without it
    shards: int | None = None  # fixed ones
    shares: tuple[int, ...] | None = None  # of the ranks
    batch_size: int = 6
    samples: int = 23
    passes: int = 1  # of each step
    bucket_cap_mib: float = 8.0
    optimizer: str = "SGD"
    clipped: bool = False
    is_channels_last: bool = False
    moments: bool = False  # whether statistics travel as those
    is_synced: bool = False
    is_synced_late: bool = False  # after the loop was made
    recomputed: str = "no"  # inside backward, by which way of torch, if at all
    frozen_at: int = 0  # the step in which the first layer is frozen; 0 for never
    bad_sample: int = -1  # which spoils its step; -1 for none
    spoils: str = "loss"  # what of it is nan
    scaler: str = ""  # what scales the loss or its gradient
    shuffle: bool = False
    is_twice: bool = False  # whether the first layer is in the state under another name too
    is_float32: bool = False
    stop_after: int = 0  # the step after which it is left; 0 for none
    then_ranks: int = 0  # with which it goes on

    def after(self, step: int) -> Job:
        """The job of what follows a step."""
        return replace(self, ranks=self.then_ranks, machines=(), shares=None) if 0 < self.stop_after <= step else self

    def is_held(self, step: int) -> bool:
        """Whether the loss of a step needs all outputs."""
        return self.loss == "held" or (self.loss == "held at times" and step % 2 == 0)

    def pieces(self, indices: list[int]) -> Iterator[list[int]]:
        """The samples of each shard of a mini-batch."""
        given = self.shares if self.shards is None else None
        shares = given or (1,) * (self.shards or self.ranks)
        products = [len(indices) * share for share in shares]
        sizes = [product // sum(shares) for product in products]
        by_remainder = sorted(range(len(shares)), key=lambda place: -(products[place] % sum(shares)))
        for place in by_remainder[: len(indices) - sum(sizes)]:
            sizes[place] += 1
        start = 0
        for size in filter(None, sizes):
            yield indices[start : start + size]
            start += size


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Any of them."""
    batch_size = draw(st.integers(1, 9))
    samples = draw(st.integers(1, 4 * batch_size))
    network = draw(st.sampled_from(sorted(NETWORKS)))
    loss = draw(st.sampled_from(LOSSES))
    # Where only a GPU knows that a shard's weight is 0, its gradients are 0, and a plain loop's are None.
    assume(network not in NOT_ALWAYS_CALLED or loss not in ("tokens", "weighted sum"))
    is_synced = network in SYNCED and draw(st.booleans())
    is_synced_late = is_synced and draw(st.booleans())
    bad = draw(st.just(-1) | st.integers(0, samples - 1))
    ranks = draw(st.integers(1, 3))
    shards = draw(st.none() | st.integers(1, ranks if is_synced else 6))
    may_recompute = network not in CHANGED_IN_FORWARD or loss == "held"
    ways = ("no", "no", "not reentrant", "reentrant")
    shares = st.tuples(*[st.integers(0, 3)] * ranks).filter(any)
    return Job(
        network=network,
        loss=loss,
        ranks=ranks,
        machines=draw(st.sampled_from(((), (1, 2), (2, 1)))) if ranks == 3 else (),
        shards=shards,
        shares=None if shards is not None and (is_synced or shards < ranks) else draw(st.none() | shares),
        batch_size=batch_size,
        samples=samples,
        passes=draw(st.sampled_from((1, 1, 2))),
        bucket_cap_mib=draw(st.sampled_from((8.0, 1e-5))),
        optimizer=draw(st.sampled_from([one for one in OPTIMIZERS if "fused" not in one or network != "complex"])),
        clipped=draw(st.booleans()),
        is_channels_last=len(NETWORKS[network].shape) == 3 and draw(st.booleans()),
        moments=draw(st.booleans()),
        is_synced=is_synced,
        is_synced_late=is_synced_late,
        recomputed=draw(st.sampled_from(ways)) if may_recompute else "no",
        frozen_at=0 if network in ("a branch not always taken", "complex") else draw(st.integers(0, 3)),
        bad_sample=bad,
        spoils=draw(st.sampled_from(sorted(SPOILING))),
        scaler="" if network == "complex" else draw(st.sampled_from(("", "", "of the loss", "in a hook"))),
        shuffle=draw(st.booleans()),
        is_twice=not is_synced_late and draw(st.booleans()),  # the other name would keep a layer that is not synced
    )


JOBS_OF_INTEREST = [
    Job("a branch with few rows", batch_size=1),
    Job("a branch with few rows", batch_size=1, moments=True),
    Job("a branch with few rows", batch_size=1, is_synced=True),
    Job("calls that differ", moments=True),
    Job("a layer used twice", shards=3, recomputed="not reentrant", loss="held", clipped=True),
    Job("a layer used twice", ranks=3, is_synced=True, is_synced_late=True, shards=2),
    Job("instance norm", shards=4, recomputed="reentrant", loss="several"),
    Job("buffers", shards=4, batch_size=3, samples=5, recomputed="not reentrant", loss="held", passes=2),
    Job("no batch norm", loss="held at times", passes=2, bucket_cap_mib=1e-5, batch_size=1, samples=8, frozen_at=9),
    Job("a criterion with parameters", loss="held", shares=(0, 1)),
    Job("complex", ranks=3, loss="weighted sum"),
    Job("a branch not always taken", shards=4, loss="several"),
    Job("batch norm 1d", ranks=3, is_synced=True, loss="weights", samples=14),
    Job("unusual uses", ranks=3, samples=19),
    Job("unusual uses", shards=5, loss="several"),
    Job("no batch norm", ranks=3, machines=(1, 2), shards=6, loss="weights"),
    Job("a branch with few rows", ranks=1, batch_size=1, recomputed="not reentrant", scaler="in a hook"),
    Job("batch norm 1d", is_synced=True, recomputed="not reentrant", loss="several", shares=(0, 1)),
    Job("batch norm 1d", is_synced=True, recomputed="not reentrant", loss="held", shares=(0, 1)),
]


def with_jobs_of_interest(test: Callable[..., None]) -> Callable[..., None]:
    """A test that begins with those."""
    for job in JOBS_OF_INTEREST:
        test = example(job=job)(test)
    return test


@dataclass
class Outcome:
    """Of a pass: the step's result, and gradients. Of the last one of a step also what the update left."""

    values: list[float]
    gradients: Named
    state: dict[str, torch.Tensor]


class Trained:
    """What both loops train, and how one updates it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        case = NETWORKS[job.network]
        self.model, criterion = make(case)
        if job.is_channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.criterion = criterion or nn.CrossEntropyLoss()
        inputs, labels = make_data(case.shape, job.samples)
        if job.is_float32:
            self.model.float()
            self.criterion.float()
            inputs = inputs.float()
        self.parameters = dict(self.model.named_parameters())
        self.parameters |= {f"criterion.{name}": one for name, one in self.criterion.named_parameters()}
        self.optimizer = OPTIMIZERS[job.optimizer](self.parameters.values())
        device = next(self.model.parameters()).device.type
        self.scaler = torch.amp.GradScaler(device, init_scale=16.0, growth_interval=2, enabled=bool(job.scaler))
        self.data: Shard = (inputs, labels, torch.arange(job.samples))

    def freeze(self, step: int) -> None:
        """Freeze or unfreeze the first layer, if it is time."""
        NETWORKS[self.job.network].before_step(self.model, step)
        if 0 < self.job.frozen_at <= step:
            first = next(self.model.children())
            first.requires_grad_(False)

    def outputs(self, inputs: torch.Tensor) -> torch.Tensor:
        """Of a shard."""
        if self.job.recomputed == "no":
            return self.model(inputs)  # type: ignore[no-any-return]
        given = inputs.detach().requires_grad_()
        found: torch.Tensor = checkpoint(self.model, given, use_reentrant=self.job.recomputed == "reentrant")
        return found

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Of a shard, or of all."""
        loss: torch.Tensor = self.criterion(outputs, labels)
        return loss + SPOILING[self.job.spoils](outputs) if bool((numbers == self.job.bad_sample).any()) else loss

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as its backward gets it."""
        if self.job.scaler == "in a hook":
            loss.register_hook(self.scaler.scale)
            return loss
        return self.scaler.scale(loss)

    def update(self) -> dict[str, torch.Tensor]:
        """Update the parameters, and return all that is trained."""
        if any(one.grad is not None for one in self.parameters.values()):  # else a scaler refuses
            if self.job.clipped:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.parameters.values(), 0.3)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        tensors: dict[str, Any] = {**self.parameters, **dict(self.model.named_buffers())}
        for name, parameter in self.parameters.items():
            kept = self.optimizer.state.get(parameter, {})
            tensors |= {f"{key} of {name}": one for key, one in kept.items() if torch.is_tensor(one)}
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def outcome(self, values: list[float]) -> Outcome:
        """After a pass, before the update. What a scaler or a fused kernel skips counts as None."""
        given = {name: None if one.grad is None else one.grad.clone() for name, one in self.parameters.items()}
        if (self.job.scaler or "fused" in self.job.optimizer) and not all(
            bool(one.isfinite().all()) for one in (torch.tensor(values[0]), *given.values()) if one is not None
        ):
            given = dict.fromkeys(given)
        return Outcome([*values, self.scaler.get_scale()], given, {})


def tokens_of(numbers: torch.Tensor) -> torch.Tensor:
    """The place of the sample that each token is of; a sample has 0 to 3 of them."""
    return torch.arange(len(numbers)).repeat_interleave(numbers % 4)


def weight_of(form: str, numbers: torch.Tensor) -> float:
    """Of a shard; 0 for some."""
    return float(len(tokens_of(numbers)) if form == "tokens" else int(numbers[:1].sum()) % 4)


def loss_of_all(outputs: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """One that is no mean over samples."""
    return loss + outputs.mean().square()


def make_loop(job: Job, trained: Trained, world: dl.World, folder: str | None) -> dl.Loop:
    """Of two epochs."""
    state: dict[str, object] = {
        "model": trained.model, "criterion": trained.criterion, "optimizer": trained.optimizer,
        "scaler": trained.scaler,
    }  # fmt: skip
    if job.is_twice:
        state["again"] = next(trained.model.children())
    rules = {f"model.{name}": rule for name, rule in RULES.items()} if job.network == "buffers" else None
    batches = dl.Batches(trained.data, job.batch_size, world, shards=job.shards, shares=job.shares, shuffle=job.shuffle)
    return dl.Loop(
        batches, 2, state=state, progress=False, on_nonfinite="skip", buffer_reduction=rules,
        bucket_cap_mib=job.bucket_cap_mib, allow_single_sample_shards=True, run_dir=folder, resume=bool(folder),
    )  # fmt: skip


def train(job: Job, folder: str | None = None) -> list[Outcome]:
    """By ddp_loop; with a run folder until it is left, or from there to the end."""
    outcomes = []
    is_cut = job.machines and not torch.cuda.is_available()  # the local rank chooses the GPU
    places = on_machines(*job.machines) if is_cut else nullcontext()
    with places, travelling(moments=job.moments), dl.join_world(seed=0) as world:
        trained = Trained(job)
        with torch.no_grad():
            for parameter in trained.parameters.values():
                parameter.add_(world.rank)  # all begin with those of rank 0
        if job.is_synced and not job.is_synced_late:
            dl.sync_batch_norm(trained.model, world)
        loop = make_loop(job, trained, world, folder)
        if job.is_synced:
            dl.sync_batch_norm(trained.model, world)  # synced layers stay as they are
        for step in loop:
            if 0 < job.stop_after < step.iteration:
                break
            trained.freeze(step.iteration)
            for _ in range(job.passes):
                for shard in step:
                    give(job, step, trained, shard)
                if job.is_held(step.iteration):
                    outputs, labels, numbers = step.gather()
                    loss = loss_of_all(outputs, trained.loss(outputs, labels, numbers))
                    step.backward(trained.scaled(loss), first=float(outputs.detach()[0].sum()))
                result = step.fold()
                values = [result.loss.item(), *(one.item() for _, one in sorted(result.metrics.items()))]
                outcomes.append(trained.outcome(values))
            outcomes[-1].state = trained.update()
            if step.iteration == job.stop_after:
                loop.save()
    return outcomes


def give(job: Job, step: dl.Step, trained: Trained, shard: Shard) -> None:
    """One shard's backward. Afterwards its tensors are written again, as in a script that avoids allocations."""
    inputs, labels, numbers = shard
    outputs = trained.outputs(inputs)
    if job.is_held(step.iteration):
        kept = labels.clone()
        step.hold(outputs, kept, numbers)
        kept.zero_()
        return
    tokens = tokens_of(numbers) if job.loss == "tokens" else torch.arange(len(numbers))
    loss = trained.loss(outputs[tokens], labels[tokens], numbers[tokens])
    hits = (outputs.argmax(1) == labels).double()
    metrics: dict[str, Any] = {"count": dl.Sum(hits), "hits": hits, "size": dl.Sum(len(labels))}
    weight = torch.tensor(weight_of(job.loss, numbers))
    if job.loss in ("weights", "tokens") and not weight:
        loss = loss * torch.nan  # a mean over nothing adds exactly 0
    if job.loss in ("mean", "held at times"):
        step.backward(trained.scaled(loss), **metrics)
    elif job.loss == "sum":
        step.backward(trained.scaled(loss * (len(labels) / step.samples)), reduction="sum", **metrics)
    elif job.loss == "weights":
        step.backward(trained.scaled(loss), weight=weight.item(), **metrics)
    elif job.loss == "tokens":
        step.backward(trained.scaled(loss), weight=weight, **metrics)
    elif job.loss == "weighted sum":
        step.backward(trained.scaled(1.0 * loss), weight=weight, reduction="sum", **metrics)
    else:
        weight = torch.tensor(float(len(labels)))  # the usual one
        step.backward(trained.scaled(loss / 4), weight=weight, more_losses=True)
        other = trained.loss(trained.outputs(inputs), labels, numbers) * 0.75
        step.backward(trained.scaled(other), weight=weight, **metrics)
    for one in (loss.detach(), hits, weight):
        one.fill_(1e9)


def train_plainly(job: Job, order: list[list[int]]) -> list[Outcome]:
    """As one would on one device: one backward of the mini-batch's loss, but batch norm over each shard."""
    trained, outcomes = Trained(job), []
    buffers = dict(trained.model.named_buffers())
    for number, indices in enumerate(order, 1):
        trained.freeze(number)
        inputs, labels, numbers = trained.data
        shards = [
            Piece(inputs[piece], labels[piece], numbers[piece]) for piece in job.after(number - 1).pieces(indices)
        ]
        assume(job.loss not in WEIGHTED or any(weight_of(job.loss, shard.numbers) for shard in shards))
        for _ in range(job.passes):
            opened = {name: buffer.clone() for name, buffer in buffers.items()}
            forward_plainly(trained, shards, opened)
            loss, values = loss_and_values(trained, shards, job.is_held(number))
            trained.optimizer.zero_grad()
            trained.scaler.scale(loss).backward(retain_graph=True)
            gradients = [] if job.scaler else [one.grad for one in trained.parameters.values() if one.grad is not None]
            if not all(bool(one.isfinite().all()) for one in (loss, *gradients)):  # the step is skipped
                if job.scaler:
                    (loss * torch.nan).backward()
                else:
                    trained.optimizer.zero_grad()
                for name, buffer in buffers.items():
                    buffer.copy_(opened[name])
            outcomes.append(trained.outcome([loss.item(), *values]))
        outcomes[-1].state = trained.update()
    return outcomes


@dataclass
class Piece:
    """A shard, and what its forwards give."""

    inputs: torch.Tensor
    labels: torch.Tensor
    numbers: torch.Tensor
    outputs: tuple[torch.Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self.inputs)


def forward_plainly(trained: Trained, shards: list[Piece], opened: dict[str, torch.Tensor]) -> None:
    """The outputs of each shard, each from the buffers at the start; afterwards buffers are those of all shards."""
    job, model, sizes = trained.job, trained.model, [*map(len, shards)]
    forwards = 2 if job.loss == "several" else 1
    if job.is_synced or len(shards) == 1:  # torch's own loop on the whole mini-batch
        inputs = torch.cat([shard.inputs for shard in shards])
        wholes = [model(inputs).split(sizes) for _ in range(forwards)]
        for shard, *outputs in zip(shards, *wholes, strict=True):
            shard.outputs = tuple(outputs)
        return
    noted: dict[tuple[int, int], list[torch.Tensor]] = {}
    left: list[tuple[float, dict[str, torch.Tensor]]] = []
    for shard in shards:
        own = {name: buffer.clone() for name, buffer in opened.items()}
        left.append((len(shard) / sum(sizes), own))
        hooks = call_inputs(model, noted)
        tensors = {**dict(model.named_parameters()), **own}
        shard.outputs = tuple(functional_call(model, tensors, (shard.inputs,)) for _ in range(forwards))
        for hook in hooks:
            hook.remove()
    for name, buffer in model.named_buffers():
        # All shards change the others alike, but for batch norm's, which follow.
        is_mean = name.endswith("level") or job.network == "instance norm"
        mean = torch.stack([share * own[name] for share, own in left]).sum(0)
        buffer.copy_(mean if is_mean else left[-1][1][name])
    move_statistics(model, opened, noted)


def call_inputs(model: nn.Module, noted: dict[tuple[int, int], list[torch.Tensor]]) -> list[Any]:
    """Hooks that note the input of each training batch-norm layer's k-th call in the shard at hand."""
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    calls = [0] * len(layers)

    def make(number: int) -> Callable[..., None]:
        def note(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if layer.training:
                noted.setdefault((calls[number], number), []).append(inputs[0].detach().clone())
                calls[number] += 1

        return note

    return [layer.register_forward_pre_hook(make(number)) for number, layer in enumerate(layers)]


@torch.no_grad()
def move_statistics(
    model: nn.Module, opened: dict[str, torch.Tensor], noted: dict[tuple[int, int], list[torch.Tensor]]
) -> None:
    """Move the running statistics as torch would if all shards' values had come in one mini-batch."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
    for name, layer in layers:
        for key, buffer in layer.named_buffers():
            buffer.copy_(opened[f"{name}.{key}" if name else key])
    for call, number in sorted(noted):
        layer = layers[number][1]
        if layer.running_mean is None or layer.running_var is None or layer.num_batches_tracked is None:
            continue
        layer.num_batches_tracked += 1
        if not any(map(len, noted[call, number])):
            continue
        decay = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
        values = torch.cat([one.movedim(1, 0).flatten(1) for one in noted[call, number]], dim=1).double()
        layer.running_mean.mul_(1 - decay).add_(decay * values.mean(1))
        layer.running_var.mul_(1 - decay).add_(decay * values.var(1))


def joined(shards: list[Piece]) -> tuple[torch.Tensor, ...]:
    """The outputs, labels and numbers of shards."""
    return tuple(map(torch.cat, zip(*((one.outputs[0], one.labels, one.numbers) for one in shards), strict=True)))


def loss_and_values(trained: Trained, shards: list[Piece], is_held: bool) -> tuple[torch.Tensor, list[float]]:
    """The loss of a mini-batch, and its metrics."""
    form = trained.job.loss
    outputs, labels, numbers = joined(shards)
    if is_held:
        loss = loss_of_all(outputs, trained.loss(outputs, labels, numbers))
        return loss, [float(outputs[0].detach().sum())]
    weights = [weight_of(form, shard.numbers) if form in WEIGHTED else float(len(shard)) for shard in shards]
    shares = [weight / sum(weights) for weight in weights]
    hits = (outputs.argmax(1) == labels).double()
    parts = hits.split([*map(len, shards)])
    mean = sum(share * float(part.mean()) for share, part in zip(shares, parts, strict=True))
    values = [float(hits.sum()), mean, float(len(hits))]
    used = [(one, share) for one, share in zip(shards, shares, strict=True) if share or form == "weighted sum"]
    if form == "tokens":
        outputs, labels, numbers = joined([shard for shard, _ in used])
        tokens = tokens_of(numbers)
        return trained.loss(outputs[tokens], labels[tokens], numbers[tokens]), values
    losses = []
    for shard, share in used:
        factors = (0.25, 0.75) if form == "several" else (1.0,)
        for factor, output in zip(factors, shard.outputs, strict=True):
            loss = factor * trained.loss(output, shard.labels, shard.numbers)
            losses.append(loss if form == "weighted sum" else share * loss)
    return torch.stack(losses).sum(), values


def order_of(job: Job) -> list[list[int]]:
    """The samples of each mini-batch."""
    with dl.join_world(seed=0) as world:
        batches = dl.Batches(torch.zeros(job.samples), job.batch_size, world, shuffle=job.shuffle)
        steps = -(-job.samples // job.batch_size)
        places = [(epoch, batches.mini_batch(epoch, number)) for epoch in (1, 2) for number in range(steps)]
        return [batches.indices(epoch, one.start, one.samples).tolist() for epoch, one in places]


def differences(job: Job, found: list[Outcome], wanted: list[Outcome]) -> list[str]:
    """What differs by more than the bound of the pass's largest number, in words; also in a gradient's strides."""
    bound = 1e-5 if job.network == "two dtypes" else BOUND  # float32 rounds at 6e-8
    assert len(found) == len(wanted)
    lines = []
    for number, (one, other) in enumerate(zip(found, wanted, strict=True), 1):
        assert one.gradients.keys() == other.gradients.keys()
        # A fused kernel that skips a GPU's first step has made its state, of zeros.
        kept = {name: torch.zeros_like(one.state[name]) for name in one.state if "fused" in job.optimizer} | other.state
        assert one.state.keys() == kept.keys()
        values = [torch.tensor(outcome.values, dtype=torch.float64) for outcome in (one, other)]
        pairs: dict[str, Any] = {"loss and metrics": tuple(values)}
        pairs |= {f"gradient of {name}": (one.gradients[name], wanted) for name, wanted in other.gradients.items()}
        pairs |= {name: (one.state[name], wanted) for name, wanted in kept.items()}
        largest = max([1.0, *(float(t.abs().max()) for _, t in pairs.values() if t is not None and t.numel())])
        lines += [
            f"pass {number}: {name}" for name, pair in pairs.items() if not is_close(pair[0], pair[1], bound * largest)
        ]
    return lines


def is_close(one: torch.Tensor | None, other: torch.Tensor | None, bound: float) -> bool:
    if one is None or other is None:
        return one is other
    return one.stride() == other.stride() and torch.allclose(one, other, rtol=0, atol=bound, equal_nan=True)


def bits(outcomes: list[Outcome]) -> str:
    """A hash of all that was trained."""
    digest = sha256()
    for one in outcomes:
        for tensor in (*filter(torch.is_tensor, one.gradients.values()), *one.state.values()):
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def require_equal(on_ranks: OnRanks, job: Job) -> None:
    """Require of a job that its ranks train as the plain loop does, and have the same bits."""
    wanted = train_plainly(job, order_of(job))
    results = on_ranks(job.ranks, train, job)
    assert differences(job, results[0], wanted) == []
    assert len(set(map(bits, results))) == 1


@pytest.mark.covers("B10", "C5", "C6", "D1", "D2", "D3", "D4", "D5", "D6", "D7", "D11", "D13", "J2")
@pytest.mark.quick_on_gpus
@settings(phases=[Phase.explicit])
@given(job=jobs())
@with_jobs_of_interest
def test_jobs_of_interest_equal_the_plain_loop(on_ranks: OnRanks, job: Job) -> None:
    require_equal(on_ranks, job)


@pytest.mark.covers("C5", "C6", "D1", "D2", "D3", "D4", "D5", "D6", "D7", "D11", "D13", "J2")
@given(job=jobs())
@pytest.mark.slow
def test_any_job_equals_the_plain_loop(on_ranks: OnRanks, job: Job) -> None:
    require_equal(on_ranks, job)


@pytest.mark.covers("H1", "H7")
@given(job=jobs(), stop_after=st.integers(1, 7), then_ranks=st.integers(1, 3))
@pytest.mark.slow
def test_any_job_that_is_left_and_resumed_on_other_ranks_equals_the_plain_loop(
    on_ranks: OnRanks, job: Job, stop_after: int, then_ranks: int
) -> None:
    assume(not job.is_synced or (job.shards or 1) <= then_ranks)  # else one rank has several shards, and syncs nothing
    order = order_of(job)
    job = replace(job, stop_after=1 + stop_after % len(order), then_ranks=then_ranks)
    wanted = train_plainly(job, order)
    then = replace(job.after(len(order)), stop_after=0)
    with TemporaryDirectory() as folder:
        found = on_ranks(job.ranks, train, job, folder)[0]
        if job.stop_after < len(order):
            found += on_ranks(then.ranks, train, then, folder)[0]
    assert differences(job, found, wanted) == []


@pytest.mark.covers("D3", "D4")
@given(job=jobs(), is_float32=st.booleans())
def test_any_job_with_one_shard_has_the_bits_of_the_plain_loop(job: Job, is_float32: bool) -> None:
    assume(job.loss != "several")  # torch adds up the gradients of two uses in another order
    job = replace(
        job, ranks=1, machines=(), shards=1, shares=None, is_float32=is_float32 and job.network not in DTYPES_OF_ITS_OWN
    )
    assert bits(train(job)) == bits(train_plainly(job, order_of(job)))


@pytest.mark.covers("C5", "D5", "H7")
@given(job=jobs(), ranks=st.integers(1, 3), shards=st.integers(1, 6), bucket_cap_mib=st.sampled_from((8.0, 1e-5)))
@pytest.mark.slow
def test_any_job_with_fixed_shards_has_the_same_bits_on_any_number_of_ranks(
    on_ranks: OnRanks, job: Job, ranks: int, shards: int, bucket_cap_mib: float
) -> None:
    shares = None if shards < job.ranks else job.shares
    job = replace(job, shards=shards, shares=shares, is_synced=False)
    other = replace(job, ranks=ranks, machines=(), shares=None, bucket_cap_mib=bucket_cap_mib)
    trained = [outcomes for one in (job, other) for outcomes in on_ranks(one.ranks, train, one)]
    found = {(bits(outcomes), repr([one.values for one in outcomes])) for outcomes in trained}
    assert len(found) == 1
