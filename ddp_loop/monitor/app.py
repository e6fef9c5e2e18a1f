"""The web application of the monitor: fixed files and runs, behind access control."""

from __future__ import annotations

import asyncio
import hmac
import json
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from ddp_loop.monitor.axes import AXES, PARTS
from ddp_loop.monitor.panels import Panels, routes_of_panels
from ddp_loop.monitor.run_list import ACTIONS, RunList, Snapshot
from ddp_loop.monitor.run_view import RunView
from ddp_loop.monitor.sweep_view import Answer, Sweeps, ask_again, read_table, stop_sweep, write_text

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
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        refused = self.check(scope)
        if refused is None:
            await self._app(scope, receive, send_with_headers)
            return
        status, why = refused
        body = why.encode()
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
        headers.append((b"connection", b"close"))  # the rest of the request is not read
        await send_with_headers({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def check(self, scope: Message) -> tuple[int, str] | None:
        """Return the status and the reason of a refusal; None for an allowed request."""
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        one = {name: values[0] for name, values in headers.items() if len(values) == 1}
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
        given = headers.get(TOKEN_HEADER, [])
        if not given:
            return 401, f"The header {TOKEN_HEADER} has no token. Open the link that the monitor printed."
        if len(given) > 1 or not hmac.compare_digest(given[0].encode("latin-1"), self._token):
            return 403, "The token is wrong: the monitor was restarted. Open the link that it printed last."
        return None

    def _is_own(self, place: str, address: str) -> bool:
        """Whether //host:port is this server; a literal address must be that of the connection."""
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

TICK_S = 1.0
QUIET_S = 10.0  # between two looks of a stream; of silence before it sends a comment
FEWEST = 50
MOST = 5000  # points of a curve
MOST_NAMES = 200  # of metrics in a request
MOST_VIEWS = 80  # runs whose rows are kept
NO_RUN = "There is no such run."
NO_SWEEP = "There is no such sweep."
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
    """

    def __init__(self, given: Sequence[Path]) -> None:
        self.runs = RunList(given)
        self.open_pages = 0
        self.is_closing = False
        self._turn = asyncio.Lock()
        self._made = -TICK_S
        self._sweeps = Sweeps(given)
        self.panels = Panels(self.runs.folder_of)
        self._views: OrderedDict[str, RunView] = OrderedDict()  # the most recently used ones, by key
        self._views_turn = threading.Lock()

    def look(self) -> Snapshot:
        """Return the state of all runs. Its times are whole seconds, so it changes at most once a second."""
        return self.runs.look()

    async def _look_now(self) -> Snapshot:
        """Return the state, which is read once a tick for all open pages."""
        async with self._turn:
            if time.monotonic() - self._made >= 0.9 * TICK_S:
                await asyncio.to_thread(self.look)
                self._made = time.monotonic()
            return self.runs.now

    async def events(self) -> AsyncIterator[str]:
        """Yield server-sent events for one open page: first all runs, and then those that changed."""
        sent = None
        quiet_s = 0.0
        self.open_pages += 1
        try:
            while not self.is_closing:
                now = await self._look_now()
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

    def _view(self, key: str) -> RunView | None:
        """Return what reads a known run, which keeps the rows of the runs that were asked for last."""
        folder = self.runs.folder_of(key)
        if folder is None:
            return None
        with self._views_turn:
            if key not in self._views:
                self._views[key] = RunView(key, folder)
            self._views.move_to_end(key)
            while len(self._views) > MOST_VIEWS:
                self._views.popitem(last=False)
            return self._views[key]

    def card(self, key: str) -> tuple[int, str]:
        """Return status and body of the answer to a request for all about a run but its curves."""
        if key.rpartition("/")[2] in ACTIONS:
            return 405, "This needs another method."
        view = self._view(key)
        if view is None:
            return 404, NO_RUN
        said = view.summary()
        return 200, _json(said | self.panels.about(view.folder, said["state"]))

    def curves(self, key: str, asked: Mapping[str, str]) -> tuple[int, str]:
        """Return status and body of the answer to a request for a run's curves."""
        view = self._view(key)
        if view is None:
            return 404, NO_RUN
        numbers = {}
        for name, usual in ASKED.items():
            text = asked.get(name, str(usual))
            if not (text.isascii() and text.isdecimal() and len(text) <= 13):
                return 400, f"{name} must be a whole number."
            numbers[name] = int(text)
        axis = asked.get("axis", AXES[0])
        if axis not in AXES:
            return 400, f"axis must be one of {', '.join(AXES)}."
        metrics = _names_in(asked["metrics"]) if "metrics" in asked else None
        if "metrics" in asked and metrics is None:
            return 400, "metrics must be a list of names, as JSON."
        points = min(MOST, max(FEWEST, numbers["points"]))
        first, last = (numbers[end] / PARTS[axis] for end in ("first", "last"))
        return 200, _json(view.curves(points, numbers["smoothing"], first, last, axis, metrics))

    def values(self, key: str, name: str) -> tuple[int, str]:
        """Return status and body of the answer to a request for all values of a metric."""
        view = self._view(key)
        if view is None:
            return 404, NO_RUN
        found = view.values(name)
        return (404, "There is no such metric.") if found is None else (200, _json(found))

    def stop(self, key: str) -> tuple[int, str]:
        """Return status and body of the answer to Stop."""
        view = self._view(key)
        if view is None:
            return 404, NO_RUN
        try:
            view.stop("the page")
        except ValueError as error:
            return 409, str(error)
        except OSError as error:
            return 500, f"The run folder cannot be written ({error.strerror})."
        return 202, _json({"said": "stopping"})

    def write(self, key: str, what: str, body: bytes) -> tuple[int, str]:
        """Return status and body of the answer to a request to write a run's "note" or "name"."""
        folder = self.runs.folder_of(key)
        return (404, NO_RUN) if folder is None else _answer(write_text(folder, what, body))

    def table(self, key: str, name: str) -> tuple[int, str]:
        """Return status and body of the answer to a request for a run's table."""
        folder = self.runs.folder_of(key)
        return (404, NO_RUN) if folder is None else _answer(read_table(folder, name))

    def sweeps(self) -> str:
        """Return the sweeps of the runs as JSON."""
        self.look()
        with self._views_turn:
            return _json({"sweeps": self._sweeps.look(self.runs.folders())})

    def ask_sweep(self, key: str, what: str, body: bytes = b"") -> tuple[int, str]:
        """Return status and body of the answer to a request to "stop" a sweep or to run trials "again"."""
        self.look()
        with self._views_turn:
            folder = self._sweeps.folder_of(key, self.runs.folders())
        if folder is None:
            return 404, NO_SWEEP
        return _answer(stop_sweep(folder, "the page") if what == "stop" else ask_again(folder, body))


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

    # Starlette calls these in threads, as they read files.
    def runs(request: Request) -> Response:
        return _sent(200, site.look().changes())

    def card(request: Request) -> Response:
        return _sent(*site.card(request.path_params["key"]))

    def curves(request: Request) -> Response:
        return _sent(*site.curves(request.path_params["key"], request.query_params))

    def values(request: Request) -> Response:
        return _sent(*site.values(request.path_params["key"], request.query_params.get("name", "")))

    def stop(request: Request) -> Response:
        return _sent(*site.stop(request.path_params["key"]))

    routes = [Route(path, file, methods=["GET"]) for path in PATHS]
    routes += [Route("/api/runs", runs, methods=["GET"]), Route("/api/stream", stream, methods=["GET"])]
    routes += [Route("/api/runs/{key:path}/curves", curves, methods=["GET"])]
    routes += [Route("/api/runs/{key:path}/values", values, methods=["GET"])]
    routes += [Route("/api/runs/{key:path}/stop", stop, methods=["POST"])]
    routes += _routes_of_results(site)
    routes += routes_of_panels(site.panels, _sent)
    routes += [Route("/api/runs/{key:path}", card, methods=["GET"])]
    return AccessControl(Starlette(routes=routes), token, hosts, port, PATHS.keys())


def _routes_of_results(site: MonitorApp) -> list[Route]:
    """Return the routes of notes, names, tables and sweeps."""
    from starlette.routing import Route

    def table(request: Request) -> Response:
        return _sent(*site.table(request.path_params["key"], request.path_params["name"]))

    def sweeps(request: Request) -> Response:
        return _sent(200, site.sweeps())

    def stop_sweep(request: Request) -> Response:
        return _sent(*site.ask_sweep(request.path_params["key"], "stop"))

    async def with_body(request: Request, act: Callable[[bytes], tuple[int, str]]) -> Response:
        try:
            body = await asyncio.wait_for(request.body(), BODY_S)
        except TimeoutError:
            return _sent(408, f"The body did not come within {BODY_S:.0f} s.")
        return _sent(*await asyncio.to_thread(act, body))

    def writing(what: str) -> Route:
        async def write(request: Request) -> Response:
            return await with_body(request, lambda body: site.write(request.path_params["key"], what, body))

        return Route(f"/api/runs/{{key:path}}/{what}", write, methods=["POST"])

    async def again(request: Request) -> Response:
        return await with_body(request, lambda body: site.ask_sweep(request.path_params["key"], "again", body))

    async def go_on(request: Request) -> Response:
        return await with_body(request, lambda body: _answer(site.panels.go_on(request.path_params["key"], body)))

    return [
        Route("/api/runs/{key:path}/continue", go_on, methods=["POST"]),
        writing("note"),
        writing("name"),
        Route("/api/runs/{key:path}/tables/{name}", table, methods=["GET"]),
        Route("/api/sweeps", sweeps, methods=["GET"]),
        Route("/api/sweeps/{key}/stop", stop_sweep, methods=["POST"]),
        Route("/api/sweeps/{key}/again", again, methods=["POST"]),
    ]


def _sent(status: int, body: str) -> Response:
    from starlette.responses import Response

    kind = "application/json" if status < 300 else "text/plain"
    return Response(body.encode(errors="replace"), status, media_type=kind)  # half a surrogate of a file is no UTF-8


def _answer(found: Answer) -> tuple[int, str]:
    status, body = found
    return status, body if isinstance(body, str) else _json(body)


def _names_in(text: str) -> list[str] | None:
    """The names in a JSON array; None if it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_good = isinstance(found, list) and len(found) <= MOST_NAMES and all(isinstance(one, str) for one in found)
    return found if is_good else None


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
