"""From the settings to a store: which tiers there are, and what this machine can hold."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ollama_tiering.config import MIB, SidecarConfig, format_size
from ollama_tiering.errors import ConfigError
from ollama_tiering.store.block.encoding import Encoding
from ollama_tiering.store.books.encodings import TierEncodings
from ollama_tiering.store.books.policy import StorePolicy
from ollama_tiering.store.books.terms import Decide
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.group_share import within_group
from ollama_tiering.store.tiers.names import INDEX_NAME
from ollama_tiering.store.tiers.remote import RemoteTier
from ollama_tiering.store.tiers.remote_key import remote_authenticity
from ollama_tiering.store.tiers.shared import SharedFsTier
from ollama_tiering.store.upkeep.index import remove_index
from ollama_tiering.system.directories import secure_directory
from ollama_tiering.system.filesystems import in_memory

log = logging.getLogger(__name__)

_FILESYSTEM_SHARE: Final = 0.95
_LEAST_TMPFS_BYTES: Final = 128 * MIB  # a container's 64 MB hold nine blocks of a small model
_LEAST_INDEXED_BYTES: Final = 64 * MIB  # less is scanned at once, and the index would take a part


def open_store(config: SidecarConfig, decide: Decide, *, background: bool = True) -> TieredStore:
    """A store with the tiers of the settings. A budget of 0 means no such tier. `decide` knows the
    rules for models.
    """
    _refuse_unsupported(config)
    wanted = (
        (TierKind.RAM, config.ram_dir, ram_budget(config)),
        (TierKind.LOCAL, config.local_dir, config.local_budget_bytes),
    )
    tiers: list[tuple[Tier, int]] = []
    try:
        for kind, directory, budget_bytes in wanted:
            if budget_bytes and directory is not None:
                opened = FsTier(kind, directory)
                tiers.append((opened, cut_budget(directory, budget_bytes, kind)))
        if not tiers:
            raise ConfigError(
                "there is neither a RAM tier nor a local tier",
                hint="give one of them a budget: sidecar.ram_budget, sidecar.local_budget",
            )
        if remote := _remote_tier(config):
            tiers.append((remote, config.remote_budget_bytes))
        return TieredStore(
            tiers,
            index_path=index_path(tiers),
            high_watermark=config.high_watermark,
            low_watermark=config.low_watermark,
            lease_seconds=config.lease_seconds,
            reserve_seconds=config.reserve_seconds,
            pin_share=config.pin_share,
            background=background,
            policy=store_policy(config, tiers),
            staging_seconds=config.remote_deadline_seconds,
            rescan_seconds=config.remote_rescan_seconds,
            encodings=_encodings(config, {tier.kind for tier, _ in tiers}),
            decide=decide,
        )
    except BaseException:
        for tier, _ in tiers:
            tier.close()
        raise


def _encodings(config: SidecarConfig, kinds: set[TierKind]) -> TierEncodings:
    local = Encoding(config.local_encoding)
    if local is not Encoding.NONE and TierKind.RAM not in kinds:
        log.warning("local_encoding ignored: there is no RAM tier here to decode blocks into")
        local = Encoding.NONE
    encodings = {TierKind.LOCAL: local, TierKind.REMOTE: Encoding(config.remote_encoding)}
    return TierEncodings(encodings, config.zstd_level)


def _remote_tier(config: SidecarConfig) -> RemoteTier | None:
    """The tier is not opened yet, because its directory may hang."""
    directory = config.remote_dir
    if directory is None or not config.remote_budget_bytes:
        return None
    return RemoteTier(
        directory,
        lambda: SharedFsTier(directory),
        deadline_seconds=config.remote_deadline_seconds,
        authenticity=remote_authenticity(config.remote_key_file, mac=config.remote_mac, make=True),
    )


def ram_budget(config: SidecarConfig) -> int:
    """0 if no memory file system is large enough: the store then works without a RAM tier."""
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
    """The budget, but never more than the size of the file system, or than a memory group has."""
    if kind is TierKind.RAM:
        budget_bytes = within_group(directory, budget_bytes)
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
    """A file beside the blocks of this host's lowest tier, whose budget it counts against. None if
    an index is not worth it.
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


def _refuse_unsupported(config: SidecarConfig) -> None:
    """Refuses a setting that would otherwise be ignored."""
    if config.local_encoding != "none" and not config.ram_budget_bytes:
        raise ConfigError(
            f"sidecar.local_encoding = {config.local_encoding} needs a RAM tier: clients read "
            "blocks raw, so they are decoded into it",
            hint="set sidecar.ram_budget, or local_encoding to none",
        )
    if config.remote_encoding != "none" and config.remote_dir is None:
        raise ConfigError(
            f"sidecar.remote_encoding = {config.remote_encoding} needs a remote tier",
            hint="set sidecar.remote_dir, or remote_encoding to none",
        )


def _filesystem_bytes(directory: Path) -> int:
    info = os.statvfs(directory)
    return info.f_blocks * info.f_frsize
