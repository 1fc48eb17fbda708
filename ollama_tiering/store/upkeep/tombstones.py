"""Tombstones: blocks a person removed whose copies on the remote tier are not known to be gone yet.

`tombstones.json` lies beside `pins.json`, so that what was removed while that tier was away is
removed when it is seen again, after a restart too. It names the directory: a tombstone is about
that one, whatever else is configured meanwhile.

    {"version": 1, "tiers": [{"directory": path, "namespaces": {hex: {key hex: Unix seconds}}}]}
"""

from __future__ import annotations

import errno
import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from ollama_tiering.store.block.key import BlockKey, NamespaceId, digest_from_hex
from ollama_tiering.store.books.graves import Grave
from ollama_tiering.store.tiers.names import BAD_SUFFIX
from ollama_tiering.system.directories import UnsafeDirectory
from ollama_tiering.system.durable_file import bounded_content

log = logging.getLogger(__name__)

_VERSION: Final = 1
_MAX_FILE_BYTES: Final = 64 << 20


def load_tombstones(path: Path) -> dict[Grave, float]:
    """When each block was removed (Unix seconds). Nothing where there is no file.

    A file that is not readable as this is said in the log; see `keep_unreadable`. UnsafeDirectory
    for a link; other OSErrors pass, for going on without it could bring back what was removed.
    """
    try:
        return _parse(bounded_content(path, _MAX_FILE_BYTES))
    except FileNotFoundError:
        return {}
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UnsafeDirectory(
            f"{path} is a link: the store does not follow it, nor start without its tombstones",
            hint="put the file itself there, or remove the link: then what was removed while the "
            "remote tier was away may come back",
        ) from None
    except ValueError as error:
        log.error(
            "tombstones unreadable, what was removed while the remote tier was away may come back: "
            "path=%s reason=%s",
            path,
            error,
        )
        return {}


def keep_unreadable(path: Path) -> None:
    """Call it before the file is replaced: one that is damaged is kept aside. OSError."""
    try:
        _parse(bounded_content(path, _MAX_FILE_BYTES))
    except FileNotFoundError:
        return
    except ValueError:
        path.rename(path.with_name(path.name + BAD_SUFFIX))


def text_of_tombstones(tombstones: Mapping[Grave, float]) -> str:
    tiers: dict[str, dict[str, dict[str, float]]] = {}
    for grave, since in tombstones.items():
        namespaces = tiers.setdefault(grave.directory, {})
        namespaces.setdefault(grave.namespace.hex(), {})[grave.key.hex()] = since
    entries = [{"directory": d, "namespaces": namespaces} for d, namespaces in tiers.items()]
    return json.dumps({"version": _VERSION, "tiers": entries}) + "\n"


def _parse(data: bytes) -> dict[Grave, float]:
    try:
        document = json.loads(data)
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']!r} is unknown")
        return dict(_graves(document["tiers"]))
    except (AttributeError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a list of tombstones: {error}") from None


def _graves(tiers: Any) -> Iterable[tuple[Grave, float]]:
    for tier in tiers:
        if not isinstance(tier["directory"], str):
            raise ValueError("a directory is no text")
        for namespace_hex, keys in tier["namespaces"].items():
            for key_hex, since in keys.items():
                namespace, key = digest_from_hex(namespace_hex), digest_from_hex(key_hex)
                if namespace is None or key is None or not math.isfinite(since):
                    raise ValueError("a tombstone names no block and time")
                grave = Grave(tier["directory"], NamespaceId(namespace), BlockKey(key))
                yield grave, float(since)
