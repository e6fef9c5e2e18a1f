"""What ranks tell each other through the launcher's store, where a word stays when its rank is gone."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

_FAILURE = "ddp_loop/failure"
_ENDED = "ddp_loop/ended"
_CALL = "ddp_loop/call"
_HERE = "ddp_loop/here"
_STOP = "ddp_loop/stop"
_NEWS = "ddp_loop/news"
_WAITS = "ddp_loop/waits"
_FAILURE_WAIT_S = 0.5  # a rank says why it fails before it closes its connections; a killed one never does
_ANSWER_S = 1.2  # a watcher looks every 0.25 s; a rank that is dead, or stopped, never answers
_LOOK_S = 0.01  # a rank that waits at the store looks this often; a look takes 0.1 ms


class PeerFailed(RuntimeError):
    """Another rank failed, so this one cannot go on.

    Attributes:
        rank: the rank that failed, or None where nobody can say which.
        stage: in what it was: data, forward, backward, fold, optimizer (what follows the fold), save, evaluate, ...;
            empty outside of a loop.
        step: the loop's iteration, counted from 1; 0 outside of a loop.
    """

    def __init__(self, message: str, rank: int | None = None, stage: str = "", step: int = 0) -> None:
        super().__init__(message)
        self.rank, self.stage, self.step = rank, stage, step


class Stopped(SystemExit):
    """All ranks were asked to stop outside of a step, and what was made is kept: ends the script with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(frozen=True, slots=True)
class Where:
    """Where a rank is.

    Attributes:
        stage, step: as in `PeerFailed`.
        waits: the collective that it waits in; empty if it is in none.
    """

    stage: str = ""
    step: int = 0
    waits: str = ""

    def __str__(self) -> str:
        """Such as " in forward of step 12"."""
        of = f" of step {self.step}" if self.step else ""
        return f" in {self.stage}{of}" if self.stage else of.replace(" of", " in")


@dataclass(frozen=True, slots=True)
class Here:
    """A rank's answer to a call: where it is, and the stack of its main thread."""

    where: Where
    stack: str


def own_keys(store: dist.Store, rank: int) -> dist.Store:
    """The store with keys of this world's own.

    The launcher's store outlives a world. Without this, the ranks of a second one find the addresses of the
    first one's closed connections there, and its failure.
    """
    return dist.PrefixStore(f"ddp_loop/{store.add(f'ddp_loop/worlds/{rank}', 1)}", store)


def said(error: BaseException) -> str:
    """The last line of its traceback, also of one whose `__str__` raises."""
    return "".join(traceback.format_exception_only(error)).strip()


def find_culprit(here: Mapping[int, Here], ended: set[int], size: int, timeout_s: float) -> tuple[int | None, str, str]:
    """Who holds the others up, why, and its stack: of the ranks that answered, ended, or did neither.

    In this order: a rank that left without an error; one that does not answer; one that is in no collective while the
    others wait; one that waits in another collective than most.
    """
    if ended:
        rank = min(ended)
        return rank, (
            f"every rank must take part in every collective; rank {rank} left the world, without an error, when others "
            "were in a collective: leave loops and call evaluate on all ranks alike"
        ), ""  # fmt: skip
    if silent := [rank for rank in range(size) if rank not in here]:
        return silent[0], (
            f"every rank must take part in every collective; rank {silent[0]} is gone without a word (killed, stopped, "
            "out of memory, a crash in compiled code, or its machine is gone): look at what its launcher and kernel say"
        ), ""  # fmt: skip
    if late := [rank for rank in range(size) if not here[rank].where.waits]:
        one = here[late[0]]
        return late[0], (
            f"every rank must come to every collective within timeout_s={timeout_s:g}; rank {late[0]} is still"
            f"{str(one.where) or ' outside of a loop'} while rank {_waiting(here)} waits: let it do less between two "
            "collectives, or give join_world a longer timeout_s"
        ), one.stack  # fmt: skip
    kinds = [one.where.waits for _, one in sorted(here.items())]
    odd = min(range(size), key=lambda rank: (kinds.count(kinds[rank]), -rank))
    if len(set(kinds)) > 1:
        other = next(kind for kind in kinds if kind != kinds[odd])
        return odd, (
            f"every rank must make the same collectives in the same order; rank {odd} waits in {kinds[odd]}"
            f"{here[odd].where}, others in {other}: take decisions on folded values alone, and call evaluate, "
            "and whatever else is for every rank, on all of them"
        ), here[odd].stack  # fmt: skip
    return None, f"all ranks wait in {kinds[0]}, and it does not end: is the network between the machines broken?", ""


def _waiting(here: Mapping[int, Here]) -> str:
    rank, one = next((rank, one) for rank, one in sorted(here.items()) if one.where.waits)
    return f"{rank} (in {one.where.waits}{one.where})"


