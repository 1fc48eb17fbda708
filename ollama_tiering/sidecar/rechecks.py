"""What was computed again and compared with what is stored: sums, and the differences, in the state
directory: `rechecks.json`, mode 0600.

It has file names of models, counts, and keys of blocks, but no text.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ollama_tiering.system.durable_file import MALFORMED, replace_file, versioned_document

log = logging.getLogger(__name__)

FILE_NAME: Final = "rechecks.json"
_MOST_MODELS: Final = 256
_MOST_DIFFERENCES: Final = 32
_MOST_CONDEMNED: Final = 4096
_MAX_BYTES: Final = 1 << 20
_VERSION: Final = 1


@dataclass(slots=True)
class RecheckSum:
    """Of one model."""

    blocks: int = 0  # computed again, with the bits that were stored
    different: int = 0
    last_unix_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RowsDiffer:
    """A block that was stored with other rows than were computed for the same text."""

    unix_seconds: float
    model: str
    engine: str
    namespace: str  # in hex
    key: str
    first_token: int


class Rechecks:
    """Thread-safe. In memory only where there is no directory."""

    def __init__(
        self, directory: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._path = directory / FILE_NAME if directory is not None else None
        self._clock = clock
        self._lock = threading.Lock()
        self._models: dict[str, RecheckSum] = {}
        self._differences: deque[RowsDiffer] = deque(maxlen=_MOST_DIFFERENCES)
        self._condemned: dict[bytes, None] = {}  # the last ones are the last
        self._load()

    def sums(self) -> dict[str, RecheckSum]:
        """By the model's file name."""
        with self._lock:
            return {model: RecheckSum(**asdict(one)) for model, one in self._models.items()}

    def differences(self) -> list[RowsDiffer]:
        """The latest are the last."""
        with self._lock:
            return list(self._differences)

    def is_condemned(self, key: bytes) -> bool:
        """Whether a block was computed again with other bits: it is neither used nor stored again,
        whoever still has it. Takes no lock.
        """
        return key in self._condemned

    def condemn(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            self._condemned.update(dict.fromkeys(keys))
            while len(self._condemned) > _MOST_CONDEMNED:
                del self._condemned[next(iter(self._condemned))]

    def alike(self, model: str, blocks: int) -> None:
        with self._lock:
            self._of(model).blocks += blocks

    def differ(
        self, model: str, engine: str, namespace: bytes, blocks: Sequence[tuple[bytes, int]]
    ) -> None:
        """`blocks`: key, and the block's first token."""
        now = self._clock()
        with self._lock:
            self._of(model).different += len(blocks)
            for key, first in blocks:
                self._differences.append(
                    RowsDiffer(now, model, engine, namespace.hex(), key.hex(), first)
                )
        for key, first in blocks:
            said = "WRONG ROWS stored, now put aside: model=%s key=%s first_token=%d engine=%s"
            log.error(said, model, key.hex(), first, engine)

    def save(self) -> None:
        """May block; an OSError becomes a line in the log."""
        if self._path is None:
            return
        with self._lock:
            document = {
                "version": _VERSION,
                "models": {model: asdict(one) for model, one in self._models.items()},
                "differences": [asdict(one) for one in self._differences],
                "condemned": [key.hex() for key in self._condemned],
            }
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._path, json.dumps(document, indent=1) + "\n")
        except OSError as error:
            log.warning("rechecks not written: path=%s reason=%s", self._path, error.strerror)

    def _of(self, model: str) -> RecheckSum:
        one = self._models.pop(model, None) or RecheckSum()
        self._models[model] = one
        one.last_unix_seconds = self._clock()
        if len(self._models) > _MOST_MODELS:
            del self._models[next(iter(self._models))]
        return one

    def _load(self) -> None:
        if self._path is None:
            return
        try:
            document = versioned_document(self._path, _MAX_BYTES, _VERSION)
            models = {str(model): _sum(entry) for model, entry in document["models"].items()}
            differences = [_difference(entry) for entry in document["differences"]]
            condemned = [bytes.fromhex(key) for key in document["condemned"]]
        except FileNotFoundError:
            return
        except (OSError, *MALFORMED) as error:
            log.warning("sums of rechecks begin anew: path=%s reason=%s", self._path, error)
            return
        self._models = dict(list(models.items())[-_MOST_MODELS:])
        self._differences.extend(differences)
        self.condemn(condemned)


def _sum(entry: dict[str, Any]) -> RecheckSum:
    return RecheckSum(
        int(entry["blocks"]), int(entry["different"]), float(entry["last_unix_seconds"])
    )


def _difference(entry: dict[str, Any]) -> RowsDiffer:
    return RowsDiffer(
        float(entry["unix_seconds"]),
        str(entry["model"]),
        str(entry["engine"]),
        str(entry["namespace"]),
        str(entry["key"]),
        int(entry["first_token"]),
    )
