"""What a model was loaded with, as a runner reports it: for people and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ollama_tiering.config import count

if TYPE_CHECKING:
    from ollama_tiering.store import block_store_pb2 as pb


def words(runner: pb.RunnerReport) -> str:
    """`num_ctx 4,096, 2 slots, num_batch 512, num_thread 8`, as Ollama's options are called; what
    is not known is left out.
    """
    of = runner.settings
    said = (
        f"num_ctx {of.context_tokens:,}" if of.context_tokens else "",
        count(of.slots, "slot") if of.slots else "",
        f"num_batch {of.batch_tokens:,}" if of.batch_tokens else "",
        f"num_thread {of.threads:,}" if of.threads else "",
    )
    return ", ".join(filter(None, said))


def document(runner: pb.RunnerReport) -> dict[str, int] | None:
    """Returns None if the runner did not say; 0 in it is not known."""
    if not runner.HasField("settings"):
        return None
    of = runner.settings
    return {
        "num_ctx": of.context_tokens,
        "slots": of.slots,
        "num_batch": of.batch_tokens,
        "num_thread": of.threads,
    }
