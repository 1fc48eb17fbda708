"""Failures of the block store, typed by what may be done about them.

Damage is a CorruptBlock and leads to quarantine. A format of another time is an UnsupportedFormat:
a miss, the file stays. Weather is OSError: never a reason to delete anything.
"""

from __future__ import annotations

from ollama_tiering.errors import ServiceError, StoreDamaged, TieringError


class CorruptBlock(StoreDamaged):
    """Stored bytes are not what was written, or no valid block file at all."""


class UnsupportedFormat(StoreDamaged):
    """An intact block file of a version or encoding this reader does not know."""


class InvalidBlock(TieringError):
    """A block or claim that a client offers contradicts itself or its reservation."""


class NoRoom(TieringError):
    """The budget is used up and nothing may be evicted."""


class UnsafeDirectory(ServiceError):
    """A tier or socket directory that another user could write to."""
