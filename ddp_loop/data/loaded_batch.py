"""A mini-batch with the data of this rank's shards, read on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ddp_loop.data.shards import MiniBatch, Shard


@dataclass(slots=True)
class LoadedBatch:
    """A mini-batch and the data of this rank's shards, which are read on first use and then kept."""

    mini_batch: MiniBatch
    _stream: Iterator[Any]
    _change: Callable[[MiniBatch, Shard, Any], Any] | None
    _read_nothing: Callable[[MiniBatch], Any]
    _data: list[Any] = field(default_factory=list)
    _error: Exception | None = None

    def data(self, shard: int) -> Any:
        """The data of this rank's shard number `shard`, counted from 0 on each rank."""
        if self._error is not None:
            raise self._error
        while len(self._data) <= shard:
            following = self.mini_batch.shards[len(self._data)]
            data = next(self._stream)
            self._data.append(data if self._change is None else self._change(self.mini_batch, following, data))
        return self._data[shard]

    def nothing(self) -> Any:
        """The data of an empty shard: tensors without rows, (0, ...)."""
        return self._read_nothing(self.mini_batch)

    def read_ahead(self) -> None:
        """Read the first shard's data now; an error is raised when the data are used."""
        try:
            if self.mini_batch.shards:
                self.data(0)
        except Exception as error:
            self._error = error

    def finish_reading(self) -> None:
        """Read the remaining shards, so that the reader is at the next mini-batch."""
        if self.mini_batch.shards:
            self.data(len(self.mini_batch.shards) - 1)
