"""What goes wrong without anything being wrong with a block: each verb takes the lock."""

from __future__ import annotations

import logging

from ollama_tiering.store.books.state import Level, StoreState

log = logging.getLogger(__name__)


def failed(state: StoreState, level: Level, error: OSError, what: str, *, miss: str = "") -> None:
    """Counts an OSError and rests the level; `miss` counts why somebody did not get a block."""
    with state.lock:
        rest_seconds = state.failed(level, error)
        if miss:
            state.counters.miss(miss)
    if rest_seconds:  # said without the lock: whoever reads the log may be slow
        log.warning(
            "tier failed: tier=%s op=%s error=%s rest_seconds=%g",
            level.tier.kind.label,
            what,
            error,
            rest_seconds,
        )


def worked(state: StoreState, level: Level) -> None:
    """The level is there: it rests no more."""
    with state.lock:
        state.worked(level)


def disk_full(state: StoreState, level: Level) -> None:
    """A block was refused because others have filled the disk."""
    with state.lock:
        state.is_full(level)
        state.admission.refused["disk full"] = state.admission.refused.get("disk full", 0) + 1


def missed(state: StoreState, reason: str) -> None:
    """Somebody did not get a block."""
    with state.lock:
        state.counters.miss(reason)
