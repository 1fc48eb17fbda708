"""The calls of the protocol, by its own description: what a client calls and a server answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store import block_store_pb2 as pb

_ENGINES: Final = pb.DESCRIPTOR.services_by_name["BlockStore"]
_TOOLS: Final = adm.DESCRIPTOR.services_by_name["Administration"]
PACKAGE: Final = pb.DESCRIPTOR.package
BLOCK_STORE: Final = _ENGINES.full_name
SERVICES: Final = (BLOCK_STORE, _TOOLS.full_name)
# By name. BlockStore has those of both; of Stat, the one whose answer has every field.
METHODS: Final[dict[str, MethodDescriptor]] = {
    method.name: method for service in (_ENGINES, _TOOLS) for method in service.methods
}


class BlockStoreStub:
    """Calls every method through a channel."""

    if TYPE_CHECKING:

        def __getattr__(self, method: str) -> Any: ...

    def __init__(self, channel: grpc.Channel) -> None:
        for name, method in METHODS.items():
            call = getattr(channel, _shape(method))(
                f"/{BLOCK_STORE}/{name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, name, call)


def add_to_server(service: object, server: Any) -> None:
    """Methods that `service` lacks are answered with UNIMPLEMENTED."""
    handlers = {
        name: getattr(grpc, f"{_shape(method)}_rpc_method_handler")(
            getattr(service, name),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
        for name, method in METHODS.items()
        if hasattr(service, name)
    }
    tools = {method.name for method in _TOOLS.methods} & handlers.keys()
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(BLOCK_STORE, handlers),
            grpc.method_handlers_generic_handler(
                _TOOLS.full_name, {name: handlers[name] for name in tools}
            ),
        )
    )


def _shape(method: MethodDescriptor) -> str:
    sent, answered = method.client_streaming, method.server_streaming
    return f"{'stream' if sent else 'unary'}_{'stream' if answered else 'unary'}"
