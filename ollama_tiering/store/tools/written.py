"""What was written to disks that wear, for whoever keeps a ledger of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ollama_tiering.store.books import reporting

if TYPE_CHECKING:
    from ollama_tiering.store.tiered import TieredStore


def take_written(store: TieredStore) -> dict[str, int]:
    """Bytes since the last call, by the model's file name, which is empty where it is not known."""
    return reporting.take_written(store.state)
