"""Mini-batches of sequences cut into chunks, whose hidden state is carried from chunk to chunk.

[Note: Lanes] A lane is a row of the mini-batch that reads one sequence after the other, chunk by chunk. Sequences are
assigned to lanes longest first, each to the lane with the fewest chunks so far (Graham: Bounds on multiprocessing
timing anomalies, 1969). Which lane gets a number of chunks depends on the lengths alone, so every epoch has equally
many mini-batches. Which sequence of that many chunks it is, and the order within the lane, depend on the epoch's order.

[Note: Carried state] The state belongs to the lane, so it stays with its shard and never enters a sum. The state after
a chunk is kept until the chunk after the next one, since a step may pass over its chunks several times. A checkpoint
has the rows of all lanes: each rank writes its own rows into zeros, and a sum of bytes brings them together.

[Note: Rows that are not finite] A loop that skips steps which are not finite would skip all further steps of a sequence
whose state became NaN. There such a row keeps the state before the chunk, as if its sequence had not had the chunk. The
device decides, so the host does not wait.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ddp_loop.accelerators import accelerator_of, sent
from ddp_loop.data import fingerprints
from ddp_loop.data.batches import Batches, LoadedBatch
from ddp_loop.data.placement import Places, gpu_in, map_tensors, pinned, tensors_in, to_devices, with_parts
from ddp_loop.data.readers import as_parts, common_length
from ddp_loop.data.seeded_dataset import SeededDataset
from ddp_loop.data.shards import EVALUATED, Division, MiniBatch, cut, split_range, split_sizes
from ddp_loop.determinism import check_count, permutation, preserved_streams
from ddp_loop.distributed import World

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Place = tuple[int, int]  # the epoch, counted from 1, and the position of the mini-batch, counted from 0
_COMPARED = 10_000  # sequences in memory, of each of which the ranks compare some KiB


# -- lanes -------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The chunks of n lanes in a mini-batch; each array is (n,) int64.

    Attributes:
        lanes: the lanes' numbers, ascending.
        sequences: the number of each lane's sequence.
        starts: the number of time steps of the sequence before the chunk.
        lengths: the number of time steps of the chunk, never 0.
        left: the number of time steps of the sequence after the chunk.
    """

    lanes: Numbers
    sequences: Numbers
    starts: Numbers
    lengths: Numbers
    left: Numbers

    def of(self, lanes: range) -> Rows:
        """The rows of some lanes."""
        here = slice(*np.searchsorted(self.lanes, (lanes.start, lanes.stop)).tolist())
        return Rows(*(part[here] for part in self))


class LanePlan(NamedTuple):
    """The chunks of an epoch.

    Attributes:
        rows: the chunks of the lanes that are not done before a mini-batch, by its position, counted from 0.
        before: the number of time steps before each mini-batch, and at last of the whole epoch; (steps + 1,) int64.
    """

    rows: Callable[[int], Rows]
    before: Numbers


