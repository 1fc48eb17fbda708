"""Pins: chains a person wants kept. A pinned block is never evicted; only damage takes it away.

`PinTable` is what eviction asks; pure, under the store's lock. `pins.json` in a tier's directory
keeps them: a file of its own, because the index may be thrown away at any time. It names every
block of each chain, so that a block that comes back (stored again, found later by a scan) is kept
again. Window blocks are not in it: those that hang on a kept block are kept with it, now and later,
as far as pins may take room (`PinBook.settle`).

    {"version": 1, "pins": [{"namespace": hex, "chain": [hex, …], "since": Unix seconds}]}
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ollama_tiering.store.block.key import BlockKey, NamespaceId, digest_from_hex
from ollama_tiering.store.tiers.names import BAD_SUFFIX
from ollama_tiering.system.directories import UnsafeDirectory
from ollama_tiering.system.durable_file import bounded_content, replace_file

log = logging.getLogger(__name__)

_VERSION: Final = 1
_MAX_FILE_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Pin:
    namespace: NamespaceId
    chain: tuple[BlockKey, ...]  # first block to last, never empty
    since: float  # Unix seconds

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
        self.unsettled = False  # window blocks came to kept blocks: `set_windows` is due

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def __contains__(self, key: BlockKey) -> bool:
        """Whether the chain that ends with this block is pinned."""
        return key in self._pins

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

    def discard(self, key: BlockKey) -> Pin | None:
        pin = self._pins.pop(key, None)
        if pin is not None and key not in self._idle:
            self._count(pin, -1)
        self._idle.discard(key)
        return pin

    def enforce(self, limit_bytes: int, bytes_of: Callable[[BlockKey], int]) -> list[Pin]:
        """Puts pins in force, oldest first, as far as their blocks fit; those that do not.

        A budget that was lowered below what is pinned holds all the same.
        """
        pins, self._keeping, self._idle = list(self), {}, set()
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


def load_pins(path: Path) -> list[Pin]:
    """What the file says; nothing when there is none or it is damaged. UnsafeDirectory for a link.

    Not knowing the pins could cost a pinned block, so weather is no reason to go on without:
    OSError passes.
    """
    try:
        return _parse(bounded_content(path, _MAX_FILE_BYTES))
    except FileNotFoundError:
        return []
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UnsafeDirectory(
            f"{path} is a link: the store does not follow it, nor start without its pins",
            hint="put the file itself there, or remove the link to start without pins",
        ) from None
    except ValueError as error:
        log.error("pins unreadable, nothing is pinned: path=%s reason=%s", path, error)
        return []


def file_of_pins(pins: Iterable[Pin]) -> str:
    """The content of the file; nothing when there is no pin."""
    entries = [
        {
            "namespace": pin.namespace.hex(),
            "chain": [key.hex() for key in pin.chain],
            "since": pin.since,
        }
        for pin in pins
    ]
    return json.dumps({"version": _VERSION, "pins": entries}, indent=1) + "\n" if entries else ""


def save_pins(path: Path, text: str) -> None:
    """Replaces the file, durably. One that was damaged is kept aside."""
    there = os.path.lexists(path)
    if not text and not there:
        return
    text = text or json.dumps({"version": _VERSION, "pins": []}) + "\n"
    if there and not _readable(path):
        path.rename(path.with_name(path.name + BAD_SUFFIX))
    replace_file(path, text)


def _readable(path: Path) -> bool:
    try:
        _parse(bounded_content(path, _MAX_FILE_BYTES))
    except (ValueError, OSError):
        return False
    return True


def _parse(data: bytes) -> list[Pin]:
    try:
        document = json.loads(data)
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']!r} is unknown")
        return [_pin(entry) for entry in document["pins"]]
    except (TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a list of pins: {error}") from None


def _pin(entry: Any) -> Pin:
    digests = [digest_from_hex(text) for text in (entry["namespace"], *entry["chain"])]
    if len(digests) < 2 or None in digests:
        raise ValueError("a pin names no namespace and chain")
    namespace, *chain = [digest for digest in digests if digest is not None]
    keys = tuple(BlockKey(key) for key in chain)
    return Pin(NamespaceId(namespace), keys, float(entry["since"]))
