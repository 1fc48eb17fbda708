"""What goes wrong without anything being wrong with a block: each verb takes the lock."""

from __future__ import annotations

from ollama_tiering.store.books.state import Level, StoreState


def failed(state: StoreState, level: Level, error: OSError, what: str, *, miss: str = "") -> None:
    """Counts an OSError and rests the level; `miss` counts why somebody did not get a block."""
    with state.lock:
        state.failed(level, error, what)
        if miss:
            state.counters.miss(miss)


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
