"""Says once, when a tier is opened, what its file system does not do for it."""

from __future__ import annotations

import logging
from pathlib import Path

from ollama_tiering.system.abilities import lacks
from ollama_tiering.system.filesystems import filesystem_type

log = logging.getLogger(__name__)


def say_lacks(directory: Path, tier: str, *, changes: bool) -> None:
    """NotPrivate where others could read what is stored. A disk that is full now tells nothing."""
    if not changes:
        return
    try:
        found = lacks(directory)
    except OSError as error:
        log.info("file system not tried: tier=%s path=%s error=%s", tier, directory, error)
        return
    if found:
        log.warning(
            "a power cut may cost what was stored lately, the file system does not do all: tier=%s "
            "path=%s type=%s lacks=%s",
            tier,
            directory,
            filesystem_type(directory) or "unknown",
            "; ".join(found),
        )