class Lanes:
    """The assignment of sequences to lanes. See [Note: Lanes].

    Args:
        lengths: the time steps of each sequence, (N,) int64, each 1 or more.
        lanes: the number of lanes.
        length: the most time steps of a chunk.

    Attributes:
        lengths, lanes, length: as given.
        steps: the number of mini-batches in an epoch.
    """

    def __init__(self, lengths: Numbers, lanes: int, length: int) -> None:
        self.lengths = lengths
        self.lanes = lanes
        self.length = length
        self._chunks = -(-lengths // length)
        loads = [(0, lane) for lane in range(lanes)]
        heapify(loads)
        slots = []
        for chunks in np.sort(self._chunks)[::-1].tolist():
            load, lane = loads[0]
            slots.append(lane)
            heapreplace(loads, (load + chunks, lane))
        self._lane_of_slot: Numbers = np.array(slots, dtype=np.int64)  # of the k-th longest sequence
        self._loads: Numbers = np.zeros(lanes, dtype=np.int64)
        for load, lane in loads:
            self._loads[lane] = load
        self.steps = int(self._loads.max())

    def plan(self, order: Numbers) -> LanePlan:
        """The plan of an epoch that has the sequences in this order, (N,) int64."""
        lane_of = np.empty_like(self._lane_of_slot)
        lane_of[order[np.argsort(-self._chunks[order], kind="stable")]] = self._lane_of_slot
        sequences = order[np.argsort(lane_of[order], kind="stable")]  # lane by lane, as each lane reads them
        lanes = lane_of[sequences]
        chunks = self._chunks[sequences]
        # The position of the mini-batch with the first chunk of each.
        first = np.cumsum(chunks) - chunks - (np.cumsum(self._loads) - self._loads)[lanes]
        missing = chunks * self.length - self.lengths[sequences]  # of a sequence's last chunk
        running = self.lanes - np.searchsorted(np.sort(self._loads), np.arange(self.steps), side="right")
        sizes = self.length * running - np.bincount(first + chunks - 1, missing, self.steps).astype(np.int64)
        keys = lanes * self.steps + first  # ascending

        def rows(position: int) -> Rows:
            busy = np.flatnonzero(self._loads > position)
            at = np.searchsorted(keys, busy * self.steps + position, side="right") - 1
            steps = self.lengths[sequences[at]]
            starts = (position - first[at]) * self.length
            chunk = np.minimum(steps - starts, self.length)
            return Rows(busy, sequences[at], starts, chunk, steps - starts - chunk)

        return LanePlan(rows, np.concatenate([[0], np.cumsum(sizes)]))


# -- the hidden state --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kept:
    """The state that the chunks of some lanes left, with a row for each lane, and its form."""

    place: Place
    lanes: Numbers
    state: Any
    form: Any


class CarriedState:
    """The states that this rank's chunks left. See [Note: Carried state].

    Args:
        world: the ranks.
        batch_dim: the dimension of each tensor in which the rows are.

    Attributes:
        stays_finite: whether rows that are not finite keep their former state. See [Note: Rows that are not finite].
        whole: the state as a checkpoint has it, equal on all ranks; None while it has to be gathered.
    """

    def __init__(self, world: World, batch_dim: int) -> None:
        self._world = world
        self._batch_dim = batch_dim
        self.stays_finite = False
        self._kept: dict[int, list[_Kept]] = {}  # by shard, the oldest first
        self.whole: dict[str, Any] | None = {}
        self._resumed: _Kept | None = None

    # -- chunk by chunk ------------------------------------------------------------------------------------

    def before(self, shard: int, place: Place, rows: Rows) -> Any:
        """The state before a shard's chunk: zeros in the rows that begin a sequence; None if all rows do.

        Raises:
            RuntimeError: the chunk before left none.
        """
        begins = rows.starts == 0
        if begins.all():
            return None
        epoch, position = place
        kept = self._find(shard, (epoch, position - 1), rows.lanes[~begins])
        if kept is None:
            raise RuntimeError(self._missing(shard, place))
        device = self._world.device
        at = np.searchsorted(kept.lanes, rows.lanes).clip(max=len(kept.lanes) - 1)
        index = None if np.array_equal(kept.lanes, rows.lanes) else torch.from_numpy(at).to(device)
        fresh = torch.from_numpy(begins).to(device) if begins.any() else None

        def taken(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.to(device)
            if index is not None:
                tensor = tensor.index_select(self._batch_dim, index)
            if fresh is not None:
                tensor = tensor.masked_fill(fresh.view(-1, *[1] * (tensor.dim() - self._batch_dim - 1)), 0)
            return tensor

        return map_tensors(taken, kept.state)

    def _find(self, shard: int, place: Place, lanes: Numbers) -> _Kept | None:
        for kept in (*self._kept.get(shard, []), self._resumed):
            if kept is not None and kept.place == place and np.isin(lanes, kept.lanes).all():
                return kept
        return None

    def _missing(self, shard: int, place: Place) -> str:
        epoch, position = place
        found = "none was"
        if kept := self._kept.get(shard):
            newest = kept[-1].place
            found = f"the last one is that after mini-batch {newest[1] + 1} of epoch {newest[0]}"
        return (
            f"Chunks must be used in their order, and each must leave its hidden state. Mini-batch {position + 1} of "
            f"epoch {epoch} continues sequences, and the state after the mini-batch before it was not assigned "
            f"({found}). Assign chunk.hidden in every chunk, and resume from a checkpoint of the Loop."
        )

    def keep(self, shard: int, place: Place, rows: Rows, state: Any) -> None:
        """Keep the state that a shard's chunk left, detached.

        Raises:
            TypeError: it is not made of tensors.
            ValueError: a tensor has not a row for each row of the chunk, or another shape than in the chunk before.
            RuntimeError: a later chunk left its state before.
        """
        form = self._form_of(state, len(rows.lanes))
        kept = self._kept.get(shard, [])
        if kept and place < kept[-1].place and place[1] > 0:
            raise RuntimeError(self._missing(shard, place))
        former = self._find(shard, (place[0], place[1] - 1), rows.lanes)
        if former is not None and former.form != form:
            raise ValueError(
                "The hidden state must keep its structure, shapes and dtypes from chunk to chunk. Without the "
                f"dimension of the rows they were {former.form}. Got {form}. Assign the state that the next chunk "
                "needs."
            )
        state = map_tensors(torch.Tensor.detach, _by_key(state))
        if self.stays_finite:
            state = self._finite(state, self.before(shard, place, rows))
        self._kept[shard] = [one for one in kept if one is former] + [_Kept(place, rows.lanes, state, form)]

    def _finite(self, state: Any, before: Any) -> Any:
        """The state with the rows of `before`, zeros for None, where a row is not finite in one of its tensors."""
        dim = self._batch_dim
        tensors = tensors_in(state)
        finite = [one.isfinite().movedim(dim, 0).reshape(one.shape[dim], -1).all(1) for one in tensors]  # by row
        former: Iterator[torch.Tensor] = map(torch.zeros_like, tensors) if before is None else iter(tensors_in(before))

        def chosen(tensor: torch.Tensor) -> torch.Tensor:
            is_kept = torch.stack([one.to(tensor.device) for one in finite]).all(0)
            return torch.where(is_kept.view(-1, *[1] * (tensor.dim() - dim - 1)), tensor, next(former).to(tensor))

        return map_tensors(chosen, state)

    def _form_of(self, state: Any, rows: int) -> Any:
        """The containers, and in place of each tensor its dtype and its shape without the dimension of the rows."""
        if isinstance(state, torch.Tensor):
            shape = list(state.shape)
            if len(shape) <= self._batch_dim or shape[self._batch_dim] != rows:
                raise ValueError(
                    f"A hidden state must have a row for each row of the chunk, in dimension {self._batch_dim}. Got "
                    f"shape {tuple(shape)} for {rows} rows. Assign what the network returned for this chunk, or pass "
                    "SequenceBatches the batch_dim of its state (1 for LSTM and GRU, 0 for their cells)."
                )
            del shape[self._batch_dim]
            return str(state.dtype).removeprefix("torch."), shape
        if type(state) is dict:
            return {key: self._form_of(one, rows) for key, one in state.items()}
        if type(state) in (tuple, list):
            return [type(state).__name__, *(self._form_of(one, rows) for one in state)]
        raise TypeError(
            f"A hidden state must be a tensor, or tensors in tuples, lists and dicts. Got {type(state).__name__}. "
            "Take out what is not a tensor."
        )

    # -- checkpoints ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of all lanes after the newest mini-batch. Every rank must call this.

        Raises:
            ValueError: the shards' states have different forms.
        """
        return self._gather() if self.whole is None else self.whole

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the state of all lanes, each rank with its own, whatever their number."""
        self.whole = dict(state)
        self._kept = {}
        self._resumed = None
        if state:
            place = (state["epoch"], state["position"])
            lanes = state["lanes"].numpy()
            kept = _by_key(state["state"])
            self._resumed = _Kept(place, lanes, kept, self._form_of(kept, len(lanes)))

    def _gather(self) -> dict[str, Any]:
        dim = self._batch_dim
        newest = [own[-1] for own in self._kept.values()]
        if not newest and self._resumed is not None and self._world.rank == 0:  # no chunk was used since
            newest = [self._resumed]
        own = [(one.place, one.lanes.tolist(), map_tensors(lambda t: t.narrow(dim, 0, 0), one.state)) for one in newest]
        every = [fact for facts in self._world.gather(own, "the hidden states") for fact in facts]
        if not every:
            return {}
        place = max(fact[0] for fact in every)
        every = [fact for fact in every if fact[0] == place]
        forms = [self._form_of(blank, 0) for _, _, blank in every]
        if any(form != forms[0] for form in forms):
            raise ValueError(
                "The hidden states of all shards must have the same structure, shapes and dtypes. Without the "
                f"dimension of the rows they have {forms}. Assign the same kind on every rank."
            )
        lanes = np.array(sorted(lane for _, of_shard, _ in every for lane in of_shard))

        def zeros(blank: torch.Tensor) -> torch.Tensor:
            shape = *blank.shape[:dim], len(lanes), *blank.shape[dim + 1 :]
            return torch.zeros(shape, dtype=blank.dtype, device=self._world.device)

        state = map_tensors(zeros, every[0][2])
        for number, whole in enumerate(tensors_in(state)):
            for kept in newest:
                if kept.place == place:
                    at = torch.from_numpy(np.searchsorted(lanes, kept.lanes)).to(whole.device)
                    whole.index_copy_(dim, at, tensors_in(kept.state)[number].to(whole.device))
            self._world.sum(whole.view(-1).view(torch.uint8))
        return {"epoch": place[0], "position": place[1], "lanes": torch.from_numpy(lanes), "state": state}


# -- the sequences -----------------------------------------------------------------------------------------


class SequenceReader:
    """Reads sequences by number, and cuts chunks from them.

    Args:
        sequences: each a tensor or array with a row per time step, or a tuple or dict of them.
        lengths: their time steps; None reads all sequences once to find them.
        seed: of the random numbers drawn while a sequence is read.
        places: where the chunks go.

    Attributes:
        lengths: the time steps of each sequence, (N,) int64.

    Raises:
        TypeError: there is no index, or a sequence is not made of tensors.
        ValueError: there are no sequences, or one is empty, has parts of unequal lengths, other parts than the ones
            before, or another length.
    """

    def __init__(self, sequences: Any, lengths: Sequence[int] | None, seed: int, places: Places) -> None:
        has_index = hasattr(sequences, "__getitem__") and hasattr(sequences, "__len__")
        if isinstance(sequences, str | bytes) or not has_index:
            raise TypeError(
                "sequences must be a list of tensors with a row per time step (or of tuples or dicts of them), or a "
                f"data set with a length that returns them. Got {type(sequences).__name__}."
            )
        self._places = places
        self._gpu = gpu_in(places)
        self._pins = None if self._gpu is None else accelerator_of(self._gpu)
        self._is_list = isinstance(sequences, list | tuple)
        self._keyed = SeededDataset(sequences, seed, list, self._gpu)
        self._form: Any = None  # of all sequences: their containers, and a word for each tensor
        self._open: dict[int, tuple[Any, ...]] = {}  # by lane: epoch, number and parts of its sequence
        if len(sequences) == 0:
            raise ValueError("There must be at least one sequence. Got none. Check where the sequences come from.")
        if lengths is None:
            lengths = [common_length(self._read(0, number)) for number in range(len(sequences))]
        self.lengths: Numbers = np.array([int(one) for one in lengths], dtype=np.int64)
        if len(self.lengths) != len(sequences):
            raise ValueError(
                f"lengths must have a number for each sequence. Got {len(self.lengths)} for {len(sequences)} "
                "sequences. Pass one each, or leave lengths= out to have all sequences read once."
            )
        least = int(self.lengths.argmin())
        if self.lengths[least] < 1:
            raise ValueError(
                f"Every sequence must have a time step. Sequence {least} has {self.lengths[least]}. Remove empty ones."
            )

    def _read(self, epoch: int, number: int) -> Any:
        """The parts of a sequence, as drawn for an epoch counted from 0."""
        if self._is_list:
            sequence = self._keyed.source[number]
        else:
            with preserved_streams(self._gpu):
                sequence = self._keyed.samples(epoch, [number])[0]
        parts = as_parts(sequence)
        if parts is None:
            raise TypeError(
                "A sequence must be a tensor or array with a row per time step, or a tuple or dict of them. Sequence "
                f"{number} is a {type(sequence).__name__}. Convert it by torch.as_tensor(...)."
            )
        try:
            common_length(parts)
        except ValueError as error:
            error.add_note(f"in sequence {number}, whose rows are its time steps")
            raise
        form = map_tensors(lambda _: "tensor", parts)
        self._form = form if self._form is None else self._form
        if form != self._form:
            raise ValueError(
                f"All sequences must have the same parts. Sequence {number} has {form}, and one before {self._form}. "
                "Give each the same tuple, or a dict with the same keys."
            )
        return _by_key(parts)

    def fingerprint(self) -> fingerprints.Fingerprint:
        """The fingerprint of the lengths and of three sequences; in memory, of the first KiB of each."""
        found = fingerprints.of_numbers("the lengths of the sequences", self.lengths.tolist())
        count = len(self.lengths)
        if self._is_list:
            every = max(1, count // _COMPARED)
            sums = [fingerprints.quick(self._keyed.source[number]) for number in range(0, count, every)]
            found |= fingerprints.of_numbers("the values of the sequences", sums)
        with preserved_streams(self._gpu):
            return found | self._keyed.probe(sorted({0, count // 2, count - 1}))

    def chunk(self, epoch: int, rows: Rows) -> Any:
        """The padded chunks, (n, T, ...), with T the most time steps of a row.

        Args:
            epoch: counted from 0.
            rows: of a shard.
        """
        wanted = (part.tolist() for part in rows[:-1])
        every = [self._cut(epoch, *one) for one in zip(*wanted, strict=True)]
        flat = [tensors_in(one) for one in every]
        padded = iter([pinned(_stacked(list(same)), self._pins) for same in zip(*flat, strict=True)])
        return to_devices(map_tensors(lambda _: next(padded), every[0]), self._places)

    def _cut(self, epoch: int, lane: int, number: int, start: int, length: int) -> Any:
        if self._open.get(lane, ())[:2] != (epoch, number):
            parts = self._read(epoch, number)
            if (steps := common_length(parts)) != self.lengths[number]:
                raise ValueError(
                    f"A sequence must have its length in every epoch. Sequence {number} has {steps} time steps, and "
                    f"had {self.lengths[number]}. Pass the right lengths, and change no length where it is read."
                )
            self._open[lane] = epoch, number, parts
        return map_tensors(lambda tensor: tensor[start : start + length], self._open[lane][2])


def _by_key(parts: Any) -> Any:
    """The same parts with each dict in the order of its keys, since tensors that go together are found by place."""
    ordered = {key: parts[key] for key in sorted(parts, key=repr)} if isinstance(parts, dict) else parts
    return with_parts(ordered, lambda key, part: _by_key(part))


def _stacked(rows: list[torch.Tensor]) -> torch.Tensor:
    if all(len(row) == len(rows[0]) for row in rows):
        return torch.stack(rows)
    return pad_sequence(rows, batch_first=True)


class SequenceChunk:
    """The chunks of a shard's sequences in one mini-batch: n rows of up to T time steps.

    Attributes:
        data: the padded sequences, (n, T, ...), in the structure of a sequence; padding is 0.
        lengths: the time steps of each row that count, (n,) int64 on the CPU.
        sequences: the number of each row's sequence, (n,) int64 on the CPU.
        starts, ends: whether each row begins its sequence, and whether it ends it; (n,) bool on the world's device.
        samples: the number of time steps that count, the sum of `lengths`.
    """

    def __init__(
        self, data: Any, rows: Rows, shard: int, place: Place, carried: CarriedState, device: torch.device
    ) -> None:
        self._rows = rows
        self._shard = shard
        self._place = place
        self._carried = carried
        self.data = data
        self.samples = int(rows.lengths.sum())
        self.lengths = torch.from_numpy(rows.lengths)
        self.sequences = torch.from_numpy(rows.sequences)
        self.starts = sent(torch.from_numpy(rows.starts == 0), device)
        self.ends = sent(torch.from_numpy(rows.left == 0), device)
        self._longest = int(rows.lengths.max())
        self._index: torch.Tensor | None = None
        if self.samples < len(self.lengths) * self._longest:
            counts = np.arange(self._longest) < rows.lengths[:, None]
            self._index = sent(torch.from_numpy(np.flatnonzero(counts)), device)

    @property
    def tensors(self) -> tuple[Any, torch.Tensor]:
        """The data and the lengths, for a trace."""
        return self.data, self.lengths

    @property
    def hidden(self) -> Any:
        """The hidden state after the chunks before, without a graph: a row of zeros where a sequence begins.

        It is None if every row begins a sequence. Assign the state after this chunk: a tensor, or tensors in tuples,
        lists and dicts, as the network returns it. It has a row for each row of the chunk, in dimension `batch_dim`.
        In a further pass over the step's shards it is again the state before the chunk.

        Raises:
            RuntimeError: the chunk before left no state, or chunks are not used in their order.
            TypeError: the assigned state is not made of tensors.
            ValueError: it has not n rows, or another shape, dtype or structure than in the chunk before.
        """
        return self._carried.before(self._shard, self._place, self._rows)

    @hidden.setter
    def hidden(self, state: Any) -> None:
        self._carried.keep(self._shard, self._place, self._rows, state)

    def unpad(self, tensor: torch.Tensor) -> torch.Tensor:
        """The time steps that count, row after row: (n, T, ...) -> (samples, ...).

        Args:
            tensor: the data, or the network's outputs for them.

        Raises:
            ValueError: it does not begin with the dimensions n and T.
        """
        rows = len(self.lengths), self._longest
        if tuple(tensor.shape[:2]) != rows:
            raise ValueError(
                f"unpad takes a tensor of shape (n, T, ...), here {rows}. Got {tuple(tensor.shape)}. Build the network "
                "with batch_first=True, or transpose its output."
            )
        flat = tensor.flatten(0, 1)
        return flat if self._index is None else flat.index_select(0, self._index)


class SequenceBatches(Batches):
    """Mini-batches of sequences cut into chunks, for networks with a hidden state. Every rank must call this.

    A mini-batch has a row for each lane. A lane reads one sequence after the other, `length` time steps at a time, so
    the chunks of a sequence come in order, in the same lane, and thus in the same shard. An epoch has every time step
    once. A lane that is done has no row; a shard without a row is empty. Lanes are divided over the shards, and these
    over the ranks, by the rule of `split_sizes`. For example::

        batches = dl.SequenceBatches(sequences, 32, 50, world)  # each sequence: inputs (t, features), targets (t,)
        for step in dl.Loop(batches, epochs=20, state={"model": model, "optimizer": optimizer}):
            for chunk in step:
                inputs, targets = chunk.data
                outputs, chunk.hidden = model(inputs, chunk.hidden)  # such as torch.nn.LSTM(..., batch_first=True)
                step.backward(cross_entropy(chunk.unpad(outputs), chunk.unpad(targets)))
            step.fold()
            optimizer.step()

    A sample is a time step: the mini-batch's loss is the mean over the time steps of all its rows, and `samples` counts
    them. Each chunk is a `SequenceChunk`. Its hidden state is carried to the sequence's next chunk without its graph
    (truncated backpropagation through time), is 0 where a sequence begins, and is never averaged over ranks. The
    checkpoints of a `Loop` hold it, so a run also resumes inside an epoch. Sequences do not continue from epoch to
    epoch.

    Args:
        sequences: a list, or a data set with a length. Each sequence is a tensor or array with a row per time step, or
            a tuple or dict of them. A data set is read in this process.
        lanes: the number of rows in a mini-batch over all ranks.
        length: the most time steps of a chunk.
        world: from `join_world`.
        shuffle: whether each epoch has a new order.
        shards: S. The default is one per rank.
        seed: of the order and of random numbers drawn while reading. The default is the world's seed.
        lengths: the time steps of each sequence. Without them all sequences are read once.
        batch_dim: the dimension of the rows in the tensors of a hidden state: 1 for `torch.nn.LSTM` and `GRU`, 0 for
            their cells.
        devices, check_data: as in `Batches`.

    Attributes:
        lanes, batch_dim: as given.
        length: the number of time steps in an epoch. `len(batches)` is the number of mini-batches in an epoch, the
            same in each.

    Raises:
        ValueError: a number is below 1, there are no sequences, one is empty, or the ranks disagree.
        TypeError: the sequences are not made of tensors.
        PeerFailed: another rank refused its sequences.
    """

    _ROWS = "lanes"
    _reader: SequenceReader  # type: ignore[assignment]

    def __init__(
        self,
        sequences: Any,
        lanes: int,
        length: int,
        world: World,
        *,
        shuffle: bool = True,
        shards: int | None = None,
        seed: int | None = None,
        lengths: Sequence[int] | None = None,
        batch_dim: int = 1,
        devices: Any = None,
        check_data: bool = True,
    ) -> None:
        self._chunk = length
        self._lengths = lengths
        self.batch_dim = batch_dim
        self._epoch: tuple[int, LanePlan] | None = None
        self._carried = CarriedState(world, batch_dim)
        more: dict[str, Any] = {"shuffle": shuffle, "shards": shards, "seed": seed, "devices": devices}
        super().__init__(sequences, lanes, world, **more, check_data=check_data)
        self.lanes = self.batch_size

    def _open(self, data: Any, length: int | None, places: Places, loader: dict[str, Any]) -> None:
        check_count("length", self._chunk)
        check_count("batch_dim", self.batch_dim, least=0)
        self._reader = SequenceReader(data, self._lengths, self.seed, places)
        self.num_workers = None
        self._has_length = True
        self._lanes = Lanes(self._reader.lengths, self.batch_size, self._chunk)
        self.length = int(self._reader.lengths.sum())

    def for_evaluation(self) -> Self:
        """As in `Batches`. The copy carries its own hidden states, since training may be in the middle of an epoch."""
        found = copy.copy(super().for_evaluation())
        found._carried = CarriedState(self.world, self.batch_dim)
        return found

    def _cut_alike(self) -> Self:
        """The batches that `for_evaluation` returns. A lane stays on its rank, as its hidden state does."""
        found = copy.copy(self)
        found.division = Division(min(EVALUATED, self.lanes), self.world.size, self.world.rank)
        return found

    def _check_same(self) -> None:
        own = {"lanes": self.batch_size, "length": self._chunk, "batch_dim": self.batch_dim}
        self.world.require_equal("SequenceBatches", own)
        super()._check_same()

    @property
    def facts(self) -> dict[str, object]:
        """The values that a resumed run must share with the run before it."""
        rest = {name: value for name, value in super().facts.items() if name not in ("batch_size", "drop_last")}
        return {**rest, "lanes": self.batch_size, "length": self._chunk, "batch_dim": self.batch_dim}

    def checkpointed(self, *, skips: bool) -> dict[str, Any]:
        """The hidden states, which checkpoints of a Loop hold.

        Args:
            skips: whether the loop skips steps that are not finite; then the states stay finite.
        """
        self._carried.stays_finite = skips
        return {"hidden": self._carried}

    @property
    def can_cut_otherwise(self) -> bool:
        """Whether mini-batches can be cut otherwise: not with the hidden states that shards carry."""
        return False

    @property
    def steps(self) -> int:
        """The number of mini-batches in an epoch."""
        return self._lanes.steps

    def mini_batch(self, epoch: int, position: int) -> MiniBatch:
        """A mini-batch, with this rank's shards.

        Args:
            epoch: counted from 1.
            position: of the mini-batch in its epoch, counted from 0.
        """
        return self._planned(epoch, position)[0]

    def _planned(self, epoch: int, position: int) -> tuple[MiniBatch, Rows]:
        """A mini-batch, and the rows of all its shards."""
        plan = self._plan_of(epoch)
        rows = plan.rows(position)
        start = int(plan.before[position])
        steps = np.concatenate([[0], np.cumsum(rows.lengths)])
        lanes = np.cumsum([0, *split_sizes(self.batch_size, self.shards)])  # before each shard, and after the last
        sizes = tuple(np.diff(steps[np.searchsorted(rows.lanes, lanes)]).tolist())
        shards = cut(sizes, self.division.mine)
        samples = int(steps[-1])
        is_last = position + 1 == self.steps
        return MiniBatch(epoch, position, start, samples, sizes, shards, is_last=is_last), rows

    def _plan_of(self, epoch: int) -> LanePlan:
        if self._epoch is None or self._epoch[0] != epoch:
            count = len(self._lanes.lengths)
            order = permutation(self.seed, epoch - 1, count).numpy() if self.shuffle else np.arange(count)
            self._epoch = epoch, self._lanes.plan(order)
        return self._epoch[1]

    def _positions(self, epoch: int, start: int, number: int) -> torch.Tensor:
        """The places of time steps in the sequences, one after the other; see `indices`."""
        plan = self._plan_of(epoch)
        first = int(np.searchsorted(plan.before, start, side="right")) - 1
        last = min(int(np.searchsorted(plan.before, start + number)), self.steps)
        offsets = np.cumsum(self._lanes.lengths) - self._lanes.lengths
        found = [np.empty(0, dtype=np.int64)]
        for position in range(first, last):
            rows = plan.rows(position)
            begins = offsets[rows.sequences] + rows.starts
            found += map(np.arange, begins, begins + rows.lengths)
        skipped = start - int(plan.before[first])
        return torch.from_numpy(np.concatenate(found)[skipped : skipped + number])

    def _loaded(self, epoch: int, start: int, *, held: bool, agrees: bool) -> Generator[LoadedBatch, None, None]:
        """The generator of `epoch`; there are no workers to keep, and all ranks know every mini-batch."""
        for position in range(start, self.steps):
            mini_batch, rows = self._planned(epoch, position)
            self._carried.whole = None  # its chunks may change the state
            yield LoadedBatch(mini_batch, self._chunks(mini_batch, rows), self)
        self._carried.whole = {}  # nothing is carried on

    def _chunks(self, mini_batch: MiniBatch, rows: Rows) -> Iterator[SequenceChunk]:
        place = mini_batch.epoch, mini_batch.position
        for shard in mini_batch.shards:
            own = rows.of(split_range(self.batch_size, self.shards, shard.number))
            data = self._reader.chunk(mini_batch.epoch - 1, own)
            yield SequenceChunk(data, own, shard.number, place, self._carried, self.world.device)

    def _nothing(self, mini_batch: MiniBatch) -> Any:
        raise ValueError(
            "Synced batch norm needs a row in every shard. Lanes that are done leave shards of sequences empty. Use "
            "local_batch_norm(model), or a norm over features such as torch.nn.LayerNorm."
        )


def batchify(tokens: torch.Tensor, lanes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cut a text into a sequence per lane for a word-level language model: inputs, and targets one token later.

    The hidden state then runs through each lane's text and is reset at the start of an epoch::

        text = dl.batchify(tokens, 20)
        batches = dl.SequenceBatches(text, 20, 35, world, shuffle=False)

    Lane k has piece k of `split_sizes`: no token is left out, so some lanes may have one more. A token is the target of
    the token before it in its lane; the first token of a lane is an input alone.

    Args:
        tokens: the whole text, (N,).
        lanes: the number of pieces.

    Returns:
        `lanes` pairs of inputs (t,) and targets (t,).

    Raises:
        TypeError: `tokens` is not a tensor.
        ValueError: `tokens` has another shape, or fewer than two tokens for each lane.
    """
    lanes = check_count("lanes", lanes)
    if not isinstance(tokens, torch.Tensor):
        raise TypeError(
            f"batchify needs a tensor of tokens. Got {type(tokens).__name__}. Pass torch.tensor(tokens), with a number "
            "for each token."
        )
    if tokens.dim() != 1 or len(tokens) < 2 * lanes:
        raise ValueError(
            f"batchify needs a text of shape (N,) with two tokens or more for each lane. Got shape "
            f"{tuple(tokens.shape)} for {lanes} lanes. Pass one long text, or fewer lanes."
        )
    return [(piece[:-1], piece[1:]) for piece in tokens.split(list(split_sizes(len(tokens), lanes)))]
