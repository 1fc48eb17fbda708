"""The administration's errors as gRPC status codes, and back."""

from __future__ import annotations

from typing import Final

import grpc
from google.protobuf.message import DecodeError

from ollama_tiering.errors import StoreDamaged, TieringError, UsageError
from ollama_tiering.store.errors import CorruptBlock, InvalidBlock, NoRoom

HINT_KEY: Final = "hint"  # in the metadata: what may be done about the error


class ClientTooSlow(Exception):
    """It sent or read nothing for too long."""


# The first that fits; what none fits is a bug, and INTERNAL.
STATUS_OF_ERROR: Final[tuple[tuple[type[Exception], grpc.StatusCode], ...]] = (
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
    (DecodeError, grpc.StatusCode.INVALID_ARGUMENT),
    (UsageError, grpc.StatusCode.INVALID_ARGUMENT),
    (InvalidBlock, grpc.StatusCode.INVALID_ARGUMENT),
    (NoRoom, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (CorruptBlock, grpc.StatusCode.DATA_LOSS),
    (TieringError, grpc.StatusCode.FAILED_PRECONDITION),
    (ClientTooSlow, grpc.StatusCode.DEADLINE_EXCEEDED),
    (OSError, grpc.StatusCode.UNAVAILABLE),
)
ERROR_OF_STATUS: Final[dict[grpc.StatusCode, type[TieringError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: UsageError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: NoRoom,
    grpc.StatusCode.DATA_LOSS: StoreDamaged,
    grpc.StatusCode.FAILED_PRECONDITION: TieringError,
}


def status_of(error: Exception) -> grpc.StatusCode:
    """Returns the status of a call that ends with this error."""
    for kind, code in STATUS_OF_ERROR:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL
