"""Looks at the files of blocks that may be lost as one before them is (books/suspects.py).

In the background, a little at a time. A block that a writer offers is looked at then, so that one
prompt stores all that was lost. No OSError leaves this module, and none deletes anything.
"""

from __future__ import annotations

import time
from typing import Final

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books import copies, suspects, weather
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.upkeep import judging
from ollama_tiering.store.upkeep.judging import Unfit, Verdict

OFFER_SECONDS: Final = 1.0  # to look at what one call offers; the rest is believed
_NAMES_PER_STEP: Final = 64
_HEADERS_PER_STEP: Final = 8  # on a shared tier


def step(state: StoreState) -> bool:
    """Some on this host's own tiers, one if its bytes are read; whether there may be more."""
    busy = suspects.expand(state)
    for _ in range(_NAMES_PER_STEP):
        suspect = suspects.next_own(state)
        if suspect is None:
            return busy
        _look(state, suspect.record, suspect.payload)
        busy = True
        if suspect.payload:
            break
    return busy


def step_shared(state: StoreState, level: Level) -> bool:
    """The same on a shared tier, for its thread."""
    for _ in range(_HEADERS_PER_STEP):
        suspect = suspects.next_shared(state)
        if suspect is None:
            return False
        try:
            if level.index in suspect.record.levels:
                _fits(state, level, suspect.record, payload=suspect.payload)
        except OSError as error:
            weather.failed(state, level, error, "verify")
            return False
        suspects.looked_at_shared(state, suspect.record)
        if suspect.payload:
            break
    return True


def expand_all(state: StoreState) -> None:
    """Afterwards it is known which blocks are suspects."""
    while suspects.expand(state):
        pass


def is_there(state: StoreState, key: BlockKey, until: float) -> bool:
    """Whether an offered block that the books have on this host lies there in truth: a name and a
    size, and the bytes of a suspect until that (monotonic) time. The nearest copy that fits is
    enough; the background looks at the others, for a disk may hang.
    """
    suspect = suspects.on_own_tiers(state, key)
    if suspect is None:
        return True  # being written, or on the shared tier only: its thread looks
    return _look(state, suspect.record, suspect.payload and time.monotonic() < until, nearest=True)


def whole(state: StoreState, level: Level, record: BlockRecord) -> bool:
    """Whether the file of a copy has its size. What is gone is forgotten, what was cut is put out
    of the way; a size that the books have wrong is put right. OSError passes.
    """
    there = level.tier.exists(record.namespace, record.key, record.bytes_at(level.index))
    return there or _fits(state, level, record, payload=False)


def _look(state: StoreState, record: BlockRecord, payload: bool, *, nearest: bool = False) -> bool:
    """Whether any copy on this host's own tiers is left; each is looked at, or with `nearest` none
    after the first that is.
    """
    good = lost = False
    with copies.held(state, record.key):
        own = [state.levels[index] for index in sorted(record.levels)]
        own = [level for level in own if level.shared is None]
        while own and not (good and nearest):
            level = own.pop(0)
            try:
                fits = _fits(state, level, record) if payload else whole(state, level, record)
            except OSError as error:
                weather.failed(state, level, error, "verify")
                fits = True  # nobody knows, and it is not given up for that
            good, lost = good or fits, lost or not fits
    if own:
        suspects.look_later(state, record.key)
    else:
        suspects.looked_at(state, record, payload=payload, lost=lost)
    return good


def _fits(state: StoreState, level: Level, record: BlockRecord, *, payload: bool = True) -> bool:
    """Whether what the file says is so; without `payload` only its header is read."""
    namespace, key = record.namespace, record.key
    found = judging.look(state, level, namespace, key, known=True, payload=payload)
    if isinstance(found, Unfit):
        if found.verdict is Verdict.NOT_NOW and isinstance(found.error, OSError):
            raise found.error
        return False
    if found.file_bytes != record.bytes_at(level.index):
        copies.correct_size(state, record, level, found.file_bytes, found.raw_file_bytes)
    return True
