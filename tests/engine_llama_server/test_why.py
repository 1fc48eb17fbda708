"""What `tiering why` makes of a real llama-server's requests."""

from __future__ import annotations

import pytest

from ollama_tiering.client.admin_client import SidecarAdministration
from ollama_tiering.launch.loaded_model import model_files
from ollama_tiering.models import vocab
from ollama_tiering.why.explain import Explained, Explainer
from ollama_tiering.why.recipes import all_recipes
from ollama_tiering.why.vocabularies import Vocabularies
from tests.engine_llama_server.server import LlamaServer, Starter
from tests.sidecar import SidecarProcess
from tests.unit.why.clients import RULES, chatml

CONTEXT = 4096


def explained(sidecar: SidecarProcess) -> list[Explained]:
    files = model_files(runner.pid for runner in sidecar.stat().runners)
    with SidecarAdministration(sidecar.socket) as admin:
        explainer = Explainer(Vocabularies([], files), all_recipes(None), {})
        return [explainer.explained(message) for message in admin.partings()]


def turn(sidecar: SidecarProcess, server: LlamaServer, text: str) -> str:
    """The prompt with its answer, when both are stored."""
    tokens = vocab.encode(text)
    before = sum(runner.requests for runner in sidecar.stat().runners)
    said = server.complete(tokens, 4)
    sidecar.wait(lambda stat: sum(r.requests for r in stat.runners) > before, "it is counted")
    whole = [*tokens, *said.tokens]
    blocks = len(whole) // 64
    sidecar.wait(lambda stat: sum(one.blocks for one in stat.namespaces) >= blocks, "it is stored")
    return vocab.decode(whole)


def test_a_clock_in_the_system_prompt_is_found_and_a_following_turn_is_no_fault(
    sidecar: SidecarProcess, start: Starter
) -> None:
    server = start("llama-tiny", "-fa", "on", "-np", "1", "-c", str(CONTEXT), sidecar=sidecar)
    first = f"Current time is 20:37:19. You are a voice assistant for Home Assistant.\n{RULES}"
    turn(sidecar, server, chatml(("system", first), ("user", "Hello.")))
    whole = turn(sidecar, server, chatml(("system", first), ("user", "Hello. Who is there?")))
    turn(sidecar, server, f"{whole}<|im_end|>\n<|im_start|>user\n{RULES}<|im_end|>\n")
    assert not any(one.is_fault for one in explained(sidecar))
    server.kill()
    server = start("llama-tiny", "-fa", "on", "-np", "1", "-c", str(CONTEXT), sidecar=sidecar)
    later = first.replace("20:37:19", "21:04:33")
    turn(sidecar, server, chatml(("system", later), ("user", "Hello.")))
    (found,) = [one for one in explained(sidecar) if one.is_fault]
    assert found.verdict == "value"
    assert found.judgement.what == "a time that changes, in the system prompt"
    assert found.recipe is not None
    assert found.recipe.client == "Home Assistant"
    assert found.computed_tokens > found.lost_tokens > 500
    assert found.lost_seconds == pytest.approx(found.lost_tokens / _rate(sidecar))


def _rate(sidecar: SidecarProcess) -> float:
    return max(runner.prefill_tokens_per_second for runner in sidecar.stat().runners)
