"""What the RAM tier may have of a memory group: its files count there, beside the model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from ollama_tiering.config import MIB, format_size, memory_limit, unit_limit
from ollama_tiering.config.memory_limit import UNIT_HEADROOM_BYTES
from ollama_tiering.system.filesystems import in_memory

log = logging.getLogger(__name__)

_SHARE: Final = 2  # tmpfs by itself has half of a machine's memory


def within_group(directory: Path, budget_bytes: int) -> int:
    """The budget, but never more than half of what the group may have, and no more than the unit's
    limit leaves where a person has lowered it.
    """
    limit, unit = memory_limit(), unit_limit()
    most = limit.shared_bytes // _SHARE if limit.group else budget_bytes
    if unit is not None:
        left = max(unit.limit_bytes // _SHARE, unit.limit_bytes - UNIT_HEADROOM_BYTES)
        if left + MIB < min(most, budget_bytes):  # the unit's limit is in whole MiB
            most, limit = left, unit
    if budget_bytes <= most or not in_memory(directory):
        return budget_bytes
    log.warning(
        "budget cut to the memory group: tier=ram wanted=%s has=%s limit=%s of=%s",
        format_size(budget_bytes),
        format_size(most),
        format_size(limit.limit_bytes),
        limit.group,
    )
    return most
