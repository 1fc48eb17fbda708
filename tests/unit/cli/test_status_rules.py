"""What `tiering status` says of models with rules."""

from __future__ import annotations

from pathlib import Path

from ollama_tiering.cli import status
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.pb import block_store_pb2 as pb


def test_a_runner_whose_model_is_kept_out_says_so_and_what_is_left_is_counted() -> None:
    answer = adm.StatResponse(
        version="1",
        runners=[
            pb.RunnerReport(pid=1, model="m", tiered=True, namespace=b"a"),
            pb.RunnerReport(pid=2, model="n", tiered=True, namespace=b"b"),
        ],
        model_terms=[
            adm.ModelTerms(name="m:1", namespaces=[b"a"], refusal="a rule", local_bytes=2048),
            adm.ModelTerms(model="sha256-0123456789abcdef", namespaces=[b"b"], remote_bytes=1024),
            adm.ModelTerms(model="a-model-of-llama-server.gguf", refusal="a rule"),
        ],
    )
    lines = list(status.lines(Path("s"), answer))
    assert "model m:1: not stored: a rule, 2.0 KiB still on disk" in lines
    assert "model 0123456789ab: local 0 B, remote 1.0 KiB, never dropped for its age" in lines
    assert "model a-model-of-llama-server.gguf: not stored: a rule" in lines  # its whole name
    assert lines.count("  not stored: a rule") == 1
    assert [one["refusal"] for one in status.document(Path("s"), answer)["models"]] == [
        "a rule",
        "",
        "a rule",
    ]
