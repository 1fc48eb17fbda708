"""The administration's errors as statuses of gRPC, and what a client makes of them again."""

from __future__ import annotations

from typing import Final

import grpc

from ollama_tiering.errors import TieringError, UsageError
from ollama_tiering.store.errors import NoRoom

HINT_KEY: Final = "hint"  # in the metadata: what may be done about the error

STATUS_OF_ERROR: Final[tuple[tuple[type[Exception], grpc.StatusCode], ...]] = (
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
    (UsageError, grpc.StatusCode.INVALID_ARGUMENT),
    (NoRoom, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (TieringError, grpc.StatusCode.FAILED_PRECONDITION),
    (OSError, grpc.StatusCode.UNAVAILABLE),
)
ERROR_OF_STATUS: Final[dict[grpc.StatusCode, type[TieringError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: UsageError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: NoRoom,
    grpc.StatusCode.FAILED_PRECONDITION: TieringError,
}
