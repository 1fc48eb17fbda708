"""From what was asked for to what this machine can hold: budgets, index, policy."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ollama_tiering.config import MIB, SidecarConfig, format_size
from ollama_tiering.store.books.policy import StorePolicy
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.names import INDEX_NAME
from ollama_tiering.store.upkeep.index import remove_index
from ollama_tiering.system.directories import in_memory, secure_directory

log = logging.getLogger(__name__)

_FILESYSTEM_SHARE: Final = 0.95
_LEAST_TMPFS_BYTES: Final = 128 * MIB  # a container's 64 MB hold nine blocks of a small model
_LEAST_INDEXED_BYTES: Final = 64 * MIB  # less is scanned at once, and the index would take a part


def ram_budget(config: SidecarConfig) -> int:
    """0 where there is no memory file system worth it: the store then works without a RAM tier."""
    if config.ram_dir is None:
        if config.ram_budget_bytes:
            log.warning("no RAM tier: no memory file system here takes it")
        return 0
    if not config.ram_budget_bytes or not config.local_budget_bytes:
        return config.ram_budget_bytes
    directory = secure_directory(config.ram_dir)
    if not in_memory(directory):
        log.warning("RAM tier is no faster than the local tier: path=%s is on a disk", directory)
        return config.ram_budget_bytes
    has_bytes = _filesystem_bytes(directory)
    if has_bytes < min(_LEAST_TMPFS_BYTES, config.ram_budget_bytes):
        log.warning("no RAM tier: path=%s has only %s", directory, format_size(has_bytes))
        return 0
    return config.ram_budget_bytes


def cut_budget(directory: Path, budget_bytes: int, kind: TierKind) -> int:
    """Never more than the file system has in all."""
    most = int(_filesystem_bytes(directory) * _FILESYSTEM_SHARE)
    if budget_bytes <= most:
        return budget_bytes
    log.warning(
        "budget cut to the file system: tier=%s wanted=%s has=%s",
        kind.label,
        format_size(budget_bytes),
        format_size(most),
    )
    return most


def index_path(tiers: Sequence[tuple[Tier, int]]) -> Path | None:
    """Beside the blocks of the lowest tier of this host, whose budget it counts against. None: not
    worth it.
    """
    own = [one for one in tiers if not one[0].shared]
    if not own:
        return None
    tier, budget_bytes = own[-1]
    assert tier.directory is not None
    path = tier.directory / INDEX_NAME
    if budget_bytes >= _LEAST_INDEXED_BYTES:
        return path
    remove_index(path)
    return None


def store_policy(config: SidecarConfig, tiers: Sequence[tuple[Tier, int]]) -> StorePolicy:
    queue_bytes = config.write_queue_bytes
    if queue_bytes and tiers[0][0].kind is TierKind.RAM:
        queue_bytes = min(queue_bytes, tiers[0][1] // 2)
    return StorePolicy(
        admission=config.admission,
        min_tokens=config.min_tokens,
        daily_write_bytes=config.daily_write_bytes,
        queue_bytes=queue_bytes,
        queue_seconds=config.write_queue_seconds,
        tail_seconds=config.tail_seconds,
        min_free_percent=config.min_free_percent,
    )


def _filesystem_bytes(directory: Path) -> int:
    info = os.statvfs(directory)
    return info.f_blocks * info.f_frsize
