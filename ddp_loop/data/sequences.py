"""Mini-batches of sequences cut into chunks, whose hidden state is carried from chunk to chunk."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ddp_loop.accelerators import sent
from ddp_loop.data.batches import Batches, LoadedBatch
from ddp_loop.data.carried_state import CarriedState, Place
from ddp_loop.data.lanes import LanePlan, Lanes, Numbers, Rows
from ddp_loop.data.placement import Places
from ddp_loop.data.sequence_reader import SequenceReader
from ddp_loop.data.shards import EVALUATED, Division, MiniBatch, cut, split_range, split_sizes
from ddp_loop.determinism import check_count, permutation
from ddp_loop.distributed import World


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
        self._device = device
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
        """What a trace records: the data and the lengths."""
        return self.data, self.lengths

    @property
    def hidden(self) -> Any:
        """The hidden state that the chunks before left, without a graph: a row of zeros where a sequence begins.

        It is None if every row begins a sequence. Assign the state after this chunk: a tensor, or tensors in tuples,
        lists and dicts, as the network returns it. It has a row for each row of the chunk, in dimension `batch_dim`.
        In a further pass over the step's shards it is again the state before the chunk.

        Raises:
            RuntimeError: the chunk before left no state, or chunks are not used in their order.
            TypeError: the assigned state is not made of tensors.
            ValueError: it has not n rows, or another shape, dtype or structure than in the chunk before.
        """
        return self._carried.before(self._shard, self._place, self._rows, self._device)

    @hidden.setter
    def hidden(self, state: Any) -> None:
        self._carried.keep(self._shard, self._place, self._rows, state)

    def unpad(self, tensor: torch.Tensor) -> torch.Tensor:
        """The time steps that count, row after row: (n, T, ...) -> (samples, ...).

        Args:
            tensor: the data, or what the network made of them.

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
        self._bounds = self._lanes_of_shards()
        self.length = int(self._reader.lengths.sum())

    def _lanes_of_shards(self) -> Numbers:
        """The lanes before each shard, and after the last."""
        return np.concatenate([[0], np.cumsum(split_sizes(self.batch_size, self.shards))])

    def _cut_alike(self) -> SequenceBatches:
        """The batches that `for_evaluation` returns. A lane stays on its rank, as its hidden state does."""
        found = copy.copy(self)
        world = self.world
        found.shards = min(EVALUATED, self.lanes)
        found.division = Division(found.shards, world.size, world.rank)
        found._bounds = found._lanes_of_shards()
        found._carried = CarriedState(world, self.batch_dim)
        return found

    def _check_same(self) -> None:
        self.world.require_equal("lanes, length and batch_dim", (self.batch_size, self._chunk, self.batch_dim))
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
        sizes = tuple(np.diff(steps[np.searchsorted(rows.lanes, self._bounds)]).tolist())
        shards = cut(sizes, split_range(self.shards, self.world.size, self.world.rank))
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
        found = [np.empty(0, dtype=np.int64)]
        have = 0
        offsets = np.cumsum(self._lanes.lengths) - self._lanes.lengths
        position = int(np.searchsorted(plan.before, start, side="right")) - 1
        skipped = start - int(plan.before[position])
        while have < skipped + number and position < self.steps:
            rows = plan.rows(position)
            first = (offsets[rows.sequences] + rows.starts).tolist()
            found += [np.arange(at, at + count) for at, count in zip(first, rows.lengths.tolist(), strict=True)]
            have = have + int(rows.lengths.sum())
            position = position + 1
        return torch.from_numpy(np.concatenate(found)[skipped : skipped + number])

    def _loaded(self, epoch: int, start: int, *, held: bool, agrees: bool) -> Generator[LoadedBatch, None, None]:
        """The generator of `epoch`; there are no workers to keep, and all ranks know every mini-batch."""
        for position in range(start, self.steps):
            mini_batch, rows = self._planned(epoch, position)
            self._carried.begin()
            yield LoadedBatch(mini_batch, self._chunks(mini_batch, rows), self)
        self._carried.end()

    def _chunks(self, mini_batch: MiniBatch, rows: Rows) -> Iterator[SequenceChunk]:
        place = mini_batch.epoch, mini_batch.position
        for shard in mini_batch.shards:
            own = rows.between(*self._bounds[shard.number : shard.number + 2].tolist())
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
