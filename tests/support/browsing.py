"""A visit of the monitor's page in a browser without a window."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.support.harness import until
from tests.support.serving import WAIT_S, Served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NEEDS_BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: there is no chromium on this machine's PATH"),
]
# All charts that are near are drawn: the first request is for the loss alone.
DRAWN = """() => [...document.querySelectorAll(".chart")]
    .every((one) => one.dataset.last || one.getBoundingClientRect().top > 1.5 * innerHeight)"""
# Only this machine has an address.
OPTIONS = ["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
WIDE, PHONE = (1280, 860), (375, 812)


class Visit:
    """A page in a browser whose way out is shut, see `OPTIONS`.

    Attributes:
        page: playwright's.
        outward: requests for anything but this machine. They are noted and not routed: a routed one goes on only while
            the test is in a call of playwright, so a test that waits for the request's effect would wait in vain.
        complaints: errors in the page, and on its console.
    """

    def __init__(self, browser: Browser, size: tuple[int, int], scheme: str) -> None:
        self.outward, self.complaints = list[str](), list[str]()
        width, height = size
        self.context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,  # type: ignore[arg-type]
        )
        self.context.set_default_timeout(WAIT_S * 1000)
        self.context.on("request", self._note)
        self.page: Page = self.context.new_page()
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _note(self, request: Request) -> None:
        if urlsplit(request.url).hostname not in ("127.0.0.1", None):  # none of data that are in the page
            self.outward.append(request.url)

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def open(self, page: Served) -> Visit:
        self.page.goto(page.link)
        self.page.wait_for_selector(".chart[data-last]")
        self.page.wait_for_function(DRAWN)
        return self

    def at(self, place: str, **options: Any) -> Locator:
        return self.page.locator(place, **options)

    def texts(self, place: str) -> list[str]:
        """The texts of all elements of a place, also of those that are not seen."""
        return self.page.locator(place).all_text_contents()

    def button(self, name: str, *, exact: bool = True) -> Locator:
        return self.page.get_by_role("button", name=name, exact=exact)

    def press(self, button: str) -> None:
        self.button(button).click()

    def key(self, name: str) -> None:
        """Press a key of the keyboard."""
        self.page.keyboard.press(name)

    def fill(self, label: str, text: str) -> None:
        self.page.get_by_label(label, exact=True).fill(text)

    def tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name).click()

    def point_at(self, metric: str, across: float = 0.5) -> None:
        """Move the mouse to a part of the width of a metric's picture."""
        box = self.at(f".chart[data-metric={metric}] .u-over").bounding_box()
        assert box is not None
        self.page.mouse.move(box["x"] + across * box["width"], box["y"] + 60, steps=3)

    def drag_over(self, metric: str, start: float, end: float) -> None:
        """Choose a part of a metric's picture with the mouse."""
        self.point_at(metric, start)
        self.page.mouse.down()
        self.point_at(metric, end)
        self.page.mouse.up()

    def visible(self, place: str) -> int:
        """How many elements of a place are seen."""
        return self.at(place).filter(visible=True).count()

    def listed(self) -> list[str]:
        """The names of the runs in the list, in their order, also of those that are scrolled out of sight."""
        return self.texts(".lines .line:visible .name")

    def chosen(self) -> list[str]:
        """The runs whose boxes are checked."""
        boxes = self.at(".show:checked").all()
        return [str(box.get_attribute("aria-label")).removeprefix("Draw ") for box in boxes]

    def facts(self) -> dict[str, str]:
        """What the open card says of its run."""
        return dict(zip(*(self.at(f".facts {kind}").all_inner_texts() for kind in ("dt", "dd")), strict=True))

    def unfold(self) -> None:
        """Show the list of runs where a narrow window hides it."""
        if self.at("#unfold").is_visible():
            self.at("#unfold").click()

    def open_card(self, run: str) -> None:
        """Open the card of a run by its line in the list."""
        self.page.locator(f".line[data-run='{run}'] .open").click()

    def has_lines(self, count: int) -> None:
        """Wait until the chart of the loss has so many lines."""
        until(lambda: len(self.last("loss")) == count, f"{count} lines are drawn")

    def text(self, place: str) -> str:
        return self.page.locator(place).first.inner_text()

    def waits_for(self, place: str, text: str) -> None:
        self.page.locator(place, has_text=text).first.wait_for()

    def last(self, metric: str) -> list[Any]:
        """The last point of each line of a metric's picture, as it is drawn."""
        points: list[Any] = json.loads(self.page.get_attribute(f".chart[data-metric={metric}]", "data-last") or "[]")
        return points

    def chart(self, metric: str, what: str) -> str | None:
        return self.page.get_attribute(f".chart[data-metric={metric}]", f"data-{what}")

    def ink(self, metric: str) -> int:
        """How many pixels of a picture are not empty."""
        return int(
            self.page.evaluate(
                """(metric) => {
                    const canvas = document.querySelector(`.chart[data-metric=${metric}] canvas`);
                    const copy = document.createElement("canvas");
                    [copy.width, copy.height] = [canvas.width, canvas.height];
                    const context = copy.getContext("2d", { willReadFrequently: true });
                    context.drawImage(canvas, 0, 0);
                    const data = context.getImageData(0, 0, copy.width, copy.height).data;
                    return data.filter((value, at) => at % 4 === 3 && value > 0).length;
                }""",
                metric,
            )
        )
