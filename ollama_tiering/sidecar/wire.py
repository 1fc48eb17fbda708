"""Two things about requests that are refused: those that are no valid message, and the memory of
the others.

Both apply to the services of one package; gRPC deals with the calls of others.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

Context = Any  # grpc.aio.ServicerContext; its stubs lack the type parameters used here


class WireFormat:
    """Bytes that are no valid message give INVALID_ARGUMENT, as any other malformed request does.
    By itself gRPC answers UNKNOWN and writes a traceback to the log. In a stream the service itself
    sees the error.
    """

    def __init__(self, package: str) -> None:
        self._prefix = f"/{package}."

    def around(self, path: str, handler: Any) -> Any:
        plain = handler.request_deserializer is None
        if plain or handler.request_streaming or not path.startswith(self._prefix):
            return handler
        return _remade(handler, _checked(handler), _decoder(handler.request_deserializer))


class RefusedRequests:
    """Frees refused requests at once. gRPC keeps the error that ends a call together with the call,
    and the error's traceback keeps the frames with the request in them. The interpreter's collector
    finds this cycle late, because it counts objects, not the 16 MiB that each may hold. This must
    be the outermost layer.
    """

    def __init__(self, package: str) -> None:
        self._prefix = f"/{package}."

    def around(self, path: str, handler: Any) -> Any:
        if not path.startswith(self._prefix):
            return handler
        return _remade(handler, _released(handler), handler.request_deserializer)


def _behaviour(handler: Any) -> Any:
    if handler.response_streaming:
        return handler.stream_stream if handler.request_streaming else handler.unary_stream
    return handler.stream_unary if handler.request_streaming else handler.unary_unary


def _remade(handler: Any, behaviour: Any, decode: Any) -> Any:
    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(behaviour, decode, handler.response_serializer)


def _decoder(decode: Any) -> Any:
    def decoded(data: bytes) -> Any:
        """Returns the error as a value: if it were raised here, gRPC would answer it."""
        try:
            return decode(data)
        except DecodeError as error:
            return error.with_traceback(None)

    return decoded


def _checked(handler: Any) -> Any:
    inner = _behaviour(handler)

    async def single(request: Any, context: Context) -> Any:
        """One answer, or a stream that is written to the context."""
        await _refuse_error(request, context)
        return await inner(request, context)

    async def streaming(request: Any, context: Context) -> AsyncIterator[Any]:
        await _refuse_error(request, context)
        async with contextlib.aclosing(inner(request, context)) as answers:
            async for answer in answers:
                yield answer

    return streaming if inspect.isasyncgenfunction(inner) else single


async def _refuse_error(request: Any, context: Context) -> None:
    if isinstance(request, DecodeError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no message: {request}")


def _released(handler: Any) -> Any:
    inner = _behaviour(handler)

    async def single(request: Any, context: Context) -> Any:
        try:
            return await inner(request, context)
        except grpc.aio.AbortError as error:
            del request
            raise _bare(error) from None

    async def streaming(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async with contextlib.AsyncExitStack() as stack:
                if handler.request_streaming:
                    request = aiter(request)  # a generator, which keeps the last message
                    if hasattr(request, "aclose"):
                        stack.push_async_callback(request.aclose)
                answers = await stack.enter_async_context(
                    contextlib.aclosing(inner(request, context))
                )
                async for answer in answers:
                    yield answer
        except grpc.aio.AbortError as error:
            del request
            raise _bare(error) from None

    return streaming if inspect.isasyncgenfunction(inner) else single


def _bare(error: grpc.aio.AbortError) -> grpc.aio.AbortError:
    error.__context__ = None
    return error.with_traceback(None)
