"""One stream of Put: blocks whose names the client makes itself, or those of a text."""

from __future__ import annotations

import os
from typing import Final

from ollama_tiering.protocol.limits import PART_BYTES
from ollama_tiering.protocol.plain_text import printable
from ollama_tiering.sidecar.look_up import check_count
from ollama_tiering.sidecar.policy.chains import Chains
from ollama_tiering.sidecar.policy.filling import FileFilling, PlannedFile
from ollama_tiering.sidecar.policy.text_blocks import Text, TextBlocks, TextRows
from ollama_tiering.store import (
    TOKEN_BYTES,
    BlockExtra,
    BlockOffer,
    CommitResult,
    Outcome,
    Reserved,
    SegmentShape,
    TieredStore,
    as_key,
    as_namespace,
)
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store.errors import InvalidBlock

_OUTCOMES: Final = {
    Outcome.RESERVED: pb.Reservation.OUTCOME_RESERVED,
    Outcome.PRESENT: pb.Reservation.OUTCOME_PRESENT,
    Outcome.NO_ROOM: pb.Reservation.OUTCOME_NO_ROOM,
    Outcome.REFUSED: pb.Reservation.OUTCOME_REFUSED,
}


class PutStream:
    """Used by one thread at a time. `close` gives back what was reserved and not committed."""

    def __init__(self, store: TieredStore, opened: pb.PutOpen) -> None:
        """ValueError, InvalidBlock."""
        namespace, block_tokens = as_namespace(opened.namespace), opened.block_tokens
        check_count(len(opened.segments), "segments")
        check_count(len(opened.window_children), "windows")
        fields = [(field.name, field.value) for field in opened.description.fields]
        self._store = store
        self._session = store.open_session(namespace, fields, block_tokens)
        shapes = [
            SegmentShape(one.child, one.layer, one.kind, one.dtype, one.row_bytes)
            for one in opened.segments
        ]
        chains = Chains(namespace, block_tokens)
        self._texts = TextBlocks(chains, shapes, opened.window_children)
        self._filling: FileFilling[PlannedFile] = FileFilling(
            lambda: self._session, block_tokens, store.reserve_seconds
        )

    def answer(self, request: pb.PutRequest) -> pb.PutResponse | None:
        """ValueError, InvalidBlock, NoRoom, OSError. None to a part that is not the last."""
        if request.HasField("reserve"):
            return pb.PutResponse(
                reserved=pb.PutReserved(reservations=self._reserve(request.reserve))
            )
        if request.HasField("commit"):
            return pb.PutResponse(committed=pb.PutCommitted(results=self._commit(request.commit)))
        inline = request.inline
        if len(inline.part) > PART_BYTES:
            raise InvalidBlock(f"a part has {len(inline.part)} bytes, at most {PART_BYTES} may be")
        result = self._session.put_inline(as_key(inline.key), inline.part, last=inline.last)
        if result is None:
            return None
        return pb.PutResponse(committed=pb.PutCommitted(results=[_committed(result)]))

    def close(self) -> None:
        self._filling.clear()
        self._store.close_session(self._session)

    def _reserve(self, asked: pb.PutReserve) -> list[pb.Reservation]:
        if not asked.HasField("text"):
            check_count(len(asked.offers), "offers")
            offers = [_offer(offer) for offer in asked.offers]
            return [_reservation(answer) for answer in self._session.reserve(offers)]
        if asked.offers:
            raise InvalidBlock("offers and a text in one message")
        text, wanted = _text(asked.text)
        self._filling.forget_expired()
        files = list(self._texts.planned(text, wanted))
        answers = self._filling.reserve(files)
        return [_reservation(answer, file) for file, answer in zip(files, answers, strict=True)]

    def _commit(self, asked: pb.PutCommit) -> list[pb.Committed]:
        ids = asked.reservation_ids
        check_count(len(ids), "reservations")
        if not asked.crcs:
            return [_committed(result) for result in self._session.commit(ids)]
        if len(asked.crcs) != len(ids):
            raise InvalidBlock("there are not checksums for each reservation")
        answers = self._filling.commit(list(zip(ids, asked.crcs, strict=True)))
        return [_committed(CommitResult(not reason, reason)) for _, reason in answers]


def _text(asked: pb.PutText) -> tuple[Text, list[TextRows]]:
    if len(asked.tokens) % TOKEN_BYTES:
        raise InvalidBlock(f"{len(asked.tokens)} bytes of tokens")
    for count, name in (
        (len(asked.blocks), "blocks"),
        (len(asked.extras), "extras"),
        (len(asked.fingerprints), "fingerprints"),
    ):
        check_count(count, name)
    extras = [BlockExtra(extra.row, extra.digest) for extra in asked.extras]
    wanted = [
        TextRows(rows.first_row, rows.rows, rows.child, tuple(rows.cells), rows.ends_window)
        for rows in asked.blocks
    ]
    return Text(asked.tokens, extras, list(asked.fingerprints)), wanted


def _offer(offer: pb.BlockOffer) -> BlockOffer:
    return BlockOffer(as_key(offer.key), bytes(as_key(offer.parent)), offer.file_bytes, offer.tail)


def _reservation(reserved: Reserved, file: PlannedFile | None = None) -> pb.Reservation:
    return pb.Reservation(
        outcome=_OUTCOMES[reserved.outcome],
        id=reserved.reservation_id,
        path=os.fsencode(reserved.path or ""),
        reason=printable(reserved.reason),
        payload_offset=file.plan.payload_offset if file else 0,
        file_bytes=file.plan.file_bytes if file else 0,
    )


def _committed(result: CommitResult) -> pb.Committed:
    return pb.Committed(stored=result.stored, reason=printable(result.reason))
