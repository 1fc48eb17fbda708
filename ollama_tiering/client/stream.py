"""A bidirectional gRPC stream as request and answer, for synchronous clients."""

from __future__ import annotations

import queue
from types import TracebackType
from typing import Any

from ollama_tiering.store import block_store_pb2 as pb


class Exchange:
    """One Put stream. Leaving the `with` block ends it; what was not committed is released."""

    def __init__(self, put: Any, timeout_seconds: float) -> None:
        self._outgoing: queue.SimpleQueue[pb.PutRequest | None] = queue.SimpleQueue()
        self._answers = put(iter(self._outgoing.get, None), timeout=timeout_seconds)

    def send(self, request: pb.PutRequest) -> None:
        self._outgoing.put(request)

    def receive(self) -> pb.PutResponse:
        answer: pb.PutResponse = next(self._answers)
        return answer

    def call(self, request: pb.PutRequest) -> pb.PutResponse:
        self.send(request)
        return self.receive()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._outgoing.put(None)
        if kind is not None:
            self._answers.cancel()
        else:
            for _ in self._answers:  # until the sidecar has closed the session
                pass
