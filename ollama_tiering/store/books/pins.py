"""Pins: chains a person wants kept. A pinned block is never evicted; only damage takes it away.

Pure. Window blocks are in no pin: those that hang on a kept block are kept with it, now and later,
as far as pins may take room (`PinBook.settle`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ollama_tiering.store.block.key import BlockKey, NamespaceId


@dataclass(frozen=True, slots=True)
class Pin:
    namespace: NamespaceId
    chain: tuple[BlockKey, ...]  # first block to last, never empty
    since: float  # Unix seconds
    set_on: BlockKey | None = None  # what a person named, if the pin follows what is added to it

    @property
    def key(self) -> BlockKey:
        return self.chain[-1]


class PinTable:
    """Which blocks are kept. A pin that is out of force is remembered but keeps nothing."""

    def __init__(self) -> None:
        self._pins: dict[BlockKey, Pin] = {}  # oldest first
        self._keeping: dict[BlockKey, int] = {}  # block -> pins in force that hold it
        self._idle: set[BlockKey] = set()  # pins out of force
        self._windows: dict[BlockKey, BlockKey] = {}  # window blocks -> blocks they hang on
        self._awaited: set[bytes] = set()  # parents of blocks with which followed chains go on
        self.grown = False  # such a block came, or may have come: `pinning.follow` is due
        self.unsettled = False  # window blocks came to kept blocks: `set_windows` is due

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def __contains__(self, key: BlockKey) -> bool:
        """Whether the chain that ends with this block is pinned."""
        return key in self._pins

    def of(self, key: BlockKey) -> Pin | None:
        """The pin on the chain that ends with the block, or that was set on it and has moved on."""
        moved = (pin for pin in self if pin.set_on == key)
        return self._pins.get(key) or next(moved, None)

    def followed(self) -> list[Pin]:
        """Pins in force that follow what is added to their chains; oldest first."""
        return [pin for pin in self if pin.set_on is not None and pin.key not in self._idle]

    def block_came(self, parent: bytes) -> None:
        # One that follows waits before the chain of another pin, and goes on when that does.
        self.grown |= parent in self._awaited or bool(self._awaited and parent in self._pins)

    def keeps(self, key: BlockKey) -> bool:
        return key in self._keeping or self._windows.get(key) in self._keeping

    def kept_chains(self) -> Iterator[BlockKey]:
        """Blocks of chains, each once, stored or not."""
        return iter(self._keeping)

    def kept_windows(self) -> Iterator[BlockKey]:
        return (key for key, on in self._windows.items() if on in self._keeping)

    def set_windows(self, windows: Mapping[BlockKey, BlockKey]) -> None:
        """Which window blocks are kept, for as long as the block is that each hangs on."""
        self._windows, self.unsettled = dict(windows), False

    def window_came(self, on: bytes) -> None:
        self.unsettled = self.unsettled or on in self._keeping

    def window_went(self, key: BlockKey) -> None:
        self._windows.pop(key, None)

    def in_force(self, key: BlockKey) -> bool:
        return key in self._pins and key not in self._idle

    def add(self, pin: Pin) -> None:
        self.discard(pin.key)
        self._pins[pin.key] = pin
        self._count(pin, 1)
        self._await(pin)

    def discard(self, key: BlockKey) -> Pin | None:
        pin = self._pins.pop(key, None)
        if pin is not None and key not in self._idle:
            self._count(pin, -1)
        self._idle.discard(key)
        if pin is not None:
            self._await(pin)
        return pin

    def enforce(self, limit_bytes: int, bytes_of: Callable[[BlockKey], int]) -> list[Pin]:
        """Puts pins in force, oldest first, as far as their blocks fit; those that do not.

        A budget that was lowered below what is pinned holds all the same.
        """
        pins = sorted(self, key=lambda pin: pin.since)  # one that has moved on is as old as before
        self._keeping, self._idle = {}, set()
        kept_bytes = 0
        for pin in pins:
            more = sum(bytes_of(key) for key in set(pin.chain) if key not in self._keeping)
            if kept_bytes + more > limit_bytes:
                self._idle.add(pin.key)
                continue
            kept_bytes += more
            self._count(pin, 1)
        return [pin for pin in pins if pin.key in self._idle]

    def _count(self, pin: Pin, step: int) -> None:
        for key in pin.chain:
            count = self._keeping.get(key, 0) + step
            if count > 0:
                self._keeping[key] = count
            else:
                self._keeping.pop(key, None)

    def _await(self, changed: Pin) -> None:
        """A block may come after the last one, or in its place with more rows."""
        if changed.set_on is not None:
            self.grown = True
            ends = ((pin.namespace, *pin.chain)[-2:] for pin in self if pin.set_on is not None)
            self._awaited = {key for pair in ends for key in pair}
