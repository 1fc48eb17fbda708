"""The engine socket's messages: bytes as documented, and nothing else is taken for one."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.engine.messages import Kind
from ollama_tiering.protocol.engine.wire import (
    HEAD,
    MAX_BODY_BYTES,
    Malformed,
    Reader,
    Writer,
    frame,
    frame_head,
)
from ollama_tiering.protocol.loaded_file import FileIdentity, LoadedFile
from ollama_tiering.sidecar.engine.identity import identity_of
from ollama_tiering.store import rows_fingerprint

PAGE = Path(__file__).parents[3] / "docs" / "engine-protocol.md"
TOKENS = struct.pack("<3i", 1, 2, 3)
CRCS = struct.pack("<2I", 0x11111111, 0x22222222)
FIELDS = (("model", "m.gguf"), ("engine", "e/1"), ("flash_attention", "on"))
FILE = LoadedFile("/m/m.gguf", FileIdentity(1, 2, 3, 4, 5))
CONTENT = "ab" * 32  # of that file, as the sidecar read it
HELLO = m.Hello(FIELDS, (m.Layer(0, 0, 0, 0, 1, 8, 8, 16, 16),), files=(FILE,))

EXAMPLE: list[tuple[Kind, Any]] = [
    (Kind.HELLO, HELLO),
    (Kind.WELCOME, m.Welcome(identity_of(HELLO, CONTENT).namespace, 64, 1, 60_000, 120_000)),
    (Kind.PLAN, m.Plan(TOKENS, fingerprints=(rows_fingerprint(CRCS),))),
    (
        Kind.PLANNED,
        m.Planned(m.EngineOutcome.ALL, "", (m.EngineReserved(9, "/r/a.tmp", 12_288, 4096, 0, 3),)),
    ),
    (Kind.COMMIT, m.Commit((m.EngineFilled(9, CRCS),))),
    (Kind.COMMITTED, m.Committed(("",))),
    (Kind.MATCH, m.EngineMatch(TOKENS)),
    (
        Kind.MATCHED,
        m.Matched(*(2, 7, False, 0, 0, 0), (m.File("/r/a.kvb", 12_288, 4096, 0, 3, 2, 1, CRCS),)),
    ),
    (Kind.RELEASE, m.EngineLease(7)),
    (Kind.DONE, None),
]
WINDOW = m.EngineReserved(9, "/r/a.tmp", 12_288, 4096, 64, 3, m.FileKind.WINDOW)
OTHERS: list[Any] = [
    m.Hello(
        *(FIELDS, ()),
        *("q8_0", "q4_0", True, m.GateMode.RECOMPUTE, 100, "it has an unknown cache"),
        *(4096, 1025, 1536),
        (LoadedFile("/m/\udcff", FileIdentity(1 << 63, 2, 1 << 40, -1, -(1 << 62))), FILE),
    ),
    m.EngineMatch(TOKENS, 2, (m.EngineExtra(1, bytes(range(32))),), (bytes(8), b"contents")),
    m.Matched(0, 5, True, 250, 2, 64),
    m.Plan(
        TOKENS,
        7,
        (m.EngineExtra(0, bytes(32)),),
        (m.StateOffer(2, 1 << 30),),
        (0, 64),
        (b"contents",),
    ),
    m.Matched(
        *(2, 7, False, 0, 0, 0),
        (m.File("/w", 8, 4096, 0, 3, 9, 1, CRCS, m.FileKind.WINDOW),),
    ),
    m.Planned(m.EngineOutcome.REFUSED, "a rule says no"),
    m.Planned(m.EngineOutcome.LATER, "its file is being checked"),
    m.Planned(m.EngineOutcome.ALL, "", (WINDOW,)),
    m.Committed(("", "no such reservation")),
    m.Damaged(1 << 60, 3),
    m.EngineFinished(100, 20, 30, 6, 50, 51, 2, 1 << 33, 1.5, 0.25, 0.125, 0.5, 7),
    m.Failed(m.EngineFailure.NO_ROOM, "64 leases are open"),
]
MESSAGES = [message for _, message in EXAMPLE if message is not None] + OTHERS
NAMES = [f"{type(message).__name__}-{number}" for number, message in enumerate(MESSAGES)]


def documented() -> dict[str, bytes]:
    """The frames of the page's example, by name."""
    text = PAGE.read_text(encoding="utf-8").partition("## An example, byte for byte")[2]
    block = text.split("```")[1]
    frames: dict[str, bytes] = {}
    name = ""
    for line in block.splitlines():
        if re.fullmatch(r"[A-Z]+", line):
            name = line
            frames[name] = b""
        elif found := re.match(r"(?:[0-9a-f]{2} ?)+(?= {2}|$)", line):
            frames[name] += bytes.fromhex(found[0])
    return frames


