"""`pins.json` in a tier's directory keeps the pins.

A file of its own, because the index may be thrown away at any time. It names every block of each
chain, so that a block that comes back (stored again, found later by a scan) is kept again.

    {"version": 1, "pins": [{"namespace": hex, "chain": [hex, …], "since": Unix seconds,
                             "follow": hex}]}

`follow` is there only if the pin follows what is added to its chain: the block on which it was set.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from ollama_tiering.store.block.key import BlockKey, NamespaceId, digest_from_hex
from ollama_tiering.store.books.pins import Pin
from ollama_tiering.store.tiers.names import BAD_SUFFIX
from ollama_tiering.system.directories import UnsafeDirectory
from ollama_tiering.system.durable_file import bounded_content, replace_file

log = logging.getLogger(__name__)

_VERSION: Final = 1
_MAX_FILE_BYTES: Final = 256 << 20


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
            **({"follow": pin.set_on.hex()} if pin.set_on is not None else {}),
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
    set_on = None
    if "follow" in entry:
        if (named := digest_from_hex(entry["follow"])) is None:
            raise ValueError("a pin follows no block")
        set_on = BlockKey(named)
    return Pin(NamespaceId(namespace), keys, float(entry["since"]), set_on)
