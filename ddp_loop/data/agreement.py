"""What the ranks must agree on about their data, and the errors if they do not."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddp_loop.data.fingerprints import REMEDY, Fingerprint, difference, of, unlike
from ddp_loop.data.shards import MiniBatch
from ddp_loop.determinism import check_count
from ddp_loop.distributed import World

ALIKE = (  # of all ranks' Batches, in the order of `Batches._check_same`
    "the data's length, batch_size, shards, drop_last, shuffle, seed, partition, until, parts, kind, check_data and "
    "shares"
)


def require_alike(prints: Sequence[Fingerprint]) -> None:
    """Raise ValueError unless the ranks' fingerprints agree."""
    if (differs := difference(prints)) is not None:
        raise ValueError(f"Every rank must be given the same data; {differs}. {REMEDY}")


def _first_sample(mini_batch: MiniBatch) -> Fingerprint:
    return of(f"the first sample of mini-batch {mini_batch.position + 1}", mini_batch.first)


def check_first(mini_batch: MiniBatch, world: World) -> None:
    """Raise ValueError on every rank unless all read the same first sample of a stream. Every rank must call this."""
    require_alike(world.gather(_first_sample(mini_batch), "the samples of a stream"))


def check_end(ranks: int, mini_batch: MiniBatch, world: World) -> None:
    """Raise ValueError on every rank unless a stream ended at the same sample on all. Every rank must call this.

    Args:
        ranks: the number of ranks whose stream ended in this mini-batch.
        mini_batch: the last of the stream.
        world: the ranks.
    """
    if ranks != world.size:
        raise ValueError(
            f"A stream must give every rank the same samples. In mini-batch {mini_batch.position + 1} of "
            f"epoch {mini_batch.epoch} it ended on {ranks} of {world.size} ranks. Give every rank the whole "
            "stream, since Batches makes the shards."
        )
    world.require_equal("the samples of a stream's last mini-batch", mini_batch.samples)


@dataclass(slots=True)
class StreamPass:
    """The samples of a pass over a stream so far: their number, a digest, and the first mini-batch."""

    samples: int = 0
    digest: int = 0
    first: MiniBatch | None = None

    def add(self, mini_batch: MiniBatch) -> None:
        self.first = self.first or mini_batch
        self.samples += mini_batch.samples
        self.digest = zlib.crc32(b"%d %d" % (self.digest, mini_batch.digest))

    def check(self, world: World) -> None:
        """Raise ValueError unless all ranks read the same in the pass that ended. Every rank must call this."""
        whole: Fingerprint = {"the stream": (f"{self.samples} samples", str(self.digest))}
        if difference(world.gather(whole, "the samples of a stream")) is not None:
            found = {} if self.first is None else _first_sample(self.first)
            require_alike(world.gather(found | whole, "the samples of a stream"))


def check_epoch_number(epoch: int) -> int:
    """The number of an epoch, counted from 1; raises ValueError unless it is one."""
    return check_count("epoch", epoch, remedy="Epochs are counted from 1, as in Step.epoch.")


def check_epoch(length: int | None, steps: int | None, batch_size: int, *, shuffles: bool) -> None:
    """Raise ValueError unless an epoch has a mini-batch, and can be shuffled.

    Args:
        length, steps, batch_size: of an epoch, in samples, mini-batches and samples; None where it has no length.
        shuffles: whether data without a length of their own are to be shuffled.
    """
    if length is not None and length < 1:
        raise ValueError("The data must have at least one sample. They have none. Check where they come from.")
    if shuffles:
        raise ValueError("shuffle needs data with a length. These have none. Pass shuffle=False.")
    if steps == 0:
        raise ValueError(
            f"An epoch must have a mini-batch. {length} samples with batch_size={batch_size} and drop_last=True give "
            "none. Use a smaller batch_size or drop_last=False."
        )


def check_data(read: Callable[[], Fingerprint], world: World) -> None:
    """Raise ValueError on every rank unless all were given the same data. Every rank must call this.

    Args:
        read: the fingerprint of this rank's data; it is called again if ranks differ.
        world: the ranks.
    """
    found = read()
    if difference(world.gather(found, "what the data are")) is not None:
        # A part that changes when it is read again (a time, say) cannot be compared with other ranks.
        unsteady = world.gather(unlike(found, read()), "what the data are, read again")
        steady = {name: one for name, one in found.items() if name not in set().union(*unsteady)}
        require_alike(world.gather(steady, "what the data are"))
