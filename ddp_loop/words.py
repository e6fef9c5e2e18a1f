"""What ranks tell each other through the launcher's store, where a word stays when its rank is gone."""

from __future__ import annotations

import json
import time
import traceback

import torch.distributed as dist

_FAILURE = "ddp_loop/failure"
_ENDED = "ddp_loop/ended"
_FAILURE_WAIT_S = 1.0  # a rank says why it fails before it closes its connections; a killed one never does
_LOOK_S = 0.01  # a rank that waits at the store looks this often; a look takes 0.1 ms


class PeerFailed(RuntimeError):
    """Another rank failed, so this one cannot go on.

    Attributes:
        rank: the rank that failed, or None where it left without a word (killed, or its machine is gone).
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


def own_keys(store: dist.Store, rank: int) -> dist.Store:
    """The store with keys of this world's own.

    The launcher's store outlives a world. Without this, the ranks of a second one find the addresses of the
    first one's closed connections there, and its failure.
    """
    return dist.PrefixStore(f"ddp_loop/{store.add(f'ddp_loop/worlds/{rank}', 1)}", store)


def said(error: BaseException) -> str:
    """The last line of its traceback, also of one whose `__str__` raises."""
    return "".join(traceback.format_exception_only(error)).strip()


class Words:
    """The words of the ranks of one world.

    Args:
        store: with keys of the world's own.
        rank: the one that speaks here, of `size`.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def tell(self, key: str, word: str) -> None:
        """Leave a word."""
        self._store.set(key, word)

    def tell_end(self) -> None:
        """Say that this rank leaves without an error."""
        self.tell(f"{_ENDED}/{self._rank}", "")

    def tell_failure(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        word = json.dumps({"rank": self._rank, "error": said(error), "traceback": text})
        try:
            self._store.compare_set(_FAILURE, "", word)  # the first one to fail is the culprit
        except RuntimeError:
            return  # the store is gone with the launcher; the closed connections tell the peers

    def await_first(self, key: str, timeout_s: float) -> None:
        try:
            came = self._wait_for((key, _FAILURE), timeout_s)
            told = self._store.get(key).decode() if came == key else ""
        except RuntimeError as error:
            raise self.peer_failure(error, timeout_s) from error
        failed = self._told_failure() if came == _FAILURE else None
        if failed is not None:
            raise failed
        if came is None:
            raise PeerFailed(f"rank 0 must leave its block in timeout_s={timeout_s:g}; it did not", 0)
        if told:
            raise PeerFailed(f"rank 0 failed while the others waited for it: {told}", 0)

    def peer_failure(self, error: RuntimeError, timeout_s: float) -> PeerFailed:
        left = {f"{_ENDED}/{rank}": rank for rank in range(self._size) if rank != self._rank}
        try:
            came = self._wait_for((_FAILURE, *left), _FAILURE_WAIT_S)
        except RuntimeError:
            came = None  # the store is gone with the launcher
        if came in left:
            return PeerFailed(
                f"every rank must take part in every collective; rank {left[came]} left the world, without an error, "
                "when this one was in a collective: leave loops and call evaluate on all ranks alike",
                left[came],
            )
        return self._told_failure() or PeerFailed(
            "every rank must take part in every collective; a rank is gone without a word (killed), or slower "
            f"than timeout_s={timeout_s:g}: {error}"
        )

    def has_failure(self) -> bool:
        """Whether a rank said that it failed."""
        try:
            return bool(self._store.check([_FAILURE]))
        except RuntimeError:
            return True  # the store is gone with the launcher

    def _told_failure(self) -> PeerFailed | None:
        """What the first rank to fail said, if one did."""
        try:
            if not self._store.check([_FAILURE]):
                return None
            word = json.loads(self._store.get(_FAILURE))
        except (RuntimeError, ValueError):
            return None  # the store is gone with the launcher
        return PeerFailed(f"rank {word['rank']} failed: {word['error']}\n\n{word['traceback']}", word["rank"])

    def _wait_for(self, keys: tuple[str, ...], timeout_s: float) -> str | None:
        """The first of the keys that stands in the store within the time; None for none.

        It looks, since the store's own wait is for all keys, prints a warning when it ends without them, and
        lets no signal handler run.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            for key in keys:
                if self._store.check([key]):
                    return key
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_S)
