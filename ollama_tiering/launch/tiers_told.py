"""Which tiers a started sidecar has, in one line for a person: how large each is, and where. A RAM
tier that could not be had is named with its reason, because a container's `/dev/shm` is mostly too
small for one.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.launch import block_service
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store import ram_place

_WORDS = {pb.TIER_RAM: "RAM", pb.TIER_LOCAL: "disk", pb.TIER_REMOTE: "shared"}


def tiers_told(socket: Path) -> str:
    """Empty where no sidecar answers."""
    answer = block_service.ask(socket)
    return in_words(answer, config.load_sidecar()) if answer else ""


def in_words(answer: adm.StatResponse, settings: config.SidecarConfig) -> str:
    """`settings` say whether a RAM tier was wanted, and where."""
    there = [_of(tier) for tier in answer.tiers if tier.budget_bytes]
    has_ram = any(tier.tier == pb.TIER_RAM and tier.budget_bytes for tier in answer.tiers)
    if settings.ram_budget_bytes and not has_ram:
        there.append(_no_ram(settings.ram_dir or ram_place.SHARED_MEMORY))
    return ", ".join(there)


def _of(tier: adm.TierStat) -> str:
    place = os.fsdecode(tier.directory)
    return f"{_WORDS.get(tier.tier, 'tier')} {config.format_size(tier.budget_bytes)} in {place}"


def _no_ram(directory: Path) -> str:
    try:
        has_bytes = shutil.disk_usage(directory).total
    except OSError as error:
        return f"no RAM tier: {directory}: {error.strerror}"
    if has_bytes < ram_place.LEAST_BYTES:
        size, least = map(config.format_size, (has_bytes, ram_place.LEAST_BYTES))
        return f"no RAM tier: {directory} has {size}, one takes {least} or more"
    return "no RAM tier: the sidecar's log says why"
