"""The web application of the page: a fixed list of files and runs, behind access control."""

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

# [Note: The gate] Any page that a browser on this machine has open can send requests to 127.0.0.1, and so can all users
# of the machine. Therefore every request must name this server as its Host (a foreign name that resolves to 127.0.0.1
# does not), come from no other origin, and, for all that is of a run, have the token in a header: a form, an image or a
# link cannot set one, and no answer allows another origin to. The token is in the part of the address behind #, which
# browsers do not send. The files of the page itself are the same for everybody and need no token. GET changes nothing;
# the one POST is Stop. Runs and files are looked up in lists made at the start, so no name leads elsewhere.

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

TOKEN_HEADER = "x-monitor-token"
BODY_BYTES = 1024  # no request has a body
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
    """Refuses what is not this page's own, and gives every answer its headers.

    Args:
        app: behind it.
        token: that requests for a run must have.
        hosts: names that the server answers to, without the port; an address that was connected to is one too.
        port: that the server listens at.
        free: paths that are the same for everybody, and need no token.
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
        headers.append((b"connection", b"close"))  # whatever else the client wants to send is not read
        await send_with_headers({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def check(self, scope: Message) -> tuple[int, str] | None:
        """Status and reason of a refusal; None for a request that may pass."""
        said: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            said.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        one = {name: values[0] for name, values in said.items() if len(values) == 1}
        address = (scope.get("server") or ("", 0))[0]
        if not self._is_own(f"//{one.get('host', '')}", address):
            return 403, "this page answers to its own address alone: open the link that the monitor printed"
        origin = one.get("origin", "")
        if "origin" in said and not (origin.startswith("http://") and self._is_own(origin[5:], address)):
            return 403, "this page takes no requests from other sites"
        length = one.get("content-length", "0")
        if "transfer-encoding" in said or not length.isdecimal() or len(length) > 10 or int(length) > BODY_BYTES:
            return 413, f"no request to this page has more than {BODY_BYTES} bytes, of a length said before"
        if scope["path"] in self._free:
            return None  # also for who follows a link from elsewhere
        if one.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return 403, "this page takes no requests from other sites"
        given = said.get(TOKEN_HEADER, [])
        if not given:
            return 401, f"the header {TOKEN_HEADER} must have the token: open the link that the monitor printed"
        if len(given) > 1 or not hmac.compare_digest(given[0].encode("latin-1"), self._token):
            return 403, "the token is another one: the monitor was started again, open the link that it printed"
        return None

    def _is_own(self, place: str, address: str) -> bool:
        """Whether //host:port is this server; a literal address is, if it is the one that was connected to."""
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

TICK_S, QUIET_S = 1.0, 10.0  # a stream looks, and says that it is there, as often
FEWEST, MOST = 50, 5000  # points of a curve
ASKED = {"points": 1000, "smoothing": 0, "first": 0, "last": 10**12}
FOLDER = Path(__file__).parent / "static"
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


class MonitorApp:
    """The runs behind the page, and how many pages are open.

    Args:
        views: of the runs, in the order in which they are shown.
    """

    def __init__(self, views: Sequence[RunView]) -> None:
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


def make_app(site: MonitorApp, token: str, hosts: Sequence[str], port: int) -> AccessControl:
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
    return AccessControl(Starlette(routes=routes), token, hosts, port, FILES.keys())


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
