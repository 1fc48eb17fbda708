"""LoRA adapters: rows depend on what is in their files, and on their scales, which a request may
change. Both are in the name of what is stored; with other scales nothing is stored or restored.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.damaged_file import put_right
from tests.engine_llama_server.given import (
    OPTIONS,
    PROMPT,
    another_file_of_the_name_finds_nothing,
    comes_back_with_the_same_alone,
    filled,
)
from tests.engine_llama_server.parts import make_adapter
from tests.engine_llama_server.server import Answer, LlamaServer, Starter
from tests.engine_llama_server.test_damaged_model import stored, wait_reason
from tests.engine_llama_server.test_llama_server import (
    WAYS,
    blocks_of,
    report,
    text,
    wait_stored,
)
from tests.engine_llama_server.test_states import settled
from tests.sidecar import SidecarProcess

INVOCATION = [5, 6, 7]  # tokens from which on an adapter that waits for them is applied

WAYS_TO_LOAD = {
    "applied": ("--lora", "{one}"),
    "scaled": ("--lora-scaled", "{one}:0.5"),
    "not applied at first": ("--lora", "{one}", "--lora-init-without-apply"),
    "two": ("--lora-scaled", "{one}:0.5,{other}:1.5"),
    "one of two": ("--lora-scaled", "{one}:0.5,{other}:0"),
}
OTHERS = {
    "no adapter": (),
    "another scale": ("--lora-scaled", "{one}:0.75"),
    "another adapter": ("--lora", "{other}"),
    "the other way round": ("--lora-scaled", "{other}:0.5,{one}:1.5"),
}


@pytest.fixture
def rng() -> random.Random:
    return random.Random(2)


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, Path]:
    return {
        name: make_adapter(tmp_path / f"{name}.gguf", seed=seed)
        for seed, name in enumerate(("one", "other"))
    }


@pytest.mark.parametrize("way", WAYS_TO_LOAD)
def test_after_a_kill_the_answer_is_that_of_the_resident_cache_and_others_find_nothing(
    start: Starter,
    sidecar: SidecarProcess,
    rng: random.Random,
    adapters: dict[str, Path],
    way: str,
) -> None:
    others = [filled(other, adapters) for other in OTHERS.values()]
    options = filled(WAYS_TO_LOAD[way], adapters)
    comes_back_with_the_same_alone(start, sidecar, rng, options, others)


def test_another_adapter_under_the_same_name_finds_nothing(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, adapters: dict[str, Path]
) -> None:
    options = filled(WAYS_TO_LOAD["applied"], adapters)
    another_file_of_the_name_finds_nothing(start, sidecar, rng, options, adapters["one"])


def test_an_adapter_that_is_another_file_now_is_refused_by_name(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, adapters: dict[str, Path]
) -> None:
    server = start(*filled(WAYS_TO_LOAD["applied"], adapters), sidecar=sidecar)
    put_right(adapters["one"], adapters["one"].read_bytes())
    server.complete(text(rng, PROMPT))
    wait_reason(sidecar, server, "the adapter's file is another one than when it was loaded")
    assert stored(sidecar) == 0


def fell_short(sidecar: SidecarProcess, server: LlamaServer, requests: int) -> str:
    """Why nothing was looked up for the last request."""
    last = report(sidecar, server, requests).last_request
    return pb.Shortfall.Name(last.shortfall)


def all_changed(server: LlamaServer, tokens: list[int], scale: float) -> Answer:
    """Of requests that do not say it."""
    server.scale_adapter(scale)
    try:
        return server.complete(tokens)
    finally:
        server.scale_adapter(1.0)


def one_changed(server: LlamaServer, tokens: list[int], scale: float) -> Answer:
    """Of this request."""
    return server.complete(tokens, lora=[{"id": 0, "scale": scale}])


Asks = Callable[[LlamaServer, list[int], float], Answer]


@pytest.mark.parametrize("ask", [all_changed, one_changed])
def test_with_another_scale_nothing_is_restored_or_stored(
    start: Starter,
    sidecar: SidecarProcess,
    rng: random.Random,
    adapters: dict[str, Path],
    ask: Asks,
) -> None:
    options = filled(WAYS_TO_LOAD["applied"], adapters)
    known, new = text(rng, PROMPT, first=8), text(rng, PROMPT, first=9)
    resident = start(*options)
    cold, half = resident.complete(known), ask(resident, new, 0.5)
    other = ask(resident, known, 0.5)
    assert cold.tokens != other.tokens or cold.bits != other.bits  # scales decide
    resident.kill()

    tiered = start(*options, sidecar=sidecar)
    assert tiered.complete(known) == cold
    wait_stored(sidecar, tiered, blocks_of(PROMPT))
    assert ask(tiered, new, 0.5) == half
    assert fell_short(sidecar, tiered, 2) == "SHORTFALL_NOT_LOOKED_UP"
    said = ask(tiered, known, 0.5)
    assert (said.cached, said) == (0, other)  # with scale 1 all of it is stored
    settled(sidecar, tiered)
    assert stored(sidecar) == blocks_of(PROMPT)
    tiered.kill()

    for scale in (1.0, 0.5):
        fresh = start(*OPTIONS, "--lora-scaled", f"{adapters['one']}:{scale}", sidecar=sidecar)
        assert fresh.complete([*new, 5]).cached == 0
        assert fresh.complete([*known, 5]).cached == (PROMPT if scale == 1.0 else 0)
        fresh.kill()


@pytest.mark.parametrize("ask", [all_changed, one_changed])
def test_rows_behind_those_of_another_scale_are_not_stored(
    start: Starter,
    sidecar: SidecarProcess,
    rng: random.Random,
    adapters: dict[str, Path],
    ask: Asks,
) -> None:
    """A slot has them when the scale is back: stock goes on from there, and so does this."""
    options = filled(WAYS_TO_LOAD["applied"], adapters)
    known, more, last = text(rng, PROMPT, first=8), text(rng, 200), text(rng, 100)

    def turns(server: LlamaServer) -> list[Answer]:
        said = [server.complete(known)]
        if server is not stock:
            wait_stored(sidecar, server, blocks_of(PROMPT))
        said.append(ask(server, [*known, *more], 0.5))
        said.append(server.complete([*known, *more, *last]))
        said.append(server.complete([*known, *more, *last, 7]))
        return said

    stock = start(*options)
    wanted = turns(stock)
    stock.kill()
    tiered = start(*options, sidecar=sidecar)
    assert turns(tiered) == wanted
    settled(sidecar, tiered)
    assert stored(sidecar) == blocks_of(PROMPT)
    tiered.kill()
    tiered = start(*options, sidecar=sidecar)
    assert tiered.complete([*known, *more, *last]).cached == PROMPT


STATES = {"gemma3": range(6), "lfm2": (2, 5)}  # and layers with attention


@pytest.mark.parametrize("arch", STATES)
def test_windows_and_states_of_another_scale_are_not_stored(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, tmp_path: Path, arch: str
) -> None:
    adapter = make_adapter(tmp_path / "adapter.gguf", arch=arch, layers=STATES[arch])
    options = (f"{arch}-tiny", "-fa", "on", "-np", "1", "-c", "4096", "--lora", str(adapter))
    known, more, last = text(rng, 700, first=8), text(rng, 200), text(rng, 100)
    resident = start(*options)
    first = resident.complete(known)
    hit = resident.complete([*known, *more, *last])
    assert hit.cached > 600
    resident.kill()
    resident = start(*options)
    assert all_changed(resident, known, 0.5) != first
    resident.kill()

    tiered = start(*options, sidecar=sidecar)
    assert tiered.complete(known) == first
    settled(sidecar, tiered)
    before = stored(sidecar)
    all_changed(tiered, [*known, *more], 0.5)
    tiered.complete([*known, *more, *last])
    settled(sidecar, tiered)
    assert stored(sidecar) == before
    tiered.kill()
    tiered = start(*options, sidecar=sidecar)
    assert tiered.complete([*known, *more, *last]) == hit
    assert report(sidecar, tiered, 1).restored_tokens == hit.cached


def test_the_scale_that_its_requests_have_at_first_is_the_one_in_the_name(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, adapters: dict[str, Path]
) -> None:
    prompt = text(rng, PROMPT)
    tiered = start(*filled(WAYS_TO_LOAD["applied"], adapters), sidecar=sidecar)
    tiered.scale_adapter(0.5)
    tiered.complete(prompt)
    wait_stored(sidecar, tiered, blocks_of(PROMPT))
    tiered.kill()
    for scale, cached in ((1.0, 0), (0.5, PROMPT)):
        server = start(*OPTIONS, "--lora-scaled", f"{adapters['one']}:{scale}", sidecar=sidecar)
        assert server.complete([*prompt, 5]).cached == cached
        server.kill()


def test_a_request_that_says_the_same_scale_is_as_one_that_says_none(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, adapters: dict[str, Path]
) -> None:
    options = filled(WAYS_TO_LOAD["applied"], adapters)
    prompt = text(rng, PROMPT)
    tiered = start(*options, sidecar=sidecar)
    one_changed(tiered, prompt, 1.0)
    wait_stored(sidecar, tiered, blocks_of(PROMPT))
    tiered.kill()
    tiered = start(*options, sidecar=sidecar)
    assert one_changed(tiered, [*prompt, 5], 1.0).cached == PROMPT


def test_slots_with_other_scales_stay_apart(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, adapters: dict[str, Path]
) -> None:
    options = (*WAYS["two slots"], "-c", "4096", "--lora", str(adapters["one"]))
    prompts = [text(rng, PROMPT, first=first) for first in (5, 6)]
    tiered = start(*options, sidecar=sidecar)
    tiered.complete(prompts[0], id_slot=0)
    tiered.complete(prompts[1], id_slot=1, lora=[{"id": 0, "scale": 0.5}])
    wait_stored(sidecar, tiered, blocks_of(PROMPT))
    settled(sidecar, tiered)
    assert stored(sidecar) == blocks_of(PROMPT)
    tiered.kill()
    tiered = start(*options, sidecar=sidecar)
    assert [tiered.complete(one, id_slot=1).cached for one in prompts] == [PROMPT - 1, 0]


def test_an_adapter_that_waits_for_tokens_is_refused_by_name(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, tmp_path: Path
) -> None:
    """It is applied from them on (aLoRA): its scale says nothing of a row."""
    adapter = make_adapter(tmp_path / "adapter.gguf", invocation=INVOCATION)
    options = (*OPTIONS, "--lora", str(adapter))
    known = text(rng, PROMPT)
    called = [*known[:200], *INVOCATION, *known[200:]]

    def turns(server: LlamaServer) -> list[Answer]:
        return [server.complete(known), server.complete(called), server.complete([*called, 5])]

    stock = start(*options)
    wanted = turns(stock)
    stock.kill()
    tiered = start(*options, sidecar=sidecar)
    assert turns(tiered) == wanted
    wait_reason(sidecar, tiered, "LoRA adapters that are applied from some tokens on")
    assert stored(sidecar) == 0
