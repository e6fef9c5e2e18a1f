"""Messages between ranks through the launcher's key-value store; they outlive the rank that wrote them."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from ddp_loop.distributed.failures import (
    STAGE_NUMBERS,
    STORED_LETTERS,
    PeerFailed,
    PeerGone,
    RankReport,
    RankStatus,
    capital,
    describe_gone,
    find_culprit,
    format_error,
)
from ddp_loop.distributed.values import from_bytes, to_bytes
from ddp_loop.elastic import cut_text

_FAILURE = "ddp_loop/failure"
_ENDED = "ddp_loop/ended"
_CALL = "ddp_loop/call"
_HERE = "ddp_loop/here"
_STOP = "ddp_loop/stop"
_NEWS = "ddp_loop/news"
_WAITS = "ddp_loop/waits"
_SEEN = "ddp_loop/seen"
_FAILURE_WAIT_S = 0.5  # a rank writes its failure before it closes its connections; a killed one writes none
_ANSWER_S = 1.2  # a watchdog polls every 0.25 s; a dead or stopped rank never answers
_LOOK_S = 0.01  # between two polls of the store, of 0.1 ms each


def own_keys(store: dist.Store, rank: int) -> dist.Store:
    """The store with keys of this world alone.

    The launcher's store outlives a world. Without this the ranks of a second world would find the addresses of the
    first one's closed connections, and its failure.
    """
    return dist.PrefixStore(f"ddp_loop/{store.add(f'ddp_loop/worlds/{rank}', 1)}", store)


class RankStore:
    """The messages between the ranks of one world.

    Args:
        store: with keys of this world alone.
        rank: this rank, of `size`.
        hosts: where each rank is, such as " on host node7 (10.0.0.7)"; none on one machine.

    Attributes:
        rank: as given.
        names: of the ranks, in messages.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, hosts: Sequence[str] = ()) -> None:
        self._store = store
        self.rank = rank
        self._size = size
        self._hosts = hosts
        self.names = [f"rank {one}{hosts[one] if hosts else ''}" for one in range(size)]
        self._stops = self._numbers = 0  # followed requests, and numbers given out

    def put(self, key: str, word: str) -> None:
        self._store.set(key, word)

    def get(self, key: str) -> str | None:
        """The value of a key; None without one."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def take(self, key: str) -> str | None:
        """The value of a key, which is then deleted; None without one."""
        word = self.get(key)
        if word is not None:
            self._store.delete_key(key)
        return word

    def number(self) -> int:
        """A new number at each call, the same on every rank that calls as often."""
        self._numbers += 1
        return self._numbers

    def get_all(self, keys: list[str]) -> list[str]:
        """The values of those keys that exist; in one request if all do."""
        if not keys or not self._store.check(keys):
            return [word for key in keys if (word := self.get(key)) is not None]
        return [word.decode() for word in self._store.multi_get(keys)]

    def news(self) -> int:
        """Another number after each event that watchdogs must look at: failures, roll calls, stops."""
        return int(self._store.add(_NEWS, 0)) + self._stops

    def _set_news(self) -> None:
        self._store.add(_NEWS, 1)

    def set_ended(self) -> None:
        """Note that this rank leaves without an error."""
        self.put(f"{_ENDED}/{self.rank}", "")

    def has_ended_rank(self) -> bool:
        """Whether a rank has left without an error."""
        return any(self._store.check([f"{_ENDED}/{rank}"]) for rank in range(self._size))

    # -- failures ------------------------------------------------------------------------------------------

    def set_failure(self, error: BaseException, where: RankStatus) -> None:
        """Note that this rank failed, unless another one failed before."""
        text = cut_text("".join(traceback.format_exception(error)), STORED_LETTERS)
        what = format_error(error)
        if isinstance(error, SystemExit) and (lines := traceback.extract_tb(error.__traceback__)):
            what += f", at {lines[-1].filename}:{lines[-1].lineno}, while other ranks went on"
        self._set_failure(f"{self.names[self.rank]} failed{where}: {what}\n\n{text}", self.rank, where)

    def pass_on(self, error: PeerFailed) -> None:
        """Note the failure because of which this rank leaves: a peer that it did not reach would miss this rank."""
        if error.rank is not None:
            self._set_failure(str(error), error.rank, RankStatus(error.stage, error.step))

    def _set_failure(self, message: str, rank: int | None, where: RankStatus) -> None:
        word = json.dumps([message, rank, where.stage, where.step])
        with suppress(RuntimeError):  # the store is gone with the launcher; peers notice the closed connections
            self._store.compare_set(_FAILURE, "", word)  # the first one to fail is the culprit
            self._set_news()

    def await_first(self, key: str, timeout_s: float, stage: str, step: int) -> None:
        """Wait until rank 0, which is at the same stage and step, sets this key.

        Raises:
            PeerFailed: rank 0 failed, or does not set it in time.
        """
        try:
            came = self._wait_for((key, _FAILURE), timeout_s)
            told = self._store.get(key).decode() if came == key else ""
        except RuntimeError as error:
            raise self.peer_failure(error, timeout_s) from error
        failed = self.get_failure() if came == _FAILURE else None
        if failed is not None:
            raise failed
        if came is None:
            raise PeerFailed(f"Rank 0 did not leave its block within timeout_s={timeout_s:g}. Pass a longer one.", 0)
        if told:
            raise PeerFailed(f"rank 0 failed while the others waited for it: {told}", 0, stage, step)

    def peer_failure(self, error: RuntimeError, timeout_s: float) -> PeerFailed:
        """The exception for a collective that ended with `error`: who failed, the same on all ranks."""
        left = {f"{_ENDED}/{rank}": rank for rank in range(self._size) if rank != self.rank}
        with suppress(RuntimeError):  # the store is gone with the launcher
            # A rank notes why it leaves before it closes its connections, so one that did not was killed.
            came = self._wait_for((_FAILURE, *left), 0.0 if isinstance(error, PeerGone) else _FAILURE_WAIT_S)
            if came is None and isinstance(error, PeerGone):
                places = error.where, self._last_place(error.rank)
                where = max(places, key=lambda one: (one.step, STAGE_NUMBERS.get(one.stage, 0)))
                self._set_failure(describe_gone(self.names[error.rank], where), error.rank, where)
            elif came != _FAILURE:
                self._call_all({left[came]} if came is not None else set(), timeout_s)
        return self.get_failure() or self._unexplained(error, timeout_s)

    def _unexplained(self, error: RuntimeError, timeout_s: float) -> PeerFailed:
        if self._hosts:
            try:
                self._store.check([_FAILURE])
            except RuntimeError:
                return PeerFailed(
                    f"{capital(self.names[self.rank])} does not reach the launcher's store, "
                    f"usually{self._hosts[0]} with rank 0. That host is down, rank 0 or its launcher has ended, or "
                    "the network between the hosts is cut. Read what rank 0 printed, and check the link. The cause: "
                    f"{error}"
                )
        return PeerFailed(
            "Every rank must take part in every collective. A rank was killed, or is slower than "
            f"timeout_s={timeout_s:g}. Read what the others printed. The cause: {error}"
        )

    def _call_all(self, ended: set[int], timeout_s: float) -> None:
        """Make a roll call, and set the culprit as the failure, unless another rank was first."""
        here: dict[int, RankReport] = {}
        if not ended:
            self.put(_CALL, "")
            self._set_news()
            deadline = time.monotonic() + _ANSWER_S
            while len(here) < self._size and time.monotonic() < deadline and not self.has_failure():
                for rank in set(range(self._size)) - here.keys():
                    if self._store.check([f"{_HERE}/{rank}"]):
                        here[rank] = from_bytes(self._store.get(f"{_HERE}/{rank}"))
                time.sleep(_LOOK_S)
            here.setdefault(self.rank, RankReport(RankStatus(waits="a collective"), ""))  # it asks, so it is alive
        seen = {rank: self._last_place(rank) for rank in range(self._size) if rank not in here}
        culprit, message = find_culprit(here, seen, ended, self.names, timeout_s)
        where = RankStatus() if culprit is None else seen.get(culprit, RankStatus())
        if culprit in here:
            where = here[culprit].where
            if here[culprit].stack:
                message += f"\n\nThe stack of rank {culprit}:\n{here[culprit].stack}"
        self._set_failure(message, culprit, where)

    def set_wait(self, kind: str) -> None:
        """Note that this rank has waited for a while in a collective of this kind; "" for none."""
        self.put(f"{_WAITS}/{self.rank}", kind)

    def wait_of_next(self) -> str:
        """The kind of collective in which the next rank has waited for a while; "" for none."""
        return self.get(f"{_WAITS}/{(self.rank + 1) % self._size}") or ""

    def set_place(self, where: RankStatus) -> None:
        """Note where this rank is, for the case that it dies."""
        self.put(f"{_SEEN}/{self.rank}", json.dumps([where.stage, where.step]))

    def _last_place(self, rank: int) -> RankStatus:
        """Where a rank was when it last noted it."""
        return RankStatus(*json.loads(self.get(f"{_SEEN}/{rank}") or "[]"))

    def is_called(self) -> bool:
        """Whether a rank made a roll call."""
        return bool(self._store.check([_CALL]))

    def answer(self, here: RankReport) -> None:
        """Answer the roll call."""
        self.put(f"{_HERE}/{self.rank}", to_bytes(here).decode())

    def has_failure(self) -> bool:
        try:
            return bool(self._store.check([_FAILURE]))
        except RuntimeError:
            return True  # the store is gone with the launcher

    def get_failure(self) -> PeerFailed | None:
        """The first failure; None without one."""
        try:
            word = self.get(_FAILURE)
        except RuntimeError:
            return None  # the store is gone with the launcher
        return None if word is None else PeerFailed(*json.loads(word))

    # -- stop ----------------------------------------------------------------------------------------------

    def set_stop(self, why: str) -> None:
        self._store.compare_set(f"{_STOP}/{self._stops}", "", why)
        self._set_news()

    def get_stop(self) -> str | None:
        """Why the ranks are asked to stop; None if they are not."""
        return self.get(f"{_STOP}/{self._stops}")

    def stop_followed(self) -> None:
        """Note that all ranks followed the request; the next one is a new one."""
        self._stops += 1

    def _wait_for(self, keys: tuple[str, ...], timeout_s: float) -> str | None:
        """The first of the keys that exists within the time; None if none does.

        It polls, since the store's own wait is for all keys, warns at its timeout, and lets no signal handler run.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            for key in keys:
                if self._store.check([key]):
                    return key
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_S)
