"""The web application of the monitor: fixed files and runs, behind access control."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from ddp_loop.monitor.run_view import RunView

# [Note: The gate] Any page in a browser on this machine, and any user of the machine, can send requests to 127.0.0.1.
# Every request must therefore name this server as its Host, which a foreign name that resolves to 127.0.0.1 does not,
# and must come from no other origin. Requests for a run must also have the token in a header: a form, an image or a
# link cannot set one, and no answer allows another origin to. The token follows the # of the address, which browsers
# do not send. The page's own files are public and need no token. GET changes nothing; the only POST is Stop. Runs and
# files are looked up in lists that are made at the start, so a request cannot name anything else.

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

TOKEN_HEADER = "x-monitor-token"
BODY_BYTES = 1024  # of a request; none needs a body
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
        self._app, self._token, self._port, self._free = app, token.encode(), port, free
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
            name, port = (parts.hostname or "").lower(), parts.port or 80
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

TICK_S, QUIET_S = 1.0, 10.0  # between two looks of a stream; of silence before it sends a comment
FEWEST, MOST = 50, 5000  # points of a curve
ASKED = {"points": 1000, "smoothing": 0, "first": 0, "last": 10**12}
FOLDER = Path(__file__).parent / "static"
FILES = [
    *("page.css", "page.js", "charts.js", "wire.js", "words.js", "icon.svg"),
    *("uplot/uPlot.iife.min.js", "uplot/uPlot.min.css", "uplot/LICENSE"),
]
PATHS = {"/": "index.html", **{f"/{name}": name for name in FILES}}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", "": "text/plain"}


class MonitorApp:
    """The runs of the page.

    Args:
        views: of the runs, in the order in which they are shown.

    Attributes:
        open_pages: the number of open event streams.
        is_closing: ends the streams.
    """

    def __init__(self, views: Sequence[RunView]) -> None:
        self.views = {view.key: view for view in views}
        self.open_pages = 0
        self.is_closing = False
        self._turn = asyncio.Lock()
        self._state, self._made = "", -TICK_S

    def state(self) -> str:
        """Return the state of all runs as JSON. Its times are whole seconds, so it changes at most once a second."""
        return _json({"runs": [view.summary() for view in self.views.values()]})

    async def _state_now(self) -> str:
        """Return the state, which is computed once a tick for all open pages."""
        async with self._turn:
            if time.monotonic() - self._made >= 0.9 * TICK_S:
                self._state, self._made = await asyncio.to_thread(self.state), time.monotonic()
            return self._state

    async def events(self) -> AsyncIterator[str]:
        """Yield server-sent events for one open page: the state now, and after each change."""
        sent, quiet_s = "", 0.0
        self.open_pages += 1
        try:
            while not self.is_closing:
                state = await self._state_now()
                if state != sent:
                    sent, quiet_s = state, 0.0
                    yield f"data: {state}\n\n"
                elif quiet_s >= QUIET_S:
                    quiet_s = 0.0
                    yield ": still here\n\n"
                await asyncio.sleep(TICK_S)
                quiet_s += TICK_S
        finally:
            self.open_pages -= 1

    def curves(self, key: str, asked: Mapping[str, str]) -> tuple[int, str]:
        """Return status and body of the answer to a request for a run's curves."""
        if key not in self.views:
            return 404, "There is no such run."
        numbers = {}
        for name, usual in ASKED.items():
            text = asked.get(name, str(usual))
            if not (text.isascii() and text.isdecimal() and len(text) <= 13):
                return 400, f"{name} must be a whole number."
            numbers[name] = int(text)
        numbers["points"] = min(MOST, max(FEWEST, numbers["points"]))
        return 200, _json(self.views[key].curves(**numbers))

    def stop(self, key: str) -> tuple[int, str]:
        """Return status and body of the answer to Stop."""
        if key not in self.views:
            return 404, "There is no such run."
        try:
            self.views[key].stop("the page")
        except ValueError as error:
            return 409, str(error)
        except OSError as error:
            return 500, f"The run folder cannot be written ({error.strerror})."
        return 202, _json({"said": "stopping"})


def make_app(site: MonitorApp, token: str, hosts: Sequence[str], port: int) -> AccessControl:
    """Return the application with its access control.

    Raises:
        ImportError: starlette is missing.
    """
    from starlette.applications import Starlette
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    contents = {path: ((FOLDER / name).read_bytes(), TYPES[Path(name).suffix]) for path, name in PATHS.items()}

    def answer(status: int, body: str) -> Response:
        return Response(body, status, media_type="application/json" if status < 300 else "text/plain")

    async def file(request: Request) -> Response:
        content, kind = contents[request.url.path]
        return Response(content, media_type=kind)

    async def stream(request: Request) -> Response:
        return StreamingResponse(site.events(), media_type="text/event-stream")

    # Starlette calls these in threads, as they read files.
    def runs(request: Request) -> Response:
        return answer(200, site.state())

    def curves(request: Request) -> Response:
        return answer(*site.curves(request.path_params["key"], request.query_params))

    def stop(request: Request) -> Response:
        return answer(*site.stop(request.path_params["key"]))

    routes = [Route(path, file, methods=["GET"]) for path in PATHS]
    routes += [Route("/api/runs", runs, methods=["GET"]), Route("/api/stream", stream, methods=["GET"])]
    routes += [Route("/api/runs/{key}/curves", curves, methods=["GET"])]
    routes += [Route("/api/runs/{key}/stop", stop, methods=["POST"])]
    return AccessControl(Starlette(routes=routes), token, hosts, port, PATHS.keys())


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