def test_the_bytes_are_those_of_the_documented_example() -> None:
    made = {k.name: frame(k, message.pack() if message else b"") for k, message in EXAMPLE}
    assert documented() == made


@pytest.mark.parametrize("message", MESSAGES, ids=NAMES)
def test_a_message_comes_back_as_it_was(message: Any) -> None:
    assert type(message).unpack(message.pack()) == message


@pytest.mark.parametrize("message", MESSAGES, ids=NAMES)
def test_a_body_that_ends_too_early_or_too_late_is_malformed(message: Any) -> None:
    body = message.pack()
    for length in range(len(body)):
        with pytest.raises(Malformed):
            type(message).unpack(body[:length])
    with pytest.raises(Malformed):
        type(message).unpack(body + b"\0")


def test_a_list_that_claims_more_than_there_is_is_malformed_before_it_is_made() -> None:
    body = Writer().u32(0).u32(0).u32(0xFFFFFFFF).body()
    with pytest.raises(Malformed, match="4294967295 entries"):
        m.EngineMatch.unpack(body)
    with pytest.raises(Malformed):
        Reader(struct.pack("<I", 1 << 30)).numbers()


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (Writer().u32(4097).raw(bytes(4097 * 12)).body(), m.Commit),
        (Writer().u32(0).u32(0).u32(0).u32(65).raw(bytes(65 * 12)).body(), m.Plan),
        (Writer().raw(bytes(16)).u32(4097).raw(bytes(4 * 4097)).body(), m.Plan),
        (m.Planned(m.EngineOutcome.ALL, "", (WINDOW,)).pack()[:-1] + b"\3", m.Planned),
        (Writer().raw(HELLO.pack()[:20]).u32(0).raw(b"\0" * 6).body(), m.Hello),
    ],
    ids=["commit", "states", "windows", "an unknown kind", "a hello cut in the middle"],
)
def test_lists_have_limits_of_their_own(body: bytes, kind: Any) -> None:
    with pytest.raises(Malformed):
        kind.unpack(body)


def test_a_hello_of_another_version_is_read_no_further() -> None:
    body = HELLO.pack()[:8] + struct.pack("<I", 1) + b"whatever comes then"
    assert m.Hello.unpack(body).version == 1
    with pytest.raises(Malformed, match="magic"):
        m.Hello.unpack(b"GET / HTTP/1.1\r\n")


@pytest.mark.parametrize(
    "head",
    [b"GET / HT", HEAD.pack(MAX_BODY_BYTES + 1, 1, 0), HEAD.pack(0, 1, 1)],
    ids=["another protocol", "too long", "not zero"],
)
def test_what_is_no_head_of_a_frame_is_malformed(head: bytes) -> None:
    with pytest.raises(Malformed):
        frame_head(head, MAX_BODY_BYTES)


def test_a_path_may_have_any_bytes_and_a_text_may_not() -> None:
    odd = b"/r/\xff\xfe"
    path = odd.decode(errors="surrogateescape")
    assert Reader(Writer().path(path).body()).path() == path
    with pytest.raises(Malformed, match="UTF-8"):
        Reader(Writer().path(path).body()).text()
    with pytest.raises(ValueError, match="too long"):
        Writer().text("x" * 65_536)
