"""What the encodings do to K/V rows: how much smaller they become, and how fast, per core."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from measure.results import Ratio, Section
from measure.store import kv_rows
from ollama_tiering.store import ZstdPlanes, planes, q8_0

REPEATS: Final = 5
_PLANE_BYTES: Final = 128 << 10


def measure(say: Callable[[str], None]) -> Section:
    notes = [
        "Segments of blocks of 64 tokens, of all layers but the first: V of layer 0 depends on "
        "its token alone, and byte tokens repeat.",
        f"Rates are raw bytes per second of processor time, the best of {REPEATS}.",
    ]
    say("encodings, random weights")
    caches = kv_rows.of_random_weights(kv_rows.made_up_passages())
    ratios = _of("random weights", kv_rows.segments(caches, first_layer=1))
    ratios += _planes()
    return Section("encoding", "Encodings", "raw ÷ stored; GB/s ÷ 4 GB/s", ratios, notes)


def _of(name: str, parts: Sequence[bytes]) -> list[Ratio]:
    zstd_planes = ZstdPlanes()
    raw_bytes = sum(map(len, parts))
    against = f"{raw_bytes / 1e6:.1f} MB of rows in f16"
    frames = [zstd_planes.encode(part, "f16") for part in parts]
    lengths = [[len(frame) for frame in one] for one in frames]
    stored = [b"".join(one) for one in frames]
    for part, data, sizes in zip(parts, stored, lengths, strict=True):
        if zstd_planes.decode(data, sizes, "f16", len(part)).tobytes() != part:
            raise RuntimeError("zstd gave back other rows")
    zstd = Ratio(
        f"zstd, {name}",
        _rates(
            _rate(raw_bytes, lambda part: zstd_planes.encode(part, "f16"), parts),
            _rate(raw_bytes, lambda d, s, p: zstd_planes.decode(d, s, "f16", len(p)),
                  stored, lengths, parts),
        ),
        against,
        raw_bytes / sum(map(len, stored)),
    )  # fmt: skip
    rounded = [q8_0.round_rows(part) for part in parts]
    rows = [bytes(part.data) for part in rounded if part is not None]
    codes = [q8_0.codes_of(row) for row in rows]
    small = [bytes(code.data) for code in codes if code is not None]
    if len(small) != len(parts):
        raise RuntimeError("q8_0 could not hold every segment")
    lossy = Ratio(
        f"q8_0 (lossy), {name}",
        _rates(
            _rate(raw_bytes, _round_and_encode, parts),
            _rate(raw_bytes, q8_0.rows_of, small),
        ),
        against,
        raw_bytes / sum(map(len, small)),
    )
    return [zstd, lossy]


def _round_and_encode(part: bytes) -> None:
    """What happens to a segment: it is rounded at commit, and becomes codes when it is written
    down.
    """
    rounded = q8_0.round_rows(part)
    if rounded is not None:
        q8_0.codes_of(rounded.data)


def _planes() -> list[Ratio]:
    """Splitting into byte planes and joining them. It must reach 4 GB/s, or
    zstd would wait for it.
    """
    parts = [bytes(range(256)) * (_PLANE_BYTES // 256) for _ in range(64)]
    split = [planes.split(part, "f16") for part in parts]
    total = _PLANE_BYTES * len(parts)
    found = []
    for what, work, items in (
        ("split", lambda part: planes.split(part, "f16"), parts),
        ("join", lambda one: planes.join(one, "f16", _PLANE_BYTES), split),
    ):
        rate = _rate(total, work, items)
        found.append(
            Ratio(f"byte planes, {what}", f"{rate / 1e9:.1f} GB/s", "4 GB/s", rate / 4e9, 1.0)
        )
    return found


def _rates(encode: float, decode: float) -> str:
    return f"encode {encode / 1e9:.2f} GB/s, decode {decode / 1e9:.2f} GB/s"


def _rate(size_bytes: int, work: Callable[..., Any], *columns: Sequence[Any]) -> float:
    """Bytes per second of processor time in the best run, because other work on the machine only
    slows it.
    """
    best = float("inf")
    for _ in range(REPEATS):
        start = time.thread_time()
        for arguments in zip(*columns, strict=True):
            work(*arguments)
        best = min(best, time.thread_time() - start)
    return size_bytes / best
