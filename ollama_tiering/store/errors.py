"""Failures of the block store, typed by what may be done about them.

Damage is a CorruptBlock and leads to quarantine. A format of another time is an UnsupportedFormat:
a miss, the file stays. Weather is OSError: never a reason to delete anything.
"""

from __future__ import annotations

from ollama_tiering.errors import StoreDamaged, TieringError, UsageError


class CorruptBlock(StoreDamaged):
    """Stored bytes are not what was written, or no valid block file at all."""


class UnsupportedFormat(StoreDamaged):
    """An intact block file of a version or encoding this reader does not know."""


class NotAuthentic(UnsupportedFormat):
    """A file on a shared tier that no holder of this deployment's key has written: it is no block
    here, and not ours to put away.
    """


class InvalidBlock(TieringError):
    """A block or claim that a client offers contradicts itself or its reservation."""


class NoRoom(TieringError):
    """The budget is used up and nothing may be evicted."""


class PinsFull(NoRoom):
    """More would be pinned than the share of the budget that pins may have."""


class UnknownId(UsageError):
    """No stored block has an id that starts so."""


class AmbiguousId(UsageError):
    """Several stored blocks have ids that start so; the message lists them."""


class ArchiveRefused(TieringError):
    """A file or directory to import is not what an export writes, or contradicts itself."""

    exit_code = StoreDamaged.exit_code
