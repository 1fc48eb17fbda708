"""When an engine's new build may read what the build before stored: the rules, and their file."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ollama_tiering.protocol.engine.messages import Hello
from ollama_tiering.sidecar.engine import adoption_record
from ollama_tiering.sidecar.engine.adoption import (
    LEAST_DEPTH_TOKENS,
    LEAST_TOKENS,
    Adoptions,
    gives_one_answer,
)
from ollama_tiering.sidecar.engine.adoption_record import Adoption, AdoptionRecord, BuildVerdict
from ollama_tiering.sidecar.engine.identity import Identity, identity_of
from ollama_tiering.store import NamespaceId
from ollama_tiering.store.block.key import namespace_digest
from ollama_tiering.store.books.tree import BlockRecord, BlockTree
from ollama_tiering.store.tools.builds import Builds, SameRows
from tests.contract.fake_engine import EXACT, hello

ENOUGH = SameRows(64, LEAST_TOKENS, LEAST_DEPTH_TOKENS, differ=False)


def said(**fields: str) -> Hello:
    return hello(fields={**EXACT, **fields})


def identity(**fields: str) -> Identity:
    return identity_of(said(**fields), "sha256")


OLD = identity(engine="llama-server/b1+old")
NEW = identity()


class MadeBuilds(Builds):
    """A store that has blocks of these builds; `rows` is what comparing them finds."""

    def __init__(self, *stored: Identity, rows: SameRows = ENOUGH) -> None:
        tree = BlockTree()
        for number, one in enumerate(stored):  # the first has most blocks
            for block in range(len(stored) - number):
                key: Any = bytes((number, block, *bytes(30)))
                tree.add(BlockRecord(key, one.namespace, one.namespace, bytes(4), 1, 1, 0.0))
        names = [one.namespace for one in stored]
        described = {one.namespace: one.fields for one in stored}
        self._state: Any = SimpleNamespace(
            lock=threading.Lock(),
            tree=tree,
            terms=SimpleNamespace(
                by_model=lambda: {NEW.model: names},
                described=lambda name: described.get(name, ()),
            ),
        )
        self.rows = rows
        self.compared = 0

    def same_rows(self, mine: NamespaceId, other: NamespaceId) -> SameRows:
        self.compared += 1
        return self.rows


def adoptions(
    builds: MadeBuilds, record: AdoptionRecord | None = None, *, enabled: bool = True
) -> Adoptions:
    made = Adoptions(
        SimpleNamespace(state=None),  # type: ignore[arg-type]
        record or AdoptionRecord(),
        enabled=enabled,
        clock=lambda: 5.0,
        started=lambda pid: 5.0 if pid == os.getpid() else pid * 10.0,  # 0: before the sidecar
    )
    made._builds = builds
    return made


def reads(found: Identity) -> set[bytes]:
    return {found.namespace, *found.also}


def test_enough_blocks_with_the_same_rows_let_it_read_the_old_build_s() -> None:
    made = adoptions(MadeBuilds(OLD))
    found = made.of(1, NEW)
    assert found.namespace not in (NEW.namespace, OLD.namespace)  # what it stores can be told
    assert set(found.also) == {NEW.namespace, OLD.namespace}
    assert found.engine == NEW.engine
    assert namespace_digest(found.fields) == found.namespace
    (pair,) = made.record.all()
    assert pair == Adoption(
        *(NEW.namespace, OLD.namespace, found.namespace, NEW.model, NEW.engine, OLD.engine),
        *(64, LEAST_DEPTH_TOKENS, 5.0, BuildVerdict.ADOPTED),
    )


@pytest.mark.parametrize(
    "rows",
    [
        ENOUGH._replace(tokens=LEAST_TOKENS - 1),
        ENOUGH._replace(deepest_tokens=LEAST_DEPTH_TOKENS - 1),
        SameRows(640, 10 * LEAST_TOKENS, 10 * LEAST_DEPTH_TOKENS, differ=True),
    ],
)
def test_too_few_or_one_that_differs_do_not(rows: SameRows) -> None:
    assert adoptions(MadeBuilds(OLD, rows=rows)).of(1, NEW) is NEW


def test_after_a_difference_it_is_never_asked_again(tmp_path: Path) -> None:
    differing = MadeBuilds(OLD, rows=ENOUGH._replace(differ=True))
    adoptions(differing, AdoptionRecord(tmp_path)).of(1, NEW)
    alike = MadeBuilds(OLD)
    assert adoptions(alike, AdoptionRecord(tmp_path)).of(1, NEW) is NEW
    assert not alike.compared
    other = identity(engine="llama-server/b3+next")  # another build is another question
    assert OLD.namespace in reads(adoptions(alike, AdoptionRecord(tmp_path)).of(1, other))
    # ... nor in the other direction, where the new one has more by now.
    assert adoptions(MadeBuilds(NEW, OLD), AdoptionRecord(tmp_path)).of(1, OLD) is OLD


def test_where_tokens_do_not_decide_the_bits_nothing_is_adopted() -> None:
    old, new = (identity(one_answer="", engine=name) for name in ("e/1+a", "e/2+b"))
    builds = MadeBuilds(old)
    assert not gives_one_answer(new)
    assert adoptions(builds).of(1, new) is new
    assert not builds.compared


def test_states_and_windows_are_not_adopted() -> None:
    both = replace(said(), states=True)
    assert not gives_one_answer(identity_of(both, "sha256"))
    windows = replace(both, window_row_bytes=16, window_least=1, window_most=2)
    assert not gives_one_answer(identity_of(windows, "sha256"))
    assert gives_one_answer(NEW)


@pytest.mark.parametrize(
    "fields",
    [
        {"engine": "another/b1+old"},
        {"cpu": "another processor"},
        {"libc": "2.40"},
        {"threads": "4"},
        {"batch": "64"},
        {"attention": "exact 3 (avx2)"},
        {"flash_attention": "off"},
        {"one_answer": "2"},  # a fault was mended
        {"adapters": "0x1p+0"},
    ],
)
def test_whatever_else_differs_is_another_machine_or_another_model(fields: dict[str, str]) -> None:
    builds = MadeBuilds(identity(**{"engine": "llama-server/b1+old", **fields}))
    assert adoptions(builds).of(1, NEW) is NEW
    assert not builds.compared


def test_a_process_keeps_the_name_that_it_has() -> None:
    builds = MadeBuilds(OLD, rows=SameRows(0, 0, 0, differ=False))
    made = adoptions(builds)
    assert made.of(1, NEW) is NEW
    builds.rows = ENOUGH
    assert made.of(1, NEW) is NEW
    assert OLD.namespace in reads(made.of(2, NEW))
    assert made.of(1, NEW) is NEW


def test_a_difference_that_comes_later_ends_it_for_the_next_process(tmp_path: Path) -> None:
    builds = MadeBuilds(OLD)
    adopted = adoptions(builds, AdoptionRecord(tmp_path)).of(1, NEW)
    again = adoptions(builds, AdoptionRecord(tmp_path))
    assert again.of(1, NEW) == adopted
    builds.rows = ENOUGH._replace(differ=True)  # computed again, and stored under its own name
    assert again.of(1, NEW) == adopted
    assert again.of(2, NEW) is NEW
    assert AdoptionRecord(tmp_path).all()[0].verdict is BuildVerdict.DIFFERENT


def test_a_difference_that_a_recheck_finds_ends_it(tmp_path: Path) -> None:
    made = adoptions(MadeBuilds(OLD), AdoptionRecord(tmp_path))
    made.differ(NEW)
    adopted = made.of(1, NEW)
    assert adopted.also
    made.differ(adopted)
    assert made.of(2, NEW) is NEW
    assert AdoptionRecord(tmp_path).all()[0].verdict is BuildVerdict.DIFFERENT


@pytest.mark.parametrize("end", ["it holds", "revoked", "switched off", "unreadable"])
def test_a_process_that_a_sidecar_of_before_has_served_stores_where_nobody_reads(
    tmp_path: Path, end: str
) -> None:
    """Its slots may have rows of the old build, which would pass for its own."""
    adoptions(MadeBuilds(OLD), record := AdoptionRecord(tmp_path)).of(1, NEW)
    if end == "revoked":
        record.revoke(NEW.model)
    if end == "unreadable":
        (tmp_path / adoption_record.FILE_NAME).write_text("{")
    again = adoptions(MadeBuilds(OLD), AdoptionRecord(tmp_path), enabled=end != "switched off")
    found = again.of(0, NEW)
    assert found.namespace not in (NEW.namespace, OLD.namespace)
    assert found.also == ()
    assert found.namespace not in {one.joined for one in record.all()}


def test_one_that_never_asked_keeps_its_name_whenever_it_was_started() -> None:
    made = adoptions(MadeBuilds(OLD, rows=SameRows(0, 0, 0, differ=False)))
    assert made.of(0, NEW) is NEW


def test_revoked_stays_revoked(tmp_path: Path) -> None:
    record = AdoptionRecord(tmp_path)
    adoptions(MadeBuilds(OLD), record).of(1, NEW)
    assert record.revoke("another model") == []
    (revoked,) = record.revoke(NEW.model)
    assert revoked.verdict is BuildVerdict.REVOKED
    again = AdoptionRecord(tmp_path)
    assert again.all() == [revoked]
    assert adoptions(MadeBuilds(OLD), again).of(2, NEW) is NEW


def test_the_setting_turns_off_what_was_adopted_before(tmp_path: Path) -> None:
    adoptions(MadeBuilds(OLD), AdoptionRecord(tmp_path)).of(1, NEW)
    off = adoptions(MadeBuilds(OLD), AdoptionRecord(tmp_path), enabled=False)
    assert off.of(1, NEW) is NEW
    on = adoptions(MadeBuilds(OLD, rows=SameRows(0, 0, 0, differ=False)), AdoptionRecord(tmp_path))
    assert OLD.namespace in reads(on.of(1, NEW))  # what both had is evicted by now


def test_the_next_update_reads_what_both_builds_before_have_stored() -> None:
    made = adoptions(MadeBuilds(OLD))
    joined = made.of(1, NEW)
    third = identity(engine="llama-server/b3+next")
    again = adoptions(MadeBuilds(joined, OLD), made.record)
    assert {joined.namespace, OLD.namespace, NEW.namespace} <= reads(again.of(2, third))
    # An update that is taken back, too.
    assert {joined.namespace, NEW.namespace} <= reads(again.of(3, OLD))


def test_what_hangs_on_an_adoption_that_ended_is_not_read() -> None:
    made = adoptions(MadeBuilds(OLD))
    joined = made.of(1, NEW)
    third = identity(engine="llama-server/b3+next")
    again = adoptions(MadeBuilds(joined, OLD), made.record)
    again.of(2, third)
    made.record.revoke(NEW.model)
    for build in (third, identity(engine="llama-server/b4+late")):
        after = adoptions(MadeBuilds(joined), made.record)
        assert after.of(4, build) is build


def test_without_a_description_of_the_old_build_it_goes_on_as_before(tmp_path: Path) -> None:
    adoptions(MadeBuilds(OLD), AdoptionRecord(tmp_path)).of(1, NEW)
    found = adoptions(MadeBuilds(), AdoptionRecord(tmp_path)).of(2, NEW)
    assert OLD.namespace in found.also  # it has no block any more, or nobody knows of any


def test_a_decision_that_cannot_be_written_holds_only_if_it_is_no(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    record = AdoptionRecord(tmp_path)
    monkeypatch.setattr(adoption_record, "replace_file", full)
    assert adoptions(MadeBuilds(OLD), record).of(1, NEW) is NEW
    assert record.all() == []
    adoptions(MadeBuilds(OLD, rows=ENOUGH._replace(differ=True)), record).of(2, NEW)
    assert [one.verdict for one in record.all()] == [BuildVerdict.DIFFERENT]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"version": 2, "pairs": []}', '{"version": 1, "pairs": [{"mine": "ab"}]}'],
)
def test_a_file_that_cannot_be_read_adopts_nothing(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / adoption_record.FILE_NAME).write_text(content)
    record = AdoptionRecord(tmp_path)
    assert "remove the file" in caplog.text
    assert adoptions(MadeBuilds(OLD), record).of(1, NEW) is NEW
    assert (tmp_path / adoption_record.FILE_NAME).read_text() == content


def test_the_file_has_no_more_pairs_than_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adoption_record, "_MOST", 2)
    record = AdoptionRecord(tmp_path)
    for number in range(3):
        new = identity(engine=f"llama-server/b{number}+new")
        adoptions(MadeBuilds(OLD), record).of(number, new)
    assert [one.engine for one in AdoptionRecord(tmp_path).all()] == [
        "llama-server/b1+new",
        "llama-server/b2+new",
    ]
    assert json.loads((tmp_path / adoption_record.FILE_NAME).read_text())["version"] == 1
