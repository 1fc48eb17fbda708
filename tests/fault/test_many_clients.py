"""Several clients at once on tiers too small for them: never wrong bytes, budgets hold."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ollama_tiering.client import BlockClient, Namespace
from ollama_tiering.store.block.key import LayerSpec
from tests.sidecar import SidecarProcess

pytestmark = pytest.mark.fault

BLOCK, WIDTH, CLIENTS, SECONDS = 16, 2048, 4, 5.0
NS = Namespace.of(
    model="many",
    engine="test/1",
    cache_dtype="f16",
    layers=[LayerSpec(0, 0, 1, WIDTH, WIDTH)],
    block_tokens=BLOCK,
)


def row(tokens: list[int], kind: str) -> NDArray[Any]:
    """What stands at the last of these tokens: it follows from all of them."""
    state = hashlib.shake_128(f"{kind}{tokens}".encode()).digest(32)
    return np.tile(np.frombuffer(state, np.float16), WIDTH // 16)


class Worker(threading.Thread):
    def __init__(self, socket: Path, seed: int, until: float) -> None:
        super().__init__()
        self.client = BlockClient(socket, fail_open=False, inline=seed % 4 == 3, lookup_seconds=20)
        self.rng = random.Random(seed)
        self.until = until
        self.restored_rows = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while time.monotonic() < self.until:
                self.once()
        except BaseException as error:
            self.error = error
        finally:
            self.client.close()

    def once(self) -> None:
        prompt = [self.rng.randrange(3)] * 20 + [self.rng.randrange(4) for _ in range(60)]
        prompt = prompt[: self.rng.randrange(1, 80)]
        match = self.client.match(NS, prompt)
        with self.client.get(NS, match) as blocks:
            for block in blocks:
                for at in range(block.rows):
                    tokens = prompt[: block.first_position + at + 1]
                    for kind in "kv":
                        stored = block.array(0, kind)[at]
                        assert stored.tobytes() == row(tokens, kind).tobytes()
                self.restored_rows += block.rows
        self.client.put(NS, prompt, lambda index: self.segments(prompt, index))
        if self.rng.random() < 0.1:
            self.client.remove_seq(NS, prompt)

    def segments(self, prompt: list[int], index: int) -> dict[tuple[int, str], NDArray[Any]]:
        places = range(index * BLOCK, min((index + 1) * BLOCK, len(prompt)))
        return {(0, k): np.stack([row(prompt[: at + 1], k) for at in places]) for k in "kv"}


def test_many_clients_on_small_tiers_get_right_bytes_only(tmp_path: Path) -> None:
    mib = 1 / 1024
    with SidecarProcess(tmp_path, ram_gb=3 * mib, local_gb=6 * mib) as daemon:
        until = time.monotonic() + SECONDS
        workers = [Worker(daemon.socket, seed, until) for seed in range(CLIENTS)]
        for worker in workers:
            worker.start()
        while time.monotonic() < until:
            for tier in daemon.stat().tiers:
                assert tier.used_bytes + tier.reserved_bytes <= tier.budget_bytes
        for worker in workers:
            worker.join(60)
            assert worker.error is None, worker.error
        assert sum(worker.restored_rows for worker in workers) > 0
        daemon.wait_written()
        stat = daemon.wait(
            lambda stat: all(tier.reserved_bytes == 0 for tier in stat.tiers), "nothing is reserved"
        )
        assert sum(tier.evicted_blocks for tier in stat.tiers) > 0
        assert all(tier.quarantined_blocks == 0 for tier in stat.tiers)
        assert stat.open_leases == 0
        for tier in stat.tiers:
            files = [*Path(os.fsdecode(tier.directory)).rglob("*.kvb")]
            assert len(files) == tier.blocks
            assert sum(file.stat().st_blocks * 512 for file in files) <= tier.budget_bytes
    assert "Traceback" not in daemon.log, daemon.log
