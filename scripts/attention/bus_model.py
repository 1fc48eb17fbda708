"""What K/V in memory of the host cost a GPU that reads them over its bus. A model, not a
measurement: bytes divided by rates, and nothing else of a step.

Decode reads all K/V of a conversation for every token, prefill for every batch. What is copied
ahead runs beside the computing, so that the longer of the two counts; what the bus needs is
therefore a bound from one side, which no kernel can pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

USABLE_SHARE: Final = 0.8  # of a bus's nominal rate: pinned memory to device, long copies
BATCH_TOKENS: Final = 512  # num_batch, as Ollama has it by default


@dataclass(frozen=True, slots=True)
class Bus:
    """`nominal_gb_s`: lanes x transfers a second x 128/130, in one direction."""

    name: str
    nominal_gb_s: float

    @property
    def usable_bytes_per_second(self) -> float:
        return self.nominal_gb_s * 1e9 * USABLE_SHARE


BUSES: Final = (
    Bus("PCIe 3.0 x16", 15.75),
    Bus("PCIe 4.0 x16", 31.51),
    Bus("PCIe 5.0 x16", 63.02),
)


def decode_tokens_per_second(cold_bytes: float, bus: Bus) -> float:
    """At most: `cold_bytes` are K/V in use that lie in host memory."""
    return bus.usable_bytes_per_second / cold_bytes


def prefill_seconds(
    tokens: int, cold_bytes_per_token: float, bus: Bus, batch_tokens: int = BATCH_TOKENS
) -> float:
    """Of the bus alone, for a prompt that begins an empty conversation: each batch reads the K/V of
    all batches up to its own.
    """
    full, rest = divmod(tokens, batch_tokens)
    cells = batch_tokens * full * (full + 1) // 2 + (tokens if rest else 0)
    return cells * cold_bytes_per_token / bus.usable_bytes_per_second
