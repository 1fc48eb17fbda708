"""The demonstration: one prompt four times, and what must be true of it. The same for every engine.

The reference of every comparison is the hit in the engine's own memory, which resumes at the same
position as a restore. A cold run computes the prompt in other batches: with stock's attention its
last bits may differ in an untouched engine too, with ours they may not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ollama_tiering.engines.drivers import Answer, Driver

PROMPT_TOKENS = 1500
NEW_TOKENS = 16

COLD, HIT, UNLOADED, RESTARTED = (
    "cold",
    "in-memory hit",
    "restored after unload",
    "restored after restart of both",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One request beside the reference; `restored`: it must be identical and from a tier.
    `must_agree`: it must be identical.
    """

    label: str
    answer: Answer
    same_tokens: bool
    same_logprobs: bool
    restored: bool
    must_agree: bool

    @property
    def identical(self) -> bool:
        return self.same_tokens and self.same_logprobs

    @property
    def verdict(self) -> str:
        if self.label == HIT:
            return "the reference"
        if self.must_agree:
            return "yes" if self.identical else "NO"
        if self.identical:
            return "yes"
        return "tokens yes, last bits no" if self.same_tokens else "tokens differ"


@dataclass(frozen=True, slots=True)
class Outcome:
    engine: str
    rows: tuple[Row, ...]
    one_answer: bool

    def sooner(self, label: str) -> float:
        """How many times sooner the first token came than when it was computed."""
        seconds = {row.label: row.answer.seconds_to_first_token for row in self.rows}
        return seconds[COLD] / max(seconds[label], 1e-6)

    def saved_seconds(self, label: str) -> float:
        """How much sooner the first token came than when it was computed."""
        seconds = {row.label: row.answer.seconds_to_first_token for row in self.rows}
        return seconds[COLD] - seconds[label]

    @property
    def failures(self) -> list[str]:
        """What is not as it must be; empty when the demonstration succeeded."""
        found = []
        for row in self.rows:
            if row.must_agree and not row.identical:
                found.append(f"{row.label}: the answer differs from that of the in-memory hit")
            if row.restored and not row.answer.restored_tokens:
                found.append(f"{row.label}: nothing was restored")
            if row.label == HIT and not row.answer.memory_tokens:
                found.append("the engine did not find its own prompt in memory: no reference")
        return found

    def as_json(self) -> dict[str, Any]:
        rows = [
            {
                "row": row.label,
                "seconds_to_first_token": round(row.answer.seconds_to_first_token, 6),
                "times_sooner": round(self.sooner(row.label), 2),
                "saved_seconds": round(self.saved_seconds(row.label), 6),
                "prompt_tokens": row.answer.prompt_tokens,
                "memory_tokens": row.answer.memory_tokens,
                "restored_tokens": row.answer.restored_tokens,
                "recomputed_tokens": row.answer.recomputed_tokens,
                "same_tokens": row.same_tokens,
                "same_logprobs": row.same_logprobs,
                "tokens": list(row.answer.tokens),
            }
            for row in self.rows
        ]
        return {
            "engine": self.engine,
            "reference": HIT,
            "one_answer": self.one_answer,
            "rows": rows,
            "failures": self.failures,
        }


def show(
    driver: Driver, prompt: str, say: Callable[[str], None], *, new_tokens: int = NEW_TOKENS
) -> Outcome:
    """Runs it from start to end. The driver is started here; whoever made it closes it."""
    say("starting a private sidecar and the engine")
    driver.start()
    say(f"asking with a prompt of {len(prompt)} tokens, then once more")
    cold = driver.ask(prompt, new_tokens)
    hit = driver.ask(prompt, new_tokens)
    say("unloading the model, asking again")
    driver.unload()
    unloaded = driver.ask(prompt, new_tokens)
    say("ending both processes, starting both, asking again")
    driver.restart()
    restarted = driver.ask(prompt, new_tokens)
    answers = {COLD: cold, HIT: hit, UNLOADED: unloaded, RESTARTED: restarted}
    rows = tuple(
        Row(
            label,
            answer,
            same_tokens=answer.tokens == hit.tokens and bool(answer.tokens),
            same_logprobs=answer.logprobs == hit.logprobs,
            restored=label in (UNLOADED, RESTARTED),
            must_agree=label in (UNLOADED, RESTARTED) or (label == COLD and driver.one_answer),
        )
        for label, answer in answers.items()
    )
    return Outcome(driver.name, rows, driver.one_answer)


def make_prompt(tokens: int = PROMPT_TOKENS, seed: int = 1) -> str:
    """Text of lower-case words; in the made models each character is one token."""
    source = random.Random(seed)
    words = (
        "".join(source.choices("etaoinshrdlucmfw", k=source.randint(2, 9))) for _ in range(tokens)
    )
    return " ".join(words)[:tokens]
