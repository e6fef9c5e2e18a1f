"""What ranks show in the notebook that launched them; the notebook is simulated, the ranks are real."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_loop.distributed import RankFailed, open_cell
from ddp_loop.distributed.cells import NotebookCell
from tests.support.harness import OnRanks

pytestmark = pytest.mark.covers("J17")

CUT = "<div><small>The ranks ended here.</small></div>"


class Notebook:
    """A kernel's display: the displays by key, in the order of their first view, with all views of each."""

    def __init__(self) -> None:
        self.displays: dict[str, list[str]] = {}
        self.is_open = True

    def display(self, data: dict[str, str], *, raw: bool, display_id: str, update: bool = False) -> None:
        if not self.is_open:
            raise ValueError("the kernel's connection is closed")
        assert raw
        assert update == (display_id in self.displays)
        self.displays.setdefault(display_id, []).append(data["text/html"])


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    """This process as the kernel of a notebook."""
    made = Notebook()
    shell: Any = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=made.display))
    return made


def show(ending: str) -> bool:
    """Show on rank 0 two views and a last one, or none; returns whether this rank has a cell."""
    cell = open_cell()
    if cell is not None and os.environ["RANK"] == "0":
        cell.show("<p>1</p>", "1", last=False)
        cell.show("<p>2</p>", "2", last=False)
        if ending == "last":
            cell.show("<p>3</p>", "3", last=True)
        if ending == "raises":
            raise ValueError("planted")
    return cell is not None


def has_cell_in_a_fork() -> bool:
    """Whether a process that a rank forked has the rank's cell: it has inherited the variable."""
    if (child := os.fork()) == 0:
        os._exit(0 if open_cell() is None else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def test_views_of_a_rank_replace_each_other_in_one_display(on_ranks: OnRanks, notebook: Notebook) -> None:
    assert on_ranks(2, show, "last") == [True, True]
    assert on_ranks(1, show, "last") == [True]
    assert list(notebook.displays.values()) == [["<p>1</p>", "<p>2</p>", "<p>3</p>"]] * 2  # each has its own


def test_a_display_without_a_last_view_ends_with_the_ranks(on_ranks: OnRanks, notebook: Notebook) -> None:
    on_ranks(1, show, "none")
    with pytest.raises(RankFailed, match="planted"):
        on_ranks(1, show, "raises")
    assert [views[-1] for views in notebook.displays.values()] == [f"<p>2</p>{CUT}"] * 2


def test_a_closed_notebook_does_not_fail_its_ranks(on_ranks: OnRanks, notebook: Notebook) -> None:
    notebook.is_open = False
    assert on_ranks(1, show, "last") == [True]
    with pytest.raises(OSError, match="The notebook shows nothing more: ValueError"):
        NotebookCell().show("<p>1</p>", "1", last=False)


def test_ranks_that_another_thread_launched_have_no_cell(on_ranks: OnRanks, notebook: Notebook) -> None:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.extend(on_ranks(1, show, "last")))
    thread.start()
    thread.join()
    assert answers == [False]
    assert notebook.displays == {}


def test_ranks_lose_their_cell_with_the_task_and_a_process_that_one_forked_has_none(
    on_ranks: OnRanks, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_ranks(1, has_cell_in_a_fork) == [False]
    assert on_ranks(1, show, "none") == [True]
    monkeypatch.delitem(sys.modules, "IPython")
    assert on_ranks(1, show, "last") == [False]
