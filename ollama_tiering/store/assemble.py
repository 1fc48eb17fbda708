"""Makes a store of the settings: which tiers there are, and what this machine can hold."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from ollama_tiering.config import MIB, SidecarConfig, format_size
from ollama_tiering.errors import ConfigError
from ollama_tiering.store.block.encoding import Encoding
from ollama_tiering.store.books.encodings import TierEncodings
from ollama_tiering.store.books.policy import StorePolicy
from ollama_tiering.store.books.report import AbsentTier
from ollama_tiering.store.books.terms import Decide
from ollama_tiering.store.own_tiers import absent, filesystem_bytes, not_opened, open_tier
from ollama_tiering.store.own_tiers import cut_budget as cut_budget
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers import kinds, ram_place, stores_seen
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.names import INDEX_NAME
from ollama_tiering.store.tiers.remote import RemoteTier
from ollama_tiering.store.tiers.remote_key import remote_authenticity
from ollama_tiering.store.tiers.shared_directory import SharedFsTier
from ollama_tiering.store.upkeep.index import remove_index
from ollama_tiering.system.directories import UnusableDirectory
from ollama_tiering.system.filesystems import in_memory

log = logging.getLogger(__name__)

_LEAST_INDEXED_BYTES: Final = 64 * MIB  # less is scanned at once, and the index would take a part


def open_store(
    config: SidecarConfig, decide: Decide, *, background: bool = True, whole: bool = False
) -> TieredStore:
    """A store with the tiers of the settings. A budget of 0 means no such tier. One that cannot be
    had now is left out, unless it is the last, or `whole` asks for all. `decide` knows the rules
    for models.
    """
    _refuse_unsupported(config)
    left_out: list[AbsentTier] = []
    tiers = _own_tiers(config, left_out)
    while True:
        if left_out and (whole or not tiers):
            _close(tiers)
            raise not_opened(left_out, "not every tier" if tiers else "no tier")
        if not tiers:
            raise ConfigError(
                "there is neither a RAM tier nor a local tier",
                hint="give one of them a budget: sidecar.ram_budget, sidecar.local_budget",
            )
        try:
            return _store(config, decide, tiers, left_out, background=background)
        except (OSError, UnusableDirectory) as error:
            # Of the lists that lie beside the blocks of the lowest tier: without them what a person
            # removed could come back, or what they pinned go.
            _close(tiers)
            tier, budget_bytes = tiers.pop()
            assert tier.directory is not None
            _leave_out(absent(tier.kind, tier.directory, budget_bytes, error), left_out)
            tiers = _own_tiers(config, left_out)
        except BaseException:
            _close(tiers)
            raise


def _own_tiers(config: SidecarConfig, left_out: list[AbsentTier]) -> list[tuple[Tier, int]]:
    """Those that can be had and are not left out already; what cannot be had is added there."""
    wanted = (
        (TierKind.RAM, config.ram_dir, config.ram_budget_bytes),
        (TierKind.LOCAL, config.local_dir, config.local_budget_bytes),
    )
    tiers: list[tuple[Tier, int]] = []
    try:
        for kind, directory, budget_bytes in wanted:
            if any(one.kind is kind for one in left_out) or not budget_bytes:
                continue
            if directory is None:
                log.warning("no RAM tier: no memory file system here takes it")
                continue
            opened = open_tier(kind, directory, budget_bytes)
            if isinstance(opened, AbsentTier):
                _leave_out(opened, left_out)
                continue
            tiers.append((opened, 0))  # closed if anything fails
            try:
                cut_bytes = _what_it_may_have(config, kind, directory, budget_bytes)
            except OSError as error:
                _close([tiers.pop()])
                _leave_out(absent(kind, directory, budget_bytes, error), left_out)
                continue
            if cut_bytes:
                tiers[-1] = opened, cut_bytes
            else:
                _close([tiers.pop()])
    except BaseException:
        _close(tiers)
        raise
    return tiers


def _leave_out(one: AbsentTier, left_out: list[AbsentTier]) -> None:
    log.error("tier left out: tier=%s path=%s reason=%s", one.kind.label, one.directory, one)
    left_out.append(one)


def _store(
    config: SidecarConfig,
    decide: Decide,
    own: Sequence[tuple[Tier, int]],
    left_out: Sequence[AbsentTier],
    *,
    background: bool,
) -> TieredStore:
    tiers, missing = list(own), list(left_out)
    remote = _remote_tier(config)
    lists_known = all(one.kind in kinds.VOLATILE for one in left_out)
    if remote is not None and lists_known:
        tiers.append((remote, config.remote_budget_bytes))
    elif config.remote_dir is not None and remote is not None:
        why = f"{config.remote_dir}: the local tier's directory says what was removed from it"
        budget_bytes = config.remote_budget_bytes
        cure = "it comes back with the local tier"
        missing.append(AbsentTier(TierKind.REMOTE, config.remote_dir, budget_bytes, why, cure))
    store = TieredStore(
        tiers,
        index_path=index_path(tiers) if lists_known else None,
        high_watermark=config.high_watermark,
        low_watermark=config.low_watermark,
        lease_seconds=config.lease_seconds,
        reserve_seconds=config.reserve_seconds,
        pin_share=config.pin_share,
        background=background,
        policy=store_policy(config, tiers),
        staging_seconds=config.remote_deadline_seconds,
        rescan_seconds=config.remote_rescan_seconds,
        encodings=_encodings(config, [tier for tier, _ in tiers]),
        decide=decide,
        absent_remote=config.remote_dir if remote is not None and not lists_known else None,
    )
    store.left_out = tuple(missing)
    return store


def _close(tiers: Iterable[tuple[Tier, int]]) -> None:
    for tier, _ in tiers:
        tier.close()


def _encodings(config: SidecarConfig, tiers: Sequence[Tier]) -> TierEncodings:
    local = Encoding(config.local_encoding)
    if local is not Encoding.NONE and not any(tier.is_volatile for tier in tiers):
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
        lambda: _open_shared(directory),
        deadline_seconds=config.remote_deadline_seconds,
        authenticity=remote_authenticity(config.remote_key_file, mac=config.remote_mac, make=True),
    )


def _open_shared(directory: Path) -> SharedFsTier:
    """Runs in a thread of the tier's."""
    if directory.exists():  # else the tier itself says so
        stores_seen.require_place(directory)
    tier = SharedFsTier(directory)
    stores_seen.remember(directory)
    return tier


