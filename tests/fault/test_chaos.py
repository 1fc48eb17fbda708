"""kill -9 of a sidecar at random moments while four clients put and get, again and again.

Fifty times here, a thousand times with `make chaos`. After each kill the directories are opened and
everything in them is looked at: whole, right byte for byte, within budget, and nothing that had
reached the disk is missing from the books.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from pathlib import Path

import pytest

from ollama_tiering.client import BlockClient
from ollama_tiering.errors import TieringError
from ollama_tiering.store.block.blockfile import buffer_reader, read_meta, verify_payload
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.names import INDEX_NAME
from tests.fault.test_many_clients import Worker, row
from tests.sidecar import SidecarProcess
from tests.tokens import tokens_from_bytes

pytestmark = [pytest.mark.fault, pytest.mark.slow]

KILLS = int(os.environ.get("TIERING_CHAOS", "50"))
RAM_BYTES, LOCAL_BYTES = 4 << 20, 72 << 20
START_SECONDS = 5.0
CLIENTS = 4


class Client(Worker):
    """Goes on until told to stop; that the sidecar is gone is no error, wrong bytes are."""

    def __init__(self, socket: Path, seed: int, stop: threading.Event) -> None:
        super().__init__(socket, seed, until=float("inf"))
        self.client.close()
        self.client = BlockClient(socket, inline=seed % 4 == 3, lookup_seconds=2)
        self.stop = stop

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                with contextlib.suppress(TieringError, OSError):
                    self.once()
        except BaseException as error:
            self.error = error
        finally:
            self.client.close()


def physical_bytes(root: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in [root, *root.rglob("*")])


def check(root: Path, seen: set[str]) -> tuple[float, int]:
    """Seconds to open what was left, and how many blocks there are. `seen` were right before."""
    for directory, budget in (("ram", RAM_BYTES), ("local", LOCAL_BYTES)):
        assert physical_bytes(root / directory) <= budget, directory
    on_disk = {path.stem for path in (root / "local").rglob("*.kvb")}
    tiers: list[tuple[Tier, int]] = [
        (FsTier(TierKind.RAM, root / "ram"), RAM_BYTES),
        (FsTier(TierKind.LOCAL, root / "local"), LOCAL_BYTES),
    ]
    started = time.perf_counter()
    store = TieredStore(
        tiers, index_path=root / "local" / INDEX_NAME, measure=False, background=False
    )
    seconds = time.perf_counter() - started
    try:
        assert {key.hex() for key in store._state.levels[1].lru} == on_disk
        assert not [*root.rglob("*.bad"), *(root / "local" / "v1").rglob("*.tmp")]
        for tier, budget in tiers:
            assert tier.directory is not None
            assert physical_bytes(tier.directory) <= budget
            for path in tier.directory.rglob("*.kvb"):
                if str(path) not in seen:
                    look_at(store, path)
                    seen.add(str(path))
        return seconds, len(store._state.tree)
    finally:
        store.close(drain_seconds=0)


def look_at(store: TieredStore, path: Path) -> None:
    data = path.read_bytes()
    meta = read_meta(buffer_reader(data), len(data))
    verify_payload(meta, buffer_reader(data))
    assert path.stem == meta.key.hex()
    chain = [*store._state.tree.ancestors(meta.key)][::-1]
    tokens = [token for record in chain for token in tokens_from_bytes(record.tokens)]
    if len(tokens) != meta.first_position + meta.rows:
        return  # what comes before it was not written down yet
    for segment in meta.segments:
        kind = "k" if segment.kind == 1 else "v"
        for at in range(meta.rows):
            start = segment.file_offset + at * segment.row_bytes
            expected = row(tokens[: meta.first_position + at + 1], kind).tobytes()
            assert data[start : start + segment.row_bytes] == expected


@pytest.mark.timeout(120 + 10 * KILLS)
def test_killed_again_and_again_it_loses_nothing_and_never_lies(tmp_path: Path) -> None:
    rng = random.Random(11)
    gib = 1 << 30
    settings = {"daily_write": 0, "tail_seconds": 0.2}
    daemon = SidecarProcess(
        tmp_path, ram_gb=RAM_BYTES / gib, local_gb=LOCAL_BYTES / gib, settings=settings
    )
    seen: set[str] = set()
    slowest = 0.0
    blocks = restored_rows = 0
    for kill in range(KILLS):
        stop = threading.Event()
        daemon.start()
        clients = [Client(daemon.socket, CLIENTS * kill + n, stop) for n in range(CLIENTS)]
        for client in clients:
            client.start()
        time.sleep(rng.uniform(0.0, 0.8))
        daemon.kill()
        stop.set()
        for client in clients:
            client.join(60)
            assert not client.is_alive()
            assert client.error is None, client.error
            restored_rows += client.restored_rows
        assert "Traceback" not in daemon.log, daemon.log
        seconds, blocks = check(tmp_path, seen)
        slowest = max(slowest, seconds)
    assert blocks > 0
    assert restored_rows > 0
    assert slowest <= START_SECONDS
    print(
        f"{KILLS} kills, {len(seen)} files looked at, {blocks} blocks left, start {slowest:.2f} s"
    )
