"""Dense models of the llama.cpp engine: the next turn after a restart of everything is stock's own
in-memory hit, bit for bit, and so is a prompt that parts from a stored one long before its end.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness import PREDICT, Server, Sidecar, assert_same, in_memory, text
from tests.engine.namespaces import descriptions
from tests.engine.test_restore import Rig, rigs, settings, until_heard

MODELS = ("gemma2", "cohere2", "qwen2", "phi", "granite", "mixtral")
PARTED = 200  # where a prompt leaves a stored one
WINDOWS = {"gemma2": (0, 2), "cohere2": (0, 1, 2)}  # layers that see 128 positions


# flash attention ("" leaves it to llama.cpp), attention on the CPU
rig = rigs(lambda flash_attention, attention: settings(flash_attention, 1, attention))


RIGS = [
    pytest.param(("", "stock"), id="default"),
    pytest.param(("0", "stock"), id="no flash attention", marks=pytest.mark.slow),
    pytest.param(("", "exact"), id="exact", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rig", RIGS, indirect=True)
def test_the_next_turn_after_a_restart_of_everything_is_the_in_memory_answer(
    rig: Rig, model: str
) -> None:
    server, reference = rig.server, rig.reference

    def next_turn(attempt: int) -> None:
        first = text(500, (model, attempt))
        answer = reference.generate(model, first)
        assert len(set(answer.tokens)) > PREDICT // 4, "a model that says one thing tests little"
        turn = first + answer.text + text(60, ("turn", model, attempt))
        parts, behind = (
            turn[:PARTED] + "\n" + text(40, (name, model, attempt)) for name in ("parts", "behind")
        )
        in_turn = reference.generate(model, turn)
        assert in_turn.resumed == len(first) + PREDICT - 1
        in_parts = reference.generate(model, parts)
        assert in_parts.resumed == PARTED
        in_behind = in_memory(reference, model, behind, PARTED)
        assert server.generate(model, first).text == answer.text
        rig.displace(model, attempt)
        server.stop()
        rig.sidecar.restart()
        server.start()
        rig.displace(model, ("after", attempt))
        rig.check("parts", in_parts, model, parts)
        rig.displace(model, ("then", attempt))
        rig.check("turn", in_turn, model, turn)
        # What was restored is in memory like any other, also far behind a window.
        restores = len(server.restores())
        assert_same(server.generate(model, behind), in_behind, "behind")
        assert len(server.restores()) == restores

    until_heard(next_turn)


@pytest.mark.parametrize("model", WINDOWS)
@pytest.mark.parametrize("rig", RIGS[:1], indirect=True)
def test_a_prompt_whose_first_rows_a_shift_has_cost_begins_at_0(rig: Rig, model: str) -> None:
    """Stock goes on behind the tokens that the shift kept; layers with windows have lost them."""
    server, keep = rig.server, 4
    long, other = text(2008, (model, "shift")), text(300, (model, "other"))
    prompt = long[:keep] + other
    cold = in_memory(rig.reference, model, prompt, 0)
    for one in (server, rig.reference):
        one.unload(model)
        one.generate(model, long, predict=70)
        assert "context limit hit - shifting" in one.log_text()
    wrong = rig.reference.generate(model, prompt)
    assert wrong.resumed == keep
    assert wrong.logprobs != cold.logprobs, "stock has mended it: the rule is not needed any more"
    assert_same(server.generate(model, prompt), cold)
    rig.sidecar.settle(server, model)
    for one in (server, rig.reference):
        one.unload(model)
    restored = server.generate(model, prompt)
    assert restored.resumed > len(prompt) // 2
    assert_same(restored, in_memory(rig.reference, model, prompt, restored.resumed))


@pytest.mark.parametrize("model", WINDOWS)
def test_the_namespace_says_which_layers_have_windows(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar, model: str
) -> None:
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket) as server:
        server.generate(model, text(100, model), predict=1)
        sidecar.settle(server, model)
    (said,) = descriptions(sidecar)
    assert said["flash_attention"] == "on"
    full = [n for n in range(4) if n not in WINDOWS[model]]
    assert said["layers"].split(";") == [f"0:{n}:full:0:2:64:64" for n in full] + [
        f"1:{n}:swa:128:2:64:64" for n in WINDOWS[model]
    ]


def test_each_of_longropes_tables_has_rows_of_its_own(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """The size of the context chooses the table: up to 1024 tokens the short one."""
    prompt = text(300, "tables")
    resumed = []
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket) as server:
        for context in (1024, 2048, 1024, 4096):
            resumed.append(server.generate("phi", prompt, predict=1, num_ctx=context).resumed)
            sidecar.settle(server, "phi")
            server.unload("phi")
    assert resumed == [0, 0, len(prompt) - 1, len(prompt) - 1]
