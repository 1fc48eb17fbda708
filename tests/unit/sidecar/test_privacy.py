"""What docs/privacy.md says: modes of files, and no token ids in logs, metrics or other files."""

from __future__ import annotations

import os
import stat
import urllib.request
from pathlib import Path

import grpc
import pytest

from measure.store import samples
from ollama_tiering.client import BlockClient
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.store.block.key import tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.sidecar import PutStream, SidecarProcess
from tests.unit.sidecar.reports import report
from tests.unit.sidecar.scrape import free_port

NS = samples.namespace()
TOKENS = [1_234_567_891 + 1_000_003 * i for i in range(22)]
HOLD_TOKENS = (".kvb", ".bad", ".sqlite", ".sqlite-wal", ".tmp")


class Talkative(SidecarProcess):
    def command(self) -> list[str]:
        command = super().command()
        command[command.index("info")] = "debug"
        return command


@pytest.fixture
def used(tmp_path: Path) -> Talkative:
    """A sidecar that has stored, served, refused and quarantined, under a careless umask."""
    port = free_port()
    # Beyond 64 MiB a tier has an index.
    daemon = Talkative(tmp_path, local_gb=0.2, settings={"metrics_port": port})
    before = os.umask(0)
    try:
        with daemon:
            blocks = samples.sequence(NS, TOKENS)
            with daemon.channel() as channel:
                stub = rpc.BlockStoreStub(channel)
                stream = PutStream(stub, NS)
                assert all(result.stored for result in stream.put(blocks))
                with pytest.raises(grpc.RpcError):  # refused, and said in the log
                    stream.call(inline=pb.PutInline(key=blocks[0].key, part=bytes(2 << 20)))
                stub.ReportRunner(report(2, restored=64), timeout=10)
            daemon.wait_written()
            with BlockClient(daemon.socket) as client:
                found = client.match(NS, TOKENS)
                assert found.rows == len(TOKENS)
                client.get(NS, found)
                damaged = [p for p in tmp_path.rglob(f"{blocks[1].key.hex()}.kvb")]
                for path in damaged:
                    path.chmod(0o600)
                    content = bytearray(path.read_bytes())
                    content[4096] ^= 1
                    path.write_bytes(content)
                    path.chmod(0o400)
                client.get(NS, found)
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()
            (tmp_path / "page").write_bytes(page)
            assert list(tmp_path.rglob("*.kvb.bad"))
    finally:
        os.umask(before)
    return daemon


def test_only_the_owner_may_read_what_is_stored_and_no_word_of_it_is_elsewhere(
    used: Talkative, tmp_path: Path
) -> None:
    places = [used.ram_dir, used.local_dir, used.socket.parent, tmp_path / "state/ollama-tiering"]
    assert (places[-1] / "ledger.json").is_file()
    seen = set()
    for path in [p for place in places for p in (place, *place.rglob("*"))]:
        mode = path.lstat().st_mode
        assert not mode & (stat.S_IRWXG | stat.S_IRWXO), (path, stat.filemode(mode))
        if stat.S_ISREG(mode):
            seen.add(path.suffix)
            if path.suffix not in HOLD_TOKENS:
                assert not told(path.read_bytes()), path
    assert {".kvb", ".bad", ".sqlite", ".json"} <= seen
    index = used.local_dir / "index.sqlite"
    assert told(index.read_bytes())  # as the page says; and the search finds what is there
    page = (tmp_path / "page").read_bytes()
    assert b"tiering_lookups_total" in page
    assert not told(page)
    assert NS.model.encode() not in page
    log = used.log.encode()
    assert b"call refused" in log
    assert b"damage reported" in log or b"damaged" in log
    assert not told(log)


def told(text: bytes) -> list[int]:
    """Tokens that are in the text, as number, as bytes or as hex digits."""
    return [
        token
        for token in TOKENS
        if str(token).encode() in text
        or tokens_to_bytes([token]) in text
        or tokens_to_bytes([token]).hex().encode() in text
    ]
