"""A directory that machines share: what others put there, and what was removed meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.store.block.key import prefix_chain, tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.sidecar import PutStream, SidecarProcess
from tests.unit.store.forgeries import FORGERIES, forged, overwrite, path_of
from tests.unit.store.spoilers import SPOILERS

pytestmark = pytest.mark.fault

NS = samples.namespace("shared", kv_heads=4, head_dim=256)
TOKENS = list(range(5_000_000, 5_000_012))
BLOCKS = samples.sequence(NS, TOKENS)


class Share:
    """Two sidecars on one directory; `reader` has nothing but what it finds there."""

    def __init__(self, root: Path, *, mac: bool = True) -> None:
        self.root = root
        self.directory = root / "remote"
        self.directory.mkdir(mode=0o700)
        self.mac = mac

    def sidecar(self, name: str, *, local_gb: float = 0, key: str = "key") -> SidecarProcess:
        (self.root / name).mkdir(exist_ok=True)
        settings = {
            "remote_dir": str(self.directory),
            "remote_budget": "64 MiB",
            "remote_rescan_seconds": 1,
            "remote_deadline_seconds": 20,  # of staging too, on a machine with other work
            "remote_mac": self.mac,
            "remote_key_file": str(self.root / key / "remote"),
            "high_watermark": 0.1,
            "low_watermark": 0.0,
        }
        return SidecarProcess(self.root / name, ram_gb=0.02, local_gb=local_gb, settings=settings)

    def filled(self, writer: SidecarProcess) -> None:
        """Everything the writer has lies in the directory too."""
        with writer.channel() as channel:
            stream = PutStream(rpc.BlockStoreStub(channel), NS)
            assert all(result.stored for result in stream.put(BLOCKS))
            stream.close()
        writer.wait(lambda stat: stat.tiers[-1].blocks == len(BLOCKS), "in the shared directory")


def matched(daemon: SidecarProcess) -> int:
    data = tokens_to_bytes(TOKENS)
    keys = prefix_chain(NS.digest(), data, 4)
    request = pb.HasRequest(namespace=NS.digest(), keys=keys, tokens=data, block_tokens=4)
    with daemon.channel() as channel:
        return int(rpc.BlockStoreStub(channel).Has(request, timeout=10).matched_tokens)


def served(daemon: SidecarProcess) -> list[bytes]:
    """The files a client would read, from the first on."""
    keys = [block.key for block in BLOCKS]
    with daemon.channel() as channel:
        request = pb.GetRequest(namespace=NS.digest(), keys=keys)
        answers = list(rpc.BlockStoreStub(channel).Get(request, timeout=20))
        return [Path(os.fsdecode(answer.path)).read_bytes() for answer in answers if answer.found]


@pytest.fixture
def share(tmp_path: Path) -> Share:
    return Share(tmp_path)


@pytest.mark.parametrize("forge", [*FORGERIES, *SPOILERS])
def test_a_forged_block_never_reaches_a_client(
    share: Share, forge: Callable[..., bytes | None]
) -> None:
    with share.sidecar("writer") as writer:
        share.filled(writer)
    path = path_of(share.directory, BLOCKS[1])
    if forge in SPOILERS:  # right in every byte, MAC included, but another user could change it
        forge(path)
    else:
        overwrite(path, forge(path, BLOCKS[1]) or b"")
    planted = path.read_bytes()
    with share.sidecar("reader") as reader:
        reader.wait(lambda stat: stat.tiers[-1].state == "ok", "looked at")
        for _ in range(2):
            assert served(reader) == [BLOCKS[0].data]
        misses = reader.stat().misses
        assert misses["not ours" if forge in SPOILERS else "not authentic"] >= 1
        assert reader.said("neither used nor removed") == 1
        assert reader.stat().tiers[-1].state == "ok"  # the rest of the tier is used
    assert path.read_bytes() == planted


def test_refused_by_name_a_forged_block_is_what_it_costs(tmp_path: Path) -> None:
    """The control: without a MAC nothing but checksums stands between."""
    share = Share(tmp_path, mac=False)
    with share.sidecar("writer") as writer:
        share.filled(writer)
    overwrite(path_of(share.directory, BLOCKS[1]), forged(BLOCKS[1]))
    with share.sidecar("reader") as reader:
        reader.wait(lambda stat: stat.tiers[-1].blocks == len(BLOCKS), "looked at")
        assert served(reader)[1] == forged(BLOCKS[1])


def test_a_machine_with_another_key_is_told_what_to_do(share: Share) -> None:
    with share.sidecar("writer") as writer:
        share.filled(writer)
    with share.sidecar("reader", key="other") as reader:
        reader.wait(lambda stat: stat.misses["not authentic"] == len(BLOCKS), "looked at")
        assert served(reader) == []
        assert reader.said(f"copy it to {share.root / 'other' / 'remote'} (mode 0600)")
    (share.root / "other" / "remote").write_bytes((share.root / "key" / "remote").read_bytes())
    with share.sidecar("reader", key="other") as reader:
        reader.wait(lambda stat: stat.tiers[-1].blocks == len(BLOCKS), "looked at")
        assert served(reader) == [block.data for block in BLOCKS]


def tool(daemon: SidecarProcess, *args: str) -> subprocess.CompletedProcess[str]:
    command = [*daemon.command()[:3], *args]
    env = daemon.environment() | {
        "OLLAMA_KV_TIER_SOCKET": str(daemon.socket),
        "OLLAMA_KV_TIER_RAM": str(daemon.ram_dir),
        "OLLAMA_KV_TIER_LOCAL": str(daemon.local_dir),
        "OLLAMA_KV_TIER_RAM_GB": str(daemon.budgets[0]),
        "OLLAMA_KV_TIER_LOCAL_GB": str(daemon.budgets[1]),
    }
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)


@pytest.mark.parametrize("way", ["sidecar", "sidecar killed", "files"])
def test_what_was_removed_while_the_directory_was_away_never_comes_back(
    share: Share, way: str
) -> None:
    gone = share.root / "gone"
    daemon = share.sidecar("writer", local_gb=0.001)
    with daemon:
        share.filled(daemon)
        if way == "files":
            daemon.stop()
        share.directory.rename(gone)
        if way != "files":
            daemon.wait(lambda stat: stat.tiers[-1].state == "resting", "seen to be away")
        said = json.loads(tool(daemon, "rm", "--all", "--yes", "--json").stdout)
        assert said["blocks"] == said["waiting_blocks"] == len(BLOCKS)
        assert said["waiting_for"]
        assert json.loads(tool(daemon, "ls", "--json").stdout)["chains"] == []
        if way == "sidecar":
            assert matched(daemon) == 0
            daemon.stop()
        elif way == "sidecar killed":
            daemon.kill()
    traces = [p for p in share.root.joinpath("writer").rglob("*") if p.is_file() and holds(p)]
    assert traces == []
    assert any(holds(path) for path in gone.rglob("*.kvb"))
    with daemon:
        assert matched(daemon) == 0
        gone.rename(share.directory)
        daemon.wait(
            lambda stat: stat.tiers[-1].state == "ok" and not list(share.directory.rglob("*.kvb")),
            "removed there",
        )
        assert matched(daemon) == 0
        assert served(daemon) == []
    assert not any(holds(path) for path in share.directory.rglob("*") if path.is_file())


def holds(path: Path) -> bool:
    content = path.read_bytes()
    return any(tokens_to_bytes(TOKENS[at : at + 4]) in content for at in range(0, 12, 4))


def test_while_it_is_away_rm_says_so_to_a_person(share: Share) -> None:
    daemon = share.sidecar("writer", local_gb=0.001)
    with daemon:
        share.filled(daemon)
        share.directory.rename(share.root / "gone")
        daemon.wait(lambda stat: stat.tiers[-1].state == "resting", "seen to be away")
        said = tool(daemon, "rm", "--all", "--yes").stdout
    assert "on the remote tier 3 blocks may stay for now, not used any more" in said
    assert "is tried again in" in said
