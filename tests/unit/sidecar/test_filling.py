"""Files that an engine fills: what is committed, and what is answered where it is not."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from ollama_tiering.sidecar.policy.filling import FileFilling, PlannedFile
from ollama_tiering.store import (
    CommitResult,
    Outcome,
    Reserved,
    SegmentShape,
    WriteSession,
    as_namespace,
    buffer_reader,
    plan_block,
    read_meta,
    rows_fingerprint,
    tokens_to_bytes,
)
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store.errors import InvalidBlock

NAMESPACE = as_namespace(b"n" * 32)
CRCS = struct.pack("<2I", 7, 8)


class FakeSession:
    """Reserves whatever is offered, but `present`; commits what is not `refused`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.present: set[int] = set()  # by the place in the offers
        self.refused: dict[int, str] = {}
        self.committed: list[int] = []
        self.offers: list[Any] = []

    def reserve(self, offers: Sequence[Any]) -> list[Reserved]:
        self.offers += offers
        answers = []
        for place, offer in enumerate(offers):
            if place in self.present:
                answers.append(Reserved(Outcome.PRESENT))
                continue
            path = self.folder / f"{len(self.offers)}-{place}.tmp"
            path.write_bytes(bytes(offer.file_bytes))
            answers.append(Reserved(Outcome.RESERVED, 100 + place, path))
        return answers

    def commit(self, ids: Sequence[int]) -> list[CommitResult]:
        self.committed += ids
        return [CommitResult(one not in self.refused, self.refused.get(one, "")) for one in ids]


def planned(rows: int = 64, fingerprint: bytes = b"") -> PlannedFile:
    kinds = (pb.SEGMENT_KIND_K, pb.SEGMENT_KIND_V)
    plan = plan_block(
        namespace=NAMESPACE,
        parent=NAMESPACE,
        tokens=tokens_to_bytes(list(range(rows))),
        first_position=0,
        shapes=[SegmentShape(0, 0, kind, "f16", 16) for kind in kinds],
        fingerprint=fingerprint,
    )
    return PlannedFile(plan, NAMESPACE, fingerprint)


@pytest.fixture
def session(tmp_path: Path) -> FakeSession:
    return FakeSession(tmp_path)


def filling(session: FakeSession, seconds: float = 60.0) -> FileFilling[PlannedFile]:
    return FileFilling(lambda: cast(WriteSession, session), 64, seconds)


def test_the_header_is_written_before_a_file_is_committed(session: FakeSession) -> None:
    maker, file = filling(session), planned()
    (answer,) = maker.reserve([file])
    assert answer.path is not None
    assert maker.commit([(100, CRCS)]) == [(file, "")]
    data = answer.path.read_bytes()
    meta = read_meta(buffer_reader(data), len(data))
    assert (meta.key, [s.crc32c for s in meta.segments]) == (file.plan.key, [7, 8])
    assert session.committed == [100]


def test_a_block_that_is_not_full_is_offered_as_a_tail(session: FakeSession) -> None:
    filling(session).reserve([planned(), planned(63)])
    assert [offer.tail for offer in session.offers] == [False, True]


def test_what_is_committed_twice_or_was_never_reserved_has_a_reason(session: FakeSession) -> None:
    maker, file = filling(session), planned()
    maker.reserve([file])
    assert maker.commit([(100, CRCS), (100, CRCS), (7, CRCS)]) == [
        (file, ""),
        (None, "no such reservation"),
        (None, "no such reservation"),
    ]
    assert session.committed == [100]


def test_what_the_store_does_not_take_has_its_reason(session: FakeSession) -> None:
    maker, files = filling(session), [planned(), planned(), planned()]
    session.refused = {101: "the block before it is not stored", 102: ""}
    maker.reserve(files)
    reasons = [reason for _, reason in maker.commit([(100 + n, CRCS) for n in range(3)])]
    assert reasons == ["", "the block before it is not stored", "not stored"]


def test_a_present_block_is_not_to_be_filled(session: FakeSession) -> None:
    maker = filling(session)
    session.present = {0}
    first, _ = maker.reserve([planned(), planned()])
    assert first.outcome is Outcome.PRESENT
    assert [reason for _, reason in maker.commit([(0, CRCS), (101, CRCS)])] == [
        "no such reservation",
        "",
    ]


def test_a_reservation_that_is_over_is_forgotten(session: FakeSession) -> None:
    maker = filling(session, seconds=0.0)
    maker.reserve([planned()])
    maker.forget_expired()
    assert maker.commit([(100, CRCS)]) == [(None, "no such reservation")]
    lasting = filling(session)
    lasting.reserve([planned()])
    lasting.forget_expired()
    assert lasting.commit([(100, CRCS)])[0][1] == ""


def test_rows_that_are_not_the_planned_ones_are_not_committed(session: FakeSession) -> None:
    maker = filling(session)
    maker.reserve([planned(fingerprint=rows_fingerprint(struct.pack("<2I", 7, 9)))])
    assert [reason for _, reason in maker.commit([(100, CRCS)])] == ["other rows than were planned"]
    assert session.committed == []


@pytest.mark.parametrize("crcs", [b"", CRCS[:4], CRCS + b"\0\0\0\0", CRCS[:7]])
def test_checksums_of_other_segments_are_refused(session: FakeSession, crcs: bytes) -> None:
    maker = filling(session)
    maker.reserve([planned()])
    with pytest.raises(InvalidBlock, match="one checksum for each segment"):
        maker.commit([(100, crcs)])


def test_a_file_that_is_gone_or_a_link_has_a_reason(session: FakeSession, tmp_path: Path) -> None:
    maker = filling(session)
    first, second = maker.reserve([planned(), planned()])
    assert first.path is not None
    assert second.path is not None
    first.path.unlink()
    second.path.unlink()
    (tmp_path / "other").write_bytes(b"mine")
    second.path.symlink_to(tmp_path / "other")
    reasons = [reason for _, reason in maker.commit([(100, CRCS), (101, CRCS)])]
    assert all(reasons)
    assert (session.committed, (tmp_path / "other").read_bytes()) == ([], b"mine")
