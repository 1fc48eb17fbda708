"""In a container with little memory nothing of ours takes the model's."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ollama_tiering.cli.reach import memory_of
from ollama_tiering.client import BlockClient, Namespace
from ollama_tiering.config import MIB, format_size
from ollama_tiering.launch.block_service import ask
from ollama_tiering.store import LayerSpec
from ollama_tiering.store import block_store_pb2 as pb
from tests.integration.test_up import Place
from tests.memory_group import MemoryGroup, memory_group
from tests.places import short_directory, tmpfs_directory
from tests.sidecar import SidecarProcess

pytestmark = pytest.mark.slow

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")  # the kernel keeps limits in whole pages

NAMESPACE = Namespace.of(
    model="m",
    engine="test/1",
    cache_dtype="f16",
    layers=[LayerSpec(0, 0, 1, 1 << 14, 1 << 14)],
    block_tokens=64,
)


class InGroup(SidecarProcess):
    group: MemoryGroup

    def command(self) -> list[str]:
        return self.group.entering(*super().command())


@pytest.mark.parametrize("limit_bytes", [220_000_000, 500_000_000, 1_000_000_000])
def test_a_ram_tier_that_was_asked_for_too_large_does_not_kill(
    tmp_path: Path, limit_bytes: int
) -> None:
    with memory_group(limit_bytes) as group, tmpfs_directory() as fast:
        daemon = InGroup(tmp_path, ram_gb=6.0, local_gb=0.0, fast=fast)
        daemon.group = group
        if limit_bytes < 256 * MIB:
            daemon.budgets = (6.0, 0.05)
        with daemon, BlockClient(daemon.socket, inline=True, transfer_seconds=60) as client:
            rows = np.zeros((64, 1 << 14), np.float16)  # 2 MiB, and as much again for V
            for first in range(80):
                tokens = list(range(first * 1000, first * 1000 + 64 * 2))
                client.put(NAMESPACE, tokens, lambda _: {(0, "k"): rows, (0, "v"): rows})
            stat = daemon.stat()
            ram = [tier for tier in stat.tiers if tier.tier == pb.TIER_RAM]
            most = max(0, limit_bytes - 256 * MIB) // 2
            assert sum(tier.budget_bytes for tier in ram) <= most
            assert stat.put_bytes > most
            limit = memory_of(daemon.socket)
            assert limit is not None
            assert limit.limit_bytes == limit_bytes // PAGE_BYTES * PAGE_BYTES
        assert group.killed == 0


@pytest.mark.parametrize("limit_bytes", [220_000_000, 500_000_000, 1_000_000_000])
def test_up_serves_whatever_the_group_may_have(limit_bytes: int) -> None:
    with short_directory() as short, memory_group(limit_bytes) as group:
        place = Place(short / "root")
        place.entering = group.entering  # type: ignore[method-assign]
        place.env.pop("OLLAMA_KV_TIER_RAM")
        try:
            running = place.up_and_ready()
            answer = ask(place.socket)
            stock = [line for line in running.lines if "Ollama serves as stock" in line]
            if limit_bytes < 384 * MIB:
                assert answer is None
                limit = format_size(limit_bytes // PAGE_BYTES * PAGE_BYTES)
                assert f"this memory group may have {limit}" in stock[0]
            else:
                assert answer is not None, running.lines
                assert not stock
                budgets = [t.budget_bytes for t in answer.tiers if t.tier == pb.TIER_RAM]
                assert sum(budgets) <= (limit_bytes - 256 * MIB) // 4
            assert place.events == ["serve started"]
            running.end()
        finally:
            place.close()
        assert group.killed == 0
