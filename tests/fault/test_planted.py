"""Links, pipes and devices in a tier's directory: never followed, never waited for."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.tiers.directory import DESCRIPTION_NAME, LOCK_NAME, VERSION_DIRECTORY
from ollama_tiering.store.tiers.names import INDEX_NAME, PINS_NAME, PROBE_PREFIX, WRITTEN_NAME
from tests.fault.abuse import NS, store
from tests.fault.planted import plant
from tests.sidecar import SidecarProcess

pytestmark = pytest.mark.fault

KINDS = ("link", "fifo", "device")
TOKENS = list(range(12))
OTHER = samples.namespace("other", layers=1)
QUICK_SECONDS = 10.0  # of a start, however much is planted


@pytest.fixture
def filled(tmp_path: Path) -> SidecarProcess:
    """A sidecar that has stored something and is stopped."""
    daemon = SidecarProcess(tmp_path)
    with daemon:
        store(daemon, NS, TOKENS)
        daemon.wait_written()
    return daemon


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    directory = tmp_path / "outside"
    directory.mkdir(mode=0o700)
    (directory / "precious").write_text("mine")
    return directory


def check_outside(outside: Path) -> None:
    assert [path.name for path in outside.iterdir()] == ["precious"]
    assert (outside / "precious").read_text() == "mine"


def found(daemon: SidecarProcess, blocks: list[samples.SampleBlock]) -> list[bool]:
    with daemon.channel() as channel:
        get = pb.GetRequest(namespace=NS.digest(), keys=[b.key for b in blocks], inline=True)
        return [answer.found for answer in rpc.BlockStoreStub(channel).Get(get, timeout=10)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sidecar_starts_and_serves_beside_whatever_is_planted(
    filled: SidecarProcess, outside: Path, kind: str
) -> None:
    blocks = samples.sequence(NS, TOKENS)
    namespace = NS.digest().hex()
    for tier in (filled.ram_dir, filled.local_dir):
        root = tier / VERSION_DIRECTORY
        key = blocks[-1].key.hex()
        shard = root / namespace / key[:2]
        plant(shard / f"{key}.kvb", kind, outside / "precious")
        plant(shard / f"{key}.kvb.bad", kind, outside / "precious")
        plant(shard / f"{key}.0123.tmp", kind, outside / "precious")
        plant(root / namespace / DESCRIPTION_NAME, kind, outside / "precious")
        plant(root / namespace / "00", kind, outside)
        plant(root / ("ab" * 32), kind, outside)
        plant(root / OTHER.digest().hex(), kind, outside)
        plant(tier / "v2", kind, outside)
        plant(tier / f"{PROBE_PREFIX}x", kind, outside / "precious")
    if kind != "link":  # then it does not start: see below
        plant(filled.local_dir / PINS_NAME, kind, outside / "precious")
    plant(filled.local_dir / WRITTEN_NAME, kind, outside / "precious")
    start = time.monotonic()
    with filled:
        assert time.monotonic() - start < QUICK_SECONDS
        assert found(filled, blocks) == [True, True, False]
        with filled.channel() as channel:
            stub = rpc.BlockStoreStub(channel)
            corrupt = pb.ReportCorruptRequest(namespace=NS.digest(), key=blocks[-1].key)
            assert not stub.ReportCorrupt(corrupt, timeout=10).quarantined
            lines = [
                line
                for answer in stub.Verify(adm.VerifyRequest(repair=True), timeout=30)
                for line in answer.findings
            ]
            assert {line.what for line in lines} <= {"foreign", "temporary", "quarantined"}
            stub.Collect(adm.CollectRequest(), timeout=30)
            stub.Pin(adm.PinRequest(id=blocks[1].key.hex()), timeout=10)
        store(filled, NS, [*range(8), 60, 61])
        stat = filled.wait_written()
        assert all(not tier.failures for tier in stat.tiers), stat.tiers
        assert filled.stop() == 0
    check_outside(outside)
    assert "Traceback" not in filled.log, filled.log


@pytest.mark.parametrize("kind", KINDS)
def test_a_namespace_whose_place_is_taken_is_not_stored_and_others_are(
    filled: SidecarProcess, outside: Path, kind: str
) -> None:
    for tier in (filled.ram_dir, filled.local_dir):
        plant(tier / VERSION_DIRECTORY / OTHER.digest().hex(), kind, outside)
    with filled:
        with filled.channel() as channel:
            stub = rpc.BlockStoreStub(channel)
            fields = [pb.NamespaceField(name=n, value=v) for n, v in OTHER.fields()]
            opened = pb.PutOpen(
                namespace=OTHER.digest(),
                description=pb.Namespace(fields=fields),
                block_tokens=4,
            )
            (block,) = samples.sequence(OTHER, [1])
            offer = pb.BlockOffer(
                key=block.key, parent=block.parent, file_bytes=len(block.data), tail=True
            )
            requests = [
                pb.PutRequest(open=opened),
                pb.PutRequest(reserve=pb.PutReserve(offers=[offer])),
            ]
            (answer,) = stub.Put(iter(requests), timeout=10)
            (reservation,) = answer.reserved.reservations
            assert reservation.outcome == pb.Reservation.OUTCOME_NO_ROOM
        filled.wait(lambda stat: not any(tier.state == "resting" for tier in stat.tiers), "rested")
        store(filled, NS, [900, 901])
    check_outside(outside)


def outcome(daemon: SidecarProcess) -> tuple[int | None, str]:
    """Exit status and output of a sidecar; None when it serves."""
    process = daemon.launch()
    try:
        said, _ = process.communicate(timeout=QUICK_SECONDS / 2)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        process.terminate()
        said, _ = process.communicate(timeout=20)
        return None, said


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [LOCK_NAME, VERSION_DIRECTORY])
def test_a_lock_or_directory_that_is_none_is_refused(
    filled: SidecarProcess, outside: Path, kind: str, name: str
) -> None:
    plant(filled.local_dir / name, kind, outside / "precious" if name == LOCK_NAME else outside)
    code, said = outcome(filled)
    assert code == 9, said
    assert f"{filled.local_dir / name}" in said
    assert "hint: " in said
    assert "Traceback" not in said
    check_outside(outside)


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_that_is_no_file_is_replaced_or_done_without(
    filled: SidecarProcess, outside: Path, kind: str
) -> None:
    plant(filled.local_dir / INDEX_NAME, kind, outside / "precious")
    code, said = outcome(filled)
    assert code is None, said
    assert "sidecar ready" in said
    assert "Traceback" not in said
    check_outside(outside)


def test_pins_behind_a_link_stop_the_start(filled: SidecarProcess, outside: Path) -> None:
    """Going on without them could evict what a person pinned."""
    plant(filled.local_dir / PINS_NAME, "link", outside / "precious")
    code, said = outcome(filled)
    assert code == 9, said
    assert f"{filled.local_dir / PINS_NAME} is a link" in said
    assert "hint: " in said
    assert "Traceback" not in said
    check_outside(outside)
