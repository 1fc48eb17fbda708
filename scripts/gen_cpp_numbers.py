#!/usr/bin/env python3
"""Maintainer: writes the numbers that C++ shares with the sidecar, from Python and the proto.

`--check` writes nothing and exits 1 when the committed header differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path

from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.engine.wire import MAGIC, MAX_REPLY_BYTES, VERSION
from ollama_tiering.store import DEFAULT_BLOCK_TOKENS
from ollama_tiering.store import block_store_pb2 as pb

HEADER = Path(__file__).resolve().parent.parent / "llama_server" / "src" / "kvt_numbers.h"
TOP = """\
// Numbers of the engine socket and of the proto. Generated: scripts/gen_cpp_numbers.py
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvt {
"""


def header() -> str:
    magic = ", ".join(str(byte) for byte in MAGIC)
    kept = (m.EngineFailure.NO_ROOM, m.EngineFailure.UNAVAILABLE)
    constants = [
        f"constexpr uint32_t protocol_version = {VERSION};",
        f"constexpr char socket_magic[] = {{ {magic} }};",
        f"constexpr uint32_t most_reply_bytes = {MAX_REPLY_BYTES};",
        f"constexpr uint32_t block_tokens = {DEFAULT_BLOCK_TOKENS}; // of a block that is full",
        f"constexpr uint8_t memory_tier = {pb.TIER_RAM};",
        f"constexpr uint16_t keep_connection[] = {{ {', '.join(str(int(one)) for one in kept)} }};"
        " // failures after which the sidecar keeps the connection",
    ]
    shortfalls = [
        (f"shortfall_{name.removeprefix('SHORTFALL_').lower()}", number)
        for name, number in pb.Shortfall.items()
    ]
    shortfalls[0] = "shortfall_none", shortfalls[0][1]  # nothing is missing
    parts = [
        TOP,
        *constants,
        "",
        *_enum("enum class frame_kind : uint16_t", _members(m.Kind)),
        *_enum("enum class file_kind : uint8_t", _members(m.FileKind)),
        *_enum("enum class gate_mode : uint8_t", _members(m.GateMode)),
        *_enum("enum class plan_outcome : uint8_t", _members(m.EngineOutcome)),
        "// Why there is not more of a prompt.",
        *_enum("enum shortfall : uint32_t", shortfalls),
        "} // namespace kvt",
    ]
    return "\n".join(parts) + "\n"


def _members(numbers: type[IntEnum]) -> list[tuple[str, int]]:
    return [(one.name.lower(), one.value) for one in numbers]


def _enum(head: str, members: Iterable[tuple[str, int]]) -> list[str]:
    return [f"{head} {{", *(f"    {name} = {number}," for name, number in members), "};", ""]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    made = header()
    if not parser.parse_args().check:
        HEADER.write_text(made)
        return 0
    if HEADER.exists() and HEADER.read_text() == made:
        return 0
    print(f"{HEADER.name} is not what scripts/gen_cpp_numbers.py makes: run `make proto`")
    return 1


if __name__ == "__main__":
    sys.exit(main())
