"""The web application of the monitor: fixed files and runs, behind access control."""

from __future__ import annotations

import asyncio
import hmac
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from ddp_loop.checkpoint import ask_to_stop
from ddp_loop.monitor.continuing import Continuations
from ddp_loop.monitor.panels import RunPanels, whole_number
from ddp_loop.monitor.run_list import ACTIONS, RunList, as_json
from ddp_loop.monitor.run_view import RunView
from ddp_loop.monitor.series import AXES, PARTS
from ddp_loop.monitor.sweep_view import Answer, Refused, Sweeps, ask_again, read_table, stop_from_page, write_text
from ddp_loop.reporting import ask_sweep_to_stop

# [Note: The gate] Any page in a browser on this machine, and any user of the machine, can send requests to 127.0.0.1.
# Every request must therefore name this server as its Host, which a foreign name that resolves to 127.0.0.1 does not,
# and must come from no other origin. Requests for a run must also have the token in a header: a form, an image or a
# link cannot set one, and no answer allows another origin to. The token follows the # of the address, which browsers
# do not send. The page's own files are public and need no token. GET changes nothing. POST stops runs, writes notes
# and names, has failed trials run again, and starts a run's own command again ([Note: Continue]). Files are looked up
# in a list that is made at the start, and runs and sweeps in the list of those that were found, by their keys; logged
# texts and images are asked for by number ([Note: Foreign files]), and a metric by its name among those that were
# read. So a request cannot name anything else. Images are fetched with the token and drawn on a canvas, so the policy
# below allows no further source of them, such as blob: addresses.

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

