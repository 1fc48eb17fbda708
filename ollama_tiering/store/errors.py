"""Failures of the block store; the type says what may be done.

Damage is a CorruptBlock and leads to quarantine. A format that this version does not know is an
UnsupportedFormat: a miss, and the file stays. A transient error of a disk (weather) is an OSError,
and is never a reason to delete anything.
"""

from __future__ import annotations

from ollama_tiering.errors import StoreDamaged, TieringError, UsageError


class CorruptBlock(StoreDamaged):
    """The stored bytes are not what was written, or are no valid block file at all."""


class UnsupportedFormat(StoreDamaged):
    """An intact block file with a version or encoding that this reader does not know."""


class NotAuthentic(UnsupportedFormat):
    """A file on a shared tier that was written without this deployment's key. It is no block for
    us, and it is left where it is.
    """


class InvalidBlock(TieringError):
    """A block that a client offers contradicts itself or its reservation."""


class NoRoom(TieringError):
    """The budget is used up and nothing may be evicted."""


class PinsFull(NoRoom):
    """More would be pinned than the share of the budget that pins may have."""


class UnknownId(UsageError):
    """No stored block has an id that begins like this."""


class AmbiguousId(UsageError):
    """Several stored blocks have ids that begin like this; the message lists them."""


class ArchiveRefused(TieringError):
    """A file or directory to import is not what an export writes, or it contradicts itself."""

    exit_code = StoreDamaged.exit_code
