"""CRC-32C by google-crc32c's C extension, over any buffer without copying it.

The extension takes only objects without a release hook: numpy arrays pass, memoryview and mmap do
not. It holds the interpreter lock, so long buffers are taken in slices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import google_crc32c
import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Buffer

_SLICE_BYTES: Final = 1 << 20


def crc32c(data: Buffer, crc: int = 0) -> int:
    """CRC-32C of `data`, continued from `crc`."""
    view = memoryview(data)
    if not view.nbytes:
        return crc
    array = np.frombuffer(view, dtype=np.uint8)
    for start in range(0, array.size, _SLICE_BYTES):
        crc = google_crc32c.extend(crc, cast(Any, array[start : start + _SLICE_BYTES]))
    return crc