class Words:
    """The words of the ranks of one world.

    Args:
        store: with keys of the world's own.
        rank: the one that speaks here, of `size`.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._stops = self._numbers = 0  # requests that were followed; numbers that were given

    def tell(self, key: str, word: str) -> None:
        """Leave a word."""
        self._store.set(key, word)

    def ask(self, key: str) -> str | None:
        """The word that stands there; None for none."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def take(self, key: str) -> str | None:
        """The word that stands there, which is then gone; None for none."""
        word = self.ask(key)
        if word is not None:
            self._store.delete_key(key)
        return word

    def number(self) -> int:
        """Another one at each call, the same on every rank that calls as often."""
        self._numbers += 1
        return self._numbers

    def ask_all(self, keys: list[str]) -> list[str]:
        """The words that stand there, without the others; in one go if all do."""
        if not keys or not self._store.check(keys):
            return [word for key in keys if (word := self.ask(key)) is not None]
        return [word.decode() for word in self._store.multi_get(keys)]

    def news(self) -> int:
        """How much news there is that watchers must look at: a failure, a call, a stop."""
        return int(self._store.add(_NEWS, 0))

    def _tell_news(self) -> None:
        self._store.add(_NEWS, 1)

    def tell_end(self) -> None:
        """Say that this rank leaves without an error."""
        self.tell(f"{_ENDED}/{self._rank}", "")

    # -- failures ------------------------------------------------------------------------------------------

    def tell_failure(self, error: BaseException, where: Where) -> None:
        """Say that this rank fails, unless another one failed before."""
        text = "".join(traceback.format_exception(error))
        self._tell_failure(
            f"rank {self._rank} failed{where}: {said(error)}\n\n{text}",
            rank=self._rank,
            stage=where.stage,
            step=where.step,
        )

    def _tell_failure(self, message: str, *, rank: int | None, stage: str = "", step: int = 0) -> None:
        word = json.dumps({"message": message, "rank": rank, "stage": stage, "step": step})
        try:
            self._store.compare_set(_FAILURE, "", word)  # the first one to fail is the culprit
            self._tell_news()
        except RuntimeError:
            return  # the store is gone with the launcher; the closed connections tell the peers

    def await_first(self, key: str, timeout_s: float) -> None:
        """Wait for rank 0's word.

        Raises:
            PeerFailed: rank 0 failed, or does not come.
        """
        try:
            came = self._wait_for((key, _FAILURE), timeout_s)
            told = self._store.get(key).decode() if came == key else ""
        except RuntimeError as error:
            raise self.peer_failure(error, timeout_s) from error
        failed = self.told_failure() if came == _FAILURE else None
        if failed is not None:
            raise failed
        if came is None:
            raise PeerFailed(f"rank 0 must leave its block in timeout_s={timeout_s:g}; it did not", 0)
        if told:
            raise PeerFailed(f"rank 0 failed while the others waited for it: {told}", 0)

    def peer_failure(self, error: RuntimeError, timeout_s: float) -> PeerFailed:
        """What this rank raises since its collective ended with `error`: who failed, as all ranks will say it."""
        left = {f"{_ENDED}/{rank}": rank for rank in range(self._size) if rank != self._rank}
        try:
            came = self._wait_for((_FAILURE, *left), _FAILURE_WAIT_S)
            if came != _FAILURE:
                self._call_all({left[came]} if came is not None else set(), timeout_s)
        except RuntimeError:
            pass  # the store is gone with the launcher
        return self.told_failure() or PeerFailed(
            "every rank must take part in every collective; a rank is gone without a word (killed), or slower "
            f"than timeout_s={timeout_s:g}: {error}"
        )

    def _call_all(self, ended: set[int], timeout_s: float) -> None:
        """Ask every rank where it is, and tell who is the culprit; the first to tell is believed."""
        here: dict[int, Here] = {}
        if not ended:
            self.tell(_CALL, "")
            self._tell_news()
            deadline = time.monotonic() + _ANSWER_S
            while len(here) < self._size and time.monotonic() < deadline and not self.has_failure():
                for rank in set(range(self._size)) - here.keys():
                    if self._store.check([f"{_HERE}/{rank}"]):
                        here[rank] = _here_of(json.loads(self._store.get(f"{_HERE}/{rank}")))
                time.sleep(_LOOK_S)
            here.setdefault(self._rank, Here(Where(waits="a collective"), ""))  # it asks, so it is not gone
        culprit, message, stack = find_culprit(here, ended, self._size, timeout_s)
        where = here[culprit].where if culprit is not None and culprit in here else Where()
        self._tell_failure(
            message + (f"\n\nThe stack of rank {culprit}:\n{stack}" if stack else ""),
            rank=culprit,
            stage=where.stage,
            step=where.step,
        )

    def tell_wait(self, kind: str) -> None:
        """Say that this rank has waited for a while in a collective of this kind; "" when it waits no more."""
        self.tell(f"{_WAITS}/{self._rank}", kind)

    def wait_of_next(self) -> str:
        """What the next rank says of its own waiting."""
        return self.ask(f"{_WAITS}/{(self._rank + 1) % self._size}") or ""

    def is_called(self) -> bool:
        """Whether some rank asks where all are."""
        return bool(self._store.check([_CALL]))

    def answer(self, here: Here) -> None:
        """Say where this rank is."""
        self.tell(f"{_HERE}/{self._rank}", json.dumps(asdict(here)))

    def has_failure(self) -> bool:
        """Whether a rank said that it failed."""
        try:
            return bool(self._store.check([_FAILURE]))
        except RuntimeError:
            return True  # the store is gone with the launcher

    def told_failure(self) -> PeerFailed | None:
        """What the first rank to fail said, if one did."""
        try:
            if not self._store.check([_FAILURE]):
                return None
            word = json.loads(self._store.get(_FAILURE))
        except (RuntimeError, ValueError):
            return None  # the store is gone with the launcher
        return PeerFailed(word["message"], word["rank"], word["stage"], word["step"])

    # -- stop ----------------------------------------------------------------------------------------------

    def tell_stop(self, why: str) -> None:
        """Say that the ranks are asked to stop."""
        self._store.compare_set(f"{_STOP}/{self._stops}", "", why)
        self._tell_news()

    def told_stop(self) -> str | None:
        """Why the ranks are asked to stop, if they are."""
        return self.ask(f"{_STOP}/{self._stops}")

    def stop_followed(self) -> None:
        """The request was followed on every rank; the next one is another."""
        self._stops += 1

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


def _here_of(word: dict[str, Any]) -> Here:
    return Here(Where(**word["where"]), word["stack"])
