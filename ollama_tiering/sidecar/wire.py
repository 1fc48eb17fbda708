"""Requests that are no messages at all: INVALID_ARGUMENT, as for any other malformed one.

Left to itself gRPC answers UNKNOWN and writes a traceback to the log for each.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

Context = Any  # grpc.aio.ServicerContext; its stubs lack the type parameters used here


class WireFormat(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """For calls of one service with a single request; in a stream the service itself sees it."""

    def __init__(self, service_name: str) -> None:
        self._prefix = f"/{service_name}/"

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        if not str(details.method).startswith(self._prefix):
            return handler
        if handler.response_streaming:
            make, behaviour = grpc.unary_stream_rpc_method_handler, _streaming(handler.unary_stream)
        else:
            make, behaviour = grpc.unary_unary_rpc_method_handler, _single(handler.unary_unary)
        return make(behaviour, _decoder(handler.request_deserializer), handler.response_serializer)


def _decoder(decode: Any) -> Any:
    def decoded(data: bytes) -> Any:
        """The error as a value: raised here it would be gRPC's to answer."""
        try:
            return decode(data)
        except DecodeError as error:
            return error

    return decoded


def _single(inner: Any) -> Any:
    async def call(request: Any, context: Context) -> Any:
        await _refuse_error(request, context)
        return await inner(request, context)

    return call


def _streaming(inner: Any) -> Any:
    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        await _refuse_error(request, context)
        async with contextlib.aclosing(inner(request, context)) as answers:
            async for answer in answers:
                yield answer

    return call


async def _refuse_error(request: Any, context: Context) -> None:
    if isinstance(request, DecodeError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no message: {request}")
