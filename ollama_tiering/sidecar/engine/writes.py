"""What one connection stores: which blocks and states are missing, files for them, their commit.

The engine fills segments only. Header and key are written here, from what was planned: an engine
cannot name a block otherwise than its tokens do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ollama_tiering.protocol.engine.messages import Commit, Committed, Outcome, Plan, Planned
from ollama_tiering.protocol.engine.messages import Reserved as ReservedFile
from ollama_tiering.sidecar.engine.heads import Heads, head_of
from ollama_tiering.sidecar.engine.identity import BLOCK_TOKENS, Identity
from ollama_tiering.sidecar.engine.lookups import LookUps
from ollama_tiering.sidecar.engine.states import plan_state
from ollama_tiering.store import (
    PIECE_BLOCKS,
    TOKEN_BYTES,
    BlockExtra,
    BlockKey,
    BlockPlan,
    Claim,
    TieredStore,
    WriteSession,
    plan_block,
)
from ollama_tiering.store import Outcome as Answer
from ollama_tiering.store.errors import InvalidBlock
from ollama_tiering.system.files import write_all

MAX_FILES: Final = 256  # in one answer
MAX_STATES: Final = 64  # in one plan
_BATCH_BYTES: Final = 256 << 20  # reserved at a time
_FLAGS: Final = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class _Part:
    """A block or a state that may be stored."""

    plan: BlockPlan
    parent: bytes
    first_position: int  # of a state: its n_tokens
    rows: int  # of a state 0
    state_bytes: int = 0

    @property
    def claim(self) -> Claim:
        return Claim(
            self.plan.key, self.parent, self.plan.file_bytes, self.plan.rows < BLOCK_TOKENS
        )


class Writes:
    """Used by one thread at a time. `close` gives back what was reserved and not committed."""

    def __init__(
        self, store: TieredStore, heads: Heads, identity: Identity, look_ups: LookUps
    ) -> None:
        self._store = store
        self._heads = heads
        self._identity = identity
        self._look_ups = look_ups
        self._session: WriteSession | None = None
        self._reserved: dict[int, tuple[_Part, Path]] = {}

    def plan(self, request: Plan) -> Planned:
        """InvalidBlock for what makes no sense, OSError."""
        if len(request.states) > MAX_STATES:
            raise InvalidBlock(f"{len(request.states)} states are more than {MAX_STATES}")
        parts = self._missing(request)
        most = min(request.most_files or MAX_FILES, MAX_FILES)
        batch, size = 0, 0
        while batch < min(len(parts), most) and (not batch or size < _BATCH_BYTES):
            size += parts[batch].plan.file_bytes
            batch += 1
        outcome = Outcome.MORE if batch < len(parts) else Outcome.ALL
        if not batch:
            return Planned(outcome, "")
        answers = self._opened().reserve([part.claim for part in parts[:batch]])
        files: list[ReservedFile] = []
        reason = ""
        for part, answer in zip(parts, answers, strict=False):
            if answer.outcome is Answer.PRESENT:
                continue
            if answer.outcome is not Answer.RESERVED or answer.path is None:
                full = answer.outcome is Answer.NO_ROOM
                outcome = Outcome.NO_ROOM if full else Outcome.REFUSED
                reason = answer.reason
                break
            self._reserved[answer.reservation_id] = part, answer.path
            files.append(
                ReservedFile(
                    reservation_id=answer.reservation_id,
                    path=str(answer.path),
                    file_bytes=part.plan.file_bytes,
                    payload_offset=part.plan.payload_offset,
                    first_position=part.first_position,
                    rows=part.rows,
                )
            )
        return Planned(outcome, reason, tuple(files))

    def commit(self, request: Commit) -> Committed:
        """InvalidBlock, OSError. What was not reserved, or is over, has a reason."""
        session = self._opened()
        reasons: list[str] = []
        ready: list[tuple[int, int]] = []  # place in the answer, reservation
        for place, filled in enumerate(request.files):
            reserved = self._reserved.get(filled.reservation_id)
            if reserved is None:
                reasons.append("no such reservation")
                continue
            part, path = reserved
            if len(filled.crcs) != len(part.plan.spans):
                raise InvalidBlock(f"{len(filled.crcs)} checksums are not one for each segment")
            reasons.append(_seal(path, part.plan.head(filled.crcs)))
            if not reasons[-1]:
                ready.append((place, filled.reservation_id))
        results = session.commit([reservation_id for _, reservation_id in ready])
        for (place, reservation_id), result in zip(ready, results, strict=True):
            part, _ = self._reserved.pop(reservation_id)
            if result.stored:
                crcs = list(request.files[place].crcs)
                head = head_of(part.plan.payload_offset, part.plan.rows, part.state_bytes, crcs)
                self._heads.put(part.plan.key, head)
            else:
                reasons[place] = result.reason or "not stored"
        return Committed(tuple(reasons))

    def close(self) -> None:
        self._reserved.clear()
        if self._session is not None:
            self._store.close_session(self._session)
            self._session = None

    def _opened(self) -> WriteSession:
        """One for the whole of the connection, from the first file on."""
        if self._session is None:
            identity = self._identity
            self._session = self._store.open_session(
                identity.namespace, identity.fields, BLOCK_TOKENS
            )
        return self._session

    def _missing(self, request: Plan) -> list[_Part]:
        """What of the tokens, and of the states, is not stored: a chain's blocks in their order."""
        tokens = request.tokens
        step = BLOCK_TOKENS * TOKEN_BYTES
        keys = self._look_ups.chain(tokens, request.extras)
        stored = self._stored(keys, tokens)
        parts = []
        parent: bytes = keys[stored - 1] if stored else self._identity.namespace
        for index in range(stored, -(-len(tokens) // step)):
            inside = tokens[index * step : (index + 1) * step]
            first = index * BLOCK_TOKENS
            rows = len(inside) // TOKEN_BYTES
            plan = plan_block(
                namespace=self._identity.namespace,
                parent=parent,
                tokens=inside,
                first_position=first,
                shapes=self._identity.shapes,
                extras=[
                    BlockExtra(extra.position - first, extra.digest)
                    for extra in request.extras
                    if first <= extra.position < first + rows
                ],
            )
            parts.append(_Part(plan, parent, first, rows))
            parent = plan.key
        all_keys = [*keys[:stored], *(part.plan.key for part in parts)]
        for offer in request.states:
            state, on = plan_state(self._identity, tokens, offer, all_keys)
            parts.append(_Part(state, on, offer.n_tokens, 0, offer.state_bytes))
        return parts

    def _stored(self, keys: Sequence[BlockKey], tokens: bytes) -> int:
        """How many of the leading whole blocks are stored. Asking is no use of them: the pieces in
        which a look-up marks them are not taken.
        """
        stored = 0
        pieces = self._store.match_in_pieces(self._identity.namespace, keys, tokens, BLOCK_TOKENS)
        for piece in pieces:
            stored += sum(block.key == keys[stored + at] for at, block in enumerate(piece))
            if len(piece) < PIECE_BLOCKS or stored >= len(keys):
                break
        return stored


def _seal(path: Path, head: bytes) -> str:
    """Writes what comes before the payload; why it could not."""
    try:
        fd = os.open(path, _FLAGS)
        try:
            write_all(fd, 0, head)
        finally:
            os.close(fd)
    except OSError as error:
        return error.strerror or str(error)
    return ""
