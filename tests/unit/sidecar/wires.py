"""One prompt after the other through a sidecar, as each family of engines asks for it: over gRPC as
the Go engine does, and over the engine socket as llama-server does. Both say afterwards what became
of it. An engine's prefill makes 100 tokens a second.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from measure.store import samples
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.loaded_file import LoadedFile
from ollama_tiering.store.block.key import tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.contract.fake_engine import FakeEngine, hello
from tests.sidecar import PutStream, SidecarProcess

RATE = 100.0
_numbers = itertools.count(1)


class Wire(Protocol):
    def store(self, tokens: Sequence[int]) -> None: ...

    def ask(
        self, tokens: Sequence[int], *, memory: int = 0, reason: int = 0, unread: int = 0
    ) -> int:
        """How many tokens were found. `memory`: so many the slot has; `reason`: why no more were
        restored, if it is not what the look-up found; `unread`: so many that were found could not
        be read.
        """
        ...

    def close(self) -> None: ...


class GoWire:
    """`other`: with other settings."""

    def __init__(self, daemon: SidecarProcess, model: Path, *, other: bool = False) -> None:
        self._channel = daemon.channel()
        self._stub: Any = rpc.BlockStoreStub(self._channel)
        self.ns = samples.namespace(model.name, layers=1 + other, block_tokens=64)
        self._runner = pb.RunnerReport(
            pid=os.getpid(),
            engine="sample/1",
            model=model.name,
            tiered=True,
            namespace=self.ns.digest(),
            started_unix_seconds=next(_numbers),
            prefill_tokens_per_second=RATE,
        )

    def store(self, tokens: Sequence[int]) -> None:
        stream = PutStream(self._stub, self.ns)
        assert all(one.stored for one in stream.put(samples.sequence(self.ns, tokens)))
        stream.close()

    def ask(
        self, tokens: Sequence[int], *, memory: int = 0, reason: int = 0, unread: int = 0
    ) -> int:
        most = len(tokens) - 1
        request = pb.LookUpRequest(
            namespace=self.ns.digest(),
            tokens=tokens_to_bytes(tokens),
            block_tokens=64,
            most_rows=most,
            memory_rows=memory,
            min_tokens=1,
        )
        first, *more = self._stub.LookUp(request, timeout=10)
        for lease_id in {answer.lease_id for answer in (first, *more) if answer.lease_id}:
            self._stub.Release(pb.ReleaseRequest(lease_id=lease_id))
        found = int(first.plan.end_row)
        restored = max(0, found - memory - unread)
        self._report(len(tokens), memory, restored, reason or first.plan.reason)
        return found

    def _report(self, prompt: int, memory: int, restored: int, reason: int) -> None:
        runner = self._runner
        runner.requests += 1
        runner.prompt_tokens += prompt
        runner.memory_tokens += memory
        runner.restored_tokens += restored
        runner.recomputed_tokens += prompt - memory - restored
        runner.last_request.CopyFrom(
            pb.LastRequest(
                prompt_tokens=prompt,
                memory_tokens=memory,
                restored_tokens=restored,
                shortfall=reason,  # type: ignore[arg-type]
            )
        )
        self._stub.ReportRunner(runner, timeout=10)

    def close(self) -> None:
        self._channel.close()


class SocketWire:
    """`other`: with other settings."""

    def __init__(self, daemon: SidecarProcess, model: Path, *, other: bool = False) -> None:
        fields = {"model": model.name, "batch": "1024" if other else "512"}
        said = hello(fields=fields, layers=1, min_tokens=1, files=(LoadedFile.of(model),))
        self.engine = FakeEngine(daemon.socket, said)

    def store(self, tokens: Sequence[int]) -> None:
        assert self.engine.store(tokens)[1] == []

    def ask(
        self, tokens: Sequence[int], *, memory: int = 0, reason: int = 0, unread: int = 0
    ) -> int:
        mine = self.engine.fingerprints(tokens)[: memory // 64]
        found = self.engine.look_up(tokens, have=memory, fingerprints=mine)
        self.engine.client.release(found.lease_id)
        restored = max(0, min(found.rows, len(tokens) - 1) - memory - unread)
        computed = len(tokens) - memory - restored
        self.engine.client.finished(
            m.EngineFinished(
                prompt_tokens=len(tokens),
                memory_tokens=memory,
                restored_tokens=restored,
                reason=reason or found.reason,
                at=found.at,
                beside_tokens=0,
                failures=0,
                restored_bytes=0,
                prefill_seconds=computed / RATE,
                lookup_seconds=0.0,
                fetch_seconds=0.0,
                copy_seconds=0.0,
            )
        )
        return found.rows

    def close(self) -> None:
        self.engine.client.close()
