"""What becomes of requests that are refused: a status of the list, and no memory held."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError

from ollama_tiering.sidecar.entrance import Entrance
from ollama_tiering.sidecar.peer import PeerGuard
from ollama_tiering.sidecar.wire import RefusedRequests, WireFormat

SERVICE = "x.Service"


class Request:
    """A message that tells when it is gone."""

    alive: ClassVar[weakref.WeakSet[Request]] = weakref.WeakSet()

    def __init__(self, data: bytes) -> None:
        if data == b"garbled":
            raise DecodeError("wire format was corrupt")
        self.alive.add(self)


async def _single(request: Any, context: Any) -> bytes:
    await _refuse(context)
    return b""


async def _many(request: Any, context: Any) -> AsyncIterator[bytes]:
    await _refuse(context)
    yield b""


async def _stream(requests: Any, context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        assert isinstance(request, Request)
        await _refuse(context)
        yield b""


async def _refuse(context: Any) -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


HANDLERS = {
    "Single": grpc.unary_unary_rpc_method_handler(_single, Request),
    "Many": grpc.unary_stream_rpc_method_handler(_many, Request),
    "Stream": grpc.stream_stream_rpc_method_handler(_stream, Request),
}


async def _ask(socket: Path, method: str, data: bytes) -> grpc.StatusCode:
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        path = f"/{SERVICE}/{method}"
        try:
            if method == "Single":
                await channel.unary_unary(path)(data, timeout=10)
            elif method == "Many":
                [_ async for _ in channel.unary_stream(path)(data, timeout=10)]
            else:
                [_ async for _ in channel.stream_stream(path)(iter([data]), timeout=10)]
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def _serve_and_ask(socket: Path, method: str, data: bytes) -> tuple[grpc.StatusCode, int]:
    server = grpc.aio.server()
    entrance = Entrance(PeerGuard(socket), [WireFormat("x").around, RefusedRequests("x").around])
    entrance.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, HANDLERS)])
    server.add_generic_rpc_handlers((entrance,))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    gc.collect()
    gc.disable()
    try:
        codes = {await _ask(socket, method, data) for _ in range(5)}
        await asyncio.sleep(0.2)
        alive = len(Request.alive)
    finally:
        gc.enable()
        await server.stop(0)
    (code,) = codes
    return code, alive


@pytest.mark.parametrize("method", HANDLERS)
def test_a_refused_request_is_freed_without_the_collector(tmp_path: Path, method: str) -> None:
    code, alive = asyncio.run(_serve_and_ask(tmp_path / "s", method, b"message"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert alive == 0


@pytest.mark.parametrize("method", ["Single", "Many"])
def test_what_is_no_message_is_an_invalid_argument(tmp_path: Path, method: str) -> None:
    code, _ = asyncio.run(_serve_and_ask(tmp_path / "s", method, b"garbled"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
