"""What memory answers across a context shift, where stock itself may answer wrongly."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.harness import Result, Server


def said_twice(
    reference: Server, model: str, prompt: str, before: str | None = None, **options: Any
) -> Result:
    """The answer when `before`, by default the prompt itself, is in memory. On a busy machine stock
    may read a token's logits when the shift has written over them (docs/design.md), so that one
    answer proves nothing.
    """
    first = {name: value for name, value in options.items() if name != "predict"}
    answers: list[Result] = []
    for _ in range(6):
        reference.unload(model)  # what a shift leaves in the slot is not to be gone on from
        reference.generate(model, before or prompt, predict=1, **first)
        answer = reference.generate(model, prompt, **options)
        if any(answer.logprobs == other.logprobs for other in answers):
            return answer
        answers.append(answer)
    pytest.fail(f"the reference shifted {len(answers)} times and never answered the same twice")
