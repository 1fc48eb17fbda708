"""Every command that takes or shows a path, below directories whose names mean something to
somebody on the way: to a URI, a shell, a pattern, a terminal, or to what takes only UTF-8.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ollama_tiering.cli import cli
from ollama_tiering.client import BlockClient, Namespace
from ollama_tiering.client.engine_client import ask_version
from ollama_tiering.config import SOCKET_PATH_MAX_BYTES
from ollama_tiering.errors import ConfigError
from ollama_tiering.launch.block_service import ask
from ollama_tiering.store import LayerSpec
from ollama_tiering.system import own_process
from tests.integration.test_up import Place
from tests.odd_paths import NAMES
from tests.places import short_directory
from tests.sidecar import SidecarProcess

pytestmark = pytest.mark.slow

NAMESPACE = Namespace.of(
    model="m",
    engine="test/1",
    cache_dtype="f16",
    layers=[LayerSpec(0, 0, 1, 64, 64)],
    block_tokens=64,
)
TOKENS = list(range(128))


@pytest.fixture(params=NAMES)
def odd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of that name, which is the home, too."""
    for name in list(os.environ):
        if name.startswith(("OLLAMA_", "XDG_")):
            monkeypatch.delenv(name)
    with short_directory() as place:
        directory = place / NAMES[request.param]
        directory.mkdir(mode=0o700)
        monkeypatch.setenv("HOME", str(directory))
        yield directory


def tiering(capfdbinary: pytest.CaptureFixture[bytes], *words: str) -> bytes:
    """What the command prints. It must not fail."""
    capfdbinary.readouterr()
    own_process.print_in_any_encoding()
    code = None
    try:
        cli.main(list(words), standalone_mode=False)
    except SystemExit as end:
        code = end.code
    said = capfdbinary.readouterr()
    assert not code, (words, said)
    assert b"Traceback" not in said.err
    return said.out


def store(socket: Path) -> None:
    rows = np.ones((64, 64), np.float16)
    with BlockClient(socket, fail_open=False, lookup_seconds=20) as client:
        done = client.put(NAMESPACE, TOKENS, lambda _: {(0, "k"): rows, (0, "v"): rows})
        assert done.stored_blocks == 2
        with client.get(NAMESPACE, client.match(NAMESPACE, TOKENS)) as blocks:
            assert [block.tokens for block in blocks] == [TOKENS[:64], TOKENS[64:]]


def test_every_command_does_its_work_there(
    odd: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    long = len(os.fsencode(odd)) + len("/run/s.engine") > SOCKET_PATH_MAX_BYTES
    daemon = SidecarProcess(odd, fast=odd.parent if long else None)
    environment = daemon.environment()  # which writes the settings
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, environment[name])
    monkeypatch.setenv("OLLAMA_KV_TIER_LOCAL", str(daemon.local_dir))
    monkeypatch.setenv("OLLAMA_KV_TIER_RAM", str(daemon.ram_dir))
    socket = str(daemon.socket)
    monkeypatch.setenv("OLLAMA_KV_TIER_SOCKET", socket)
    archive = str(odd / "archive.kvta")
    with daemon:
        store(daemon.socket)
        ask_version(daemon.socket.with_name(daemon.socket.name + ".engine"))
        document = json.loads(tiering(capfdbinary, "status", "--json"))
        directories = {Path(tier["directory"]) for tier in document["tiers"]}
        assert directories == {daemon.ram_dir, daemon.local_dir}
        chain = json.loads(tiering(capfdbinary, "ls", "--json"))["chains"][0]["id"]
        for words in (
            *(["status"], ["status", "--socket", socket], ["ls"], ["ls", "--blocks"]),
            *(["verify"], ["gc", "--dry-run"], ["pin", chain], ["unpin", chain], ["config"]),
            *(["export", chain, archive], ["rm", chain, "--yes"], ["import", archive]),
        ):
            tiering(capfdbinary, *words)
        document = json.loads(tiering(capfdbinary, "ls", "--json"))
        assert [line["id"] for line in document["chains"]] == [chain]
        assert daemon.stop() == 0
    assert "ERROR" not in daemon.log
    assert "Traceback" not in daemon.log
    for words in (["ls"], ["verify"], ["gc", "--dry-run"], ["export", chain, archive + "2"]):
        tiering(capfdbinary, *words)  # on the files


def test_a_path_that_no_socket_can_have_is_refused_in_one_line(odd: Path) -> None:
    long = odd / ("x" * SOCKET_PATH_MAX_BYTES)
    with pytest.raises(ConfigError, match=f"a socket path may have {SOCKET_PATH_MAX_BYTES} bytes"):
        cli.main(["status", "--socket", str(long)], standalone_mode=False)


@pytest.mark.parametrize("name", ["percent", "hash", "question mark", "newline", "not UTF-8"])
def test_up_has_its_sidecar_there(name: str) -> None:
    with short_directory() as short:
        place = Place(short / NAMES[name])
        place.env["XDG_RUNTIME_DIR"] = ""  # the state directory's is the default place
        try:
            running = place.up_and_ready()
            said = "\n".join(running.lines)
            assert "as stock" not in said
            assert place.events == ["serve started"]
            seen = json.loads((place.fake / "environment.json").read_text())
            socket = Path(seen["OLLAMA_KV_TIER_SOCKET"])
            assert socket == place.root / "state/ollama-tiering/run/sidecar.sock"
            assert ask(socket)
            running.end()
        finally:
            place.close()
