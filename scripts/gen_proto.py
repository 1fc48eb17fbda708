#!/usr/bin/env python3
"""Maintainer: writes the generated Python of proto/ollama_tiering/v1/block_store.proto.

Messages go to `ollama_tiering/store/block/pb` (no gRPC import, so the store may use them), the
service to `ollama_tiering/protocol/pb`. `--check` writes nothing and exits 1 when the committed
files differ.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = Path("ollama_tiering/v1/block_store.proto")
STORE_PB = Path("ollama_tiering/store/block/pb")
PROTOCOL_PB = Path("ollama_tiering/protocol/pb")


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
                f"--grpc_python_out={out}",
                str(proto_root / PROTO),
            ]
        )
        if status != 0:
            raise SystemExit(f"protoc failed with {status}")
        made = out / PROTO.parent
        service = (made / "block_store_pb2_grpc.py").read_text()
        stubs = (
            (made / "block_store_pb2.pyi")
            .read_text()
            .replace("_Mapping]", "_Mapping[str, object]]")
        )
        unused = re.compile(r"^ +[A-Z0-9_]+_FIELD_NUMBER: .*\n", re.MULTILINE)
        wanted = "from ollama_tiering.v1 import block_store_pb2"
        if wanted not in service:
            raise SystemExit("the generated service no longer imports its messages as expected")
        return {
            STORE_PB / "block_store_pb2.py": (made / "block_store_pb2.py").read_bytes(),
            STORE_PB / "block_store_pb2.pyi": unused.sub("", stubs).encode(),
            PROTOCOL_PB / "block_store_pb2_grpc.py": service.replace(
                wanted, "from ollama_tiering.store import block_store_pb2"
            ).encode(),
        }


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
