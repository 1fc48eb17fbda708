"""What exact attention is worth inside Ollama on a CPU: one prompt, with it and with stock's
attention.

The engines are given; this module knows the order and the ratios. Each has a server of its own, one
at a time, so that no two share the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ollama_tiering.bench.baselines import warm_up_tokens
from ollama_tiering.bench.table import Table, ratio, seconds

if TYPE_CHECKING:
    from ollama_tiering.launch.ollama import Generated

NEW_TOKENS = 64
EXACT, FLASH, PLAIN = "exact", "stock", "stock without flash attention"
ORDER = (EXACT, PLAIN, FLASH)  # the one that takes longest last


class GeneratingDriver(Protocol):
    def generate(self, prompt: str, new_tokens: int) -> Generated: ...


@dataclass(frozen=True, slots=True)
class Bound:
    """How many times better than this setting the exact attention must be."""

    seconds: float
    rate: float


# At 8192 tokens, shape qwen3-0.6b, 2 cores.
BOUNDS = {FLASH: Bound(6.5, 4.0), PLAIN: Bound(1.9, 1.6)}


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One setting at one prompt length; decode follows the whole prompt."""

    attention: str
    prompt_tokens: int
    seconds_to_first_token: float
    decode_tokens_per_second: float

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def measure(
    engines: Mapping[str, Callable[[], AbstractContextManager[GeneratingDriver]]],
    prompt_of: Callable[[int], str],
    lengths: list[int],
    say: Callable[[str], None],
) -> list[AttentionCase]:
    """Measures every length with every setting. The weights are read before the
    first measurement.
    """
    cases = []
    for attention in ORDER:
        if attention not in engines:
            continue
        with engines[attention]() as engine:
            engine.generate(prompt_of(warm_up_tokens(lengths)), 2)
            for length in lengths:
                say(f"{length} tokens, {attention}")
                done = engine.generate(prompt_of(length), NEW_TOKENS)
                case = AttentionCase(
                    attention,
                    done.prompt_tokens,
                    done.seconds_to_first_token,
                    done.decode_tokens_per_second,
                )
                say(
                    f"  {seconds(case.seconds_to_first_token)} to the first token, "
                    f"{case.decode_tokens_per_second:.1f} tokens/s"
                )
                cases.append(case)
    return cases


def table(shape: str, cases: list[AttentionCase]) -> Table:
    exact = {case.prompt_tokens: case for case in cases if case.attention == EXACT}
    headings = ["prompt", "attention", "first token", "÷ exact", "decode", "exact ÷"]
    rows = []
    for case in sorted(cases, key=lambda case: (case.prompt_tokens, ORDER.index(case.attention))):
        ours = exact.get(case.prompt_tokens)
        compared = ours is not None and case is not ours
        slower = case.seconds_to_first_token / ours.seconds_to_first_token if ours else 0.0
        faster = ours.decode_tokens_per_second / case.decode_tokens_per_second if ours else 0.0
        bound = BOUNDS[case.attention] if compared else None
        rows.append(
            [
                f"{case.prompt_tokens:,}",
                case.attention,
                seconds(case.seconds_to_first_token),
                _against(slower, bound.seconds if bound else None),
                f"{case.decode_tokens_per_second:.1f} tokens/s",
                _against(faster, bound.rate if bound else None),
            ]
        )
    notes = [
        "Seconds are to the first token with the model loaded and nothing in memory; decode is "
        f"{NEW_TOKENS} tokens right after the prompt. One run each, one server at a time.",
        "Same binary: `exact` is OLLAMA_CPU_ATTENTION=exact, the others `stock`, with flash "
        "attention as this model has it by default and with OLLAMA_FLASH_ATTENTION=0.",
        "Bounds (in brackets) are for 8,192 tokens and shape qwen3-0.6b on 2 cores.",
    ]
    return Table(f"Attention on the CPU inside Ollama, {shape}", headings, rows, notes)


def _against(value: float, bound: float | None) -> str:
    return "" if bound is None else f"{ratio(value)} (≥ {bound:g}x)"
