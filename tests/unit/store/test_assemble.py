"""Where memory is short: the store works without a RAM tier, and says so once."""

from __future__ import annotations

import logging
import os
import types
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering.config import MIB
from ollama_tiering.store import assemble
from ollama_tiering.store.serving.session import Outcome
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.names import INDEX_NAME
from tests.contract.toy_tier import ToyTier
from tests.unit.store.from_settings import config, kinds, opened

NS = samples.namespace()


def sized(monkeypatch: pytest.MonkeyPatch, *, ram_bytes: int, memory: bool = True) -> None:
    """What the RAM tier's file system is and has."""
    real = os.statvfs

    def statvfs(path: object) -> object:
        if not str(path).endswith("ram"):
            return real(path)  # type: ignore[arg-type]
        blocks = ram_bytes // 4096
        return types.SimpleNamespace(f_blocks=blocks, f_bavail=blocks, f_frsize=4096)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(assemble, "in_memory", lambda path: memory)


def test_a_large_tmpfs_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sized(monkeypatch, ram_bytes=1024 * MIB)
    assert kinds(config(tmp_path)) == [TierKind.RAM, TierKind.LOCAL]


@pytest.mark.parametrize("case", ["64 MB of a container", "no tmpfs at all"])
def test_without_a_tmpfs_worth_it_writers_fill_files_on_the_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    case: str,
) -> None:
    small = case.startswith("64")
    sized(monkeypatch, ram_bytes=(64 if small else 4096) * MIB, memory=small)
    place = tmp_path / "ram" if small else None  # ram_place found none
    with caplog.at_level(logging.WARNING, "ollama_tiering"):
        store = opened(config(tmp_path, ram_dir=place))
    try:
        assert [tier.kind for tier in store.report().tiers] == [TierKind.LOCAL]
        assert [r.message.startswith("no RAM tier") for r in caplog.records] == [True]
        session = store.open_session(NS.digest(), NS.fields(), int(NS.block_tokens))
        (block,) = samples.sequence(NS, [1, 2])
        (reserved,) = session.reserve([block.offer])
        assert reserved.outcome is Outcome.RESERVED
        assert reserved.path is not None
        assert reserved.path.is_relative_to(tmp_path / "local")
        reserved.path.write_bytes(block.data)
        assert session.commit([reserved.reservation_id])[0].stored
        leased = store.lease(NS.digest(), [block.key])
        assert [held.tier for held in leased.blocks] == [TierKind.LOCAL]
    finally:
        store.close()


def test_a_directory_that_was_named_is_used_even_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sized(monkeypatch, ram_bytes=1024 * MIB, memory=False)
    assert kinds(config(tmp_path)) == [TierKind.RAM, TierKind.LOCAL]
    assert "no faster than the local tier" in caplog.text


def test_a_small_ram_budget_that_was_asked_for_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sized(monkeypatch, ram_bytes=64 * MIB)
    assert kinds(config(tmp_path, ram_budget_bytes=32 * MIB)) == [TierKind.RAM, TierKind.LOCAL]


def test_ram_alone_is_kept_however_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sized(monkeypatch, ram_bytes=64 * MIB)
    assert kinds(config(tmp_path, local_budget_bytes=0)) == [TierKind.RAM]


def test_a_small_local_tier_has_no_index_and_loses_an_old_one(tmp_path: Path) -> None:
    settings = config(tmp_path, ram_budget_bytes=0)
    opened(settings).close()
    assert (tmp_path / "local" / INDEX_NAME).exists()
    opened(config(tmp_path, ram_budget_bytes=0, local_budget_bytes=32 * MIB)).close()
    assert not (tmp_path / "local" / INDEX_NAME).exists()


def test_the_queue_is_at_most_half_of_ram(tmp_path: Path) -> None:
    store = opened(config(tmp_path, write_queue_bytes=1 << 40))
    try:
        assert store._state.policy.queue_bytes == 256 * MIB
    finally:
        store.close()


def test_an_index_lies_beside_files_only() -> None:
    assert assemble.index_path([(ToyTier(), 512 * MIB)]) is None
    assert assemble.index_path([]) is None
