"""An engine after an update, on the engine socket: what the build before has stored is found again
once both have computed enough of the same texts alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering import cli
from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.pb import administration_pb2 as adm
from tests.contract.fake_engine import EXACT, FakeEngine, hello, prompt
from tests.sidecar import SidecarProcess

SYSTEM = prompt(1000, 64 * 64)  # what both builds compute
CHAT = [*SYSTEM, *prompt(50_000, 1000)]  # what the old one goes on with


def engine(daemon: SidecarProcess, build: str) -> FakeEngine:
    return FakeEngine(daemon.socket, hello(fields={**EXACT, "engine": f"llama-server/{build}"}))


def found(daemon: SidecarProcess, build: str, rows: int = 1 << 31) -> int:
    """How many tokens of the chat, each row the one that its tokens give, up to `rows`."""
    with engine(daemon, build) as asking:
        asking.history = rows, b"other bits"
        return asking.restore([*CHAT, 1])


def store(daemon: SidecarProcess, build: str, tokens: list[int], rows: int = 1 << 31) -> None:
    with engine(daemon, build) as storing:
        storing.history = rows, b"other bits"
        assert storing.store(tokens)[1] == []
        storing.client.finished(FINISHED)


def restart(daemon: SidecarProcess) -> None:
    """The engine's process, as far as the sidecar can tell; and the sidecar."""
    assert daemon.stop() == 0
    daemon.start()


FINISHED = m.EngineFinished(
    **dict.fromkeys(
        (
            *("prompt_tokens", "memory_tokens", "restored_tokens", "reason", "at"),
            *("beside_tokens", "failures", "restored_bytes"),
        ),
        0,
    ),
    **dict.fromkeys(
        ("prefill_seconds", "lookup_seconds", "fetch_seconds", "copy_seconds"),
        0.0,
    ),
)


def pairs(daemon: SidecarProcess) -> list[adm.BuildPair]:
    stat: adm.StatResponse = daemon.stat()
    return list(stat.builds)


@pytest.fixture
def updated(tmp_path: Path) -> Iterator[SidecarProcess]:
    """The old build has stored the chat, the new one what it begins with."""
    with SidecarProcess(tmp_path) as daemon:
        store(daemon, "b1+old", CHAT)
        assert found(daemon, "b2+new") == 0
        store(daemon, "b2+new", SYSTEM)
        assert found(daemon, "b2+new") == len(SYSTEM)  # its own
        restart(daemon)
        yield daemon


def test_the_next_load_finds_the_whole_chat_and_both_builds_store_as_one(
    updated: SidecarProcess,
) -> None:
    assert found(updated, "b2+new") == len(CHAT)
    (pair,) = pairs(updated)
    assert (pair.verdict, pair.blocks, pair.deepest_tokens) == ("adopted", 64, len(SYSTEM))
    assert (pair.engine, pair.other_engine) == ("llama-server/b2+new", "llama-server/b1+old")
    longer = [*CHAT, *prompt(70_000, 640)]
    store(updated, "b2+new", longer)
    with engine(updated, "b1+old") as old:
        assert old.restore([*longer, 1]) == len(longer)
    # The update after that adopts the same one.
    store(updated, "b3+next", SYSTEM)
    restart(updated)
    assert found(updated, "b3+next") == len(CHAT)
    assert {one.engine for one in pairs(updated)} == {
        "llama-server/b2+new",
        "llama-server/b3+next",
    }


def test_a_last_bit_in_one_block_of_64_is_found_and_for_good(updated: SidecarProcess) -> None:
    last = len(SYSTEM) - 1  # row of the last block
    store(updated, "b4+other", SYSTEM, rows=last)
    for _ in range(2):
        restart(updated)
        assert found(updated, "b4+other", last) == len(SYSTEM)
        decided = {(one.engine, one.other_engine): one.verdict for one in pairs(updated)}
        assert decided == {("llama-server/b4+other", "llama-server/b1+old"): "different"}


def test_another_row_later_ends_it(updated: SidecarProcess) -> None:
    assert found(updated, "b2+new") == len(CHAT)
    store(updated, "b2+new", CHAT, rows=4500)
    (pair,) = pairs(updated)
    assert pair.verdict == "different"
    restart(updated)
    assert found(updated, "b2+new") == len(SYSTEM)


def test_off_by_a_setting(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, settings={"adopt": False}) as daemon:
        store(daemon, "b1+old", CHAT)
        store(daemon, "b2+new", SYSTEM)
        restart(daemon)
        assert found(daemon, "b2+new") == len(SYSTEM)
        assert pairs(daemon) == []


def test_a_person_sees_it_and_revokes_it(
    updated: SidecarProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    def tiering(*words: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as caught:
            cli.main([*words, "--socket", str(updated.socket)])
        assert caught.value.code == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    found(updated, "b2+new")
    line = tiering("builds")
    assert "llama-server/b2+new reads what llama-server/b1+old stored: 64 blocks" in line
    assert line.strip() in tiering("status")
    (shown,) = json.loads(tiering("builds", "--json"))["builds"]
    assert (shown["verdict"], shown["model"]) == ("adopted", "sha256-fake")

    assert "stored of nothing" in tiering("builds", "--revoke", "nothing", code=2)
    assert "revoked" in tiering("builds", "--revoke", "sha256-fake")
    restart(updated)
    assert found(updated, "b2+new") == len(SYSTEM)
    assert "revoked" in tiering("status")
