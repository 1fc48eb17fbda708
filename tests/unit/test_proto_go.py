"""The generated Go is that of the proto: it holds the descriptor that it was made from."""

from __future__ import annotations

import ast
import re

from google.protobuf.descriptor_pb2 import FileDescriptorProto

from scripts import gen_proto_go


def test_the_generated_go_is_of_todays_proto() -> None:
    code = (gen_proto_go.OUT / "block_store.pb.go").read_text()
    found = re.search(r"_rawDesc = \[\]byte\((.*?)\)\n\n", code, re.DOTALL)
    assert found
    rows = (ast.literal_eval(f"b{row}") for row in found[1].split(" +\n\t"))
    made_from = FileDescriptorProto.FromString(b"".join(rows))
    assert made_from == gen_proto_go.engines_part(), "run scripts/gen_proto_go.py"
