"""What a self-test waits for until something is stored. The sidecar is made up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ollama_tiering.errors import ServiceError
from ollama_tiering.launch.self_test import store as module
from ollama_tiering.launch.self_test.store import NotTiered, TrialStore
from tests.places import short_directory

SERVER: Any = SimpleNamespace(pid=7, tail=lambda: "  cannot connect")


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    said = SimpleNamespace(namespaces=[], runners=[], queued_demotions=0)
    monkeypatch.setattr(module.block_service, "ask", lambda _socket: said)
    monkeypatch.setattr(module, "_STORE_SECONDS", 0.2)
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.001)
    return said


def runner(pid: int, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"pid": pid, "reason": "", "namespace": b"mine", **more})


def test_a_reason_ends_it_at_once(answer: SimpleNamespace, tmp_path: Path) -> None:
    answer.runners = [runner(7, reason="LoRA adapters")]
    for wait in (
        lambda: TrialStore(tmp_path).wait(SERVER, 5),
        lambda: TrialStore(tmp_path).settle(SERVER),
    ):
        with pytest.raises(NotTiered, match="LoRA adapters"):
            wait()


def test_only_what_that_server_stored_counts(answer: SimpleNamespace, tmp_path: Path) -> None:
    """Two checks run at a time, in one store."""
    answer.runners = [runner(6, namespace=b"other"), runner(7)]
    answer.namespaces = [
        SimpleNamespace(namespace=b"other", blocks=9),
        SimpleNamespace(namespace=b"mine", blocks=4),
    ]
    TrialStore(tmp_path).wait(SERVER, 4)
    TrialStore(tmp_path).settle(SERVER)
    with pytest.raises(ServiceError, match="it knows the sidecar"):
        TrialStore(tmp_path).wait(SERVER, 5)


def test_nothing_is_stored(answer: SimpleNamespace, tmp_path: Path) -> None:
    """In the end, what llama-server wrote last."""
    with pytest.raises(ServiceError, match="never spoke to the sidecar") as caught:
        TrialStore(tmp_path).wait(SERVER, 5)
    assert caught.value.message.endswith("cannot connect")
    assert caught.value.hint
    answer.runners = [runner(7)]
    answer.namespaces = [SimpleNamespace(namespace=b"mine", blocks=0)]
    with pytest.raises(ServiceError, match="it knows the sidecar"):
        TrialStore(tmp_path).settle(SERVER)


def test_a_block_is_named_by_all_its_copies_when_they_are_made(
    answer: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that is made behind our back is whole while the others are spoiled."""
    answer.runners = [runner(7, namespace=b"\xab")]
    answer.queued_demotions = 2
    trial = TrialStore(tmp_path)

    def made_meanwhile(_seconds: float) -> None:
        answer.queued_demotions -= 1
        for tier in ("ram", "local") if not answer.queued_demotions else ("ram",):
            for name in ("01aa", "02bb"):
                path = tmp_path / tier / "v1/ab" / name[:2] / f"{name}.kvb"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()

    monkeypatch.setattr(module.time, "sleep", made_meanwhile)
    found = trial.files(SERVER)
    assert [[path.name for path in copies] for copies in found] == [
        ["01aa.kvb"] * 2,
        ["02bb.kvb"] * 2,
    ]


def test_what_a_self_test_asks_is_not_counted_for_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "user"))
    with short_directory() as folder, TrialStore(folder) as trial:
        assert trial.socket.is_socket()
        assert list((folder / "state").rglob("ledger.json*"))
    assert not (tmp_path / "user").exists()
