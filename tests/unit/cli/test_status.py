"""What `tiering status` says of a runner."""

from __future__ import annotations

from pathlib import Path

from ollama_tiering.cli import status
from ollama_tiering.store.pb import block_store_pb2 as pb


def test_attention_on_the_cpu_is_told_of_tiered_and_other_runners_alike() -> None:
    said = "exact (avx512), but stock where rows are not dense"
    tiered = pb.RunnerReport(pid=1, model="m", tiered=True, cpu_attention=said)
    other = pb.RunnerReport(pid=2, model="m", reason="sliding window", cpu_attention="stock")
    on_gpu = pb.RunnerReport(pid=3, model="m", tiered=True)
    answer = pb.StatResponse(version="1", runners=[tiered, other, on_gpu])
    lines = list(status._lines(Path("s"), answer))
    told = [line for line in lines if "attention" in line]
    assert told == [f"  attention on the CPU: {said}", "  attention on the CPU: stock"]
    document = status._document(Path("s"), answer)
    assert [runner["cpu_attention"] for runner in document["runners"]] == [said, "stock", ""]


def test_what_was_not_read_for_lack_of_memory_is_told() -> None:
    short = pb.RunnerReport(pid=1, model="m", tiered=True, memory_short_tokens=4096)
    other = pb.RunnerReport(pid=2, model="m", tiered=True)
    answer = pb.StatResponse(version="1", runners=[short, other])
    told = [line for line in status._lines(Path("s"), answer) if "memory was" in line]
    assert told == [
        "  4096 of the recomputed tokens were stored: too little memory was available to read them"
    ]
    runners = status._document(Path("s"), answer)["runners"]
    assert [runner["memory_short_tokens"] for runner in runners] == [4096, 0]
