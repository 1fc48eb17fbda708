"""An engine after an update, on the engine socket: what the build before has stored is found again
once both have computed enough of the same texts alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering import cli
from ollama_tiering.client.admin_client import SidecarAdministration
from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.engine.messages import GateMode
from ollama_tiering.protocol.pb import administration_pb2 as adm
from tests.contract.fake_engine import EXACT, FakeEngine, hello, prompt
from tests.sidecar import SidecarProcess

SYSTEM = prompt(1000, 64 * 64)  # what both builds compute
CHAT = [*SYSTEM, *prompt(50_000, 1000)]  # what the old one goes on with
NEVER = 1 << 31


def engine(daemon: SidecarProcess, build: str, gate: GateMode = GateMode.RESTORE) -> FakeEngine:
    fields = {**EXACT, "engine": f"llama-server/{build}"}
    return FakeEngine(daemon.socket, hello(fields=fields, gate=gate))


def in_a_process(code: str, *args: object) -> int:
    """What this prints: each process of an engine is told once what it may read."""
    command = [sys.executable, "-c", f"from {__name__} import *; {code}", *map(str, args)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def found(daemon: SidecarProcess, build: str, rows: int = NEVER) -> int:
    """How many tokens of the chat, each row the one that its tokens give, up to `rows`."""
    return in_a_process("print(finds(*sys.argv[1:]))", daemon.socket, build, rows)


def finds(socket: str, build: str, rows: str) -> int:
    fields = {**EXACT, "engine": f"llama-server/{build}"}
    with FakeEngine(Path(socket), hello(fields=fields)) as asking:
        asking.history = int(rows), b"other bits"
        return asking.restore([*CHAT, 1])


def store(
    daemon: SidecarProcess,
    build: str,
    tokens: list[int],
    rows: int = NEVER,
    gate: GateMode = GateMode.RESTORE,
) -> None:
    """Of the text that begins with these numbers."""
    first = "SYSTEM" if tokens is SYSTEM else "CHAT" if tokens is CHAT else repr(tokens)
    in_a_process(f"print(stores(*sys.argv[1:], {first}))", daemon.socket, build, rows, int(gate))


def stores(socket: str, build: str, rows: str, gate: str, tokens: list[int]) -> int:
    fields = {**EXACT, "engine": f"llama-server/{build}"}
    with FakeEngine(Path(socket), hello(fields=fields, gate=GateMode(int(gate)))) as storing:
        storing.history = int(rows), b"other bits"
        assert storing.store(tokens)[1] == []
        storing.client.finished(FINISHED)
    return 0


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
        yield daemon


def test_the_next_load_finds_the_whole_chat_and_so_do_the_builds_around_it(
    updated: SidecarProcess,
) -> None:
    assert found(updated, "b2+new") == len(CHAT)
    (pair,) = pairs(updated)
    assert (pair.verdict, pair.blocks, pair.deepest_tokens) == ("adopted", 64, len(SYSTEM))
    assert (pair.engine, pair.other_engine) == ("llama-server/b2+new", "llama-server/b1+old")
    updated.stop()
    updated.start()
    assert found(updated, "b2+new") == len(CHAT)
    before = namespaces(updated)
    store(updated, "b2+new", CHAT)  # what it goes on with has a name of its own
    assert len(namespaces(updated)) == len(before) + 1
    assert found(updated, "b1+old") == len(CHAT)
    store(updated, "b3+next", SYSTEM)
    assert found(updated, "b3+next") == len(CHAT)


def namespaces(daemon: SidecarProcess) -> set[bytes]:
    stat: adm.StatResponse = daemon.stat()
    return {one.namespace for one in stat.namespaces}


def test_a_last_bit_in_one_block_of_64_is_found_and_for_good(updated: SidecarProcess) -> None:
    last = len(SYSTEM) - 1  # row of the last block
    store(updated, "b4+other", SYSTEM, rows=last)
    for _ in range(2):
        assert found(updated, "b4+other", last) == len(SYSTEM)
        decided = {(one.engine, one.other_engine): one.verdict for one in pairs(updated)}
        assert decided == {("llama-server/b4+other", "llama-server/b1+old"): "different"}
        updated.stop()
        updated.start()


def test_a_row_that_it_computes_otherwise_later_ends_it(updated: SidecarProcess) -> None:
    assert found(updated, "b2+new") == len(CHAT)
    store(updated, "b2+new", CHAT, rows=4500)
    assert found(updated, "b2+new") == len(SYSTEM)
    assert [one.verdict for one in pairs(updated)] == ["different"]
    assert found(updated, "b1+old") == len(CHAT)  # nothing of the other's is in it


def test_a_recheck_ends_it_and_leaves_the_old_build_what_is_its_own(
    updated: SidecarProcess,
) -> None:
    assert found(updated, "b2+new") == len(CHAT)
    store(updated, "b2+new", CHAT, rows=4500, gate=GateMode.RECOMPUTE)
    assert "WRONG ROWS" not in updated.log
    assert [one.verdict for one in pairs(updated)] == ["different"]
    assert found(updated, "b2+new") == len(SYSTEM)
    assert found(updated, "b1+old") == len(CHAT)


def test_a_recheck_puts_aside_what_its_own_build_stored_wrong(updated: SidecarProcess) -> None:
    """Under its own name, while it reads the old one's, too: nothing is wrong with that."""
    other = [*SYSTEM, *prompt(9000, 200)]
    store(updated, "b5+more", other, rows=4100)  # nobody else has this text
    assert found(updated, "b5+more") == len(CHAT)
    store(updated, "b5+more", other, gate=GateMode.RECOMPUTE)
    assert updated.said("WRONG ROWS") == 1
    stat: adm.StatResponse = updated.stat()
    assert [one.different for one in stat.rechecked] == [1]
    assert [one.verdict for one in pairs(updated)] == ["adopted"]


def test_a_recheck_that_finds_wrong_rows_among_what_both_made_ends_it(
    updated: SidecarProcess,
) -> None:
    assert found(updated, "b2+new") == len(CHAT)
    other = [*SYSTEM, *prompt(9000, 200)]
    store(updated, "b2+new", other, rows=4100)  # under the name of both
    store(updated, "b2+new", other, gate=GateMode.RECOMPUTE)
    assert updated.said("WRONG ROWS") == 1
    assert [one.verdict for one in pairs(updated)] == ["different"]


def test_a_process_that_lives_on_over_a_restart_of_the_sidecar_cannot_spoil_its_own_name(
    updated: SidecarProcess,
) -> None:
    """It may have rows of the old build in its slot, and stores them."""
    assert found(updated, "b2+new") == len(CHAT)
    updated.stop()
    updated.start()
    with SidecarAdministration(updated.socket) as admin:
        assert len(admin.revoke_builds("sha256-fake")) == 1
    with engine(updated, "b2+new") as living:  # this process is older than the sidecar
        assert living.store(CHAT)[0]
        assert living.restore([*CHAT, 1]) == len(CHAT)
    assert found(updated, "b2+new") == len(SYSTEM)


def test_off_by_a_setting(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, settings={"adopt": False}) as daemon:
        store(daemon, "b1+old", CHAT)
        store(daemon, "b2+new", SYSTEM)
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
    assert found(updated, "b2+new") == len(SYSTEM)
    assert "revoked" in tiering("status")
