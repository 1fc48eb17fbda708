"""Size limits that both ends keep."""

from __future__ import annotations

from typing import Final

MAX_MESSAGE_BYTES: Final = 16 << 20
PART_BYTES: Final = 1 << 20  # of a block that goes over the connection
