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
from ollama_tiering.store.books import pinning
from ollama_tiering.store.books.pins import Pin
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.errors import PinsFull, UnknownId
from ollama_tiering.store.tiers.names import PINS_NAME
from ollama_tiering.store.upkeep.lists_elsewhere import lists_elsewhere, remove_lists
from ollama_tiering.store.upkeep.making_room import room_for_list
from ollama_tiering.store.upkeep.pin_file import file_of_pins, load_pins, save_pins

log = logging.getLogger(__name__)

_MOVES_SECONDS: Final = 60.0  # between two times that pins which moved are written down
PIN_SHARE: Final = 0.5  # of the budget of the tier that keeps pinned blocks


class PinBook:
    """The file lies in the directory of `home`; without a directory pins are in memory only."""

    def __init__(self, state: StoreState, share: float) -> None:
        self._state = state
        self._share = share
        self._changing = threading.Lock()
        self._write_moves_at = 0.0  # (clock) not before: a move is found again after a start
        self._elsewhere: list[Path] = []  # taken over, and not written down in the right place yet

    @property
    def home(self) -> Level:
        """The level that keeps pinned blocks: the lowest one that is this host's alone."""
        own = [level for level in self._state.levels if not level.tier.is_shared]
        return (own or self._state.levels)[-1]

    @property
    def path(self) -> Path | None:
        directory = self.home.tier.directory
        return directory / PINS_NAME if directory is not None else None

    @property
    def limit_bytes(self) -> int:
        return pinning.limit_bytes(self.home, self._share)

    def load(self) -> None:
        """Call it once the books are filled. OSError passes: see load_pins."""
        if self.path is None:
            return
        self._elsewhere = lists_elsewhere(self._state, self.home, PINS_NAME)
        for path in (self.path, *self._elsewhere):
            pinning.restore(self._state, load_pins(path))
        self.enforce()

    def take_over(self) -> None:
        """Writes the pins of lists that lay elsewhere to their right place: in the RAM tier they
        would go with a reboot.
        """
        if not self._elsewhere:
            return
        with self._changing:
            try:
                self._save(must_fit=False)
            except OSError as error:
                log.error("pins not written, a reboot may lose some: path=%s %s", self.path, error)

    def enforce(self) -> None:
        """Call it whenever the budget has changed: a budget holds, pins or not."""
        for pin in pinning.enforce(self._state, self.home, self._share):
            log.warning(
                "pin out of force, the budget is too small: chain=%s limit=%s",
                pin.key.hex()[:16],
                format_size(self.limit_bytes),
            )

    def settle(self) -> None:
        """Call it now and then: keeps what came since to chains that pins follow, and the window
        blocks that came to kept blocks.
        """
        if self._state.pins.grown:
            self._follow()
        if self._state.pins.unsettled:
            pinning.settle(self._state, self.home, self._share)

    def _follow(self) -> None:
        """A pin whose move is not written down is found where it was at the next start, and moves
        once more.
        """
        with self._changing:
            moved = pinning.follow(self._state, self.home, self._share)
            now = self._state.clock()
            if moved and now >= self._write_moves_at:  # a long turn moves it with each block
                self._write_moves_at = now + _MOVES_SECONDS
                try:
                    self._save(must_fit=False)
                except OSError as error:
                    log.error("pins that moved are not written: path=%s %s", self.path, error)

    def pinned_bytes(self) -> int:
        return pinning.kept_bytes(self._state, self.home)

    def pin(
        self, key: BlockKey, *, follows: bool = False, dry_run: bool = False
    ) -> tuple[Pin, int]:
        """Keeps the chain that ends with `key`, and its window blocks; (the pin, bytes that are
        pinned because of it). `follows`: and what is added to it later.

        Pinning what is pinned is fine. UnknownId, PinsFull; OSError when it cannot be recorded:
        then it is not pinned.
        """
        state = self._state
        with self._changing:
            given = (state, self.home, self._share, key)
            found = pinning.pin_chain(*given, follows=follows, dry_run=dry_run)
            if found is None:
                raise UnknownId(f"no block {key.hex()} is stored")
            more = found.more_bytes
            if not found.fits:
                raise PinsFull(
                    f"{format_size(more)} more would pin {format_size(found.kept_bytes + more)}; "
                    f"{format_size(found.limit_bytes)} may be pinned "
                    f"({self._share:.0%} of the {self.home.tier.kind.label} tier's budget)",
                    hint="unpin something (`tiering ls --pinned`), or raise the budget or "
                    "sidecar.pin_share",
                )
            if dry_run:
                return found.pin, more
            try:
                self._save(must_fit=True)
            except (OSError, PinsFull):
                pinning.lift_pin(state, key, instead=found.known)
                raise
        return found.pin, more

    def unpin(self, key: BlockKey, *, dry_run: bool = False) -> bool:
        """False: the chain that ends with `key` was not pinned, nor was a pin set there that has
        moved on.
        """
        state = self._state
        with self._changing:
            pin = pinning.pin_of(state, key)
            if dry_run or pin is None:
                return pin is not None
            pin = pinning.lift_pin(state, pin.key)
            try:
                self._save(must_fit=False)
            except OSError:
                if pin is not None:
                    pinning.restore(state, [pin])
                raise
        self.enforce()
        return True

    def _save(self, *, must_fit: bool) -> None:
        """The file counts against the budget: there is room for it before it is written."""
        path, level, state = self.path, self.home, self._state
        if path is None:
            return
        text = file_of_pins(pinning.all_pins(state))
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
        remove_lists(self._elsewhere)
