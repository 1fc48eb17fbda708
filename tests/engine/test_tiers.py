"""Every tier as the only one that holds the blocks, raw and compressed: the answer of memory, bit
for bit.

Blocks reach the tier in the ordinary way; then both processes end, the other tiers are emptied, and
both start again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.engine.conftest import make_fast
from tests.engine.harness import Server, Sidecar, assert_same, in_memory, text, wait_until

TOKENS = 700


@dataclass(frozen=True)
class Case:
    """Which tier is left; `settings` are lines of [sidecar]."""

    name: str
    tier: pb.Tier.ValueType
    ram_gb: float = 1.0
    local_gb: float = 2.0
    settings: dict[str, object] = field(default_factory=dict)

    @property
    def remote(self) -> bool:
        return self.tier == pb.TIER_REMOTE


ZSTD = {"local_encoding": "zstd"}
CASES = (
    Case("ram alone", pb.TIER_RAM, local_gb=0),
    Case("local", pb.TIER_LOCAL),
    Case("local alone", pb.TIER_LOCAL, ram_gb=0),
    Case("local in zstd", pb.TIER_LOCAL, settings=ZSTD),
    Case("remote", pb.TIER_REMOTE, local_gb=0),
    Case("remote in zstd", pb.TIER_REMOTE, local_gb=0, settings={"remote_encoding": "zstd"}),
)


def make_sidecar(folder: Path, fast: Path, case: Case) -> Sidecar:
    settings = {"tail_seconds": 0, **case.settings}
    if case.remote:
        remote = folder / "remote"
        remote.mkdir(parents=True)
        settings |= {"remote_dir": str(remote), "remote_budget": "1GiB", "remote_rescan_seconds": 1}
    sidecar = Sidecar(folder, fast, ram_gb=case.ram_gb, local_gb=case.local_gb)
    lines = [f"{key} = {value!r}".replace("'", '"') for key, value in settings.items()]
    sidecar.settings.write_text("\n".join(["[sidecar]", *lines, ""]))
    return sidecar


@pytest.fixture(scope="module")
def reference(
    binary: Path, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("reference")
    with Server(binary, folder, models, env={"OLLAMA_FLASH_ATTENTION": 1}) as server:
        yield server


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_tier_alone_gives_the_answer_of_memory(
    binary: Path, models: Path, reference: Server, tmp_path: Path, case: Case
) -> None:
    prompt = text(TOKENS, case.name)
    expected = in_memory(reference, "g2", prompt, TOKENS - 1)
    fast = make_fast()
    env = {"OLLAMA_FLASH_ATTENTION": 1}
    try:
        with make_sidecar(tmp_path / "sidecar", fast, case) as sidecar:
            server = Server(binary, tmp_path / "server", models, socket=sidecar.socket, env=env)
            with server:
                server.generate("g2", prompt)
                sidecar.settle(server, "g2")
                needed = sidecar.report(server.runner_pid("g2")).snapshot_blocks
                assert needed >= TOKENS // 64

                def stored() -> int:
                    return {t.tier: t.blocks for t in sidecar.stat().tiers}.get(case.tier, 0)

                wait_until("the tier holds all of it", lambda: stored() >= needed)
                server.stop()
                sidecar.stop()
                for tier, folder in (
                    (pb.TIER_RAM, sidecar.ram_dir),
                    (pb.TIER_LOCAL, sidecar.local_dir),
                ):
                    if tier != case.tier and folder.exists():
                        shutil.rmtree(folder)
                sidecar.start()
                wait_until("the tier is known", lambda: stored() >= needed)
                held = {t.tier: t.blocks for t in sidecar.stat().tiers if t.blocks}
                assert set(held) == {case.tier}
                server.start()
                answer = server.generate("g2", prompt)
                assert_same(answer, expected, case.name)
                if "zstd" in case.name:
                    (tier,) = [t for t in sidecar.stat().tiers if t.tier == case.tier]
                    assert tier.encoding == "zstd"
    finally:
        shutil.rmtree(fast)
