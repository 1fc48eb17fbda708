"""What is in the files that an engine has loaded, asked of the sidecar until it knows."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Final

from ollama_tiering.errors import ServiceError
from ollama_tiering.protocol.loaded_file import LoadedFile
from ollama_tiering.store import block_store_pb2 as pb

_PAUSE_SECONDS: Final = 0.05


def loaded_digests(
    stub: Any, files: Sequence[LoadedFile], patience_seconds: float, timeout_seconds: float
) -> tuple[bytes, ...]:
    """Empty if it takes longer. ServiceError for files that are refused; grpc.RpcError."""
    request = pb.CheckFilesRequest(files=map(_message, files))
    until = time.monotonic() + patience_seconds
    while True:
        answer = stub.CheckFiles(request, timeout=timeout_seconds)
        if answer.state == pb.CheckFilesResponse.STATE_SOUND:
            return tuple(answer.sha256)
        if answer.state != pb.CheckFilesResponse.STATE_PENDING:
            raise ServiceError(answer.reason, hint="load the model again")
        if time.monotonic() >= until:
            return ()
        time.sleep(_PAUSE_SECONDS)


def _message(file: LoadedFile) -> pb.LoadedFile:
    one = file.identity
    return pb.LoadedFile(
        path=os.fsencode(file.path),
        device=one.device,
        inode=one.inode,
        size_bytes=one.size_bytes,
        mtime_ns=one.mtime_ns,
        ctime_ns=one.ctime_ns,
    )
