"""What every call passes first: it decides who may call at all, then runs the method with its
layers.

A layer is what goes around every method, such as counting. Layers are put around each method once.
gRPC's interceptors would do so anew for every call, which takes a tenth of a millisecond in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc

from ollama_tiering.sidecar.peer import PeerGuard

Handler = Any  # grpc.RpcMethodHandler; its stubs lack the type parameters used here
Service = Any  # grpc.GenericRpcHandler, likewise
Layer = Callable[[str, Handler], Handler]  # path of the method, what it goes around


class Entrance(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """The one handler that a server is given. Services are added to it as they would be to a
    server.

    `layers` are innermost first. The outermost of them also see what is refused here, to count and
    free it.
    """

    def __init__(self, guard: PeerGuard, layers: Sequence[Layer]) -> None:
        self._guard = guard
        self._layers = layers
        self._services: list[Service] = []
        self._open: dict[str, Handler] = {}  # by path: at most as many as there are methods
        self._shut: dict[str, Handler] = {}

    def add_generic_rpc_handlers(self, handlers: Iterable[Service]) -> None:
        self._services += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Ignored: generated code offers the same methods in two ways."""

    def service(self, handler_call_details: Any) -> Handler | None:
        """Called for each call, before its first message is read."""
        path = str(handler_call_details.method)
        if path not in self._open:
            found = (service.service(handler_call_details) for service in self._services)
            handler = next((one for one in found if one is not None), None)
            if handler is None:
                return None
            self._open[path] = self._wrapped(path, handler)
            self._shut[path] = self._wrapped(path, _REFUSE)
        return (self._shut if self._guard.strangers() else self._open)[path]

    def _wrapped(self, path: str, handler: Handler) -> Handler:
        for layer in self._layers:
            handler = layer(path, handler)
        return handler


async def _refuse(request: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.PERMISSION_DENIED, "only the sidecar's user may call it")


_REFUSE = grpc.unary_unary_rpc_method_handler(_refuse)
