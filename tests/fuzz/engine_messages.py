"""Frames of an engine: plausible ones, and the same with bytes, numbers and lengths as they should
not be.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.engine.messages import Kind
from ollama_tiering.protocol.engine.wire import frame
from ollama_tiering.store.block.key import tokens_to_bytes
from tests.contract.fake_engine import hello

NUMBERS = (0, 1, 63, 64, 65, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
LONG_NUMBERS = (*NUMBERS, 1 << 32, (1 << 63) - 1, (1 << 64) - 1)
SECONDS = (0.0, 1e-9, 1.5, 1e300, float("inf"), float("nan"), -1.0)
STORED = list(range(1000, 1200))  # that an engine has stored


def plausible_hello(rng: random.Random) -> m.Hello:
    said = hello(layers=rng.choice((1, 2, 2, 2, 40)), states=rng.random() < 0.3)
    if rng.random() < 0.3:
        layer = replace(
            said.layers[0],
            **{
                name: rng.choice(NUMBERS)
                for name in ("window", "kv_heads", "k_row_bytes", "v_row_bytes")
                if rng.random() < 0.3
            },
        )
        said = replace(said, layers=(layer, *said.layers[1:]))
    if rng.random() < 0.3:
        row, least, most = rng.choice(((16, 65, 200), tuple(rng.choice(NUMBERS) for _ in range(3))))
        windows = {"window_row_bytes": row, "window_least": least, "window_most": most}
        said = replace(said, states=rng.random() < 0.9, **windows)
    if rng.random() < 0.1:
        said = replace(said, fields=(*said.fields, (text(rng), text(rng))))
    if rng.random() < 0.05:
        said = replace(said, unsupported=text(rng) or "no")
    return said


def text(rng: random.Random) -> str:
    return rng.choice(("", "rope", "x" * 65_535, "\0", "ü" * 100, "a;b=c", "../..", "\n"))


def tokens(rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.5:
        return tokens_to_bytes(STORED[: rng.randrange(len(STORED) + 1)])
    if kind < 0.6:
        return rng.randbytes(4 * rng.choice((0, 1, 64, 5000)))
    if kind < 0.61:
        return bytes(4 << 20)  # a million
    return tokens_to_bytes([*STORED[: rng.randrange(len(STORED))], rng.randrange(1 << 20)])


def number(rng: random.Random, most: int) -> int:
    return rng.randrange(most) if rng.random() < 0.8 else rng.choice(NUMBERS)


def extras(rng: random.Random) -> tuple[m.EngineExtra, ...]:
    count = rng.choice((0, 0, 0, 1, 3))
    return tuple(m.EngineExtra(number(rng, 200), rng.randbytes(32)) for _ in range(count))


def fingerprints(rng: random.Random) -> tuple[bytes, ...]:
    return tuple(rng.randbytes(8) for _ in range(rng.choice((0, 0, 1, 2, 3, 5000))))


def match(rng: random.Random, _: list[int]) -> tuple[Kind, bytes]:
    return Kind.MATCH, m.EngineMatch(
        tokens(rng), number(rng, 10), extras(rng), fingerprints(rng)
    ).pack()


def lease(rng: random.Random, leases: list[int]) -> tuple[Kind, bytes]:
    chosen = rng.choice([*leases, rng.choice(LONG_NUMBERS)])
    return rng.choice((Kind.WAIT, Kind.RELEASE)), m.EngineLease(chosen).pack()


def damaged(rng: random.Random, leases: list[int]) -> tuple[Kind, bytes]:
    chosen = rng.choice([*leases, rng.choice(LONG_NUMBERS)])
    return Kind.DAMAGED, m.Damaged(chosen, number(rng, 3)).pack()


def plan(rng: random.Random, _: list[int]) -> tuple[Kind, bytes]:
    offers = tuple(
        m.StateOffer(number(rng, 200), rng.choice((1, 5000, 20 << 20, *LONG_NUMBERS)))
        for _ in range(rng.choice((0, 0, 1, 2, 70)))
    )
    windows = tuple(
        rng.choice((0, 64, 128, 192, rng.choice(NUMBERS)))
        for _ in range(rng.choice((0, 0, 2, 5000)))
    )
    said = tokens(rng), number(rng, 4), extras(rng), offers, windows, fingerprints(rng)
    return Kind.PLAN, m.Plan(*said).pack()


def commit(rng: random.Random, ids: list[int]) -> tuple[Kind, bytes]:
    """Of files that hold nothing: their payload is zeros, and their checksums are not."""
    files = tuple(
        m.EngineFilled(
            rng.choice([*ids, rng.choice(LONG_NUMBERS)]), bytes(rng.choice((0, 4, 16, 16)))
        )
        for _ in range(rng.choice((0, 1, 3, 5000)))
    )
    return Kind.COMMIT, m.Commit(files).pack()


def finished(rng: random.Random, _: list[int]) -> tuple[Kind, bytes]:
    counts = [number(rng, 1000) for _ in range(7)]
    seconds = [rng.choice(SECONDS) for _ in range(4)]
    message = m.EngineFinished(*counts, rng.choice(LONG_NUMBERS), *seconds)  # type: ignore[call-arg]
    return Kind.FINISHED, message.pack()


REQUESTS: tuple[Callable[[random.Random, list[int]], tuple[Kind, bytes]], ...] = (
    *(match, match, lease, damaged, plan, plan, commit, finished),
)


def request(rng: random.Random, ids: list[int]) -> bytes:
    """A frame; `ids` are leases and reservations that were given."""
    return spoiled(rng, *rng.choice(REQUESTS)(rng, ids))


def spoiled(rng: random.Random, kind: int, body: bytes) -> bytes:
    """One in three is damaged: a byte, a number, its length, its kind, or its end."""
    how = rng.random()
    if how > 0.33 or not body:
        return frame(kind, body)
    if how < 0.1:
        at = rng.randrange(len(body))
        return frame(kind, body[:at] + rng.randbytes(1) + body[at + 1 :])
    if how < 0.2:
        at = rng.randrange(len(body))
        return frame(kind, body[:at] + struct.pack("<I", rng.choice(NUMBERS)) + body[at + 4 :])
    if how < 0.25:
        return frame(kind, body[: rng.randrange(len(body))])
    if how < 0.28:
        return frame(rng.choice((0, 1, 9, 101, 65_535)), body)
    if how < 0.3:
        return struct.pack("<IHH", rng.choice(NUMBERS), kind, rng.choice((0, 1))) + body
    return frame(kind, body)[: rng.randrange(1, 8 + len(body))]


def ids_of(kind: int, body: bytes) -> list[int]:
    """Leases and reservations that an answer gives."""
    answer: Any
    if kind == Kind.MATCHED:
        answer = m.Matched.unpack(body)
        return [answer.lease_id] if answer.lease_id else []
    if kind == Kind.PLANNED:
        answer = m.Planned.unpack(body)
        return [file.reservation_id for file in answer.files]
    return []
