"""Which builds read what another build has stored, in the state directory: `adopted.json`, mode
0600.

Nobody but this file knows of a revocation or a difference, so it is written before it counts. What
cannot be read adopts nothing.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from ollama_tiering.store import NamespaceId
from ollama_tiering.system.durable_file import MALFORMED, replace_file, versioned_document

log = logging.getLogger(__name__)

FILE_NAME: Final = "adopted.json"
_MOST: Final = 256  # pairs of builds; the oldest go first
_MAX_BYTES: Final = 1 << 20
_NAMESPACE_HEX: Final = 64
_NAMESPACES: Final = ("mine", "other", "joined")
_MOST_NAME: Final = 128
_VERSION: Final = 1


class BuildVerdict(StrEnum):
    ADOPTED = "adopted"
    DIFFERENT = "different"  # rows of one text were not the same
    REVOKED = "revoked"  # by a person


@dataclass(frozen=True, slots=True)
class Adoption:
    """What was decided of two builds of a model's engine, and what it was decided by."""

    mine: NamespaceId  # of the build that asked
    other: NamespaceId  # of the one that stored before it
    joined: NamespaceId  # under which the build that asked stores while it reads both
    model: str  # its file name
    engine: str  # the build that asked, as the namespace names it
    other_engine: str
    blocks: int  # that were the same in both
    deepest_tokens: int  # the last of them ends there
    unix_seconds: float
    verdict: BuildVerdict


class AdoptionRecord:
    """Thread-safe. In memory only where there is no directory."""

    def __init__(self, directory: Path | None = None) -> None:
        self._path = directory / FILE_NAME if directory is not None else None
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # the disk may hang: nobody who only asks waits for it
        self._pairs: dict[tuple[NamespaceId, NamespaceId], Adoption] = {}  # the oldest first
        self.readable = True
        self._load()

    def all(self) -> list[Adoption]:
        with self._lock:
            return list(self._pairs.values())

    def decided(self, mine: NamespaceId, other: NamespaceId) -> bool:
        """Whether it is, whichever of both asked."""
        with self._lock:
            return (mine, other) in self._pairs or (other, mine) in self._pairs

    def concerns(self, namespace: NamespaceId) -> bool:
        """Whether this build ever asked."""
        return any(one.mine == namespace for one in self.all())

    def holding(self) -> list[Adoption]:
        """Those that hold."""
        return [one for one in self.all() if one.verdict is BuildVerdict.ADOPTED]

    def adopted_by(self, mine: NamespaceId) -> Adoption | None:
        return next((one for one in self.holding() if one.mine == mine), None)

    def note(self, decided: Adoption) -> bool:
        """Whether it is on the disk, too: what is not does not hold. May block."""
        with self._writing:
            with self._lock:
                pairs = {**self._pairs}
            pairs.pop((decided.mine, decided.other), None)
            pairs[decided.mine, decided.other] = decided
            while len(pairs) > _MOST:
                held = (k for k, one in pairs.items() if one.verdict is BuildVerdict.ADOPTED)
                del pairs[next(held, next(iter(pairs)))]
            if decided.verdict is not BuildVerdict.ADOPTED:
                with self._lock:
                    self._pairs = pairs  # nobody reads on with it, whatever the disk does
            if not self._written(list(pairs.values())):
                return False
            with self._lock:
                self._pairs = pairs
            return True

    def revoke(self, model: str) -> list[Adoption]:
        """All adoptions of a model that hold. OSError if they would hold again after a start."""
        revoked = [
            replace(one, verdict=BuildVerdict.REVOKED)
            for one in self.holding()
            if one.model == model
        ]
        if not all([self.note(one) for one in revoked]):
            raise OSError(f"{self._path} cannot be written: revoked until the sidecar ends only")
        return revoked

    def _written(self, pairs: Sequence[Adoption]) -> bool:
        if self._path is None:
            return True
        entries = [
            {**asdict(one)} | {name: getattr(one, name).hex() for name in _NAMESPACES}
            for one in pairs
        ]
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            document = {"version": _VERSION, "pairs": entries}
            replace_file(self._path, json.dumps(document, indent=1) + "\n")
        except OSError as error:
            log.warning("builds not noted: path=%s reason=%s", self._path, error.strerror)
            return False
        return True

    def _load(self) -> None:
        if self._path is None:
            return
        try:
            document = versioned_document(self._path, _MAX_BYTES, _VERSION)
            pairs = [_adoption(entry) for entry in document["pairs"][-_MOST:]]
        except FileNotFoundError:
            return
        except (OSError, *MALFORMED) as error:
            self.readable = False  # it may have a difference in it
            said = "no other build's blocks are read: path=%s reason=%s hint=%s"
            log.warning(
                said, self._path, error, "unload all models, remove the file, start the sidecar"
            )
            return
        self._pairs = {(one.mine, one.other): one for one in pairs}


def _adoption(entry: dict[str, Any]) -> Adoption:
    """ValueError, TypeError, KeyError."""
    for name in _NAMESPACES:
        if len(entry[name]) != _NAMESPACE_HEX:
            raise ValueError(f"{name} is no namespace")
    for name in ("model", "engine", "other_engine"):
        if not isinstance(entry[name], str) or len(entry[name]) > _MOST_NAME:
            raise ValueError(f"{name} is no name")
    return Adoption(
        mine=NamespaceId(bytes.fromhex(entry["mine"])),
        other=NamespaceId(bytes.fromhex(entry["other"])),
        joined=NamespaceId(bytes.fromhex(entry["joined"])),
        model=entry["model"],
        engine=entry["engine"],
        other_engine=entry["other_engine"],
        blocks=int(entry["blocks"]),
        deepest_tokens=int(entry["deepest_tokens"]),
        unix_seconds=float(entry["unix_seconds"]),
        verdict=BuildVerdict(entry["verdict"]),
    )
