#!/usr/bin/env python3
"""Maintainer: writes the generated Python of proto/ollama_tiering/v1.

Messages of block_store.proto go to `ollama_tiering/store/block/pb`, which the store may use, those
of administration.proto to `ollama_tiering/protocol/pb`. The services need no code of their own
(`ollama_tiering/protocol/calls.py`). `--check` writes nothing and exits 1 when the committed files
differ.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("ollama_tiering/v1")
FOLDERS = {
    "block_store": Path("ollama_tiering/store/block/pb"),
    "administration": Path("ollama_tiering/protocol/pb"),
}


def generate(proto_root: Path) -> dict[Path, bytes]:
    """Repository path -> content of every generated file."""
    from grpc_tools import protoc  # type: ignore[import-untyped]

    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        status = protoc.main(
            [
                "protoc",
                f"-I{proto_root}",
                f"-I{files('grpc_tools') / '_proto'}",
                f"--python_out={out}",
                f"--pyi_out={out}",
                *(str(proto_root / PACKAGE / f"{name}.proto") for name in FOLDERS),
            ]
        )
        if status != 0:
            raise SystemExit(f"protoc failed with {status}")
        return {
            folder / f"{name}_pb2{ending}": _ours(out / PACKAGE / f"{name}_pb2{ending}")
            for name, folder in FOLDERS.items()
            for ending in (".py", ".pyi")
        }


# In stubs, what nobody names: numbers of fields, slots, the messages that maps consist of.
_UNUSED = re.compile(
    r"^ +(?:[A-Z0-9_]+_FIELD_NUMBER: |__slots__ = ).*\n"
    r"|^( +)class \w+Entry\(_message\.Message\):\n(?:\1 +.*\n)+",
    re.MULTILINE,
)


def _ours(made: Path) -> bytes:
    code = made.read_text().replace(
        "from ollama_tiering.v1 import", "from ollama_tiering.store import"
    )
    if made.suffix == ".pyi":
        code = _UNUSED.sub("", code.replace("_Mapping]", "_Mapping[str, object]]"))
    return code.encode()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for path, content in generate(ROOT / "proto").items():
        target = ROOT / path
        if target.exists() and target.read_bytes() == content:
            continue
        stale.append(path)
        if not check:
            target.write_bytes(content)
    for path in stale:
        print(f"{'stale' if check else 'wrote'} {path}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
