"""Pins in the books: how much they hold, and which are in force. Each verb takes the lock.

A pin keeps its chain and the window blocks that hang on it, within a share of the budget of the
level that is their home, in physical bytes. The budget may change at any time: the limit is worked
out in the hold that keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.pins import Pin
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.books.tree import BlockTree

_MOST_LOOKED_AT: Final = 4096  # blocks after a pin's: the lock is held meanwhile


@dataclass(frozen=True, slots=True)
class PinOutcome:
    """A pin that was set, or would be."""

    pin: Pin
    known: Pin | None  # that was set on the same chain before
    more_bytes: int  # that it pins
    kept_bytes: int  # that were pinned before
    limit_bytes: int
    fits: bool  # within the limit; else it was not set


def limit_bytes(home: Level, share: float) -> int:
    """That may be pinned. Needs no lock."""
    return int(home.lru.budget_bytes * share)


def restore(state: StoreState, pins: Iterable[Pin]) -> None:
    """Those that were set before the start."""
    with state.lock:
        for pin in pins:
            state.pins.add(pin)


def all_pins(state: StoreState) -> list[Pin]:
    """Oldest first."""
    with state.lock:
        return list(state.pins)


def enforce(state: StoreState, home: Level, share: float) -> list[Pin]:
    """The budget holds, pins or not: those that are out of force."""
    with state.lock:
        limit = limit_bytes(home, share)
        idle = state.pins.enforce(limit, lambda key: _block_bytes(state, home, key))
        _settle(state, home, limit)
        return idle


def settle(state: StoreState, home: Level, share: float) -> None:
    """Keeps the window blocks that came to kept blocks since, as far as there is room."""
    with state.lock:
        _settle(state, home, limit_bytes(home, share))


def follow(state: StoreState, home: Level, share: float) -> list[Pin]:
    """Moves pins that follow to the end of what was added to their chains, those for which there is
    room; returns them. Of several continuations it is the longest, then the one used last.
    """
    with state.lock:
        pins, limit = state.pins, limit_bytes(home, share)
        pins.grown = False
        moved = []
        for pin in pins.followed():
            chain = _continued(state.tree, pin)
            if chain == pin.chain or chain[-1] in pins:  # another pin keeps all of it
                continue
            pins.discard(pin.key)
            after = replace(pin, chain=chain)
            pins.add(after)
            if _chain_bytes(state, home) > limit:
                pins.discard(after.key)
                pins.add(pin)
                continue
            moved.append(after)
        pins.grown = False
        _settle(state, home, limit)
        return moved


def _continued(tree: BlockTree, pin: Pin) -> tuple[BlockKey, ...]:
    """The chain of a pin with the longest that it goes on with; the same if nothing was added."""
    best: tuple[int, float, tuple[BlockKey, ...]] = (0, 0.0, pin.chain)
    record = tree.get(pin.key)
    if record is None:
        return pin.chain
    # (a block, the rows up to it, what leads to it)
    left = [(one, one.rows, pin.chain) for one in tree.children(pin.key) if not one.window]
    for one in tree.children(record.parent):
        begins_alike = not one.window and one.tokens.startswith(record.tokens)
        if begins_alike and record in tree.covers(one):  # it has more of the same rows
            left.append((one, one.rows - record.rows, pin.chain[:-1]))
    for _ in range(_MOST_LOOKED_AT):
        if not left:
            break
        one, rows, before = left.pop()
        chain = (*before, one.key)
        best = max(best, (rows, one.last_use, chain))
        below = (child for child in tree.children(one.key) if not child.window)
        left += [(child, rows + child.rows, chain) for child in below]
    return best[2]


def kept_bytes(state: StoreState, home: Level) -> int:
    with state.lock:
        return _kept_bytes(state, home)


def pin_chain(
    state: StoreState,
    home: Level,
    share: float,
    key: BlockKey,
    *,
    follows: bool = False,
    dry_run: bool,
) -> PinOutcome | None:
    """The chain that ends with the block, if there is room for it. None: it is not stored. A pin
    that follows what is added to its chain goes on doing so.
    """
    with state.lock:
        records = list(state.tree.ancestors(key))[::-1]
        if not records:
            return None
        known = next((pin for pin in state.pins if pin.key == key), None)
        new = {
            one.key
            for record in records
            if not state.pins.keeps(record.key)
            for one in (record, *state.tree.windows(record.key))
        }
        more_bytes = sum(_block_bytes(state, home, one) for one in new)
        chain = tuple(record.key for record in records)
        since = known.since if known else state.wall_clock()
        set_on = (known.set_on if known else None) or (key if follows else None)
        pin = Pin(records[0].namespace, chain, since, set_on)
        kept = _kept_bytes(state, home)
        limit = limit_bytes(home, share)
        fits = kept + more_bytes <= limit
        if fits and not dry_run:
            state.pins.add(pin)
            _settle(state, home, limit)
        return PinOutcome(pin, known, more_bytes, kept, limit, fits)


def pin_of(state: StoreState, key: BlockKey) -> Pin | None:
    """The pin on the chain that ends with the block, or that was set there and has moved on."""
    with state.lock:
        return state.pins.of(key)


def lift_pin(state: StoreState, key: BlockKey, instead: Pin | None = None) -> Pin | None:
    """The pin on the chain that ends with the block; `instead` is set in its place."""
    with state.lock:
        pin = state.pins.discard(key)
        if instead is not None:
            state.pins.add(instead)
        return pin


def _settle(state: StoreState, home: Level, limit: int) -> None:
    """Keeps, of the window blocks on kept blocks, those it kept already and then the oldest, as
    many as there is room for. What other conversations hang on a pinned beginning must not push out
    what was there when it was pinned, nor put a pin out of force.
    """
    pins, tree = state.pins, state.tree
    left_bytes = limit - sum(_block_bytes(state, home, key) for key in pins.kept_chains())
    hanging = [window for key in pins.kept_chains() for window in tree.windows(key)]
    hanging.sort(key=lambda one: (not pins.keeps(one.key), one.created, one.key))
    kept: dict[BlockKey, BlockKey] = {}
    for window in hanging:
        window_bytes = _block_bytes(state, home, window.key)
        if window_bytes <= left_bytes:
            left_bytes -= window_bytes
            kept[window.key] = BlockKey(window.parent)
    pins.set_windows(kept)


def _chain_bytes(state: StoreState, home: Level) -> int:
    return sum(_block_bytes(state, home, key) for key in state.pins.kept_chains())


def _kept_bytes(state: StoreState, home: Level) -> int:
    pins = state.pins
    return sum(
        _block_bytes(state, home, key) for key in {*pins.kept_chains(), *pins.kept_windows()}
    )


def _block_bytes(state: StoreState, home: Level, key: BlockKey) -> int:
    """Physical where it is known already, else what the file has."""
    record = state.tree.get(key)
    if record is None:
        return 0
    return home.lru.stored_bytes(key) or record.file_bytes
