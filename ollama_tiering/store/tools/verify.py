"""Reads every block file of every tier and checks header, place and checksums, one step at a time.

It looks at the files and not at the books, so it also finds what the books do not know. It holds no
lock while it reads; a block that is evicted meanwhile is skipped. Only `repair` changes anything:
damaged files are looked at again and quarantined, leftovers are removed, and the index is made
anew.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Final

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books import copies, reading
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from ollama_tiering.store.tiers.checked import checked_meta
from ollama_tiering.store.tiers.contract import Tier
from ollama_tiering.store.tiers.walk import FoundFile, What, remove_file, walk
from ollama_tiering.store.upkeep import unusable
from ollama_tiering.store.values import Finding, VerifyStep

log = logging.getLogger(__name__)

DAMAGED: Final = "damaged"
UNREADABLE: Final = "unreadable"
UNKNOWN_FORMAT: Final = "unknown format"

_LEFTOVER_SECONDS: Final = 3600.0  # no write of a running sidecar takes as long as this
_STEP_BYTES: Final = 32 << 20
_STEP_BLOCKS: Final = 64


def verify(state: StoreState, *, repair: bool, alone: bool) -> Iterator[VerifyStep]:
    """`alone`: nobody else writes into the directories now. The last step has all counts."""
    total_blocks = sum(blocks for blocks, _ in reading.level_sums(state))
    blocks = done_bytes = since_blocks = since_bytes = 0
    findings: list[Finding] = []
    for level in state.levels:
        for file, what, detail, size in _examine(level):
            if what is What.BLOCK.value or size:
                blocks, done_bytes = blocks + 1, done_bytes + size
                since_blocks, since_bytes = since_blocks + 1, since_bytes + size
            if what != What.BLOCK.value:
                finding = _judge(state, level, file, what, detail, repair=repair, alone=alone)
                findings += [finding] if finding is not None else []
            if since_bytes >= _STEP_BYTES or since_blocks >= _STEP_BLOCKS or findings:
                yield VerifyStep(blocks, total_blocks, done_bytes, tuple(findings))
                findings, since_blocks, since_bytes = [], 0, 0
    yield VerifyStep(blocks, total_blocks, done_bytes, tuple(findings))


def check_block(tier: Tier, namespace: NamespaceId, key: BlockKey) -> int:
    """Reads all of one block; returns its bytes. CorruptBlock, UnsupportedFormat, or OSError."""
    with tier.open(namespace, key) as block:
        cold = block.resident() is False
        checked_meta(block, namespace, key, payload=True)
    if cold:  # what is read once must not push a model's weights out of the page cache
        with contextlib.suppress(OSError):
            tier.drop_pages(namespace, key)
    return block.file_bytes


def is_leftover(state: StoreState, level: Level, file: FoundFile, *, alone: bool) -> bool:
    """Whether nobody is writing this temporary file any more."""
    if file.key is not None and reading.is_being_written(state, file.key):
        return False
    if alone and not level.tier.is_shared:
        return True
    return file.changed < state.wall_clock() - _LEFTOVER_SECONDS


def _examine(level: Level) -> Iterator[tuple[FoundFile, str, str, int]]:
    """(file, what it is, detail, bytes read) of everything below the tier's directory."""
    directory = level.tier.directory
    if directory is None:
        return
    for file in walk(directory):
        if file.what is not What.BLOCK or file.namespace is None or file.key is None:
            yield file, file.what.value, "", 0
            continue
        looked = _look(level, file, file.namespace, file.key)
        if looked is not None:
            yield file, *looked


def _look(
    level: Level, file: FoundFile, namespace: NamespaceId, key: BlockKey
) -> tuple[str, str, int] | None:
    """(what a block's file is, detail, bytes read); None when it is gone."""
    try:
        size = check_block(level.tier, namespace, key)
    except FileNotFoundError:
        return None
    except UnsupportedFormat as error:
        return UNKNOWN_FORMAT, str(error), file.stored_bytes
    except CorruptBlock as error:
        return DAMAGED, str(error), file.stored_bytes
    except OSError as error:
        return UNREADABLE, error.strerror or str(error), file.stored_bytes
    return file.what.value, "", size


def _judge(
    state: StoreState,
    level: Level,
    file: FoundFile,
    what: str,
    detail: str,
    *,
    repair: bool,
    alone: bool,
) -> Finding | None:
    repaired = False
    if what == What.TEMPORARY.value:
        if not is_leftover(state, level, file, alone=alone):
            return None
        if repair:
            repaired, detail = _remove(level, file)
    elif what == DAMAGED and repair:
        repaired, detail = _quarantine(state, level, file, detail)
        if not detail:
            return None
    return Finding(level.tier.kind, what, file.path, detail, repaired)


def _remove(level: Level, file: FoundFile) -> tuple[bool, str]:
    directory = level.tier.directory
    assert directory is not None
    try:
        remove_file(directory, file)
    except OSError as error:
        return False, error.strerror or str(error)
    return True, ""


def _quarantine(state: StoreState, level: Level, file: FoundFile, detail: str) -> tuple[bool, str]:
    """Looks again while the block is held, because it may have been stored anew. No detail means
    that it is good.
    """
    assert file.namespace is not None
    assert file.key is not None
    with copies.held(state, file.key):
        looked = _look(level, file, file.namespace, file.key)
        what, again, _ = looked or ("", "", 0)
        if what != DAMAGED:
            return False, again
        log.warning("block damaged: key=%s reason=%s", file.key.hex(), again)
        try:
            return unusable.quarantine(state, level, file.namespace, file.key), again
        except OSError as weather:
            return False, f"{detail}; not quarantined: {weather.strerror or weather}"
