"""Two descriptions of one protocol: engines and tools understand the same sidecar."""

from __future__ import annotations

from pathlib import Path

from google.protobuf.descriptor import Descriptor

from ollama_tiering.protocol import calls
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.sidecar import SidecarProcess


def assert_part(part: Descriptor, whole: Descriptor) -> None:
    for field in part.fields:
        same = whole.fields_by_name[field.name]
        assert (field.number, field.type) == (same.number, same.type)
        assert field.is_repeated == same.is_repeated
        if field.message_type is not None:
            assert_part(field.message_type, same.message_type)


def test_an_engine_reads_a_part_of_the_answer_to_stat() -> None:
    assert_part(pb.StatForEngines.DESCRIPTOR, adm.StatResponse.DESCRIPTOR)


def test_a_tool_of_before_finds_its_calls_where_they_were(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path) as sidecar, sidecar.channel() as channel:
        for service in calls.SERVICES:
            path = f"/ollama_tiering.v1.{service.rpartition('.')[2]}"
            stat = channel.unary_unary(f"{path}/Stat")
            assert adm.StatResponse.FromString(stat(b"", timeout=10)).version
            (head,) = channel.unary_stream(f"{path}/List")(b"", timeout=10)
            assert adm.ListResponse.FromString(head).head.id_digits
            waste = channel.unary_unary(f"{path}/Collect")(b"", timeout=10)
            assert adm.CollectResponse.FromString(waste).waste


def test_methods_and_their_paths() -> None:
    """What an engine or a tool of another version calls."""
    assert calls.BLOCK_STORE == "ollama_tiering.v1.BlockStore"
    assert set(calls.METHODS) == {
        *("LookUp", "Has", "Put", "Get", "Release", "RemoveSeq", "Stat"),
        *("ReportCorrupt", "ReportRunner", "CheckFiles"),
        *("List", "Pin", "Verify", "Remove", "Collect", "Partings", "Days", "Reload"),
        "RevokeBuilds",
    }
