"""The server of the page: its files, what they ask for as JSON, and the two things they change."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ollama_tiering.errors import ServiceError, TieringError, UsageError
from ollama_tiering.launch.address import Address
from ollama_tiering.web.data import Document, PageData
from ollama_tiering.web.security import Door, Guard

_STATIC: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_ID: Final = re.compile(r"[0-9a-f]{64}")
_MOST: Final = 400  # days, and conversations of a first look
_MAX_BODY_BYTES: Final = 4096
_BACKLOG: Final = 128
_MOST_CONNECTIONS: Final = 64


def application(data: PageData, door: Door) -> Starlette:
    """The page at `/`, its files beside it, and what it asks for below `/api/`."""
    routes = [
        *(_file(path) for path in sorted(_STATIC.iterdir())),
        _shown("live", lambda _: data.live()),
        _shown("conversations", lambda request: data.conversations(_number(request, "most"))),
        _shown("why", lambda _: data.why()),
        _shown("report", lambda request: data.report(_number(request, "days") or 30)),
        _shown("doctor", lambda _: data.doctor()),
        _shown("config", lambda _: data.config()),
        _changed("pin", lambda said: data.pin(_id(said), unpin=_flag(said, "unpin"))),
        _changed("remove", lambda said: data.remove(_id(said), dry_run=_flag(said, "dry_run"))),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard, door=door)])


def serve(data: PageData, door: Door, ready: Callable[[], None]) -> None:
    """Serves until SIGINT or SIGTERM. `ready` is called once connections are accepted.
    ServiceError if the address cannot be had.
    """
    with _listening(door.address) as listening:
        settings = uvicorn.Config(
            application(data, door),
            log_level="warning",
            access_log=False,  # a token may stand in an address
            proxy_headers=False,  # they would say who connects
            server_header=False,
            lifespan="off",
            ws="none",
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_graceful_shutdown=1,
        )
        ready()
        uvicorn.Server(settings).run(sockets=[listening])


def _listening(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address.host, address.port))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise ServiceError(
            f"the page cannot listen on {address}: {error.strerror}",
            hint="name an address of this machine and a free port from 1024 on: --listen",
        ) from None
    return listening


def _file(path: Path) -> Route:
    content, kind = path.read_bytes(), _TYPES[path.suffix]
    address = "/" if path.name == "index.html" else f"/{path.name}"
    return Route(address, lambda _: Response(content, media_type=kind))


def _shown(name: str, value: Callable[[Request], Document]) -> Route:
    async def answer(request: Request) -> Response:
        return await run_in_threadpool(_answer, lambda: value(request))

    return Route(f"/api/{name}", answer)


def _changed(name: str, change: Callable[[Document], Document]) -> Route:
    async def answer(request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MAX_BODY_BYTES:
                return _error(_bad("the request is too long"), 413)
        return await run_in_threadpool(_answer, lambda: change(_said(body)))

    return Route(f"/api/{name}", answer, methods=["POST"])


def _answer(value: Callable[[], Document]) -> Response:
    try:
        return _json(value())
    except UsageError as error:
        return _error(error, 400)
    except ServiceError as error:
        return _error(error, 503)
    except TieringError as error:
        return _error(error, 409)
    except Exception as error:  # whatever it is, the page says it
        said = f"unexpected {type(error).__name__}: {error}"
        return _error(TieringError(said, hint="the command in a terminal says more"), 500)


def _bad(message: str) -> UsageError:
    return UsageError(message, hint="reload the page: it may be of another version")


def _error(error: TieringError, status: int) -> Response:
    return _json({"error": error.message, "hint": error.hint}, status)


def _json(value: Document, status: int = 200) -> Response:
    """In ASCII: a path may hold bytes that are no text."""
    return Response(json.dumps(value), status, media_type="application/json")


def _said(body: bytes) -> Document:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise _bad("the request is not an object in JSON")
    return said


def _id(said: Document) -> str:
    """A whole ID: a shortened one could mean another conversation by now."""
    found = said.get("id")
    if not isinstance(found, str) or not _ID.fullmatch(found):
        raise _bad("the request names no conversation")
    return found


def _flag(said: Document, name: str) -> bool:
    """A flag that is missing changes nothing, or takes nothing away."""
    found: Any = said.get(name, name == "dry_run")
    if not isinstance(found, bool):
        raise _bad(f"{name} is not true or false")
    return found


def _number(request: Request, name: str) -> int | None:
    """None if the request does not say it."""
    said = request.query_params.get(name)
    if said is None:
        return None
    if not (said.isascii() and said.isdigit() and 1 <= int(said[:9]) <= _MOST):
        raise _bad(f"{name} is a number from 1 to {_MOST}")
    return int(said)
