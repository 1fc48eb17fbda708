"""Setting and lifting pins: the table in memory, its file, and how much may be pinned.

Thread-safe: changes are made one at a time, and the store's lock is not held while the file is
written.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Final

from ollama_tiering.config import format_size
from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.pins import Pin
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.errors import PinsFull, UnknownId
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.names import PINS_NAME
from ollama_tiering.store.upkeep.pin_file import file_of_pins, load_pins, save_pins
from ollama_tiering.store.upkeep.room import room_for_list

log = logging.getLogger(__name__)

PIN_SHARE: Final = 0.5  # of the budget of the tier that keeps pinned blocks


class PinBook:
    """The file lies in the directory of `home`; without a directory pins are in memory only."""

    def __init__(self, state: StoreState, share: float) -> None:
        self._state = state
        self._share = share
        self._changing = threading.Lock()

    @property
    def home(self) -> Level:
        """The level that keeps pinned blocks: the lowest one that is this host's alone."""
        own = [level for level in self._state.levels if level.tier.kind is not TierKind.REMOTE]
        return (own or self._state.levels)[-1]

    @property
    def path(self) -> Path | None:
        directory = self.home.tier.directory
        return directory / PINS_NAME if directory is not None else None

    @property
    def limit_bytes(self) -> int:
        return int(self.home.lru.budget_bytes * self._share)

    def load(self) -> None:
        """To be called once the books are filled. OSError passes: see load_pins."""
        if self.path is None:
            return
        found = load_pins(self.path)
        with self._state.lock:
            for pin in found:
                self._state.pins.add(pin)
        self.enforce()

    def enforce(self) -> None:
        """To be called whenever the budget has changed: a budget holds, pins or not."""
        state = self._state
        with state.lock:
            idle = state.pins.enforce(self.limit_bytes, self._block_bytes)
            self._settle()
        for pin in idle:
            log.warning(
                "pin out of force, the budget is too small: chain=%s limit=%s",
                pin.key.hex()[:16],
                format_size(self.limit_bytes),
            )

    def settle(self) -> None:
        """To be called now and then: keeps the window blocks that came to kept blocks since."""
        if self._state.pins.unsettled:
            with self._state.lock:
                self._settle()

    def pinned_bytes(self) -> int:
        with self._state.lock:
            return self._kept_bytes()

    def pin(self, key: BlockKey, *, dry_run: bool = False) -> tuple[Pin, int]:
        """Keeps the chain that ends with `key`, and its window blocks; (the pin, bytes that are
        pinned because of it).

        Pinning what is pinned is fine. UnknownId, PinsFull; OSError when it cannot be recorded:
        then it is not pinned.
        """
        state = self._state
        with self._changing:
            with state.lock:
                records = list(state.tree.ancestors(key))[::-1]
                if not records:
                    raise UnknownId(f"no block {key.hex()} is stored")
                known = next((pin for pin in state.pins if pin.key == key), None)
                new = {
                    one.key
                    for record in records
                    if not state.pins.keeps(record.key)
                    for one in (record, *state.tree.windows(record.key))
                }
                more, kept = sum(map(self._block_bytes, new)), self._kept_bytes()
                if kept + more > self.limit_bytes:
                    raise PinsFull(
                        f"{format_size(more)} more would pin {format_size(kept + more)}; "
                        f"{format_size(self.limit_bytes)} may be pinned "
                        f"({self._share:.0%} of the {self.home.tier.kind.label} tier's budget)",
                        hint="unpin something (`tiering ls --pinned`), or raise the budget or "
                        "sidecar.pin_share",
                    )
                chain = tuple(record.key for record in records)
                pin = Pin(records[0].namespace, chain, known.since if known else state.wall_clock())
                if dry_run:
                    return pin, more
                state.pins.add(pin)
                self._settle()
            try:
                self._save(must_fit=True)
            except (OSError, PinsFull):
                with state.lock:
                    state.pins.discard(key)
                    if known is not None:
                        state.pins.add(known)
                raise
        return pin, more

    def unpin(self, key: BlockKey, *, dry_run: bool = False) -> bool:
        """False: the chain that ends with `key` was not pinned."""
        state = self._state
        with self._changing:
            with state.lock:
                if dry_run or key not in state.pins:
                    return key in state.pins
                pin = state.pins.discard(key)
            try:
                self._save(must_fit=False)
            except OSError:
                with state.lock:
                    if pin is not None:
                        state.pins.add(pin)
                raise
        self.enforce()
        return True

    def _save(self, *, must_fit: bool) -> None:
        """The file counts against the budget: there is room for it before it is written."""
        path, level, state = self.path, self.home, self._state
        if path is None:
            return
        with state.lock:
            pins = list(state.pins)
        text = file_of_pins(pins)
        with room_for_list(state, level, len(text)) as fits:
            # A tier over its budget already (it was lowered, and a tool evicts nothing) is no
            # reason.
            if text and must_fit and not fits and not level.lru.excess_bytes:
                raise PinsFull(
                    f"no room for the list of pins: {path}",
                    hint="unpin something (`tiering ls --pinned`), or try again when nothing is "
                    "in use",
                )
            save_pins(path, text)

    def _settle(self) -> None:
        """Of the window blocks on kept blocks keeps those it kept already and then the oldest, as
        many as there is room for. What other conversations hang on a pinned beginning must not push
        out what was there when it was pinned, nor put a pin out of force. Lock held.
        """
        pins, tree = self._state.pins, self._state.tree
        left_bytes = self.limit_bytes - sum(map(self._block_bytes, pins.kept_chains()))
        hanging = [window for key in pins.kept_chains() for window in tree.windows(key)]
        hanging.sort(key=lambda one: (not pins.keeps(one.key), one.created, one.key))
        kept: dict[BlockKey, BlockKey] = {}
        for window in hanging:
            window_bytes = self._block_bytes(window.key)
            if window_bytes <= left_bytes:
                left_bytes -= window_bytes
                kept[window.key] = BlockKey(window.parent)
        pins.set_windows(kept)

    def _kept_bytes(self) -> int:
        pins = self._state.pins
        return sum(map(self._block_bytes, {*pins.kept_chains(), *pins.kept_windows()}))

    def _block_bytes(self, key: BlockKey) -> int:
        """Physical where it is known already, else what the file has. Lock held."""
        record = self._state.tree.get(key)
        if record is None:
            return 0
        return self.home.lru.stored_bytes(key) or record.file_bytes
