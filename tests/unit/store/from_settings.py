"""Stores as settings make them."""

from __future__ import annotations

from pathlib import Path

from ollama_tiering.config import MIB, SidecarConfig
from ollama_tiering.sidecar.rule_book import RuleBook
from ollama_tiering.store.assemble import open_store
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import TierKind


def opened(settings: SidecarConfig) -> TieredStore:
    return open_store(settings, RuleBook(settings).decide)


def config(root: Path, **other: object) -> SidecarConfig:
    settings: dict[str, object] = {
        "socket_path": root / "s",
        "ram_dir": root / "ram",
        "ram_budget_bytes": 512 * MIB,
        "local_dir": root / "local",
        "local_budget_bytes": 512 * MIB,
        "min_free_percent": 0.0,
        **other,
    }
    return SidecarConfig(**settings)  # type: ignore[arg-type]


def kinds(settings: SidecarConfig) -> list[TierKind]:
    store = opened(settings)
    try:
        return [tier.kind for tier in store.report().tiers]
    finally:
        store.close()