def _what_it_may_have(
    config: SidecarConfig, kind: TierKind, directory: Path, budget_bytes: int
) -> int:
    """0 means no such tier."""
    if kind in kinds.VOLATILE and not _is_worth_it(config, directory):
        return 0
    cut_bytes = cut_budget(directory, budget_bytes, kind)
    if not cut_bytes:
        log.warning("no %s tier: there is no room for it: path=%s", kind.label, directory)
    return cut_bytes


def _is_worth_it(config: SidecarConfig, directory: Path) -> bool:
    """Whether the RAM tier is any better than the local one alone."""
    if not config.local_budget_bytes:
        return True
    if not in_memory(directory):
        log.warning("RAM tier is no faster than the local tier: path=%s is on a disk", directory)
        return True
    has_bytes = filesystem_bytes(directory)
    if has_bytes < min(ram_place.LEAST_BYTES, config.ram_budget_bytes):
        log.warning("no RAM tier: path=%s has only %s", directory, format_size(has_bytes))
        return False
    return True


def index_path(tiers: Sequence[tuple[Tier, int]]) -> Path | None:
    """A file beside the blocks of this host's lowest tier, whose budget it counts against. None if
    that tier has no files, or an index is not worth it.
    """
    own = [(tier.directory, budget_bytes) for tier, budget_bytes in tiers if not tier.is_shared]
    directory, budget_bytes = own[-1] if own else (None, 0)
    if directory is None:
        return None
    path = directory / INDEX_NAME
    if budget_bytes >= _LEAST_INDEXED_BYTES:
        return path
    remove_index(path)
    return None


def store_policy(config: SidecarConfig, tiers: Sequence[tuple[Tier, int]]) -> StorePolicy:
    queue_bytes = config.write_queue_bytes
    if queue_bytes and tiers[0][0].is_volatile:
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
