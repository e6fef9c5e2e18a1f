"""The view of the page lives in its address: a reload and a link keep axis, scale, search, order, runs and card."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.support.browsing import NEEDS_BROWSER, Visit
from tests.support.harness import until
from tests.support.serving import Served, row, served, write_run

pytestmark = [*NEEDS_BROWSER, pytest.mark.covers("E4")]
RATES = ("0.3", "0.03", "0.1", "0.001")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs that are named by their learning rate; the last one is at step 1."""
    for number, rate in enumerate(RATES):
        rows = [row(step, loss=1.0 / step + number) for step in range(1, 21)]
        write_run(tmp_path / f"sgd-lr{rate}-w8", rows, status="done", iteration=20, epochs=1, steps_per_epoch=20)
    return tmp_path


def view_of(one: Visit) -> dict[str, list[str]]:
    return parse_qs(urlsplit(one.page.url).query, keep_blank_values=True)


def visited(visit: Any, page: Served, view: str = "") -> Visit:
    """The page by a link with a view."""
    link, _, token = page.link.partition("#")
    one: Visit = visit(page)
    one.page.goto(f"{link}?{view}#{token}")
    one.page.wait_for_selector(".lines .line")
    return one


def colours(one: Visit) -> dict[str, str]:
    items = one.at(".line.drawn").all()
    return {
        str(item.get_attribute("data-run")): str(item.evaluate("(one) => one.style.getPropertyValue('--run')"))
        for item in items
    }


def test_a_reload_keeps_the_view_and_the_colours_of_the_runs(show: Any, runs: Path) -> None:
    one = show(runs)
    assert urlsplit(one.page.url).query == ""  # nothing where nothing was chosen
    assert one.listed() == [f"sgd-lr{rate}-w8" for rate in ("0.001", "0.03", "0.1", "0.3")]  # by their numbers
    colour = colours(one)
    assert len(set(colour.values())) == len(RATES)
    one.page.select_option("#axis", "time")
    one.page.select_option("#smoothing", "10")
    one.at("[name=scale][value=log]").check(force=True)
    one.page.uncheck("#marks")
    one.page.fill("#search", "lr0.")
    one.page.select_option("#sort", "value")
    one.page.click("#turn")
    one.page.uncheck("[aria-label='Draw sgd-lr0.1-w8']")
    one.open_card("sgd-lr0.03-w8")
    until(lambda: view_of(one).get("open") == ["sgd-lr0.03-w8"], "the view is in the address")
    wanted = view_of(one)
    assert wanted == {
        "axis": ["time"], "smoothing": ["10"], "scale": ["log"], "marks": ["no"], "search": ["lr0."],
        "sort": ["value"], "order": ["reverse"], "open": ["sgd-lr0.03-w8"],
        "run": ["sgd-lr0.001-w8", "sgd-lr0.03-w8", "sgd-lr0.3-w8"],
    }  # fmt: skip
    order = one.listed()
    one.page.reload()
    one.page.wait_for_selector(".run")
    assert (one.page.input_value("#axis"), one.page.input_value("#smoothing")) == ("time", "10")
    assert one.at("[name=scale]:checked").get_attribute("value") == "log"
    assert not one.page.is_checked("#marks")
    assert one.listed() == order == [f"sgd-lr{rate}-w8" for rate in ("0.001", "0.1", "0.03", "0.3")]
    assert sorted(one.chosen()) == wanted["run"]
    assert one.text(".run .name") == "sgd-lr0.03-w8"
    assert view_of(one) == wanted
    assert colours(one) == {run: colour[run] for run in wanted["run"]}  # each keeps its own
    assert "token" not in one.page.url


def test_a_link_shows_what_it_names_and_says_what_is_not_here(visit: Any, runs: Path) -> None:
    with served(runs) as page:
        one = visited(visit, page, "zoom=5~10")
        one.at("#whole").click()
        until(lambda: urlsplit(one.page.url).query == "", "the whole run is as at first")
        one = visited(visit, page, "run=no&axis=time")
        assert one.text("#notice") == "The link names runs that are not here: no."
        assert sorted(one.chosen()) == sorted(f"sgd-lr{rate}-w8" for rate in RATES)  # the usual ones
        assert one.page.input_value("#axis") == "time"
        nonsense = "axis=furlongs&smoothing=-1&sort=&tab=else&zoom=9~1&scale=cubic&run=sgd-lr0.1-w8&run=no&open=%3Cb%3E"
        one = visited(visit, page, nonsense)
        assert one.text("#notice") == (
            "The link names runs that are not here: no, <b>. The link asks for what the page does not have: "
            "smoothing=-1, axis=furlongs, sort=, scale=cubic, zoom=9~1 and 1 more."
        )
        assert (one.page.input_value("#axis"), one.page.input_value("#smoothing")) == ("step", "0")
        assert sorted(one.chosen()) == ["sgd-lr0.1-w8"]
        assert not one.page.is_visible("#whole")


def test_each_chart_has_its_own_scale_which_the_address_keeps(show: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "one", [row(step, accuracy=step / 9) for step in range(1, 9)], status="done", iteration=8)

    def scales(one: Visit) -> list[str | None]:
        return [one.chart(metric, "scale") for metric in ("loss", "accuracy")]

    one = show(tmp_path / "one")
    button = one.button("log scale of loss")
    button.click()
    assert (scales(one), button.get_attribute("aria-pressed")) == (["log", "linear"], "true")
    until(lambda: view_of(one) == {"log": ["loss"]}, "the scale is in the address")
    one.page.reload()
    until(lambda: scales(one) == ["log", "linear"], "a reload keeps it")
    one.at("[name=scale][value=log]").check(force=True)
    assert scales(one) == ["log", "log"]  # all of them
    one.press("log scale of accuracy")
    assert scales(one) == ["log", "linear"]
    until(lambda: view_of(one) == {"scale": ["log"], "linear": ["accuracy"]}, "the exception is in the address")
    one.page.reload()
    until(lambda: scales(one) == ["log", "linear"], "a reload keeps it")
