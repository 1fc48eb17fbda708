"""What a tier of the protocol is called in answers and for people: `ram`, `local`, `remote`."""

from __future__ import annotations

from ollama_tiering.store import block_store_pb2 as pb


def tier_name(tier: pb.Tier) -> str:
    return pb.Tier.Name(tier).removeprefix("TIER_").lower()
