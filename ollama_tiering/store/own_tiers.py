"""Opens this host's own tiers. One that cannot be had now is no reason to do without the others: it
is left out, with the reason, and tried again later (sidecar/server.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ollama_tiering.config import format_size
from ollama_tiering.errors import ServiceError
from ollama_tiering.store.books.report import AbsentTier
from ollama_tiering.store.tiers import kinds, stores_seen
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.memory_group import within_group
from ollama_tiering.store.tiers.names import PINS_NAME, TOMBSTONES_NAME
from ollama_tiering.store.upkeep.pin_file import load_pins
from ollama_tiering.store.upkeep.tombstones import load_tombstones
from ollama_tiering.system.directories import UnusableDirectory, cure_of

log = logging.getLogger(__name__)

_FILESYSTEM_SHARE: Final = 0.95


def open_tier(kind: TierKind, directory: Path, budget_bytes: int) -> Tier | AbsentTier:
    """The tier, or why there is none now. UnsafeDirectory if somebody may have tampered with
    it, ServiceError where another process uses it.
    """
    try:
        stores_seen.require_place(directory, volatile=kind in kinds.VOLATILE)
        tier = FsTier(kind, directory)
    except (OSError, UnusableDirectory) as error:
        return absent(kind, directory, budget_bytes, error)
    stores_seen.remember(directory)
    return tier


def absent(
    kind: TierKind, directory: Path, budget_bytes: int, error: OSError | UnusableDirectory
) -> AbsentTier:
    if isinstance(error, UnusableDirectory):
        why, cure = error.message, error.hint or ""
    else:
        place = error.filename if isinstance(error.filename, str) else directory
        why, cure = f"{place}: {error.strerror or error}", cure_of(error)
    return AbsentTier(kind, directory, budget_bytes, why, cure)


def can_be_opened(left_out: AbsentTier) -> bool:
    """Whether it is worth to open the store again: the lists that lie there can be read too."""
    try:
        opened = open_tier(left_out.kind, left_out.directory, left_out.budget_bytes)
        if isinstance(opened, AbsentTier):
            return False
        with contextlib.closing(opened):
            filesystem_bytes(left_out.directory)
            load_pins(left_out.directory / PINS_NAME)
            load_tombstones(left_out.directory / TOMBSTONES_NAME)
    except (OSError, ServiceError):
        return False
    return True


def not_opened(left_out: Sequence[AbsentTier], what: str) -> ServiceError:
    """`what`: of how many that is said."""
    return ServiceError(
        f"{what} can be opened: " + "; ".join(one.why for one in left_out),
        hint="; ".join(dict.fromkeys(one.cure for one in left_out)),
    )


def cut_budget(directory: Path, budget_bytes: int, kind: TierKind) -> int:
    """The budget, but never more than the size of the file system, or than a memory group has."""
    if kind in kinds.VOLATILE:
        budget_bytes = within_group(directory, budget_bytes)
    most = int(filesystem_bytes(directory) * _FILESYSTEM_SHARE)
    if budget_bytes <= most:
        return budget_bytes
    log.warning(
        "budget cut to the file system: tier=%s wanted=%s has=%s",
        kind.label,
        format_size(budget_bytes),
        format_size(most),
    )
    return most


def filesystem_bytes(directory: Path) -> int:
    info = os.statvfs(directory)
    return info.f_blocks * info.f_frsize
