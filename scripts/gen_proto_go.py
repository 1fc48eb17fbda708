#!/usr/bin/env python3
"""Maintainer: writes the Go of proto/ollama_tiering/v1/block_store.proto into the overlay.

What protoc-gen-go writes, without what an engine never calls: two calls with their messages,
getters, comments (they are in the proto), and what protobuf needs without `unsafe`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).resolve().parent.parent
OVERLAY = ROOT / "patches/overlay"
OUT = OVERLAY / "kvtier/tierpb"
PROTO = "ollama_tiering/v1/block_store.proto"

# The newest that the host's protobuf 1.34.1 accepts.
PLUGINS = (
    "google.golang.org/protobuf/cmd/protoc-gen-go@v1.34.1",
    "google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.5.1",
)
NOT_CALLED = ("Has", "RemoveSeq")
PROTOC = (sys.executable, "-m", "grpc_tools.protoc")

_GETTER = re.compile(r"^func \(x \*\w+\) Get(\w+)\(\) .*\{\n(?:\t.*\n)+\}\n\n", re.MULTILINE)
_GOES = re.compile(
    r"^// Deprecated: Use \w+[. ].*\nfunc .*\{\n(?:\t.*\n)+\}\n\n"
    r"|^\tif !protoimpl\.UnsafeEnabled \{\n(?:\t\t.*\n)+\t\}\n"
    r"|^var \(\n\t\w+_rawDescOnce sync\.Once\n.*\n\)\n\n"
    r"|^func \w+_rawDescGZIP\(\) .*\{\n(?:\t.*\n)+\}\n\n"
    r"|^\tsync \"sync\"\n",
    re.MULTILINE,
)
_BYTES = re.compile(r"_rawDesc = \[\]byte\{\n((?:\t0x.*\n)+)\}\n")


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        tools = {**os.environ, "GOBIN": str(work), "PATH": f"{work}:{os.environ['PATH']}"}
        for plugin in PLUGINS:
            subprocess.run(["go", "install", plugin], env=tools, check=True)
        described = work / "described"
        described.write_bytes(FileDescriptorSet(file=[engines_part()]).SerializeToString())
        places = [
            f"--{name}_{kind}={value}"
            for name in ("go", "go-grpc")
            for kind, value in (("out", work), ("opt", "paths=source_relative"))
        ]
        subprocess.run(
            [*PROTOC, f"--descriptor_set_in={described}", *places, PROTO], env=tools, check=True
        )
        for generated in sorted((work / PROTO).parent.glob("*.go")):
            (OUT / generated.name).write_text(_slim(generated.read_text()))
    return 0


def engines_part() -> FileDescriptorProto:
    """The proto as engines know it."""
    with tempfile.NamedTemporaryFile() as out:
        subprocess.run([*PROTOC, f"-I{ROOT}/proto", f"-o{out.name}", PROTO], check=True)
        file = FileDescriptorSet.FromString(Path(out.name).read_bytes()).file[0]
    _leave_out(file)
    return file


def _leave_out(file: FileDescriptorProto) -> None:
    """Drop the calls that no engine makes, and messages and enums that nothing else names."""
    for service in file.service:
        calls = [call for call in service.method if call.name not in NOT_CALLED]
        del service.method[:]
        service.method.extend(calls)
    messages = {f".{file.package}.{message.name}": message for message in file.message_type}
    to_visit = [f".{file.package}.{name}" for name in _used(r"\btierpb\.(\w+)")]
    for service in file.service:
        to_visit += [
            name for call in service.method for name in (call.input_type, call.output_type)
        ]
    named: set[str] = set()
    while to_visit:
        name = to_visit.pop()
        if name not in named:
            named.add(name)
            message = messages.get(name)
            to_visit += [field.type_name for field in message.field] if message else []
    for kept in (file.message_type, file.enum_type):
        for index in reversed(range(len(kept))):
            if f".{file.package}.{kept[index].name}" not in named:
                del kept[index]


def _used(pattern: str) -> set[str]:
    """Names that the Go code, that of its tests too, uses in this way."""
    sources = (path for path in OVERLAY.rglob("*.go") if path.parent != OUT)
    return {name for path in sources for name in re.findall(pattern, path.read_text())}


def _slim(code: str) -> str:
    called = _used(r"\.Get(\w+)\(")
    code = _GETTER.sub(lambda getter: getter[0] if getter[1] in called else "", code)
    return _BYTES.sub(_as_text, _GOES.sub("", code))


def _as_text(literal: re.Match[str]) -> str:
    """Write the file's descriptor as strings, so that its names can be read."""
    content = bytes(int(byte, 16) for byte in re.findall(r"0x(\w\w)", literal[1]))
    rows = [_quoted(content[at : at + 80]) for at in range(0, len(content), 80)]
    return "_rawDesc = []byte(" + " +\n\t".join(rows) + ")\n"


def _quoted(content: bytes) -> str:
    printable = (chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\x{b:02x}" for b in content)
    return '"' + "".join(printable) + '"'


if __name__ == "__main__":
    sys.exit(main())
