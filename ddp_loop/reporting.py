"""What rank 0 tells of a loop while it is gone through: rows, evaluations, the ranks' paces, pictures at the end."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence

import torch
from torch.optim import Optimizer

from ddp_loop.display import open_display
from ddp_loop.exports import draw_if_small
from ddp_loop.folding import Fold
from ddp_loop.journals import Evaluations, Journal
from ddp_loop.keeping import Keeper
from ddp_loop.lines import Lines, PatientLines
from ddp_loop.means import NORM, RATE, EpochMeans
from ddp_loop.paces import Paces
from ddp_loop.positions import Position
from ddp_loop.progress import OnRow, Rows
from ddp_loop.rates import Extent
from ddp_loop.records import Folded
from ddp_loop.runs import RANKS, ROWS, is_running
from ddp_loop.shards import MiniBatch
from ddp_loop.terminal import Terminal
from ddp_loop.world import World

Receivers = OnRow | Sequence[OnRow] | None


def all_of(receivers: Receivers) -> list[OnRow]:
    """Them as a list.

    Raises:
        TypeError: one cannot be called.
    """
    given = [] if receivers is None else list(receivers) if isinstance(receivers, Sequence) else [receivers]
    for one in given:
        if not callable(one):
            raise TypeError(
                f"on_row is a callable that takes a row, or a list of such; got {type(one).__name__}: give "
                "on_row=print, or on_row=[csv_sink(path), tensorboard_sink(folder)]"
            )
    return given


class Report:
    """Tells of a loop.

    Args:
        world: from `join_world`.
        where: the loop's position.
        keeper: of the run folder; None without one.
        state: of the job; its first optimizer's learning rates are told.
    """

    def __init__(self, world: World, where: Position, keeper: Keeper | None, state: Mapping[str, object]) -> None:
        self._world, self._where, self._keeper = world, where, keeper
        self._folder = None if keeper is None else keeper.folder
        self._optimizer = next((one for one in state.values() if isinstance(one, Optimizer)), None)
        self._began = time.monotonic()
        self._rows: Rows | None = None
        self._terminal: Terminal | None = None
        self._paces: Paces | None = None
        self._evaluations: Evaluations | None = None
        self._ranks: Journal | None = None
        self._draws = self._has_ended = self._looks = False
        self._away = world.device.type != "cpu"

    def open(self, receivers: Receivers, *, progress: bool, page: bool) -> None:
        """Begin, behind what is there. Every rank must call this.

        Raises:
            ImportError, OSError, TypeError, ValueError: on rank 0, where a file cannot be written, a receiver not be
                called, or no page be shown.
            PeerFailed: then on the others.
        """
        world = self._world
        key = world.once(lambda: self._begin(all_of(receivers), progress=progress, page=page))
        if key is not None:
            self._paces = Paces(world.words, key, world.rank, world.size, world.device)
        world.on_evaluated = self._note_evaluation

    def _begin(self, receivers: list[OnRow], *, progress: bool, page: bool) -> str | None:
        """On rank 0; returns a key of this loop's own for words between the ranks, None where nobody wants rows."""
        after, world = self._where.iteration, self._world
        if page:
            self._start_page()
        if self._keeper is None and not receivers and not progress:
            return None
        epoch = EpochMeans()
        lines = None if self._keeper is None else self._open_files(self._keeper, after, epoch)
        if progress:
            extent = Extent(**self._where.extent, after=after, ranks=world.size, device=str(world.device))
            self._terminal = Terminal(world.print, extent, self._began, open_display(), epoch)
        self._rows = Rows(lines, receivers, self._terminal, self._began)
        self._draws = progress and lines is not None
        return secrets.token_hex(4)

    def _open_files(self, keeper: Keeper, after: int, epoch: EpochMeans) -> PatientLines:
        self._evaluations = Evaluations(keeper.folder, after, keeper.say)
        self._ranks = Journal(keeper.folder / RANKS, after, keeper.say)
        file = Lines(keeper.folder / ROWS, after, epoch.recall)
        self._began -= file.elapsed_s
        return PatientLines(file, keeper.say, goes_on=keeper.goes_on)

    def _start_page(self) -> None:
        if self._folder is None:
            raise ValueError("a page shows a run folder; got page=True without one: give run=")
        from ddp_loop.monitor import start_page  # 20 ms that others need not spend

        start_page(self._folder, self._world.print)

    # -- a step --------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether there may be rows to hand on."""
        return self._rows is not None and self._rows.is_due

    def hand_on(self) -> None:
        """Hand on the rows that have arrived."""
        if self._rows is not None:
            self._rows.hand_on()

    def hand_on_all(self) -> None:
        """Hand on what is still on its way too, and have it written."""
        if self._rows is not None:
            self._rows.hand_on_all()

    def note(self, waited_s: float) -> bool:
        """A step was folded; returns whether this rank makes a row of it.

        Args:
            waited_s: how long this rank has waited in all folds so far.
        """
        if self._paces is not None and self._paces.note(self._where.iteration, waited_s):
            self._looks = True
        return self._rows is not None

    def add(self, mini_batch: MiniBatch, folded: Folded, fold: Fold, *, skips: bool) -> None:
        """A row of the step that was folded.

        Args:
            mini_batch: of the step.
            folded: its values.
            fold: that has its gradients.
            skips: whether steps may have been skipped.
        """
        if self._rows is None:
            return
        where = self._where
        names, values = ("loss", *folded.metrics), folded.values
        if folded.weight is not None:
            names, values = ("weight", *names), torch.cat([folded.weight.reshape(1), values])
        beside = self._learning_rates()
        if (norm := fold.gradient_norm(where.iteration)) is not None:
            beside[NORM] = norm
        if skips:
            beside["skipped"] = folded.bad
        if self._away:  # asking would hold the host up
            away = [name for name, one in beside.items() if isinstance(one, torch.Tensor) and one.device.type != "cpu"]
            values = torch.cat([values, *(torch.as_tensor(beside.pop(name)).to(values).reshape(1) for name in away)])
            names = (*names, *away)
        known = {name: float(one) for name, one in beside.items()}
        ends = where.ends_epoch(mini_batch) or where.has_made_all
        self._rows.add(mini_batch.epoch + 1, where.iteration, mini_batch.observations, ends, names, values, known)
        if self._looks:
            self._looks = False
            self._gather()

    def _learning_rates(self) -> dict[str, float | torch.Tensor]:
        """Of each group of the first optimizer."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return {f"{RATE}_{n}" if n else RATE: group["lr"] for n, group in enumerate(groups) if "lr" in group}

    def _gather(self) -> None:
        """Note what the ranks have said of their pace."""
        ranks = [] if self._paces is None else self._paces.gather()
        if not ranks:
            return
        if self._ranks is not None:
            elapsed_s = round(time.monotonic() - self._began, 4)
            self._ranks.append({"iteration": self._where.iteration, "elapsed_s": elapsed_s, "ranks": ranks})
        if self._terminal is not None:
            self._terminal.take_ranks(ranks)

    def _note_evaluation(self, result: Mapping[str, float]) -> None:
        """One was made: also behind the loop's last epoch, unless somebody else runs in the folder by then."""
        if self._evaluations is None or self._folder is None or (self._has_ended and is_running(self._folder)):
            return
        elapsed_s = time.monotonic() - self._began
        self._evaluations.note(self._where.epoch, self._where.iteration, result, elapsed_s)

    # -- the end -------------------------------------------------------------------------------------------

    def close(self, last_words: str | None) -> None:
        """Hand the last rows on, and close what they are written to."""
        rows, self._rows = self._rows, None
        if rows is None:
            return
        self._draws = self._draws and self._where.iteration > self._where.went_on_at
        if self._world.ended_by is None:
            self._gather()
        rows.close(last_words)

    def end(self) -> None:
        """The run has ended: draw it."""
        draws, self._draws, self._has_ended = self._draws, False, True
        keeper = self._keeper
        if draws and keeper is not None and keeper.is_there and self._world.ended_by is None:
            try:
                draw_if_small(keeper.folder)
            except Exception as error:  # a picture is not worth a run
                self._world.print(f"ddp_loop: {self._folder} was not drawn: {error!r}")
