"""A request whose prompt is still computed: how far it is, a client that goes away, a server that
is killed.
"""

from __future__ import annotations

import http.client
import json
import re
import signal
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from tests.engine_llama_server.server import JSON, REQUEST_SECONDS, LlamaServer, request


class Prefill:
    """A context manager. `computed` tokens of the prompt are; None when the answer has begun."""

    def __init__(self, server: LlamaServer, prompt: Sequence[int], **options: Any) -> None:
        self._server = server
        self._prompt = list(prompt)
        self._options = options
        self.computed: int | None = 0

    def __enter__(self) -> Self:
        body = request(self._prompt, 8, stream=True, return_progress=True, **self._options)
        self._connection = http.client.HTTPConnection(
            "127.0.0.1", self._server.port, timeout=REQUEST_SECONDS
        )
        self._connection.request("POST", "/completion", json.dumps(body), JSON)
        self._events = self._read(self._connection.getresponse())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    def _read(self, lines: http.client.HTTPResponse) -> Iterator[int | None]:
        for line in lines:
            if line.startswith(b"data: {"):
                progress = json.loads(line[6:]).get("prompt_progress")
                yield None if progress is None else progress["processed"]

    def reach(self, part: float) -> int:
        """Waits until so much of the prompt is computed; how many tokens are."""
        for computed in self._events:
            self.computed = computed
            assert computed is not None, "the prompt is computed"
            if part * len(self._prompt) <= computed < len(self._prompt):
                return computed
        raise AssertionError(self._server.log.read_text()[-3000:])

    def leave(self) -> int:
        """The client hangs up. When the server has noticed: how many tokens the slot holds."""

        def stopped() -> list[str]:
            log = self._server.log.read_text()
            return re.findall(r"stop processing: n_tokens = (\d+)", log)

        before = len(stopped())
        self._connection.close()
        self._server.wait_for(lambda: len(stopped()) > before)
        return int(stopped()[-1])

    def kill(self) -> int:
        """The server, within the prompt; how many tokens were computed."""
        self._server.kill()
        for computed in self._events:
            assert computed is not None, "the prompt was computed before the kill"
            self.computed = computed
        assert self.computed is not None
        return self.computed

    def terminate(self) -> None:
        """Asks the server to end. When its main loop has, what it stores is stored."""
        assert self._server.process is not None
        log = self._server.log
        self._server.process.send_signal(signal.SIGTERM)
        self._server.wait_for(lambda: "cleaning up before exit" in log.read_text())
