"""Measures tiers that were never measured, within their budgets. Called before the mover starts."""

from __future__ import annotations

import logging
import os
import secrets
import time
from pathlib import Path
from typing import Final

from ollama_tiering.store.books import reserving
from ollama_tiering.store.books.speed import SpeedMeter
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.tiers.names import PROBE_PREFIX
from ollama_tiering.system import pagecache
from ollama_tiering.system.lacking import sync

log = logging.getLogger(__name__)

PROBE_BYTES: Final = 16 << 20

_PART_BYTES: Final = 1 << 20


def measure_levels(state: StoreState) -> None:
    """Nothing is evicted for it: where there is no room now, the first transfers will tell."""
    for level in state.levels:
        directory = level.tier.directory
        if directory is None or level.speed.read or not level.surveyed or level.shared:
            continue
        need_bytes = PROBE_BYTES + level.tier.growth_bytes
        if level.space is not None and (level.space.headroom_bytes(fresh=True) or 0) < need_bytes:
            continue
        reservation = reserving.reserve(state, level, need_bytes)
        if reservation is None:
            continue
        try:
            measure_directory(directory, level.speed, in_memory=level.tier.in_memory)
        except OSError as error:
            log.warning("not measured: tier=%s error=%s", level.tier.kind.label, error)
        finally:
            reserving.release(state, reservation)


def measure_directory(directory: Path, meter: SpeedMeter, *, in_memory: bool) -> None:
    """Writes, syncs and reads back one temporary file. OSError passes through, nothing stays."""
    path = directory / f"{PROBE_PREFIX}{secrets.token_hex(4)}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        part = os.urandom(_PART_BYTES)  # a disk that compresses must not look fast
        start = time.perf_counter()
        for offset in range(0, PROBE_BYTES, _PART_BYTES):
            if os.pwrite(fd, part, offset) != _PART_BYTES:
                return
        if not in_memory:
            sync(fd)
        meter.add_write(PROBE_BYTES, time.perf_counter() - start)
        if not in_memory:
            pagecache.forget(fd)
            if pagecache.resident(fd, PROBE_BYTES) is not False:
                return
        buffer = bytearray(_PART_BYTES)
        start = time.perf_counter()
        for offset in range(0, PROBE_BYTES, _PART_BYTES):
            os.preadv(fd, [buffer], offset)
        meter.add_read(PROBE_BYTES, time.perf_counter() - start)
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)
