"""Numbers that both ends keep: sizes, and which rows may be found."""

from __future__ import annotations

from typing import Final

MAX_MESSAGE_BYTES: Final = 16 << 20
PART_BYTES: Final = 1 << 20  # of a block that goes over the connection

# Part of every build's name. It grows by one when a fault is mended by which wrong rows may have
# been stored, or when other bytes are stored of a row: what was stored before is not found then.
# All else that stores and restores may change without it.
STORED_ROWS: Final = 1
