"""Sidecars that share a remote directory, as processes: what one wrote, the other gives out."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from measure.store import samples
from ollama_tiering.client import BlockClient
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.key import prefix_chain, tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.sidecar import PutStream, SidecarProcess

NS = samples.namespace("remote", kv_heads=4, head_dim=256)
TOKENS = list(range(42))
BLOCKS = samples.sequence(NS, TOKENS)


def sidecar(root: Path, name: str, encoding: str = "none", **options: Any) -> SidecarProcess:
    """RAM above the remote tier, so that every block goes there."""
    config = root / "config.toml"
    config.write_text(
        "[sidecar]\nmin_tokens = 1\ntail_seconds = 0\n"
        "remote_rescan_seconds = 1\nremote_deadline_seconds = 2\n"
        f'remote_dir = "{root / "remote"}"\nremote_budget = "64 MiB"\n'
        f'remote_encoding = "{encoding}"\nremote_key_file = "{root / "key" / "remote"}"\n'
    )
    if not (root / "remote").exists():
        (root / "remote").mkdir(mode=0o700)
    env = {"OLLAMA_TIERING_CONFIG": str(config)}
    (root / name).mkdir()
    return SidecarProcess(root / name, env=env, **{"ram_gb": 0.02, "local_gb": 0, **options})


def remote(stat: adm.StatResponse) -> adm.TierStat:
    assert stat.tiers[-1].tier == pb.TIER_REMOTE
    return stat.tiers[-1]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def written(root: Path) -> Iterator[SidecarProcess]:
    """A sidecar that runs, and whose blocks are all in the remote directory."""
    with sidecar(root, "one") as one:
        with one.channel() as channel:
            stream = PutStream(rpc.BlockStoreStub(channel), NS)
            assert all(result.stored for result in stream.put(BLOCKS))
            stream.close()
        one.wait(lambda stat: remote(stat).blocks == len(BLOCKS), "demoted to the remote tier")
        yield one


@pytest.fixture
def reader(root: Path, written: SidecarProcess) -> Iterator[SidecarProcess]:
    """Another one, with nothing of its own."""
    with sidecar(root, "two") as two:
        two.wait(lambda stat: remote(stat).blocks == len(BLOCKS), "seen by the other")
        yield two


def get(channel: grpc.Channel, *, inline: bool = False) -> list[pb.GetResponse]:
    keys = [block.key for block in BLOCKS]
    request = pb.GetRequest(namespace=NS.digest(), keys=keys, inline=inline)
    return list(rpc.BlockStoreStub(channel).Get(request, timeout=20))


def test_has_says_remote_and_get_names_files_in_ram(reader: SidecarProcess, root: Path) -> None:
    with reader.channel() as channel:
        data = tokens_to_bytes(TOKENS)
        request = pb.HasRequest(
            namespace=NS.digest(),
            keys=prefix_chain(NS.digest(), data, 4),
            tokens=data,
            block_tokens=4,
        )
        answer = rpc.BlockStoreStub(channel).Has(request, timeout=10)
        assert answer.matched_tokens == len(TOKENS)
        assert {block.tier for block in answer.blocks} == {pb.TIER_REMOTE}
        assert all(block.expected_seconds > 500e-6 for block in answer.blocks)
        answers = get(channel)
        assert [answer.key for answer in answers] == [block.key for block in BLOCKS]
        for given, block in zip(answers, BLOCKS, strict=True):
            assert given.found
            assert given.tier == pb.TIER_RAM
            assert Path(os.fsdecode(given.path)).is_relative_to(reader.ram_dir)
            assert Path(os.fsdecode(given.path)).read_bytes() == block.data
    assert not list((root / "remote").glob("v1/*/*/*.tmp"))


def test_get_inline_from_a_remote_copy(reader: SidecarProcess) -> None:
    with reader.channel() as channel:
        answers = get(channel, inline=True)
    assert b"".join(answer.part for answer in answers) == b"".join(block.data for block in BLOCKS)


def test_a_remote_tier_in_zstd_is_decoded_by_whoever_reads_it(root: Path) -> None:
    with sidecar(root, "one", "zstd") as one, one.channel() as channel:
        stream = PutStream(rpc.BlockStoreStub(channel), NS)
        assert all(result.stored for result in stream.put(BLOCKS))
        stream.close()
        stat = one.wait(lambda stat: remote(stat).blocks == len(BLOCKS), "demoted")
        assert remote(stat).encoding == "zstd"
        assert remote(stat).encoding_ratio > 1.05
    sizes = [path.stat().st_size for path in (root / "remote").rglob("*.kvb")]
    assert sum(sizes) < 0.9 * sum(len(block.data) for block in BLOCKS)
    with sidecar(root, "two", "none") as two, two.channel() as channel:
        two.wait(lambda stat: remote(stat).blocks == len(BLOCKS), "seen by the other")
        answers = get(channel, inline=True)
        assert b"".join(a.part for a in answers) == b"".join(block.data for block in BLOCKS)
        for given, block in zip(get(channel), BLOCKS, strict=True):
            assert given.tier == pb.TIER_RAM
            assert Path(os.fsdecode(given.path)).read_bytes() == block.data
        assert remote(two.stat()).decode_bytes_per_second > 0


def test_the_python_client_restores_from_the_remote_tier(reader: SidecarProcess) -> None:
    with BlockClient(reader.socket, fail_open=False) as client:
        match = client.match(NS, TOKENS)
        assert {block.tier for block in match.blocks} == {"remote"}
        with client.get(NS, match) as blocks:
            assert blocks.rows == len(TOKENS)


def test_status_shows_the_tier_its_state_and_the_sidecars(
    reader: SidecarProcess, written: SidecarProcess
) -> None:
    written.wait(lambda stat: remote(stat).sidecars == 2, "the neighbour is seen")
    command = [*written.command()[:3], "status", "--socket", str(written.socket)]
    environment = written.environment()
    run: dict[str, Any] = {"env": environment, "timeout": 30, "check": True, "text": True}
    text = subprocess.run(command, capture_output=True, **run).stdout
    line = next(line for line in text.splitlines() if line.strip().startswith("remote"))
    assert f"{len(BLOCKS)} blocks" in line
    assert line.endswith(", 2 sidecars")
    document = json.loads(subprocess.run([*command, "--json"], capture_output=True, **run).stdout)
    assert document["tiers"][-1]["state"] == "ok"
    assert document["tiers"][-1]["sidecars"] == 2


def test_a_sidecar_starts_serves_and_stops_with_an_unusable_remote_directory(root: Path) -> None:
    (root / "remote").write_text("no directory")
    start = time.monotonic()
    with sidecar(root, "one") as one:
        with one.channel() as channel:
            stream = PutStream(rpc.BlockStoreStub(channel), NS)
            assert all(result.stored for result in stream.put(BLOCKS))
            stream.close()
            assert len([answer for answer in get(channel) if answer.found]) == len(BLOCKS)
        stat = one.wait(lambda stat: remote(stat).state == "resting", "resting")
        assert remote(stat).failures
        assert remote(stat).resting_seconds > 0
        assert one.stop() == 0
    assert time.monotonic() - start < 60
    assert (root / "remote").read_text() == "no directory"


def test_a_stop_takes_back_the_announcement(written: SidecarProcess, root: Path) -> None:
    assert list((root / "remote").glob(".sidecar-*"))
    assert written.stop() == 0
    assert not list((root / "remote").glob(".sidecar-*"))
