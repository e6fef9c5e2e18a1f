"""The page's web application: a fixed list of files and runs, behind the gate."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_loop.gate import Gate
from ddp_loop.viewing import View

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

TICK_S, QUIET_S = 1.0, 10.0  # a stream looks, and says that it is there, as often
FEWEST, MOST = 50, 5000  # points of a curve
ASKED = {"points": 1000, "smoothing": 0, "first": 0, "last": 10**12}
FOLDER = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/wire.js": ("wire.js", "text/javascript; charset=utf-8"),
    "/words.js": ("words.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/uplot/uPlot.iife.min.js": ("uplot/uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/uplot/uPlot.min.css": ("uplot/uPlot.min.css", "text/css; charset=utf-8"),
    "/uplot/LICENSE": ("uplot/LICENSE", "text/plain; charset=utf-8"),
}


class Site:
    """The runs behind the page, and how many pages are open.

    Args:
        views: of the runs, in the order in which they are shown.
    """

    def __init__(self, views: Sequence[View]) -> None:
        self.views = {view.key: view for view in views}
        self.open_pages = 0
        self.is_closing = False
        self._turn = asyncio.Lock()
        self._state, self._made = "", -TICK_S

    def state(self) -> str:
        """What the page is told whenever it changes, as JSON; whole seconds, so not more often than once in one."""
        return _json({"runs": [view.summary() for view in self.views.values()]})

    async def _state_now(self) -> str:
        """The state, made once in a tick however many pages are open."""
        async with self._turn:
            if time.monotonic() - self._made >= 0.9 * TICK_S:
                self._state, self._made = await asyncio.to_thread(self.state), time.monotonic()
            return self._state

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events for one open page: the state now, and whenever it changed."""
        told, quiet_s = "", 0.0
        self.open_pages += 1
        try:
            while not self.is_closing:
                state = await self._state_now()
                if state != told:
                    told, quiet_s = state, 0.0
                    yield f"data: {state}\n\n"
                elif quiet_s >= QUIET_S:
                    quiet_s = 0.0
                    yield ": still here\n\n"
                await asyncio.sleep(TICK_S)
                quiet_s += TICK_S
        finally:
            self.open_pages -= 1

    def curves(self, key: str, asked: Mapping[str, str]) -> tuple[int, str]:
        """Status and body of the answer to a question for a run's curves."""
        if key not in self.views:
            return 404, "no such run"
        numbers = {}
        for name, usual in ASKED.items():
            said = asked.get(name, str(usual))
            if not (said.isascii() and said.isdecimal() and len(said) <= 13):
                return 400, f"{', '.join(ASKED)} must be whole numbers; {name} is not"
            numbers[name] = int(said)
        numbers["points"] = min(MOST, max(FEWEST, numbers["points"]))
        return 200, _json(self.views[key].curves(**numbers))

    def stop(self, key: str) -> tuple[int, str]:
        """Status and body of the answer to Stop."""
        if key not in self.views:
            return 404, "no such run"
        try:
            self.views[key].stop("the page")
        except ValueError as error:
            return 409, str(error)
        except OSError as error:
            return 500, f"the run folder must be one that can be written; it is not ({error.strerror})"
        return 202, _json({"said": "stopping"})


def make_app(site: Site, token: str, hosts: Sequence[str], port: int) -> Gate:
    """The application, behind its gate.

    Raises:
        ImportError: starlette is missing.
    """
    from starlette.applications import Starlette
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    contents = {path: ((FOLDER / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}

    def answer(said: tuple[int, str]) -> Response:
        return Response(said[1], said[0], media_type="application/json" if said[0] < 300 else "text/plain")

    async def file(request: Request) -> Response:
        content, kind = contents[request.url.path]
        return Response(content, headers={"content-type": kind})

    async def stream(request: Request) -> Response:
        return StreamingResponse(site.events(), media_type="text/event-stream")

    # These read files, and are called in threads.
    def runs(request: Request) -> Response:
        return answer((200, site.state()))

    def curves(request: Request) -> Response:
        return answer(site.curves(request.path_params["key"], request.query_params))

    def stop(request: Request) -> Response:
        return answer(site.stop(request.path_params["key"]))

    routes = [Route(path, file, methods=["GET"]) for path in FILES]
    routes += [Route("/api/runs", runs, methods=["GET"]), Route("/api/stream", stream, methods=["GET"])]
    routes += [Route("/api/runs/{key}/curves", curves, methods=["GET"])]
    routes += [Route("/api/runs/{key}/stop", stop, methods=["POST"])]
    return Gate(Starlette(routes=routes), token, hosts, port, FILES.keys())


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
