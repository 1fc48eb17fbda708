"""One connection of an engine: hello, then requests and answers, until either side hangs up.

However it ends, what it has leased and reserved is given back. What makes no sense is answered with
FAILED and the connection is closed: the bytes of a stranger are never fatal, nor is its silence.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from typing import TYPE_CHECKING, Final

from ollama_tiering.errors import TieringError
from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.engine.messages import EngineFailure, Kind
from ollama_tiering.protocol.engine.wire import (
    HEAD,
    MAX_BODY_BYTES,
    MAX_HELLO_BYTES,
    VERSION,
    Malformed,
    frame,
    frame_head,
)
from ollama_tiering.sidecar.content.contents import Contents
from ollama_tiering.sidecar.content.verdict import FilesVerdict
from ollama_tiering.sidecar.engine.account import EngineAccount, EngineAccounts
from ollama_tiering.sidecar.engine.adoption import Adoptions
from ollama_tiering.sidecar.engine.adoption_record import AdoptionRecord
from ollama_tiering.sidecar.engine.heads import Heads
from ollama_tiering.sidecar.engine.identity import (
    BLOCK_TOKENS,
    Identity,
    caches,
    checked_fields,
    identity_of,
)
from ollama_tiering.sidecar.engine.lookups import EngineLookUps
from ollama_tiering.sidecar.engine.proof import GATED, Proof, unproven
from ollama_tiering.sidecar.engine.recheck import recheck_of
from ollama_tiering.sidecar.engine.turns import Turns
from ollama_tiering.sidecar.engine.writes import Writes
from ollama_tiering.sidecar.rechecks import Rechecks
from ollama_tiering.store import TieredStore
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store.errors import CorruptBlock, InvalidBlock, NoRoom
from ollama_tiering.system.quiet_log import QuietLog

if TYPE_CHECKING:  # `tiering up` imports this, and serves where the metrics' package is broken
    from ollama_tiering.sidecar.look_up_times import LookUpTimes

log = logging.getLogger(__name__)
seldom = QuietLog(log)

FRAME_SECONDS: Final = 10.0  # from a frame's first byte to its last, and to take an answer
_RECEIVE_BYTES: Final = 256 << 10
_CODES: Final = (
    (Malformed, EngineFailure.MALFORMED),
    (NoRoom, EngineFailure.NO_ROOM),
    (InvalidBlock, EngineFailure.REFUSED),
    (CorruptBlock, EngineFailure.UNAVAILABLE),
    (ValueError, EngineFailure.REFUSED),
    (OSError, EngineFailure.UNAVAILABLE),
)
_GO_ON: Final = (EngineFailure.NO_ROOM, EngineFailure.UNAVAILABLE)


class HungUp(Exception):
    """The engine has gone, or keeps the sidecar waiting in the middle of a message."""


class Engines:
    """What the connections share."""

    def __init__(
        self,
        store: TieredStore,
        accounts: EngineAccounts,
        contents: Contents,
        times: LookUpTimes | None = None,
        adoptions: Adoptions | None = None,
        rechecks: Rechecks | None = None,
        *,
        min_tokens: int,
        lease_seconds: float,
    ) -> None:
        self.store = store
        self.adoptions = adoptions or Adoptions(store, AdoptionRecord(), enabled=False)
        self.rechecks = rechecks or Rechecks()
        self.accounts = accounts
        self.contents = contents
        self.measured = times.measured if times else contextlib.nullcontext
        self.min_tokens = min_tokens
        self.lease_seconds = lease_seconds
        self.heads = Heads()
        self.turns = Turns()


class Connection:
    """`run` takes the thread that calls it. `client` is closed by the caller."""

    def __init__(
        self,
        client: socket.socket,
        pid: int,
        engines: Engines,
        frame_seconds: float = FRAME_SECONDS,
    ) -> None:
        self._client = client
        self._pid = pid
        self._engines = engines
        self._frame_seconds = frame_seconds
        self._hello: m.Hello | None = None
        self._proof: Proof | None = None
        self._refused = ""  # why, as it was last said
        self._look_ups: EngineLookUps | None = None
        self._writes: Writes | None = None
        self._account: EngineAccount | None = None
        self._deadline: float | None = None  # of the frame that is received

    def run(self) -> None:
        try:
            while self._turn():
                pass
        except (HungUp, OSError):
            pass
        finally:
            self._close()

    def _turn(self) -> bool:
        """One request and its answer; whether there may be another."""
        failure: m.Failed | None = None
        try:
            kind, body = self._receive()
            answer, reply = self._answer(kind, body)
        except HungUp:
            raise
        except Exception as error:
            failure = _failure(error)
            answer, reply = Kind.FAILED, failure.pack()
        self._client.settimeout(self._frame_seconds)
        self._client.sendall(frame(answer, reply))
        return failure is None or failure.code in _GO_ON

    def _receive(self) -> tuple[int, bytes]:
        """HungUp, Malformed."""
        self._deadline = None  # an engine may be silent between two requests
        first = self._some(HEAD.size)
        self._deadline = time.monotonic() + self._frame_seconds
        head = first + self._take(HEAD.size - len(first))
        most = MAX_BODY_BYTES if self._proof is not None else MAX_HELLO_BYTES
        body_bytes, kind = frame_head(head, most)
        return kind, self._take(body_bytes)

    def _take(self, count: int) -> bytes:
        """Memory grows with what has come, not with what was announced."""
        parts = []
        while count:
            parts.append(self._some(min(count, _RECEIVE_BYTES)))
            count -= len(parts[-1])
        return b"".join(parts)

    def _some(self, most: int) -> bytes:
        seconds = None if self._deadline is None else self._deadline - time.monotonic()
        if seconds is not None and seconds <= 0:
            raise HungUp
        try:
            self._client.settimeout(seconds)
            part = self._client.recv(most)
        except OSError:
            raise HungUp from None
        if not part:
            raise HungUp
        return part

    def _answer(self, kind: int, body: bytes) -> tuple[Kind, bytes]:
        if self._proof is None:
            if kind != Kind.HELLO:
                raise InvalidBlock("a connection begins with a hello")
            if body == m.QUESTION:
                return Kind.DONE, b""
            return self._greet(m.Hello.unpack(body))
        if kind in GATED:
            found = self._proof.look(kind)
            self._know(found)
            if not found.digests:
                if kind == Kind.COMMIT and self._writes is not None:
                    self._writes.close()  # gives back what was reserved for it
                if kind == Kind.FINISHED and found.pending:
                    self._hold(m.EngineFinished.unpack(body))
                return unproven(kind, body, found)
        if self._look_ups is None or self._writes is None or self._account is None:
            if kind == Kind.RELEASE:
                return Kind.DONE, b""
            raise InvalidBlock("nothing was named yet")
        if kind == Kind.MATCH:
            with self._engines.measured(), self._engines.turns.look_up():
                return Kind.MATCHED, self._look_ups.match(m.EngineMatch.unpack(body)).pack()
        if kind == Kind.WAIT:
            return Kind.MATCHED, self._look_ups.wait(m.EngineLease.unpack(body).lease_id).pack()
        if kind == Kind.PLAN:
            return Kind.PLANNED, self._writes.plan(m.Plan.unpack(body)).pack()
        if kind == Kind.COMMIT:
            return Kind.COMMITTED, self._writes.commit(m.Commit.unpack(body)).pack()
        if kind == Kind.RELEASE:
            self._look_ups.release(m.EngineLease.unpack(body).lease_id)
        elif kind == Kind.DAMAGED:
            self._look_ups.damaged(m.Damaged.unpack(body))
        elif kind == Kind.FINISHED:
            self._engines.accounts.report(self._account.finished(m.EngineFinished.unpack(body)))
        else:
            raise Malformed(f"{kind} is no kind of request")
        return Kind.DONE, b""

    def _greet(self, hello: m.Hello) -> tuple[Kind, bytes]:
        if hello.version != VERSION:
            said = f"version {hello.version} is not spoken here, but {VERSION}"
            raise WrongVersion(said)
        engines = self._engines
        if hello.unsupported:
            engines.accounts.report(self._not_tiered(hello, hello.unsupported))
            return Kind.DONE, b""
        identity_of(hello)  # or InvalidBlock
        proof = Proof(engines.contents, hello)
        self._hello, self._proof = hello, proof
        identity = self._know(proof.greet())
        welcome = m.Welcome(
            namespace=identity.namespace if identity else bytes(m.NAMESPACE_BYTES),
            block_tokens=BLOCK_TOKENS,
            min_tokens=hello.min_tokens or engines.min_tokens,
            lease_ms=round(engines.lease_seconds * 1000),
            reserve_ms=round(engines.store.reserve_seconds * 1000),
        )
        return Kind.WELCOME, welcome.pack()

    def _know(self, found: FilesVerdict) -> Identity | None:
        """Takes note of what its files are; once they are sound, the engine has a namespace."""
        hello, proof, engines = self._hello, self._proof, self._engines
        if hello is None or proof is None:
            return None
        if not found.digests:
            self._say(hello, found)
            return None
        identity = None
        if self._look_ups is None:
            own = identity_of(hello, proof.content(found.digests))
            identity = engines.adoptions.of(self._pid, own)
            min_tokens = hello.min_tokens or engines.min_tokens
            store, heads, turns = engines.store, engines.heads, engines.turns
            store.learn_model(identity.namespace, identity.model)
            self._account = engines.accounts.account(self._pid, identity, min_tokens)
            look_ups = EngineLookUps(
                *(store, heads, hello, identity, self._account, min_tokens),
                engines.rechecks.is_condemned,
            )
            self._look_ups = look_ups
            recheck = recheck_of(store, engines.rechecks, engines.adoptions, identity, hello.gate)
            given = (identity, self._account, turns, recheck, engines.rechecks.is_condemned)
            self._writes = Writes(store, heads, *given)
        if self._account is not None and self._refused:
            engines.accounts.report(self._account.report())
        self._refused = ""
        return identity

    def _say(self, hello: m.Hello, found: FilesVerdict) -> None:
        """Once for each reason: in the list of runners, and what stays also in the log."""
        reason = found.refusal or found.pending
        if reason == self._refused:
            return
        self._refused = reason
        self._engines.accounts.report(self._not_tiered(hello, reason))
        if found.refusal:
            said = "model refused, nothing of it is stored or restored: reason=%s"
            seldom.warning(f"model {reason}", said, reason)

    def _hold(self, request: m.EngineFinished) -> None:
        if self._hello is not None:
            fields = checked_fields(self._hello)
            self._engines.accounts.hold(self._pid, fields["engine"], fields["model"], request)

    def _not_tiered(self, hello: m.Hello, reason: str) -> pb.RunnerReport:
        fields = checked_fields(hello)
        return pb.RunnerReport(
            pid=self._pid,
            engine=fields["engine"],
            model=fields["model"],
            reason=reason,
            caches=caches(hello),
        )

    def _close(self) -> None:
        with contextlib.ExitStack() as closing:  # all of it, whatever one of them raises
            for part in (self._look_ups, self._writes):
                if part is not None:
                    closing.callback(part.close)


class WrongVersion(Exception):
    """The engine speaks another version of the protocol."""


def _failure(error: Exception) -> m.Failed:
    """What the engine is told. A fault of the sidecar is logged whole."""
    message = error.message if isinstance(error, TieringError) else str(error)
    message = message[:500].encode(errors="replace").decode()  # it may have a path in it
    if isinstance(error, WrongVersion):
        seldom.warning("version", "engine refused: reason=version message=%s", message)
        return m.Failed(EngineFailure.VERSION, message)
    for kind, code in _CODES:
        if isinstance(error, kind):
            said = "engine refused: reason=%s message=%.200s"
            seldom.warning(f"refused {code}", said, code.name.lower(), message)
            return m.Failed(code, message)
    log.error("request of an engine failed", exc_info=error)
    return m.Failed(EngineFailure.INTERNAL, f"{type(error).__name__}: {message}")
