"""The store's administration without a sidecar: on the files, with their directories locked.

A command that looks, or changes single things, opens the tiers frozen, so that opening changes
nothing. A command that stores opens them as the sidecar does, but without a background thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Final

from ollama_tiering.config import SidecarConfig
from ollama_tiering.store.assemble import open_store
from ollama_tiering.store.books.report import AbsentTier
from ollama_tiering.store.books.terms import Decide
from ollama_tiering.store.own_tiers import absent
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers import kinds
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.memory import MemoryTier
from ollama_tiering.store.tiers.names import INDEX_NAME, VERSION_DIRECTORY
from ollama_tiering.store.tiers.ram_place import placed, recorded
from ollama_tiering.store.tiers.remote_key import remote_authenticity
from ollama_tiering.store.tiers.stores_seen import require_place
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.tools.frozen import ENDLESS_BYTES, FrozenIndex, FrozenRemote, FrozenTier
from ollama_tiering.store.upkeep.index import BlockIndex
from ollama_tiering.system.deadline import DeadlineThreads
from ollama_tiering.system.directories import UnsafeDirectory, UnusableDirectory

log = logging.getLogger(__name__)

_DRAIN_SECONDS: Final = 600.0


class Purpose(Enum):
    LOOK = "look"
    CHANGE = "change"  # remove, pin, repair
    STORE = "store"  # what then lies in RAM only is written down at the end


@contextlib.contextmanager
def offline(config: SidecarConfig, decide: Decide, purpose: Purpose) -> Iterator[Administration]:
    """ServiceError if a process uses one of the directories. `decide` knows the
    rules for models.
    """
    if purpose is Purpose.STORE:
        store = open_store(placed(config), decide, background=False, whole=True)
        all_seen = config.remote_dir is None
    else:
        store, all_seen = _open_frozen(config, decide, thaw=purpose is Purpose.CHANGE)
    try:
        yield Administration(store, alone=True, all_seen=all_seen)
    finally:
        store.close(drain_seconds=_DRAIN_SECONDS if purpose is Purpose.STORE else 0)


def _open_frozen(config: SidecarConfig, decide: Decide, *, thaw: bool) -> tuple[TieredStore, bool]:
    """Opens only directories that exist. Returns also whether every tier could be looked at."""
    wanted = (
        (TierKind.RAM, config.ram_dir or recorded(), config.ram_budget_bytes),
        (TierKind.LOCAL, config.local_dir, config.local_budget_bytes),
    )
    wanted_remote = config.remote_dir is not None and config.remote_budget_bytes > 0
    tiers: list[tuple[Tier, int]] = []
    left_out: list[AbsentTier] = []
    budgets: list[int] = []
    lowest: Path | None = None
    try:
        for kind, directory, budget_bytes in wanted:
            if not budget_bytes or directory is None:
                continue
            try:
                require_place(directory, volatile=kind in kinds.VOLATILE)
            except (OSError, UnusableDirectory) as error:
                left_out.append(absent(kind, directory, budget_bytes, error))
            if directory.is_dir():
                tiers.append((FrozenTier(kind, directory), ENDLESS_BYTES))
                budgets.append(budget_bytes)
                lowest = directory
        remote = _frozen_remote(config)
        if remote is not None:
            tiers.append((remote, ENDLESS_BYTES))
            budgets.append(config.remote_budget_bytes)
        if not tiers:
            tiers.append((MemoryTier(TierKind.LOCAL), ENDLESS_BYTES))  # nothing was stored yet
        store = TieredStore(
            tiers,
            index_path=lowest and lowest / INDEX_NAME,
            index_type=BlockIndex if thaw else FrozenIndex,
            pin_share=config.pin_share,
            decide=decide,
            background=False,
            measure=False,
            absent_remote=config.remote_dir if remote is None and wanted_remote else None,
        )
    except BaseException:
        for tier, _ in tiers:
            tier.close()
        raise
    for level, budget_bytes in zip(store.state.levels, budgets, strict=False):
        level.lru.budget_bytes = budget_bytes  # only now: opening must not evict down to it
        if thaw and isinstance(level.tier, FrozenTier):
            level.tier.thaw()
    store.left_out = tuple(left_out)
    store.pins.enforce()
    return store, remote is not None or not wanted_remote


def _frozen_remote(config: SidecarConfig) -> FrozenTier | None:
    """The shared directory as it is now; None if it cannot be seen. Other sidecars go on using it:
    it is not locked, nothing is announced, and what is removed is a miss for them.
    """
    directory = config.remote_dir
    if directory is None or not config.remote_budget_bytes:
        return None
    key_file = config.remote_key_file
    authenticity = remote_authenticity(key_file, mac=config.remote_mac, make=False)
    threads = DeadlineThreads(
        "remote-tier", limit=1, deadline_seconds=config.remote_deadline_seconds
    )

    def opened() -> FrozenTier:
        if not (directory / VERSION_DIRECTORY).is_dir():  # opening it would make one
            raise FileNotFoundError(errno.ENOENT, "nothing is stored there, or it is not mounted")
        return FrozenRemote(directory, authenticity)

    try:
        return threads.call(opened)
    except (OSError, UnsafeDirectory) as error:
        reason = error.message if isinstance(error, UnsafeDirectory) else error.strerror or error
        log.warning("remote tier not looked at: path=%s reason=%s", directory, reason)
        return None
    finally:
        threads.close()
