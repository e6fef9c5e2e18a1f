"""The mini-batches of an epoch, the next of which is read while the ranks' sums are under way."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager

from ddp_loop.data.batches import Batches
from ddp_loop.data.loaded_batch import LoadedBatch
from ddp_loop.data.shards import MiniBatch


def _nothing() -> Generator[LoadedBatch, None, None]:
    yield from ()


class ReadAhead:
    """Gives one mini-batch after the other, and reads one ahead when it is asked to.

    Args:
        batches: with the data.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._stream = _nothing()
        self._ahead: list[LoadedBatch | Exception | None] = []  # the next one, once it was read
        self._waits = batches.waits
        self._taken: MiniBatch | None = None  # the one of the step before, while data wait

    @contextmanager
    def epoch(self, number: int, start: int) -> Iterator[None]:
        """Read an epoch in the block.

        Args:
            number: of the epoch, counted from 1.
            start: the position of the first mini-batch, counted from 0.
        """
        self.restart(number, start)
        try:
            yield
        finally:
            self._stream.close()

    def restart(self, number: int, start: int) -> None:
        """Read on from another position, or as the mini-batches are divided now; what was read ahead is dropped.

        Args:
            number, start: as for `epoch`.
        """
        self._stream.close()
        self._ahead.clear()
        self._stream = self._batches.epoch(number, start, held=False, agrees=True)

    def take(self) -> LoadedBatch | None:
        """The next mini-batch; None at the epoch's end. An error in its data is raised here."""
        if self._waits and self._taken is not None:
            self._batches.move_after(self._taken)
            self._waits = self._batches.waits
        loaded = self._ahead.pop() if self._ahead else next(self._stream, None)
        if isinstance(loaded, Exception):
            raise loaded
        if self._waits:
            self._taken = None if loaded is None else loaded.mini_batch
        return loaded

    def read(self) -> None:
        """Read the next mini-batch, unless that is done."""
        if self._ahead:
            return
        try:
            loaded = next(self._stream, None)
        except Exception as error:  # of the next step's data, raised in that step
            self._ahead.append(error)
            return
        if loaded is not None:
            loaded.read_ahead()
        self._ahead.append(loaded)