TOKEN_HEADER = "x-monitor-token"
BODY_BYTES = 2048  # of a request; a note has 500 letters
BODY_S = 10.0  # for a body to come
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class AccessControl:
    """Refuses foreign requests, and adds headers to every answer; see [Note: The gate].

    Args:
        app: gets the other requests.
        token: required for requests for a run.
        hosts: the server's names, without the port; the address of the connection is allowed too.
        port: of the server.
        free: public paths, which need no token.
    """

    def __init__(self, app: App, token: str, hosts: Sequence[str], port: int, free: Collection[str]) -> None:
        self._app = app
        self._token = token.encode()
        self._port = port
        self._free = free
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        body_comes = True

        async def receive_part() -> Message:
            nonlocal body_comes
            message = await receive()
            body_comes = message.get("more_body", False)
            return message

        async def send_part(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            elif body_comes and not message.get("more_body", False):
                # Closing while bytes arrive resets the connection, and the client may lose the answer.
                await send({**message, "more_body": True})
                with suppress(TimeoutError):
                    async with asyncio.timeout(BODY_S):
                        while body_comes:
                            await receive_part()
                message = {"type": "http.response.body"}
            await send(message)

        refused = self.check(scope)
        if refused is None:
            await self._app(scope, receive_part, send_part)
            return
        answer = _sent(*refused)
        answer.headers["connection"] = "close"
        await answer(scope, receive_part, send_part)

    def check(self, scope: Message) -> tuple[int, str] | None:
        """Return the status and the reason of a refusal; None for an allowed request."""
        from starlette.datastructures import Headers

        headers = Headers(scope=scope)
        one = {name: value for name, value in headers.items() if len(headers.getlist(name)) == 1}
        address = (scope.get("server") or ("", 0))[0]
        if not self._is_own(f"//{one.get('host', '')}", address):
            return 403, "This page answers only to its own address. Open the link that the monitor printed."
        origin = one.get("origin", "")
        if "origin" in headers and not (origin.startswith("http://") and self._is_own(origin[5:], address)):
            return 403, "This page refuses requests from other sites."
        length = one.get("content-length", "0")
        if "transfer-encoding" in headers or not length.isdecimal() or len(length) > 10 or int(length) > BODY_BYTES:
            return 413, f"A request must state its length, and have at most {BODY_BYTES} bytes."
        if scope["path"] in self._free:
            return None  # also after a link on another site
        if one.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return 403, "This page refuses requests from other sites."
        given = headers.getlist(TOKEN_HEADER)
        if not given:
            return 401, f"The header {TOKEN_HEADER} has no token. Open the link that the monitor printed."
        if len(given) > 1 or not hmac.compare_digest(given[0].encode("latin-1"), self._token):
            return 403, "The token is wrong: the monitor was restarted. Open the link that it printed last."
        return None

    def _is_own(self, place: str, address: str) -> bool:
        """Whether //host:port is this server; a literal address must be the connection's."""
        try:
            parts = urlsplit(place)
            name = (parts.hostname or "").lower()
            port = parts.port or 80
        except ValueError:
            return False
        if port != self._port or "@" in place or place.count("/") != 2:
            return False
        if name in self._hosts:
            return True
        try:
            return ip_address(name) == ip_address(address)
        except ValueError:
            return False


if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

Act: TypeAlias = Callable[[Mapping[str, str], Any], Answer]  # of the parameters of the path, and the query or the body
TICK_S = 1.0
QUIET_S = 10.0  # between two looks of a stream; of silence before it sends a comment
FEWEST = 50
MOST = 5000  # points of a curve
MOST_NAMES = 200  # of metrics in a request
MOST_VIEWS = 80
MOST_LISTS = 40  # runs whose rows are kept; whose texts and images are listed
ASKED = {"points": 1000, "smoothing": 0, "first": 0, "last": 10**12}
FOLDER = Path(__file__).parent / "static"
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.*"))
PATHS = {"/": "index.html", **{f"/{name}": name for name in [*FILES, "uplot/LICENSE"] if name != "index.html"}}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", "": "text/plain"}


class MonitorApp:
    """The runs of the page.

    Args:
        given: run folders, and folders with runs below them; either may not exist yet.

    Attributes:
        runs: the list of the page.
        open_pages: the number of open event streams.
        is_closing: ends the streams.
        panels: returns the panels of the run in a folder.
        continuations: the runs that the page continues.
    """

    def __init__(self, given: Sequence[Path]) -> None:
        self.runs = RunList(given)
        self.open_pages = 0
        self.is_closing = False
        self._turn = asyncio.Lock()
        self._made = -TICK_S
        self._sweeps = Sweeps(given)
        self.panels = lru_cache(MOST_LISTS)(RunPanels)
        self.continuations = Continuations()
        self._sweeps_turn = threading.Lock()
        self._views = lru_cache(MOST_VIEWS)(RunView)

    async def events(self) -> AsyncIterator[str]:
        """Yield server-sent events for one open page: first all runs, and then those that changed."""
        sent = None
        quiet_s = 0.0
        self.open_pages += 1
        try:
            while not self.is_closing:
                async with self._turn:  # the state is read once a tick for all open pages
                    if time.monotonic() - self._made >= 0.9 * TICK_S:
                        await asyncio.to_thread(self.runs.look)
                        self._made = time.monotonic()
                now = self.runs.now
                if now.version != sent:
                    state = now.changes(sent)
                    sent = now.version
                    quiet_s = 0.0
                    yield f"data: {state}\n\n"
                elif quiet_s >= QUIET_S:
                    quiet_s = 0.0
                    yield ": still here\n\n"
                await asyncio.sleep(TICK_S)
                quiet_s += TICK_S
        finally:
            self.open_pages -= 1

    def folder_of(self, key: str) -> Path:
        """Return a known run's folder.

        Raises:
            Refused: there is none.
        """
        folder = self.runs.folder_of(key)
        if folder is None:
            raise Refused(404, "There is no such run.")
        return folder

    def _view(self, key: str) -> RunView:
        return self._views(key, self.folder_of(key))

    def card(self, key: str) -> Answer:
        """Return all about a run but its curves."""
        if key.rpartition("/")[2] in ACTIONS:
            raise Refused(405, "This needs another method.")
        view = self._view(key)
        said = view.summary()
        continuing = self.continuations.about(view.folder, said["state"])
        return 200, said | self.panels(view.folder).about() | {"continuing": continuing}

    def curves(self, key: str, asked: Mapping[str, str]) -> Answer:
        """Return a run's curves."""
        view = self._view(key)
        numbers = {name: whole_number(name, asked.get(name, str(usual))) for name, usual in ASKED.items()}
        axis = asked.get("axis", AXES[0])
        if axis not in AXES:
            return 400, f"axis must be one of {', '.join(AXES)}."
        metrics = _names_in(asked["metrics"]) if "metrics" in asked else None
        points = min(MOST, max(FEWEST, numbers["points"]))
        first, last = (numbers[end] / PARTS[axis] for end in ("first", "last"))
        return 200, view.curves(points, numbers["smoothing"], first, last, axis, metrics)

    def values(self, key: str, name: str) -> Answer:
        """Return all values of a metric."""
        found = self._view(key).values(name)
        return (404, "There is no such metric.") if found is None else (200, found)

    def sweeps(self) -> Answer:
        """Return the sweeps of the runs."""
        self.runs.look()
        with self._sweeps_turn:
            return 200, {"sweeps": self._sweeps.look(self.runs.folders())}

    def ask_sweep(self, key: str, what: str, body: bytes = b"") -> Answer:
        """Ask a sweep to "stop", or to run trials "again"."""
        self.runs.look()
        with self._sweeps_turn:
            folder = self._sweeps.folder_of(key, self.runs.folders())
        if folder is None:
            return 404, "There is no such sweep."
        if what == "stop":
            return stop_from_page(ask_sweep_to_stop, folder, "The sweep's folder")
        return ask_again(folder, body)


def make_app(site: MonitorApp, token: str, hosts: Sequence[str], port: int) -> AccessControl:
    """Return the application with its access control.

    Raises:
        ImportError: starlette is missing.
    """
    from starlette.applications import Starlette
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    contents = {path: ((FOLDER / name).read_bytes(), TYPES[Path(name).suffix]) for path, name in PATHS.items()}

    async def file(request: Request) -> Response:
        content, kind = contents[request.url.path]
        return Response(content, media_type=kind)

    async def stream(request: Request) -> Response:
        return StreamingResponse(site.events(), media_type="text/event-stream")

    routes = [Route(path, file, methods=["GET"]) for path in PATHS]
    routes.append(Route("/api/stream", stream, methods=["GET"]))
    return AccessControl(Starlette(routes=[*routes, *_routes(site)]), token, hosts, port, PATHS.keys())


def _routes(site: MonitorApp) -> list[Route]:
    """Return the routes that answer at once; the last one takes any key."""
    from starlette.routing import Route

    def folder(of: Mapping[str, str]) -> Path:
        return site.folder_of(of["key"])

    def reading(path: str, act: Act) -> Route:
        def read(request: Request) -> Response:  # Starlette calls it in a thread, as it reads files
            return _answered(act, request.path_params, request.query_params)

        return Route(f"/api/{path}", read, methods=["GET"])

    def writing(path: str, act: Act) -> Route:
        async def write(request: Request) -> Response:
            try:
                body = await asyncio.wait_for(request.body(), BODY_S)
            except TimeoutError:
                return _sent(408, f"The body did not come within {BODY_S:.0f} s.")
            return await asyncio.to_thread(_answered, act, request.path_params, body)

        return Route(f"/api/{path}", write, methods=["POST"])

    def panel(what: str) -> Route:
        return reading(f"runs/{{key:path}}/{what}", lambda of, asked: site.panels(folder(of)).answer(what, asked))

    def text(what: str) -> Route:
        return writing(f"runs/{{key:path}}/{what}", lambda of, body: write_text(folder(of), what, body))

    def sweep(what: str) -> Route:
        return writing(f"sweeps/{{key}}/{what}", lambda of, body: site.ask_sweep(of["key"], what, body))

    return [
        reading("runs", lambda of, asked: (200, site.runs.look().changes())),
        reading("sweeps", lambda of, asked: site.sweeps()),
        reading("runs/{key:path}/curves", lambda of, asked: site.curves(of["key"], asked)),
        reading("runs/{key:path}/values", lambda of, asked: site.values(of["key"], asked.get("name", ""))),
        reading("runs/{key:path}/tables/{name}", lambda of, asked: read_table(folder(of), of["name"])),
        reading("runs/{key:path}/images/{number}", lambda of, asked: site.panels(folder(of)).image(of["number"])),
        *map(panel, ("console", "usage", "texts", "images")),
        *map(text, ("note", "name")),
        *map(sweep, ("stop", "again")),
        writing("runs/{key:path}/stop", lambda of, body: stop_from_page(ask_to_stop, folder(of), "The run folder")),
        writing("runs/{key:path}/continue", lambda of, body: site.continuations.start(folder(of), body)),
        reading("runs/{key:path}", lambda of, asked: site.card(of["key"])),
    ]


def _answered(act: Act, of: Mapping[str, str], asked: Any) -> Response:
    try:
        return _sent(*act(of, asked))
    except Refused as error:
        return _sent(*error.answer)


def _sent(status: int, body: Mapping[str, Any] | str | bytes) -> Response:
    from starlette.responses import Response

    kind = "image/png" if isinstance(body, bytes) else "application/json" if status < 300 else "text/plain"
    text = body if isinstance(body, str | bytes) else as_json(body)
    content = text.encode(errors="replace") if isinstance(text, str) else text  # half a surrogate is no UTF-8
    return Response(content, status, media_type=kind)


def _names_in(text: str) -> list[str]:
    """The names in a JSON array.

    Raises:
        Refused: it is none.
    """
    found = None
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
    if isinstance(found, list) and len(found) <= MOST_NAMES and all(isinstance(one, str) for one in found):
        return found
    raise Refused(400, "metrics must be a list of names, as JSON.")
