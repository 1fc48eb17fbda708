"""What each tier writes, and how fast this machine turns it back into rows."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from ollama_tiering.store.block.encoding import DEFAULT_ZSTD_LEVEL, Encoding, ZstdPlanes
from ollama_tiering.store.block.key import NamespaceId
from ollama_tiering.store.books.speed import DecodeMeter
from ollama_tiering.store.tiers.contract import TierKind

if TYPE_CHECKING:
    from ollama_tiering.store.books.state import Level

Q8_0_EXTRA: Final = "kv=q8_0"  # part of a namespace's `extra`, between semicolons

_KNOWN_NAMESPACES: Final = 256
_DEFAULT_BYTES_PER_SECOND: Final = 300e6
_PROBE_ELEMENTS: Final = 64 << 10  # a segment of a usual size
_PROBES: Final = 5
_PROBE_SHARE: Final = 0.4  # 2.2 GB/s decoded, 0.9 GB/s written: docs/measurements/encoding.md


class TierEncodings:
    """Which encoding each tier stores blocks in, and how fast they are decoded. Thread-safe."""

    def __init__(
        self,
        encodings: Mapping[TierKind, Encoding] | None = None,
        zstd_level: int = DEFAULT_ZSTD_LEVEL,
    ) -> None:
        self._encodings = dict(encodings or {})
        self._lock = threading.Lock()
        self.planes = ZstdPlanes(zstd_level)
        self.decoding = DecodeMeter()
        self._rounded: dict[NamespaceId, None] = {}

    def of(self, level: Level) -> Encoding:
        """What is written to this level. Clients fill and map the files of the first: raw."""
        return self._encodings.get(level.tier.kind, Encoding.NONE) if level.index else Encoding.NONE

    def keeps_raw(self, level: Level, namespace: NamespaceId) -> bool:
        """Whether this level stores blocks of the namespace as clients read them."""
        if self.of(level) is not Encoding.NONE:
            return False
        return not (level.index and self.rounds(namespace))

    def note(self, namespace: NamespaceId, fields: Sequence[tuple[str, str]]) -> bool:
        """Whether the rows of a namespace are to be rounded to q8_0: its description says so.

        Remembered for the last of them only, since anybody may describe any number.
        """
        rounded = Q8_0_EXTRA in dict(fields).get("extra", "").split(";")
        if rounded:
            with self._lock:
                self._rounded.pop(namespace, None)
                self._rounded[namespace] = None
                if len(self._rounded) > _KNOWN_NAMESPACES:
                    del self._rounded[next(iter(self._rounded))]
        return rounded

    def rounds(self, namespace: NamespaceId) -> bool:
        """Whether rows of this namespace are known to be q8_0's."""
        return namespace in self._rounded

    def rounded_namespaces(self) -> list[NamespaceId]:
        with self._lock:
            return list(self._rounded)

    @property
    def in_use(self) -> bool:
        return any(encoding is not Encoding.NONE for encoding in self._encodings.values())

    def decode_seconds(self, raw_bytes: int) -> float:
        """What decoding that much is expected to take."""
        return raw_bytes / (self.decoding.bytes_per_second or _DEFAULT_BYTES_PER_SECOND)

    def measure(self) -> None:
        """A first figure before any block was decoded: noise in the shape of f16 rows.

        Nothing where there is one already. The share stands for checksums and for writing the rows,
        which come with every block; real ones correct it soon.
        """
        if self.decoding.bytes_per_second:
            return
        raw = np.random.default_rng(0).standard_normal(_PROBE_ELEMENTS, np.float32)
        data = raw.astype(np.float16).data.cast("B")
        frames = self.planes.encode(data, "f16")
        stored, lengths = b"".join(frames), [len(frame) for frame in frames]
        fastest = math.inf
        for _ in range(_PROBES):  # the first one also pays for fresh memory
            start = time.perf_counter()
            self.planes.decode(stored, lengths, "f16", data.nbytes)
            fastest = min(fastest, time.perf_counter() - start)
        self.decoding.add(data.nbytes, fastest / _PROBE_SHARE)
