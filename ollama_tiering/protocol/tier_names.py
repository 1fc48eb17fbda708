"""The names of the protocol's tiers in answers and for people: `ram`, `local`, `remote`."""

from __future__ import annotations

from ollama_tiering.store import block_store_pb2 as pb


def tier_name(tier: int) -> str:
    """`unknown` for the number of a tier that a newer program has."""
    if not tier or tier not in pb.Tier.values():
        return "unknown"
    return pb.Tier.Name(pb.Tier.ValueType(tier)).removeprefix("TIER_").lower()
