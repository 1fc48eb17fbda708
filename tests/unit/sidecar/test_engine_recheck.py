"""An engine that computes everything itself is compared with what is stored: a planted wrong row is
found, though its checksum is right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ollama_tiering.client.admin_client import SidecarAdministration
from ollama_tiering.protocol.engine.messages import GateMode
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.sidecar.rechecks import FILE_NAME, Rechecks
from tests.contract.fake_engine import EXACT, FakeEngine, hello, prompt
from tests.sidecar import SidecarProcess

TEXT = prompt(1000, 64 * 10 + 7)
WRONG = 64 * 6 + 3  # rows from this one on


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SidecarProcess]:
    with SidecarProcess(tmp_path) as running:
        yield running


def store(
    daemon: SidecarProcess,
    tokens: list[int],
    *,
    gate: GateMode = GateMode.RESTORE,
    rows: int = 1 << 31,
    fields: Mapping[str, str] = EXACT,
) -> int:
    """How many files were stored."""
    with FakeEngine(daemon.socket, hello(fields=dict(fields), gate=gate)) as engine:
        engine.history = rows, b"wrong"
        files, reasons = engine.store(tokens)
        assert reasons == []
        return len(files)


def again(daemon: SidecarProcess, tokens: list[int] = TEXT) -> int:
    return store(daemon, tokens, gate=GateMode.RECOMPUTE)


def sums(daemon: SidecarProcess) -> list[tuple[int, int]]:
    stat: adm.StatResponse = daemon.stat()
    return [(one.blocks, one.different) for one in stat.rechecked]


def found(daemon: SidecarProcess) -> int:
    with FakeEngine(daemon.socket, hello(fields=EXACT)) as engine:
        return engine.restore([*TEXT, 1])  # compares every row


def test_what_is_the_same_is_counted_once_for_each_process(daemon: SidecarProcess) -> None:
    store(daemon, TEXT)
    assert sums(daemon) == []
    assert again(daemon) == 0
    assert sums(daemon) == [(10, 0)]
    with FakeEngine(daemon.socket, hello(fields=EXACT, gate=GateMode.RECOMPUTE)) as engine:
        for _ in range(3):
            engine.store(TEXT)
    assert sums(daemon) == [(20, 0)]


def test_what_it_stored_itself_is_not_compared_with_itself(daemon: SidecarProcess) -> None:
    with FakeEngine(daemon.socket, hello(fields=EXACT, gate=GateMode.RECOMPUTE)) as engine:
        for end in (200, 400, len(TEXT)):
            engine.store(TEXT[:end])
    assert sums(daemon) == []


def test_a_wrong_row_is_found_said_and_never_restored_again(daemon: SidecarProcess) -> None:
    store(daemon, TEXT, rows=WRONG)
    daemon.wait_written()
    with pytest.raises(AssertionError):
        found(daemon)
    again(daemon)
    assert sums(daemon) == [(6, 1)]
    assert daemon.said("WRONG ROWS") == 1
    assert found(daemon) == len(TEXT)
    (tier,) = [one for one in daemon.stat().tiers if one.tier == 2]
    assert tier.quarantined_blocks == 1
    document = json.loads((daemon.root / "state/ollama-tiering" / FILE_NAME).read_text())
    assert [one["first_token"] for one in document["differences"]] == [64 * 6]

    daemon.stop()
    daemon.start()
    assert sums(daemon) == [(6, 1)]
    assert found(daemon) == len(TEXT)


@pytest.mark.parametrize("fields", [{}, {**EXACT, "one_answer": ""}])
def test_where_tokens_do_not_decide_the_bits_nothing_is_said(
    daemon: SidecarProcess, fields: dict[str, str]
) -> None:
    store(daemon, TEXT, rows=WRONG, fields=fields)
    store(daemon, TEXT, gate=GateMode.RECOMPUTE, fields=fields)
    assert sums(daemon) == []


def test_a_slot_that_still_has_them_does_not_store_them_again(daemon: SidecarProcess) -> None:
    store(daemon, TEXT, rows=WRONG)
    again(daemon, TEXT[: 64 * 7])  # and no further: what follows hangs on nothing
    assert sums(daemon) == [(6, 1)]
    for _ in range(2):
        assert store(daemon, TEXT, rows=WRONG) == 0
        assert found(daemon) == 64 * 7
        daemon.stop()
        daemon.start()


def test_a_copy_that_could_not_be_put_aside_is_not_used(daemon: SidecarProcess) -> None:
    store(daemon, TEXT)
    with SidecarAdministration(daemon.socket) as admin:
        (key,) = [one.key for one in admin.listing(blocks=True).blocks if one.tokens == 64 * 7]
    daemon.stop()
    rechecks = Rechecks(daemon.root / "state/ollama-tiering")
    rechecks.condemn([key])
    rechecks.save()
    daemon.start()
    assert found(daemon) == 64 * 6


def test_an_engine_that_restores_is_not_compared(daemon: SidecarProcess) -> None:
    """Its rows may be those that are stored."""
    store(daemon, TEXT)
    for gate in (GateMode.MEASURED, GateMode.RESTORE):
        store(daemon, TEXT, gate=gate)
    assert sums(daemon) == []


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"version": 2}', '{"version": 1, "models": {"a": 1}, "differences": []}'],
)
def test_sums_that_cannot_be_read_begin_anew(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    rechecks = Rechecks(tmp_path, clock=lambda: 5.0)
    assert rechecks.sums() == {}
    assert "begin anew" in caplog.text
    rechecks.alike("m", 3)
    rechecks.differ("m", "e", b"n", [(b"k", 64)])
    rechecks.condemn([b"k" * 32])
    rechecks.save()
    kept = Rechecks(tmp_path)
    assert kept.sums() == rechecks.sums()
    assert kept.differences() == rechecks.differences()
    assert kept.is_condemned(b"k" * 32)
    assert not kept.is_condemned(b"o" * 32)
