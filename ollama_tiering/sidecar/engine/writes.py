"""What one connection stores: which blocks and states are missing, files for them, their commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from ollama_tiering.protocol.engine.messages import (
    Commit,
    Committed,
    EngineOutcome,
    FileKind,
    Plan,
    Planned,
)
from ollama_tiering.protocol.engine.messages import EngineReserved as ReservedFile
from ollama_tiering.sidecar.engine.account import EngineAccount
from ollama_tiering.sidecar.engine.heads import Head, Heads
from ollama_tiering.sidecar.engine.identity import BLOCK_TOKENS, Identity
from ollama_tiering.sidecar.engine.recheck import Recheck
from ollama_tiering.sidecar.engine.states import plan_state, plan_window
from ollama_tiering.sidecar.engine.turns import PIECE_PLANS, Turns
from ollama_tiering.sidecar.policy.chains import Chains
from ollama_tiering.sidecar.policy.filling import FileFilling, PlannedFile
from ollama_tiering.store import (
    PIECE_BLOCKS,
    TOKEN_BYTES,
    BlockExtra,
    BlockKey,
    TieredStore,
    WriteSession,
    extras_of,
    plan_block,
)
from ollama_tiering.store import Outcome as Answer
from ollama_tiering.store.errors import InvalidBlock

STEP_BYTES: Final = BLOCK_TOKENS * TOKEN_BYTES
MAX_FILES: Final = 256  # in one answer
BATCH_BYTES: Final = 256 << 20  # reserved in one answer, but at least one file


@dataclass(frozen=True, slots=True)
class _Part(PlannedFile):
    """A block or a state that may be stored."""

    first_position: int  # of a state: its n_tokens
    rows: int  # of a state 0
    state_bytes: int = 0
    kind: FileKind = FileKind.ROWS


class Writes:
    """Used by one thread at a time. `close` gives back what was reserved and not committed."""

    def __init__(
        self,
        store: TieredStore,
        heads: Heads,
        identity: Identity,
        account: EngineAccount,
        turns: Turns,
        recheck: Recheck | None = None,
        condemned: Callable[[bytes], bool] = lambda _: False,
    ) -> None:
        self._store = store
        self._turns = turns
        self._heads = heads
        self._identity = identity
        self._account = account
        self._recheck = recheck
        self._condemned = condemned  # whether a block of this key is never to be stored again
        self._chains = Chains(identity.namespace, BLOCK_TOKENS)
        self._session: WriteSession | None = None
        self._filling: FileFilling[_Part] = FileFilling(
            self._opened, BLOCK_TOKENS, store.reserve_seconds
        )

    def plan(self, request: Plan) -> Planned:
        """InvalidBlock for what makes no sense, OSError."""
        most = min(request.most_files or MAX_FILES, MAX_FILES)
        if len(request.fingerprints) > -(-len(request.tokens) // STEP_BYTES):
            raise InvalidBlock("more fingerprints than blocks")
        self._filling.forget_expired()
        if self._recheck is not None and not request.extras:
            self._recheck.look(request.tokens, request.fingerprints)
        batch, rest = _batch(self._missing(request), most)
        end = EngineOutcome.ALL if self._all_said(request) else EngineOutcome.FINGERPRINTS
        refusal = "" if batch else self._store.refusal(self._identity.namespace)
        if end is EngineOutcome.FINGERPRINTS and refusal:
            return Planned(EngineOutcome.REFUSED, refusal)  # before its rows are read in vain
        while batch:
            planned = self._reserve(batch, EngineOutcome.MORE if rest is not None else end)
            if planned.files or rest is None or planned.outcome is not EngineOutcome.MORE:
                return planned
            # Others are writing all of these: the engine would ask for the same again and again.
            batch, rest = _batch(rest, most)
        return Planned(end, "")

    def _reserve(self, parts: Sequence[_Part], outcome: EngineOutcome) -> Planned:
        files: list[ReservedFile] = []
        for part, answer in zip(parts, self._filling.reserve(parts), strict=True):
            if answer.outcome is Answer.PRESENT:
                continue
            if answer.outcome is not Answer.RESERVED or answer.path is None:
                full = answer.outcome is Answer.NO_ROOM
                outcome = EngineOutcome.NO_ROOM if full else EngineOutcome.REFUSED
                return Planned(outcome, answer.reason, tuple(files))
            files.append(
                ReservedFile(
                    reservation_id=answer.reservation_id,
                    path=str(answer.path),
                    file_bytes=part.plan.file_bytes,
                    payload_offset=part.plan.payload_offset,
                    first_position=part.first_position,
                    rows=part.rows,
                    kind=part.kind,
                )
            )
        return Planned(outcome, "", tuple(files))

    def commit(self, request: Commit) -> Committed:
        """InvalidBlock, OSError. What was not reserved, or is over, has a reason."""
        answers = self._filling.commit([(file.reservation_id, file.crcs) for file in request.files])
        stored = 0
        for file, (part, reason) in zip(request.files, answers, strict=True):
            if part is None or reason:
                continue
            stored += 1
            head = Head(part.plan.payload_offset, part.plan.rows, part.state_bytes, file.crcs)
            self._heads.put(part.plan.key, head)
            if self._recheck is not None:
                self._recheck.stored([part.plan.key])
        self._account.stored(stored)
        return Committed(tuple(reason for _, reason in answers))

    def close(self) -> None:
        self._filling.clear()
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

    def _missing(self, request: Plan) -> Iterator[_Part]:
        """What of the tokens and the states is not known to be stored: the blocks of the chain in
        their order, then, once the fingerprints of all blocks are said, windows and states.
        """
        tokens, fingerprints = request.tokens, request.fingerprints
        extras = [BlockExtra(extra.position, extra.digest) for extra in request.extras]
        keys: list[BlockKey] = []
        for piece in self._turns.taken(self._chains.in_pieces(tokens, extras, fingerprints), 1):
            keys += piece
        held, covered = self._held(keys, tokens, covering=not request.extras)
        whole = len(tokens) // STEP_BYTES
        # A longer block has all tokens of the tail, but perhaps other rows: it takes the tail's
        # place, and nothing that was made with the tail's rows hangs on it.
        end = whole if covered else len(keys)
        end = next((at for at, key in enumerate(keys[:end]) if self._condemned(key)), end)
        blocks = self._turns.taken(
            (self._block(keys, index, request, extras) for index in range(len(held), end)),
            PIECE_PLANS,
        )
        if not self._all_said(request):
            return blocks
        states = (
            _Part(
                *(*plan_state(self._identity, tokens, one, keys), b"", one.n_tokens, 0),
                state_bytes=one.state_bytes,
                kind=FileKind.STATE,
            )
            for one in request.states
            if not covered or one.n_tokens <= whole * BLOCK_TOKENS
        )
        windows = (
            self._window(tokens, first, keys)
            for first in request.windows
            if not covered or first < whole * BLOCK_TOKENS
        )
        return chain(blocks, windows, states)

    @staticmethod
    def _all_said(request: Plan) -> bool:
        return len(request.fingerprints) * STEP_BYTES >= len(request.tokens)

    def _window(self, tokens: bytes, first: int, keys: Sequence[BlockKey]) -> _Part:
        plan, parent = plan_window(self._identity, tokens, first, keys)
        rows = min(len(tokens) // TOKEN_BYTES - first, BLOCK_TOKENS)
        size = rows * self._identity.window_row_bytes
        return _Part(plan, parent, b"", first, rows, size, FileKind.WINDOW)

    def _block(
        self,
        keys: Sequence[BlockKey],
        index: int,
        request: Plan,
        extras: Sequence[BlockExtra],
    ) -> _Part:
        parent: bytes = keys[index - 1] if index else self._identity.namespace
        fingerprint = request.fingerprints[index]
        first = index * BLOCK_TOKENS
        plan = plan_block(
            namespace=self._identity.namespace,
            parent=parent,
            tokens=request.tokens[index * STEP_BYTES : (index + 1) * STEP_BYTES],
            first_position=first,
            shapes=self._identity.shapes,
            extras=extras_of(extras, first, BLOCK_TOKENS),
            fingerprint=fingerprint,
        )
        return _Part(plan, parent, fingerprint, first, plan.rows)

    def _held(
        self, keys: Sequence[BlockKey], tokens: bytes, *, covering: bool
    ) -> tuple[list[BlockKey], bool]:
        """The leading blocks that are stored; whether a longer one than the tail has all of its
        tokens. Asking is no use of them: the pieces in which a look-up marks them are not taken.
        """
        held: list[BlockKey] = []
        whole, rest = divmod(len(tokens) // TOKEN_BYTES, BLOCK_TOKENS)
        pieces = self._store.match_in_pieces(self._identity.namespace, keys, tokens, BLOCK_TOKENS)
        for piece in self._turns.taken(pieces, 1):
            for block in piece:
                at = len(held)
                if at >= len(keys) or block.key != keys[at]:
                    return held, covering and at == whole and 0 < rest == block.rows
                held.append(block.key)
            if len(piece) < PIECE_BLOCKS or len(held) >= len(keys):
                break
        return held, False


def _batch(parts: Iterator[_Part], most: int) -> tuple[list[_Part], Iterator[_Part] | None]:
    """The first of the parts, and the others; None when there are none."""
    batch: list[_Part] = []
    size = 0
    for part in parts:
        size += part.plan.file_bytes
        if len(batch) >= most or (batch and size > BATCH_BYTES):
            return batch, chain((part,), parts)
        batch.append(part)
    return batch, None
