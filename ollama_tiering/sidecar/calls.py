"""Counts the calls of the gRPC service by method and status, and measures how long each took.

These are the only numbers that the sidecar counts just for its metrics; the store counts everything
else for itself. Method names are those of registered handlers, so a client cannot invent labels.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram

Context = Any  # grpc.aio.ServicerContext; its stubs lack the type parameters used here

_BUCKETS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0)
_NAMES: Final = {code.value[0]: code.name for code in grpc.StatusCode}


class CallMetrics:
    """To be used on one event loop. It goes around what refuses calls, so that refused calls are
    counted, too.
    """

    def __init__(
        self, registry: CollectorRegistry, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._calls = Counter(
            "tiering_grpc_calls",
            "Calls of the sidecar's gRPC services that have ended.",
            ("method", "code"),
            registry=registry,
        )
        self._seconds = Histogram(
            "tiering_grpc_call_seconds",
            "Seconds from a call's start to its end; a Put or Get lasts as long as its stream.",
            ("method",),
            buckets=_BUCKETS,
            registry=registry,
        )

    def around(self, path: str, handler: Any) -> Any:
        method = path.rpartition("/")[2]
        if handler.response_streaming:
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            behaviour: Any = self._streaming(method, inner)
        else:
            inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
            behaviour = self._single(method, inner)
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        return make(behaviour, handler.request_deserializer, handler.response_serializer)

    def _single(self, method: str, inner: Any) -> Any:
        async def call(request: Any, context: Context) -> Any:
            with self._counted(method, context):
                return await inner(request, context)

        return call

    def _streaming(self, method: str, inner: Any) -> Any:
        async def call(request: Any, context: Context) -> AsyncIterator[Any]:
            with self._counted(method, context):
                answers = inner(request, context)
                if inspect.isawaitable(answers):  # it writes to the context itself
                    await answers
                    return
                async with contextlib.aclosing(answers):
                    async for answer in answers:
                        yield answer

        return call

    @contextlib.contextmanager
    def _counted(self, method: str, context: Context) -> Any:
        start = self._clock()
        failed = ""
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            failed = grpc.StatusCode.CANCELLED.name
            raise
        except Exception:
            failed = grpc.StatusCode.UNKNOWN.name
            raise
        finally:
            code = _code(context)
            if code == "OK":
                code = failed or (grpc.StatusCode.CANCELLED.name if _cancelled() else code)
            self._calls.labels(method, code).inc()
            self._seconds.labels(method).observe(self._clock() - start)


def _cancelled() -> bool:
    """Whether the client went away, even if the handler cleaned up and ended normally."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _code(context: Context) -> str:
    code = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else _NAMES.get(int(code or 0), "UNKNOWN")
