"""Who may use the page, and what its answers tell the browser to refuse.

A request is let in if it comes from a process of this user on this machine, or brings the token.
A loopback server also wants its own name as Host, so that a name which an attacker points at
127.0.0.1 leads nowhere. What changes something must be a POST of this page's own script.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from ollama_tiering.launch.address import Address
from ollama_tiering.web.peer import Place, peer_user

CHANGE_HEADER: Final = "x-tiering-change"  # no form of another page can send it
_SAFE: Final = ("GET", "HEAD")
_TOKEN_HINT: Final = "open the address that `tiering web` prints, or see its file web.token"
_YEAR_SECONDS: Final = 365 * 86400
HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True, slots=True)
class Door:
    """`user_of` says whose process a connection comes from; `user` needs no token."""

    address: Address
    token: str
    user: int = os.geteuid()
    user_of: Callable[[Place, Place], int | None] = peer_user

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.address.is_loopback

    @property
    def cookie(self) -> str:
        """Names the cookie: those of two ports of one host are sent to both."""
        return f"tiering-{self.address.port}"

    @property
    def first_address(self) -> str:
        """What a person opens: with the token where others can open it, or root, who has no
        browser, serves it.
        """
        url = f"{self.address.url}/"
        return url if self.is_local and self.user else f"{url}?token={self.token}"

    def knows_host(self, host: str) -> bool:
        """Whether a Host header is this server's. Elsewhere the token, which another name's page
        has not, is what counts.
        """
        own = [f"{name}:{self.address.port}" for name in ("localhost", "127.0.0.1", "[::1]")]
        return not self.is_local or host in (*own, str(self.address))

    def admits(self, connection: HTTPConnection) -> bool:
        return self._is_user(connection) or self.fits(connection.cookies.get(self.cookie, ""))

    def fits(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.token.encode())

    def _is_user(self, connection: HTTPConnection) -> bool:
        client, server = connection.scope.get("client"), connection.scope.get("server")
        if not (self.is_local and client and server):
            return False
        return self.user_of(tuple(client), tuple(server)) == self.user


def is_own_change(connection: HTTPConnection) -> bool:
    """Whether a request that changes something comes from a script of this very page."""
    headers = connection.headers
    origin = urlsplit(headers.get("origin", "")).netloc
    return bool(origin) and origin == headers.get("host") and CHANGE_HEADER in headers


class Guard:
    """In front of the whole application: refuses, or adds HEADERS to what it answers."""

    def __init__(self, app: ASGIApp, *, door: Door) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await WebSocketClose()(scope, receive, send)  # nothing else comes in
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self._instead(HTTPConnection(scope)) or self._app
        await answer(scope, receive, guarded)

    def _instead(self, connection: HTTPConnection) -> Response | None:
        """The answer to whoever is not let in, or comes with the token for the first time."""
        door, method = self._door, connection.scope["method"]
        if not door.knows_host(connection.headers.get("host", "")):
            return _refusal(connection, 421, "this page has another address: " + door.address.url)
        if method in _SAFE and connection.url.path == "/" and "token" in connection.query_params:
            return self._first_visit(connection)
        if not door.admits(connection):
            return _refusal(connection, 401, f"this page needs its token: {_TOKEN_HINT}")
        if method not in _SAFE and not is_own_change(connection):
            return _refusal(connection, 403, "only this page itself may change something")
        return None

    def _first_visit(self, connection: HTTPConnection) -> Response:
        """Keeps the token in a cookie, and out of the address. The page goes on by itself: after a
        redirect from a link elsewhere, the browser would keep a strict cookie back.
        """
        token = connection.query_params["token"]
        if not self._door.fits(token):
            return _refusal(connection, 401, f"this is not the token: {_TOKEN_HINT}")
        answer = HTMLResponse(
            '<!doctype html><html lang="en"><title>tiering</title>'
            '<meta http-equiv="refresh" content="0; url=/"><a href="/">go on</a></html>'
        )
        answer.set_cookie(
            self._door.cookie,
            token,
            max_age=_YEAR_SECONDS,
            httponly=True,
            samesite="strict",
        )
        return answer


def _refusal(connection: HTTPConnection, status: int, error: str) -> Response:
    if connection.url.path.startswith("/api/"):
        return JSONResponse({"error": error, "hint": None}, status_code=status)
    return PlainTextResponse(f"{error}\n", status_code=status)
