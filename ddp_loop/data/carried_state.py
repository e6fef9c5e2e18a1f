"""The hidden state of sequences, carried from chunk to chunk.

[Note: Carried state] The state belongs to the lane, so it stays with its shard and never enters a sum. What a chunk
leaves is kept until the chunk after the next one, since a step may pass over its chunks several times. A checkpoint
has the rows of all lanes: each rank writes its own rows into zeros, and a sum of bytes brings them together.

[Note: Rows that are not finite] A loop that skips steps which are not finite would skip all further steps of a sequence
whose state became NaN. There such a row keeps the state before the chunk, as if its sequence had not had the chunk. The
device decides, so the host does not wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ddp_loop.data.lanes import Numbers, Rows
from ddp_loop.data.placement import map_tensors, tensors_in
from ddp_loop.distributed import World

Place = tuple[int, int]  # the epoch, counted from 1, and the position of the mini-batch, counted from 0


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the chunks of some lanes left: a state with a row for each lane, and its form."""

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
    """

    def __init__(self, world: World, batch_dim: int) -> None:
        self._world = world
        self._batch_dim = batch_dim
        self.stays_finite = False
        self._kept: dict[int, list[_Kept]] = {}  # by shard, the oldest first
        self._whole: dict[str, Any] | None = {}  # what a checkpoint has, where no rank has to be asked
        self._resumed: _Kept | None = None

    # -- chunk by chunk ------------------------------------------------------------------------------------

    def before(self, shard: int, place: Place, rows: Rows, device: torch.device) -> Any:
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
        candidates: list[_Kept | None] = [*self._kept.get(shard, []), self._resumed]
        for kept in candidates:
            if kept is not None and kept.place == place and set(lanes.tolist()) <= set(kept.lanes.tolist()):
                return kept
        return None

    def _missing(self, shard: int, place: Place) -> str:
        epoch, position = place
        newest = self._kept[shard][-1].place if self._kept.get(shard) else None
        found = "none was"
        if newest is not None:
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
        state = map_tensors(torch.Tensor.detach, state)
        if self.stays_finite:
            state = self._finite(state, self.before(shard, place, rows, self._world.device))
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

    def begin(self) -> None:
        """Note that a mini-batch is handed out, which may change the state. Every rank must call this."""
        self._whole = None

    def end(self) -> None:
        """Note that an epoch's last mini-batch is handed out: nothing is carried on. Every rank must call this."""
        self._whole = {}

    def state_dict(self) -> dict[str, Any]:
        """The state of all lanes after the newest mini-batch. Every rank must call this.

        Raises:
            ValueError: the shards' states have different forms.
        """
        return self._gather() if self._whole is None else self._whole

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the state of all lanes, each rank with its own, whatever their number."""
        self._whole = dict(state)
        self._kept = {}
        self._resumed = None
        if state:
            place = (state["epoch"], state["position"])
            lanes = state["lanes"].numpy()
            kept = state["state"]
            self._resumed = _Kept(place, lanes, kept, self._form_of(kept, len(lanes)))

    def _gather(self) -> dict[str, Any]:
        newest = sorted((own[-1] for own in self._kept.values()), key=lambda kept: kept.place, reverse=True)
        if not newest and self._resumed is not None and self._world.rank == 0:  # no chunk was used since
            newest = [self._resumed]
        facts = [(*kept.place, kept.lanes.tolist(), kept.form) for kept in newest]
        gathered = self._world.gather((facts, self._without_rows(newest)), "the hidden states")
        every = [fact for facts, _ in gathered for fact in facts]
        if not every:
            return {}
        place = max((epoch, position) for epoch, position, *_ in every)
        every = [fact for fact in every if fact[:2] == place]
        if any(fact[-1] != every[0][-1] for fact in every):
            raise ValueError(
                "The hidden states of all shards must have the same structure, shapes and dtypes. Without the "
                f"dimension of the rows they have {[fact[-1] for fact in every]}. Assign the same kind on every rank."
            )
        lanes = np.array(sorted(lane for *_, own, _ in every for lane in own))
        blank = next(blank for facts, blank in gathered if facts and facts[0][-1] == every[0][-1])
        state = map_tensors(lambda tensor: self._zeros(tensor, len(lanes)), blank)
        for number, whole in enumerate(tensors_in(state)):
            for kept in newest:
                if kept.place == place:
                    at = torch.from_numpy(np.searchsorted(lanes, kept.lanes)).to(whole.device)
                    whole.index_copy_(self._batch_dim, at, tensors_in(kept.state)[number].to(whole.device))
            self._world.sum(whole.view(-1).view(torch.uint8))
        return {"epoch": place[0], "position": place[1], "lanes": torch.from_numpy(lanes), "state": state}

    def _without_rows(self, newest: Sequence[_Kept]) -> Any:
        """A state whose tensors have no rows; None without one."""
        return map_tensors(lambda one: one.narrow(self._batch_dim, 0, 0), newest[0].state) if newest else None

    def _zeros(self, blank: torch.Tensor, lanes: int) -> torch.Tensor:
        shape = list(blank.shape)
        shape[self._batch_dim] = lanes
        return torch.zeros(shape, dtype=blank.dtype, device=self._world.device)
