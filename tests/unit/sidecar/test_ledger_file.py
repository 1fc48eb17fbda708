"""The ledger's file: private, whole or not there, and never in anybody's way."""

from __future__ import annotations

import asyncio
import json
import logging
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ollama_tiering.protocol import calls as rpc
from ollama_tiering.sidecar import ledger_file
from ollama_tiering.sidecar.ledger import Ledger
from ollama_tiering.sidecar.ledger_file import FILE_NAME, LedgerFile, held
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.sidecar import SidecarProcess
from tests.unit.sidecar.reports import NAMESPACE, report


def keep(directory: Path, *reports: pb.RunnerReport) -> Ledger:
    """What a sidecar does from its start to its end."""
    with held(directory, ledger := Ledger()) as file:
        for one in reports:
            ledger.book(one)
        file.save()
    return ledger


def requests(ledger: Ledger) -> int:
    return sum(entry.counts.requests for entry in ledger.entries().values())


def test_it_outlives_the_sidecar_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    state = tmp_path / "state" / "ours"
    keep(state, report(2))
    assert requests(keep(state, report(3))) == 3
    assert requests(keep(state)) == 3
    for path in state.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert sorted(path.name for path in state.iterdir()) == [FILE_NAME, f"{FILE_NAME}.lock"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, b"\xff\x00", b'{"version": 1}', bytes(2 << 20)]
)
def test_a_damaged_file_begins_anew_and_is_said_once(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    caplog.set_level(logging.WARNING, "ollama_tiering")
    assert requests(keep(tmp_path, report(2))) == 2
    assert [r.getMessage().count("begin anew") for r in caplog.records] == [1]
    caplog.clear()
    assert requests(keep(tmp_path)) == 2
    assert not caplog.records


def test_no_link_is_followed_neither_to_read_nor_to_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    state = tmp_path / "state"
    state.mkdir()
    (state / FILE_NAME).symlink_to(precious)
    keep(state, report(2))
    assert "not followed" in caplog.text
    assert precious.read_text() == "precious"
    assert not (state / FILE_NAME).is_symlink()


def test_a_second_sidecar_counts_in_memory_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with held(tmp_path, first := Ledger()) as file:
        first.book(report(1))
        file.save()
        before = (tmp_path / FILE_NAME).read_bytes()
        assert requests(keep(tmp_path, report(5, pid=9))) == 5
        assert (tmp_path / FILE_NAME).read_bytes() == before
    assert "in memory only" in caplog.text


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / f".{FILE_NAME}.0123abcd").write_text("{")
    (tmp_path / "other").write_text("")
    keep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{FILE_NAME}.lock", "other"]


def test_it_is_written_only_when_something_was_booked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    monkeypatch.setattr(ledger_file, "replace_file", lambda path, text: written.append(path))
    file = LedgerFile(tmp_path / FILE_NAME, ledger := Ledger())
    file.save()
    assert not written
    ledger.book(report(1))
    file.save()
    file.save()
    assert len(written) == 1


def test_it_is_written_while_the_sidecar_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "_SAVE_SECONDS", 0.01)
    file = LedgerFile(tmp_path / FILE_NAME, ledger := Ledger())

    async def until_written() -> None:
        with ThreadPoolExecutor() as pool:
            chore = asyncio.create_task(file.keep(pool))
            ledger.book(report(1))
            while not (tmp_path / FILE_NAME).exists():
                await asyncio.sleep(0.01)
            chore.cancel()

    asyncio.run(asyncio.wait_for(until_written(), 10))
    assert requests(keep(tmp_path)) == 1


def test_weather_is_said_once_a_minute_and_the_next_save_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = LedgerFile(tmp_path / FILE_NAME, ledger := Ledger())
    caplog.set_level(logging.WARNING, "ollama_tiering")
    ledger.book(report(1))

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(ledger_file, "replace_file", full)
        file.save()
        file.save()
    assert [r.getMessage() for r in caplog.records] == [
        f"counts of models not written: path={tmp_path / FILE_NAME} reason=No space left on device"
    ]
    file.save()
    assert json.loads((tmp_path / FILE_NAME).read_bytes())["models"]


def test_a_state_directory_that_cannot_be_made_costs_only_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert requests(keep(tmp_path / "file" / "state", report(2))) == 2
    assert "in memory only" in caplog.text


def test_a_sidecar_tells_after_a_restart_what_runners_did_that_are_gone(tmp_path: Path) -> None:
    daemon = SidecarProcess(tmp_path)
    with daemon:
        with daemon.channel() as channel:
            stub = rpc.BlockStoreStub(channel)
            stub.ReportRunner(report(2, restored=640, pid=1), timeout=10)
            stub.ReportRunner(report(9, pid=1, prompt_tokens=1), timeout=10)  # does not add up
        (use,) = daemon.stat().model_uses
        assert (use.requests, use.restored_tokens, use.loaded) == (2, 640, True)
        daemon.stop()
        daemon.start()
        (use,) = daemon.stat().model_uses
        assert (use.requests, use.restored_tokens, use.loaded) == (2, 640, False)
        assert use.namespace == NAMESPACE
        assert use.memory_tokens + use.restored_tokens + use.recomputed_tokens == use.prompt_tokens
    assert json.loads((tmp_path / "state" / "ollama-tiering" / FILE_NAME).read_bytes())


def test_a_sidecar_starts_over_a_damaged_ledger_and_without_a_place_for_one(tmp_path: Path) -> None:
    state = tmp_path / "state" / "ollama-tiering"
    state.mkdir(parents=True, mode=0o700)
    (state / FILE_NAME).write_text("{")
    with SidecarProcess(tmp_path) as daemon:
        assert not daemon.stat().model_uses
        assert daemon.said("begin anew") == 1
    (tmp_path / "file").write_text("")
    with SidecarProcess(tmp_path, env={"XDG_STATE_HOME": str(tmp_path / "file")}) as daemon:
        assert daemon.stat().version
        assert daemon.said("in memory only")
