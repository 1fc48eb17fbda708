"""`tiering up` says in one line where what it computes is kept, and why there is no RAM tier."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from ollama_tiering.config import GIB, MIB, SidecarConfig
from ollama_tiering.launch.tiers_told import in_words, tiers_told
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store import block_store_pb2 as pb

DISK = adm.TierStat(tier=pb.TIER_LOCAL, directory=b"/data/blocks", budget_bytes=32 * GIB)
RAM = adm.TierStat(tier=pb.TIER_RAM, directory=b"/dev/shm/x", budget_bytes=2 * GIB)


def settings(ram_bytes: int = 2 * GIB, ram_dir: Path | None = None) -> SidecarConfig:
    return SidecarConfig(Path("/s"), ram_dir, ram_bytes, Path("/data/blocks"), 32 * GIB)


def with_shared_memory(monkeypatch: pytest.MonkeyPatch, has_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=has_bytes))


def test_each_tier_is_told_with_its_size_and_place() -> None:
    said = in_words(adm.StatResponse(tiers=[RAM, DISK]), settings())
    assert said == "RAM 2.0 GiB in /dev/shm/x, disk 32.0 GiB in /data/blocks"


def test_a_containers_64_megabytes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with_shared_memory(monkeypatch, 64 * MIB)
    said = in_words(adm.StatResponse(tiers=[DISK]), settings())
    assert said == (
        "disk 32.0 GiB in /data/blocks, "
        "no RAM tier: /dev/shm has 64.0 MiB, one takes 128.0 MiB or more"
    )


def test_another_reason_is_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    with_shared_memory(monkeypatch, 4 * GIB)
    assert in_words(adm.StatResponse(tiers=[DISK]), settings()).endswith("log says why")


def test_a_place_that_is_not_there_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    said = in_words(adm.StatResponse(tiers=[DISK]), settings(ram_dir=gone))
    assert said.endswith(f"no RAM tier: {gone}: {os.strerror(2)}")


def test_one_that_nobody_wants_is_not_missed() -> None:
    assert "RAM" not in in_words(adm.StatResponse(tiers=[DISK]), settings(ram_bytes=0))


def test_without_a_sidecar_nothing_is_told(tmp_path: Path) -> None:
    assert tiers_told(tmp_path / "sidecar.sock") == ""
