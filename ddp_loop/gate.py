"""What a page on this machine lets in, and the headers of all its answers. See [Note: The gate]."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
from ipaddress import ip_address
from typing import Any, TypeAlias
from urllib.parse import urlsplit

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


class Gate:
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

        refused = self.why_not(scope)
        if refused is None:
            await self._app(scope, receive, send_with_headers)
            return
        status, why = refused
        body = why.encode()
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
        headers.append((b"connection", b"close"))  # whatever else the client wants to send is not read
        await send_with_headers({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def why_not(self, scope: Message) -> tuple[int, str] | None:
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
