"""Where the bits of a row follow from the batch that it was computed in, one text has several
histories: what comes back after a restart is one of them, whole, and not only its beginning.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness import Server, Sidecar, text
from tests.engine.test_restore import Rig, rigs, settings, until_heard

STOCK, OFF, EXACT = (1, 1, "stock"), (0, 1, "stock"), (1, 1, "exact")

rig = rigs(settings)


def conversation(server: Server, model: str, first: int, attempt: int) -> str:
    """Asks, regenerates, and goes on: the regenerated answer stands on a row computed alone.
    Returns the next question.
    """
    prompt = text(first, ("ask", model, first, attempt))
    server.generate(model, prompt)
    said = server.generate(model, prompt)
    assert said.resumed in (first - 1, 0)  # 0: the window has gone on, all is computed anew
    for turn, tokens in enumerate((40, 90, 20)):
        prompt += said.text + text(tokens, ("turn", model, first, turn))
        if turn < 2:
            said = server.generate(model, prompt)
    return prompt


# Where stock has lost a window it computes all of a prompt again, which comes back: then another
# history, as whole as stock's own. There nothing comes back while one talks.
CASES = [
    *[("auto", *case) for case in ((STOCK, "half"), (OFF, "half"), (STOCK, "halfllama"))],
    *[("auto", EXACT, "half"), ("recompute", EXACT, "half"), ("auto", EXACT, "halfllama")],
    *[("recompute", STOCK, model) for model in ("half", "halfllama", "halfsliding", "olmo")],
]


@pytest.mark.parametrize(("gate", "setup", "model"), CASES)
def test_a_conversation_that_goes_on_after_a_regenerate_comes_back_whole(
    binary: Path,
    models: Path,
    tmp_path: Path,
    sidecar: Sidecar,
    setup: tuple[int, int, str],
    model: str,
    gate: str,
) -> None:
    """Wherever in its block the row lies that was computed anew."""
    env = settings(*setup)
    talking = env | {"OLLAMA_KV_TIER_GATE": gate}
    with (
        Server(binary, tmp_path / "talks", models, socket=sidecar.socket, env=talking) as server,
        Server(binary, tmp_path / "again", models, socket=sidecar.socket, env=env) as again,
        Server(binary, tmp_path / "reference", models, env=env) as reference,
    ):
        rig = Rig(sidecar, again, reference)

        def check(attempt: int) -> None:
            for first in (300, 310, 314, 319, 320):
                question = conversation(reference, model, first, attempt)
                expected = reference.generate(model, question)
                assert conversation(server, model, first, attempt) == question
                sidecar.settle(server, model)
                restored = rig.check(first, expected, model, question)
                assert restored.first == 0
                again.unload(model)

        until_heard(check)


@pytest.mark.parametrize(
    ("rig", "model"), [(STOCK, "half"), (STOCK, "halfllama")], indirect=["rig"]
)
def test_regenerating_ten_times_is_bounded_on_disk(rig: Rig, model: str) -> None:
    """Of one text there are so many histories, and no tail for each answer that was cut short."""
    prompt = text(314, ("ten times", model))
    rig.server.generate(model, prompt, predict=30)
    counts = []
    for seed in range(10):
        rig.server.generate(model, prompt, predict=30, temperature=2.0, seed=seed)
        rig.sidecar.settle(rig.server, model)
        counts.append(sum(one.blocks for one in rig.sidecar.stat().namespaces))
    # Each answer makes a block or two of its own, whole or a tail; what comes before is shared.
    assert counts[-1] - counts[0] <= 2 * 9
